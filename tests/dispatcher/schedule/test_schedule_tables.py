"""Named schedules: bubbles and memory by their papers' formulas, rows as torch's tables, bounds for any size, placements."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gt.dispatcher.schedule import NAMES, SCHEDULES, Action, Schedule, ScheduleRequest, check, make, simulate, text, uniform
from gt.errors import ConfigError
from tests.dispatcher.schedule.schedules import PLACEMENTS, in_order
from tests.helpers import ROOT

FORMS = [  # schedule, placement, stages a worker
    ("gpipe", "line", 1), ("1f1b", "line", 1), ("zb-h1", "line", 1),
    ("interleaved", "turns", 2), ("interleaved", "thrice", 3), ("zb-h1", "turns", 2), ("zb-h1", "thrice", 3),
    ("zb-v", "vee", 2),
]  # fmt: skip
COSTS = [(1, 1, 1), (1, 1.1, 0.7), (2, 3, 1.5)]


def made(name: str, placement: str, p: int, m: int) -> Schedule:
    workers = PLACEMENTS[placement](p)
    return make(ScheduleRequest(name, workers, m))


def bubble(name: str, v: int, p: int, f: float, i: float, w: float) -> float:
    """Makespan minus m times a worker's forward, input gradient and weight gradient, by the papers."""
    rows = {"gpipe": f + i + w, "1f1b": f + i + w, "interleaved": (f + i + w) / v, "zb-h1": (f + i - w) / v, "zb-v": f / 2}
    return (p - 1) * rows[name]


def peaks(name: str, v: int, p: int, m: int) -> list[float]:
    """Activations of each worker, in micro-batches of all its stages. Where p does not divide m, a round is longer."""
    size = -(-m // max(1, m // p))  # micro-batches of the longest round
    forms = {
        "gpipe": lambda r: m,
        "1f1b": lambda r: p - r,
        "interleaved": lambda r: ((v - 1) * size + 2 * (p - 1 - r) + 1) / v,
        "zb-h1": lambda r: ((v - 1) * size + p) / v,
        "zb-v": lambda r: p,
    }
    return [min(m, forms[name](r)) for r in range(p)]


@pytest.mark.parametrize(("name", "placement", "v"), FORMS)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 32), (4, 4)])
@pytest.mark.parametrize("times", COSTS)
def test_bubble_and_memory_are_the_papers(name: str, placement: str, v: int, p: int, m: int, times: tuple) -> None:
    if name == "zb-v" and (times != (1, 1, 1) or m < 2 * p - 1):
        return  # its formula is of equal times, and of a full pipeline
    line = simulate(made(name, placement, p, m).rows, uniform(p * v, *(time / v for time in times), activation=1 / v))
    assert line.makespan - m * sum(times) == pytest.approx(bubble(name, v, p, *times))
    assert line.bubble == pytest.approx([line.makespan - m * sum(times)] * p)
    assert line.peak == pytest.approx(peaks(name, v, p, m))


@pytest.mark.parametrize(
    ("p", "m", "times", "values"),
    [
        (4, 8, (1, 1, 1), {"gpipe": (9, 27.27), "1f1b": (9, 27.27), "interleaved": (4.5, 15.79), "zb-h1": (3, 11.11),
                           "zb-v": (1.5, 5.88)}),
        (8, 32, (1, 1, 1), {"gpipe": (21, 17.95), "1f1b": (21, 17.95), "interleaved": (10.5, 9.86), "zb-h1": (7, 6.80),
                            "zb-v": (3.5, 3.52)}),
        (4, 8, (1, 1.1, 0.7), {"gpipe": (8.4, 27.27), "1f1b": (8.4, 27.27), "interleaved": (4.2, 15.79), "zb-h1": (4.2, 15.79),
                               "zb-v": (1.65, 6.86)}),
    ],
)  # fmt: skip
def test_known_bubbles(p: int, m: int, times: tuple, values: dict) -> None:
    for name, (want, percent) in values.items():
        placement, v = {"interleaved": ("turns", 2), "zb-v": ("vee", 2)}.get(name, ("line", 1))
        line = simulate(made(name, placement, p, m).rows, uniform(p * v, *(time / v for time in times)))
        assert (line.makespan - m * sum(times), 100 * line.idle) == pytest.approx((want, percent), abs=0.005), name


