"""Peers share the dispatcher's time: a flood of messages, however dear, delays its sender and hardly anybody else."""

from __future__ import annotations

import threading
import time

import pytest

from gt.dispatcher.events import Received
from gt.dispatcher.fairness.arrivals import MAX_IDLE_PEERS, WARP_SECONDS, Arrivals
from gt.dispatcher.server import Server
from gt.wire.dealer import Dealer
from gt.wire.link import hello
from gt.wire.messages import Inspect, Report, Stats, Welcome
from tests.helpers.limits import limit
from tests.helpers.toy_core import ToyCore

FLOOD, SECONDS = 250, 0.005  # messages, and what each takes
MOST_BEFORE = 40  # of these may precede a message of another: more than a few, since the machine may be loaded


def served(arrivals: Arrivals, costs: dict[bytes, float], count: int) -> list:
    """The next `count` events; each is charged by its peer."""
    events = []
    for _ in range(count):
        peer, event = arrivals.next()
        arrivals.charge(peer, costs[peer])
        events.append(event)
    return events


def test_a_late_event_of_a_quiet_peer_precedes_the_flood():
    arrivals: Arrivals[str] = Arrivals()
    for n in range(100):
        arrivals.add(b"a", f"a{n}")
    assert served(arrivals, {b"a": 0.008}, 3) == ["a0", "a1", "a2"]
    arrivals.add(b"b", "b0")
    assert "b0" in served(arrivals, {b"a": 0.008, b"b": 0.001}, 2)
    arrivals.add(b"b", "b1")
    assert "b1" in served(arrivals, {b"a": 0.008, b"b": 0.001}, 2)


def wait_beside(floods: int, warped: float) -> float:
    """The longest time between an event of a quiet peer and its turn, beside floods of 8 ms an event, in seconds of service.

    warped: seconds of the quiet peer's own events.
    """
    arrivals: Arrivals[int] = Arrivals()
    names = [b"flood%d" % n for n in range(floods)]
    waits, clock = [], 0.0
    for turn in range(300):
        for name in names:
            arrivals.add(name, turn)
        if turn % 10 == 9:
            arrivals.add(b"quiet", turn)
            since = clock
        for _ in range(min(len(arrivals), 2)):
            peer, _ = arrivals.next()
            arrivals.charge(peer, warped if peer == b"quiet" else 0.008)
            if peer == b"quiet":
                waits.append(clock - since)
            clock += warped if peer == b"quiet" else 0.008
    assert len(waits) == 30
    return max(waits[3:])


@pytest.mark.parametrize("floods", [1, 4, 16, 64])
def test_a_quiet_peer_waits_for_one_event_of_a_flood_however_many_floods_there_are(floods):
    """It waited for one of each, so its round trip beside four took 80 ms, and beside sixteen 370."""
    assert wait_beside(floods, 0.0002) <= 0.008 + 1e-9


def test_a_peer_that_sends_one_event_after_the_other_has_no_more_than_its_share():
    """Its queue is empty each time, so it looks as one that is quiet."""
    arrivals: Arrivals[str] = Arrivals()
    for n in range(1000):
        arrivals.add(b"flood", f"f{n}")
    served(arrivals, {b"flood": 0.008}, 20)
    seconds = {b"flood": 0.0, b"again": 0.0}
    arrivals.add(b"again", "again")
    for _ in range(400):
        peer, _ = arrivals.next()
        arrivals.charge(peer, 0.008)
        seconds[peer] += 0.008
        if peer == b"again":
            arrivals.add(b"again", "again")
    assert abs(seconds[b"again"] - seconds[b"flood"]) <= WARP_SECONDS + 2 * 0.008


def test_time_is_shared_and_not_the_number_of_events():
    arrivals: Arrivals[str] = Arrivals()
    for n in range(100):
        arrivals.add(b"a", f"a{n}")
        arrivals.add(b"b", f"b{n}")
    events = served(arrivals, {b"a": 0.009, b"b": 0.001}, 50)
    assert [one for one in events if one[0] == "a"] == [f"a{n}" for n in range(5)]
    assert [one for one in events if one[0] == "b"] == [f"b{n}" for n in range(45)]


def test_all_of_it_is_handled_and_nothing_is_left():
    arrivals: Arrivals[int] = Arrivals()
    for n in range(30):
        arrivals.add(b"abc"[n % 3 : n % 3 + 1], n)
    assert sorted(served(arrivals, {b"a": 0.0, b"b": 1.0, b"c": 2.0}, 30)) == [*range(30)]
    assert not arrivals and not arrivals._waiting and not arrivals._starts and not arrivals._ends


def test_peers_that_sent_and_left_are_forgotten_while_others_go_on():
    arrivals: Arrivals[int] = Arrivals()
    for n in range(2000):
        arrivals.add(b"busy", n)
    for n in range(1000):
        arrivals.add(b"peer%d" % n, n)
        served(arrivals, {b"busy": 0.01, b"peer%d" % n: 0.01}, 2)
    served(arrivals, {b"busy": 0.01}, 3)
    assert len(arrivals._waiting) == len(arrivals._starts) < 5 and len(arrivals._ends) <= MAX_IDLE_PEERS


class Slow(ToyCore):
    """Each Inspect takes SECONDS; in the third the flood is under way, and it lasts until somebody else has asked."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.asked = threading.Event(), threading.Event()
        self.handled = 0
        self.before = -1  # messages of the flood that were handled before the other's

    def handle(self, event):
        message = event.message if isinstance(event, Received) else None
        if isinstance(message, Inspect):
            self.handled += 1
            if self.handled == 3:
                self.begun.set()
                self.asked.wait(limit(20))
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                pass
        elif isinstance(message, Stats):
            self.before = self.handled
        return super().handle(event)


def test_a_flood_of_one_client_does_not_hold_up_another():
    core = Slow()
    server = Server(core=core)
    thread = threading.Thread(target=server.run)
    thread.start()
    here, answered = threading.Semaphore(0), threading.Event()

    def take(message, frames):
        if isinstance(message, Welcome):
            here.release()
        elif isinstance(message, Report):
            answered.set()

    flooder, other = (Dealer(server.address, take, lambda reason: None) for _ in range(2))
    try:
        for dealer in (flooder, other):
            dealer.send(hello("client"))
            assert here.acquire(timeout=limit(20))
        for n in range(FLOOD):
            flooder.send(Inspect(n, 0))
        assert core.begun.wait(limit(20))
        other.send(Stats(1), wake=False)
        other.push()  # by this thread: the link's own may be slow to get the interpreter
        core.asked.set()
        assert answered.wait(limit(20))
        assert core.before < MOST_BEFORE
    finally:
        core.asked.set()
        flooder.close()
        other.close()
        server.stop()
        thread.join()
