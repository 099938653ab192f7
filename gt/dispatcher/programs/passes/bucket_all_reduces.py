"""Gradients of a recorded step are reduced as soon as they are complete, several at a time, so that what follows hides it.

Where the step asked for a sum is where the sum was first needed: behind the whole backward pass, one after the other. A worker
does transfers beside what it computes (gt.worker.program.overlap), so each moves up behind what made its data. They wait for
one another until there are enough bytes, since a reduction costs much by itself and cuts what is compiled in two. Behind the
last ones there is nothing but the optimizer: what it does with other gradients hides them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from gt.dispatcher.programs.recording import Instruction, Recording
from gt.dispatcher.programs.reorder_check import Unfit, check, flow, viewed
from gt.ir.instr import Define
from gt.ir.spec import Spec
from gt.ir.template import Chosen, T, from_wire, to_wire

BUCKET = 12 << 20  # bytes that are reduced together


LISTS = ("aten._fused_", "aten._foreach_")  # ops that do the same to each tensor of a list

Adding = Callable[[str, dict], Define]  # a definition of a kind with this payload, which the workers are told of


def early(tape: Recording, define: Adding) -> bool:
    """Move the all-reduces of a tape up; whether that gives the same values and all workers still meet, or nothing is done."""
    ops = {row.seq: row for row in tape.journal}
    code = {worker: list(_moved(rows)) for worker, rows in tape.code.items()}
    try:
        for worker, rows in tape.code.items():
            check(worker, rows, code[worker], ops)
        flow(code)
    except Unfit:
        return False
    code = {worker: _parted(rows, define) for worker, rows in code.items()}
    tape.code.update(code)
    runs = {worker: _runs(rows) for worker, rows in code.items()}
    if all(runs[worker][team] == runs[one][team] for worker in runs for team in runs[worker] for one in team if one in runs):
        tape.code.update({worker: list(_marked(rows, define)) for worker, rows in code.items()})
    return True


def _team(row: Instruction) -> tuple[int, ...]:
    return tuple(row.define.payload["team"]["workers"]) if row.define.kind == "all_reduce" else ()


def _runs(rows: Sequence[Instruction]) -> dict[tuple[int, ...], list[int]]:
    """Of each team: how many all-reduces stand side by side, each time. What members do together has to be the same."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for team, group in groupby(rows, key=_team):
        if team:
            found[team].append(len(list(group)))
    return found


def _marked(rows: Sequence[Instruction], define: Adding) -> Iterator[Instruction]:
    for team, group in groupby(rows, key=_team):
        some = list(group)
        if team and len(some) > 1:
            yield Instruction(some[0].seq, define("together", {"count": len(some)}), [])
        yield from some


def _parted(rows: Sequence[Instruction], define: Adding) -> list[Instruction]:
    """Rows, an op on lists that is the first to need what is reduced last as two: on what does not need that, and the rest."""
    memory = _memory(rows)
    late: set[int] = set()
    last = -1
    for n, row in enumerate(rows):
        if row.define.kind == "all_reduce":
            late = {*memory[n]} | (late if n == last + 1 else set())
            last = n
    at = next((n for n in range(last + 1, len(rows)) if not late.isdisjoint(memory[n])), None)
    if at is None:
        return [*rows]
    return [*rows[:at], *_two(rows[at], memory[at], late, define), *rows[at + 1 :]]


