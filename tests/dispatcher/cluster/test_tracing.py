"""Traces in the core: who is asked, when the client is answered, clocks, lost workers and clients, the bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gt.dispatcher.cluster import tracing
from gt.dispatcher.core import Core
from gt.dispatcher.events import Action, PeerLost, Received, Send, Tick
from gt.dispatcher.fairness.time_slices import Pace
from gt.wire.link import hello
from gt.wire.messages import Failed, Message, Report, Trace, TraceRows

EMPTY = TraceRows(0, 0, [], [], [], [], [], 0.0, 0, 0)


class Field:
    """A core with a clock that the test sets, two workers and a client."""

    def __init__(self, home: str = "here") -> None:
        self.time = 100.0
        self.core = Core(process=[1, "here"], pace=Pace(lambda: self.time))
        for n in range(2):
            info = {"name": "", "pid": 1, "heap_bytes": 1 << 40, "backend": "torch", "home": home}
            self.say(b"w%d" % n, hello("worker", info=info))
        self.say(b"client", hello("client", switches={"workers": 2}))

    def say(self, peer: bytes, message: Message) -> list[tuple[bytes, Message]]:
        return self._sent(self.core.handle(Received(peer, message, at=self.core.now)))

    def lose(self, peer: bytes) -> list[tuple[bytes, Message]]:
        return self._sent(self.core.handle(PeerLost(peer, "gone")))

    def tick(self, until: float) -> list[tuple[bytes, Message]]:
        """Every second until then."""
        sent: list[tuple[bytes, Message]] = []
        while self.core.now < until:
            sent += self._sent(self.core.handle(Tick(self.core.now + 1.0)))
        return sent

    def _sent(self, actions: list[Action]) -> list[tuple[bytes, Message]]:
        self.core.check()
        return [(a.peer, a.message) for a in actions if isinstance(a, Send)]

    def begin(self) -> int:
        """The key under which workers record."""
        asked = self.say(b"client", Trace(7, True))
        assert [(peer, m.on, m.session) for peer, m in asked] == [(b"w0", True, 0), (b"w1", True, 0)]
        key = asked[0][1].request
        for peer in (b"w0", b"w1"):
            answers = self.say(peer, replace(EMPTY, request=key, clock=self.time))
        assert isinstance(answers[-1][1], Report) and answers[-1][1].request == 7
        return key


def test_the_client_gets_every_part_and_then_the_answer() -> None:
    field = Field()
    key = field.begin()
    asked = field.say(b"client", Trace(8, False))
    assert [m.on for _, m in asked] == [False, False]
    part = replace(EMPTY, request=key, events=[16, 1, 2.0, 3.0], names=[[16, "op", "x", 1, []]])
    assert field.say(b"w0", replace(part, left=1)) == [(b"client", replace(part, request=8, left=1))]
    assert field.say(b"w0", part) == [(b"client", replace(part, request=8))]
    sent = field.say(b"w1", replace(part, worker=99))
    assert sent[0] == (b"client", replace(part, request=8, worker=1)), "a worker's index is known here"
    own, report = sent[1][1], sent[2][1]
    assert own.worker == -1 and own.names[0][0] == "event" and own.left == 0
    assert report.body["workers"] == ["w0", "w1"] and report.body["ahead"] == [0.0, 0.0]
    assert not field.core.traces.open and field.say(b"w1", part) == []


def test_clocks_of_other_hosts_are_asked_for_several_times_and_the_quickest_answer_counts() -> None:
    field = Field("elsewhere")
    key = next(m.request for _, m in field.say(b"client", Trace(7, True)))
    for trip in (4.0, 0.5, 8.0, 2.0):
        for peer in (b"w0", b"w1"):
            field.time += trip
            sent = field.say(peer, replace(EMPTY, request=key, clock=field.time - trip / 2 + 1000))
            field.time += 0
    report = sent[-1][1]
    assert isinstance(report, Report)
    assert report.body["ahead"] == [pytest.approx(1000, abs=4), pytest.approx(1000, abs=4)]


@pytest.mark.parametrize("peer", [b"w0", b"w1"])
def test_a_lost_worker_is_not_waited_for(peer: bytes) -> None:
    field = Field()
    key = field.begin()
    field.say(b"client", Trace(8, False))
    field.say(b"w1" if peer == b"w0" else b"w0", replace(EMPTY, request=key))
    assert any(isinstance(m, Report) and m.request == 8 for to, m in field.lose(peer) if to == b"client")

    assert not field.core.traces.open


def test_a_worker_that_is_lost_during_a_trace_is_named_in_its_answer_and_asked_nothing() -> None:
    field = Field()
    key = field.begin()
    assert not [m for to, m in field.lose(b"w1") if to == b"client" and isinstance(m, Report)], "nobody waits"
    assert [to for to, _ in field.say(b"client", Trace(8, False))] == [b"w0"]
    report = field.say(b"w0", replace(EMPTY, request=key))[-1][1]
    assert isinstance(report, Report) and report.body["missing"] == ["worker w1 is lost: gone"]


def test_a_worker_that_takes_the_place_of_a_lost_one_records_too() -> None:
    field = Field()
    key = field.begin()
    field.lose(b"w1")
    info = {"name": "w1", "pid": 2, "heap_bytes": 1 << 40, "backend": "torch", "home": "here"}
    sent = field.say(b"again", hello("worker", info=info))
    assert [(to, m.request, m.on) for to, m in sent if isinstance(m, Trace)] == [(b"again", key, True)]
    assert field.say(b"again", replace(EMPTY, request=key)) == [], "nobody waits"
    assert [to for to, _ in field.say(b"client", Trace(8, False))] == [b"w0", b"again"]
    part = replace(EMPTY, request=key, events=[16, 1, 2.0, 3.0])
    assert field.say(b"again", part) == [(b"client", replace(part, request=8, worker=1))]
    report = field.say(b"w0", part)[-1][1]
    assert isinstance(report, Report) and report.body["missing"] == ["worker w1 is lost: gone"], "rows of before"


def test_a_trace_does_not_begin_without_a_worker_that_answers_nothing() -> None:
    field = Field()
    key = next(m.request for _, m in field.say(b"client", Trace(7, True)))
    field.say(b"w0", replace(EMPTY, request=key))
    assert [m for _, m in field.tick(299) if isinstance(m, (Failed, Report))] == [], "it has its stall_timeout"
    sent = field.tick(302)
    (error,) = [m for to, m in sent if to == b"client"]
    assert isinstance(error, Failed) and error.request == 7
    assert error.error["kind"] == "WorkerStuck" and "worker w1 is alive and has answered nothing" in str(error.error)
    assert [(to, m.on) for to, m in sent if isinstance(m, Trace)] == [(b"w0", False), (b"w1", False)]
    assert not field.core.traces.open
    field.begin()


def test_a_trace_ends_without_the_rows_of_a_worker_that_answers_nothing() -> None:
    field = Field()
    key = field.begin()
    field.say(b"client", Trace(8, False))
    field.tick(200)
    part = replace(EMPTY, request=key, events=[16, 1, 2.0, 3.0])
    assert field.say(b"w1", replace(part, left=1)) == [(b"client", replace(part, request=8, worker=1, left=1))]
    field.say(b"w0", part)
    assert [m for to, m in field.tick(499) if to == b"client"] == [], "each part has the whole time"
    (*own, report) = [m for to, m in field.tick(502) if to == b"client"]
    assert isinstance(report, Report) and report.request == 8 and all(isinstance(m, TraceRows) for m in own) and own
    assert report.body["missing"] == ["worker w1 is alive and has not answered"]
    assert not field.core.traces.open and field.say(b"w1", part) == []


def test_a_client_that_waits_no_more_begins_another() -> None:
    """A Ctrl-C ends a wait, and the dispatcher is not told."""
    field = Field()
    key = next(m.request for _, m in field.say(b"client", Trace(7, True)))
    assert field.say(b"client", Trace(8, True)) == [], "workers are asked once"
    field.say(b"w0", replace(EMPTY, request=key))
    ((_, report),) = field.say(b"w1", replace(EMPTY, request=key))
    assert isinstance(report, Report) and report.request == 8
    sent = field.say(b"client", Trace(9, True))
    assert [(to, m.on) for to, m in sent] == [(b"w0", False), (b"w1", False), (b"w0", True), (b"w1", True)]
    for peer in (b"w0", b"w1"):
        assert field.say(peer, replace(EMPTY, request=key)) == [], "of the old one"
    for peer in (b"w0", b"w1"):
        answers = field.say(peer, replace(EMPTY, request=sent[-1][1].request))
    assert isinstance(answers[-1][1], Report) and answers[-1][1].request == 9
    field.say(b"client", Trace(10, False))
    sent = field.say(b"client", Trace(11, True))
    assert [(to, m.on) for to, m in sent] == [(b"w0", True), (b"w1", True)], "workers end the old one anyway"


def test_workers_stop_when_the_client_is_gone() -> None:
    field = Field()
    field.begin()
    sent = field.lose(b"client")
    assert [m.on for _, m in sent if isinstance(m, Trace)] == [False, False] and not field.core.traces.open


@pytest.mark.parametrize(
    "act",
    [
        lambda field, key: [field.lose(b"client"), field.say(b"client", Trace(9, False))][-1],
        lambda field, key: [field.say(b"client", Trace(9, False)), field.say(b"client", Trace(10, False))][-1],
        lambda field, key: field.say(b"w0", replace(EMPTY, request=key, clock=float("nan"))),
    ],
)
def test_what_is_out_of_place_ends_its_sender_alone(act: Callable) -> None:
    field = Field()
    act(field, field.begin())
    alive = len(field.core.sessions), len(field.core.workers)
    assert alive in ((0, 2), (1, 1))


def test_endless_parts_end_their_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_PARTS", 3)
    field = Field()
    key = field.begin()
    field.say(b"client", Trace(8, False))
    for _ in range(4):
        field.say(b"w0", replace(EMPTY, request=key, left=1))
    assert b"w0" not in field.core.workers and b"client" in field.core.sessions
