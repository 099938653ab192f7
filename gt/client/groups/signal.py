"""`gt.signal`: signal groups in the user's code, transfers between meshes, and micro-batches.

The config says what the name of a group means; nothing here knows it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from gt.client import current_session
from gt.client.groups.group_context import context as context  # a public name of gt.signal
from gt.client.groups.group_context import stack
from gt.client.trace.custom_ops import Move
from gt.wire.signals import uninterrupted

log = logging.getLogger("gt")


class _Entered(threading.local):
    """Contexts that `enter` has entered on this thread."""

    def __init__(self) -> None:
        self.open: list[tuple[str, context]] = []


_entered = _Entered()


def move(x: torch.Tensor) -> torch.Tensor:
    """Transfer a remote tensor to the mesh to which the current group `A_to_B` leads. Its gradient is transferred back.

    Returns a tensor of the same shape and dtype. TypeError for a tensor that is not remote.
    """
    return Move.apply(x)


def enter(name: str, backward: str | None = None) -> None:
    """Enter a signal group without `with`, until `exit(name)`. Arguments as for `context`."""
    entered = context(name, backward=backward)
    with uninterrupted():  # entered and noted, or neither
        entered.__enter__()
        _entered.open.append((name, entered))


def exit(name: str) -> None:
    """Leave the group that `enter` entered last. ValueError if that is another one, or none is open."""
    opened = _entered.open[-1][0] if _entered.open else None
    if opened != name:
        have = "no group is open: gt.signal.enter opens one"
        if opened is not None:
            have = f"the group entered last is {opened!r}: leave groups in the reverse order"
        raise ValueError(f"gt.signal.exit({name!r}), but {have}")
    with uninterrupted():
        _entered.open.pop()[1].leave()


def tensor(x: torch.Tensor, name: str, backward: str | None = None) -> torch.Tensor:
    """The tensor as an activation of a signal group: on its workers, split as the group splits what enters.

    Returns a tensor of the same shape and dtype; its gradient is transferred back. TypeError for a tensor that is not remote.
    """
    with context(name, backward=backward):
        return move(x)


def groups() -> list[str]:
    """Names of the config's signal groups, in its order. Connects, if there is no session."""
    return list(current_session.current().session.groups)


def apply(model: torch.nn.Module, rules: Any = None) -> dict:
    """Run the forward of every module whose name matches a pattern in that pattern's signal group.

    rules: {pattern: group} or {pattern: {"group": ..., "parts": ...}}, where parts is the number of weights fused in one;
    None for the `modules:` of the session's config. A group may be a suffix such as `_colpar`, or a list of groups, over
    which the modules are divided. A second call replaces the first. Returns name of a module -> its rule.
    ConfigError for a pattern that matches no module, TypeError for a model that is no module.
    """
    from gt.client.groups import placement
    from gt.config.load import load
    from gt.config.schema import DATA_PARALLEL

    if rules is None:
        current_session.current()
        config = load(*current_session.Current.config)
        rules = config.modules
        if not rules and set(config.groups) - {DATA_PARALLEL}:  # where data parallelism alone is wanted, no rule is
            log.warning("gt.signal.apply(model) places no module: %s has no rules under gt: modules:", config.path)
    return placement.apply(model, rules, context)


def balance(modules: Any, stages: int, example: Any) -> list[tuple[int, int]]:
    """Divide modules, which are called one after the other, into `stages` contiguous runs of about equal cost.

    example: the first module's input, a tensor or a tuple of tensors, of which only shapes and dtypes matter. Costs are flops
    of the forward pass on meta tensors. Returns one (start, stop) per stage. ValueError for fewer modules than stages.
    """
    from gt.client.groups import placement

    return placement.balance(modules, stages, example)


# ---- micro-batches


def microbatches(batch: Any, n: int) -> Iterator[Any]:
    """Iterate over n equal parts of `batch` along dim 0, whose ops a schedule can run as a pipeline.

    batch: a tensor, or nested tuples, lists and dicts with tensors; other values are the same in each part. Ops between two
    parts, and ops that differentiate them, belong to that micro-batch. ValueError if a tensor's first dim is no multiple of
    n, or if there is no tensor.
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
    """Yield parts, each as the current micro-batch of this thread."""
    # A generator: ops of the loop's body are recorded while it is suspended at the yield, and belong to this part
    outer = stack.micro
    try:
        for number, part in enumerate(parts):
            stack.micro = number
            stack.scope()
            yield part
    finally:
        # An assignment, which no signal interrupts. The next op asks for its scope, as the last one was in a micro-batch
        stack.micro = outer
