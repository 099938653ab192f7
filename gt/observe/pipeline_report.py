"""A step with micro-batches as a pipeline: costs of its stages, schedules, balance. By nominal times of the dispatcher."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from gt.dispatcher import schedule
from gt.dispatcher.programs.passes.pipeline import NoPipeline, PricedPipeline, price_pipeline
from gt.dispatcher.programs.passes.stage_costs import MICRO
from gt.dispatcher.programs.recording import Instruction
from gt.dispatcher.programs.reorder_check import CannotReorder
from gt.dispatcher.schedule import Action, Costs, Rows, ScheduleRequest
from gt.dispatcher.schedule.auto import NoRoom
from gt.dispatcher.schedule.balance import balance
from gt.dispatcher.sharding.groups import SUFFIXES
from gt.dispatcher.state.failures import Planned
from gt.errors import ConfigError
from gt.ir.schedules import asked
from gt.ir.text import size
from gt.observe.dry_run import Dry, PlannedStep

TIMED = ("forward", "input", "weight", "transfer", "loss", "reduce", "optimizer")


@dataclass
class ReportedSchedule:
    """The schedule of a step, by name. `rows` is None where it cannot be used, for the reason `why`."""

    name: str
    rows: Rows | None
    why: str = ""


def describe(dry: Dry, step: PlannedStep) -> dict[str, Any]:
    """Schedule, bubble and balance of a step; {} if it is no pipeline."""
    journal, code = (step.journal, step.code) if step.answer else _last_pass(step)
    try:
        pipe = price_pipeline(journal, code, {}, step.shape_of)
    except NoPipeline:
        return {}
    except CannotReorder as error:
        return {"schedule": step.schedule or "as written", "why": str(error)}

    # Bytes of activations: those of a stage count on every row that executes it.
    stages, costs = pipe.stages, _costs(pipe, step)
    count = 1 + max(map(max, pipe.places))
    report: dict[str, Any] = {"stages": stages.names, "places": [*map(list, pipe.places)], "micro_batches": stages.micro}
    report["micro_batch"] = [  # bytes of activations of one micro-batch on each row's workers
        sum(nbytes for nbytes, rows in zip(costs.activation, pipe.places) if row in rows) for row in range(count)
    ]
    chosen = _schedule(pipe, step, costs)
    report.update(schedule=chosen.name, why=chosen.why)
    if chosen.rows:
        line = schedule.simulate(chosen.rows, costs)
        report.update(
            rows=schedule.text(chosen.rows), makespan=line.makespan, bubble=[b / line.makespan for b in line.bubble],
            idle=line.idle, activations=list(line.peak), grid=schedule.show(chosen.rows, costs, 120),
        )  # fmt: skip
    report["choices"] = _choices(pipe, costs)
    name, limit = asked(step.schedule) if step.schedule else ("1f1b", None)
    request = ScheduleRequest(name, pipe.places, stages.micro, limit, stages.backward)
    report["balance"] = balance(costs, pipe.priced.units, request)
    return report


def members(dry: Dry, stage: str) -> tuple[int, ...]:
    """Workers of a stage."""
    groups = dry.state.config.groups
    return next(groups[stage + end].flat for end in ("", *SUFFIXES) if stage + end in groups)


def _last_pass(step: PlannedStep) -> tuple[list[Planned], dict[int, list[Instruction]]]:
    """Ops and instructions from the last time on that micro-batch 0 begins: a step that is not captured may have several."""
    # A pass begins where the micro-batch of a forward op goes back, as from 3 to 0.
    micro = start = 0
    for place, op in enumerate(step.journal):
        if op.origin.micro >= 0 and not op.origin.backward:
            start = place if op.origin.micro < micro else start
            micro = op.origin.micro
    first = step.journal[start].seq if start else 0
    return step.journal[start:], {worker: [row for row in rows if row.seq >= first] for worker, rows in step.code.items()}


def _costs(pipe: PricedPipeline, step: PlannedStep) -> Costs:
    """Costs in seconds and bytes: those by which the dispatcher scheduled a captured step, else nominal costs."""
    told = (step.answer.get("schedule") or {}).get("costs")
    costs = pipe.priced.costs if told is None else Costs.from_wire(told)
    timed: dict[str, Any] = {name: _seconds(getattr(costs, name)) for name in TIMED}
    return replace(costs, **timed)


def _seconds(times: Sequence[float | None]) -> tuple:
    return tuple(None if time is None else time / MICRO for time in times)


# ---- schedules


def _schedule(pipe: PricedPipeline, step: PlannedStep, costs: Costs) -> ReportedSchedule:
    """The schedule that was asked for, or the order as it is written."""
    # 1. Of a captured step the dispatcher has decided. 2. Else the schedule that was asked for is made here from nominal costs.
    # 3. Without one, the order in which the program runs its micro-batches is simulated.
    order = step.answer.get("schedule") or {}
    if order.get("why"):
        return ReportedSchedule(order["name"], None, order["why"])
    if order.get("rows"):
        return ReportedSchedule(order["name"], schedule.parse(order["rows"]))
    stages = pipe.stages
    try:
        if step.schedule:
            name, limit = asked(step.schedule)
            made = schedule.make(ScheduleRequest(name, pipe.places, stages.micro, limit, stages.backward), costs)
            return ReportedSchedule(made.name, made.rows)
        rows = _as_written(pipe, step)
        if stages.backward:
            schedule.check(rows)
        return ReportedSchedule("as written", schedule.insert_epilogue(rows, costs))
    except NoRoom as error:
        return ReportedSchedule(step.schedule, None, error.said(size))
    except (ConfigError, ValueError) as error:
        return ReportedSchedule(step.schedule or "as written", None, str(error))


def _as_written(pipe: PricedPipeline, step: PlannedStep) -> list[list[Action]]:
    rows: dict[int, dict[Action, None]] = defaultdict(dict)
    for op in step.journal:
        if key := pipe.stages.keys.get(op.seq):
            for row in pipe.places[key.stage]:
                rows[row].setdefault(Action(key.stage, "B" if key.backward else "F", key.micro))
    return [list(rows[n]) for n in range(1 + max(map(max, pipe.places)))]


def _choices(pipe: PricedPipeline, costs: Costs) -> dict[str, dict[str, float]]:
    """Every schedule that these stages can have."""
    choices = {}
    for name in schedule.NAMES:
        with suppress(ConfigError):
            made = schedule.make(ScheduleRequest(name, pipe.places, pipe.stages.micro, backward=pipe.stages.backward), costs)
            line = schedule.simulate(made.rows, costs)
            choices[name] = {"makespan": line.makespan, "bubble": line.idle, "activations": max(line.peak)}
    return choices
