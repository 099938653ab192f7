"""Workers that are slow, stopped, or do not get on: a notice where it is slow, an error where it is proved."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gt import env
from gt.dispatcher.cluster.health import Look
from gt.dispatcher.events import Close, Examine, Examined, PeerLost, Tick
from gt.dispatcher.state.uploads import WINDOW_BYTES
from gt.dispatcher.state.validate import CREDIT
from gt.errors import ConfigError, DispatcherLost, WorkerLost, WorkerStuck
from gt.launch import local
from gt.launch.process import fork
from gt.wire import liveness
from gt.wire.dealer import Dealer
from gt.wire.link import hello
from gt.wire.messages import (
    AHEAD,
    CHUNK,
    THROUGH,
    Describe,
    Done,
    Exit,
    Failed,
    Fetch,
    FinishCapture,
    Notice,
    Ops,
    Piece,
    Query,
    Report,
    Stats,
    UploadChunk,
    UploadProgress,
    UploadRequest,
    Value,
    WindowUpdate,
)
from gt.worker.engine.numpy import NumpyEngine
from gt.worker.process.progress import Effort
from tests.helpers.core_bench import TWO, CoreBench
from tests.helpers.hostile import TEMPLATES, row, spec
from tests.helpers.limits import limit
from tests.helpers.processes import children, wait_until
from tests.helpers.serving import serving
from tests.helpers.streams import NEG, Stream
from tests.stress import load

States = Callable[[float], dict[bytes, tuple]]
ONES = np.ones((8, 6), np.float32)
ENOUGH = 700.0  # seconds on the clock of these tests


def begun(bench: CoreBench, peer: bytes = b"c", batch: int = 0) -> None:
    """An upload and a neg on each of the two workers, ids 1 to 4."""
    origins = [[1, "m.py", 1, "a", False, -1], [2, "m.py", 2, "b", False, -1], [3, "m.py", 3, "", False, -1]]
    code = [16, 1, 0, 1, 17, 1, 1, 2, 16, 2, 0, 3, 17, 2, 3, 4]
    bench.give(peer, Ops(batch, [[16, TEMPLATES[0]], [17, TEMPLATES[3]], [18, TEMPLATES[4]]], origins, code), (bytes(64),))


def told(
    bench: CoreBench,
    states: States,
    until: float = ENOUGH,
    start: float = 0.0,
    step: float = 0.25,
    halts: States = lambda now: {},
) -> list[tuple[float, bytes, str, str]]:
    """(when, who, "Notice" or a kind of error, text) while workers answer each Query with (at, work), and are seen so.

    states: of workers that answer. halts: (letter, seconds) of those whose process is looked at.
    """
    now, rows = start, []
    while now < until:
        now += step
        actions = bench.core.handle(Tick(now))
        while actions:
            action = actions.pop(0)
            if isinstance(action, Examine):
                actions += bench.core.handle(Examined(action.peer, *halts(now).get(action.peer, ("S", 0.0)), now))
            elif isinstance(action, Close):
                rows.append((now, action.peer, "Close", ""))
            elif isinstance(action.message, Query) and action.peer in states(now):
                at, work = states(now)[action.peer]
                body = {"done": 0, "at": at, "work": work}
                if action.message.process:  # of a worker that the dispatcher does not see
                    body["sight"] = [*halts(now).get(b"w%d" % (action.message.process - 100), ("S", 0.0))]
                bench.give(action.peer, Report(action.message.request, body), at=now)
            elif isinstance(action.message, Notice):
                rows.append((now, action.peer, "Notice", action.message.text))
            elif isinstance(action.message, Failed):
                rows.append((now, action.peer, action.message.error["kind"], action.message.error["message"]))
    return rows


def seen(bench: CoreBench) -> None:
    """Have the dispatcher on the host of its workers."""
    bench.core.watch.home = "here"
    for worker in bench.core.cluster.workers:
        worker.info.update(pid=100 + worker.index, home="here")


def test_a_slow_worker_is_a_notice_at_10_30_and_60_s_and_then_seldom_and_never_an_error():
    bench = CoreBench()
    begun(bench)
    bench.give(b"w1", Done(1))
    bench.give(b"c", Fetch(1, 2))
    rows = told(bench, lambda now: {b"w0": ([1, 0, 1, "op", 0], now / 50)}, until=2000)  # it has a fiftieth of a core
    assert {kind for _, _, kind, _ in rows} == {"Notice"}
    want = [10, 30, 60, 120, 300, 600, 1200, 1800]
    assert len(rows) == len(want) and all(w <= when <= w + 2 for w, (when, *_) in zip(want, rows)), rows
    said = "slow: worker w0 is alive and has been at m.py:1: gt.upload.default, group a for "
    assert all(text.startswith(said) for *_, text in rows), rows
    bench.give(b"w0", Piece(next(iter(bench.core.sessions[b"c"].fetches.by_key)), 0, 64), (bytes(64),), at=2000)
    bench.give(b"w0", Done(bench.core.cluster.workers[0].runs), at=2000)
    assert told(bench, lambda now: {}, start=2000, until=2700) == []


def test_a_line_that_is_slow_in_every_step_is_not_told_in_every_step():
    bench = CoreBench()
    begun(bench)
    bench.give(b"w1", Done(1))
    bench.give(b"c", Fetch(1, 2))
    rows = told(bench, lambda now: {b"w0": ([1, int(now / 12), 1, "op", 0], now)}, until=241)
    assert 2 <= len(rows) <= 5 and {kind for _, _, kind, _ in rows} == {"Notice"}


def test_no_progress_of_any_worker_for_the_stall_timeout_is_an_error_and_waiting_again_waits_as_long_again():
    bench = CoreBench()
    begun(bench)
    bench.give(b"w1", Done(1))
    bench.give(b"c", Fetch(1, 2))

    def still(now: float) -> dict:
        return {b"w0": ([1, 0, 1, "op", 0], 0.01)}

    rows = [row for row in told(bench, still, until=400) if row[2] != "Notice"]
    ((when, peer, kind, text),) = rows
    assert 300 <= when <= 303 and peer == b"c" and kind == "WorkerStuck"
    limit = "no worker of this program has made progress for 300 s"
    assert text.startswith(f"{limit}: worker w0 is alive and has been at m.py:1: gt.up")
    assert "Nothing is lost" in text and "GT_STALL_TIMEOUT" in text
    bench.give(b"c", Fetch(2, 2), at=400)
    rows = [row for row in told(bench, still, start=400, until=800) if row[2] != "Notice"]
    assert [700 <= when <= 702 for when, *_ in rows] == [True]


@pytest.mark.parametrize(("asked", "when"), [(20, 20), (1000.5, 1000.5), (0, None)])
def test_the_stall_timeout_is_each_programs_own(asked: float, when: float | None):
    bench = CoreBench()
    switches = {"workers": 2, "stall_timeout": asked}
    bench.give(b"d", hello("client", config=TWO, config_path="t.yaml", switches=switches))
    begun(bench, b"d")
    bench.give(b"d", Fetch(1, 2))
    rows = told(bench, lambda now: {b"w0": ([1, 0, 1, "op", 0], 0.0), b"w1": ([1, 0, 3, "op", 0], 0.0)}, until=1100)
    errors = [row for row in rows if row[2] != "Notice"]
    assert [asked <= row[0] <= asked + 3 for row in errors] == [True] * (when is not None)
    assert "stall_timeout" not in bench.core.sessions[b"d"].context.terms.switches(bench.core.cluster.workers[0])


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "300", True, None])
def test_a_stall_timeout_that_is_none_is_refused(value: object):
    assert "stall_timeout" in CoreBench().refusal(b"d", hello("client", switches={"stall_timeout": value}))


@pytest.mark.parametrize("kind", ["op", "compile", "recv", "all_reduce"])
def test_cpu_time_is_progress_whatever_an_instruction_is(kind: str):
    bench = CoreBench()
    begun(bench)
    bench.give(b"c", Fetch(1, 2))
    busy = 0.1  # of a core until second 350
    rows = told(
        bench,
        lambda now: {b"w0": ([1, 0, 1, kind, 0], busy * min(now, 350)), b"w1": ([1, 0, 3, "recv", 0], 0.0)},
        until=700,
    )
    errors = [row for row in rows if row[2] != "Notice"]
    assert [648 <= row[0] <= 655 for row in errors] == [True]


def test_the_time_of_an_answer_is_no_progress():
    bench = CoreBench()
    begun(bench)
    bench.give(b"c", Fetch(1, 2))
    rows = told(bench, lambda now: dict.fromkeys((b"w0", b"w1"), ([1, 0, 1, "op", 0], now * 1e-4)), until=400)
    assert "WorkerStuck" in {kind for _, _, kind, _ in rows}


def test_one_worker_that_gets_on_is_enough_and_who_waits_for_a_stuck_one_is_not_blamed():
    bench = CoreBench()
    begun(bench)
    bench.give(b"c", Fetch(1, 2))
    bench.give(b"c", Fetch(2, 4))
    rows = told(bench, lambda now: {b"w0": ([1, 0, 1, "op", 0], now), b"w1": ([1, 0, 3, "recv", 0], 0.0)}, until=400)
    assert {kind for _, _, kind, _ in rows} == {"Notice"} and all("worker w1" not in text for *_, text in rows)
    rows = told(
        bench, lambda now: {b"w0": ([1, 0, 1, "op", 0], 400.0), b"w1": ([1, 0, 3, "recv", 0], 0.0)}, start=400, until=800
    )
    errors = [text for _, _, kind, text in rows if kind == "WorkerStuck"]
    assert len(errors) == 2 and all("worker w0" in text and "worker w1" not in text for text in errors)


def test_all_that_wait_for_one_another_are_named():
    bench = CoreBench()
    begun(bench)
    bench.give(b"c", Fetch(1, 2))
    rows = told(bench, lambda now: {b"w0": ([1, 0, 1, "recv", 0], 0.0), b"w1": ([1, 0, 3, "recv", 0], 0.0)}, until=400)
    (text,) = [text for _, _, kind, text in rows if kind == "WorkerStuck"]
    assert "worker w0" in text and "worker w1" in text and "(recv)" in text


@pytest.mark.parametrize("kind", ["load", "device"])
def test_first_and_pending_work_of_a_gpu_may_take_a_minute(kind: str):
    bench = CoreBench()
    bench.give(b"d", hello("client", config=TWO, config_path="t.yaml", switches={"workers": 2, "stall_timeout": 10}))
    begun(bench, b"d")
    bench.give(b"w1", Done(1))
    bench.give(b"d", Fetch(1, 2))
    rows = told(bench, lambda now: {b"w0": ([1, 0, 1, kind, 0], 0.0)}, until=90)
    errors = [(when, text) for when, _, what, text in rows if what != "Notice"]
    assert [60 < when <= 75 for when, _ in errors] == [True]
    assert {"load": "loading kernels for", "device": "waiting for its GPU"}[kind] in errors[0][1]


def test_a_gpu_that_gets_on_is_not_stuck_however_much_it_was_given():
    bench = CoreBench()
    begun(bench)
    bench.give(b"w1", Done(1))
    bench.give(b"c", Fetch(1, THROUGH))
    rows = told(bench, lambda now: {b"w0": ([1, 0, 1, "device", int(min(now, 1000) // 200)], 0.0)}, until=1500)
    errors = [when for when, _, kind, _ in rows if kind != "Notice"]
    assert [1300 <= when <= 1365 for when in errors] == [True]


def test_one_programs_slow_op_is_no_error_of_anothers_and_its_line_is_not_told():
    bench = CoreBench()
    bench.client(b"d", "")
    bench.give(b"d", Ops(0, [[16, TEMPLATES[0]], [17, TEMPLATES[3]]], [], [16, 0, 0, 1, 17, 0, 1, 2]), (bytes(64),))
    bench.give(b"w0", Done(bench.core.cluster.workers[0].runs))
    bench.client(b"e", "")  # of which no worker has anything to do
    begun(bench)
    bench.give(b"w1", Done(1))
    bench.give(b"c", Fetch(1, 2))
    bench.give(b"d", Fetch(1, 2))
    seq = bench.core.sessions[b"c"].journal.rows[1].seq
    rows = told(bench, lambda now: {b"w0": ([2, 0, seq, "op", 0], now)}, until=65)
    assert {kind for _, _, kind, _ in rows} == {"Notice"} and {peer for _, peer, _, _ in rows} == {b"c", b"d"}
    assert all(("m.py:1" in text) == (peer == b"c") for _, peer, _, text in rows)
    assert all(("an op of another program" in text) == (peer == b"d") for _, peer, _, text in rows)


def test_a_worker_that_cannot_answer_and_computes_gets_on_as_the_kernel_says():
    """An op may keep the interpreter's lock, and with it the thread that answers."""
    bench = CoreBench()
    seen(bench)
    begun(bench)
    bench.give(b"w1", Done(1))
    bench.give(b"c", Fetch(1, 2))
    rows = told(bench, lambda now: {}, until=ENOUGH, halts=lambda now: {b"w0": ("R", now / 20)})
    assert {kind for _, _, kind, _ in rows} == {"Notice"} and "has not reported" in rows[0][3]
    silent = told(bench, lambda now: {}, start=ENOUGH, until=2 * ENOUGH, halts=lambda now: {b"w0": ("S", 99.0)})
    assert [kind for _, _, kind, _ in silent if kind != "Notice"] == ["WorkerStuck"]


