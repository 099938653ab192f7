"""What the tests of schedules share: placements, random costs and rows, and a simulator that is written another way."""

from __future__ import annotations

import random
from itertools import pairwise

from gt.dispatcher.schedule import Action, Costs, Schedule

PLACEMENTS = {
    "line": lambda p: list(range(p)),
    "turns": lambda p: [stage % p for stage in range(2 * p)],
    "thrice": lambda p: [stage % p for stage in range(3 * p)],
    "vee": lambda p: [min(stage, 2 * p - 1 - stage) for stage in range(2 * p)],
    "pairs": lambda p: [stage // 2 for stage in range(2 * p)],
}


def in_order(schedule: Schedule) -> bool:
    """Are gradients added up in the order of micro-batches, so that every schedule gives the same bits?"""
    seen: dict[tuple[int, str], int] = {}
    for worker, row in enumerate(schedule.rows):
        for stage, kind, micro in row:
            if schedule.workers[stage] != worker or seen.get((stage, kind), -1) != micro - 1:
                return False
            seen[stage, kind] = micro
    return True


def random_costs(rng: random.Random, stages: int, once: bool = False) -> Costs:
    """Every stage different, in halves so that sums are exact."""

    def some(low: int, count: int = stages) -> tuple[float, ...]:
        return tuple(rng.randint(low, 8) / 2 for _ in range(count))

    def maybe() -> tuple[float | None, ...]:
        return tuple(rng.choice([None, 0.5, 1.0, 2.0]) for _ in range(stages)) if once else ()

    activation = some(0)
    kept = tuple(rng.randint(0, int(2 * size)) / 2 for size in activation)
    return Costs(
        some(0), some(0), some(0), some(0, stages - 1), activation, kept, maybe(), maybe(), maybe(),
        overlap=rng.random() < 0.5, joint=rng.random() < 0.5, own=int(2 * sum(activation)) % 3 == 0,
    )  # fmt: skip


def random_rows(rng: random.Random, workers: list[int], m: int, costs: Costs) -> list[list[Action]]:
    """A legal order, drawn action by action from those whose needs are done. Some micro-batches have B, others I and W."""
    stages = len(workers)
    left: set[Action] = set()
    for stage in range(stages):
        for micro in range(m):
            left |= {Action(stage, kind, micro) for kind in rng.choice(["FB", "FIW"])}
        left |= {Action(stage, kind) for kind in "LRO" if costs.once(kind, stage) is not None}
    every, done = frozenset(left), set()
    rows: list[list[Action]] = [[] for _ in range(1 + max(workers))]
    while left:
        able = sorted(action for action in left if needs(action, every, costs, workers) <= done)
        action = rng.choice(able)
        rows[workers[action.stage]].append(action)
        left.remove(action)
        done.add(action)
    return rows


def needs(action: Action, every: frozenset[Action], costs: Costs, workers: list[int]) -> set[Action]:
    """What has to be done before an action, of the actions that there are."""
    stage, kind, micro = action
    if kind == "F":
        found = {Action(stage - 1, "F", micro)}
    elif kind in "BI":
        found = {Action(stage, "F", micro), Action(stage + 1, "B", micro), Action(stage + 1, "I", micro)}
    elif kind == "W":
        found = {Action(stage, "I", micro)}
    else:
        before = {"L": "F", "R": "BW", "O": "BWR"}[kind]
        beside = {
            other for other, at in enumerate(workers) if kind == "O" and (costs.joint or (costs.own and at == workers[stage]))
        }
        found = {a for a in every if a.kind in before and (a.stage == stage or a.stage in beside)}
    return found & every


def slow_ends(rows: list[list[Action]], costs: Costs) -> tuple[dict[Action, float], dict[Action, float]]:
    """Starts and ends by relaxing every edge of the graph of waits until nothing changes."""
    every = frozenset(action for row in rows for action in row)
    worker = {action.stage: w for w, row in enumerate(rows) for action in row}
    took = {action: time_of(action, costs) for action in every}
    edges: list[tuple[Action, Action, float]] = []  # from, to, time from start to start
    for row in rows:
        for lane in (False, True):  # what computes, what is on the link
            own = [a for a in row if (a.kind == "R" and costs.overlap) == lane]
            edges += [(a, b, took[a]) for a, b in pairwise(own)]
        # an all-reduce is begun in its row's order, and holds up nothing there where it overlaps
        edges += [(a, b, 0.0 if a.kind == "R" and costs.overlap else took[a]) for a, b in pairwise(row) if b.kind == "R"]
    for action in every:
        for other in needs(action, every, costs, [worker[stage] for stage in sorted(worker)]):
            far = worker[action.stage] != worker[other.stage] and abs(action.stage - other.stage) == 1 and action.kind in "FBI"
            lag = costs.transfer[min(action.stage, other.stage)] if far else 0.0
            edges.append((other, action, took[other] + lag))
    start = dict.fromkeys(every, 0.0)
    changed = True
    while changed:
        changed = False
        for a, b, time in edges:
            if start[a] + time > start[b]:
                start[b], changed = start[a] + time, True
    return start, {action: begin + took[action] for action, begin in start.items()}


def time_of(action: Action, costs: Costs) -> float:
    stage, kind, _ = action
    both = costs.input[stage] + costs.weight[stage]
    each = {"F": costs.forward[stage], "I": costs.input[stage], "W": costs.weight[stage], "B": both}
    return each[kind] if kind in each else costs.once(kind, stage) or 0.0
