"""A worker's loop over a real link, the dispatcher being the test: the handshake, runs, what cannot wait, every way to end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from gt.errors import Refused, to_wire
from gt.ir.instr import Define
from gt.ir.template import T
from gt.wire import codec
from gt.wire.arena import HEADER_BYTES, OwnArena, owner_proof
from gt.wire.messages import (
    AHEAD,
    CHUNK,
    Abort,
    ArenaOpened,
    CloseArenas,
    Data,
    Done,
    Exit,
    Goodbye,
    Hello,
    OpError,
    Piece,
    PrepareCompilation,
    Query,
    Reject,
    Renew,
    Report,
    Run,
    TorchSettings,
    UseBlock,
    Welcome,
    WindowUpdate,
    World,
)
from gt.wire.router import Arrived, Gone, Router
from gt.worker import loop
from gt.worker.engine.torch import TorchEngine
from gt.worker.engine.torch.gpu.cuda import MAX_NOTES, Events
from gt.worker.executor import Executor
from tests.helpers.limits import limit
from tests.helpers.processes import no_thread, wait_until
from tests.helpers.worker_parts import new, op


class Dispatcher:
    """The other end of one worker's link."""

    def __init__(self) -> None:
        self.router = Router("127.0.0.1", 0)
        self.peer = b""
        self.backlog: list = []

    def next(self, kind: type) -> tuple:
        """The next message of this kind, and its frames; others are kept in `backlog`."""
        for _ in range(100):
            for event in self.router.poll(0.2):
                if isinstance(event, Gone):
                    self.backlog.append((event, ()))
                elif isinstance(event, Arrived):
                    self.peer = event.peer
                    self.backlog.append((codec.unpack(event.body), event.frames))
            for n, (message, _) in enumerate(self.backlog):
                if isinstance(message, kind):
                    return self.backlog.pop(n)
        raise AssertionError(f"no {kind.__name__} came, only {self.backlog}")

    def send(self, message, frames: tuple = ()) -> None:
        self.router.send(self.peer, message, frames)

    def greet(self) -> Hello:
        hello, _ = self.next(Hello)
        info = hello.info
        self.send(Welcome(0, "w0", [], [], 1))
        self.send(
            World(
                1,
                [[0, "w0", info["pid"], info["host"], info["heap_fd"], info["heap_bytes"], info["doorbell"], info["home"], 0]],
            )
        )
        return hello


@pytest.fixture
def dispatcher() -> Iterator[Dispatcher]:
    made = Dispatcher()
    yield made
    made.router.close()


@pytest.fixture
def worker(dispatcher) -> Iterator[list[str]]:
    """A worker in a thread; the list gets why it ended."""
    why: list[str] = []

    def main() -> None:
        why.append(loop.run(loop.WorkerOptions("127.0.0.1", dispatcher.router.port, "secret", "mine", "torch", "cpu")))

    thread = threading.Thread(target=main, name="gt-test-worker")
    thread.start()
    dispatcher.thread = thread
    yield why
    if thread.is_alive():
        dispatcher.send(Exit("the test is over"))
        thread.join(limit(10))
    assert not thread.is_alive()


FETCH = Define(16, "fetch", {}).wire()
UPLOAD = Define(17, "upload", {"shape": [2], "stride": [1], "dtype": "float32"}).wire()
ADD = Define(18, "op", op("aten.add.Tensor", [T(0), T(1)], 2, [new(torch.empty(2))])).wire()


def test_a_run_is_told_done_also_when_another_worker_joins_meanwhile(dispatcher, worker):
    dispatcher.greet()
    dispatcher.send(Run(0, 10, [UPLOAD], [17, 0, 1, 5]))
    dispatcher.send(World(2, []))  # waits behind the Run, which waits for its data
    dispatcher.send(Query(3))
    assert dispatcher.next(Report)[0].body["done"] == -1
    dispatcher.send(Data(5, 0, 8), (bytes(8),))
    assert dispatcher.next(Done)[0].seq == 0


def test_a_worker_tells_how_another_process_of_its_host_stands(dispatcher, worker):
    dispatcher.greet()
    for pid, states in ((os.getpid(), {"R", "S"}), (1 << 30, {""})):
        dispatcher.send(Query(3, False, process=pid))
        state, seconds = dispatcher.next(Report)[0].body["sight"]
        assert state in states and type(seconds) is float
    dispatcher.send(Query(4, False))
    assert "sight" not in dispatcher.next(Report)[0].body


