"""What a schedule takes: start and end of every action, bubble and peak memory of every worker, or who waits for whom.

A worker does its row in order. F waits for the stage before, B and I for the stage after, plus the transfer where that is
another worker; W for its I; L, R and O for all their stage has before them. Knows costs, not what makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gt.dispatcher.schedule.actions import ONCE, Action, Rows, micro_batches, placement
from gt.dispatcher.schedule.blocks import lags
from gt.dispatcher.schedule.costs import Costs
from gt.errors import ConfigError

NEVER = float("inf")
Times = list[list[float]]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times in the unit of the costs. `bubble` of a worker is the makespan minus what it computes."""

    start: Times
    end: Times
    makespan: float
    bubble: tuple[float, ...]
    peak: tuple[float, ...]

    @property
    def idle(self) -> float:
        """Part of all workers' time that is bubble, 0 to 1."""
        return sum(self.bubble) / (len(self.bubble) * self.makespan) if self.makespan else 0.0


def simulate(rows: Rows, costs: Costs) -> Timeline:
    """Carry rows out by their costs. ConfigError with the chain of waits where they never end."""
    run = _Run(rows, costs)
    run.all()
    makespan = max((times[-1] for times in run.end if times), default=0.0)
    makespan = max(makespan, *run.link)
    return Timeline(run.start, run.end, makespan, tuple(makespan - busy for busy in run.busy), tuple(run.peak))


