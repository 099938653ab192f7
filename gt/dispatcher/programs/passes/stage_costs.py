"""Costs of the stages of a recorded step: measured seconds of its instructions where workers sent them, else a roofline model.

The model takes the larger of flops and bytes over a nominal GPU's rates. Untimed instructions are scaled by the ratio of
measured to modelled seconds of the timed ones. Times of Costs are microseconds, memory is bytes of a worker.

Example: mm takes 120 us measured, 100 us modelled; relu is not timed and 10 us modelled. Then relu counts as 12 us.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from gt.dispatcher.programs.passes.epilogue import Epilogue
from gt.dispatcher.programs.passes.scheduled_instruction import Parts, ScheduledInstruction, match_collectives
from gt.dispatcher.programs.recording import Instruction
from gt.dispatcher.schedule import Costs
from gt.dispatcher.schedule.balance import Unit
from gt.dispatcher.sharding import cost
from gt.ir.instr import COMMUNICATION, OPS
from gt.ir.layout import volume
from gt.ir.spec import DTYPES

MICRO = 1e6  # microseconds of a second
LEAST_SHARE = 1e-6  # least cost of an action, in parts of the mean stage: so a worker's actions begin one after the other
Shape = tuple[tuple[int, ...], int]  # local shape, bytes of an element
OlderShapes = Callable[[int, int], "Shape | None"]  # worker, id -> the shape there of a tensor from before
UNKNOWN: Shape = ((), 0)
Stretch = tuple  # instructions that a compiler may fuse: an action, whether of weights, and the communication before it


@dataclass
class StageCosts:
    """costs; measured: part of the work, 0 to 1; units: of each stage, ops of its first forward."""

    costs: Costs
    measured: float
    units: list[list[Unit]]


@dataclass
class InstructionTimes:
    """Seconds of parts, and those that were measured. sizes: bytes of each tensor that a part makes."""

    seconds: dict[ScheduledInstruction, float]
    measured: set[ScheduledInstruction]
    sizes: dict[ScheduledInstruction, list[int]]


def time_instructions(parts: Parts, times: dict[int, float], older: OlderShapes, fuses: bool = False) -> InstructionTimes:
    """Seconds of parts: as measured of their definition, and modelled for what a part has more than the smallest of it.

    times: measured seconds by definition. fuses: whether a compiler fuses ops; then a part takes the traffic left to it.
    """
    # 1. The model's seconds for each part. One definition may serve parts of several shapes.
    modelled: dict[ScheduledInstruction, float] = {}
    smallest: dict[int, float] = {}  # definition number -> fewest modelled seconds of its parts
    count: dict[int, int] = defaultdict(int)
    sizes: dict[ScheduledInstruction, list[int]] = {}
    traffic: dict[ScheduledInstruction, float] = {}
    for worker, rows in parts.items():
        known: dict[int, Shape] = {}
        row_shapes = []
        for part in rows:
            ins, outs = shapes(worker, part.row, known, older)
            row_shapes.append((ins, outs))
            sizes[part] = [nbytes(shape) for shape in outs]
            number, seconds = part.row.define.number, nominal_seconds(part.row, ins, outs)
            modelled[part] = seconds
            smallest[number] = min(seconds, smallest.get(number, seconds))
            count[number] += 1
        if fuses:
            traffic.update(_traffic_after_fusion(rows, row_shapes))

    # 2. The ratio of measured to modelled seconds, over the definitions that have both, each as often as it is executed.
    measured = _agreed({number: seconds for number, seconds in times.items() if number in smallest}, parts)
    both = [number for number in measured if smallest[number]]
    would = sum(smallest[number] * count[number] for number in both)
    ratio = sum(measured[number] * count[number] for number in both) / would if would else 1.0
    # 3. A measurement is the fewest seconds of a definition, so it is that of its smallest part: a larger part takes more.
    result = InstructionTimes({}, set(), sizes)
    for part in (part for rows in parts.values() for part in rows):
        number, seconds = part.row.define.number, modelled[part]
        if number in measured:
            result.measured.add(part)
            result.seconds[part] = measured[number] + ratio * (seconds - smallest[number])
        else:
            result.seconds[part] = ratio * seconds
        result.seconds[part] *= traffic.get(part, 1.0)
    return result


def _traffic_after_fusion(
    rows: Sequence[ScheduledInstruction], row_shapes: Sequence[tuple[list[Shape], list[Shape]]]
) -> dict[ScheduledInstruction, float]:
    """The part, 0 to 1, that is left of the bytes that each fused op reads and writes.

    A value that one op passes to another in a stretch is never in memory; a value that several of them read is read once.
    """
    # 1. The stretch of each part that fuses, and makers and readers of all memory. Communication ends a compiled region.
    stretches: dict[ScheduledInstruction, Stretch] = {}
    maker: dict[int, ScheduledInstruction] = {}
    readers: dict[int, list[ScheduledInstruction]] = defaultdict(list)
    cuts = 0  # communications so far
    for part in rows:
        cuts += part.row.kind in COMMUNICATION
        if _fuses(part.row):
            stretches[part] = part.key, part.weight, cuts
        for base in part.memory.reads:
            readers[base].append(part)
        views = part.row.define.effects.views
        maker.update((base, part) for n, base in enumerate(part.memory.makes) if n not in views)

    # 2. Bytes that still cross the border of a stretch: inputs from outside, once each, and results that are read outside.
    left: dict[ScheduledInstruction, float] = {}
    known: set[tuple] = set()  # memory that a stretch has read
    for part, (ins, outs) in zip(rows, row_shapes):
        here = stretches.get(part)
        whole = sum(map(nbytes, (*ins, *outs)))
        if here is None or not whole:
            continue
        rest = 0
        for base, shape in zip(part.memory.reads, ins):
            source = maker.get(base)
            if (here, base) not in known and (source is None or stretches.get(source) != here):
                rest += nbytes(shape)
                known.add((here, base))
        for base, shape in zip(part.memory.makes, outs):
            if any(not _only_views(reader.row) and stretches.get(reader) != here for reader in readers[base]):
                rest += nbytes(shape)
        left[part] = rest / whole
    return left


def _only_views(row: Instruction) -> bool:
    """True if it makes nothing but views."""
    return bool(row.makes) and len(row.define.effects.views) == len(row.makes)


def _fuses(row: Instruction) -> bool:
    """True if a compiler fuses an op with those beside it: no matmul, convolution, attention or list op."""
    if row.kind != "op":
        return row.kind == "shard"
    name = row.define.payload["op"]
    return not _only_views(row) and not cost.heavy(name) and not name.startswith(("aten._fused_", "aten._foreach_", "gt."))


def _agreed(known: dict[int, float], parts: Parts) -> dict[int, float]:
    """A collective takes the least of its members' seconds: the member that arrived last has not waited for others."""
    for numbers in {tuple(sorted({part.row.define.number for part in team})) for team in match_collectives(parts)}:
        seconds = [known[number] for number in numbers if number in known]
        known.update((number, min(seconds)) for number in numbers if seconds)
    return known


