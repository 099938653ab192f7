"""A worker with a slow device: where sessions share it a Run is done once the device has carried it out, else at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from gt.wire.messages import Data, Done, Exit, Goodbye, OpError, Piece, Query, Renew, Report, Run, TorchSettings
from gt.wire.router import Gone, Router
from gt.worker import loop
from gt.worker.engine.torch import TorchEngine
from gt.worker.engine.torch.gpu.cuda import Events
from gt.worker.process.completions import Completions
from tests.helpers.limits import limit
from tests.helpers.processes import no_thread, wait_until
from tests.worker.test_worker_loop import ADD, FETCH, UPLOAD, Dispatcher


class Mark:
    """An event of a device, which comes there when the test says so."""

    def __init__(self) -> None:
        self.come = threading.Event()
        self.fails = False

    def synchronize(self) -> None:
        assert self.come.wait(limit(60))
        if self.fails:
            raise RuntimeError("CUDA error: an assertion failed")


class Slow(Events):
    """`fences`: the events that somebody waits for before a Done. The others have always come."""

    def __init__(self) -> None:
        super().__init__(self._made)
        self.fences: list[Mark] = []
        self.lost = self._fencing = False

    def _made(self) -> Mark:
        if self.lost:
            raise RuntimeError("CUDA error: an assertion failed")
        mark = Mark()
        if self._fencing:
            self.fences.append(mark)
        else:
            mark.come.set()
        return mark

    def fence(self) -> Callable[[], None]:
        self._fencing = True
        try:
            return super().fence()
        finally:
            self._fencing = False


class Site:
    """One worker in a thread, on a slow device; the test is the dispatcher. Run 0 makes tensor 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.why = Slow(), []
        engine = TorchEngine("cpu")
        engine.progress = self.device
        monkeypatch.setattr(loop, "open_engine", lambda backend, device: engine)
        self.dispatcher = Dispatcher()
        self.options = loop.WorkerOptions("127.0.0.1", self.dispatcher.router.port, "secret", "mine", "torch", "cpu")
        self.thread = threading.Thread(target=lambda: self.why.append(loop.run(self.options)), name="gt-test-worker")
        self.thread.start()
        self.dispatcher.greet()
        self.seq = 0
        self.dispatcher.send(Data(5, 0, 8), (bytes(8),))
        self.run([17, 0, 1, 5], [FETCH, UPLOAD, ADD])
        assert self.done() == 0

    def share(self, shared: bool) -> None:
        self.dispatcher.send(TorchSettings({}, 1, 0, shared))

    def run(self, code: list, defines: list | None = None) -> None:
        self.dispatcher.send(Run(self.seq, 10 * self.seq, defines or [], code))
        self.seq += 1

    def compute(self) -> None:
        self.run([18, 2, 1, 1, 2])

    def meet(self) -> list[int]:
        """Have the executing thread come to a Run that fetches: the Dones that it has told by then."""
        key = 100 + self.seq
        self.run([16, 0, 1, key])
        while self.dispatcher.next(Piece)[0].key != key:
            pass
        return [message.seq for message, _ in self.dispatcher.backlog if isinstance(message, Done)]

    def at(self) -> list:
        """The worker's place, as it reports it."""
        self.dispatcher.send(Query(7, False))
        return self.dispatcher.next(Report)[0].body["at"]

    def done(self) -> int:
        return self.dispatcher.next(Done)[0].seq

    def end(self) -> None:
        if self.thread.is_alive():
            self.dispatcher.send(Exit("the test is over"))
        self.thread.join(limit(10))
        for mark in self.device.fences:
            mark.come.set()
        self.dispatcher.router.close()
        assert not self.thread.is_alive()
        assert wait_until(lambda: not waiters()), "the thread that waits for the device outlives its wait"


def waiters() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("gt-completions", "gt-progress")]


@pytest.fixture
def site(monkeypatch) -> Iterator[Site]:
    made = Site(monkeypatch)
    yield made
    made.end()


def test_a_worker_of_one_session_says_done_at_once_and_no_event_more_is_recorded(site):
    site.share(False)
    for _ in range(3):
        site.compute()
    site.run([16, 0, 1, 200])  # a fetch, whose piece comes in the Done
    while site.done() < 4:
        pass
    assert not site.device.fences and not waiters()


def test_a_shared_worker_says_done_of_each_run_when_the_device_is_through_with_it(site):
    site.share(True)
    site.compute()
    site.compute()
    assert site.meet() == []
    first, second = site.device.fences[:2]
    second.come.set()
    assert site.meet() == []
    first.come.set()
    assert [site.done(), site.done()] == [1, 2]
    assert site.meet() == []


