"""The pass that reduces gradients in buckets, as soon as they are complete, so that the rest of the backward pass hides it.

A step asks for a sum where it first needs it: behind the whole backward pass, one after the other. A worker overlaps transfers
with compute (gt.worker.program.overlap), so each reduction moves up behind the last instruction that touches its terms.
Several wait for one another until they fill a bucket, since each reduction has a fixed cost and ends a compiled region. The
config's `bucket` is its size. This is gradient bucketing as in DistributedDataParallel (Li et al., PyTorch
Distributed, VLDB 2020). Behind the last bucket there is only the optimizer: it is split, so that its step on other gradients
hides the bucket. A reduction is an all_reduce, or a reduce_scatter with the rows that name its pieces (ZeRO). Example:

    before:  g1 = mm ...; g0 = mm ...; h = mm ...; all_reduce g0; all_reduce g1; _fused_adamw_ [w0, w1] [g0, g1]
    after:   g1 = mm ...; g0 = mm ...; all_reduce g0; all_reduce g1; h = mm ...; _fused_adamw_ ...
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from gt.dispatcher.programs.passes.context import MakeDefinition, PassContext
from gt.dispatcher.programs.recording import Code, Instruction, Recording
from gt.ir.dataflow import MemoryAccess, accesses
from gt.ir.instr import OPS
from gt.ir.spec import DTYPES, Spec
from gt.ir.template import Chosen, T, from_wire, to_wire

REDUCTIONS = ("all_reduce", "reduce_scatter")
SCATTERED_SHARE = 8  # at most 1/8 of the terms' bytes wait for a reduce_scatter: ZeRO stages 2 and 3 are there to save memory
LIST_OPS = ("aten._fused_", "aten._foreach_")  # ops that do the same to each tensor of a list
FUSED_STEP = LIST_OPS[0]  # ops of which each index is a parameter with its gradient, the second list, and its state


def bucket_reductions(recording: Recording, context: PassContext) -> Recording:
    """The recording with its reductions moved up and in buckets, unless a schedule has placed them."""
    if context.scheduled or not any(row.kind in REDUCTIONS for rows in recording.code.values() for row in rows):
        return recording
    moved: Code = {worker: list(_moved(rows, context)) for worker, rows in recording.code.items()}
    return replace(recording, code={worker: _with_optimizer_split(rows, context) for worker, rows in moved.items()})


def names_only(row: Instruction) -> bool:
    """True for a row that only gives names to memory: an alias, or views."""
    effects = row.define.effects
    return bool(row.makes) and len(effects.views) == len(row.makes) and not effects.writes


def is_fused_step(row: Instruction) -> bool:
    """True for an optimizer's step on lists of parameters, on the device or in host memory."""
    return row.kind in OPS and row.define.payload["op"].startswith(FUSED_STEP) and not row.makes


# ---- the optimizer


def _with_optimizer_split(rows: Sequence[Instruction], context: PassContext) -> list[Instruction]:
    """Rows, with the list op that first needs the last bucket as two ops: over the tensors that do not, and the rest."""
    # late: the memory of the last run of reductions without another row between, which is the last bucket.
    memory = _touched(accesses(rows, shared=context.shared))
    late: set[int] = set()
    last = -1
    for n, row in enumerate(rows):
        if row.kind in REDUCTIONS:
            if n != last + 1:
                late = set()
            late.update(memory[n])
            last = n
    later = (n for n in range(last + 1, len(rows)) if not late.isdisjoint(memory[n]) and not names_only(rows[n]))
    at = next(later, None)
    if at is None:
        return [*rows]
    return [*rows[:at], *_split_list_op(rows[at], memory[at], late, context.define), *rows[at + 1 :]]


def _split_list_op(row: Instruction, memory: Sequence[int], late: set[int], define: MakeDefinition) -> Iterator[Instruction]:
    """A list op over the indices without late memory, then over the others, if no index touches memory of both.

    memory: of its tensors; late: memory that is complete late.
    """
    listed = ListOp.of(row) if row.kind == "op" else None
    if listed is None:
        yield row
        return
    # Each index of a list op stands by itself, so the op may be cut between indices. But no memory may be in both parts: a
    # tensor that is listed twice would be read at another time than before.
    touched = [{memory[n] for n in listed.tensors(index)} for index in range(listed.count)]
    waits = [not late.isdisjoint(used) for used in touched]
    parts = [set().union(*(used for used, last in zip(touched, waits, strict=True) if last == part)) for part in (False, True)]
    if not parts[0] or not parts[1] or not parts[0].isdisjoint(parts[1]) or any(memory[n] in late for n in listed.beside):
        yield row
        return
    for last in (False, True):
        yield listed.over([index for index in range(listed.count) if waits[index] == last], define)


