"""Pipeline schedules: rows of actions by name, their simulated times and memory, and their text. Pure functions.

A planner calls `make`. `SCHEDULES` has every named schedule once; `auto` takes the best of them and of those that it builds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gt.dispatcher.schedule import auto, shared_stages
from gt.dispatcher.schedule.actions import Action, Rows, check, forwards, parse, text, whole
from gt.dispatcher.schedule.costs import Costs, uniform
from gt.dispatcher.schedule.insert_epilogue import insert_epilogue
from gt.dispatcher.schedule.one_f_one_b import gpipe, interleaved, one_f_one_b
from gt.dispatcher.schedule.placement import Members, checked
from gt.dispatcher.schedule.simulate import Timeline, simulate
from gt.dispatcher.schedule.table_text import show
from gt.dispatcher.schedule.zero_bubble import zb_h1, zb_v
from gt.errors import ConfigError
from gt.ir.schedules import NAMES

SCHEDULES: dict[str, auto.Table] = dict(zip(NAMES, (gpipe, one_f_one_b, zb_h1, interleaved, zb_v)))
__all__ = [
    "NAMES", "SCHEDULES", "Action", "Costs", "Schedule", "ScheduleRequest", "Timeline",
    "check", "insert_epilogue", "make", "parse", "show", "simulate", "text", "uniform",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScheduleRequest:
    """A schedule by name, and the pipeline that it is for.

    workers: worker, or workers, of each stage. limit: peak activation memory of any worker, or of each, in the unit of the
    costs. Without `backward` the schedule has forwards only.
    """

    name: str
    workers: Sequence[int | Members]
    micro_batches: int
    limit: float | Sequence[float] | None = None
    backward: bool = True


@dataclass(frozen=True, slots=True)
class Schedule:
    """One row of actions a worker. `workers` has the workers of each stage; `name` says which schedule it is."""

    name: str
    rows: tuple[tuple[Action, ...], ...]
    workers: tuple[Members, ...]

    def __str__(self) -> str:
        return text(self.rows)


def make(request: ScheduleRequest, costs: Costs | None = None) -> Schedule:
    """The schedule that is requested.

    A stage processes its micro-batches in order in every schedule, so all schedules give the same bits. `costs` place W of
    zero-bubble schedules, L, R and O, and `auto` minimizes them; by default all stages cost the same. ConfigError where the
    schedule does not permit the placement, or its activations exceed the limit.
    """
    # Validation first. Then one of three ways: stages on several workers, the choice of the best, or one schedule by name.
    name, micro_batches = request.name, request.micro_batches
    where = checked(request.workers)
    if name not in NAMES:
        raise ConfigError(f"{name!r} is not a schedule; want one of {', '.join(NAMES)}")
    if micro_batches < 1:
        raise ConfigError(f"{name} wants a micro-batch or more, got {micro_batches}")
    priced = costs or uniform(len(where))
    limits = _limits(request.limit, 1 + max(map(max, where)))
    if any(len(members) > 1 for members in where):
        return Schedule(name, whole(_shared(name, where, micro_batches, priced, limits, request.backward)), where)
    single = [members[0] for members in where]
    if name == "auto":
        name, rows = auto.choose(SCHEDULES, single, micro_batches, priced, limits, request.backward)
        return Schedule(name, whole(rows), where)
    rows = auto.named(SCHEDULES, name, single, micro_batches, costs)
    rows = rows if request.backward else forwards(rows)
    if costs is not None:  # without costs nobody knows which stages have an L, R or O
        rows = insert_epilogue(rows, costs)
    _keep_within(name, rows, priced, limits)
    return Schedule(name, whole(rows), where)


def _shared(name: str, where: Sequence[Members], micro_batches: int, costs: Costs, limits: list[float], backward: bool) -> Rows:
    if name not in shared_stages.NAMES:
        stage = next(stage for stage, members in enumerate(where) if len(members) > 1)
        raise ConfigError(
            f"{name} wants one worker for each stage, and stage {stage} is on workers {list(where[stage])} together: try "
            f"{' or '.join(shared_stages.NAMES)}"
        )
    # A named schedule that does not fit is an error with its peak. Only `auto` may choose a slower order that fits.
    most = limits if name == "auto" else [float("inf")] * len(limits)
    rows = auto.best(
        ((name, rows) for rows in shared_stages.orders(name, where, micro_batches, costs)), micro_batches, costs, most, backward
    )[1]
    _keep_within(name, rows, costs, limits)
    return rows


def _limits(limit: float | Sequence[float] | None, workers: int) -> list[float]:
    if limit is None or isinstance(limit, (int, float)):
        return [float("inf") if limit is None else float(limit)] * workers
    if len(limit) != workers:
        raise ConfigError(f"want a limit of memory for each of {workers} workers, got {len(limit)}")
    return list(limit)


def _keep_within(name: str, rows: Rows, costs: Costs, limits: list[float]) -> None:
    for worker, (peak, limit) in enumerate(zip(simulate(rows, costs).peak, limits)):
        if peak > limit * auto.CLOSE:
            text = f"{name} needs {{}} of activations on worker {worker}, and the limit is {{}}: try auto"
            raise auto.NoRoom(text, peak, limit)
