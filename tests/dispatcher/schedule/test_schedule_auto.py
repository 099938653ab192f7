"""`auto` and what depends on costs: never worse than a named schedule, within memory, near what no schedule can beat."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gt.dispatcher.schedule import (
    SCHEDULES,
    Action,
    Costs,
    Schedule,
    ScheduleRequest,
    check,
    insert_epilogue,
    make,
    simulate,
    uniform,
)
from gt.dispatcher.schedule.auto import within
from gt.dispatcher.schedule.fill import fill
from gt.dispatcher.schedule.greedy import greedy
from gt.errors import ConfigError
from tests.dispatcher.schedule.schedules import PLACEMENTS, in_order, random_costs, random_rows


def wanted(costs: Costs) -> set[Action]:
    return {Action(stage, kind) for stage in range(costs.stages) for kind in "LRO" if costs.once(kind, stage) is not None}


def last_ones(rows: Sequence[Sequence[Action]]) -> set[Action]:
    return {action for row in rows for action in row if action.kind in "LRO"}


def best_named(workers: list[int], m: int, costs: Costs, limit: float) -> float:
    """Makespan of the best named schedule that the placement and the limit permit."""
    found = float("inf")
    for name in SCHEDULES:
        try:
            made = make(ScheduleRequest(name, workers, m, limit=limit), costs)
        except ConfigError:
            continue
        check(made.rows, m)
        found = min(found, simulate(made.rows, costs).makespan)
    return found


def auto(workers: list[int], m: int, costs: Costs, limit: float | None = None) -> Schedule:
    return make(ScheduleRequest("auto", workers, m, limit=limit), costs)


@given(st.sampled_from(sorted(PLACEMENTS)), st.integers(1, 6), st.integers(1, 12), st.integers(0, 2**32), st.booleans())
@settings(max_examples=120, deadline=None)
def test_auto_is_never_worse_than_a_named_one_and_keeps_within_memory(
    placement: str, p: int, m: int, seed: int, scattered: bool
) -> None:
    rng = random.Random(seed)
    workers = PLACEMENTS[placement](p)
    if scattered:
        rng.shuffle(workers)
    costs = random_costs(rng, len(workers), once=rng.random() < 0.5)
    one = [sum(a for a, w in zip(costs.activation, workers) if w == worker) for worker in range(p)]
    limit = max(one) * rng.choice([1, 1.5, 3, 100])
    made = auto(workers, m, costs, limit)
    check(made.rows, m)
    line = simulate(made.rows, costs)
    assert line.makespan <= best_named(workers, m, costs, limit) * (1 + 1e-9)
    assert max(line.peak) <= limit * (1 + 1e-9)
    plain = tuple(tuple(action for action in row if action.micro >= 0) for row in made.rows)
    assert in_order(replace(made, rows=plain)) and made.workers == tuple((w,) for w in workers)
    assert last_ones(made.rows) == wanted(costs)


@pytest.mark.parametrize(
    ("placement", "p", "m"), [("line", 16, 64), ("turns", 8, 64), ("vee", 8, 33), ("pairs", 16, 24), ("thrice", 5, 64)]
)
def test_with_many_stages_auto_is_no_worse_than_a_named_one_and_keeps_within_memory(placement: str, p: int, m: int) -> None:
    rng = random.Random(f"{placement} {p} {m}")
    workers = PLACEMENTS[placement](p)
    costs = random_costs(rng, len(workers), once=True)
    one = [sum(a for a, w in zip(costs.activation, workers) if w == worker) for worker in range(p)]
    for limit in (float("inf"), max(one) * p / 2):
        made = auto(workers, m, costs, limit=limit)
        line = simulate(made.rows, costs)
        check(made.rows, m)
        assert line.makespan <= best_named(workers, m, costs, limit) * (1 + 1e-9)
        assert max(line.peak) <= limit * (1 + 1e-9) and last_ones(made.rows) == wanted(costs)


@pytest.mark.parametrize(("placement", "name"), [("line", "zb-h1"), ("turns", "zb-h1"), ("vee", "zb-v"), ("pairs", "zb-h1")])
def test_at_equal_times_auto_is_the_best_named_one(placement: str, name: str) -> None:
    workers = PLACEMENTS[placement](4)
    assert auto(workers, 8, uniform(len(workers))).name == name
    assert str(make(ScheduleRequest("auto", workers, 8))) == str(make(ScheduleRequest(name, workers, 8)))


def test_a_limit_below_every_named_schedules_memory_still_has_one() -> None:
    costs = uniform(4)
    made = auto([0, 1, 2, 3], 8, costs, limit=1)
    assert simulate(made.rows, costs).peak == (1, 1, 1, 1)
    with pytest.raises(ConfigError, match=r"no schedule of 8 micro-batches fits 0.9 of activations a worker"):
        auto([0, 1, 2, 3], 8, costs, limit=0.9)


def test_transfers_are_hidden_by_running_ahead() -> None:
    """1F1B waits for transfers in every micro-batch; `auto` spends memory to hide them."""
    costs = uniform(4, transfer=0.5)
    named = simulate(make(ScheduleRequest("1f1b", range(4), 16), costs).rows, costs)
    made = simulate(auto([0, 1, 2, 3], 16, costs).rows, costs)
    work = 16 * 3
    assert named.makespan - work > 22 and made.makespan - work < 6


def least(workers: list[int], m: int, costs: Costs) -> float:
    """No schedule takes less: each worker's work, after the way to its first stage and before the way from its last."""
    found, stages = 0.0, len(workers)
    lag = [costs.transfer[s] if workers[s] != workers[s + 1] else 0.0 for s in range(stages - 1)]
    there = [sum(costs.forward[:s]) + sum(lag[:s]) for s in range(stages)]
    back = [sum(costs.input[:s]) + sum(lag[:s]) for s in range(stages)]
    for worker in range(1 + max(workers)):
        own = [s for s in range(stages) if workers[s] == worker]
        passes = m * sum(costs.forward[s] + costs.input[s] for s in own)
        found = max(found, there[own[0]] + passes + max(m * sum(costs.weight[s] for s in own), back[own[0]]))
    return found