@dataclass(frozen=True, slots=True)
class ListOp:
    """An op that does the same at each index of its lists, and makes nothing. It can be cut into ops over some indices.

    columns: the lists that have an item for each index. beside: tensors, by number, that are in none of them.
    """

    # Example, _fused_adamw_([w0, w1], [g0, g1], [m0, m1], [v0, v1], ..., found_inf=i): tensors are numbered in this order, so
    # w0 is 0 and g0 is 2. The tensors of index 0 are 0, 2, 4, 6, and `beside` has found_inf.

    row: Instruction
    args: list
    kwargs: dict
    count: int
    columns: list[list]
    beside: frozenset[int]

    @classmethod
    def of(cls, row: Instruction) -> ListOp | None:
        payload = row.define.payload
        args = from_wire(payload["args"]) if row.kind in OPS and payload["op"].startswith(LIST_OPS) else []
        count = len(args[0]) if args and isinstance(args[0], list) else 0
        if not count or payload["outs"]:
            return None
        kwargs = {name: from_wire(arg) for name, arg in payload["kwargs"].items()}
        whole = Chosen(range(count), count)
        columns = [arg for arg in (*args, *kwargs.values()) if whole.cuts(arg)]
        listed = {hole.index for arg in columns for hole in arg if isinstance(hole, T)}
        return cls(row, args, kwargs, count, columns, frozenset(range(payload["tensors"])) - listed)

    def tensors(self, index: int) -> list[int]:
        """Tensors of one index, by number."""
        return [column[index].index for column in self.columns if isinstance(column[index], T)]

    def over(self, indices: Sequence[int], define: MakeDefinition) -> Instruction:
        """The op over some indices."""
        row, payload, chosen = self.row, self.row.define.payload, Chosen(indices, self.count)
        part = {**payload, "args": [to_wire(chosen(arg)) for arg in self.args]}
        part["kwargs"] = {name: to_wire(chosen(arg)) for name, arg in self.kwargs.items()}
        part["tensors"], part["values"] = len(chosen.ins), len(chosen.values)
        for facts in ("writes", "fresh"):  # tensors, by number
            if facts in payload:
                part[facts] = [n for n, i in enumerate(chosen.ins) if i in payload[facts]]
        taken = [*chosen.ins, *(payload["tensors"] + i for i in chosen.values)]
        return Instruction(row.seq, define(row.kind, part), [row.operands[i] for i in taken], row.action, row)


# ---- buckets


@dataclass(slots=True)
class _Reduction:
    """A reduction, the rows that name its result, the memory and names that these touch or make, and the bytes of its terms."""

    rows: list[Instruction]
    memory: set[int]
    names: set[int]
    nbytes: int

    @property
    def key(self) -> tuple:
        row = self.rows[0]
        return row.kind, tuple(row.define.payload["team"]["workers"])


@dataclass(slots=True)
class _Bucket:
    """Reductions that wait for one another. room, scattered_room: bytes of all of them, and of those whose terms then end.

    memory, names, nbytes, scattered: of all that wait. Every row is compared with them, and thousands may wait.
    """

    room: int
    scattered_room: int
    waiting: list[_Reduction] = field(default_factory=list)
    memory: set[int] = field(default_factory=set)
    names: set[int] = field(default_factory=set)
    nbytes: int = 0
    scattered: int = 0

    @property
    def full(self) -> bool:
        return self.nbytes >= self.room or self.scattered >= max(self.scattered_room, 1)

    def add(self, reduction: _Reduction) -> None:
        self.waiting.append(reduction)
        self.memory |= reduction.memory
        self.names |= reduction.names
        self.nbytes += reduction.nbytes
        self.scattered += reduction.nbytes if reduction.rows[0].kind == "reduce_scatter" else 0

    def holds(self, memory: Iterable[int], names: Iterable[int]) -> bool:
        """True if something that waits touches this memory, or makes one of these names."""
        return not (self.memory.isdisjoint(memory) and self.names.isdisjoint(names))

    def take(self) -> list[Instruction]:
        """The reductions, those of one team side by side, and then the names of their results; none waits any longer."""
        taken = sorted(self.waiting, key=lambda reduction: reduction.key)
        self.waiting, self.memory, self.names, self.nbytes, self.scattered = [], set(), set(), 0, 0
        return [r.rows[0] for r in taken] + [row for r in taken for row in r.rows[1:]]