def test_a_compiler_is_prepared_for_before_the_next_run(dispatcher, worker, monkeypatch):
    prepared = []
    monkeypatch.setattr(TorchEngine, "prepare_compilation", lambda self, idle: prepared.append(idle))
    dispatcher.greet()
    dispatcher.send(PrepareCompilation(True))
    dispatcher.send(Run(0, 10, [UPLOAD], [17, 0, 1, 5]))
    dispatcher.send(Data(5, 0, 8), (bytes(8),))
    assert dispatcher.next(Done)[0].seq == 0
    assert prepared == [True]


def test_a_worker_outlives_a_compiler_that_cannot_be_prepared(dispatcher, worker, monkeypatch):
    def prepare(self, idle):
        raise ImportError("no inductor here")

    monkeypatch.setattr(TorchEngine, "prepare_compilation", prepare)
    dispatcher.greet()
    dispatcher.send(PrepareCompilation(True))
    dispatcher.send(Run(0, 10, [UPLOAD], [17, 0, 1, 5]))
    dispatcher.send(Data(5, 0, 8), (bytes(8),))
    assert dispatcher.next(Done)[0].seq == 0


def test_a_worker_says_hello_and_carries_out(dispatcher, worker):
    hello = dispatcher.greet()
    assert (hello.role, hello.info["name"], hello.info["backend"]) == ("worker", "mine", "torch")
    threads = torch.get_num_threads()
    dispatcher.send(TorchSettings({"threads": threads, "matmul_precision": "highest", "deterministic": False}))
    dispatcher.send(Run(0, 10, [FETCH, UPLOAD, ADD], [17, 0, 1, 5, 18, 1, 1, 1, 2, 16, 2, 2, 6]))
    data = torch.tensor([1.5, -2.0])
    dispatcher.send(Data(5, 0, 8), (data.numpy().tobytes()[:4],))
    dispatcher.send(Data(5, 4, 8), (data.numpy().tobytes()[4:],))
    done, frames = dispatcher.next(Done)
    assert (done.seq, done.pieces) == (0, [6]) and bytes(frames[0]) == (2 * data).numpy().tobytes()
    dispatcher.send(Query(3))
    report = dispatcher.next(Report)[0]
    assert report.request == 3 and report.body["done"] == 0
    stats = report.body["stats"]
    assert (stats["name"], stats["instructions"], stats["live_tensors"], stats["live_bytes"]) == ("w0", 3, 2, 16)
    assert stats["collectives"] == stats["bytes_sent"] == stats["bytes_received"] == {}


@pytest.fixture
def executors(monkeypatch) -> list[Executor]:
    """Executors of the workers of this test."""
    made: list[Executor] = []

    class Seen(Executor):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(loop, "Executor", Seen)
    return made


LARGE = 2 * AHEAD  # bytes of a piece that is not sent at once
UPLOAD_LARGE = Define(17, "upload", {"shape": [LARGE], "stride": [1], "dtype": "uint8"}).wire()


def upload_large(dispatcher: Dispatcher) -> None:
    for offset in range(0, LARGE, CHUNK):
        dispatcher.send(Data(5, offset, LARGE), (bytes(CHUNK),))


def test_a_piece_that_nobody_waits_for_is_not_kept_though_its_run_is_carried_out_later(executors, dispatcher, worker):
    """Its client has left while the Run waited behind a long one."""
    dispatcher.greet()
    dispatcher.send(Run(0, 10, [FETCH, UPLOAD_LARGE], [17, 0, 1, 5]))
    dispatcher.send(Run(1, 11, [], [16, 0, 1, 6]))
    dispatcher.send(WindowUpdate(6, -1))
    dispatcher.send(Query(1))
    assert dispatcher.next(Report)[0].body["done"] == -1
    upload_large(dispatcher)
    dispatcher.send(Run(2, 12, [], []))
    while dispatcher.next(Done)[0].seq < 2:
        pass
    assert not executors[0].downloads.unsent


