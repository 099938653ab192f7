"""Passes beside the loop: one thread at a time touches what is shared, and the loop serves others meanwhile."""

from __future__ import annotations

import threading

import pytest

from gt.dispatcher.core import Core
from gt.dispatcher.events import PeerLost, Received, Send, Turn, TurnWanted
from gt.dispatcher.fairness.background import MAX_THREADS, Background, Inline
from gt.dispatcher.fairness.time_slices import Pace
from gt.ir.instr import DISCARD, RECORD
from gt.wire.link import hello
from gt.wire.messages import FinishCapture, Inspect, Ops, Report
from tests.helpers.hostile import TEMPLATES
from tests.helpers.limits import limit
from tests.helpers.processes import no_thread

UPLOAD, NEG = TEMPLATES[0], TEMPLATES[3]


class Gate:
    """Background work whose threads wait where they are apart, until they are let go."""

    def __init__(self, monkeypatch) -> None:
        self.called, self.stirred = threading.Event(), threading.Event()
        self.background = Background(self._call)
        self.open, self.inside = threading.Event(), threading.Event()
        monkeypatch.setattr("gt.dispatcher.programs.programs.PASSES", (lambda recording, _: self._wait() or recording,))
        monkeypatch.setattr("gt.dispatcher.programs.deferred._with_unique_names", lambda code, fresh: code)
        self.core = Core(pace=Pace(background=self.background))
        self.core.handle(Received(b"w0", hello("worker", info={"name": "w0", "heap_bytes": 1 << 30})))
        for peer in (b"c", b"d"):
            self.core.handle(Received(peer, hello("client", switches={"workers": 1})))

    def _call(self) -> None:
        self.called.set()
        self.stirred.set()

    def _wait(self, *_) -> None:
        self.inside.set()
        self.stirred.set()
        assert self.open.wait(limit(20))

    def give(self, peer: bytes, message, frames: tuple = ()) -> list:
        return self.sent(self.core.handle(Received(peer, message, frames)))

    def until_inside(self) -> None:
        """Turns until a thread waits where it is apart."""
        while not self.inside.is_set():
            assert self.stirred.wait(limit(20))
            self.stirred.clear()
            if self.called.is_set():
                assert not self.turn()

    def until(self, over) -> list:
        """Messages of turns until something holds."""
        sent = []
        while not over():
            sent += self.turn()
        return sent

    def turn(self) -> list:
        """Messages that follow once a thread wants the baton."""
        assert self.called.wait(limit(20))
        self.called.clear()
        actions = self.core.handle(Turn(0.0))
        self.core.check()
        return self.sent(actions)

    @staticmethod
    def sent(actions: list) -> list:
        return [a.message for a in actions if isinstance(a, Send)]


@pytest.fixture
def gate(monkeypatch):
    made = Gate(monkeypatch)
    yield made
    made.open.set()
    made.background.close()


RECORDED = [16, 0, 0, 1, 17, 0, 1, 5, RECORD, 1, 0, 1, 1, 17, 0, 1, 2]


def record(gate: Gate, peer: bytes) -> None:
    gate.give(peer, Ops(0, [[16, UPLOAD], [17, NEG]], [], RECORDED), (bytes(64),))


def test_others_are_served_while_a_program_is_sealed(gate):
    record(gate, b"c")
    assert not gate.give(b"c", FinishCapture(1, 0, "", "eager", [], 0, 0, 0))
    gate.until_inside()
    assert not gate.give(b"c", Inspect(2, 1))  # after its seal
    gate.give(b"d", Ops(0, [[16, UPLOAD]], [], [16, 0, 0, 1]), (bytes(64),))
    assert [m.request for m in gate.give(b"d", Inspect(7, 1))] == [7]
    gate.core.check()
    gate.open.set()
    answers = gate.turn()
    answers += gate.sent(gate.core.handle(Turn(0.0)))
    reports = [m for m in answers if isinstance(m, Report)]
    assert [m.request for m in reports] == [1, 2] and reports[0].body["why"] == ""


def test_a_client_that_leaves_meanwhile_leaves_nothing(gate):
    record(gate, b"c")
    gate.give(b"c", FinishCapture(1, 0, "", "eager", [], 0, 0, 0))
    gate.until_inside()
    gate.core.handle(PeerLost(b"c", "gone"))
    gate.open.set()
    assert not [m for m in gate.turn() if isinstance(m, Report)]
    assert not gate.background._legs and not gate.background.pending


