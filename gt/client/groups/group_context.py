"""The signal group and micro-batch that this thread works on, and the context that enters a group.

Contexts nest and the innermost wins. The config says what a name means; nothing here knows it, and nothing here records ops.
"""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from typing import Any

import torch


class GroupStack(threading.local):
    """Group names entered in this thread, and which of them were entered inside a backward pass."""

    def __init__(self) -> None:
        self.names: list[str] = [""]
        self.in_backward: list[bool] = [False]
        self.micro = -1  # the micro-batch that is being worked on


stack = GroupStack()


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