def test_a_piece_is_written_into_an_arena_that_its_client_has_closed_since(executors, dispatcher, worker):
    """In messages the dispatcher would take it for a fault of the worker."""
    arena = OwnArena(1, LARGE, 3)
    offer = arena.offer()
    dispatcher.greet()
    dispatcher.send(replace(offer, nonce=owner_proof(offer.nonce, 3)))
    assert dispatcher.next(ArenaOpened)[0].opened
    dispatcher.send(UseBlock(6, 1, HEADER_BYTES, [LARGE], 1, [[[0, LARGE]]], True))
    dispatcher.send(UseBlock(7, 1, HEADER_BYTES, [LARGE], 1, [[[0, LARGE]]], True))
    dispatcher.send(UseBlock(5, 1, HEADER_BYTES, [LARGE], 1, [[[0, LARGE]]], False))
    arena.bytes[HEADER_BYTES:] = 9
    dispatcher.send(CloseArenas([1]))
    dispatcher.send(Run(0, 10, [FETCH, UPLOAD_LARGE], [17, 0, 1, 5, 16, 1, 1, 6]))
    piece, frames = dispatcher.next(Piece)
    assert (piece, frames) == (Piece(6, LARGE, LARGE), ())
    dispatcher.send(WindowUpdate(7, -1))
    dispatcher.send(Run(1, 12, [], []))
    while dispatcher.next(Done)[0].seq < 1:
        pass
    arenas = executors[0].arenas
    assert not arenas._arenas and not arenas._reads and not arenas._writes
    arena.close()


def test_a_query_and_an_abort_do_not_wait_for_the_instruction_under_way(dispatcher, worker):
    dispatcher.greet()
    dispatcher.send(Run(0, 0, [FETCH, UPLOAD], [17, 4, 1, 5]))
    dispatcher.send(Query(1))
    assert dispatcher.next(Report)[0].body["done"] == -1
    dispatcher.send(Abort(-1, "the client is gone"))
    trouble = dispatcher.next(OpError)[0]
    assert (trouble.seq, trouble.kind, trouble.message) == (4, "peer", "the client is gone")
    assert dispatcher.next(Done)[0].seq == 0


def test_a_member_that_dies_before_they_meet_ends_a_worker(dispatcher, worker, monkeypatch):
    """It is to share memory with that one, and would wait for it for ever."""
    ends: list[int] = []
    monkeypatch.setattr(loop, "_end_soon", lambda: ends.append(1))
    dispatcher.greet()
    dispatcher.send(Run(0, 0, [UPLOAD], [17, 4, 1, 5]))  # waits for its data, and the World behind it
    dispatcher.send(World(2, [[n, f"w{n}", 0, "", 0, 0, str(n)] for n in range(3)], [0, 1], "id"))
    dispatcher.send(Abort(2, "it is no member"))
    dispatcher.send(Query(1))
    assert dispatcher.next(Report)[0].body["done"] == -1 and not ends
    dispatcher.send(Abort(1, "it was killed"))
    dispatcher.thread.join(limit(10))
    assert worker == ["worker 1, whose memory it shares, is gone: it was killed"] and ends == [1]


def test_a_worker_of_one_session_starts_afresh_at_once_when_that_has_ended(dispatcher):
    """Under the name that it was given, and while it waits for what will never come; without a way to, it ends."""
    for able in (True, False):
        renewed, why = threading.Event(), []

        def renew(name: str, renewed=renewed) -> None:
            assert name == "w0"
            renewed.set()

        thread = threading.Thread(
            target=lambda why=why, able=able, renew=renew: why.append(
                loop.run(
                    loop.WorkerOptions("127.0.0.1", dispatcher.router.port, backend="numpy"), renew=renew if able else None
                )
            )
        )
        thread.start()
        dispatcher.greet()
        dispatcher.send(Run(0, 0, [UPLOAD], [17, 4, 1, 5]))
        dispatcher.send(Renew("its session has ended"))
        thread.join(limit(10))
        assert not thread.is_alive() and renewed.is_set() == able and why == ["its session has ended"]


def test_a_worker_whose_device_cannot_be_used_any_more_starts_afresh_if_it_can(dispatcher, monkeypatch):
    monkeypatch.setattr(TorchEngine, "poisoned", lambda self, error: True)
    renewed: list[str] = []
    options = loop.WorkerOptions("127.0.0.1", dispatcher.router.port, device="cpu")
    thread = threading.Thread(target=lambda: loop.run(options, renew=renewed.append))
    thread.start()
    dispatcher.greet()
    dispatcher.send(Run(0, 10, [ADD], [18, 0, 1, 1, 2]))
    thread.join(limit(10))
    assert renewed == ["w0"] and "cannot be used any more" in dispatcher.next(Goodbye)[0].reason


def test_several_queued_runs_are_done_with_one_message_or_few(dispatcher, worker):
    dispatcher.greet()
    dispatcher.send(Run(0, 0, [FETCH, UPLOAD], [17, 0, 1, 5]))
    for seq in range(1, 20):
        dispatcher.send(Run(seq, seq, [], []))
    dispatcher.send(Query(1))
    dispatcher.next(Report)  # all are queued behind the upload
    dispatcher.send(Data(5, 0, 8), (bytes(8),))
    seqs = [dispatcher.next(Done)[0].seq]
    while seqs[-1] < 19:
        seqs.append(dispatcher.next(Done)[0].seq)
    assert seqs[-1] == 19 and len(seqs) <= 4  # the first may be told by itself: it took long


