"""Roles of remote tensors: weights, gradients and optimizer state, with names of weights. For plans and reports."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gt.client.device.remote_tensor import RemoteTensor, is_leaf
from gt.client.groups.placement import governing
from gt.config.schema import Rule

Row = tuple[int, str, str]  # id, kind, name


def names() -> dict[int, str]:
    """Identity of every parameter of a live module -> its name in the outermost module."""
    by_identity: dict[int, str] = {}
    for module in outermost():
        for name, parameter in module.named_parameters():
            by_identity.setdefault(id(parameter), name)
    return by_identity


def rules() -> dict[str, Rule | None]:
    """Name of every parameter of live modules that gt.signal.apply has placed -> its rule."""
    by_name: dict[str, Rule | None] = {}
    for module in outermost():
        by_name.update(governing(module))
    return by_name


def outermost() -> list[torch.nn.Module]:
    """Live modules that are inside no other module."""
    # By type(): isinstance() would ask an object for its __class__, which runs code of proxies
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def rows(optimizer: torch.optim.Optimizer, called: dict[int, str]) -> Iterator[Row]:
    """Rows of the tensors of an optimizer. called: identity of a parameter -> its name."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = called.get(id(parameter), "")
            yield from _row(parameter, "weights", name)
            yield from _row(parameter.grad, "gradients", name)
            for value in optimizer.state.get(parameter, {}).values():
                yield from _row(value, "optimizer", name)


def weights(called: dict[int, str]) -> Iterator[Row]:
    """Rows of all live parameters, frozen ones too. called: identity of a parameter -> its name."""
    for thing in gc.get_objects():
        if is_weight(thing):
            yield from _row(thing, "weights", called.get(id(thing), ""))


def frozen() -> Iterator[torch.Tensor]:
    """Parameters of live modules that need no gradient, which no optimizer names."""
    for module in outermost():
        for parameter in module.parameters():
            if not parameter.requires_grad:
                yield parameter


def weight(parameter: object, called: dict[int, str]) -> Iterator[Row]:
    """The row of a parameter, none for one that has ended. called: identity of a parameter -> its name."""
    return _row(parameter, "weights", called.get(id(parameter), ""))


def is_weight(o: object) -> bool:
    """True for a parameter, and for a remote leaf that requires a gradient."""
    if type(o) is RemoteTensor:  # nn.Parameter of one is one, with a mark
        return is_leaf(o) and (o.requires_grad or getattr(o, "_is_param", False))
    return issubclass(type(o), torch.nn.Parameter)


def gradients(called: dict[int, str]) -> Iterator[Row]:
    """Rows of the gradients of all live parameters, in an optimizer or not."""
    for thing in gc.get_objects():
        if type(thing) is RemoteTensor and is_weight(thing) and thing.grad is not None:
            yield from _row(thing.grad, "gradients", called.get(id(thing), ""))


def _row(tensor: object, kind: str, name: str) -> Iterator[Row]:
    if isinstance(tensor, RemoteTensor):
        yield tensor._ref.id, kind, name


@contextmanager
def after_steps(call: Callable[[torch.optim.Optimizer], None]) -> Iterator[None]:
    """Within this context, call a function after every step of any optimizer."""
    handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: call(optimizer))
    try:
        yield
    finally:
        handle.remove()
