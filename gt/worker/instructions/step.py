"""Types of bound instructions: a step, its row in a program, and the table of steps by definition."""

from __future__ import annotations

from collections.abc import Callable

Step = Callable[[list, int], None]  # (stream, place of the first operand)
Row = tuple[int, Step]  # place of an instruction in a program's stream, and its step
StepTable = dict[int, tuple[Step, int]]  # by number of the definition: its step, and how many numbers it takes in a stream