def test_exit_ends_a_worker_that_waits(dispatcher, worker):
    dispatcher.greet()
    dispatcher.send(Run(0, 0, [UPLOAD], [17, 0, 1, 5]))
    dispatcher.send(Exit("the server is stopping"))
    dispatcher.thread.join(limit(10))
    assert worker == [""]


def test_a_refused_worker_says_why(dispatcher, worker):
    dispatcher.next(Hello)
    dispatcher.send(Reject(to_wire(Refused("the name mine is taken"))))
    dispatcher.thread.join(limit(10))
    assert worker == ["the name mine is taken"]


def test_a_number_never_defined_ends_the_worker(dispatcher, worker):
    dispatcher.greet()
    dispatcher.send(Run(0, 0, [], [99, 0]))
    dispatcher.thread.join(limit(10))
    assert worker == ["instruction 99 was never defined"]
    assert dispatcher.next(Goodbye)[0].reason == worker[0]


def test_a_device_that_cannot_be_used_any_more_ends_the_worker_which_says_so(dispatcher, worker, monkeypatch):
    monkeypatch.setattr(TorchEngine, "poisoned", lambda self, error: True)
    dispatcher.greet()
    dispatcher.send(Run(0, 10, [ADD], [18, 0, 1, 1, 2]))
    dispatcher.thread.join(limit(10))
    assert worker == ["the device cannot be used any more: no tensor has the id 1"]
    assert dispatcher.next(OpError)[0].seq == 10 and dispatcher.next(Goodbye)[0].reason == worker[0]


def test_a_lost_link_ends_the_worker(dispatcher, worker):
    dispatcher.greet()
    dispatcher.router.close()
    dispatcher.thread.join(limit(10))
    assert len(worker) == 1 and "lost" in worker[0]
    dispatcher.router = Router("127.0.0.1", 0)


@pytest.mark.parametrize("number, code, said", [(signal.SIGTERM, 0, ""), (signal.SIGINT, 130, "gt worker: interrupted\n")])
def test_a_worker_in_the_foreground_ends_on_a_signal(dispatcher, number, code, said):
    command = [sys.executable, "-m", "gt.worker", "-p", str(dispatcher.router.port), "--host", "127.0.0.1", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        dispatcher.greet()
        dispatcher.send(Run(0, 0, [], []))
        dispatcher.next(Done)
        process.send_signal(number)
        dispatcher.next(Goodbye)
        heard = process.communicate(timeout=limit(20))[1]
        assert heard.partition("\n")[0].startswith("gt worker: waiting for the server at 127.0.0.1:")
        assert heard.partition("\n")[2] == "gt worker: connected as w0\n" + said
        assert process.returncode == code
    finally:
        process.kill()
        process.wait()


def test_a_question_for_a_devices_progress_does_not_wait_for_the_device():
    comes, asked = threading.Event(), threading.Event()

    class Mark:
        def synchronize(self):
            asked.set()
            assert comes.wait(limit(20))

    progress = Events(Mark)
    progress.note()
    assert progress.completed() == 0 and asked.wait(limit(20))
    assert progress.completed() == 0
    comes.set()
    end = time.monotonic() + limit(20)
    while not progress.completed():
        assert time.monotonic() < end
    assert progress.completed() == 1


def test_progress_without_a_thread_is_looked_at_again(monkeypatch):
    class Mark:
        def synchronize(self): ...

    progress = Events(Mark)
    progress.note()
    with monkeypatch.context() as few:
        few.setattr(threading.Thread, "start", no_thread)
        assert progress.completed() == 0
    assert wait_until(lambda: progress.completed() == 1)


def test_progress_of_a_device_takes_no_more_room_the_longer_nobody_asks():
    made: list = []

    class Mark:
        def __init__(self):
            made.append(weakref.ref(self))

        def synchronize(self): ...

    progress = Events(Mark)
    for _ in range(1000):
        progress.note()
    gc.collect()
    assert sum(mark() is not None for mark in made) <= MAX_NOTES


def test_a_worker_does_not_import_torch_before_its_engine():
    command = [sys.executable, "-X", "importtime", "-m", "gt.worker", "--help"]
    times = subprocess.run(command, check=True, timeout=limit(60), capture_output=True, text=True).stderr
    names = {line.rpartition("|")[2].strip() for line in times.splitlines()}
    assert "gt.worker.executor" in names and "torch" not in names
