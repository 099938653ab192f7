"""A recording: every instruction that workers were sent while a step was captured, and the ops the instructions belong to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gt.dispatcher.fairness.time_slices import Leavings
from gt.dispatcher.state.failures import Planned, Sealed
from gt.dispatcher.state.tensors import Storage, Tensor
from gt.ir.dataflow import decode
from gt.ir.instr import Define
from gt.ir.layout import Layout

MAX_INSTRUCTIONS_PER_SESSION = 1 << 22  # kept in programs, and while one is recorded


@dataclass(slots=True, eq=False)
class Instruction:
    """One instruction of a worker: the op it belongs to, its definition and its operands.

    action: the action of a pipeline schedule that it is part of, "" for none. stands_for: the instruction of the recording
    before a pass that this one replaces, repeats or is a part of.
    """

    seq: int
    define: Define
    operands: list
    action: str = ""
    stands_for: Instruction | None = None

    @property
    def reads(self) -> list[int]:
        """Tensors that it reads, or changes in place."""
        return self.operands[self.define.effects.reads]

    @property
    def makes(self) -> list[int]:
        """Tensors that it defines."""
        return self.operands[self.define.effects.makes]

    @property
    def kind(self) -> str:
        return self.define.kind


Code = dict[int, list[Instruction]]  # by worker


@dataclass(slots=True)
class Recording:
    """The instructions planned and sent since RECORD. A pass over a captured step makes another one of it."""

    slot: int
    inputs: list[Tensor]
    before: dict[int, Layout | None]  # layout of every tensor that was alive at the start
    first: bool = False  # no earlier call has shown the layouts of its inputs
    journal: list[Planned] = field(default_factory=list)
    op_layouts: dict[int, Layout | None] = field(default_factory=dict)  # number of an op -> layout of its newest result
    code: Code = field(default_factory=lambda: defaultdict(list))
    size: int = 0  # instructions
    room: int = MAX_INSTRUCTIONS_PER_SESSION  # for instructions
    constants: list[tuple[list[int], int]] = field(default_factory=list)  # uploads kept for it: workers and name
    defines: dict[int, Define] = field(default_factory=dict)

    used_layouts: dict[int, Layout] = field(default_factory=dict)  # input without a layout -> that of the first op on it
    host_copies: dict[Storage, int] = field(default_factory=dict)  # tensors of which it uses host copies from before
    mark: object = field(default_factory=object)  # stands for it where it must not be kept alive
    renewed: bool = False  # a lost tensor got new memory, as it would at each replay
    late: bool = False  # an op on a tensor from before was put off: a replay would not do it
    # data of an upload, by identity -> the data, which so stays the only object of this identity, and the input that it is of
    _sources: dict[int, tuple[Any, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for n, tensor in enumerate(self.inputs):
            recipe = tensor.storage.recipe
            if recipe and (data := recipe[0].data) is not None:
                self._sources[id(data)] = data, n

    def sealed(self) -> list[Planned]:
        """The journal as that of a program, whose ops are numbered from 0."""
        return [
            Sealed(n, row.known, row.origin, (), (), (), self.op_layouts.get(row.seq)) for n, row in enumerate(self.journal)
        ]

    def defers(self, tensors: Sequence[Tensor]) -> bool:
        """True if an op may be put off: not if a tensor was alive before. But the first recording shows where to place it."""
        older = any(i in self.before for t in tensors for i in t.storage.tensors)
        self.late = self.late or (older and self.first)
        return self.first or not older

    def note_upload(self, data: Any, layout: Layout) -> None:
        """An upload's bytes are sent with this layout. An input of the same bytes gets it in later calls."""
        # The same object, not equal bytes: `_sources` keeps the input's data alive, so no other object gets its identity.
        if id(data) in self._sources:
            self.used_layouts.setdefault(self._sources[id(data)][1], layout)

    def append(self, worker: int, base: int, code: Sequence) -> None:
        """Keep the instructions that are sent to a worker, but for frees: sealing decides where a value dies."""
        if self.size > self.room:  # no program can be made of it: `obstacle` says so, and memory is not spent on it
            self.code.clear()
            return
        rows = self.code[worker]
        for at, define, operands in decode(code, self.defines.__getitem__):
            if define is not None:
                rows.append(Instruction(base + code[at + 1], define, list(operands)))
                self.size += 1

    def leave(self, leavings: Leavings) -> None:
        """Nobody needs it any more, but for `constants`, which a program may have."""
        for part in (self.journal, self.op_layouts, self.before, self.defines, *self.code.values()):
            leavings.add(part)

    def keep(self, workers: list[int], name: int) -> None:
        self.constants.append((workers, name))
