"""Schedules with a stage on several workers: a head whose vocabulary is split over the workers of all stages.

All of its workers meet for its F and I. Between two meetings each worker executes actions of its own stages; W of the head
needs no meeting. This balances a step, as in Yeung, Qi, Lin, Wan (Balancing Pipeline Parallelism with Vocabulary Parallelism,
2024). List scheduling gives several orders, and a simulation picks the best.

Example, stages 0 and 1 on workers 0 and 1, and stage 2 (the head) on both, so that its actions are meetings:

    worker 0:  0F0 0F1 2F0 2B0---- 0F2 ....0B0---- 2F1 2B1---- 2F2 2B2---- ........0B1---- 0B2----
    worker 1:  ....1F0 2F0 2B0---- 1B0---- 1F1 1F2 2F1 2B1---- 2F2 2B2---- 1B1---- 1B2----
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
# By name, the forms of B to try: True for I and W, False for one action.
NAMES = {"gpipe": (False,), "1f1b": (False,), "zb-h1": (True,), "auto": (True, False)}
AHEAD = (1.0, 1.5, 2.0, 3.0)  # forwards that a stage runs ahead of each later stage
LATE = (0.0, 0.35, 1.0)  # part of its time by which an action may delay a meeting, or a W the next action
MANY_FORWARDS = 256  # beyond, list scheduling takes tenths of a second, so fewer orders are tried
Offer = tuple[float, int, Action]  # start, rank among equal starts, action


def orders(name: str, members: Sequence[Members], micro_batches: int, costs: Costs) -> Iterator[Rows]:
    """Several candidates for the rows of a schedule in NAMES; fewer where each takes long."""
    workers, forwards = 1 + max(map(max, members)), micro_batches * len(members)
    # Values of each parameter that are tried: the orders are the product of all of them.
    few = 3 if forwards <= MANY_FORWARDS else 2 if forwards <= 4 * MANY_FORWARDS else 1
    aheads = (NEVER,) if name == "gpipe" else AHEAD if few == 3 else AHEAD[1 : 1 + few]
    for split, ahead, late in product(NAMES[name], aheads, LATE[:few]):
        # A W may be put off by as many I as there are workers, or by one only: that holds less memory.
        for apart in (workers, 1)[: max(1, few - 1)] if split else (None,):
            yield _Meetings(members, micro_batches, costs, ahead, late, apart).all()


@dataclass
class _Meetings:
    """List scheduling: the action that can start first runs first, I before F, unless it would delay a meeting by much.

    ahead: forwards that a stage may run ahead of each later stage. late: see LATE. apart: number of W that a worker may delay
    without need; None for B instead of I and W.
    """

    # One turn of `all`:
    # 1. `able` finds the next F and I of each shared stage. Their starts are the meetings that are possible now.
    # 2. A worker's gate is the earliest meeting of a stage that it is in. `alone` finds each worker's next action of its own
    #    stages, or a W, and offers none that would end long after the gate.
    # 3. The earliest of all these actions is executed: a meeting on all of its workers, another action on one worker.
    # A meeting that was not executed has no reservation. Each turn finds the possible meetings again from the clocks.

    members: Sequence[Members]
    micro_batches: int
    costs: Costs
    ahead: float
    late: float
    apart: int | None

    def __post_init__(self) -> None:
        stages, workers = range(len(self.members)), range(1 + max(w for members in self.members for w in members))
        # By stage and micro-batch: ends of F, and of I or B. NEVER until the action is in the rows.
        self.lag = lags(self.members, self.costs)
        self.forward = [[NEVER] * self.micro_batches for _ in stages]
        self.gradient = [[NEVER] * self.micro_batches for _ in stages]
        # By stage: micro-batches that have gone forward, and those that have come back. The difference is under way, and its
        # activations are alive: `most` is the limit of that.
        self.went, self.back = [0 for _ in stages], [0 for _ in stages]
        self.all_first = self.ahead == NEVER  # all F before all B
        self.most = [self.micro_batches if self.all_first else 1 + self.ahead * (len(stages) - 1 - stage) for stage in stages]
        self.own = [[stage for stage in stages if self.members[stage] == (worker,)] for worker in workers]
        self.met = [stage for stage in stages if len(self.members[stage]) > 1]
        # By worker: end of its last action, W whose I is done, and the result.
        self.clock = [0.0 for _ in workers]
        self.pending: list[deque[Action]] = [deque() for _ in workers]
        self.rows: list[list[Action]] = [[] for _ in workers]

    def all(self) -> Rows:
        while True:
            # (start, rank, action, worker); -1 stands for all workers of the stage.
            able = [(*candidate, -1) for stage in self.met for candidate in self.able(stage)]
            gates = [NEVER] * len(self.own)
            for start, _, action, _ in able:
                for worker in self.members[action.stage]:
                    gates[worker] = min(gates[worker], start)

            able += [(*candidate, w) for w, gate in enumerate(gates) if (candidate := self.alone(w, gate)) is not None]
            if not able:
                return self.rows

            # A worker without a gate offers every action that it can do, so `able` is empty only when all is done.
            start, _, action, worker = min(able)
            self.do(self.members[action.stage] if worker < 0 else (worker,), action, start)

    def alone(self, worker: int, gate: float) -> Offer | None:
        """A worker's next action of its own and its start. gate: time at which it has to be free for a meeting."""
        clock, best = self.clock[worker], min((offer for stage in self.own[worker] for offer in self.able(stage)), default=None)
        if best is not None and best[0] + (1 - self.late) * self.took(best[2]) > gate:
            best = None

        # A W takes the time that is idle until then, if it fits. With too many of them it need not fit: they hold memory.
        until = gate if best is None else best[0]
        if self.apart is not None and self.pending[worker]:
            weight = self.pending[worker][0]
            many = len(self.pending[worker]) > self.apart
            if clock < until and (many or clock + (1 - self.late) * self.took(weight) <= until):
                return clock, 0, weight
        return best

    def able(self, stage: int) -> Iterator[Offer]:
        """A stage's next F and next I (or B), if their inputs are ready."""
        clock = max(self.clock[worker] for worker in self.members[stage])  # all of them have to be free
        # Micro-batches pass a stage in order, so the next to come back is the one after those that have.
        micro, last = self.back[stage], stage + 1 == len(self.members)
        if micro < self.went[stage] and not (self.all_first and min(self.went) < self.micro_batches):
            after = 0.0 if last else self.gradient[stage + 1][micro] + self.lag[stage + 1]
            ready = max(self.forward[stage][micro], after)
            if ready < NEVER:
                yield max(clock, ready), 0, Action(stage, "B" if self.apart is None else "I", micro)
        micro = self.went[stage]
        if micro < self.micro_batches and micro - self.back[stage] < self.most[stage]:
            ready = self.forward[stage - 1][micro] + self.lag[stage] if stage else 0.0
            if ready < NEVER:
                # Among equal starts a later stage goes first: its micro-batch turns back sooner, and frees its memory.
                yield max(clock, ready), 1 + len(self.members) - stage, Action(stage, "F", micro)

    def took(self, action: Action) -> float:
        costs, (stage, kind, _) = self.costs, action
        if kind == "B":
            return costs.input[stage] + costs.weight[stage]
        return {"F": costs.forward, "I": costs.input, "W": costs.weight}[kind][stage]

    # Appends an action to the rows of its workers, and notes its end.
    def do(self, workers: Members, action: Action, start: float) -> None:
        stage, kind, micro = action
        end = start + self.took(action)
        for worker in workers:
            self.rows[worker].append(action)
            self.clock[worker] = end
            if kind == "I":
                self.pending[worker].append(Action(stage, "W", micro))  # also of a shared stage: each has its own W

        if kind == "F":
            self.forward[stage][micro] = end
            self.went[stage] += 1
        elif kind == "W":
            self.pending[workers[0]].popleft()
        else:
            self.gradient[stage][micro] = end
            self.back[stage] += 1
