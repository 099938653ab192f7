"""The simulator: against another one on random rows, by hand where that is short, and what it says of a deadlock."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gt.dispatcher.schedule import Costs, ScheduleRequest, make, parse, simulate, uniform
from gt.errors import ConfigError
from tests.dispatcher.schedule.schedules import PLACEMENTS, random_costs, random_rows, slow_ends


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_legal_rows_take_what_a_slow_simulator_says(seed: int, p: int, more: int, m: int, shared: bool) -> None:
    """shared: with stages that several workers do together."""
    rng = random.Random(seed)
    workers = [(w,) for w in range(p)] + [(rng.randrange(p),) for _ in range(more - 1)]
    if shared:
        workers += [tuple(sorted(rng.sample(range(p), rng.randint(1, p)))) for _ in range(2)]
    rng.shuffle(workers)
    costs = random_costs(rng, len(workers), once=rng.random() < 0.5)
    rows = random_rows(rng, workers, m, costs)
    start, end = slow_ends(rows, costs)
    line = simulate(rows, costs)
    assert [[start[action, w] for action in row] for w, row in enumerate(rows)] == line.start
    assert [[end[action, w] for action in row] for w, row in enumerate(rows)] == line.end
    assert line.makespan == max(end.values())
    for worker, row in enumerate(rows):
        computes = [(action, worker) for action in row if action.kind != "R" or not costs.overlap]
        assert line.bubble[worker] == line.makespan - sum(end[one] - start[one] for one in computes)
        assert line.peak[worker] == peak(row, costs)


def peak(row: list, costs: Costs) -> float:
    """The most that is held at any moment, counted anew at each."""
    found = 0.0
    for now in range(len(row) + 1):
        done = set(row[:now])
        held = 0.0
        for stage, kind, micro in done:
            ended = {(stage, "B", micro), (stage, "I", micro)} & done
            held += costs.activation[stage] if kind == "F" and not ended else 0.0
            held += costs.kept[stage] if kind == "I" and (stage, "W", micro) not in done else 0.0
        found = max(found, held)
    return found


def test_two_stages_by_hand() -> None:
    costs = Costs((1, 2), (2, 1), (1, 3), (0.5,), (1, 2), (0.5, 1), optimizer=(4, None), reduce=(2, 1))
    rows = parse("0F0,0F1,0B0,0I1,0W1,0R,0O\n1F0,1I0,1F1,1W0,1I1,1W1,1R")
    line = simulate(rows, costs)
    assert line.start == [[0, 1, 5, 11, 13, 14, 16], [1.5, 3.5, 4.5, 6.5, 9.5, 10.5, 13.5]]
    assert line.makespan == 20 and line.peak == (2, 3)
    assert line.bubble == (20 - 2 - 3 - 2 - 1 - 4, 20 - 4 - 2 - 6)


def test_an_all_reduce_holds_up_its_worker_only_where_it_does_not_overlap() -> None:
    rows = parse("0F0,1F0,1B0,1R,0B0,0R\n2F0,2B0")
    beside = Costs((1,) * 3, (1,) * 3, (1,) * 3, (0, 0), (1,) * 3, (1,) * 3, reduce=(5, 5, None))
    assert simulate(rows, beside).start[0] == [0, 1, 5, 7, 7, 12]  # the second waits for the link
    alone = Costs((1,) * 3, (1,) * 3, (1,) * 3, (0, 0), (1,) * 3, (1,) * 3, reduce=(5, 5, None), overlap=False)
    assert simulate(rows, alone).start[0] == [0, 1, 5, 7, 12, 14]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1", "worker 0 is at 0B0 and waits for 1B0 of worker 1, worker 1 is at 1F1 and waits "
         "for 0F1 of worker 0"),
        ("0F0,0B0\n1F0,1F1,1B0,1B1", "worker 0 is at 0B0 and waits for 1B0 of worker 1, worker 1 is at 1F1 and waits for 0F1, "
         "which no row has"),
        ("0F0,0W0,0I0", "worker 0 is at 0W0 and waits for 0I0 of worker 0"),
        ("0B0,0F0", "worker 0 is at 0B0 and waits for 0F0 of worker 0"),
        ("0F0,0L,0F1,0R,0B0,0B1", "worker 0 is at 0L and waits for 0F1 of worker 0"),
        ("0F0,0R,0B0", "worker 0 is at 0R and waits for 0B0 of worker 0"),
        ("0F0,0B0,0O,0R", "worker 0 is at 0O and waits for 0R of worker 0"),
    ],
)  # fmt: skip
def test_a_deadlock_names_who_waits_for_what(rows: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        simulate(parse(rows), uniform(1 + ("1F" in rows)))
    assert str(error.value) == f"the schedule never ends: {said}"


def test_clipping_makes_every_optimizer_wait_for_all_stages() -> None:
    rows = parse("0F0,0B0,0O\n1F0,1B0,1O")
    for joint, start in ((False, 4), (True, 6)):
        costs = Costs((1, 1), (1, 1), (1, 1), (0,), (1, 1), (1, 1), optimizer=(1, 1), joint=joint)
        assert simulate(rows, costs).start == [[0, 4, 6], [1, 2, start]]
    with pytest.raises(ConfigError, match="worker 0 is at 0O and waits for 1R of worker 1, worker 1 is at 1O and waits for 1R"):
        simulate(parse("0F0,0B0,0O\n1F0,1B0,1O,1R"), costs)


def test_a_large_schedule_is_simulated_in_milliseconds() -> None:
    workers = PLACEMENTS["vee"](16)
    schedule, costs = make(ScheduleRequest("zb-v", workers, 64)), uniform(32)
    assert sum(map(len, schedule.rows)) == 32 * 64 * 3
    took = []
    for _ in range(5):
        begin = time.thread_time()
        simulate(schedule.rows, costs)
        took.append(time.thread_time() - begin)
    assert min(took) < 0.1


def test_costs_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="costs are of 3 stages, and the rows have 2"):
        simulate(parse("0F0,0B0\n1F0,1B0"), uniform(3))
    with pytest.raises(ValueError, match="transfer of 2 stages: want 1 times from 0 up"):
        Costs((1, 1), (1, 1), (1, 1), (0, 0), (1, 1), (1, 1))
    with pytest.raises(ValueError, match="weight of 2 stages"):
        Costs((1, 1), (1, 1), (1, -1), (0,), (1, 1), (1, 1))
