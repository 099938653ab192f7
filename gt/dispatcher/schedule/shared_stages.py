"""Schedules with a stage on several workers: a head whose vocabulary is split over the workers of all stages.

All of its workers meet for its F and I. Between two meetings each worker executes actions of its own stages; W of the head
needs no meeting. This balances a step, as in Yeung, Qi, Lin, Wan (Balancing Pipeline Parallelism with Vocabulary Parallelism,
2024). List scheduling gives several orders, and a simulation picks the best.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from gt.dispatcher.schedule.actions import Action, Rows
from gt.dispatcher.schedule.costs import Costs
from gt.dispatcher.schedule.placement import Members, lags

NEVER = float("inf")
NAMES = {"gpipe": (False,), "1f1b": (False,), "zb-h1": (True,), "auto": (True, False)}  # True: B is divided into I and W
AHEAD = (1.0, 1.5, 2.0, 3.0)  # forwards that a stage runs ahead of each later stage
LATE = (0.0, 0.35, 1.0)  # part of its time by which an action may delay a meeting, or a W the next action
MANY_FORWARDS = 256  # beyond, list scheduling takes tenths of a second, so fewer orders are tried
Found = tuple[float, int, Action]  # start, rank among equal starts, action


def orders(name: str, members: Sequence[Members], m: int, costs: Costs) -> Iterator[Rows]:
    """Several candidates for the rows of a schedule in NAMES; fewer where each takes long."""
    workers, forwards = 1 + max(map(max, members)), m * len(members)
    few = 3 if forwards <= MANY_FORWARDS else 2 if forwards <= 4 * MANY_FORWARDS else 1
    aheads = (NEVER,) if name == "gpipe" else AHEAD if few == 3 else AHEAD[1 : 1 + few]
    for split, ahead, late in product(NAMES[name], aheads, LATE[:few]):
        for apart in (workers, 1)[: max(1, few - 1)] if split else (None,):
            yield _Meetings(members, m, costs, ahead, late, apart).all()


@dataclass
class _Meetings:
    """List scheduling: the action that can start first runs first, I before F, unless it would delay a meeting by much.

    apart: number of W that a worker may delay without need; None for B instead of I and W.
    """

    members: Sequence[Members]
    m: int
    costs: Costs
    ahead: float
    late: float
    apart: int | None

    def __post_init__(self) -> None:
        stages, workers = range(len(self.members)), range(1 + max(w for members in self.members for w in members))
        self.lag = lags(self.members, self.costs)
        self.forward = [[NEVER] * self.m for _ in stages]  # ends
        self.gradient = [[NEVER] * self.m for _ in stages]
        self.went, self.back = [0 for _ in stages], [0 for _ in stages]
        self.all_first = self.ahead == NEVER  # all F before all B
        self.most = [self.m if self.all_first else 1 + self.ahead * (len(stages) - 1 - stage) for stage in stages]  # under way
        self.own = [[s for s in stages if self.members[s] == (w,)] for w in workers]
        self.met = [s for s in stages if len(self.members[s]) > 1]
        self.clock = [0.0 for _ in workers]
        self.pending: list[deque[Action]] = [deque() for _ in workers]
        self.rows: list[list[Action]] = [[] for _ in workers]

    def all(self) -> Rows:
        while True:
            able = [(*candidate, -1) for stage in self.met for candidate in self.able(stage)]  # -1: all workers of the stage
            gates = [NEVER] * len(self.own)
            for start, _, action, _ in able:
                for worker in self.members[action.stage]:
                    gates[worker] = min(gates[worker], start)
            able += [(*candidate, w) for w, gate in enumerate(gates) if (candidate := self.alone(w, gate)) is not None]
            if not able:
                return self.rows
            start, _, action, worker = min(able)
            self.do(self.members[action.stage] if worker < 0 else (worker,), action, start)

    def alone(self, worker: int, gate: float) -> Found | None:
        """A worker's next action of its own and its start. gate: time at which it has to be free for a meeting."""
        clock, best = self.clock[worker], min((f for s in self.own[worker] for f in self.able(s)), default=None)
        if best is not None and best[0] + (1 - self.late) * self.took(best[2]) > gate:
            best = None
        until = gate if best is None else best[0]
        if self.apart is not None and self.pending[worker]:
            weight = self.pending[worker][0]
            many = len(self.pending[worker]) > self.apart
            if clock < until and (many or clock + (1 - self.late) * self.took(weight) <= until):
                return clock, 0, weight
        return best

    def able(self, stage: int) -> Iterator[Found]:
        """A stage's next F and next I (or B), if their inputs are ready."""
        clock = max(self.clock[w] for w in self.members[stage])
        micro, last = self.back[stage], stage + 1 == len(self.members)
        if micro < self.went[stage] and not (self.all_first and min(self.went) < self.m):
            after = 0.0 if last else self.gradient[stage + 1][micro] + self.lag[stage + 1]
            ready = max(self.forward[stage][micro], after)
            if ready < NEVER:
                yield max(clock, ready), 0, Action(stage, "B" if self.apart is None else "I", micro)
        micro = self.went[stage]
        if micro < self.m and micro - self.back[stage] < self.most[stage]:
            ready = self.forward[stage - 1][micro] + self.lag[stage] if stage else 0.0
            if ready < NEVER:
                yield max(clock, ready), 1 + len(self.members) - stage, Action(stage, "F", micro)

    def took(self, action: Action) -> float:
        costs, (stage, kind, _) = self.costs, action
        if kind == "B":
            return costs.input[stage] + costs.weight[stage]
        return {"F": costs.forward, "I": costs.input, "W": costs.weight}[kind][stage]

    def do(self, workers: Members, action: Action, start: float) -> None:
        stage, kind, micro = action
        end = start + self.took(action)
        for worker in workers:
            self.rows[worker].append(action)
            self.clock[worker] = end
            if kind == "I":
                self.pending[worker].append(Action(stage, "W", micro))
        if kind == "F":
            self.forward[stage][micro] = end
            self.went[stage] += 1
        elif kind == "W":
            self.pending[workers[0]].popleft()
        else:
            self.gradient[stage][micro] = end
            self.back[stage] += 1
