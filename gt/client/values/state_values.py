"""Values of small state that captured calls read in Python, such as a flag or a counter among a module's buffers.

A value is fetched once, and known until something writes its memory. The op stream tells of each write: an op names the
tensors that it writes, and of a program it is known which memory its replays write. After a replay that counts, the next value
is computed here, from the ops on small tensors that it recorded. Where this process is not sure, the next read waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gt.ir.instr import FIRST, LAUNCH, client_length
from gt.ir.template import Template

MAX_STATE_BYTES = 4 << 10  # of a value; larger ones take longer to copy than a read saves
MAX_STATE_VALUES = 64  # of one session
MAX_NAMES = 1 << 12  # of views of their memory
MAX_PENDING_REPLAYS = 1 << 10  # whose effects on values are not computed yet
_UNSURE = -1  # memory of a tensor that has ended


@dataclass(frozen=True, slots=True)
class ProgramWrites:
    """The memory that replays of one program write.

    memories: by the id of the tensor that has it. made: ids of the recorded call, whose tensors each replay makes anew.
    advances: id of a tensor -> its value after a replay, computed from values before it; None where these are not known.
    """

    memories: frozenset[int]
    made: range
    advances: Mapping[int, Callable[[Callable[[int], torch.Tensor | None]], torch.Tensor | None]]

    def writes(self, memory: int) -> bool:
        return memory in self.memories or memory in self.made


@dataclass(slots=True)
class StateValues:
    """The known values of one recorder, whose lock the caller holds. None: a value is asked for, and has not come yet.

    templates: the recorder's table; live: its references by id.
    """

    templates: Mapping[int, Template]
    live: Mapping[int, Any]
    programs: dict[int, ProgramWrites] = field(default_factory=dict)
    _values: dict[int, torch.Tensor | None] = field(default_factory=dict)  # by id
    _names: dict[int, int] = field(default_factory=dict)  # id of such a tensor, or of a later view -> its memory
    _since: int = 0  # ids from here on are in `_names`, or name other memory
    _followed: int = 0  # numbers of the recorder's buffer that are followed
    _pending: list[ProgramWrites] = field(default_factory=list)
    _touches: dict[int, tuple] = field(default_factory=dict)  # by template: numbers of a row, operands that it writes, views
    _doubts: tuple = ()  # interrupts and failures of the session so far

    def clear(self) -> None:
        """Any tensor may be changed now, or the table of templates starts again."""
        self._values.clear()
        self._names.clear()
        self._pending.clear()
        self._touches.clear()

    def of(self, number: int, code: list, doubts: tuple) -> torch.Tensor | None:
        """A tensor's value, which the caller does not change; None if it has to be fetched.

        code: the recorder's buffer. doubts: the session's interrupts and failures; each may have left out a write.
        """
        self._follow(code)
        if doubts != self._doubts:
            self.clear()
            self._doubts = doubts
        self._settle()
        return self._values.get(number)

    def ask(self, number: int, memory: int, newest: int, code: list) -> None:
        """A value is about to be fetched: what is written from now on may be in it, or not. newest: an id above all others."""
        self._follow(code)
        self._settle()
        if len(self._values) >= MAX_STATE_VALUES:
            self.clear()
        self._values[number], self._names[number], self._since = None, memory, newest
        self._followed = len(code)

    def note(self, number: int, value: torch.Tensor) -> None:
        """The value has come. It is kept unless something was written meanwhile."""
        if number in self._values:
            self._values[number] = value

    def handed_over(self, code: list) -> None:
        """These ops leave the buffer."""
        self._follow(code)
        self._followed = 0

    def _settle(self) -> None:
        """Compute the values after replays that count."""
        for writes in self._pending:
            after = {number: writes.advances[number](self._values.get) for number in writes.advances if number in self._values}
            for number, value in after.items():
                if value is None:
                    del self._values[number]
                else:
                    self._values[number] = value
        self._pending.clear()

    def _follow(self, code: list) -> None:
        at, self._followed = self._followed, len(code)
        while self._values and at < len(code):
            number = code[at]
            if number < FIRST:
                if number == LAUNCH:
                    self._launch(code[at + 1])
                at += client_length(code, at)
                continue
            length, writes, views = self._touches.get(number) or self._touches_of(number)
            for place in writes:
                self._end(self._memory(code[at + place]))
            for place, result in views:
                self._name(code[at + result], self._memory(code[at + place]))
            at += length

    def _touches_of(self, number: int) -> tuple:
        """Numbers of a template's rows; in a row the places of tensors that it writes, and pairs of those of base and view."""
        template = self.templates[number]
        outs = 2 + len(template.ins) + template.values
        made = [out for out in template.outs if out.kind in ("new", "view")]
        views = tuple((2 + out.of, outs + n) for n, out in enumerate(made) if out.kind == "view")
        touches = outs + template.results, tuple(2 + place for place in template.writes), views
        self._touches[number] = touches
        return touches

    def _memory(self, number: int) -> int:
        """The memory of a tensor. Of one that is newer than the values, and named none of theirs, any other number."""
        if (memory := self._names.get(number)) is not None:
            return memory
        if number >= self._since:
            return number
        reference = self.live.get(number)
        target = reference() if reference is not None else None
        return _UNSURE if target is None else target.memory

    def _name(self, view: int, memory: int) -> None:
        if memory == _UNSURE or len(self._names) > MAX_NAMES:
            self.clear()
        elif any(memory == self._names[number] for number in self._values):
            self._names[view] = memory

    def _end(self, memory: int) -> None:
        """This memory is written."""
        if memory == _UNSURE:
            self.clear()
        for number in [number for number in self._values if self._names[number] == memory]:
            del self._values[number]

    def _launch(self, program: int) -> None:
        writes = self.programs.get(program)
        if writes is None or len(self._pending) > MAX_PENDING_REPLAYS:
            self.clear()
            return
        written = [number for number in self._values if writes.writes(self._names[number])]
        for number in written:
            if number not in writes.advances or self._values[number] is None:
                del self._values[number]
        if any(number in self._values for number in written):
            self._pending.append(writes)
