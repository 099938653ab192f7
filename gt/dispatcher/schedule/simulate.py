"""Simulation of a schedule: start and end of every action, bubble and peak memory of every worker, or the deadlock.

A worker executes its row in order. F waits for the stage before, B and I for the stage after, plus the transfer where that is
another worker. W waits for its I. L, R and O wait for all that they depend on. Several workers of one stage start each of its
actions together, but for W. Costs are inputs here: `programs/passes/stage_costs.py` estimates them.
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
    """Times in the unit of the costs. `bubble` of a worker is the makespan minus its computing time."""

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
    """Execute rows by their costs. ConfigError with the chain of waits where they never end."""
    run = _Run(rows, costs)
    run.all()
    makespan = max((times[-1] for times in run.end if times), default=0.0)
    # A reduction beside compute may end after later entries of its row, so the row's last end is not enough.
    makespan = max(makespan, *run.link.values())
    return Timeline(run.start, run.end, makespan, tuple(makespan - busy for busy in run.busy), tuple(run.peak))


class _Run:
    """State of a simulation of m micro-batches.

    `forward` has the ends of F by (stage + 1) * m + micro, `gradient` those of B and I by stage * m + micro. Entries of the
    missing neighbours, before stage 0 and after the last stage, are 0. An end is NEVER until its action has run. At most one
    worker waits for a cell: the stage's neighbour in that direction, or the stage itself for its W.

    `advance` keeps the state of its worker in locals. It writes them back before calls that change them.
    """

    def __init__(self, rows: Rows, costs: Costs) -> None:
        self.rows, self.costs, self.members = rows, costs, members(rows)
        self.m, stages = micro_batches(rows), len(self.members)
        self.shared = [len(mates) > 1 for mates in self.members]
        if costs.stages != stages:
            raise ValueError(f"costs are of {costs.stages} stages, and the rows have {stages}")
        self.lag = lags(self.members, costs)
        self.forward = [0.0] * self.m + [NEVER] * (stages * self.m)
        self.gradient = [NEVER] * (stages * self.m) + [0.0] * self.m
        self.left = [dict.fromkeys(mates, self.m) for mates in self.members]  # weight gradients to come, by worker
        self.ready = [dict.fromkeys(mates, 0.0) for mates in self.members]  # end of the last one, or of its reduction
        self.to_reduce = {(action.stage, worker) for worker, row in enumerate(rows) for action in row if action.kind == "R"}
        count = len(rows)
        self.at, self.clock, self.busy = [0] * count, [0.0] * count, [0.0] * count
        self.link = dict.fromkeys(range(count), 0.0)
        self.used, self.peak = [0.0] * count, [0.0] * count
        self.start: Times = [[] for _ in rows]
        self.end: Times = [[] for _ in rows]
        self.waiting: dict[int, int] = {}  # index of a forward, or -1 - index of a gradient -> the worker that waits for it
        self.arrived: dict[Action, set[int]] = {}  # workers that have reached an action of a shared stage
        self.able = list(range(count))  # workers that may be able to advance

    def all(self) -> None:
        """Advance all workers to their ends. A worker at an L, R or O is tried again once all others wait."""
        # F, B and I wake those that wait for them (`waiting`). An L, R or O may wait for many actions at once, so no single
        # one wakes it. It is tried again when nobody else can advance, until a round of tries executes nothing.
        done = -1
        while self.able:
            while self.able:
                self.advance(self.able.pop())
            at_once = [w for w, row in enumerate(self.rows) if self.at[w] < len(row) and row[self.at[w]].kind in ONCE]
            if sum(self.at) > done:
                done, self.able = sum(self.at), at_once
        if sum(self.at) < sum(map(len, self.rows)):
            raise ConfigError(self.deadlock())

    # Stages of a turn of the loop of `advance`:
    # 1. By kind: when the action may start (`ready`), the cell that it waits for (`waits`), its time (`took`) and its change
    #    of the memory in use (`change`).
    # 2. Execution. Of a shared stage, the last worker to arrive executes the action for all its mates.
    # 3. Its end is published in `forward` or `gradient`, and the worker that waits for this cell (`wakes`) may advance.
    def advance(self, worker: int) -> None:
        """Advance one worker until it waits, and wake those that wait for it. One long loop: `auto` runs it very often."""
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
                ready = NEVER if forward[cell + m] == NEVER else gradient[cell + m] + lag[stage + 1]
                waits, took, change = -1 - cell - m, costs.input[stage], -costs.activation[stage]
                if kind == "B":
                    took += costs.weight[stage]
                else:
                    change += costs.kept[stage]
            else:
                self.clock[worker], self.busy[worker] = clock, busy
                if not self.once(worker, stage, kind):
                    break
                clock, busy = self.clock[worker], self.busy[worker]
                continue
            if self.shared[stage] and kind != "W":
                self.clock[worker], self.busy[worker] = clock, busy
                self.used[worker], self.peak[worker] = used, peak
                if not self.arrive(worker, Action(stage, kind, micro)):
                    break
                if ready == NEVER:
                    waiting[waits] = worker
                    break
                self.together(worker, stage, ready, took, change)
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
                self.count_gradient(worker, stage, clock)
                continue
            else:
                gradient[cell], wakes = clock, -1 - cell
                for other in self.members[stage] if kind == "B" else ():
                    self.count_gradient(other, stage, clock)
            if wakes in waiting:
                self.able.append(waiting.pop(wakes))
        self.at[worker], self.clock[worker], self.busy[worker] = len(end), clock, busy
        self.used[worker], self.peak[worker] = used, peak

    def arrive(self, worker: int, action: Action) -> bool:
        """Note that a worker has reached an action of a shared stage; True for the last of the stage's workers."""
        arrived = self.arrived.setdefault(action, set())
        arrived.add(worker)
        return len(arrived) == len(self.members[action.stage])

    def together(self, worker: int, stage: int, ready: float, took: float, change: float = 0.0, beside: bool = False) -> float:
        """Execute an action on all workers of its stage, and return its end. beside: their compute goes on meanwhile."""
        mates = self.members[stage]
        begin = max([ready, *(self.clock[mate] for mate in mates)])
        for mate in mates:
            self.start[mate].append(begin)
            self.end[mate].append(begin + took)
            self.at[mate] = len(self.end[mate])
            if not beside:
                self.clock[mate] = begin + took
                self.busy[mate] += took
            self.used[mate] += change
            self.peak[mate] = max(self.peak[mate], self.used[mate])
        # The caller goes on with its own row; its mates had stopped at this action.
        self.able += [mate for mate in mates if mate != worker]
        return begin + took

    # A W, or a B that has a W in it, is done at this time.
    def count_gradient(self, worker: int, stage: int, clock: float) -> None:
        self.left[stage][worker] -= 1
        self.ready[stage][worker] = clock

    def once(self, worker: int, stage: int, kind: str) -> bool:
        """Execute an L, R or O, if its inputs are ready and all workers of the stage have reached it."""
        mates = self.members[stage]
        took = self.costs.once(kind, stage) or 0.0
        if not self.arrive(worker, Action(stage, kind)) or any(self.lacks(w, stage, kind) is not None for w in mates):
            return False
        ready = 0.0
        if kind == "O":  # an optimizer with gradient clipping needs the gradients of all stages, see `gradients_of`
            ready = max(self.ready[other][w] for mate in mates for other, w in self.gradients_of(mate, stage))
        elif kind == "R":  # reductions of a worker share its link, one after the other
            ready = max(self.link[w] for w in mates)
        end = self.together(worker, stage, ready, took, beside=kind == "R" and self.costs.overlap)
        if kind == "R":
            self.link.update(dict.fromkeys(mates, end))
            self.ready[stage] = dict.fromkeys(mates, end)
            self.to_reduce.difference_update((stage, w) for w in mates)
        return True

    def gradients_of(self, worker: int, stage: int) -> list[tuple[int, int]]:
        """(stage, worker) of all gradients that a worker's optimizer needs."""
        if self.costs.joint:
            return [(other, w) for other, mates in enumerate(self.members) for w in mates]
        if self.costs.own:
            return [(other, worker) for other, mates in enumerate(self.members) if worker in mates]
        return [(stage, worker)]

    def lacks(self, worker: int, stage: int, kind: str) -> Action | None:
        """The first action that an L, R or O still waits for."""
        if kind == "L":
            missing = [i for i in range(self.m) if self.forward[(stage + 1) * self.m + i] == NEVER]
            return Action(stage, "F", missing[0]) if missing else None
        for other, w in self.gradients_of(worker, stage) if kind == "O" else [(stage, worker)]:
            if self.left[other][w]:
                return self.undone(w, other, "BW")
            if kind == "O" and (other, w) in self.to_reduce:
                return Action(other, "R")
        return None

    # ---- deadlock

    def undone(self, worker: int, stage: int, kinds: str) -> Action | None:
        """The first action of these kinds of a stage that a worker has not executed."""
        rest = self.rows[worker][self.at[worker] :]
        return next((action for action in rest if action.stage == stage and action.kind in kinds), None)

    def awaited(self, worker: int, action: Action) -> Action:
        """The first action that an action waits for."""
        stage, kind, micro = action
        if kind in ONCE:
            return self.lacks(worker, stage, kind) or action
        if self.shared[stage] and kind != "W" and len(self.arrived.get(action, ())) < len(self.members[stage]):
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
        """The circle of waits, or the chain of waits that ends at an action that no row has."""
        worker = next(w for w, row in enumerate(self.rows) if self.at[w] < len(row))
        chain: list[str] = []
        seen: set[int] = set()
        while worker not in seen:
            seen.add(worker)
            here = self.rows[worker][self.at[worker]]
            wanted = self.awaited(worker, here)
            waits = f"worker {worker} is at {here} and waits for {wanted}"
            mates = self.members[wanted.stage]
            worker = next((w for w in mates if w not in self.arrived.get(wanted, ())), mates[0])
            if wanted not in self.rows[worker]:
                return f"the schedule never ends: {', '.join([*chain, waits])}, which no row has"
            chain.append(f"{waits} of worker {worker}")
        return f"the schedule never ends: {', '.join(chain)}"