def test_the_documents_table_is_computed() -> None:
    p, m = 4, 8
    text = (ROOT / "docs" / "schedules.md").read_text()
    rows = {}
    for name, placement, v in [form for form in FORMS if form[1] != "thrice"]:
        cells = []
        for times in COSTS[:2]:
            line = simulate(made(name, placement, p, m).rows, uniform(p * v, *(time / v for time in times), activation=1 / v))
            cells.append(f"{line.makespan - m * sum(times):.2f} ({line.idle:.1%})")
        rows[name, v] = f"| {name} | {v} | {' | '.join(cells)} | {' '.join(f'{peak:g}' for peak in line.peak)} |"
    assert {tuple(re.findall(r"^\| (\S+) \| (\d) \|", row)) for row in rows.values()} == {
        (cells,) for cells in re.findall(r"^\| (\S+) \| (\d) \|", text, re.M)
    }
    assert [row for row in rows.values() if row not in text] == []


# ---- torch's tables


def of_torch(rows: Iterable) -> list[list[Action]]:
    """Without torch's empty places and its REDUCE_GRAD."""
    kept = [[a for a in row if a is not None and a.computation_type.value in "FBIW"] for row in rows]
    return [[Action(a.stage_index, a.computation_type.value, a.microbatch_index) for a in row] for row in kept]


TORCH = [
    ("gpipe", "line", "GPipe", 1),
    ("interleaved", "turns", "Interleaved1F1B", 2), ("interleaved", "thrice", "Interleaved1F1B", 3),
    ("zb-h1", "turns", "InterleavedZeroBubble", 2), ("zb-h1", "thrice", "InterleavedZeroBubble", 3),
    ("zb-v", "vee", "ZBVZeroBubble", 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "placement", "theirs", "v"), TORCH)
