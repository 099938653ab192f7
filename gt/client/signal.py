"""Signal groups: which part of the program runs where, named in the user's code.

Contexts nest and the innermost wins. What a name means is the config's business; nothing here knows it.
"""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from typing import Any

import torch


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
    from gt.client.gtops import Move

    return Move.apply(x)


def groups() -> list[str]:
    """Names of the config's signal groups, in its order."""
    from gt.client import runtime

    return list(runtime.current().session.groups)


def apply(model: torch.nn.Module, rules: Any = None) -> dict:
    """Run the modules whose names match a pattern in that pattern's group: {pattern: group}, or the config's `modules:`.

    See gt.client.placement.apply.
    """
    from gt.client import placement, runtime
    from gt.config.load import load

    if rules is None:
        runtime.current()
        rules = load(*runtime.Live.config).modules
    return placement.apply(model, rules, context)


def balance(modules: Any, stages: int, example: Any) -> list[tuple[int, int]]:
    """Cut a list of modules into `stages` runs of about equal cost; see gt.client.placement.balance."""
    from gt.client import placement

    return placement.balance(modules, stages, example)