# ---- proof: the process is stopped


def test_a_stopped_worker_is_named_within_a_heartbeat_and_then_given_up():
    bench = CoreBench()
    seen(bench)
    begun(bench)
    bench.give(b"w1", Done(1))
    bench.give(b"c", Fetch(1, 2))
    rows = told(bench, lambda now: {}, until=30, halts=lambda now: {b"w0": ("T" if now > 3 else "R", 0.0)})
    (when, peer, kind, text), (gone, *_) = [row for row in rows if row[2] in ("WorkerStuck", "Close")]
    assert 8 <= when <= 10 and (peer, kind) == (b"c", "WorkerStuck")
    assert text.startswith("worker w0 is stopped: its process 100 is stopped (state T; `kill -CONT 100` lets it go on)")
    assert 13 <= gone <= 15 and bench.core.cluster.workers[0].lost.startswith("for 10 s its process 100 is stopped")
    bench.core.check()


IDLE = {b"w1": (None, 0.0)}  # a worker that answers and has nothing to do
BOTH = {b"w0": ([1, 0, 0, "op", 0], 0.0), **IDLE}


def far(stopped: bool, states: States, alone: bool = False) -> list[tuple[float, bytes, str, str]]:
    """A program's wait for w0, which answers nothing; its host is another than the dispatcher's, and w1 is there too."""
    bench = CoreBench()
    seen(bench)
    bench.core.watch.home = "far"
    for worker in bench.core.cluster.workers[1:] if alone else ():
        worker.info["home"] = "elsewhere"
    begun(bench)
    bench.give(b"w1", Done(1))
    bench.give(b"c", Fetch(1, 2))
    rows = told(bench, states, until=30, halts=lambda now: {b"w0": ("T" if stopped and now > 3 else "S", 0.0)})
    bench.core.check()
    return rows


