"""Placement of weight gradients by costs: into gaps of an order of F and I, or where memory has to be freed.

The rule is the heuristic of Qi et al. (Zero Bubble Pipeline Parallelism, ICLR 2024, section 3.1), for any placement. The
order is given, so the length of each gap is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gt.dispatcher.schedule.actions import Action, Rows, micro_batches, placement
from gt.dispatcher.schedule.costs import Costs
from gt.dispatcher.schedule.placement import lags

NEVER = float("inf")


def fill(rows: Rows, costs: Costs, limits: Sequence[float], late: float) -> list[list[Action]] | None:
    """Rows with I and W, in the order of F and B (or F and I) in `rows`.

    A W takes a gap that it exceeds by at most `late` of its time. The oldest W run before an F that does not fit into its
    worker's memory limit. None where that is not enough, or where the order deadlocks.
    """
    return _Fill(rows, costs, limits, late).all()


class _Fill:
    """A schedule in the making: rows without W, the clock of each worker, and the W that may be placed."""

    def __init__(self, rows: Rows, costs: Costs, limits: Sequence[float], late: float) -> None:
        self.rows = [[action for action in row if action.kind in "FBI"] for row in rows]
        self.costs, self.limits, self.late = costs, limits, late
        workers = placement(rows)
        self.m = micro_batches(rows)
        self.lag = lags(workers, costs)
        # Ends of F by (stage + 1) * m + micro, of I by stage * m + micro. The entries of the missing neighbours, before stage 0
        # and after the last one, are 0: these inputs are there from the start. The simulator has the same two lists.
        self.forward = [0.0] * self.m + [NEVER] * (len(workers) * self.m)
        self.gradient = [NEVER] * (len(workers) * self.m) + [0.0] * self.m
        self.made: list[list[Action]] = [[] for _ in rows]
        self.pending: list[deque[Action]] = [deque() for _ in rows]
        self.at, self.clock, self.used = [0] * len(rows), [0.0] * len(rows), [0.0] * len(rows)
        # Index of a forward, or -1 - index of a gradient -> the worker that waits for it. No two wait for one cell.
        self.waiting: dict[int, int] = {}

    # The order in which workers advance makes no difference to the times: each waits for its inputs alone.
    def all(self) -> list[list[Action]] | None:
        able = list(range(len(self.rows)))
        while able:
            if not self.go_on(able.pop(), able):
                return None
        if any(at < len(row) for at, row in zip(self.at, self.rows)):
            return None  # a deadlock: workers wait for one another
        for made, pending in zip(self.made, self.pending):
            made += pending  # no gap is left to wait for
        return self.made

    def go_on(self, worker: int, able: list[int]) -> bool:
        """Advance one worker until it waits; False where memory does not suffice."""
        m, forward, gradient, row = self.m, self.forward, self.gradient, self.rows[worker]
        while self.at[worker] < len(row):
            stage, kind, micro = row[self.at[worker]]
            # 1. The time at which its inputs are there, or the cell that it waits for.
            cell = stage * m + micro
            if kind == "F":
                ready, waits = forward[cell] + self.lag[stage], cell
            else:
                ready, waits = gradient[cell + m] + self.lag[stage + 1], -1 - cell - m
                if forward[cell + m] == NEVER:
                    return False  # the row has a backward action before its own forward
            if ready == NEVER:
                self.waiting[waits] = worker
                return True

            # 2. W before it, then the action itself.
            if not self.make_room(worker, ready, self.costs.activation[stage] if kind == "F" else 0.0):
                return False
            end = self.do(worker, Action(stage, kind if kind == "F" else "I", micro), ready)
            self.at[worker] += 1

            # 3. Its end, and the worker that waits for that.
            if kind == "F":
                forward[cell + m], wakes = end, cell + m
            else:
                gradient[cell], wakes = end, -1 - cell
            if wakes in self.waiting:
                able.append(self.waiting.pop(wakes))
        return True

    def do(self, worker: int, action: Action, ready: float) -> float:
        """Execute an F or I, and return its end."""
        stage, kind, micro = action
        costs = self.costs
        self.made[worker].append(action)
        if kind == "F":
            took, change = costs.forward[stage], costs.activation[stage]
        else:
            took, change = costs.input[stage], costs.kept[stage] - costs.activation[stage]
            self.pending[worker].append(Action(stage, "W", micro))
        self.clock[worker] = end = max(self.clock[worker], ready) + took
        self.used[worker] += change
        return end

    def make_room(self, worker: int, ready: float, size: float) -> bool:
        """Execute W that fit before `ready`, and those that have to free memory for `size`; False if that is too little."""
        pending, weight = self.pending[worker], self.costs.weight
        limit = self.limits[worker] * (1 + 1e-9) - size  # the small terms here and below are for rounding
        while pending:
            stage = pending[0].stage
            fits = self.clock[worker] + weight[stage] * (1 - self.late) <= ready + 1e-12
            # A W runs if memory has to be freed, or if there is a gap that it fits into. An I (size 0) needs no memory: its
            # activations are there since its F.
            if not (self.used[worker] > limit if size else False) and not (fits and self.clock[worker] < ready):
                break
            self.clock[worker] += weight[stage]
            self.used[worker] -= self.costs.kept[stage]
            self.made[worker].append(pending.popleft())
        return size == 0 or self.used[worker] <= limit
