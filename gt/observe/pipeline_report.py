"""What a step with micro-batches would take in a pipeline: costs of its stages, schedules, balance. By nominal times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from gt.dispatcher import schedule
from gt.dispatcher.programs.passes.stage_costs import MICRO
from gt.dispatcher.schedule import Action, Costs
from gt.dispatcher.schedule.auto import NoRoom
from gt.dispatcher.schedule.balance import Unit, balance
from gt.dispatcher.schedule.placement import Members, spread
from gt.dispatcher.sharding import cost
from gt.dispatcher.sharding.groups import SUFFIXES
from gt.errors import ConfigError
from gt.ir.schedules import asked, size
from gt.observe.dry_run import Dry, PlannedStep
from gt.observe.simulated_worker import OpAction, SimulatedInterval, SimulatedOp

TIMED = ("forward", "input", "weight", "transfer", "loss", "reduce", "optimizer")


@dataclass
class PipelineStages:
    """Stages in forward order. places: of each, the rows of its schedule; followed: the worker that stands for it."""

    names: list[str]
    places: list[Members]
    followed: list[int]
    micro: int

    @property
    def rows(self) -> int:
        return 1 + max(map(max, self.places))


def describe(dry: Dry, step: PlannedStep) -> dict[str, Any]:
    """Schedule, bubble and balance of a step; {} if it is no pipeline."""
    stages = _stages(dry, step)
    if stages is None:
        return {}
    costs = costs_of(dry, stages, step)
    found: dict[str, Any] = {"stages": stages.names, "places": [*map(list, stages.places)], "micro_batches": stages.micro}
    one = [sum(a for a, some in zip(costs.activation, stages.places) if row in some) for row in range(stages.rows)]
    found["micro_batch"] = one  # bytes that one leaves on each row's workers
    name, rows, why = _rows(stages, step, costs)
    found.update(schedule=name, why=why)
    if rows:
        line = schedule.simulate(rows, costs)
        found.update(
            rows=schedule.text(rows), makespan=line.makespan, bubble=[b / line.makespan for b in line.bubble], idle=line.idle,
            activations=list(line.peak), grid=schedule.show(rows, costs, 120),
        )  # fmt: skip
    found["choices"] = _choices(stages, costs, _trains(step))
    name, limit = asked(step.schedule) if step.schedule else ("1f1b", None)
    found["balance"] = balance(costs, _units(stages, step), stages.places, stages.micro, name, limit, _trains(step))
    return found


def _stages(dry: Dry, step: PlannedStep) -> PipelineStages | None:
    names = list(dict.fromkeys(place.stage for place in step.journal if not place.backward and not place.micro))
    meshes = [members(dry, name) for name in names]
    if len(set(meshes)) < 2:
        return None
    followed = [next(i for i in sorted(mesh) if i in dry.followed) for mesh in meshes]
    return PipelineStages(names, spread(meshes), followed, 1 + max(place.micro for place in step.journal))


def members(dry: Dry, stage: str) -> tuple[int, ...]:
    """Workers of a stage."""
    groups = dry.state.config.groups
    return next(groups[stage + end].flat for end in ("", *SUFFIXES) if stage + end in groups)


# ---- costs


def costs_of(dry: Dry, stages: PipelineStages, step: PlannedStep) -> Costs:
    """Nominal times and bytes of one micro-batch in each stage. Of a captured step the dispatcher has said the times."""
    forward, input, weight, activation = [], [], [], []
    for name, worker in zip(stages.names, stages.followed):
        stretch = step.stretches[worker]
        ahead, back = (_seconds(stretch, name, backward, stages.micro) for backward in (False, True))
        part = _of_weights(stretch, name)
        forward.append(ahead)
        input.append(back * (1 - part))
        weight.append(back * part)
        activation.append(float(_activations(stretch, name)))
    transfer = [_transfer(dry, stages, step, n) for n in range(len(stages.names) - 1)]
    kept = activation
    times = (tuple(forward), tuple(input), tuple(weight), tuple(transfer), tuple(activation), tuple(kept))
    told = (step.answer.get("schedule") or {}).get("costs")
    if told is None:
        return Costs(*times)
    found = Costs.from_wire(told)
    timed: dict[str, Any] = {name: _seconds_of(getattr(found, name)) for name in TIMED}
    return replace(found, **timed, activation=times[4], kept=times[5])


def _seconds_of(times: Sequence[float | None]) -> tuple:
    return tuple(None if time is None else time / MICRO for time in times)


def _seconds(stretch: SimulatedInterval, name: str, backward: bool, micro: int) -> float:
    work = stretch.work.items()
    return sum(w[2] for p, w in work if p.stage == name and p.backward == backward and p.micro >= 0) / micro


def _of_weights(stretch: SimulatedInterval, name: str) -> float:
    """What part of a stage's backward no other stage waits for."""
    rows = [row for row in stretch.first if row.by.backward]
    needed: set[int] = set()
    total = late = 0.0
    for row in reversed(rows):
        leads = row.sends or not needed.isdisjoint(row.makes)
        if leads:
            needed.update(row.reads)
        if row.by.stage == name:
            total += row.seconds
            late += 0.0 if leads else row.seconds
    return late / total if total else 0.0


