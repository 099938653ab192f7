"""The rate of looks at workers follows the CPU time that the run takes."""

from __future__ import annotations

import pytest

from gt.dispatcher.cluster.look_budget import (
    MAX_PAUSE_SECONDS,
    MAX_SAVED_LOOKS,
    MAX_SHARE,
    OBSERVER_SECONDS,
    PROCESS_SECONDS,
    LookBudget,
)
from gt.dispatcher.cluster.observation import WorkerAnswer

INTERVAL = 0.5


def looks(cores: float, seconds: float, workers: int = 8, observers: int = 1, ops_a_second: int = 0) -> list[float]:
    """Times of looks at workers that take so many cores together, with the least interval between two."""
    budget, times, now = LookBudget(), [], 0.0
    while now < seconds:
        answers = {f"w{n}": WorkerAnswer(0, now, {"cpu_seconds": 100 + cores * now / workers}) for n in range(workers)}
        budget.pay(now, answers, int(ops_a_second * now), observers, 4e-4 * workers)
        times.append(now)
        now += max(INTERVAL, budget.pause)
    return times


@pytest.mark.parametrize(("cores", "observers"), [(0.4, 1), (2.0, 1), (2.0, 3), (60.0, 1)])
def test_looks_take_a_small_share_of_the_run(cores: float, observers: int) -> None:
    cost = 8 * (PROCESS_SECONDS + 4e-4) + observers * OBSERVER_SECONDS
    times = looks(cores, 600.0, observers=observers)
    assert (len(times) - MAX_SAVED_LOOKS - 1) * cost <= MAX_SHARE * cores * 600.0 * 1.01
    assert len(times) > min(600 / INTERVAL, 600 / MAX_PAUSE_SECONDS) * 0.9 or cores < 1


def test_a_starved_run_is_looked_at_seldom_but_looked_at() -> None:
    times = looks(0.06, 600.0)
    assert 600 / MAX_PAUSE_SECONDS <= len(times) <= 600 / MAX_PAUSE_SECONDS + MAX_SAVED_LOOKS + 2


def test_the_first_looks_follow_each_other_at_once() -> None:
    assert looks(0.1, 60.0)[: int(MAX_SAVED_LOOKS)] == [n * INTERVAL for n in range(int(MAX_SAVED_LOOKS))]


def test_an_idle_server_is_looked_at_now_and_then() -> None:
    assert 100 < len(looks(0.0, 600.0)) < 600 and len(looks(0.0, 600.0, workers=64)) < 100


def test_time_of_programs_and_dispatcher_is_part_of_the_run() -> None:
    """A program of small ops keeps its own process busy, and workers little."""
    assert len(looks(0.1, 60.0, workers=1, ops_a_second=30_000)) > 2 * len(looks(0.1, 60.0, workers=1))


def test_a_worker_that_is_replaced_earns_nothing_twice() -> None:
    budget = LookBudget()
    for now, used in ((0.0, 5000.0), (1.0, 5000.5), (2.0, 0.1), (3.0, 0.2)):
        budget.pay(now, {"w0": WorkerAnswer(0, now, {"cpu_seconds": used})}, 0, 1, 0.0)
    assert 0 <= budget.pause <= MAX_PAUSE_SECONDS
    budget.pay(4.0, {"w0": WorkerAnswer(0, 4.0, {"cpu_seconds": float("nan")})}, 0, 1, 0.0)
    budget.pay(5.0, {}, -5, 0, 0.0)
    assert 0 <= budget.pause <= MAX_PAUSE_SECONDS
