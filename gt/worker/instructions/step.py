"""Types of bound instructions: a step, its row in a program, and the table of steps by definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

Step = Callable[[list, int], None]  # (stream, place of the first operand)
Row = tuple[int, Step]  # place of an instruction in a program's stream, and its step
StepTable = dict[int, tuple[Step, int]]  # by number of the definition: its step, and how many numbers it takes in a stream


class Steps(Protocol):
    """A table of steps that may put others around them."""

    def __getitem__(self, number: int, /) -> tuple[Step, int]: ...


class StepOfRows:
    """A step that stands for several rows, or for none. separable: the rows can be executed one by one instead."""

    separable = False

    def __init__(self, rows: Sequence[Row], call: Step) -> None:
        self.rows, self._call = rows, call

    def __call__(self, code: list, at: int) -> None:
        self._call(code, at)
