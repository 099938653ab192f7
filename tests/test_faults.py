"""Workers that die, hang or come back, and whoever waits for them: an error with the cause, in time, and work goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gt.dispatcher.cluster import Cluster, HeapFull
from gt.dispatcher.events import PeerLost, Tick
from gt.errors import WorkerStuck
from gt.wire.link import hello
from gt.wire.messages import THROUGH, Abort, Done, Failed, Fetch, Goodbye, Ops, Query, Report, Run, Trouble, World
from gt.worker.engine.numpy import NumpyEngine
from tests.fuzz import serving
from tests.hostile import TEMPLATES
from tests.streams import ADD, NEG, Stream
from tests.test_hostile import Bench

TWO = "a: {shard: {axis: 0, workers: [0]}}\nb: {shard: {axis: 0, workers: [1]}}\n"
HEARTBEAT = 1.0
ROOT = Path(__file__).resolve().parent.parent


def test_processes_killed_and_stopped_at_random_moments_take_nothing_with_them():
    # apart from this process: its children are counted, and it forks, which needs a process without threads
    command = [sys.executable, "-m", "tests.chaos", "--seed", "5", "--rounds", "10", "--seconds", "40"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rounds"] >= 3 and found["slowest_s"] < 6


@pytest.fixture
def stuck(monkeypatch):
    """Every aten.neg waits until this is set."""
    free = threading.Event()
    bind = NumpyEngine.bind

    def waiting(self, payload):
        call = bind(self, payload)
        return (lambda *args: (free.wait(30), call(*args))[1]) if payload["op"] == "aten.neg.default" else call

    monkeypatch.setattr(NumpyEngine, "bind", waiting)
    yield free
    free.set()


def test_a_stuck_worker_is_named_with_its_op_within_the_heartbeat_and_waiting_again_may_do(stuck):
    with serving(2, heartbeat=HEARTBEAT) as server:
        mine, other = Stream(server.address, TWO, ("a",), seed=1), Stream(server.address, seed=2)
        array = np.ones((8, 6), np.float32)
        made = mine.op(NEG, mine.upload(array), value=-array)
        start = time.monotonic()
        with pytest.raises(WorkerStuck, match=r"worker w\d is alive and has been at stream.py:1: aten.neg.default, group a"):
            mine.fetch(made)
        assert time.monotonic() - start < 2 * HEARTBEAT
        waiting = other.upload(array)  # on the first worker, as what is ungrouped is; so is group a
        other.op(ADD, waiting, waiting, value=2 * array)
        with pytest.raises(WorkerStuck, match=r"worker w\d is alive and has been at an op of another program for"):
            other.check()
        stuck.set()
        np.testing.assert_array_equal(mine.fetch(made), -array)
        other.check()
        mine.session.close()
        other.session.close()


def test_a_client_that_waits_for_credit_is_told_of_a_stuck_worker(stuck):
    with serving(1, heartbeat=HEARTBEAT) as server:
        stream = Stream(server.address)
        array = np.ones((8, 6), np.float32)
        made = stream.op(NEG, stream.upload(array), value=-array)
        with pytest.raises(WorkerStuck, match=r"aten\.neg\.default"):
            for _ in range(200):
                stream.op(ADD, made, made, value=-2 * array)
                stream.flush()
        stuck.set()
        np.testing.assert_array_equal(stream.fetch(made), -array)
        stream.session.close()


# ---- event by event


def grouped(bench: Bench, batch: int = 0) -> None:
    """An upload and a neg on each of the two workers, ids 1 to 4."""
    origins = [[1, "m.py", 1, "a", False, -1], [2, "m.py", 2, "b", False, -1], [3, "m.py", 3, "", False, -1]]
    code = [16, 1, 0, 1, 17, 1, 1, 2, 16, 2, 0, 3, 17, 2, 3, 4]
    bench.give(b"c", Ops(batch, [[16, TEMPLATES[0]], [17, TEMPLATES[3]], [18, TEMPLATES[4]]], origins, code), (bytes(64),))


def looks(bench: Bench, until: float, at: list | None) -> float:
    """Ticks with a w0 that answers each Query with where it is; when the client was told of it."""
    now = 0.0
    while now < until:
        now += 0.25
        bench.feed(Tick(now))
        if bench.to(b"c", Failed):
            return now
        for query in bench.to(b"w0", Query):
            assert not query.stats
            bench.give(b"w0", Report(query.request, {"done": 0, "at": at, "stats": {}}), at=now)
            if bench.to(b"c", Failed):
                return now
    return now


def test_no_progress_for_a_heartbeat_is_told_to_whoever_waits():
    bench = Bench()
    grouped(bench)
    bench.give(b"w1", Done(1))
    bench.give(b"c", Fetch(1, 2))
    told = looks(bench, 15.0, [1, 0, 1, "op", 0])
    assert told <= 10.0
    (failed,) = bench.to(b"c", Failed)
    assert failed.request == 1 and failed.error["kind"] == "WorkerStuck"
    bench.give(b"c", Fetch(2, 2), at=told)  # asks again: as long again
    bench.feed(Tick(told + 1))
    assert not bench.to(b"c", Failed)
    bench.give(b"w0", Done(bench.core.cluster.workers[0].runs), at=told + 1)
    assert not bench.core.watch.stuck(told + 1) or bench.feed(Tick(told + 2)) == []


def test_a_worker_that_says_nothing_of_itself_is_told_of_too():
    bench = Bench()
    grouped(bench)
    bench.give(b"c", Fetch(1, 2))
    now = 0.0
    while not bench.to(b"c", Failed) and now < 15:
        now += 0.25
        bench.feed(Tick(now))
    assert now <= 10.0 and "worker w0 is alive and has not said" in bench.to(b"c", Failed)[0].error["message"]


def test_who_waits_for_a_stuck_worker_is_not_blamed():
    bench = Bench()
    grouped(bench)
    bench.give(b"c", Fetch(1, 2))
    bench.give(b"c", Fetch(2, 4))
    now, texts = 0.0, []
    places = {b"w0": [1, 0, 1, "op", 0], b"w1": [1, 0, 3, "recv", 0]}
    while not texts and now < 15:
        now += 0.25
        queries = [(p, m) for p, m in bench.feed(Tick(now)) if isinstance(m, Query)]
        texts = [failed.error["message"] for failed in bench.to(b"c", Failed)]
        for peer, query in queries:
            bench.give(peer, Report(query.request, {"at": places[peer]}), at=now)
    assert len(texts) == 2 and all("worker w0" in text and "worker w1" not in text for text in texts)


def test_a_worker_that_compiles_is_not_stuck_nor_is_who_waits_for_it():
    bench = Bench()
    grouped(bench)
    bench.give(b"c", Fetch(1, 2))
    bench.give(b"c", Fetch(2, 4))
    places = {b"w0": [1, 0, 1, "compile", 0], b"w1": [1, 0, 3, "recv", 0]}
    now, told = 0.0, []
    while not told and now < 60:
        now += 0.25
        if now == 40:  # done, and then really stuck: as long again until that is said
            places[b"w0"] = [1, 5, 1, "op", 0]
        queries = [(p, m) for p, m in bench.feed(Tick(now)) if isinstance(m, Query)]
        told = bench.to(b"c", Failed)
        for peer, query in queries:
            bench.give(peer, Report(query.request, {"at": places[peer]}), at=now)
    assert 46 < now <= 52 and all("worker w0 is alive and has been at m.py:1" in failed.error["message"] for failed in told)


def asked(bench: Bench, until: float, places: Callable[[float], dict[bytes, list]]) -> tuple[float, list[str]]:
    """Ticks with workers that answer each Query with where they are then; when the client was told of it, and what."""
    now, told = 0.0, []
    while not told and now < until:
        now += 0.25
        queries = [(peer, m) for peer, m in bench.feed(Tick(now)) if isinstance(m, Query)]
        told = [failed.error["message"] for failed in bench.to(b"c", Failed)]
        for peer, query in queries:
            bench.give(peer, Report(query.request, {"at": places(now)[peer]}), at=now)
    return now, told


@pytest.mark.parametrize("kind", ["load", "device"])
def test_what_a_gpu_does_for_the_first_time_or_has_still_to_do_may_take_a_minute(kind: str) -> None:
    bench = Bench()
    grouped(bench)
    bench.give(b"w1", Done(1))
    bench.give(b"c", Fetch(1, 2))
    now, told = asked(bench, 90, lambda now: {b"w0": [1, 0, 1, kind, 0]})
    assert 60 < now <= 70 and "has been at m.py:1" in told[0] and ("its GPU is not through" in told[0]) == (kind == "device")


def test_a_gpu_that_gets_on_is_not_stuck_however_much_it_was_given() -> None:
    bench = Bench()
    grouped(bench)
    bench.give(b"w1", Done(1))
    bench.give(b"c", Fetch(1, 2))
    now, told = asked(bench, 400, lambda now: {b"w0": [1, 0, 1, "device", int(min(now, 200) // 20)]})
    assert 260 < now <= 270 and "has been at" in told[0]


def test_who_waits_on_its_gpu_for_one_that_loads_or_compiles_is_not_stuck() -> None:
    bench = Bench()
    grouped(bench)
    bench.give(b"c", Fetch(1, THROUGH))
    seq = next(iter(bench.core.sessions.values())).requests.open[1].seq
    # it compiles for long, and then it is stuck
    places = {b"w1": [2, 0, seq, "device", 3]}
    now, told = asked(bench, 130, lambda now: {**places, b"w0": [1, 0, 1, "compile" if now < 100 else "op", 0]})
    assert 106 < now <= 112 and "worker w0" in told[0] and "worker w1" not in told[0]


def test_who_waits_for_its_gpu_alone_is_told_what_for() -> None:
    bench = Bench()
    grouped(bench)
    for peer in (b"w0", b"w1"):
        bench.give(peer, Done(1))
    bench.give(b"c", Fetch(1, THROUGH))
    seq = next(iter(bench.core.sessions.values())).requests.open[1].seq
    bench.give(b"w1", Done(2))
    now, told = asked(bench, 90, lambda now: {b"w0": [2, 0, seq, "device", 0]})
    assert now > 60 and "at reading what says that it is through (its GPU is not through)" in told[0]


def test_what_a_worker_ends_of_is_told_to_who_waits_for_it() -> None:
    bench = Bench()
    grouped(bench)
    bench.give(b"c", Fetch(1, 2))
    bench.give(b"w0", Trouble(1, "op", "CUDA out of memory"))
    bench.give(b"w0", Goodbye("others wait on their GPUs for a send that failed: CUDA out of memory"))
    told = [failed.error for failed in bench.to(b"c", Failed)]
    assert told[0]["kind"] == "WorkerLost"
    assert "w0 is lost: others wait on their GPUs for a send that failed: CUDA out of memory" in told[0]["message"]


def test_a_worker_that_comes_back_serves_new_work_and_what_was_lost_stays_lost():
    bench = Bench()
    grouped(bench)
    worker = bench.core.cluster.workers[1]
    old = worker.runs
    bench.give(b"w0", Done(bench.core.cluster.workers[0].runs))
    bench.feed(PeerLost(b"w1", "killed"))
    assert bench.to(b"w0", Abort) == [Abort(1, "killed")]
    bench.give(b"new", hello("worker", info={"name": "w1", "heap_bytes": 1 << 30}))
    (world,) = bench.to(b"w0", World)
    assert [row[:2] for row in world.workers] == [[0, "w0"], [1, "w1"]] and bench.core.cluster.workers[1] is worker
    bench.give(b"c", Fetch(1, 4))
    assert "worker w1 is lost: killed" in bench.to(b"c", Failed)[0].error["message"]
    bench.give(b"c", Ops(1, [], [], [16, 2, 0, 10, 17, 2, 10, 11, 18, 2, 4, 11, 12]), (bytes(64),))
    (run,) = bench.to(b"new", Run)
    assert run.seq == old + 1 and {define[1] for define in run.defines} == {"upload", "op"}  # told all anew
    assert len(run.code) == 8, "the op that reads what is lost is not sent"
    bench.give(b"c", Fetch(2, 12))
    assert "worker w1 is lost: killed" in bench.to(b"c", Failed)[0].error["message"]
    bench.give(b"c", Fetch(3, 11))
    assert not bench.to(b"c", Failed) and bench.to(b"new", Run)


def test_devices_that_shared_memory_do_so_again_once_all_are_back():
    """Their processes cannot go on without one another, so they end, and come back one by one."""
    bench = Bench("")
    for peer in (b"w0", b"w1"):
        bench.feed(PeerLost(peer, "it ends"))

    def joins(peer: bytes, name: str, unique_id: str) -> None:
        bench.give(peer, hello("worker", info={"name": name, "heap_bytes": 1 << 31, "unique_id": unique_id}))

    def formed(peer: bytes) -> list:
        return [(world.members, world.unique_id) for world in bench.to(peer, World) if world.members]

    joins(b"a", "w0", "id 0")
    joins(b"b", "w1", "id 1")
    joins(b"c2", "w2", "")
    assert not formed(b"a"), "nobody needs it yet"
    bench.client(b"d", "")
    assert formed(b"a") == formed(b"b") == [([0, 1], "id 0")]
    bench.client(b"e", "")
    assert not formed(b"a"), "they do already"
    for peer in (b"b", b"a"):
        bench.feed(PeerLost(peer, "killed, and so was worker 1, whose memory it shares"))
    joins(b"new a", "w0", "id 3")
    assert not formed(b"new a"), "one is not back yet"
    joins(b"new b", "w1", "id 4")
    assert formed(b"new a") == formed(b"new b") == [([0, 1], "id 3")]


def test_a_heap_that_is_full_says_what_to_set():
    cluster = Cluster()
    for n in range(8):
        cluster.add(b"%d" % n, {"name": f"w{n}", "heap_bytes": 4 << 20})
    with pytest.raises(HeapFull, match=r"4194304 bytes has no room for \d+ more, \d+ are taken .* GT_HEAP_SIZE=256MiB, or"):
        for n in range(1, 8):
            cluster.channel(0, n)


def test_devices_of_several_hosts_share_memory_within_one():
    """The others' cannot be mapped, and who tried would end."""
    cluster = Cluster()
    for n, host in enumerate(["a", "b", "b", "a", "b"]):
        cluster.add(b"%d" % n, {"name": f"w{n}", "host": host, "unique_id": f"id {n}"})
    assert cluster.form() == [1, 2, 4]
    for n in (1, 2, 4):
        cluster.workers[n].lost = "killed"
    cluster.add(b"new", {"name": "w1", "host": "b", "unique_id": "id 5"})
    assert not cluster.form(again=True)
    for n in (2, 4):
        cluster.add(b"new", {"name": f"w{n}", "host": "b", "unique_id": f"id {n + 4}"})
    assert cluster.form(again=True) == [1, 2, 4]


