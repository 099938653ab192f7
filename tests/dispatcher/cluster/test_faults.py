"""Workers that die, hang or come back, and whoever waits for them: an error with the cause, in time, and work goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from math import prod

import pytest

from gt.dispatcher.cluster.workers import Cluster, HeapFull
from gt.dispatcher.events import PeerLost
from gt.dispatcher.state.uploads import SMALL_BYTES, WINDOW_BYTES
from gt.wire.link import hello
from gt.wire.messages import (
    CHUNK,
    Abort,
    Ack,
    Data,
    Done,
    Failed,
    Fetch,
    Goodbye,
    OpError,
    Ops,
    Run,
    UploadChunk,
    UploadProgress,
    UploadRequest,
    WindowUpdate,
    World,
)
from tests.helpers import ROOT
from tests.helpers.core_bench import CoreBench
from tests.helpers.hostile import TEMPLATES, row, spec
from tests.helpers.limits import limit

TWO = "a: {shard: {axis: 0, workers: [0]}}\nb: {shard: {axis: 0, workers: [1]}}\n"
HEARTBEAT = 1.0


def test_processes_killed_and_stopped_at_random_moments_take_nothing_with_them():
    # apart from this process: its children are counted, and it forks, which needs a process without threads
    command = [sys.executable, "-m", "tests.stress.chaos", "--seed", "5", "--rounds", "10", "--seconds", str(limit(40))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(120))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rounds"] >= 3 and found["slowest_s"] < limit(6)


# ---- event by event


def grouped(bench: CoreBench, batch: int = 0) -> None:
    """An upload and a neg on each of the two workers, ids 1 to 4."""
    origins = [[1, "m.py", 1, "a", False, -1], [2, "m.py", 2, "b", False, -1], [3, "m.py", 3, "", False, -1]]
    code = [16, 1, 0, 1, 17, 1, 1, 2, 16, 2, 0, 3, 17, 2, 3, 4]
    bench.give(b"c", Ops(batch, [[16, TEMPLATES[0]], [17, TEMPLATES[3]], [18, TEMPLATES[4]]], origins, code), (bytes(64),))


def test_what_a_worker_ends_of_is_told_to_who_waits_for_it() -> None:
    bench = CoreBench()
    grouped(bench)
    bench.give(b"c", Fetch(1, 2))
    bench.give(b"w0", OpError(1, "op", "CUDA out of memory"))
    bench.give(b"w0", Goodbye("others wait on their GPUs for a send that failed: CUDA out of memory"))
    told = [failed.error for failed in bench.to(b"c", Failed)]
    assert told[0]["kind"] == "WorkerLost"
    assert "w0 is lost: others wait on their GPUs for a send that failed: CUDA out of memory" in told[0]["message"]


def test_a_worker_that_comes_back_serves_new_work_and_what_was_lost_stays_lost():
    bench = CoreBench()
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
    bench = CoreBench("")
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
    assert cluster.form() == [[0, 3], [1, 2, 4]]
    for n in (1, 2, 4):
        cluster.workers[n].lost = "killed"
    cluster.add(b"new", {"name": "w1", "host": "b", "unique_id": "id 5"})
    assert not cluster.form(again=True)
    for n in (2, 4):
        cluster.add(b"new", {"name": f"w{n}", "host": "b", "unique_id": f"id {n + 4}"})
    assert cluster.form(again=True) == [[1, 2, 4]]
    assert not cluster.form(), "all do already"


def test_a_batch_that_waited_for_a_lost_worker_is_acknowledged_also_when_that_comes_back():
    bench = CoreBench()
    grouped(bench)
    bench.feed(PeerLost(b"w1", "killed"))
    bench.give(b"new", hello("worker", info={"name": "w1", "heap_bytes": 1 << 30}))
    bench.give(b"w0", Done(bench.core.cluster.workers[0].runs))
    assert not bench.core.sessions[b"c"].op_stream.pending


def test_new_work_without_a_group_goes_to_a_worker_that_is_there():
    bench = CoreBench("")
    bench.feed(PeerLost(b"w0", "killed"))
    bench.give(b"c", Ops(0, [[16, TEMPLATES[0]], [17, TEMPLATES[3]]], [], [16, 0, 0, 1, 17, 0, 1, 2]), (bytes(64),))
    assert bench.to(b"w1", Run) and not bench.to(b"c", Failed)
    bench.feed(PeerLost(b"w1", "killed too"))
    bench.give(b"c", Fetch(1, 2))
    assert "killed too" in bench.to(b"c", Failed)[0].error["message"]
    bench.give(b"c", Ops(1, [], [], [16, 0, 0, 3]), (bytes(64),))
    bench.give(b"c", Fetch(2, 3))  # there is nobody left to make it
    assert "WorkerLost" in [failed.error["kind"] for failed in bench.to(b"c", Failed)]


def test_a_result_of_data_that_a_lost_worker_did_not_send_is_never_a_value():
    """The receiver has made up a placeholder: what was computed from it must not look good."""
    bench = CoreBench()
    grouped(bench)
    bench.give(b"c", Ops(1, [], [], [18, 1, 2, 4, 20]))  # on w0, of w1's %4
    session = bench.core.sessions[b"c"]
    seq = session.journal.rows[-1].seq
    bench.feed(PeerLost(b"w1", "killed"))
    bench.give(b"w0", OpError(seq, "peer", "worker 1 is gone"))
    bench.give(b"w0", Done(bench.core.cluster.workers[0].runs))
    bench.give(b"c", Fetch(1, 20))
    assert "worker w1 is lost: killed" in bench.to(b"c", Failed)[0].error["message"]


# ---- a worker that is lost in the middle of an upload


class Uploading:
    """A client that sends what it is granted of its host copies, and workers that take it in, unless stopped."""

    def __init__(self, bench: CoreBench) -> None:
        self.bench, self.stopped = bench, set[bytes]()
        self.totals: dict[int, int] = {}  # by key of an upload
        self.at: dict[int, int] = {}  # bytes sent
        self.told: list = []  # to the client

    def give(self, peer: bytes, message: object, frames: tuple = (), most: int = 1 << 30) -> None:
        """A message, and what follows from it, `most` of the client's chunks at most."""
        self.go_on(self.bench.give(peer, message, frames), most)

    def go_on(self, sent: list, most: int = 1 << 30) -> None:
        coming = deque(sent)
        while coming:
            peer, message = coming.popleft()
            if peer == b"c":
                self.told.append(message)
            if isinstance(message, UploadRequest):
                self.totals[message.key] = 4 * prod(stop - start for start, stop in message.boxes[0])
                self.at[message.key] = 0
            if isinstance(message, (UploadRequest, WindowUpdate)) and peer == b"c":
                while (at := self.at[message.key]) < message.upto and most > 0:
                    size = min(CHUNK, self.totals[message.key] - at)
                    self.at[message.key], most = at + size, most - 1
                    coming += self.bench.give(b"c", UploadChunk(message.key, at, self.totals[message.key]), (bytes(size),))
            elif isinstance(message, Data) and message.total > SMALL_BYTES and peer not in self.stopped:
                coming += self.bench.give(
                    peer, UploadProgress(message.key, message.offset + min(CHUNK, message.total - message.offset))
                )
            elif isinstance(message, Run) and peer not in self.stopped:
                coming += self.bench.give(peer, Done(message.seq))