@pytest.mark.parametrize(("placement", "most"), [("line", 1.02), ("turns", 1.05), ("vee", 1.05), ("pairs", 1.05)])
def test_auto_is_near_what_no_schedule_can_beat(placement: str, most: float) -> None:
    rng = random.Random(placement)
    ratios = []
    for _ in range(10):
        p = rng.choice([2, 4, 8])
        workers, m = PLACEMENTS[placement](p), p * rng.choice([1, 2, 4])
        stages = len(workers)

        def some(base: float, count: int = stages) -> tuple[float, ...]:
            return tuple(base * (1 + rng.random() / 2) for _ in range(count))

        costs = Costs(some(1), some(1.05), some(0.8), some(0.1, stages - 1), (1.0,) * stages, (0.6,) * stages)
        found = simulate(auto(workers, m, costs).rows, costs).makespan
        assert found <= best_named(workers, m, costs, float("inf")) * (1 + 1e-9)
        ratios.append(found / least(workers, m, costs))
    assert min(ratios) >= 1 - 1e-9 and mean(ratios) < most, ratios


@given(st.sampled_from(["line", "turns", "vee"]), st.integers(2, 6), st.integers(1, 16), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_zero_bubble_by_costs_is_no_worse_than_its_table_in_no_more_memory(placement: str, p: int, m: int, seed: int) -> None:
    workers = PLACEMENTS[placement](p)
    costs = random_costs(random.Random(seed), len(workers))
    name = "zb-v" if placement == "vee" else "zb-h1"
    table = simulate(make(ScheduleRequest(name, workers, m)).rows, costs)
    rows = make(ScheduleRequest(name, workers, m), costs).rows
    check(rows, m)
    line = simulate(rows, costs)
    assert line.makespan <= table.makespan * (1 + 1e-9)
    assert all(a <= b * (1 + 1e-9) for a, b in zip(line.peak, table.peak, strict=True))


# ---- what auto chooses from


@given(st.sampled_from(sorted(PLACEMENTS)), st.integers(1, 6), st.integers(1, 12), st.integers(0, 2**32), st.booleans())
@settings(max_examples=100, deadline=None)
def test_greedy_and_filled_rows_keep_within_their_limits(placement: str, p: int, m: int, seed: int, scattered: bool) -> None:
    rng = random.Random(seed)
    workers = PLACEMENTS[placement](p)
    if scattered:
        rng.shuffle(workers)
    costs = random_costs(rng, len(workers))
    one = [sum(a for a, w in zip(costs.activation, workers) if w == worker) for worker in range(p)]
    limits = [size * rng.choice([1, 1.5, 3]) for size in one]
    rows = greedy(workers, m, costs, limits)
    assert rows is not None
    for late in (0.0, 0.5, 1.0):
        for order in (rows, make(ScheduleRequest("gpipe", workers, m)).rows):
            filled = fill(order, costs, limits, late)
            if filled is not None:
                check(filled, m)
                assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(simulate(filled, costs).peak, limits))
    check(rows, m)
    assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(simulate(rows, costs).peak, limits))