def test_a_batch_that_waited_for_a_lost_worker_is_acknowledged_also_when_that_comes_back():
    bench = Bench()
    grouped(bench)
    bench.feed(PeerLost(b"w1", "killed"))
    bench.give(b"new", hello("worker", info={"name": "w1", "heap_bytes": 1 << 30}))
    bench.give(b"w0", Done(bench.core.cluster.workers[0].runs))
    assert not bench.core.sessions[b"c"].batches.pending


def test_new_work_without_a_group_goes_to_a_worker_that_is_there():
    bench = Bench("")
    bench.feed(PeerLost(b"w0", "killed"))
    bench.give(b"c", Ops(0, [[16, TEMPLATES[0]], [17, TEMPLATES[3]]], [], [16, 0, 0, 1, 17, 0, 1, 2]), (bytes(64),))
    assert bench.to(b"w1", Run) and not bench.to(b"c", Failed)
    bench.feed(PeerLost(b"w1", "killed too"))
    bench.give(b"c", Fetch(1, 2))
    assert "killed too" in bench.to(b"c", Failed)[0].error["message"]
    bench.give(b"c", Ops(1, [], [], [16, 0, 0, 3]), (bytes(64),))
    bench.give(b"c", Fetch(2, 3))  # there is nobody left to make it
    assert "WorkerLost" in [failed.error["kind"] for failed in bench.to(b"c", Failed)]


def test_what_did_not_arrive_from_a_lost_worker_is_never_a_value():
    """The receiver has made up a placeholder: what was computed from it must not look good."""
    bench = Bench()
    grouped(bench)
    bench.give(b"c", Ops(1, [], [], [18, 1, 2, 4, 20]))  # on w0, of w1's %4
    session = bench.core.sessions[b"c"]
    seq = session.journal.rows[-1].seq
    bench.feed(PeerLost(b"w1", "killed"))
    bench.give(b"w0", Trouble(seq, "peer", "worker 1 is gone"))
    bench.give(b"w0", Done(bench.core.cluster.workers[0].runs))
    bench.give(b"c", Fetch(1, 20))
    assert "worker w1 is lost: killed" in bench.to(b"c", Failed)[0].error["message"]
