"""The pass that moves the optimizer's step on offloaded state up to where its gradients are final.

A step on the host runs beside the device (gt.worker.engine.torch.gpu.host_lane). A step on the device waits for its state,
which crosses the link both ways. Both can hide behind the backward pass of earlier layers. A fused step is cut into parts of
about `bucket` bytes of gradients. Each moves up behind the last write to its gradients or read of its parameters. What it
evicts follows it. A norm over all gradients, or a loss scale, keeps the step at the end. ZeRO-Offload (Ren et al., USENIX ATC
2021) leaves the device idle during the step; SuperOffload (Lian et al., 2025) overlaps both, and speculates besides.

Example; `h1` is the gradient for the layer before:

    before:  g2 = mm ...; h1 = mm d2 w2; g1 = mm h1 ...; host _fused_adamw_ [w1, w2] [g1, g2]
    after:   g2 = mm ...; h1 = mm d2 w2; host _fused_adamw_ [w2] [g2]; g1 = mm h1 ...; host _fused_adamw_ [w1] [g1]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

from gt.dispatcher.programs.passes.bucket_reductions import LIST_OPS, REDUCTIONS, ListOp, is_fused_step, names_only
from gt.dispatcher.programs.passes.context import PassContext
from gt.dispatcher.programs.recording import Code, Instruction, Recording
from gt.ir.dataflow import MemoryAccess, accesses
from gt.ir.instr import OFFLOAD

Memory = Hashable
MOVABLE = ("host_op", "restore")  # kinds that leave the device alone; `restore` begins to bring a tensor back


def advance_host_steps(recording: Recording, context: PassContext) -> Recording:
    """The recording with steps on offloaded state moved up, unless a schedule has placed them."""
    if context.scheduled or not any(row.kind in OFFLOAD for rows in recording.code.values() for row in rows):
        return recording
    code: Code = {worker: _advanced(worker, rows, context) for worker, rows in recording.code.items()}
    return replace(recording, code=code) if context.advanced else recording


def _is_step(row: Instruction, memory: Sequence[Memory], evicted: Set[Memory]) -> bool:
    """True for a fused step on the host, or on the device with state that is evicted."""
    return is_fused_step(row) and (row.kind == "host_op" or not evicted.isdisjoint(memory))


def _is_list_op(row: Instruction) -> bool:
    """True for an op on the device that counts steps, for example: a step pulls it up, where what it uses permits it."""
    return row.kind == "op" and row.define.payload["op"].startswith(LIST_OPS) and not row.makes


@dataclass(slots=True, eq=False)
class _Movable:
    """A row that may move up. before: the last row before it that stays; behind: the last of these that it depends on.

    after: lines of movable rows, and so many of each that it depends on. then: rows that evict what it has used, and follow it.
    """

    row: Instruction
    step: bool
    before: int
    behind: int
    after: list[tuple[_Line, int]]
    then: list[_Movable] = field(default_factory=list)
    placed: bool = False

    def waits_for(self) -> Iterator[_Movable]:
        """Rows without a place that have to come before it."""
        for line, count in self.after:
            yield from line.waiting(count)

    def around(self) -> Iterator[_Movable | Instruction]:
        """The row between those that it depends on and those that follow it."""
        yield from self.waits_for()
        yield self.row
        yield from self.then


@dataclass(slots=True, eq=False)
class _Line:
    """Movable rows that use one memory in one way, in order. All rows that depend on them share it, so that it may be long.

    behind: the largest of theirs. first: all rows before this one have a place.
    """

    rows: list[_Movable] = field(default_factory=list)
    behind: int = -1
    first: int = 0

    def add(self, movable: _Movable) -> None:
        self.rows.append(movable)
        self.behind = max(self.behind, movable.behind)

    def waiting(self, count: int) -> Iterator[_Movable]:
        """Those of the first `count` rows that have no place when their turn comes."""
        n = self.first
        while n < count:
            if not self.rows[n].placed:
                yield self.rows[n]
            elif self.first == n:
                self.first = n + 1
            n = max(n + 1, self.first)


@dataclass(slots=True)
class _Uses:
    """The rows so far that use one memory: the last that stay, by number, and movable ones."""

    read: int = -1
    written: int = -1
    readers: _Line = field(default_factory=_Line)
    writers: _Line = field(default_factory=_Line)


def _advanced(worker: int, rows: list[Instruction], context: PassContext) -> list[Instruction]:
    # 1. The row that each step may follow, and thereby the order of steps.
    movables = _movables(worker, rows, context)
    ready: dict[int, list[_Movable]] = defaultdict(list)  # row -> steps that may follow it
    ends = _bucket_ends(rows)
    for movable in (m for of_row in movables.values() for m in of_row if m.step):
        ready[ends[movable.behind] if movable.behind >= 0 else -1].append(movable)
    steps = [movable for n in sorted(ready) for movable in ready[n]]
    early = sum(n < movable.before for n, of_row in ready.items() for movable in of_row)
    if not early:
        return rows
    context.advanced[worker] = [len(steps), early]

    # 2. The rows again. A movable row is placed where it is ready, or at its old place, whichever comes first. Row -1 stands
    #    for the start: steps on gradients from before the recording.
    following = dict(pairwise(steps))
    order: list[Instruction] = []
    for n in range(-1, len(rows)):
        if n in movables:
            for movable in movables[n]:  # here at the latest
                order += _placed(movable)
        elif n >= 0:
            order.append(rows[n])
        for movable in ready.get(n, ()):
            needed = following[movable].waits_for() if movable in following else ()
            for restore in (m for m in needed if m.row.kind == "restore" and m.behind <= n):
                order += _placed(restore)  # state comes back while this step is computed
            order += _placed(movable)
    return order


def _placed(movable: _Movable) -> list[Instruction]:
    """A row that has no place yet, behind movable ones that it depends on."""
    # Without recursion: each of thousands of rows may depend on the one before.
    order: list[Instruction] = []
    under_way: list[Iterator[_Movable | Instruction]] = [iter((movable,))]
    while under_way:
        item = next(under_way[-1], None)
        if item is None:
            under_way.pop()
        elif isinstance(item, Instruction):
            order.append(item)
        elif not item.placed:
            item.placed = True
            under_way.append(item.around())
    return order


def _movables(worker: int, rows: Sequence[Instruction], context: PassContext) -> dict[int, list[_Movable]]:
    """By number, the rows that may move, steps in parts, and what they depend on."""
    uses: dict[Memory, _Uses] = defaultdict(_Uses)
    movables: dict[int, list[_Movable]] = {}
    before = -1
    accessed = accesses(rows)
    read = _memory(accessed, context)
    evicted = {where for row, memory in zip(rows, read) if row.kind == "evict" for where in memory}
    for n, (row, access, memory) in enumerate(zip(rows, accessed, read)):
        changed = frozenset(row.define.effects.writes)
        step = _is_step(row, memory, evicted)
        if row.kind == "evict" and (evict := _following(row, memory[0], before, uses)) is not None:
            movables[n] = [evict]
            uses[memory[0]].writers.add(evict)
            continue
        if not (step or row.kind in MOVABLE or _is_list_op(row)):
            before = n
            for i in (*memory, *access.makes):
                uses[i].read = n
            for i in (*(memory[k] for k in changed), *access.makes):
                uses[i].written = n
            continue
        parts = _parts(worker, row, memory, uses, context) if step else [(row, [*range(len(memory))])]
        movables[n] = [_Movable(part, step, before, *_dependences(memory, k, changed, uses)) for part, k in parts]
        for movable, (_, numbers) in zip(movables[n], parts, strict=True):
            for k in numbers:
                (uses[memory[k]].writers if k in changed else uses[memory[k]].readers).add(movable)
            for i in access.makes:
                uses[i].writers.add(movable)
    return movables


def _memory(accessed: Sequence[MemoryAccess], context: PassContext) -> list[list[Memory]]:
    """The memory that each row reads."""
    # Tensors from before that share a storage are one memory, which the rows themselves do not show.
    homes = context.homes
    return [[("before", homes[i]) if i in homes else i for i in access.reads] for access in accessed]


def _following(row: Instruction, memory: Memory, before: int, uses: Mapping[Memory, _Uses]) -> _Movable | None:
    """The eviction of memory that a step on the device has used last, as a row that follows the step; None for another one."""
    behind, after = _dependences([memory], [0], (0,), uses)
    used = uses[memory].readers.rows or uses[memory].writers.rows
    last = used[-1] if used else None
    if last is None or not last.step or last.row.kind == "host_op" or uses[memory].read > last.before:
        return None
    evict = _Movable(row, False, before, behind, after)
    last.then.append(evict)
    return evict


def _dependences(
    memory: Sequence[Memory], numbers: Iterable[int], changed: Container[int], uses: Mapping[Memory, _Uses]
) -> tuple[int, list[tuple[_Line, int]]]:
    """`behind` and `after` of a row. numbers: of its tensors, whose memory `memory` has; changed: of those that it changes."""
    # A write waits for all earlier uses of its memory, a read for earlier writes only.
    after: list[tuple[_Line, int]] = []
    behind = -1
    for k in numbers:
        used = uses[memory[k]]
        behind = max(behind, used.read if k in changed else used.written)
        for line in (used.writers, used.readers) if k in changed else (used.writers,):
            if line.rows:
                after.append((line, len(line.rows)))
                behind = max(behind, line.behind)
    return behind, after


def _parts(
    worker: int, row: Instruction, memory: Sequence[Memory], uses: Mapping[Memory, _Uses], context: PassContext
) -> list[tuple[Instruction, list[int]]]:
    """A step in parts of about `bucket` bytes of gradients, in the order in which these are final; the tensors of each."""
    # An index is a parameter with its gradient and state. Indices that share memory depend on one another, so no cut is legal.
    listed, changed = ListOp.of(row), frozenset(row.define.effects.writes)
    if listed is None:
        return [(row, [*range(len(memory))])]
    tensors = [listed.tensors(index) for index in range(listed.count)]
    if len({memory[k] for of_index in tensors for k in of_index}) < sum(map(len, tensors)):  # two indices share memory
        return [(row, [*range(len(memory))])]
    # A part ends when it has `bucket` bytes, but never between indices that are ready at the same row. There a second part
    # would not begin earlier.
    behind = [_dependences(memory, [*of_index, *listed.beside], changed, uses)[0] for of_index in tensors]
    parts: list[list[int]] = [[]]
    nbytes = 0
    for index in sorted(range(listed.count), key=lambda index: (behind[index], index)):
        if nbytes >= context.bucket and behind[index] > behind[parts[-1][-1]]:
            parts.append([])
            nbytes = 0
        parts[-1].append(index)
        shape, itemsize = context.older(worker, row.operands[tensors[index][0]]) or ((), 0)
        nbytes += prod(shape) * itemsize
    if len(parts) == 1:
        return [(row, [*range(len(memory))])]
    taken = [sorted(part) for part in parts]
    return [(listed.over(p, context.define), [*listed.beside, *(k for index in p for k in tensors[index])]) for p in taken]


def _bucket_ends(rows: Sequence[Instruction]) -> list[int]:
    """By row, the end of the reductions that it is among, which may be done as one."""
    ends = [*range(len(rows))]
    for n in range(len(rows) - 2, -1, -1):
        if rows[n].kind in REDUCTIONS and (rows[n + 1].kind in REDUCTIONS or names_only(rows[n + 1])):
            ends[n] = ends[n + 1]
    return ends
