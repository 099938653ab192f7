"""What a schedule takes: start and end of every action, bubble and peak memory of every worker, or who waits for whom.

A worker does its row in order. F waits for the stage before, B and I for the stage after, plus the transfer where that is
another worker; W for its I; L, R and O for all their stage has before them. Where a stage is in several rows all of its actions
but W wait for all of these, and are done by them together. Knows costs, not what makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gt.dispatcher.schedule.actions import ONCE, Action, Rows, members, micro_batches
from gt.dispatcher.schedule.costs import Costs
from gt.dispatcher.schedule.placement import lags
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
    makespan = max(makespan, *run.link.values())
    return Timeline(run.start, run.end, makespan, tuple(makespan - busy for busy in run.busy), tuple(run.peak))


class _Run:
    """Ends of forwards by (stage + 1) * m + micro and of input gradients by stage * m + micro: where the neighbour that
    would be before stage 0, or after the last, has zeros."""

    def __init__(self, rows: Rows, costs: Costs) -> None:
        self.rows, self.costs, self.members = rows, costs, members(rows)
        self.m, stages = micro_batches(rows), len(self.members)
        self.shared = [len(some) > 1 for some in self.members]
        if costs.stages != stages:
            raise ValueError(f"costs are of {costs.stages} stages, and the rows have {stages}")
        self.lag = lags(self.members, costs)
        self.forward = [0.0] * self.m + [NEVER] * (stages * self.m)
        self.gradient = [NEVER] * (stages * self.m) + [0.0] * self.m
        self.left = [dict.fromkeys(some, self.m) for some in self.members]  # of each worker, weight gradients to come
        self.ready = [dict.fromkeys(some, 0.0) for some in self.members]  # its gradients, reduced where they are to be
        self.to_reduce = {(action.stage, worker) for worker, row in enumerate(rows) for action in row if action.kind == "R"}
        count = len(rows)
        self.at, self.clock, self.busy = [0] * count, [0.0] * count, [0.0] * count
        self.link = dict.fromkeys(range(count), 0.0)
        self.used, self.peak = [0.0] * count, [0.0] * count
        self.start: Times = [[] for _ in rows]
        self.end: Times = [[] for _ in rows]
        self.waiting: dict[int, int] = {}  # index of a forward, or -1 - index of a gradient: the worker that waits
        self.there: dict[Action, set[int]] = {}  # workers that have come to what they do together

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
                self.clock[worker], self.busy[worker] = clock, busy
                if not self.once(worker, stage, kind, able):
                    break
                clock, busy = self.clock[worker], self.busy[worker]
                continue
            if self.shared[stage] and kind != "W":
                self.clock[worker], self.busy[worker] = clock, busy
                self.used[worker], self.peak[worker] = used, peak
                if not self.meets(worker, Action(stage, kind, micro)):
                    break
                if ready == NEVER:
                    waiting[waits] = worker
                    break
                self.together(worker, stage, ready, took, able, change)
                clock, busy, used, peak = self.clock[worker], self.busy[worker], self.used[worker], self.peak[worker]
            elif ready == NEVER:
                waiting[waits] = worker
                break
            else:
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
                self.gradients(worker, stage, clock)
                continue
            else:
                gradient[cell], wakes = clock, -1 - cell
                for other in self.members[stage] if kind == "B" else ():
                    self.gradients(other, stage, clock)
            if wakes in waiting:
                able.append(waiting.pop(wakes))
        self.at[worker], self.clock[worker], self.busy[worker] = len(end), clock, busy
        self.used[worker], self.peak[worker] = used, peak

    def meets(self, worker: int, action: Action) -> bool:
        """Whether a worker is the last to come to what its stage's workers do together."""
        there = self.there.setdefault(action, set())
        there.add(worker)
        return len(there) == len(self.members[action.stage])

    def together(
        self, worker: int, stage: int, ready: float, took: float, able: list[int], change: float = 0.0, beside: bool = False
    ) -> float:
        """Do it, for all of them; when it ends. `able` gets the others. beside: what they compute goes on meanwhile."""
        some = self.members[stage]
        begin = max([ready, *(self.clock[other] for other in some)])
        for other in some:
            self.start[other].append(begin)
            self.end[other].append(begin + took)
            self.at[other] = len(self.end[other])
            if not beside:
                self.clock[other] = begin + took
                self.busy[other] += took
            self.used[other] += change
            self.peak[other] = max(self.peak[other], self.used[other])
        able += [other for other in some if other != worker]
        return begin + took

    def gradients(self, worker: int, stage: int, clock: float) -> None:
        self.left[stage][worker] -= 1
        self.ready[stage][worker] = clock

    def once(self, worker: int, stage: int, kind: str, able: list[int]) -> bool:
        """Do an L, R or O, if what it needs is there; of several that do it together the last to come does, for all."""
        some = self.members[stage]
        took = self.costs.once(kind, stage) or 0.0
        if not self.meets(worker, Action(stage, kind)) or any(self.lacks(w, stage, kind) is not None for w in some):
            return False
        ready = 0.0
        if kind == "O":
            ready = max(self.ready[other][w] for one in some for other, w in self.awaits(one, stage))
        elif kind == "R":
            ready = max(self.link[w] for w in some)
        end = self.together(worker, stage, ready, took, able, beside=kind == "R" and self.costs.overlap)
        if kind == "R":
            self.link.update(dict.fromkeys(some, end))
            self.ready[stage] = dict.fromkeys(some, end)
            self.to_reduce.difference_update((stage, w) for w in some)
        return True

    def awaits(self, worker: int, stage: int) -> list[tuple[int, int]]:
        """Stages whose gradients a worker's optimizer needs, and whose."""
        if self.costs.joint:
            return [(other, w) for other, some in enumerate(self.members) for w in some]
        if self.costs.own:
            return [(other, worker) for other, some in enumerate(self.members) if worker in some]
        return [(stage, worker)]

    def lacks(self, worker: int, stage: int, kind: str) -> Action | None:
        """What an L, R or O still waits for."""
        if kind == "L":
            missing = [i for i in range(self.m) if self.forward[(stage + 1) * self.m + i] == NEVER]
            return Action(stage, "F", missing[0]) if missing else None
        for other, w in self.awaits(worker, stage) if kind == "O" else [(stage, worker)]:
            if self.left[other][w]:
                return self.undone(w, other, "BW")
            if kind == "O" and (other, w) in self.to_reduce:
                return Action(other, "R")
        return None

    # ---- deadlock

    def undone(self, worker: int, stage: int, kinds: str) -> Action | None:
        """The first of such actions of a stage that is not done."""
        rest = self.rows[worker][self.at[worker] :]
        return next((action for action in rest if action.stage == stage and action.kind in kinds), None)

    def awaited(self, worker: int, action: Action) -> Action:
        """What an action waits for: the first that is not done."""
        stage, kind, micro = action
        if kind in ONCE:
            return self.lacks(worker, stage, kind) or action
        if self.shared[stage] and kind != "W" and len(self.there.get(action, ())) < len(self.members[stage]):
            return action
        if kind == "W":
            return Action(stage, "I", micro)
        if kind == "F":
            return Action(stage - 1, "F", micro)
        if self.forward[(stage + 1) * self.m + micro] == NEVER:
            return Action(stage, "F", micro)
        whole = Action(stage + 1, "B", micro)
        return whole if whole in self.rows[self.members[stage + 1][0]] else Action(stage + 1, "I", micro)

    def deadlock(self) -> str:
        """The circle of waits, or where the chain ends at an action that no row has."""
        worker = next(w for w, row in enumerate(self.rows) if self.at[w] < len(row))
        said: list[str] = []
        seen: set[int] = set()
        while worker not in seen:
            seen.add(worker)
            here = self.rows[worker][self.at[worker]]
            wanted = self.awaited(worker, here)
            waits = f"worker {worker} is at {here} and waits for {wanted}"
            some = self.members[wanted.stage]
            worker = next((w for w in some if w not in self.there.get(wanted, ())), some[0])
            if wanted not in self.rows[worker]:
                return f"the schedule never ends: {', '.join([*said, waits])}, which no row has"
            said.append(f"{waits} of worker {worker}")
        return f"the schedule never ends: {', '.join(said)}"