class _Run:
    """Ends of forwards by (stage + 1) * m + micro and of input gradients by stage * m + micro: where the neighbour that
    would be before stage 0, or after the last, has zeros."""

    def __init__(self, rows: Rows, costs: Costs) -> None:
        self.rows, self.costs, self.workers = rows, costs, placement(rows)
        self.m, stages = micro_batches(rows), len(self.workers)
        if costs.stages != stages:
            raise ValueError(f"costs are of {costs.stages} stages, and the rows have {stages}")
        self.lag = lags(self.workers, costs)
        self.forward = [0.0] * self.m + [NEVER] * (stages * self.m)
        self.gradient = [NEVER] * (stages * self.m) + [0.0] * self.m
        self.left = [self.m] * stages  # weight gradients to come
        self.ready = [0.0] * stages  # a stage's gradients, reduced where they are to be
        self.to_reduce = {action.stage for row in rows for action in row if action.kind == "R"}
        count = len(rows)
        self.at, self.clock, self.busy, self.link = [0] * count, [0.0] * count, [0.0] * count, [0.0] * count
        self.used, self.peak = [0.0] * count, [0.0] * count
        self.start: Times = [[] for _ in rows]
        self.end: Times = [[] for _ in rows]
        self.waiting: dict[int, int] = {}  # index of a forward, or -1 - index of a gradient: the worker that waits

    def all(self) -> None:
        """Workers go on as far as they can; those at an L, R or O are asked again once all others stand."""
        able, done = list(range(len(self.rows))), -1
        while able:
            while able:
                self.go_on(able.pop(), able)
            stand = [w for w, row in enumerate(self.rows) if self.at[w] < len(row) and row[self.at[w]].kind in ONCE]
            if sum(self.at) > done:
                done, able = sum(self.at), stand
        if sum(self.at) < sum(map(len, self.rows)):
            raise ConfigError(self.deadlock())

    def go_on(self, worker: int, able: list[int]) -> None:
        """As far as a worker can; whom it wakes is added to `able`. One long loop, since `auto` runs it very often."""
        row, m, costs, lag, forward, gradient = self.rows[worker], self.m, self.costs, self.lag, self.forward, self.gradient
        start, end, waiting = self.start[worker], self.end[worker], self.waiting
        clock, used, peak, busy = self.clock[worker], self.used[worker], self.peak[worker], self.busy[worker]
        for stage, kind, micro in row[self.at[worker] :]:
            cell = stage * m + micro
            if kind == "F":
                ready, waits = forward[cell] + lag[stage], cell
                took, change = costs.forward[stage], costs.activation[stage]
            elif kind == "W":
                ready, waits = gradient[cell], -1 - cell
                took, change = costs.weight[stage], -costs.kept[stage]
            elif kind == "B" or kind == "I":
                ready, waits = gradient[cell + m] + lag[stage + 1], -1 - cell - m
                if forward[cell + m] == NEVER:
                    ready = NEVER
                took, change = costs.input[stage], -costs.activation[stage]
                if kind == "B":
                    took += costs.weight[stage]
                else:
                    change += costs.kept[stage]
            else:
                self.clock[worker], self.at[worker] = clock, len(end)
                if not self.once(worker, stage, kind):
                    break
                clock = self.clock[worker]
                busy += end[-1] - start[-1] if kind != "R" or not costs.overlap else 0.0
                continue
            if ready == NEVER:
                waiting[waits] = worker
                break
            clock = ready if ready > clock else clock
            start.append(clock)
            clock += took
            end.append(clock)
            busy += took
            used += change
            peak = used if used > peak else peak
            if kind == "F":
                forward[cell + m], wakes = clock, cell + m
            elif kind == "W":
                self.gradients(stage, clock)
                continue
            else:
                gradient[cell], wakes = clock, -1 - cell
                if kind == "B":
                    self.gradients(stage, clock)
            if wakes in waiting:
                able.append(waiting.pop(wakes))
        self.at[worker], self.clock[worker], self.busy[worker] = len(end), clock, busy
        self.used[worker], self.peak[worker] = used, peak

    def gradients(self, stage: int, clock: float) -> None:
        self.left[stage] -= 1
        self.ready[stage] = clock

    def once(self, worker: int, stage: int, kind: str) -> bool:
        """Do an L, R or O, if what it needs is there."""
        begin = self.clock[worker]
        took = self.costs.once(kind, stage) or 0.0
        if self.lacks(stage, kind) is not None:
            return False
        if kind == "O":
            begin = max([begin, *(self.ready[other] for other in self.awaits(stage))])
        if kind == "R":
            begin = max(begin, self.link[worker])
            self.link[worker] = self.ready[stage] = begin + took
            self.to_reduce.discard(stage)
        self.start[worker].append(begin)
        self.end[worker].append(begin + took)
        if kind != "R" or not self.costs.overlap:
            self.clock[worker] = begin + took
        return True

    def awaits(self, stage: int) -> Sequence[int]:
        """Stages whose gradients an optimizer needs."""
        if self.costs.joint:
            return range(len(self.workers))
        return [s for s, worker in enumerate(self.workers) if worker == self.workers[stage]] if self.costs.own else [stage]

    def lacks(self, stage: int, kind: str) -> Action | None:
        """What an L, R or O still waits for."""
        if kind == "L":
            missing = [i for i in range(self.m) if self.forward[(stage + 1) * self.m + i] == NEVER]
            return Action(stage, "F", missing[0]) if missing else None
        for other in self.awaits(stage) if kind == "O" else [stage]:
            if self.left[other]:
                return self.undone(other, "BW")
            if kind == "O" and other in self.to_reduce:
                return Action(other, "R")
        return None

    # ---- deadlock

    def undone(self, stage: int, kinds: str) -> Action | None:
        """The first of such actions of a stage that is not done."""
        worker = self.workers[stage]
        rest = self.rows[worker][self.at[worker] :]
        return next((action for action in rest if action.stage == stage and action.kind in kinds), None)

    def awaited(self, action: Action) -> Action:
        """What an action waits for: the first that is not done."""
        stage, kind, micro = action
        if kind in ONCE:
            return self.lacks(stage, kind) or action
        if kind == "W":
            return Action(stage, "I", micro)
        if kind == "F":
            return Action(stage - 1, "F", micro)
        if self.forward[(stage + 1) * self.m + micro] == NEVER:
            return Action(stage, "F", micro)
        whole = Action(stage + 1, "B", micro)
        return whole if whole in self.rows[self.workers[stage + 1]] else Action(stage + 1, "I", micro)

    def deadlock(self) -> str:
        """The circle of waits, or where the chain ends at an action that no row has."""
        worker = next(w for w, row in enumerate(self.rows) if self.at[w] < len(row))
        said: list[str] = []
        seen: set[int] = set()
        while worker not in seen:
            seen.add(worker)
            here = self.rows[worker][self.at[worker]]
            wanted = self.awaited(here)
            worker, waits = self.workers[wanted.stage], f"worker {worker} is at {here} and waits for {wanted}"
            if wanted not in self.rows[worker]:
                return f"the schedule never ends: {', '.join([*said, waits])}, which no row has"
            said.append(f"{waits} of worker {worker}")
        return f"the schedule never ends: {', '.join(said)}"