def test_a_worker_that_waits_for_its_device_says_so(site):
    site.share(True)
    site.compute()
    site.compute()
    assert wait_until(lambda: len(site.device.fences) == 2)  # both are issued, which nothing tells
    assert site.at()[:4] == [1, 0, 12, "device"]
    site.device.fences[0].come.set()
    assert site.done() == 1
    assert wait_until(lambda: site.at()[:4] == [2, 0, 22, "device"])


def test_runs_from_before_and_after_a_worker_was_shared_keep_their_order(site):
    site.compute()
    assert site.done() == 1
    site.share(True)
    site.compute()
    site.share(False)
    site.compute()
    assert site.meet() == []
    assert len(site.device.fences) == 1, "alone, nothing is recorded"
    site.device.fences[0].come.set()
    seqs = [site.done()]
    while seqs[-1] < 4:
        seqs.append(site.done())
    assert seqs[0] == 2 and seqs == sorted(seqs)
    site.compute()
    assert site.done() == 5


@pytest.mark.parametrize("end", ["exit", "renew", "lost"])
def test_a_worker_ends_while_a_done_is_held_back(site, end):
    site.share(True)
    site.compute()
    assert site.meet() == []
    if end == "lost":
        site.dispatcher.router.close()
    else:
        site.dispatcher.send(Exit("the server is stopping") if end == "exit" else Renew("its session has ended"))
    site.thread.join(limit(10))
    assert not site.thread.is_alive() and not site.device.fences[0].come.is_set()
    assert len(site.why) == 1 and {"exit": "", "renew": "its session has ended", "lost": "lost"}[end] in site.why[0]
    for mark in site.device.fences:
        mark.come.set()
    if end == "lost":
        site.dispatcher.router = Router("127.0.0.1", 0)
    if end == "exit":
        site.dispatcher.next(Gone)
        said = [message for message, _ in site.dispatcher.backlog if isinstance(message, (Done, Goodbye))]
        assert [type(message) for message in said] == [Goodbye], "nothing is said behind it"


def test_a_device_that_fails_ends_the_wait_and_the_next_op_finds_out(site, monkeypatch):
    site.share(True)
    site.compute()
    assert site.meet() == []
    site.device.lost = True  # no event can be recorded from here on
    site.compute()
    for mark in site.device.fences:
        mark.fails = True
        mark.come.set()
    assert [site.done(), site.done(), site.done()] == [1, 2, 3]
    monkeypatch.setattr(TorchEngine, "poisoned", lambda self, error: True)
    site.run([18, 0, 77, 77, 3])
    assert site.dispatcher.next(OpError)[0].seq == 40
    site.thread.join(limit(10))
    assert site.why == ["the device cannot be used any more: no tensor has the id 77"]


def test_a_device_that_fails_while_others_dones_are_held_back_ends_the_worker(site, monkeypatch):
    monkeypatch.setattr(TorchEngine, "poisoned", lambda self, error: True)
    site.share(True)
    site.compute()
    site.run([18, 0, 77, 77, 3])
    site.thread.join(limit(10))
    assert "the device cannot be used any more" in site.why[0]


def test_dones_without_a_wait_never_pass_one_that_waits():
    for _ in range(200):
        told: list[int] = []
        completions = Completions(lambda done, told=told: told.append(done.seq))
        come, last = threading.Event(), threading.Event()
        completions.add(Done(0), 0, come.wait)
        threading.Thread(target=come.set).start()
        for seq in range(1, 20):
            completions.add(Done(seq))
        completions.add(Done(20), 0, last.set)
        assert last.wait(limit(10)) and wait_until(lambda completions=completions: completions.first() is None)
        completions.close()
        assert told == list(range(21))


def test_without_a_thread_the_caller_waits_and_nothing_is_left_unsent(monkeypatch):
    """A message that had no thread to wait for the device stayed, and so did all after it."""
    told, fences = [], []
    completions = Completions(lambda done: told.append(done.seq))
    with monkeypatch.context() as few:
        few.setattr(threading.Thread, "start", no_thread)
        completions.add(Done(0, {}), fence=lambda: fences.append(0))
        assert (told, fences, completions.first()) == ([0], [0], None)
    came = threading.Event()
    completions.add(Done(1, {}), fence=lambda: came.wait(limit(20)))
    assert completions.first() is not None and told == [0]
    came.set()
    assert wait_until(lambda: told == [0, 1])
    completions.close()
    assert wait_until(lambda: not waiters())
