"""List scheduling for any placement, times and memory: the action that can start first runs first, I before F.

The rule alone is worse than ZB-H1 at equal times, so `auto` takes it as one candidate, and as an order to fill. The memory
limit decides how many forwards run ahead, as in Qi, Wan, Amar, Lin (Pipeline Parallelism with Controllable Memory, 2024).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence

from gt.dispatcher.schedule.actions import Action
from gt.dispatcher.schedule.costs import Costs
from gt.dispatcher.schedule.placement import Placement, lags, mates

NEVER = float("inf")
Found = tuple[float, int, Action]  # start, rank among equal starts, action


def greedy(workers: Placement, micro_batches: int, costs: Costs, limits: Sequence[float]) -> list[list[Action]] | None:
    """Rows of F, I and W within each worker's memory limit; None where one micro-batch does not fit."""
    return _Greedy(workers, micro_batches, costs, limits).all()


class _Greedy:
    """List scheduling in progress: the clock and memory of each worker, and how far each stage is."""

    def __init__(self, workers: Placement, micro_batches: int, costs: Costs, limits: Sequence[float]) -> None:
        self.workers, self.micro_batches, self.costs, self.own = workers, micro_batches, costs, mates(workers)
        self.limits = [limit * (1 + 1e-9) for limit in limits]
        stages = len(workers)
        self.lag = lags(workers, costs)
        self.forward = [[NEVER] * micro_batches for _ in workers]  # ends
        self.gradient = [[NEVER] * micro_batches for _ in workers]
        self.went, self.back = [0] * stages, [0] * stages  # micro-batches that finished F, and I
        self.clock, self.used = [0.0] * len(self.own), [0.0] * len(self.own)
        self.pending: list[deque[int]] = [deque() for _ in self.own]  # stages of the weight gradients to come
        self.weights = [0] * stages
        self.rows: list[list[Action]] = [[] for _ in self.own]
        # memory that a worker keeps free, so that a micro-batch in stage s can pass its later stages
        self.reserve = [sum(costs.activation[t] for t in self.own[w] if t > s) for s, w in enumerate(workers)]

    def all(self) -> list[list[Action]] | None:
        """Execute the action with the earliest start of all workers, again and again: it can change the others' choices."""
        # An entry of the heap is (start, rank, worker, version, action). A worker's best action is pushed again whenever it may
        # have changed, under a new version. Entries of older versions are skipped when they come up, not searched for.
        version = [0] * len(self.own)
        heap: list[tuple[float, int, int, int, Action]] = []
        changed = set(range(len(self.own)))
        while True:
            for worker in changed:
                version[worker] += 1
                best = self.next(worker)
                if best is not None:
                    heapq.heappush(heap, (best[0], best[1], worker, version[worker], best[2]))
            while heap and heap[0][3] != version[heap[0][2]]:
                heapq.heappop(heap)
            if not heap:
                break
            start, _, worker, _, action = heapq.heappop(heap)
            self.do(worker, action, start)
            # The action is an input of the stages beside its own, and of no others.
            stage = action.stage
            changed = {worker, self.workers[max(stage - 1, 0)], self.workers[min(stage + 1, len(self.workers) - 1)]}
        return self.rows if min(self.weights) == self.micro_batches else None

    def next(self, worker: int) -> Found | None:
        """A worker's next action and its start. W runs while nothing else can."""
        best = min(self.able(worker), default=None)
        if self.pending[worker]:
            # The oldest W runs if nothing else can, if it delays nothing, or if its memory is wanted.
            stage = self.pending[worker][0]
            clock = self.clock[worker]
            if best is None or clock + self.costs.weight[stage] <= best[0] or self.tight(worker, best[2]):
                return clock, 0, Action(stage, "W", self.weights[stage])
        return best

    def tight(self, worker: int, action: Action) -> bool:
        """True if a forward has to wait for memory."""
        if action.kind != "F":
            return False
        return self.used[worker] + self.costs.activation[action.stage] + self.reserve[action.stage] > self.limits[worker]

    # Yields the next I and F of each of a worker's stages, if their inputs are ready and memory suffices.
    def able(self, worker: int) -> Iterator[Found]:
        clock = self.clock[worker]
        # What pending W keep counts as free: `next` executes them before an F that needs it (`tight`).
        free = self.limits[worker] - self.used[worker] + sum(self.costs.kept[stage] for stage in self.pending[worker])
        for stage in self.own[worker]:
            micro = self.back[stage]
            ready = self.gradient_ready(stage, micro) if micro < self.went[stage] else NEVER
            if ready < NEVER:
                yield max(clock, ready), 0, Action(stage, "I", micro)
            micro = self.went[stage]
            ready = self.forward_ready(stage, micro) if micro < self.micro_batches else NEVER
            if ready < NEVER and self.costs.activation[stage] + self.reserve[stage] <= free:
                yield max(clock, ready), 1 + len(self.workers) - stage, Action(stage, "F", micro)

    def forward_ready(self, stage: int, micro: int) -> float:
        return self.forward[stage - 1][micro] + self.lag[stage] if stage else 0.0

    def gradient_ready(self, stage: int, micro: int) -> float:
        own = self.forward[stage][micro]
        return max(own, self.gradient[stage + 1][micro] + self.lag[stage + 1]) if stage + 1 < len(self.workers) else own

    # Appends an action to its worker's row, and notes its end and its change of memory.
    def do(self, worker: int, action: Action, start: float) -> None:
        stage, kind, micro = action
        costs = self.costs
        self.rows[worker].append(action)
        if kind == "F":
            self.forward[stage][micro] = self.clock[worker] = start + costs.forward[stage]
            self.went[stage] += 1
            self.used[worker] += costs.activation[stage]
        elif kind == "I":
            self.gradient[stage][micro] = self.clock[worker] = start + costs.input[stage]
            self.back[stage] += 1
            self.used[worker] += costs.kept[stage] - costs.activation[stage]
            self.pending[worker].append(stage)
        else:
            self.clock[worker] = start + costs.weight[stage]
            self.pending[worker].popleft()
            self.weights[stage] += 1
            self.used[worker] -= costs.kept[stage]