def test_a_stopped_worker_of_another_host_is_seen_by_a_worker_beside_it_and_then_given_up():
    rows = far(True, lambda now: IDLE)
    (when, peer, kind, text), (gone, *_) = [row for row in rows if row[2] in ("WorkerStuck", "Close")]
    assert 8 <= when <= 12 and (peer, kind) == (b"c", "WorkerStuck")
    assert text.startswith("worker w0 is stopped: its process 100 is stopped (state T; `kill -CONT 100` lets it go on)")
    assert 13 <= gone <= 17


def test_a_worker_is_not_given_up_by_an_old_sighting_of_a_witness_that_answers_no_more():
    rows = far(True, lambda now: IDLE if now < 7 else {})
    assert not [row for row in rows if row[2] == "Close"]


def test_the_word_of_a_worker_that_was_not_asked_is_no_sighting():
    bench = CoreBench()
    seen(bench)
    bench.core.watch.home = "far"
    begun(bench)
    watch, (silent, other) = bench.core.watch, bench.core.cluster.workers[:2]
    watch.looks[silent.index] = Look(silent.lives, 5, 1, (other.index, other.lives + 1))
    watch.silent = lambda index: True
    watch.answered(other, Report(5, {"sight": ["T", 0.0]}))
    assert not watch.halts
    watch.looks[silent.index].witness = (other.index, other.lives)
    watch.answered(other, Report(5, {"sight": ["T", 0.0]}))
    assert list(watch.halts) == [silent.index]


