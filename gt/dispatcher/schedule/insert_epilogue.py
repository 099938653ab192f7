"""Inserts a step's epilogue into the rows of a schedule: L, R and O of each stage. `programs/passes/epilogue.py` finds them.

They must not delay actions that other workers wait for: each takes the first gap that it fits into, else the end of its
row. Actions that several workers execute together are at the end, in one order for all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from gt.dispatcher.schedule.actions import Action, Row, Rows, members, whole
from gt.dispatcher.schedule.costs import Costs
from gt.dispatcher.schedule.simulate import Timeline, simulate

EPSILON = 1e-9
NEEDS = {"L": "F", "R": "BW", "O": "BWR"}  # letters of a stage that come before
Made = tuple[tuple[Action, ...], ...]
Slot = tuple[float, float, Action]  # start, end of its worker's compute, action
Insert = Callable[[list[Slot], int, float, float], tuple[int, float]]  # slots, first place, ready, time -> place, start


def insert_epilogue(rows: Rows, costs: Costs) -> Made:
    """Rows with L, R and O of each stage that has a time for them in `costs`, placed so that the step is shortest.

    An all-reduce that overlaps compute follows its stage's last W. An optimizer follows its stage's all-reduce, or those of
    all stages where it is joint. A simulation compares placement in gaps with the first possible place.
    """
    candidates: list[Made] = []
    for insert in (_in_a_gap, _at_once):
        placed = whole(rows)
        for kind in NEEDS:
            if any(costs.once(kind, stage) is not None for stage in range(costs.stages)):
                placed = _place(placed, costs, kind, _at_once if kind == "R" and costs.overlap else insert)
        if placed == whole(rows):
            return placed
        candidates.append(placed)
    return min(candidates, key=lambda placed: simulate(placed, costs).makespan)


def _place(rows: Made, costs: Costs, kind: str, insert: Insert) -> Made:
    """Rows with one letter added for every stage that has it, in the order in which stages are ready."""
    # A shared stage's L, R and O are meetings of its workers. They are at the ends of their rows and sorted alike in all of
    # them, so every worker has them in one order, and they cannot deadlock.
    line = simulate(rows, costs)
    ready = _ready(rows, line, costs, kind)
    shared = [len(workers) > 1 for workers in members(rows)]
    overlaps = kind == "R" and costs.overlap
    new_rows = []
    for worker, row in enumerate(rows):
        slots = _slots(row, line, worker, costs)
        for stage in sorted({action.stage for action in row}, key=lambda stage: (ready[stage], -stage)):
            took = costs.once(kind, stage)
            if took is not None:
                first = len(slots) if shared[stage] else _first(slots, costs, kind, stage)
                place, start = insert(slots, first, ready[stage], took)
                slots.insert(place, (start, start if overlaps else start + took, Action(stage, kind)))
        new_rows.append(tuple(action for _, _, action in slots))
    return tuple(new_rows)


def _slots(row: Row, line: Timeline, worker: int, costs: Costs) -> list[Slot]:
    """A worker's actions as slots. An all-reduce that overlaps compute takes no time where it is started."""
    slots: list[Slot] = []
    free = 0.0
    for action, start, end in zip(row, line.start[worker], line.end[worker]):
        overlaps = action.kind == "R" and costs.overlap
        slots.append((free, free, action) if overlaps else (start, end, action))
        free = free if overlaps else end
    return slots


def _first(slots: list[Slot], costs: Costs, kind: str, stage: int) -> int:
    """The place after the last action in the row that a stage's L, R or O depends on."""
    # With `joint` an optimizer waits for stages of other workers too, so it is at the end. With `own` it waits for all stages
    # of its worker, whichever stage it is counted for.
    every, own = kind == "O" and costs.joint, kind == "O" and costs.own
    mine = ((place, action) for place, (_, _, action) in enumerate(slots) if own or action.stage == stage)
    needed = (place for place, action in mine if action.kind in NEEDS[kind])
    return len(slots) if every else 1 + max(needed, default=-1)


def _ready(rows: Rows, line: Timeline, costs: Costs, kind: str) -> list[float]:
    """For each stage, the time at which its L, R or O can start."""
    ready = [0.0] * costs.stages
    for row, times in zip(rows, line.end):
        for action, end in zip(row, times):
            if action.kind in NEEDS[kind]:
                ready[action.stage] = max(ready[action.stage], end)
    if kind != "O" or not (costs.joint or costs.own):
        return ready
    if costs.joint:
        return [max(ready)] * costs.stages

    # `own`: the latest of the stages in a row is the time of all of them.
    last = [0.0] * costs.stages
    for row in rows:
        own = max((ready[action.stage] for action in row), default=0.0)
        for stage in {action.stage for action in row}:
            last[stage] = max(last[stage], own)
    return last


def _in_a_gap(slots: list[Slot], first: int, ready: float, took: float) -> tuple[int, float]:
    """The first place that delays no later action."""
    free = max((end for _, end, _ in slots[:first]), default=0.0)
    for place in range(first, len(slots)):
        start, end, _ = slots[place]
        if max(free, ready) + took <= start + EPSILON:
            return place, max(free, ready)
        free = max(free, end)
    return len(slots), max(free, ready)


def _at_once(slots: list[Slot], first: int, ready: float, took: float) -> tuple[int, float]:
    """The first place at or after the time `ready`."""
    place = next((place for place in range(first, len(slots)) if slots[place][0] >= ready - EPSILON), len(slots))
    return place, max([ready, *(end for _, end, _ in slots[:place])])
