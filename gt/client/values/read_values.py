"""Values that a program has just read, such as a loss: it reads them again without a wait.

`if not math.isfinite(loss.item())`, then `total += loss.item()`; or an index, which torch reads at each use. They are known for
a few ops, none of which writes to any tensor: which memory a write changes is not asked here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gt.ir.instr import FIRST, LAUNCH, client_length
from gt.ir.template import Template

MAX_BYTES = 4 << 10  # of a value; larger ones take longer to copy
MAX_NUMBERS = 1 << 10  # of the op stream that are followed, some 200 ops: more would cost what a wait does
MAX_VALUES = 64


class ReadValues:
    """The values that one recorder's program has read, by id. None: its value is asked for, and has not come yet.

    The caller holds the recorder's lock. code: its buffer.
    """

    def __init__(self, templates: Mapping[int, Template]) -> None:
        self.templates = templates
        self.answered = 0  # reads
        self._values: dict[int, torch.Tensor | None] = {}
        self._followed = 0  # numbers of the buffer that are followed
        self._numbers = 0  # that were followed since the newest read
        self._interrupts = 0  # interrupts of the session before these reads

    def __bool__(self) -> bool:
        return bool(self._values)

    def ask(self, number: int, code: list, interrupts: int) -> None:
        """A value is about to be fetched: what is written from now on may be in it, or not."""
        self._follow(code)
        if len(self._values) >= MAX_VALUES or interrupts != self._interrupts:
            self._values.clear()
        self._values[number] = None
        self._followed, self._numbers, self._interrupts = len(code), 0, interrupts

    def note(self, number: int, value: torch.Tensor) -> None:
        """The value has come. It is kept unless something was written meanwhile."""
        if number in self._values:
            self._values[number] = value

    def of(self, number: int, code: list, interrupts: int) -> torch.Tensor | None:
        """A value that was read and is the same now; None if this is not sure. An interrupt may have dropped a write."""
        if self._values.get(number) is None or interrupts != self._interrupts:
            return None
        self._follow(code)
        value = self._values.get(number)
        self.answered += value is not None
        return value

    def handed_over(self, code: list) -> None:
        """These ops leave the buffer."""
        self._follow(code)
        self._followed = 0

    def clear(self) -> None:
        """Any tensor may be changed now."""
        self._values.clear()

    def _follow(self, code: list) -> None:
        start, self._followed = self._followed, len(code)
        self._numbers += len(code) - start
        if self._values and (self._numbers > MAX_NUMBERS or self._writes(code, start)):
            self._values.clear()

    def _writes(self, code: list, at: int) -> bool:
        """True if an op from this place on writes, or is a program, which may write to any tensor."""
        while at < len(code):
            number = code[at]
            if number == LAUNCH:
                return True
            if number < FIRST:
                at += client_length(code, at)
                continue
            template = self.templates[number]
            if template.writes:
                return True
            at += 2 + len(template.ins) + template.values + template.results
        return False