def test_a_worker_of_another_host_that_is_silent_and_not_stopped_is_a_notice():
    rows = far(False, lambda now: IDLE)
    assert [kind for _, _, kind, _ in rows] == ["Notice"] * len(rows) and rows
    assert "worker w0 has answered nothing for" in rows[0][3] and "sees its process, which is not stopped" in rows[0][3]


def test_why_nobody_can_tell_whether_a_worker_of_another_host_is_stopped():
    rows = far(True, lambda now: IDLE, alone=True)
    assert [kind for _, _, kind, _ in rows] == ["Notice"] * len(rows) and rows
    assert "no other worker there can look at its process: `ps -o stat= -p 100` there says T" in rows[0][3]


@pytest.mark.parametrize("until", [0, 7])
def test_no_worker_can_have_one_that_answers_called_stopped(until: int):
    rows = far(True, lambda now: IDLE if now < until else BOTH)
    assert {kind for _, _, kind, _ in rows} <= {"Notice"}


def test_a_worker_that_was_let_go_on_is_not_called_stopped_by_what_was_seen_before():
    bench = CoreBench()
    seen(bench)
    begun(bench)
    bench.give(b"w1", Done(1))
    bench.give(b"c", Fetch(1, 2))
    rows = told(bench, lambda now: {}, until=9, halts=lambda now: {b"w0": ("T", 0.0)})
    assert [kind for _, _, kind, _ in rows if kind != "Notice"] == ["WorkerStuck"]
    bench.give(b"w0", Done(bench.core.cluster.workers[0].runs), at=9)  # SIGCONT
    bench.give(b"c", Ops(1, [], [], [17, 1, 1, 10]), at=9)
    bench.give(b"c", Fetch(2, 10), at=9)
    assert bench.core.watch.halts
    rows = told(bench, lambda now: {}, start=9, until=20, step=0.01)
    assert [kind for _, _, kind, _ in rows if kind != "Notice"] == []