def test_running_ahead_keeps_to_memory_and_never_beyond_the_stage_before() -> None:
    costs = replace(uniform(4), activation=(2.0, 1.0, 1.0, 0.5))
    assert within([0, 1, 2, 3], costs, [float("inf")] * 4, 2) == [7, 5, 3, 1]
    assert within([0, 1, 2, 3], costs, [5, 9, 9, 9], 3) == [2, 2, 2, 1]
    assert within([0, 1, 2, 3], costs, [1, 9, 9, 9], 3) == [1, 1, 1, 1]


@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_merged_stages_cost_what_they_cost_one_by_one(p: int, m: int, seed: int) -> None:
    costs = random_costs(random.Random(seed), 2 * p)
    pairs = make(ScheduleRequest("1f1b", PLACEMENTS["pairs"](p), m)).rows
    merged = costs.merged([[2 * w, 2 * w + 1] for w in range(p)])
    one, other = simulate(pairs, costs), simulate(make(ScheduleRequest("1f1b", range(p), m)).rows, merged)
    assert (one.makespan, one.bubble, one.peak) == (other.makespan, other.bubble, other.peak)


# ---- the last actions of a step


def at_the_end(rows: list[list[Action]], costs: Costs) -> list[list[Action]]:
    """L, R and O after all else."""
    made = []
    for row in rows:
        own = sorted({action.stage for action in row})
        made.append(row + [Action(s, kind) for kind in "LRO" for s in own if costs.once(kind, s) is not None])
    return made


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 4), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_last_actions_are_there_once_and_no_later_than_at_the_end(seed: int, p: int, more: int, m: int) -> None:
    rng = random.Random(seed)
    workers = list(range(p)) + [rng.randrange(p) for _ in range(more)]
    costs = random_costs(rng, len(workers), once=True)
    plain = random_rows(rng, [(w,) for w in workers], m, replace(costs, loss=(), reduce=(), optimizer=()))
    rows = insert_epilogue(plain, costs)
    check(rows, m)
    assert [[action for action in row if action.kind in "FBIW"] for row in rows] == plain
    assert last_ones(rows) == wanted(costs)
    assert simulate(rows, costs).makespan <= simulate(at_the_end(plain, costs), costs).makespan + 1e-9


@pytest.mark.parametrize(
    ("seed", "most"),
    [(93, 151), (1471, 31.5), (2897, 49), (3439, 76)],  # a joint one before its time; twice no gap is better; a busy link
)
def test_last_actions_where_one_rule_was_not_enough(seed: int, most: float) -> None:
    rng = random.Random(seed)
    p, more, m = rng.randint(1, 4), rng.randint(0, 4), rng.randint(1, 6)
    workers = list(range(p)) + [rng.randrange(p) for _ in range(more)]
    costs = random_costs(rng, len(workers), once=True)
    plain = random_rows(rng, [(w,) for w in workers], m, replace(costs, loss=(), reduce=(), optimizer=()))
    assert simulate(insert_epilogue(plain, costs), costs).makespan <= most


def test_last_actions_take_the_time_that_a_pipeline_leaves() -> None:
    """The last stage of 1F1B is done first: its optimizer and all-reduce cost nothing; only those of stage 0 are seen."""
    plain = uniform(4)
    costs = replace(plain, loss=(None, None, None, 0.5), reduce=(2.0,) * 4, optimizer=(1.0,) * 4)
    schedule = make(ScheduleRequest("1f1b", range(4), 8), costs)
    line = simulate(schedule.rows, costs)
    assert line.makespan == 33 + 2 + 1
    ends = [[str(action) for action in row[-4:]] for row in schedule.rows]
    assert ends[0] == ["0B6", "0B7", "0R", "0O"] and ends[3] == ["3B7", "3R", "3L", "3O"]


def test_an_all_reduce_overlaps_weight_gradients_of_another_stage() -> None:
    workers = [0, 1, 1, 0]
    costs = replace(uniform(4), reduce=(3.0,) * 4, optimizer=(1.0,) * 4)
    row = [str(action) for action in make(ScheduleRequest("zb-v", workers, 4), costs).rows[0]]
    assert row.index("3R") == row.index("3W3") + 1 and row.index("3O") > row.index("3R") + 1
    assert row.index("0R") == row.index("0W3") + 1


def test_a_joint_optimizer_comes_after_every_all_reduce() -> None:
    costs = replace(uniform(4), reduce=(1.0,) * 4, optimizer=(1.0,) * 4, joint=True)
    rows = make(ScheduleRequest("zb-h1", range(4), 8), costs).rows
    line = simulate(rows, costs)
    ended = [end for row, ends in zip(rows, line.end) for action, end in zip(row, ends) if action.kind == "R"]
    began = [start for row, starts in zip(rows, line.start) for action, start in zip(row, starts) if action.kind == "O"]
    assert min(began) >= max(ended) and [row[-1].kind for row in rows] == ["O"] * 4