LARGE = 3 * WINDOW_BYTES  # bytes on each worker


@pytest.mark.parametrize("worker", [b"w0", b"w1"])
@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("chunks", [0, 1, WINDOW_BYTES // CHUNK, 2 * WINDOW_BYTES // CHUNK])
def test_an_upload_whose_worker_is_lost_ends_and_its_program_goes_on(worker: bytes, stopped: bool, chunks: int) -> None:
    """One of the two uploads has no receiver any more; it does not keep the window for ever."""
    bench = CoreBench()
    client = Uploading(bench)
    client.stopped = {worker} if stopped else set()
    form = row("gt.upload.default", [], [], [spec(LARGE // 16, 4)], 1)
    neg = row("aten.neg.default", [{"t": 0}], [spec(LARGE // 16, 4)], [spec(LARGE // 16, 4)])
    origins = [[1, "m.py", 1, "a", False, -1], [2, "m.py", 2, "b", False, -1]]
    code = [16, 1, -1, 1, 17, 1, 1, 2, 16, 2, -1, 3, 17, 2, 3, 4]
    client.give(b"c", Ops(0, [[16, form], [17, neg]], origins, code), most=chunks)
    client.give(b"c", Fetch(1, 4), most=0)
    session = bench.core.sessions[b"c"]
    assert session.stalled and len(client.at) == 2
    client.stopped.add(worker)
    client.go_on(bench.feed(PeerLost(worker, "killed")))
    for key, at in client.at.items():  # what it was granted before
        client.go_on([(b"c", WindowUpdate(key, session.uploads.open[key].granted))] if at < LARGE else [])
    assert "WorkerLost" in [message.error["kind"] for message in client.told if isinstance(message, Failed)]
    assert not session.uploads.open and not session.stalled and set(client.at.values()) == {LARGE}
    client.told.clear()
    client.give(b"c", Ops(1, [[18, TEMPLATES[1]]], [[3, "m.py", 3, "", False, -1]], [18, 3, 5]))
    client.give(b"c", Fetch(2, 5))
    assert Ack(1) in client.told and 2 in session.fetches.open