def test_an_idle_worker_that_is_stopped_is_given_up_and_a_debuggers_moment_is_nothing():
    bench = CoreBench()
    seen(bench)
    rows = told(bench, lambda now: {}, until=60, halts=lambda now: {b"w0": ("t" if now % 10 < 4 else "S", 0.0)})
    assert rows == []
    rows = told(bench, lambda now: {}, start=60, until=90, halts=lambda now: {b"w1": ("Z", 0.0)})
    assert [(peer, kind) for _, peer, kind, _ in rows] == [(b"w1", "Close")]


def test_a_client_that_waits_for_credit_is_told_of_a_stopped_worker():
    bench = CoreBench()
    seen(bench)
    begun(bench)
    for n in range(1, CREDIT):
        bench.give(b"c", Ops(n, [], [], [17, 1, 1, 10 + n]))
    rows = told(bench, lambda now: {}, until=9, halts=lambda now: {b"w0": ("T", 0.0)})
    assert [kind for _, _, kind, _ in rows] == ["WorkerStuck"]  # once


# ---- answers that do not come, though all work is done


def stuck(bench: CoreBench, until: float, start: float = 0.0, peer: bytes = b"c", work: float = 0.0) -> list[float]:
    """Times of WorkerStuck errors. Workers are idle, or w0 works for another session for `work` seconds."""
    rows = told(bench, lambda now: {b"w0": ([9, 0, 99, "op", 0], min(now, work))}, start=start, until=until)
    assert {kind for _, _, kind, _ in rows} <= {"WorkerStuck", "Notice"}
    return [when for when, who, kind, _ in rows if (who, kind) == (peer, "WorkerStuck")]


def finished(bench: CoreBench, at: float = 0.0) -> list:
    """Workers have done all that was sent; what the client is told."""
    return [bench.give(worker.peer, Done(worker.runs), at=at) for worker in bench.core.cluster.workers]


def test_a_value_that_is_not_sent_is_an_error_after_the_stall_timeout_and_may_be_asked_for_again():
    bench = CoreBench()
    begun(bench)
    bench.give(b"c", Fetch(1, 2))
    assert stuck(bench, until=250, work=1000) == []
    finished(bench, at=250)
    assert [550 <= when <= 552 for when in stuck(bench, start=250, until=700)] == [True]
    bench.give(b"c", Fetch(2, 2), at=700)
    (key,) = bench.core.sessions[b"c"].fetches.by_key
    bench.give(b"w0", Piece(key, 0, 64), (bytes(64),), at=700)
    assert [m.request for sent in finished(bench, at=700) for _, m in sent if isinstance(m, Value)] == [2]
    assert stuck(bench, start=700, until=1100) == []


