"""Signal groups: which part of the program runs where, named in the user's code; and which micro-batch it works on.

Contexts nest and the innermost wins. What a name means is the config's business; nothing here knows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from gt.client import current_session
from gt.client.groups.group_context import context, stack
from gt.client.trace.custom_ops import Move


def move(x: torch.Tensor) -> torch.Tensor:
    """Transfer now to the mesh that the current group leads to (`A_to_B`); the gradient comes back the same way."""
    return Move.apply(x)


def groups() -> list[str]:
    """Names of the config's signal groups, in its order."""
    return list(current_session.current().session.groups)


def apply(model: torch.nn.Module, rules: Any = None) -> dict:
    """Run the modules whose names match a pattern in that pattern's group: {pattern: group}, or the config's `modules:`.

    See gt.client.groups.placement.apply.
    """
    from gt.client.groups import placement
    from gt.config.load import load

    if rules is None:
        current_session.current()
        rules = load(*current_session.Current.config).modules
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