# ---- one instruction


def nbytes(shape: Shape) -> int:
    return prod(shape[0]) * shape[1]


def shapes(worker: int, row: Instruction, known: dict[int, Shape], older: OlderShapes) -> tuple[list[Shape], list[Shape]]:
    """Shapes of the tensors that a row reads and makes. known: by id, of the rows before it; those of this row are added."""
    reads, makes = row.reads, row.makes
    for i in reads:
        if i not in known:
            known[i] = older(worker, i) or UNKNOWN
    ins = [known[i] for i in reads]
    outs: list[Shape] = []
    if row.kind in OPS:
        specs = [out[1] for out in row.define.payload["outs"] if out[0] in ("new", "view")]
        outs = [(tuple(s[0]), DTYPES[s[3]][0]) if s else UNKNOWN for s in specs]
    elif makes:
        outs = [_moved_shape(row, ins[0] if ins else UNKNOWN)]
    known.update(zip(makes, outs))
    return ins, outs


def _moved_shape(row: Instruction, source: Shape) -> Shape:
    """The shape of the result of a collective, transfer or local change of layout."""
    payload = row.define.payload
    size = DTYPES[payload["dtype"]][0] if "dtype" in payload else source[1]
    shape = row.define.result_shape
    return source[0] if shape is None else shape, size


