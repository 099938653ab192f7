"""Shared parts of the tests of schedules: placements, random costs and rows, and a second, independent simulator."""

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
    seen: dict[tuple[int, int, str], int] = {}
    for worker, row in enumerate(schedule.rows):
        for stage, kind, micro in row:
            if worker not in schedule.workers[stage] or seen.get((worker, stage, kind), -1) != micro - 1:
                return False
            seen[worker, stage, kind] = micro
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


Node = tuple[Action, int]  # an action and its worker, -1 for what all workers of its stage do together
Members = list[tuple[int, ...]]  # the workers of each stage


def node(action: Action, worker: int, members: Members) -> Node:
    return action, -1 if len(members[action.stage]) > 1 and action.kind != "W" else worker


def random_rows(rng: random.Random, members: Members, m: int, costs: Costs) -> list[list[Action]]:
    """A legal order, drawn action by action from those whose needs are done. Some micro-batches have B, others I and W."""
    left: set[Node] = set()
    for stage, some in enumerate(members):
        kinds = [Action(stage, kind, micro) for micro in range(m) for kind in rng.choice(["FB", "FIW"])]
        kinds += [Action(stage, kind) for kind in "LRO" if costs.once(kind, stage) is not None]
        left |= {node(action, worker, members) for action in kinds for worker in some}
    every, done = frozenset(left), set()
    rows: list[list[Action]] = [[] for _ in range(1 + max(map(max, members)))]
    while left:
        able = sorted(one for one in left if needs(one, every, costs, members) <= done)
        action, worker = rng.choice(able)
        for w in members[action.stage] if worker < 0 else (worker,):
            rows[w].append(action)
        left.remove((action, worker))
        done.add((action, worker))
    return rows


def needs(one: Node, every: frozenset[Node], costs: Costs, members: Members) -> set[Node]:
    """Actions of `every` that must be complete before this one."""
    (stage, kind, micro), worker = one
    if kind == "F":
        return {n for n in every if n[0] == Action(stage - 1, "F", micro)}
    if kind in "BI":
        wanted = {Action(stage, "F", micro), Action(stage + 1, "B", micro), Action(stage + 1, "I", micro)}
        return {n for n in every if n[0] in wanted}
    if kind == "W":
        return {node(Action(stage, "I", micro), worker, members)}
    before = {"L": "F", "R": "BW", "O": "BWR"}[kind]
    found: set[Node] = set()
    for own in members[stage] if worker < 0 else (worker,):
        beside = {other for other, some in enumerate(members) if kind == "O" and costs.own and own in some} | {stage}
        joint = kind == "O" and costs.joint
        found |= {n for n in every if n[0].kind in before and (joint or (n[0].stage in beside and n[1] in (own, -1)))}
    return found


def slow_ends(rows: list[list[Action]], costs: Costs) -> tuple[dict[Node, float], dict[Node, float]]:
    """Starts and ends by relaxing every edge of the graph of waits until nothing changes; both by action and worker."""
    stages = 1 + max(action.stage for row in rows for action in row)
    members = [tuple(w for w, row in enumerate(rows) if any(a.stage == stage for a in row)) for stage in range(stages)]
    lanes = [[node(action, w, members) for action in row] for w, row in enumerate(rows)]
    every = frozenset(one for lane in lanes for one in lane)
    took = {one: time_of(one[0], costs) for one in every}
    edges: list[tuple[Node, Node, float]] = []  # from, to, time from start to start
    for row in lanes:
        for lane in (False, True):  # what computes, what is on the link
            own = [a for a in row if (a[0].kind == "R" and costs.overlap) == lane]
            edges += [(a, b, took[a]) for a, b in pairwise(own)]
        # an all-reduce is begun in its row's order, and holds up nothing there where it overlaps
        edges += [(a, b, 0.0 if a[0].kind == "R" and costs.overlap else took[a]) for a, b in pairwise(row) if b[0].kind == "R"]
    for one in every:
        for other in needs(one, every, costs, members):
            a, b = one[0], other[0]
            far = members[a.stage] != members[b.stage] and abs(a.stage - b.stage) == 1 and a.kind in "FBI"
            lag = costs.transfer[min(a.stage, b.stage)] if far else 0.0
            edges.append((other, one, took[other] + lag))
    start = dict.fromkeys(every, 0.0)
    changed = True
    while changed:
        changed = False
        for a, b, time in edges:
            if start[a] + time > start[b]:
                start[b], changed = start[a] + time, True
    both = {(action, w): start[node(action, w, members)] for w, row in enumerate(rows) for action in row}
    return both, {one: begin + time_of(one[0], costs) for one, begin in both.items()}


def time_of(action: Action, costs: Costs) -> float:
    stage, kind, _ = action
    both = costs.input[stage] + costs.weight[stage]
    each = {"F": costs.forward[stage], "I": costs.input[stage], "W": costs.weight[stage], "B": both}
    return each[kind] if kind in each else costs.once(kind, stage) or 0.0