def _activations(stretch: SimulatedInterval, name: str) -> int:
    """Bytes that the first micro-batch's forward leaves for its backward."""
    here = OpAction(name, False, 0)
    return sum(b.nbytes for b in stretch.made if b.by == here and b.last_by.backward)


def _transfer(dry: Dry, stages: PipelineStages, step: PlannedStep, n: int) -> float:
    """Time between stages n and n + 1, by what a worker of the one receives of the other's, and stages that lie so share."""
    ends = stages.places[n], stages.places[n + 1]
    if ends[0] == ends[1]:
        return 0.0
    alike = sum(sorted(pair) == sorted(ends) for pair in pairwise(stages.places))
    most = 0
    for here, there in ((n, n + 1), (n + 1, n)):
        peers = members(dry, stages.names[there])
        received = step.stretches[stages.followed[here]].received
        most = max(most, sum(nbytes for peer, nbytes in received.items() if peer in peers))
    return most / alike / stages.micro / cost.LINK


# ---- schedules


def _rows(stages: PipelineStages, step: PlannedStep, costs: Costs) -> tuple[str, Any, str]:
    """The schedule that was asked for, or the order as it is written."""
    order = step.answer.get("schedule") or {}
    if order.get("why"):
        return order["name"], None, order["why"]
    if order.get("rows"):
        return order["name"], schedule.parse(order["rows"]), ""
    try:
        if step.schedule:
            wanted, limit = asked(step.schedule)
            made = schedule.make(
                wanted, stages=len(stages.names), workers=stages.places, micro_batches=stages.micro, costs=costs, limit=limit,
                backward=_trains(step),
            )  # fmt: skip
            return made.name, made.rows, ""
        rows = _as_written(stages, step.journal)
        if _trains(step):
            schedule.check(rows)
        return "as written", rows, ""
    except NoRoom as error:
        return step.schedule, None, error.said(size)
    except (ConfigError, ValueError) as error:
        return step.schedule or "as written", None, str(error)


def _as_written(stages: PipelineStages, journal: Sequence[OpAction]) -> list[list[Action]]:
    rows: dict[int, dict[Action, None]] = defaultdict(dict)
    for place in journal:
        if place.stage in stages.names:
            stage = stages.names.index(place.stage)
            for row in stages.places[stage]:
                rows[row].setdefault(Action(stage, "B" if place.backward else "F", place.micro))
    return [list(rows[n]) for n in range(stages.rows)]


def _trains(step: PlannedStep) -> bool:
    return any(place.backward for place in step.journal)


def _choices(stages: PipelineStages, costs: Costs, trains: bool) -> dict[str, dict[str, float]]:
    """Every schedule that these stages can have."""
    found = {}
    for name in schedule.NAMES:
        with suppress(ConfigError):
            made = schedule.make(
                name, stages=len(stages.names), workers=stages.places, micro_batches=stages.micro, costs=costs, backward=trains
            )
            line = schedule.simulate(made.rows, costs)
            found[name] = {"makespan": line.makespan, "bubble": line.idle, "activations": max(line.peak)}
    return found


# ---- balance


def _units(stages: PipelineStages, step: PlannedStep) -> list[list[Unit]]:
    """Ops of each stage's first forward in order, with what they take and the weight they read."""
    found = []
    for name, worker in zip(stages.names, stages.followed):
        stretch = step.stretches[worker]
        names = {id(block): block.name for block in (*stretch.start, *stretch.made) if block.name}
        rows: list[SimulatedOp] = [row for row in stretch.first if row.by == OpAction(name, False, 0) and row.seconds]
        found.append([(row.seconds, next((names[i] for i in row.reads if i in names), "")) for row in rows])
    return found