def _moved(rows: Sequence[Instruction], context: PassContext) -> Iterator[Instruction]:
    """Rows, each reduction behind the last that touches its terms, or a little later with others."""
    # Invariant: no row is yielded that touches the memory of a waiting reduction. Where one comes, the bucket ends before it.
    accessed, room = accesses(rows, shared=context.shared), context.bucket
    ready, placed = _ready(rows, accessed)
    memory = _touched(accessed)
    scattered = sum(r.nbytes for of_row in ready.values() for r in of_row if r.rows[0].kind == "reduce_scatter")
    bucket = _Bucket(room, min(room, scattered // SCATTERED_SHARE))
    for n, row in enumerate(rows):
        if n not in placed:
            if bucket.waiting and bucket.holds(memory[n], row.operands):
                yield from bucket.take()
            yield row
        for reduction in ready.get(n, ()):
            if bucket.holds(reduction.memory, ()):  # a sum of sums
                yield from bucket.take()
            bucket.add(reduction)
        if bucket.full:
            yield from bucket.take()
    yield from bucket.take()


def _touched(memory: Sequence[MemoryAccess]) -> list[list[int]]:
    """The memory that each row touches: of each tensor that it reads or makes."""
    return [[*access.reads, *access.makes] for access in memory]


def _ready(rows: Sequence[Instruction], memory: Sequence[MemoryAccess]) -> tuple[Mapping[int, list[_Reduction]], set[int]]:
    """By number of a row the reductions that may follow it, and the numbers of all rows of reductions."""
    last: dict[int, int] = {}  # memory -> the row that touched it last
    specs: dict[int, Spec] = {}  # by name, for the bytes of terms: an all_reduce has no shape in its definition
    ready: dict[int, list[_Reduction]] = defaultdict(list)
    placed: set[int] = set()
    for n, row in enumerate(rows):
        if row.kind in REDUCTIONS:
            # A reduce_scatter takes the rows right behind it along that only name its piece.
            block = _block(rows, memory, n)
            touched = {i for k in block for i in (*memory[k].reads, *memory[k].makes)}
            names = {i for k in block for i in rows[k].makes}
            behind = max((last.get(i, -1) for i in memory[n].reads), default=-1)
            if behind < 0 and row.kind == "reduce_scatter":
                behind = n  # terms from before the step: the reduction stays where it is
            ready[max(behind, 0)].append(_Reduction([rows[k] for k in block], touched, names, _term_bytes(row, specs)))
            placed.update(block)
        else:
            specs.update(_specs(row))
        last.update(dict.fromkeys((*memory[n].reads, *memory[n].makes), n))
    return ready, placed


def _block(rows: Sequence[Instruction], memory: Sequence[MemoryAccess], n: int) -> list[int]:
    """A reduction and the rows that follow it which only name its result."""
    block = [n]
    if rows[n].kind == "reduce_scatter":
        made = memory[n].makes[0]
        for k in range(n + 1, len(rows)):
            if set(memory[k].reads) != {made} or not names_only(rows[k]):
                break
            block.append(k)
    return block


def _term_bytes(row: Instruction, specs: Mapping[int, Spec]) -> int:
    payload = row.define.payload
    if row.kind == "reduce_scatter":
        return prod(payload["shape"]) * DTYPES[payload["dtype"]][0]
    spec = specs.get(row.operands[0])
    return 0 if spec is None else spec.nbytes


def _specs(row: Instruction) -> Iterator[tuple[int, Spec]]:
    if row.kind != "op":
        return
    outs = [out for out in row.define.payload["outs"] if out[0] in ("new", "view")]
    for i, out in zip(row.makes, outs, strict=True):
        if out[1] is not None:
            yield i, Spec.from_wire(out[1])