@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 5), (3, 6), (4, 2), (4, 7), (4, 8), (8, 8), (8, 12), (8, 32)])
def test_rows_are_torchs(name: str, placement: str, theirs: str, v: int, p: int, m: int) -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    if m % max(1, m // p) and name in ("interleaved", "zb-h1"):
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            get_schedule_ops(theirs, p, m, v)
        return
    assert text(made(name, placement, p, m).rows) == text(of_torch(get_schedule_ops(theirs, p, m, v)))


@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 7), (4, 8), (8, 32)])
def test_1f1b_is_torchs_but_for_the_last_forwards(p: int, m: int) -> None:
    """torch numbers the last worker's forwards from 1; the rest is equal."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = of_torch(get_schedule_ops("1F1B", p, m))
    rows[-1] = [a._replace(micro=a.micro - 1) if a.kind == "F" and rows[-1][0].micro else a for a in rows[-1]]
    assert text(made("1f1b", "line", p, m).rows) == text(rows)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 32)])
def test_zb_h1_is_torchs_interleaved_zero_bubble_of_one_stage(p: int, m: int) -> None:
    """torch asks for two stages or more, so the rows are made by the method that makes them."""
    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

    theirs = object.__new__(ScheduleInterleavedZeroBubble)
    theirs.n_local_stages, theirs.pp_group_size, theirs._n_microbatches, theirs.microbatches_per_round = 1, p, m, p
    rows = of_torch(theirs._calculate_single_rank_operations(rank) for rank in range(p))
    assert text(made("zb-h1", "line", p, m).rows) == text(rows)


# ---- any size


@given(st.sampled_from(FORMS), st.integers(1, 16), st.integers(1, 64))
@settings(max_examples=300, deadline=None)
def test_rows_are_whole_end_and_keep_to_their_memory(form: tuple, p: int, m: int) -> None:
    name, placement, v = form
    if p == 1 and name == "interleaved":
        return  # its stages follow one another on the one worker
    schedule = made(name, placement, p, m)
    check(schedule.rows, m)
    line = simulate(schedule.rows, uniform(p * v, activation=1 / v))
    assert all(peak <= most + 1e-9 for peak, most in zip(line.peak, peaks(name, v, p, m), strict=True)), line.peak
    assert in_order(schedule)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=10), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_gpipe_does_with_any_placement(drawn: list[int], m: int) -> None:
    order = sorted(set(drawn))
    workers = [order.index(worker) for worker in drawn]
    schedule = make(ScheduleRequest("gpipe", workers, m))
    check(schedule.rows, m)
    simulate(schedule.rows, uniform(len(workers)))
    assert in_order(schedule) and schedule.workers == tuple((w,) for w in workers)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_stages_that_follow_one_another_on_a_worker_count_as_one(name: str) -> None:
    pairs, one = made(name, "pairs", 4, 8).rows, made(name, "line", 4, 8).rows
    line = simulate(pairs, uniform(8, 0.5, 0.5, 0.5, activation=0.5))
    assert line.makespan == simulate(one, uniform(4)).makespan
    assert [str(a) for a in pairs[1][:4]] == ["2F0", "3F0", *(["2F1", "3F1"])]
    last = "B" if name != "zb-h1" else "I"
    places = [str(a) for a in pairs[1]]
    assert places.index(f"3{last}0") + 1 == places.index(f"2{last}0")


def test_workers_may_come_in_any_order() -> None:
    there = make(ScheduleRequest("zb-v", [2, 0, 1, 1, 0, 2], 6)).rows
    here = make(ScheduleRequest("zb-v", [0, 1, 2, 2, 1, 0], 6)).rows
    assert [there[2], there[0], there[1]] == list(here)
    there = make(ScheduleRequest("zb-h1", [2, 0, 1, 2, 0, 1], 6)).rows
    here = make(ScheduleRequest("zb-h1", [0, 1, 2, 0, 1, 2], 6)).rows
    assert [there[2], there[0], there[1]] == list(here)


@pytest.mark.parametrize(
    ("name", "workers", "said"),
    [
        ("1f1b", [0, 1, 0, 1], "1f1b wants consecutive stages for each worker, got worker 0 in 2 places of [0, 1, 0, 1]; "
         "try interleaved, zb-v, gpipe or auto"),
        ("interleaved", [0, 1, 2], "interleaved wants workers that take turns more than once, as [0, 1, 2, 0, 1, 2], got "
         "stages (consecutive ones of a worker as one) on workers [0, 1, 2]; try 1f1b or auto"),
        ("zb-h1", [0, 1, 0], "zb-h1 wants workers that take turns, as [0, 1, 0, 1], got stages (consecutive ones of a "
         "worker as one) on workers [0, 1, 0]; try gpipe or auto"),
        ("zb-v", [0, 1, 2, 3, 3, 2, 0, 1], "zb-v wants stages 0 and 7 on one worker, got workers 0 and 1; try 1f1b, "
         "interleaved or auto"),
        ("zb-v", [0, 1, 2], "zb-v wants two stages a worker: 6 stages on 3 workers, got 3"),
        ("gpipe", [0, 2], "stages on workers [0, 2]: want workers numbered from 0, each with a stage"),
        ("zero", [0, 1], "'zero' is not a schedule; want one of gpipe, 1f1b, zb-h1, interleaved, zb-v, auto"),
    ],
)  # fmt: skip
def test_a_placement_that_does_not_do_says_what_would(name: str, workers: list[int], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        make(ScheduleRequest(name, workers, 4))
    assert str(error.value) == said


def test_sizes_and_limits_that_do_not_do() -> None:
    with pytest.raises(ConfigError, match="1f1b wants a micro-batch or more, got 0"):
        make(ScheduleRequest("1f1b", range(2), 0))
    with pytest.raises(ConfigError, match="1f1b needs 3 of activations on worker 0, and the limit is 2: try auto"):
        make(ScheduleRequest("1f1b", range(3), 8, limit=2))
    with pytest.raises(ConfigError, match="want a limit of memory for each of 3 workers, got 2"):
        make(ScheduleRequest("1f1b", range(3), 8, limit=[2, 2]))
    assert make(ScheduleRequest("1f1b", range(3), 8, limit=[3, 2, 1])).name == "1f1b"
    assert (*SCHEDULES, "auto") == NAMES