@pytest.mark.parametrize("sends", [0, 1, AHEAD // CHUNK])
def test_each_part_of_a_large_value_has_the_whole_time_and_a_client_that_reads_nothing_blames_nobody(sends: int):
    bench = CoreBench()
    size = spec(AHEAD // 8, 4)
    form, neg = row("aten.zeros.default", [[AHEAD // 8, 4]], [], [size]), row("aten.neg.default", [{"t": 0}], [size], [size])
    bench.give(b"c", Ops(0, [[16, form], [17, neg]], [[1, "m.py", 1, "a", False, -1]], [16, 1, 1, 17, 1, 1, 2]))
    bench.give(b"c", Fetch(1, 2))
    finished(bench)
    (key,) = bench.core.sessions[b"c"].fetches.by_key
    for n in range(sends):
        bench.give(b"w0", Piece(key, n * CHUNK, 2 * AHEAD), (bytes(CHUNK),), at=200.0)
    whole = sends == AHEAD // CHUNK
    begin = 200 if sends else 0
    assert [begin + 300 <= when <= begin + 302 for when in stuck(bench, start=begin, until=900)] == ([] if whole else [True])
    if whole:
        bench.give(b"c", UploadProgress(key, CHUNK), at=900.0)
        assert [1200 <= when <= 1202 for when in stuck(bench, start=900, until=1300)] == [True]


def test_shapes_and_statistics_that_are_not_told_are_errors_after_the_stall_timeout():
    bench = CoreBench()
    begun(bench)
    finished(bench)
    form = [*row("aten.nonzero.default", [{"t": 0}], [spec(4, 4)], [("new", None, -1)])[:7], True, False]
    bench.give(b"c", Ops(1, [[19, form]], [], [19, 1, 2, 9]))
    bench.give(b"c", Describe(1, [9]))
    bench.give(b"c", Stats(2))
    finished(bench)
    assert [300 <= when <= 302 for when in stuck(bench, until=400)] == [True, True]
    assert not bench.core.watch.surveys and not bench.core.sessions[b"c"].fetches.open
    bench.give(b"c", Stats(3), at=400)
    bench.client(b"d")
    begun(bench, b"d")
    assert [998 <= when <= 1002 for when in stuck(bench, start=400, until=1100, work=700)] == [True], "w0 got on until 700"


# ---- behind an upload


def uploading(bench: CoreBench, peer: bytes = b"c") -> UploadRequest:
    """A host copy for worker w0, of which the client has sent all that it was granted, and w0 has taken in nothing."""
    size = spec(WINDOW_BYTES // 8, 4)
    form, neg = row("gt.upload.default", [], [], [size], 1), row("aten.neg.default", [{"t": 0}], [size], [size])
    bench.give(peer, Ops(0, [[16, form], [17, neg]], [[1, "m.py", 1, "a", False, -1]], [16, 1, -1, 1, 17, 1, 1, 2]))
    (need,) = bench.to(peer, UploadRequest)
    for at in range(0, need.upto, CHUNK):
        bench.give(peer, UploadChunk(need.key, at, 2 * WINDOW_BYTES), (bytes(CHUNK),))
    return need


def test_a_stopped_worker_is_named_to_who_waits_behind_an_upload():
    bench = CoreBench()
    seen(bench)
    uploading(bench)
    bench.give(b"c", Fetch(1, 2))
    bench.give(b"c", FinishCapture(2, 1, "", "", [], 0, 0, 0))
    rows = told(bench, lambda now: {}, until=12, halts=lambda now: {b"w0": ("T" if now > 3 else "R", 0.0)})
    ((when, peer, kind, text),) = rows
    assert 8 <= when <= 10 and (peer, kind) == (b"c", "WorkerStuck")
    assert text.startswith("worker w0 is stopped: its process 100 is stopped (state T; `kill -CONT 100` lets it go on)")
    bench.core.check()
    assert [type(message) for message, _ in bench.core.sessions[b"c"].inbox] == [FinishCapture], (
        "its call is not to be made again"
    )
    bench.feed(PeerLost(b"w0", "given up"))
    assert not bench.core.sessions.get(b"c") or not bench.core.sessions[b"c"].inbox


@pytest.mark.parametrize("busy", [False, True])
def test_an_upload_that_nobody_takes_in_ends_what_waits_behind_it_after_the_stall_timeout(busy: bool):
    bench = CoreBench()
    if busy:
        begun(bench)
    bench.client(b"d")
    need = uploading(bench, b"d")
    bench.give(b"d", Fetch(1, 2))

    def still(now: float) -> dict:
        return {b"w0": ([1, 0, 1, "op", 0], min(now, 100.0))}  # of the other program's op, at first

    rows = [row for row in told(bench, still, until=500) if row[1:3] == (b"d", "WorkerStuck")]
    ((when, _, _, text),) = rows
    assert 300 + 100 * busy <= when <= 303 + 100 * busy
    assert "worker w0 is alive and has taken in nothing of an upload for " in text and "Nothing is lost" in text
    bench.give(b"d", Fetch(2, 2), at=500)
    assert [row[1] for row in told(bench, still, start=500, until=720) if row[2] != "Notice"] == [b"d"], "as long again"
    bench.give(b"w0", UploadProgress(need.key, need.upto), at=720)
    assert bench.to(b"d", WindowUpdate) == [WindowUpdate(need.key, 2 * WINDOW_BYTES)]


def test_a_client_without_credit_is_told_of_a_stopped_worker_behind_an_upload():
    bench = CoreBench()
    seen(bench)
    uploading(bench)
    for n in range(1, CREDIT):
        bench.give(b"c", Ops(n, [], [], [17, 1, 1, 10 + n]))
    rows = told(bench, lambda now: {}, until=9, halts=lambda now: {b"w0": ("T", 0.0)})
    assert [kind for _, _, kind, _ in rows] == ["WorkerStuck"]  # once


def test_a_client_that_does_not_send_what_it_was_granted_is_nobody_elses_fault():
    bench = CoreBench()
    need = uploading(bench)
    bench.give(b"w0", UploadProgress(need.key, need.upto))
    bench.give(b"c", Fetch(1, 2))
    assert told(bench, lambda now: {}) == []


def test_a_dispatcher_that_was_asleep_itself_blames_nobody():
    bench = CoreBench()
    seen(bench)
    begun(bench)
    bench.give(b"w1", Done(1))
    bench.give(b"c", Fetch(1, 2))
    halts = {b"w0": ("T", 0.0)}
    told(bench, lambda now: {}, until=3, halts=lambda now: halts)
    bench.core.handle(Tick(5000.0))
    rows = told(bench, lambda now: {}, start=5000, until=5003, halts=lambda now: halts)
    assert rows == []
    rows = told(bench, lambda now: {}, start=5003, until=5008, halts=lambda now: halts)
    assert [kind for _, _, kind, _ in rows] == ["WorkerStuck"]


# ---- what the kernel says


@pytest.fixture
def child() -> Iterator[int]:
    """A process that waits."""
    pid = fork("gt.test child", signal.pause)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_process_is_seen_as_it_is(child: int):
    home = liveness.home()
    assert home and not liveness.sight(child, home).stopped
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    assert liveness.sight(child, home) == ("T", pytest.approx(0, abs=5)) and liveness.sight(child, home).stopped
    assert liveness.sight(child, "another host").state == "" and liveness.sight(1 << 30, home).state == ""
    vigil = liveness.Vigil(child, home, 3)
    assert [bool(vigil.poll()) for _ in range(4)] == [False, False, True, True]
    os.kill(child, signal.SIGCONT)
    os.waitpid(child, os.WCONTINUED)
    assert not vigil.poll()


def test_a_connection_whose_other_host_answers_is_not_cut():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            one.sendall(bytes(1 << 16))
            assert liveness.unheard(one.fileno()) < liveness.SHORTEST_SECONDS and not liveness.Cable(one.fileno(), 0).poll()
            other.sendall(b"answer")
            assert one.recv(6) == b"answer", "looking takes nothing away"
    assert liveness.unheard(1 << 20) == 0.0


def test_a_host_that_acknowledges_nothing_for_a_heartbeat_is_gone_and_told_so_should_it_come_back(monkeypatch):
    heard: list[float] = []
    monkeypatch.setattr(liveness, "unheard", lambda fd: heard.pop(0) if heard else 0.0)
    cable = liveness.Cable(0, 10.0)
    heard += [9.0, 11.0, 0.0, 11.0, 12.0]
    assert [cable.poll() for _ in range(5)] == [""] * 4 + ["its host has acknowledged nothing for 12 s"]
    lost, over = [], threading.Event()
    with serving(1) as server:
        monkeypatch.setattr(Dealer, "_ended", lambda link, cable: "")  # it takes the other for alive
        heeds = lambda message, _: isinstance(message, Exit) and (lost.append(message), over.set())  # noqa: E731
        link = Dealer(server.address, heeds, print)
        link.send(hello("worker", info={"name": "cut", "heap_bytes": 1 << 20}))
        assert wait_until(lambda: "cut" in {w.name for w in server._core.cluster.workers})
        monkeypatch.setattr(liveness, "unheard", lambda fd: 11.0)
        assert over.wait(limit(20)) and lost == [Exit("its connection ended: its host has acknowledged nothing for 11 s")]
        assert wait_until(lambda: server._core.cluster.named("cut").lost == lost[0].reason)
        link.close()


def test_work_is_the_executing_threads_cpu_time_and_where_it_compiles_that_of_processes_too():
    host, device = Effort(True), Effort(False)
    for effort in (host, device):
        assert effort.seconds("op") == 0.0
        effort.begin()
    pid = fork("gt.test compiler", lambda: burn(60))
    try:
        before = host.seconds("op"), device.seconds("compile")
        burn(0.1)
        while device.seconds("compile") < before[1] + 0.2:
            burn(0.01)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert host.seconds("op") - before[0] >= 0.1
    assert device.seconds("op") == device.seconds("recv") == 0.0, "it may spin while it waits for its device"


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


# ---- whole


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every aten.neg waits until this is set."""
    free, bind = threading.Event(), NumpyEngine.bind

    def waiting(self, payload):
        call = bind(self, payload)
        return (lambda *args: (free.wait(limit(60)), call(*args))[1]) if payload["op"] == "aten.neg.default" else call

    monkeypatch.setattr(NumpyEngine, "bind", waiting)
    yield free
    free.set()


def test_a_worker_that_waits_for_ever_in_an_op_is_an_error_after_the_stall_timeout_and_goes_on(free):
    with serving(2) as server:
        stream = Stream(server.address, TWO, ("a",), switches={"stall_timeout": 1.0})
        made = stream.op(NEG, stream.upload(ONES), value=-ONES)
        with pytest.raises(WorkerStuck, match=r"made progress for 1 s: worker w\d.* at stream.py:1: aten\.neg"):
            stream.fetch(made)
        free.set()
        np.testing.assert_array_equal(stream.fetch(made), -ONES)
        stream.session.close()


@pytest.mark.parametrize("victim", ["worker", "dispatcher"])
def test_a_stopped_process_is_named_with_what_it_is(victim: str):
    started = local.start(1, backend="numpy", heartbeat=4.0)  # two of them until another worker takes its place
    pids = {Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(): pid for pid in children(started._process.pid)}
    pid = pids["gt.worker 0" if victim == "worker" else "gt.server"]
    try:
        stream = Stream(started.address, token=started.token, heartbeat=2.0)
        made = stream.op(NEG, stream.upload(ONES), value=-ONES)
        np.testing.assert_array_equal(stream.fetch(made), -ONES)
        os.kill(pid, signal.SIGSTOP)
        how = f"its process {pid} is stopped \\(state T"
        if victim == "worker":
            with pytest.raises(WorkerStuck, match=f"worker w0 is stopped: {how}"):
                stream.fetch(made)
            os.kill(pid, signal.SIGCONT)
            np.testing.assert_array_equal(stream.fetch(made), -ONES)  # nothing is lost
        else:
            with pytest.raises(DispatcherLost, match=f"the connection to the server at .* was lost: {how}"):
                stream.fetch(made)
        stream.session.close()
    finally:
        os.kill(pid, signal.SIGCONT)
        started.stop()


def test_another_takes_the_place_of_a_worker_that_stays_stopped():
    started = local.start(1, backend="numpy", heartbeat=0.5)
    try:
        stream = Stream(started.address, token=started.token)
        stream.fetch(stream.upload(ONES))
        os.kill(children(started._process.pid)[-1], signal.SIGSTOP)
        while True:  # until another worker has come
            try:
                np.testing.assert_array_equal(stream.fetch(stream.op(NEG, stream.upload(ONES), value=-ONES)), -ONES)
                break
            except (WorkerStuck, WorkerLost):
                continue
        stream.session.close()
    finally:
        started.stop()


def test_a_config_of_more_workers_than_are_started_is_refused_at_once(tmp_path: Path):
    import gt

    path = tmp_path / "many.yaml"
    path.write_text("stage0: {workers: [0]}\nstage1: {workers: [5]}\n")
    with pytest.raises(ConfigError, match=r"stage1.* names worker 5, but there are 2: w0, w1; .* start more, or name fewer"):
        gt.cpu_workers(2, config=str(path))
    with pytest.raises(ValueError, match="stall_timeout is -1"):
        gt.cpu_workers(1, stall_timeout=-1)


def test_a_server_that_will_have_no_more_workers_refuses_at_once():
    bench = CoreBench()
    bench.core.admission.most = 2
    text = bench.refusal(b"d", hello("client", config="s: {workers: [2]}", config_path="s.yaml"))
    assert "names worker 2, but there are 2: w0, w1" in text


def test_the_stall_timeout_of_the_environment(monkeypatch):
    assert env.seconds("GT_STALL_TIMEOUT") == 300
    monkeypatch.setenv("GT_STALL_TIMEOUT", "0")
    assert env.seconds("GT_STALL_TIMEOUT") == 0
    monkeypatch.setenv("GT_STALL_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="GT_STALL_TIMEOUT is 'soon', want seconds"):
        env.seconds("GT_STALL_TIMEOUT")


def test_parts_of_the_tests_are_all_of_them_and_about_as_long():
    seconds = json.loads(load.DURATIONS.read_text())
    rows = load.parts(load.files(), seconds, 5)
    assert sorted(name for row in rows for name in row) == load.files()
    totals = [sum(seconds.get(name, load.UNKNOWN) for name in row) for row in rows]
    assert max(totals) - min(totals) <= max(seconds.values())
