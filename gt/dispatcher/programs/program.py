"""One program: definitions of a captured step for each worker, and the tensors that a launch reads, writes and makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, is_

from gt.dispatcher.fairness.time_slices import Leavings
from gt.dispatcher.planning.host_copies import LaunchedCopies
from gt.dispatcher.state.failures import Planned
from gt.dispatcher.state.records import Cause
from gt.dispatcher.state.tensors import LaunchCount, Storage, Tensor
from gt.ir.instr import Define
from gt.ir.layout import Layout

_LAYOUT = attrgetter("layout")


class RecordedLayouts:
    """Tensors, and the layouts that they had when a program was recorded."""

    def __init__(self, placed: Iterable[Tensor]) -> None:
        self.tensors = list(placed)
        self.layouts: list[Layout] = list(map(_LAYOUT, self.tensors))

    def hold(self) -> bool:
        """True if each tensor has its recorded layout, at the cost of a comparison for each."""
        return all(map(is_, map(_LAYOUT, self.tensors), self.layouts))

    def changed(self) -> Iterator[tuple[Tensor, Layout]]:
        """Tensors whose layout is another one now, and their recorded layouts. To move one may move those behind it."""
        return ((t, layout) for t, layout in zip(self.tensors, self.layouts, strict=True) if t.layout is not layout)


@dataclass(slots=True)
class Program:
    """code: its definitions by worker, in order. inputs, results: tensors of it, and their layouts when it was recorded.

    compared: the table's `relaid` at which all layouts were as recorded. A launch refers to its containers as they are, and
    nothing changes them: the cost of a launch does not grow with the number of tensors.
    """

    uses: list[Define]  # definitions that its code names: they live as long as it
    journal: list[Planned]
    inputs: RecordedLayouts
    results: RecordedLayouts
    reads: list[Storage]
    writes: list[Storage]
    makes: list[Storage]
    constants: list[tuple[list[int], int]]
    size: int
    host_copies: LaunchedCopies
    code: dict[int, list[Define]] = field(default_factory=dict)
    numbers: dict[int, list[int]] = field(default_factory=dict)  # numbers of its definitions, by worker
    seconds: dict[int, float] = field(default_factory=dict)  # that it takes on each worker, by estimate
    count: LaunchCount = field(default_factory=LaunchCount)
    compared: int = -1
    order: dict = field(default_factory=dict)  # the report of its schedule
    failed: Cause | None = None  # a worker of it is lost: a process that takes its place knows nothing of it

    def define(self, code: dict[int, list[Define]]) -> None:
        """Give it its definitions."""
        self.code = code
        self.numbers = {worker: [define.number for define in defines] for worker, defines in code.items()}

    def changes(self) -> Iterable[Storage]:
        """Storages that a launch writes or makes."""
        return dict.fromkeys((*self.writes, *self.makes))

    def leave(self, leavings: Leavings, forget: bool = False) -> None:
        """Nothing names it any more. forget: storages live on, and forget it."""
        emptied = partial(Storage.forget, program=self.count) if forget else None
        for part in (self.writes, self.makes):
            leavings.add(part, emptied)
        # A trace may hold the journal, as that of a replay: a copy is emptied
        for rest in ([*self.journal], self.reads, self.inputs.tensors, self.results.tensors, self.uses):
            leavings.add(rest)