def _two(row: Instruction, memory: Sequence[int], late: set[int], define: Adding) -> Iterator[Instruction]:
    """An op on lists over the indices of which nothing is late, and then over the others, if no index touches what is of both.

    memory: of its tensors; late: what is there late.
    """
    payload, operands = row.define.payload, row.operands
    args = from_wire(payload["args"]) if row.define.kind == "op" and payload["op"].startswith(LISTS) else []
    count = len(args[0]) if args and isinstance(args[0], list) else 0
    if not count or payload["outs"]:
        yield row
        return
    kwargs = {name: from_wire(arg) for name, arg in payload["kwargs"].items()}
    whole = Chosen(range(count), count)
    columns = [arg for arg in (*args, *kwargs.values()) if whole.cuts(arg)]
    touched = [{memory[column[i].index] for column in columns if isinstance(column[i], T)} for i in range(count)]
    waits = [not late.isdisjoint(some) for some in touched]
    parts = [set().union(*(some for some, last in zip(touched, waits, strict=True) if last == part)) for part in (False, True)]
    beside = set(range(payload["tensors"])).difference(hole.index for arg in columns for hole in arg if isinstance(hole, T))
    if not parts[0] or not parts[1] or not parts[0].isdisjoint(parts[1]) or any(memory[i] in late for i in beside):
        yield row
        return
    for last in (False, True):
        chosen = Chosen([i for i in range(count) if waits[i] == last], count)
        part = {**payload, "args": [to_wire(chosen(arg)) for arg in args]}
        part["kwargs"] = {name: to_wire(chosen(arg)) for name, arg in kwargs.items()}
        part["tensors"], part["values"] = len(chosen.ins), len(chosen.values)
        taken = [*chosen.ins, *(payload["tensors"] + i for i in chosen.values)]
        yield Instruction(row.seq, define("op", part), [operands[i] for i in taken])


def _moved(rows: Sequence[Instruction]) -> Iterator[Instruction]:
    """Rows, each all-reduce behind the last that touches its tensor, or a little later with others."""
    memory = _memory(rows)
    ready, size = _ready(rows, memory)
    waiting: list[Instruction] = []
    held: set[int] = set()  # memory of those
    nbytes = 0
    for n, row in enumerate(rows):
        if row.define.kind != "all_reduce":
            if not held.isdisjoint(memory[n]):
                yield from _together(waiting, held)
                nbytes = 0
            yield row
        for one in ready.get(n, ()):
            number, more = size[id(one)]
            if not held.isdisjoint(memory[number]):  # a sum of sums
                yield from _together(waiting, held)
                nbytes = 0
            waiting.append(one)
            held.update(memory[number])
            nbytes += more
        if nbytes >= BUCKET:
            yield from _together(waiting, held)
            nbytes = 0
    yield from _together(waiting, held)


def _together(waiting: list[Instruction], held: set[int]) -> list[Instruction]:
    """Those of one team side by side; none waits any longer."""
    found = sorted(waiting, key=_team)
    waiting.clear()
    held.clear()
    return found


def _memory(rows: Sequence[Instruction]) -> list[list[int]]:
    """The memory that each row touches: of each tensor that it reads or makes."""
    where: dict[int, int] = {}
    found = []
    for n, row in enumerate(rows):
        reads, makes = row.ids()
        views = viewed(row)
        touched = [where.get(i, i) for i in reads]
        for k, i in enumerate(makes):
            where[i] = where.get(reads[views[k]], reads[views[k]]) if k in views else -1 - (n << 6) - k
            touched.append(where[i])
        found.append(touched)
    return found


def _ready(
    rows: Sequence[Instruction], memory: Sequence[list[int]]
) -> tuple[dict[int, list[Instruction]], dict[int, tuple[int, int]]]:
    """By the number of a row: the all-reduces that may follow it. Of each of these, by identity: its own number, and bytes."""
    last: dict[int, int] = {}  # memory -> the row that touched it last
    made: dict[int, Spec] = {}
    found: dict[int, list[Instruction]] = defaultdict(list)
    size: dict[int, tuple[int, int]] = {}
    for n, row in enumerate(rows):
        if row.define.kind == "all_reduce":
            spec = made.get(row.operands[0])
            size[id(row)] = n, 0 if spec is None else spec.nbytes
            found[max((last.get(i, -1) for i in memory[n]), default=-1)].append(row)
            last.update(dict.fromkeys(memory[n], n))
            continue
        last.update(dict.fromkeys(memory[n], n))
        made.update(_made(row))
    found[0] = found.pop(-1, []) + found[0]  # of what was there before
    return found, size


def _made(row: Instruction) -> Iterator[tuple[int, Spec]]:
    if row.define.kind != "op":
        return
    outs = [out for out in row.define.payload["outs"] if out[0] in ("new", "view")]
    for i, out in zip(row.ids()[1], outs, strict=True):
        if out[1] is not None:
            yield i, Spec.from_wire(out[1])
