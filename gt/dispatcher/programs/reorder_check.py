"""What instructions depend on: whether another order of a worker's gives the same values, and whether workers still meet.

An order is checked, not trusted: each row has to find the makers of what it reads and memory as often written as before, and
messages and collectives have to come about even if no worker goes on before its message is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from gt.dispatcher.programs.recording import Instruction
from gt.dispatcher.state.failures import Planned

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class Unfit(Exception):
    """Why a step is not a pipeline."""


def check(worker: int, old: Sequence[Instruction], new: Sequence[Instruction], ops: dict[int, Planned]) -> None:
    """Unfit unless every row finds what it found before: the same makers of what it reads, and memory as often written."""
    if (was := _seen(old, ops)) != (now := _seen(new, ops)):
        row = next(row for row in old if was[id(row)] != now[id(row)])
        op = ops.get(row.seq)
        where = f"{op.origin.file}:{op.origin.line} {op.known.name}" if op is not None else row.define.kind
        raise Unfit(f"{where} on worker {worker} uses a tensor that another micro-batch or stage writes: the order matters")


def _seen(rows: Sequence[Instruction], ops: dict[int, Planned]) -> dict[int, list]:
    """Of each row, of each operand: who made it, and how often its memory had been written."""
    maker: dict[int, int] = {}
    memory: dict[int, int] = {}  # id -> the row (or id) that made the memory it views
    times: dict[int, int] = defaultdict(int)  # that memory was written
    found: dict[int, list] = {}
    for row in rows:
        reads, makes = row.ids()
        found[id(row)] = [(maker.get(i), memory.get(i, i), times[memory.get(i, i)]) for i in reads]
        for k in written(row, ops):
            times[memory.get(reads[k], reads[k])] += 1
        views = viewed(row)
        for n, i in enumerate(makes):
            maker[i] = id(row)
            base = views.get(n)
            memory[i] = memory.get(reads[base], reads[base]) if base is not None else -id(row) * 64 - n
    return found


def viewed(row: Instruction) -> dict[int, int]:
    """Of its outputs that are views: which operand they view."""
    if row.define.kind == "alias":
        return {0: 0}
    if row.define.kind != "op":
        return {}
    made = [out for out in row.define.payload["outs"] if out[0] in ("new", "view")]
    return {n: out[2] for n, out in enumerate(made) if out[0] == "view"}


def written(row: Instruction, ops: dict[int, Planned]) -> Iterable[int]:
    """Operands that it changes in place."""
    if row.define.kind == "all_reduce":
        return (0,)
    if row.define.kind != "op":
        return ()
    payload, op = row.define.payload, ops.get(row.seq)
    if op is not None and op.known.template.op == payload["op"] and payload["tensors"] == len(op.known.template.ins):
        return op.known.template.writes
    name = payload["op"].split(".")[1]
    changes = name.endswith("_") or name.startswith(("_fused_", "_foreach_")) or "batch_norm" in name
    return range(payload["tensors"]) if changes else [out[2] for out in payload["outs"] if out[0] == "same"]


def flow(code: dict[int, list[Instruction]]) -> None:
    """Unfit unless all messages and collectives meet, even if nobody goes on before its message is taken."""
    todo = {worker: [step for row in reversed(rows) for step in reversed(_steps(worker, row))] for worker, rows in code.items()}
    able = list(todo)
    while able:
        worker = able.pop()
        while todo[worker]:
            members = todo[worker][-1][0]
            if any(m not in todo or not todo[m] or todo[m][-1] != todo[worker][-1] for m in members):
                break
            for m in members:
                todo[m].pop()
            able += [m for m in members if m != worker]
    stuck = {worker: steps[-1] for worker, steps in todo.items() if steps}
    if stuck:
        waits = "; ".join(f"worker {worker} waits in a {step[1]} of workers {list(step[0])}" for worker, step in stuck.items())
        raise Unfit(f"workers would wait for each other for ever: {waits}")


def _steps(worker: int, row: Instruction) -> list[tuple]:
    """Who has to come together for a row, one after the other, and for what."""
    payload, kind = row.define.payload, row.define.kind
    if kind == "send":
        return [((worker, payload["channel"]["peer"]), "message")]
    if kind in ("recv", "merge"):
        return [((channel["peer"], worker), "message") for channel, _ in payload["parts"]]
    if kind in COLLECTIVES:  # of the same tensors, or members would add up what does not belong together
        return [(tuple(payload["team"]["workers"]), kind, row.seq, *row.operands)]
    return []
