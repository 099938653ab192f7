"""The pass that reduces gradients in buckets, as soon as they are complete, so that the rest of the backward pass hides it.

A step asks for a sum where it first needs it: behind the whole backward pass, one after the other. A worker overlaps transfers
with compute (gt.worker.program.overlap), so each all-reduce moves up behind the last instruction that touches its tensor.
Several wait for one another until there are MAX_BUCKET_BYTES, since a small reduction costs much by itself and ends a compiled
region. This is gradient bucketing as in DistributedDataParallel (Li et al., PyTorch Distributed, VLDB 2020). Behind the last
bucket there is only the optimizer: it is split, so that its step on other gradients hides the bucket.

Example, one team, with room for both gradients in a bucket:

    before:  g1 = mm ...; g0 = mm ...; h = mm ...; all_reduce g0; all_reduce g1; _fused_adamw_ [w0, w1] [g0, g1]
    after:   g1 = mm ...; g0 = mm ...; together 2; all_reduce g0; all_reduce g1; h = mm ...; _fused_adamw_ ...
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from gt.dispatcher.programs.passes.context import MakeDefinition, PassContext
from gt.dispatcher.programs.recording import Code, Instruction, Recording
from gt.ir.dataflow import accesses
from gt.ir.spec import Spec
from gt.ir.template import Chosen, T, from_wire, to_wire

MAX_BUCKET_BYTES = 12 << 20  # reduced together

LIST_OPS = ("aten._fused_", "aten._foreach_")  # ops that do the same to each tensor of a list


def bucket_all_reduces(recording: Recording, context: PassContext) -> Recording:
    """The recording with its all-reduces moved up and in buckets, unless a schedule has placed them."""
    if context.scheduled or not any(_team(row) for rows in recording.code.values() for row in rows):
        return recording
    moved: Code = {worker: list(_moved(rows)) for worker, rows in recording.code.items()}
    code = {worker: _with_optimizer_split(rows, context.define) for worker, rows in moved.items()}
    runs = {worker: _runs(rows) for worker, rows in code.items()}
    if all(runs[worker][team] == runs[peer][team] for worker in runs for team in runs[worker] for peer in team if peer in runs):
        code = {worker: list(_marked(rows, context.define)) for worker, rows in code.items()}
    return replace(recording, code=code)


def _team(row: Instruction) -> tuple[int, ...]:
    return tuple(row.define.payload["team"]["workers"]) if row.kind == "all_reduce" else ()


def _runs(rows: Sequence[Instruction]) -> dict[tuple[int, ...], list[int]]:
    """By team, the lengths of its runs of all-reduces, in order. They have to be the same for all members of a bucket."""
    lengths: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for team, group in groupby(rows, key=_team):
        if team:
            lengths[team].append(len(list(group)))
    return lengths


def _marked(rows: Sequence[Instruction], define: MakeDefinition) -> Iterator[Instruction]:
    for team, group in groupby(rows, key=_team):
        run = list(group)
        if team and len(run) > 1:
            yield Instruction(run[0].seq, define("together", {"count": len(run)}), [])
        yield from run


def _with_optimizer_split(rows: Sequence[Instruction], define: MakeDefinition) -> list[Instruction]:
    """Rows, with the list op that first needs the last bucket as two ops: over the tensors that do not, and the rest."""
    memory = _touched_memory(rows)
    late: set[int] = set()
    last = -1
    for n, row in enumerate(rows):
        if row.kind == "all_reduce":
            late = {*memory[n]} | (late if n == last + 1 else set())
            last = n
    at = next((n for n in range(last + 1, len(rows)) if not late.isdisjoint(memory[n])), None)
    if at is None:
        return [*rows]
    return [*rows[:at], *_split_list_op(rows[at], memory[at], late, define), *rows[at + 1 :]]


def _split_list_op(row: Instruction, memory: Sequence[int], late: set[int], define: MakeDefinition) -> Iterator[Instruction]:
    """A list op over the indices without late memory, then over the others, if no index touches memory of both.

    memory: of its tensors; late: memory that is complete late.
    """
    payload = row.define.payload
    args = from_wire(payload["args"]) if row.kind == "op" and payload["op"].startswith(LIST_OPS) else []
    count = len(args[0]) if args and isinstance(args[0], list) else 0
    if not count or payload["outs"]:
        yield row
        return
    kwargs = {name: from_wire(arg) for name, arg in payload["kwargs"].items()}
    whole = Chosen(range(count), count)
    columns = [arg for arg in (*args, *kwargs.values()) if whole.cuts(arg)]
    touched = [{memory[column[i].index] for column in columns if isinstance(column[i], T)} for i in range(count)]
    waits = [not late.isdisjoint(used) for used in touched]
    parts = [set().union(*(used for used, last in zip(touched, waits, strict=True) if last == part)) for part in (False, True)]
    beside = set(range(payload["tensors"])).difference(hole.index for arg in columns for hole in arg if isinstance(hole, T))
    if not parts[0] or not parts[1] or not parts[0].isdisjoint(parts[1]) or any(memory[i] in late for i in beside):
        yield row
        return
    for last in (False, True):
        yield _over(row, Chosen([i for i in range(count) if waits[i] == last], count), args, kwargs, define)


def _over(row: Instruction, chosen: Chosen, args: list, kwargs: dict, define: MakeDefinition) -> Instruction:
    """The list op of a row over the chosen indices of its lists."""
    payload, operands = row.define.payload, row.operands
    part = {**payload, "args": [to_wire(chosen(arg)) for arg in args]}
    part["kwargs"] = {name: to_wire(chosen(arg)) for name, arg in kwargs.items()}
    part["tensors"], part["values"] = len(chosen.ins), len(chosen.values)
    part["writes"] = [n for n, i in enumerate(chosen.ins) if i in payload["writes"]]
    taken = [*chosen.ins, *(payload["tensors"] + i for i in chosen.values)]
    return Instruction(row.seq, define("op", part), [operands[i] for i in taken], row.action, row)


def _moved(rows: Sequence[Instruction]) -> Iterator[Instruction]:
    """Rows, each all-reduce behind the last that touches its tensor, or a little later with others."""
    memory = _touched_memory(rows)
    ready, nbytes = _ready(rows, memory)
    waiting: list[Instruction] = []
    held: set[int] = set()  # memory of those
    bucket = 0  # bytes of those
    for n, row in enumerate(rows):
        if row.kind != "all_reduce":
            if not held.isdisjoint(memory[n]):
                yield from _released(waiting, held)
                bucket = 0
            yield row
        for number in ready.get(n, ()):
            if not held.isdisjoint(memory[number]):  # a sum of sums
                yield from _released(waiting, held)
                bucket = 0
            waiting.append(rows[number])
            held.update(memory[number])
            bucket += nbytes[number]
        if bucket >= MAX_BUCKET_BYTES:
            yield from _released(waiting, held)
            bucket = 0
    yield from _released(waiting, held)


def _released(waiting: list[Instruction], held: set[int]) -> list[Instruction]:
    """The waiting rows, those of one team side by side; none waits any longer."""
    released = sorted(waiting, key=_team)
    waiting.clear()
    held.clear()
    return released


def _touched_memory(rows: Sequence[Instruction]) -> list[list[int]]:
    """The memory that each row touches: of each tensor that it reads or makes."""
    return [[*access.reads, *access.makes] for access in accesses(rows)]


def _ready(rows: Sequence[Instruction], memory: Sequence[list[int]]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """By row, the all-reduces that may follow it; by all-reduce, its bytes. All are numbers of rows."""
    last: dict[int, int] = {}  # memory -> the row that touched it last
    specs: dict[int, Spec] = {}
    ready: dict[int, list[int]] = defaultdict(list)
    nbytes: dict[int, int] = {}
    for n, row in enumerate(rows):
        if row.kind == "all_reduce":
            spec = specs.get(row.operands[0])
            nbytes[n] = 0 if spec is None else spec.nbytes
            ready[max((last.get(i, -1) for i in memory[n]), default=-1)].append(n)
        else:
            specs.update(_specs(row))
        last.update(dict.fromkeys(memory[n], n))
    ready[0] = ready.pop(-1, []) + ready[0]  # of tensors from before
    return ready, nbytes


def _specs(row: Instruction) -> Iterator[tuple[int, Spec]]:
    if row.kind != "op":
        return
    outs = [out for out in row.define.payload["outs"] if out[0] in ("new", "view")]
    for i, out in zip(row.makes, outs, strict=True):
        if out[1] is not None:
            yield i, Spec.from_wire(out[1])
