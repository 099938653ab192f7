"""Clients beside one another: every value is its owner's, whoever leaves leaves nothing, nobody is starved."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from gt.dispatcher.events import PeerLost
from gt.errors import OpFailed
from gt.ir.instr import END, FORGET, FREE
from gt.launch import local
from gt.wire.link import hello
from gt.wire.messages import CHUNK, Data, Done, Fetch, Ops, Run, TorchSettings, UploadChunk, UploadProgress
from tests.dispatcher.test_hostile import asked
from tests.helpers.core_bench import CoreBench
from tests.helpers.hostile import TEMPLATES, row, spec
from tests.helpers.processes import children, wait_until
from tests.helpers.serving import serving
from tests.helpers.streams import CONFIGS, NEG, Stream
from tests.stress import starve


def streams(server, number: int) -> Stream:
    """One client's life: its own config and groups, random ops, every value compared."""
    config, groups = CONFIGS[number % len(CONFIGS)]
    stream = Stream(server.address, config, groups, seed=number)
    for _ in range(60):
        stream.random_ops(25)
        stream.check(3)
    return stream


def live(stream: Stream) -> int:
    return sum(worker["live_tensors"] for worker in stream.session.stats()["workers"])


def four(server) -> list[Stream]:
    done: list[Stream] = []
    threads = [threading.Thread(target=lambda n=n: done.append(streams(server, n))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4, "a client saw a value that was not its own"
    return done


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_four_clients_with_groups_of_their_own_never_see_each_others_values(backend):
    with serving(3, backend) as server:
        watcher = Stream(server.address)
        before = live(watcher)
        done = four(server)
        assert min(stream.checked for stream in done) > 100
        assert live(watcher) > before
        for stream in done:
            stream.session.close()
        assert wait_until(lambda: live(watcher) == before)  # freeing takes its turn behind what was asked before
        core = server._core
        assert len(core.sessions) == 1 and not core.watch.surveys
        watcher.session.close()


CLIENT = """
import sys
from tests.helpers.streams import CONFIGS, Stream
stream = Stream(sys.argv[1], *CONFIGS[int(sys.argv[2])], seed=7)
while True:
    stream.random_ops(25)
    stream.check(2)
    print(stream.checked, flush=True)
"""


def test_killed_clients_leave_nothing_and_the_others_go_on():
    with serving(3) as server:
        stayer = Stream(server.address, *CONFIGS[2], seed=1)
        before = live(stayer)
        for round in range(6):
            command = [sys.executable, "-c", CLIENT, server.address, str(round % 4)]
            client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for _ in range(1 + 2 * round):
                assert client.stdout.readline()
            client.send_signal(signal.SIGKILL)
            client.communicate()
            stayer.random_ops(20)
            stayer.check(3)
        stayer.free(list(stayer.values))
        stayer.flush()
        core = server._core
        assert wait_until(lambda: len(core.sessions) == 1)  # the kernel's word for it takes a moment
        assert wait_until(lambda: live(stayer) == before)
        (left,) = core.sessions.values()
        assert all(w.known <= set(left.emitter.defined) for w in core.cluster.workers)
        stayer.session.close()


def test_a_client_killed_half_way_through_an_upload_leaves_no_bytes_of_it():
    bench = CoreBench()

    need = asked(bench)
    bench.give(b"c", UploadChunk(need.key, 0, 16 << 20), (bytes(CHUNK),))
    bench.feed(PeerLost(b"c", "killed"))
    assert [(m.key, m.total) for m in bench.to(b"w0", Data)] == [(need.key, -1)]


def test_a_client_killed_in_an_upload_takes_with_it_what_it_had_freed_meanwhile():
    """Ops and frees that waited for the upload are never sent: workers drop everything of the session."""
    bench = CoreBench()
    tensors, known = set(), set()

    def carry_out():
        for run in bench.to(b"w0", Run):
            known.update(row[0] for row in run.defines)
            at = 0
            while at < len(run.code):
                number, count = run.code[at], run.code[at + 2]
                ids = run.code[at + 3 : at + 3 + count]
                if number == END:
                    tensors.difference_update([i for i in tensors if ids[0] <= i < ids[1]])
                elif number == FORGET:
                    known.difference_update(ids)
                elif number != FREE:  # neg: what it takes and makes
                    tensors.add(run.code[at + 3])
                    count = 1
                at += 3 + count

    bench.give(b"c", Ops(0, [[16, TEMPLATES[0]], [17, TEMPLATES[3]]], [], [16, 0, 0, 1, 17, 0, 1, 2]), (bytes(64),))
    carry_out()
    assert len(tensors) == 2 and known
    bench.give(b"c", Ops(1, [], [], [FREE, 2, 1, 2, 16, 0, -1, 3, 17, 0, 3, 4]))
    assert not bench.to(b"w0", Run)
    bench.feed(PeerLost(b"c", "killed"))
    carry_out()
    assert not tensors and not known


def test_a_worker_waits_for_no_client():
    """An op that reads an upload is sent once the upload is complete; other programs' ops overtake it."""

    bench = CoreBench()
    bench.client(b"d")
    need = asked(bench)
    assert not bench.to(b"w0", Run)
    bench.give(b"c", Fetch(1, 2))  # kept for later
    assert not bench.sent
    bench.give(b"d", Ops(0, [[16, TEMPLATES[0]], [17, TEMPLATES[3]]], [], [16, 0, 0, 1, 17, 0, 1, 2]), (bytes(64),))
    assert [run.seq for run in bench.to(b"w0", Run)] == [1]
    total, order = 16 << 20, []
    for offset in range(0, total, CHUNK):
        bench.give(b"c", UploadChunk(need.key, offset, total), (bytes(CHUNK),))
        order += [type(m).__name__ for p, m in bench.sent if p == b"w0" and isinstance(m, (Data, Run))]
        bench.give(b"w0", UploadProgress(need.key, offset + CHUNK))
    assert order == ["Data"] * 16 + ["Run", "Run"]  # the batch, and what was kept
    bench.give(b"w0", Done(3))


def test_switches_go_with_the_session_whose_runs_follow():
    """Each program's threads and precision are its own, and only workers it uses hear of them."""

    bench = CoreBench()
    for peer, precision in ((b"x", "high"), (b"y", "medium")):
        bench.give(peer, hello("client", switches={"threads": 2, "matmul_precision": precision}))
        assert not [m for _, m in bench.sent if isinstance(m, TorchSettings)]
    heard = []
    for n, peer in enumerate((b"x", b"x", b"y", b"x")):
        batch = sum(one == peer for one in (b"x", b"x", b"y", b"x")[:n])
        templates = [[16, TEMPLATES[0]], [17, TEMPLATES[3]]] if batch == 0 else []
        first = 2 * batch + 1
        bench.give(peer, Ops(batch, templates, [], [16, 0, 0, first, 17, 0, first, first + 1]), (bytes(64),))
        heard += [m.switches["matmul_precision"] for m in bench.to(b"w0", TorchSettings)]
        assert len(bench.to(b"w0", Run)) == 1 and not bench.to(b"w1", TorchSettings)
    assert heard == ["high", "medium", "high"]


def test_an_upload_does_not_starve_anothers_eager_steps():
    """What the dispatcher and the worker do in a step's time is counted: a step's time itself is the machine's too."""
    started = local.start(1, backend="numpy")
    try:
        found = starve.measure(started.address, started.token, 4, children(started._process.pid))
    finally:
        started.stop()
    assert found["during_work_p99_ms"] < 100, found


def test_one_clients_failed_op_is_not_anothers():
    with serving(1) as server:
        good, bad = Stream(server.address, seed=1), Stream(server.address, seed=2)
        array = np.zeros((8, 6), np.float32)
        made = bad.op(NEG, bad.upload(array), value=array)
        bad.flush()
        form = row("aten.mm.default", [{"t": 0}, {"t": 1}], [spec(8, 6)] * 2, [spec(8, 6)])  # 8 x 6 by 8 x 6: it fails there
        bad.session.submit([[99, form]], [], [99, 1, made, made, 50])
        with pytest.raises(OpFailed, match=r"stream.py:1: aten.mm.default"):
            bad.session.fetch(50)
        bad.check()
        good.random_ops(30)
        good.check(5)
        good.session.close()
        bad.session.close()
