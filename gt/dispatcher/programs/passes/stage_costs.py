"""What the stages of a recorded step cost: by what workers measured of its instructions, else by operations and bytes.

Times of Costs are microseconds, memory is bytes of a worker. What was not measured is taken to be as much dearer than
nominal as what was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from gt.dispatcher.programs.passes.epilogue import Epilogue
from gt.dispatcher.programs.passes.stages import Bases, Parts, ScheduledInstruction, together
from gt.dispatcher.programs.recording import Instruction
from gt.dispatcher.programs.reorder_check import COLLECTIVES, viewed
from gt.dispatcher.schedule import Costs
from gt.dispatcher.schedule.balance import Unit
from gt.dispatcher.sharding import cost
from gt.ir.layout import volume
from gt.ir.spec import DTYPES

MICRO = 1e6  # microseconds
LEAST = 1e-6  # of the mean stage: no action takes nothing, so that actions of a worker begin one after the other
Look = tuple[tuple[int, ...], int]  # local shape, bytes of an element
Lies = Callable[[int, int], "Look | None"]  # worker, id -> how a tensor from before lies there
NOTHING: Look = ((), 0)


@dataclass
class Found:
    """costs; measured: part of the work, 0 to 1; units: of each stage, ops of its first forward."""

    costs: Costs
    measured: float
    units: list[list[Unit]]


@dataclass
class Prices:
    """Seconds of parts, by their identity, and which were measured. sizes: bytes that a part made, by part and id."""

    seconds: dict[int, float]
    measured: set[int]
    sizes: dict[tuple[int, int], int]


def price(parts: Parts, times: dict[int, float], lies: Lies, memory: dict[int, Bases] | None = None) -> Prices:
    """What parts take: as measured of their definition, and nominally for what one has more than the smallest.

    memory: where a compiler makes one of what can be one, of each worker; then that takes what is left of it.
    """
    nominal: dict[int, float] = {}  # by part
    smallest: dict[int, float] = {}  # of a definition's parts
    count: dict[int, int] = defaultdict(int)
    sizes: dict[tuple[int, int], int] = {}
    left: dict[int, float] = {}
    for worker, rows in parts.items():
        seen: dict[int, Look] = {}
        looked = []
        for part in rows:
            ins, outs = looks(worker, part.row, seen, lies)
            looked.append((ins, outs))
            sizes.update(((id(part), i), prod(shape) * size) for i, (shape, size) in outs.items())
            number, took = part.row.define.number, nominally(part.row, ins, list(outs.values()))
            nominal[id(part)] = took
            smallest[number] = min(took, smallest.get(number, took))
            count[number] += 1
        if memory is not None:
            left.update(_left(rows, looked, memory[worker]))
    known = _agreed({number: took for number, took in times.items() if number in smallest}, parts)
    both = [number for number in known if smallest[number]]
    would = sum(smallest[number] * count[number] for number in both)
    ratio = sum(known[number] * count[number] for number in both) / would if would else 1.0
    found = Prices({}, set(), sizes)
    for part in (part for rows in parts.values() for part in rows):
        number, took = part.row.define.number, nominal[id(part)]
        if number in known:
            found.measured.add(id(part))
            found.seconds[id(part)] = known[number] + ratio * (took - smallest[number])
        else:
            found.seconds[id(part)] = ratio * took
        found.seconds[id(part)] *= left.get(id(part), 1.0)
    return found


def _left(
    rows: Sequence[ScheduledInstruction], looked: Sequence[tuple[list[Look], dict[int, Look]]], memory: Bases
) -> dict[int, float]:
    """Of ops that a compiler makes one of: what is left, 0 to 1, of the bytes that each reads and writes.

    What one gives another in a stretch of an action, between transfers and collectives, is never in memory; what several of
    them read is read once.
    """
    stretch: dict[int, tuple] = {}  # of each part that can be one with others
    maker: dict[int, ScheduledInstruction] = {}
    takers: dict[int, list[ScheduledInstruction]] = defaultdict(list)
    cuts = 0
    for part in rows:
        reads, makes = part.row.ids()
        cuts += part.moves or part.row.define.kind in COLLECTIVES
        if _fuses(part.row):
            stretch[id(part)] = part.key, part.weight, cuts
        for i in reads:
            takers[memory[id(part), i]].append(part)
        views = viewed(part.row)
        maker.update((memory[id(part), i], part) for n, i in enumerate(makes) if n not in views)
    found: dict[int, float] = {}
    known: set[tuple] = set()  # memory that a stretch has read
    for part, (ins, outs) in zip(rows, looked):
        here = stretch.get(id(part))
        reads, _ = part.row.ids()
        whole = sum(prod(shape) * size for shape, size in (*ins, *outs.values()))
        if here is None or not whole:
            continue
        rest = 0
        for i, (shape, size) in zip(reads, ins):
            base = memory[id(part), i]
            made = maker.get(base)
            if (here, base) not in known and (made is None or stretch.get(id(made)) != here):
                rest += prod(shape) * size
                known.add((here, base))
        for i, (shape, size) in outs.items():
            if any(not _views(t.row) and stretch.get(id(t)) != here for t in takers[memory[id(part), i]]):
                rest += prod(shape) * size
        found[id(part)] = rest / whole
    return found


def _views(row: Instruction) -> bool:
    """Whether it makes nothing but views."""
    makes = row.ids()[1]
    return bool(makes) and len(viewed(row)) == len(makes)


def _fuses(row: Instruction) -> bool:
    """Whether a compiler makes one of an op and others beside it: what is no matmul, convolution, attention or list op."""
    if row.define.kind != "op":
        return row.define.kind == "shard"
    name = row.define.payload["op"]
    return not _views(row) and not cost.heavy(name) and not name.startswith(("aten._fused_", "aten._foreach_", "gt."))


def _agreed(known: dict[int, float], parts: Parts) -> dict[int, float]:
    """A collective takes what the member says that came last: the others have waited for it."""
    for numbers in {tuple(sorted({part.row.define.number for part in team})) for team in together(parts)}:
        took = [known[number] for number in numbers if number in known]
        known.update((number, min(took)) for number in numbers if took)
    return known


def looks(worker: int, row: Instruction, seen: dict[int, Look], lies: Lies) -> tuple[list[Look], dict[int, Look]]:
    """Of what a row reads and, by id, of what it makes."""
    reads, makes = row.ids()
    for i in reads:
        if i not in seen:
            seen[i] = lies(worker, i) or NOTHING
    ins, made = [seen[i] for i in reads], {}
    if row.define.kind == "op":
        specs = [out[1] for out in row.define.payload["outs"] if out[0] in ("new", "view")]
        made = {i: (tuple(s[0]), DTYPES[s[3]][0]) if s else NOTHING for i, s in zip(makes, specs)}
    elif makes:
        made = {makes[0]: _moved(row, ins[0] if ins else NOTHING)}
    seen.update(made)
    return ins, made


def _moved(row: Instruction, source: Look) -> Look:
    """Of the result of a collective, transfer or local change of layout."""
    payload = row.define.payload
    size = DTYPES[payload["dtype"]][0] if "dtype" in payload else source[1]
    for kind, key in (("reduce_scatter", "boxes"), ("all_to_all", "want")):
        if row.define.kind == kind:
            return (sum(map(volume, payload[key][payload["team"]["rank"]])),), size
    return tuple(payload["shape"]) if "shape" in payload else source[0], size


def nominally(row: Instruction, ins: Sequence[Look], outs: Sequence[Look]) -> float:
    """Seconds of a nominal GPU."""
    kind = row.define.kind
    if kind == "send":
        return sum(map(volume, row.define.payload["boxes"])) * ins[0][1] / cost.LINK
    nbytes = sum(prod(shape) * size for shape, size in (*ins, *outs))
    if kind in COLLECTIVES or kind in ("recv", "merge"):
        return nbytes / cost.LINK
    if kind == "alias" or (outs and len(viewed(row)) == len(outs)):
        return 0.0
    if kind != "op":
        return nbytes / cost.BYTES
    return cost.seconds(cost.flops(row.define.payload["op"], [look[0] for look in ins], [look[0] for look in outs]), nbytes)


# ---- stages


def stage_costs(
    parts: Parts, meshes: Sequence[tuple[int, ...]], micro: int, prices: Prices, memory: dict[int, Bases], end: Epilogue
) -> Found:
    """A stage takes what the slowest of its workers in `parts` takes, for a micro-batch on the average."""
    seconds = prices.seconds
    took: dict[tuple, float] = defaultdict(float)  # worker, stage, letter -> seconds of a step
    work = measured = 0.0
    for worker, rows in parts.items():
        for part in rows:
            action = part.action(True)
            if action is not None and not part.moves:
                one = seconds[id(part)]
                took[worker, action[0], action[1]] += one
                work += one
                measured += one if id(part) in prices.measured else 0.0
    every = range(len(meshes))

    def each(letter: str) -> list[float]:
        return [max(took[worker, stage, letter] for worker in meshes[stage]) * MICRO / micro for stage in every]

    def once(letter: str) -> tuple[float | None, ...]:
        has = [any((worker, stage, letter) in took for worker in meshes[stage]) for stage in every]
        return tuple(time * micro + floor if some else None for time, some in zip(each(letter), has)) if any(has) else ()

    forward, input, weight = each("F"), each("I"), each("W")
    floor = (sum(forward) + sum(input) + sum(weight)) / len(meshes) * LEAST or 1.0
    activation, kept = _activations(parts, meshes, prices, memory)
    transfer = tuple(_transfer(parts, meshes, n, seconds) * MICRO / micro for n in every[:-1])
    forward, input, weight = ([max(time, floor) for time in times] for times in (forward, input, weight))
    costs = Costs(
        tuple(forward), tuple(input), tuple(weight), transfer, activation, kept,
        once("L"), once("R"), once("O"), overlap=False, joint=end.joint, own=end.own,
    )  # fmt: skip
    firsts = [next(worker for worker in mesh if worker in parts) for mesh in meshes]
    return Found(costs, measured / work if work else 0.0, [_units(parts[firsts[n]], n, seconds) for n in every])


def _transfer(parts: Parts, meshes: Sequence[tuple[int, ...]], n: int, seconds: dict[int, float]) -> float:
    """Between stages n and n + 1, by what the busiest worker sends, the one way or the other."""
    if meshes[n] == meshes[n + 1]:
        return 0.0
    most = 0.0
    for stage, other, backward in ((n, n + 1, False), (n + 1, n, True)):
        for worker in meshes[stage]:
            sends = (p for p in parts.get(worker, ()) if p.row.define.kind == "send" and p.key is not None)
            own = (p for p in sends if (p.key.stage, p.key.backward) == (stage, backward))  # type: ignore[union-attr]
            most = max(most, sum(seconds[id(p)] for p in own if p.row.define.payload["channel"]["peer"] in meshes[other]))
    return most


def _activations(
    parts: Parts, meshes: Sequence[tuple[int, ...]], prices: Prices, memory: dict[int, Bases]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bytes that a micro-batch's forward leaves for its backward in each stage, and that its I leaves for its W."""
    held: dict[tuple, int] = defaultdict(int)  # worker, stage, micro-batch, whether W reads it
    for worker, rows in parts.items():
        last: dict[int, tuple[ScheduledInstruction, bool]] = {}  # memory -> a backward part that reads it, and whether a W does
        for part in rows:
            if part.key is not None and part.key.backward and not (part.moves and part.row.define.kind != "send"):
                for i in part.row.ids()[0]:
                    base = memory[worker][id(part), i]
                    last[base] = part, part.weight or (base in last and last[base][1])
        for part in rows:
            for i in part.row.ids()[1] if part.key is not None else ():
                base = memory[worker][id(part), i]
                if base == -id(part) * 64 - part.row.ids()[1].index(i) and base in last:
                    _hold(held, worker, part, last[base], prices.sizes[id(part), i])
    most = [[0.0, 0.0] for _ in meshes]
    for (worker, stage, _, late), nbytes in held.items():
        if worker in meshes[stage]:
            most[stage][late] = max(most[stage][late], float(nbytes))
    return tuple(row[0] for row in most), tuple(row[1] for row in most)


def _hold(
    held: dict[tuple, int], worker: int, maker: ScheduledInstruction, use: tuple[ScheduledInstruction, bool], nbytes: int
) -> None:
    """Note what a part made and a backward action reads."""
    (taker, late), made = use, maker.key
    assert made is not None and taker.key is not None
    if (made.stage, made.micro) != (taker.key.stage, taker.key.micro):
        return
    if not made.backward:
        held[worker, made.stage, made.micro, False] += nbytes
    if late and (not made.backward or not maker.weight):
        held[worker, made.stage, made.micro, True] += nbytes


def _units(rows: Iterable[ScheduledInstruction], stage: int, seconds: dict[int, float]) -> list[Unit]:
    """Ops of a stage's first forward, each with its time and where it is from."""
    found = []
    for part in rows:
        took = seconds[id(part)]
        if part.key == (stage, False, 0) and not part.moves and took:
            origin = part.op.origin
            name = part.op.known.template.op.removesuffix(".default")
            found.append((took, f"{origin.file.rpartition('/')[2]}:{origin.line} {name}" if origin.file else name))
    return found
