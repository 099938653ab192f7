"""Which remote tensors are weights, gradients and an optimizer's, and what weights are called: for plans and reports."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gt.client.device.remote_tensor import RemoteTensor
from gt.client.groups.placement import governing
from gt.config.schema import Rule

Row = tuple[int, str, str]  # id, kind, name


def names() -> dict[int, str]:
    """Name of every parameter of a living module, by identity, as the outermost module calls it."""
    found: dict[int, str] = {}
    for module in outermost():
        for name, parameter in module.named_parameters():
            found.setdefault(id(parameter), name)
    return found


def rules() -> dict[str, Rule | None]:
    """The rule of every parameter of living modules that gt.signal.apply has placed, by that name."""
    found: dict[str, Rule | None] = {}
    for module in outermost():
        found.update(governing(module))
    return found


def outermost() -> list[torch.nn.Module]:
    """Living modules that no other has."""
    modules = [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def rows(optimizer: torch.optim.Optimizer, called: dict[int, str]) -> Iterator[Row]:
    """Tensors that an optimizer knows."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = called.get(id(p), "")
            yield from _row(p, "weights", name)
            yield from _row(p.grad, "gradients", name)
            for value in optimizer.state.get(p, {}).values():
                yield from _row(value, "optimizer", name)


def weights(called: dict[int, str]) -> Iterator[Row]:
    """Parameters of living modules."""
    for o in gc.get_objects():
        if issubclass(type(o), torch.nn.Parameter) or (type(o) is RemoteTensor and o.is_leaf and o.requires_grad):
            yield from _row(o, "weights", called.get(id(o), ""))


def _row(tensor: object, kind: str, name: str) -> Iterator[Row]:
    if isinstance(tensor, RemoteTensor):
        yield tensor._ref.id, kind, name


@contextmanager
def after_steps(call: Callable[[torch.optim.Optimizer], None]) -> Iterator[None]:
    """Have it called after every step of any optimizer."""
    handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: call(optimizer))
    try:
        yield
    finally:
        handle.remove()