def nominal_seconds(row: Instruction, ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    """Seconds of a nominal GPU."""
    if row.kind == "send":
        return sum(map(volume, row.define.payload["boxes"])) * ins[0][1] / cost.LINK
    traffic = sum(map(nbytes, (*ins, *outs)))
    if row.kind in COMMUNICATION:
        return traffic / cost.LINK
    if row.kind == "alias" or (outs and len(row.define.effects.views) == len(outs)):
        return 0.0
    if row.kind != "op":
        return traffic / cost.BYTES
    flops = cost.flops(row.define.payload["op"], [shape[0] for shape in ins], [shape[0] for shape in outs])
    return cost.seconds(flops, traffic)


def costs_of_rows(worker: int, rows: Sequence[Instruction], older: OlderShapes) -> tuple[list[float], list[list[int]]]:
    """Nominal seconds of each row of a worker, and bytes of each tensor that it makes."""
    known: dict[int, Shape] = {}
    constant: dict[int, tuple[float, list[Shape], list[int]]] = {}  # by definition of an op with constant shapes
    seconds, sizes = [], []
    for row in rows:
        number = row.define.number
        if number in constant:
            took, outs, sizes_of_outs = constant[number]
            known.update(zip(row.makes, outs))
        else:
            ins, outs = shapes(worker, row, known, older)
            sizes_of_outs = [nbytes(shape) for shape in outs]
            if UNKNOWN in ins or UNKNOWN in outs:  # a constant, or a shape that depends on values
                took = cost.seconds(0, sum(map(nbytes, ins)) + sum(sizes_of_outs))
            else:
                took = nominal_seconds(row, ins, outs)
            if row.kind == "op":
                constant[number] = took, outs, sizes_of_outs
        seconds.append(took)
        sizes.append(sizes_of_outs)
    return seconds, sizes


# ---- stages


def stage_costs(
    parts: Parts, meshes: Sequence[tuple[int, ...]], micro: int, times: InstructionTimes, end: Epilogue
) -> StageCosts:
    """A stage takes the time of the slowest of its workers in `parts`, for a micro-batch on the average.

    micro: how many micro-batches there are.
    """
    # Seconds are added up by worker, stage and letter with I and W apart: a schedule that has B adds both.
    seconds = times.seconds
    took: dict[tuple, float] = defaultdict(float)  # worker, stage, letter -> seconds of a step
    work = measured = 0.0
    for worker, rows in parts.items():
        for part in rows:
            action = part.action(True)
            if action is not None and not part.moves:
                one = seconds[part]
                took[worker, action[0], action[1]] += one
                work += one
                measured += one if part in times.measured else 0.0
    every = range(len(meshes))

    def each(letter: str) -> list[float]:
        return [max(took[worker, stage, letter] for worker in meshes[stage]) * MICRO / micro for stage in every]

    def once(letter: str) -> tuple[float | None, ...]:
        has = [any((worker, stage, letter) in took for worker in meshes[stage]) for stage in every]
        return tuple(time * micro + floor if some else None for time, some in zip(each(letter), has)) if any(has) else ()

    # An action that takes no time would start with its neighbour, and then the order of a worker's actions would be lost.
    forward, input, weight = each("F"), each("I"), each("W")
    floor = (sum(forward) + sum(input) + sum(weight)) / len(meshes) * LEAST_SHARE or 1.0
    activation, kept = _activations(parts, meshes, times)
    transfer = tuple(_transfer(parts, meshes, n, seconds) * MICRO / micro for n in every[:-1])
    forward, input, weight = ([max(time, floor) for time in row] for row in (forward, input, weight))
    costs = Costs(
        tuple(forward), tuple(input), tuple(weight), transfer, activation, kept,
        once("L"), once("R"), once("O"), overlap=False, joint=end.joint, own=end.own,
    )  # fmt: skip
    firsts = [next(worker for worker in mesh if worker in parts) for mesh in meshes]
    return StageCosts(costs, measured / work if work else 0.0, [_units(parts[firsts[n]], n, seconds) for n in every])


def _transfer(parts: Parts, meshes: Sequence[tuple[int, ...]], n: int, seconds: dict[ScheduledInstruction, float]) -> float:
    """Between stages n and n + 1, by what the busiest worker sends, the one way or the other."""
    # Both ways are one cost, as in Costs.transfer: activations of n go forward, gradients of n + 1 back, mostly of the
    # same shapes.
    if meshes[n] == meshes[n + 1]:
        return 0.0
    most = 0.0
    for stage, other, backward in ((n, n + 1, False), (n + 1, n, True)):
        for worker in meshes[stage]:
            sends = (p for p in parts.get(worker, ()) if p.row.kind == "send" and p.key is not None)
            own = (p for p in sends if (p.key.stage, p.key.backward) == (stage, backward))  # type: ignore[union-attr]
            most = max(most, sum(seconds[p] for p in own if p.row.define.payload["channel"]["peer"] in meshes[other]))
    return most


def _activations(
    parts: Parts, meshes: Sequence[tuple[int, ...]], times: InstructionTimes
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bytes that a micro-batch's forward leaves for its backward in each stage, and that its I leaves for its W."""
    # Memory that an action makes and a backward action of the same stage and micro-batch reads. What a W reads is held until
    # then in addition: from F (an input of the stage) or from I (a gradient that W multiplies it by).
    held: dict[tuple, int] = defaultdict(int)  # worker, stage, micro-batch, whether W reads it
    for worker, rows in parts.items():
        last: dict[int, tuple[ScheduledInstruction, bool]] = {}  # memory -> a backward part that reads it, and whether a W does
        for part in rows:
            if part.key is not None and part.key.backward and not (part.moves and part.row.kind != "send"):
                for base in part.memory.reads:
                    last[base] = part, part.weight or (base in last and last[base][1])
        for part in rows:
            views = part.row.define.effects.views
            for n, base in enumerate(part.memory.makes if part.key is not None else ()):
                if n not in views and base in last:
                    _hold(held, worker, part, last[base], times.sizes[part][n])
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


def _units(rows: Iterable[ScheduledInstruction], stage: int, seconds: dict[ScheduledInstruction, float]) -> list[Unit]:
    """Ops of a stage's first forward, each with its time and where it is from."""
    units = []
    for part in rows:
        took = seconds[part]
        if part.key == (stage, False, 0) and not part.moves and took:
            origin = part.op.origin
            name = part.op.known.template.op.removesuffix(".default")
            units.append((took, f"{origin.file.rpartition('/')[2]}:{origin.line} {name}" if origin.file else name))
    return units
