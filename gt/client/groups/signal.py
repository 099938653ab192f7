"""Signal groups: which part of the program runs where, named in the user's code; and which micro-batch it works on.

Contexts nest and the innermost wins. What a name means is the config's business; nothing here knows it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ContextDecorator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


class _Stack(threading.local):
    """Group names entered in this thread, and which of them were entered inside a backward pass."""

    def __init__(self) -> None:
        self.names: list[str] = [""]
        self.in_backward: list[bool] = [False]
        self.micro = -1  # the micro-batch that is being worked on


stack = _Stack()


class context(ContextDecorator):
    """`with gt.signal.context("pp_stage0"):`, or `@gt.signal.context("pp_stage0")` on a function.

    parts: how many weights are fused in one there (3 for q, k and v); without it the planner looks for their split.
    """

    def __init__(self, name: str, parts: int = 1) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"a signal group is a non-empty string, got {name!r}")
        if "/" in name or "#" in name:
            raise ValueError(f"a signal group's name has no '/' or '#', got {name!r}")
        self.name = f"{name}#{parts}" if parts > 1 else name  # as the dispatcher reads it

    def __enter__(self) -> context:
        stack.in_backward.append(torch._C._current_autograd_node() is not None)
        outer = stack.names[-1]
        stack.names.append(f"{outer}/{self.name}" if outer else self.name)
        return self

    def __exit__(self, *error: Any) -> None:
        stack.names.pop()
        stack.in_backward.pop()


def move(x: torch.Tensor) -> torch.Tensor:
    """Transfer now to the mesh that the current group leads to (`A_to_B`); the gradient comes back the same way."""
    from gt.client.trace.custom_ops import Move

    return Move.apply(x)


def groups() -> list[str]:
    """Names of the config's signal groups, in its order."""
    from gt.client import current_session

    return list(current_session.current().session.groups)


def apply(model: torch.nn.Module, rules: Any = None) -> dict:
    """Run the modules whose names match a pattern in that pattern's group: {pattern: group}, or the config's `modules:`.

    See gt.client.groups.placement.apply.
    """
    from gt.client import current_session
    from gt.client.groups import placement
    from gt.config.load import load

    if rules is None:
        current_session.current()
        rules = load(*current_session.Live.config).modules
    return placement.apply(model, rules, context)


def balance(modules: Any, stages: int, example: Any) -> list[tuple[int, int]]:
    """Cut a list of modules into `stages` runs of about equal cost; see gt.client.groups.placement.balance."""
    from gt.client.groups import placement

    return placement.balance(modules, stages, example)


# ---- micro-batches


def microbatches(batch: Any, n: int) -> Iterator[Any]:
    """`batch` (a tensor, or tuples, lists and dicts of them) in n equal parts along dim 0, one after the other.

    ValueError if a tensor's first dim is no multiple of n, or if there is no tensor.
    """
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"a batch cannot be cut into {n!r} micro-batches: want a whole number of at least 1")
    leaves, tree = tree_flatten(batch)
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise ValueError(f"there is no tensor in the batch, which is {type(batch).__name__}: nothing can be cut")
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (leaf.dim() == 0 or leaf.shape[0] % n):
            rows = leaf.shape[0] if leaf.dim() else "no"
            raise ValueError(f"{rows} rows cannot be cut into {n} equal micro-batches: use a batch of a multiple of {n}")
    parts = [leaf.chunk(n) if isinstance(leaf, torch.Tensor) else [leaf] * n for leaf in leaves]
    return _marked(tree_unflatten(list(part), tree) for part in zip(*parts, strict=True))


def _marked(parts: Iterator[Any]) -> Iterator[Any]:
    """Ops between one part and the next belong to that micro-batch, and so do those that differentiate them."""
    outer = stack.micro
    try:
        for n, part in enumerate(parts):
            stack.micro = n
            yield part
    finally:
        stack.micro = outer