def test_a_worker_lost_meanwhile_makes_it_no_program(gate):
    record(gate, b"c")
    gate.give(b"c", FinishCapture(1, 0, "", "eager", [], 0, 0, 0))
    gate.until_inside()
    gate.core.handle(PeerLost(b"w0", "gone"))
    gate.open.set()
    (report,) = [m for m in gate.turn() if isinstance(m, Report)]
    assert report.body["why"].startswith("worker w0 is lost: ")


def test_a_seal_that_is_none_is_refused_and_others_go_on(gate):
    gate.open.set()
    record(gate, b"c")
    gate.give(b"c", FinishCapture(1, 0, "", "nothing", [], 0, 0, 0))
    gate.until(lambda: not gate.background._legs)
    assert b"c" not in gate.core.sessions and b"d" in gate.core.sessions
    assert not gate.background._legs


def test_a_fault_in_a_pass_ends_one_session(gate, monkeypatch):
    def fault(*_):
        raise IndexError("of ours")

    monkeypatch.setattr("gt.dispatcher.programs.programs.PASSES", (fault,))
    record(gate, b"c")
    gate.give(b"c", FinishCapture(1, 0, "", "eager", [], 0, 0, 0))
    gate.until(lambda: not gate.background._legs)
    assert b"c" not in gate.core.sessions and b"d" in gate.core.sessions


def test_a_recording_that_is_held_back_ends_beside_the_loop(gate, monkeypatch):
    monkeypatch.setattr("gt.dispatcher.programs.deferred._without_uploads", lambda rows: gate._wait() or [])
    held = [*RECORDED[:10], 1, *RECORDED[11:]]
    gate.give(b"c", Ops(0, [[16, UPLOAD], [17, NEG]], [], [*held, DISCARD, 17, 0, 1, 3]), (bytes(64),))
    gate.core.handle(Turn(0.0))
    assert gate.inside.wait(limit(20)) and gate.core.sessions[b"c"].stalled
    gate.give(b"d", Ops(0, [[16, UPLOAD]], [], [16, 0, 0, 1]), (bytes(64),))
    assert [m.request for m in gate.give(b"d", Inspect(7, 1))] == [7]
    gate.open.set()
    gate.turn()
    while any(isinstance(a, TurnWanted) for a in gate.core.handle(Turn(0.0))):
        pass
    assert 3 in gate.core.sessions[b"c"].table.rows and not gate.core.sessions[b"c"].stalled


def test_one_thread_at_a_time_has_the_baton():
    background, wake = Background(lambda: wake.set()), threading.Event()
    inside, order = [], []

    def call(number: int) -> None:
        for _ in range(20):
            inside.append(number)
            assert inside == [number]
            order.append(number)
            inside.clear()
            with background.apart(lambda: False):
                pass

    for number in range(2 * MAX_THREADS):
        background.begin(lambda number=number: call(number))
    while background._legs or background.pending:
        if background.pending:
            background.go_on()
        else:
            wake.wait(limit(0.01))
    assert len(order) == 40 * MAX_THREADS
    background.close()


def test_what_is_apart_when_the_server_ends_ends_with_it():
    background, go = Background(lambda: None), threading.Event()
    after: list[int] = []

    def call() -> None:
        with background.apart(lambda: False):
            go.wait(limit(20))
        after.append(1)

    background.begin(call)
    go.set()
    background.close()
    assert not after


def test_a_call_that_has_no_thread_is_done_by_the_loop(monkeypatch):
    background, done = Background(lambda: None), []

    def call() -> None:
        with background.apart(lambda: False):
            done.append(threading.current_thread())

    with monkeypatch.context() as few:
        few.setattr(threading.Thread, "start", no_thread)
        for _ in range(MAX_THREADS + 1):
            background.begin(call)
    assert done == [threading.current_thread()] * (MAX_THREADS + 1)
    assert not background._legs and not background.pending
    background.close()


def test_without_threads_a_call_is_done_at_once():
    done: list[int] = []

    def call() -> None:
        with Inline().apart(lambda: True):
            done.append(1)

    Inline().begin(call)
    assert done == [1]
