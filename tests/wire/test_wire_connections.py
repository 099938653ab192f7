"""Connections are known from accept to end, whatever descriptor they have; those that send no message are ended."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time

import pytest

from gt.wire import codec, connections, router, tcp
from gt.wire import socket as wire_socket
from gt.wire.codec import MAX_ASKED_BYTES
from gt.wire.connections import (
    ALL_EARLY_BYTES,
    EARLY_BYTES,
    FIRST_BYTES,
    LEAVE_SECONDS,
    MAX_PARTS,
    MAX_SILENT_CONNECTIONS,
    PARTED_BYTES,
    SPEAK_SECONDS,
    UNFINISHED_BYTES,
    Connection,
    Connections,
    cut,
)
from gt.wire.link import hello
from gt.wire.messages import CHUNK, Stats
from gt.wire.router import Arrived, Gone, Router
from tests.helpers import zmtp
from tests.helpers.limits import limit


@pytest.fixture
def ours():
    made = Router("127.0.0.1", 0)
    yield made
    made.close()


def entering(port: int, shown: bytes) -> tuple[threading.Thread, list]:
    """A peer that is let in while the router is polled by somebody else."""
    found: list = []
    thread = threading.Thread(target=lambda: found.append(zmtp.let_in(port, shown)))
    thread.start()
    return thread, found


def enter(ours: Router):
    thread, found = entering(ours.port, zmtp.password(ours.port))
    while thread.is_alive():
        ours.poll(0.01)
    thread.join()
    return found[0]


def until(ours: Router, kind: type) -> list:
    """Everything received until one item is of this kind."""
    found: list = []
    end = time.monotonic() + limit(20)
    while not any(isinstance(item, kind) for item in found):
        assert time.monotonic() < end, found
        found += ours.poll(0.05)
    return found


# ---- which connection is whose


class World:
    """Connections that come and go, and descriptors used again at once, with what is really whose."""

    def __init__(self, seed: int) -> None:
        self.draw, self.ours = random.Random(seed), Connections()
        self.now, self.number = 0.0, 0
        self.open: dict[int, dict] = {}
        self.late: list[dict] = []  # what ended ones brought, and nobody has received

    def step(self) -> None:
        draw = self.draw
        events = []
        for _ in range(draw.randrange(6)):
            free = [fd for fd in range(4) if fd not in self.open]
            if free and draw.random() < 0.6:
                fd = draw.choice(free)
                self.open[fd] = {"fd": fd, "ticket": "", "met": False, "asked": False}
                events.append((True, fd))
            elif self.open:
                one = self.open.pop(draw.choice(list(self.open)))
                events.append((False, one["fd"]))
                self.late.append(one)
        for began, fd in events:
            if began:
                self.ours.accepted(fd, self.now)
            else:
                self.ours.ended(fd)
        talk = [one for one in (*self.open.values(), *self.late) if one["ticket"] and not one["met"] and draw.random() < 0.6]
        draw.shuffle(talk)
        for one in talk:
            self.number += 1
            one["met"], one["peer"] = True, b"%d" % self.number
            assert self.ours.meet(one["peer"], one["fd"], one["ticket"]) is not None, one
        ended = {one["peer"] for one in self.late if one["met"]}
        assert set(self.ours.collect_ended()) == ended
        for one in self.open.values():
            connection = self.ours.of(one.get("peer", b""))
            assert (connection is not None) == one["met"] and (not connection or self.ours.holds(connection))
        assert not any(self.ours.of(peer) for peer in ended)
        self.late.clear()
        for one in self.open.values():  # let in after all that is known
            if not one["ticket"] and draw.random() < 0.5:
                one["ticket"] = self.ours.ticket(self.now)


@pytest.mark.parametrize("seed", range(20))
def test_a_peers_connection_is_the_one_that_it_came_by(seed):
    world = World(seed)
    for _ in range(300):
        world.step()


def test_messages_that_end_between_the_poll_and_the_count_of_bytes_are_received_first(ours, monkeypatch):
    """As on a loaded machine: their bytes are counted, so they must not be taken for a message that has no end."""
    peer = enter(ours)
    peer.sendall(zmtp.frame(codec.pack(hello("client"))))
    until(ours, Arrived)
    chunks = UNFINISHED_BYTES // CHUNK + 1
    message = zmtp.frame(codec.pack(Stats(1)), more=True) + zmtp.frame(bytes(CHUNK))
    count, late = router.tcp.traffic, []

    def received(fd: int) -> tcp.Traffic:
        if not late:
            late.append(fd)
            peer.sendall(message * chunks)
            end = time.monotonic() + limit(20)
            while count(fd).received - count(fd).unread < chunks * CHUNK:
                assert time.monotonic() < end
        return count(fd)

    monkeypatch.setattr(router.tcp, "traffic", received)
    ours._next_poll = 0.0
    came = ours.poll(0.0)
    for _ in range(20):
        came += ours.poll(0.01)
    assert late and [type(item) for item in came] == [Arrived] * chunks
    peer.close()


def test_a_stranger_that_leaves_takes_nobody_with_it(ours):
    """While the loop is busy a stranger's connection ends, and a peer that is let in gets its descriptor."""
    shown = zmtp.password(ours.port)
    stranger = zmtp.connect(ours.port)
    found: list = []
    thread = threading.Thread(target=lambda: found.append(zmtp.let_in(ours.port, shown)))
    stranger.close()
    thread.start()
    while thread.is_alive():
        ours.poll(0.01)
    peer = found[0]
    peer.sendall(zmtp.frame(codec.pack(hello("client"))))
    came = until(ours, Arrived)
    for _ in range(20):
        other = zmtp.connect(ours.port)  # more that come and go
        other.close()
        came += ours.poll(0.01)
    assert [type(item) for item in came] == [Arrived]
    peer.close()
    assert until(ours, Gone)[0].peer == came[0].peer


def test_a_peer_taken_for_dead_is_told(ours):
    """Whatever the cause: it gets an Exit with its next message, and does not wait for ever."""
    peer = enter(ours)
    peer.sendall(zmtp.frame(codec.pack(hello("client"))))
    (came,) = until(ours, Arrived)
    connection = ours._connections.of(came.peer)
    ours._connections.ended(connection.fd)
    assert until(ours, Gone)[0].peer == came.peer
    peer.sendall(zmtp.frame(codec.pack(Stats(1))))
    while not ours._dead[came.peer]:
        assert ours.poll(0.05) == []
    peer.settimeout(limit(20))
    heard = b""
    while router.OUT.encode() not in heard:  # the transport's own questions may come before it
        part = peer.recv(4096)
        assert part, heard
        heard += part
    peer.close()


def test_messages_of_a_peer_that_went_come_before_its_end(ours):
    peer = enter(ours)
    for _ in range(50):
        peer.sendall(zmtp.frame(codec.pack(Stats(1))))
    peer.close()
    came = until(ours, Gone)
    assert [type(item) for item in came] == [Arrived] * 50 + [Gone]


def test_a_wrong_password_is_refused_and_nothing_of_it_is_logged_whole(ours, caplog):
    with zmtp.connect(ours.port) as sock:
        sock.sendall(zmtp.greeting() + zmtp.plain_hello(b"guess" * 40))
        said: list = []
        asking = threading.Thread(target=lambda: said.extend((zmtp.read(sock, 64), zmtp.command(sock))))
        asking.start()
        while asking.is_alive():
            assert ours.poll(0.01) == []
        asking.join()
    assert said[1].endswith(b"RROR\x03400")  # libzmq's own spelling has a wrong first byte
    assert "was refused: it has another token" in caplog.text and "guess" not in caplog.text


@pytest.mark.parametrize("mechanism", ["NULL", "CURVE", "GSSAPI"])
def test_another_mechanism_is_no_way_in(ours, mechanism):
    with zmtp.connect(ours.port) as sock:
        sock.sendall(zmtp.greeting(mechanism) + zmtp.frame(zmtp.READY, command=True) + zmtp.frame(codec.pack(hello("client"))))
        end = threading.Thread(target=lambda: zmtp.ended(sock))
        end.start()
        while end.is_alive():
            assert ours.poll(0.01) == []
        end.join()


# ---- who has to go


def several(count: int, since: float = 0.0) -> Connections:
    made = Connections()
    for fd in range(count):
        made.accepted(fd, since)
    return made


def test_those_who_say_nothing_go():
    made = several(3)
    for fd in range(2):
        made.meet(b"%d" % fd, fd, made.ticket(0.0))
    assert not made.overdue(SPEAK_SECONDS - 1, {})
    assert [connection.fd for connection in made.overdue(SPEAK_SECONDS + 1, {})] == [2]
    made.disconnect(b"1", 20.0)
    assert {connection.fd for connection in made.overdue(20.0 + LEAVE_SECONDS + 1, {})} == {1, 2}


def test_the_oldest_of_too_many_go():
    made = several(MAX_SILENT_CONNECTIONS + 5)
    assert [connection.fd for connection in made.overdue(1.0, {})] == [0, 1, 2, 3, 4]


def test_those_who_send_much_before_they_are_let_in_go():
    made = several(100)
    sent = {connection: EARLY_BYTES + 1 if connection.fd == 7 else 10 for connection in made}
    assert [connection.fd for connection in made.overdue(1.0, sent)] == [7]
    out = made.overdue(1.0, {connection: EARLY_BYTES for connection in made})
    assert len(out) == 100 - ALL_EARLY_BYTES // EARLY_BYTES


def test_of_those_who_read_too_little_who_has_most_to_read_goes():
    made = several(4)
    reader, slow, mute, unknown = made
    for connection, queued in zip(made, (10_000, 1000, 5000, 99_000), strict=True):
        connection.queued = queued
    acked = {reader: 10_500, slow: 500, mute: 100, unknown: 0}
    assert not made.unread(acked, 5400)
    assert list(made.unread(acked, 5399)) == [mute] and list(made.unread(acked, 499)) == [mute, slow]


def test_a_peer_that_reads_nothing_ends_alone(ours):
    """With the token: it asks, and what it is answered would fill the server's memory."""
    mute, good = enter(ours), enter(ours)
    for sock in (mute, good):
        sock.sendall(zmtp.frame(codec.pack(hello("client"))))
        (came,) = until(ours, Arrived)
        known = came.peer
    ours._most_unread, answer = 4 << 20, bytes(1 << 20)
    (peer,) = ours._connections._peers.keys() - {known}
    gone: list = []
    sent = 0
    while not gone:
        if sent < 64:
            ours.send(peer, Stats(sent), (answer,))
            sent += 1
        gone += [item for item in ours.poll(0.01) if isinstance(item, Gone)]
    assert [item.peer for item in gone] == [peer] and sent > 4
    good.sendall(zmtp.frame(codec.pack(Stats(1))))
    until(ours, Arrived)
    for sock in (mute, good):
        sock.close()


def test_a_message_without_an_end_is_found_by_what_was_read():
    made = several(2)
    one, other = made
    made.meet(b"1", one.fd, made.ticket(0.0))
    made.meet(b"2", other.fd, made.ticket(0.0))
    other.taken = 10 * UNFINISHED_BYTES
    read = {one: UNFINISHED_BYTES + 10_000, other: 11 * UNFINISHED_BYTES}
    assert list(made.unfinished(1.0, read)) == [one]
    assert not made.unfinished(1.0, {one: UNFINISHED_BYTES, other: 0})
    assert not made.unfinished(1e5, read)  # as much may be heartbeats by then
    assert list(made.unfinished(1.0, {one: 2 * UNFINISHED_BYTES}, UNFINISHED_BYTES - 10_000)) == [one]
    assert not made.unfinished(1.0, {one: 2 * UNFINISHED_BYTES}, UNFINISHED_BYTES)  # whole messages may be that many


def test_peers_that_send_ahead_together_are_ended_until_the_rest_is_within_a_limit():
    """Each had 131 MiB while one of them flooded, however many they were. Who has most goes first, and honest ones wait for
    credit.
    """
    made = Connections(heartbeat=1e9)
    peers = []
    for fd in range(5):
        made.accepted(fd, 0.0)
        peers.append(made.meet(b"%d" % fd, fd, made.ticket(0.0)))
    mib = 1 << 20
    read = dict(zip(peers, (100 * mib, 3 * mib, 90 * mib, 100 * mib, 60 * mib), strict=True))
    assert not made.unfinished(1.0, read, 128 * mib, 353 * mib)
    assert list(made.unfinished(1.0, read, 128 * mib, 352 * mib)) == [peers[0]]
    late = made.unfinished(1.0, read, 128 * mib, 160 * mib)
    assert list(late) == [peers[0], peers[3]] and "104857600 bytes ahead" in late[peers[0]]
    # One that is ended for its own message does not count: others are not ended for it.
    read[peers[2]] = 400 * mib
    assert list(made.unfinished(1.0, read, 128 * mib, 264 * mib)) == [peers[2]]


@pytest.mark.parametrize("more", [True, False])
def test_endless_parts_end_that_peer_alone(ours, more):
    """With the token: of one message on the wire (more), or of one that comes in several."""
    evil, good = enter(ours), enter(ours)
    for sock in (evil, good):
        sock.sendall(zmtp.frame(codec.pack(hello("client"))))
    known = until(ours, Arrived)  # both, before one pours: a stranger's connection ends earlier, by another limit
    if sum(isinstance(item, Arrived) for item in known) < 2:
        until(ours, Arrived)
    faults: list[str] = []
    ended: list[bool] = []
    block = zmtp.frame(connections.PART + bytes(100_000), more=more)
    thread = threading.Thread(target=lambda: ended.append(zmtp.pour(evil, block)))
    thread.start()
    while thread.is_alive():
        for item in ours.poll(0.01):
            if isinstance(item, Arrived) and item.fault:
                faults.append(item.fault)
                ours.disconnect(item.peer)
                ours._connections.of(item.peer).leaving = time.monotonic()  # soon is now
    evil.close()
    thread.join()
    assert ended == [True] and (not faults if more else "came in parts of" in faults[0])
    good.sendall(zmtp.frame(codec.pack(Stats(1))))
    until(ours, Arrived)
    good.close()


def test_a_long_command_is_never_held(monkeypatch):
    """A handshake's command may be as long as a frame: not as long as a body, and not for long."""
    monkeypatch.setattr(wire_socket, "HANDSHAKE_SECONDS", 0.5)
    ours = Router("127.0.0.1", 0)
    first, second = zmtp.connect(ours.port), zmtp.connect(ours.port)
    with contextlib.closing(ours), first, second:
        first.sendall(zmtp.greeting() + zmtp.frame(bytes(100), command=True, claim=2 * CHUNK))
        second.sendall(zmtp.greeting() + zmtp.frame(bytes(3 * EARLY_BYTES), command=True, claim=CHUNK))
        ended: list[bool] = []
        ends = [threading.Thread(target=lambda sock=sock: ended.append(zmtp.ended(sock))) for sock in (first, second)]
        for thread in ends:
            thread.start()
        while any(thread.is_alive() for thread in ends):
            assert ours.poll(0.01) == []
        for thread in ends:
            thread.join()
        assert ended == [True, True]


# ---- messages in several parts


@pytest.mark.parametrize("body", [0, 1, 99, 100, 101, 1000])
@pytest.mark.parametrize("frames", [(), (10,), (99, 1, 100), (100,) * 7, (1,) * 300])
def test_a_message_that_is_cut_is_joined_again(body, frames):
    whole = b"\x90" + os.urandom(body), tuple(os.urandom(size) for size in frames)
    connection = Connection(3, 1, 0.0)
    assert connection.assemble(b"\x90", ()) == (b"\x90", ())
    parts = cut(*whole, 100)
    assert max(sum(map(len, part)) for part in parts) <= 1 + 100 + 100
    for first, *rest in parts[:-1]:
        assert connection.assemble(first, tuple(rest)) is None
    last, *rest = parts[-1]
    assert connection.assemble(last, tuple(rest)) == whole
    assert not connection.parted and not connection.body and not connection.frames


@pytest.mark.parametrize("byte", [b"\x00", connections.PART])
@pytest.mark.parametrize("size", [99, 100, 101, 300])
def test_a_message_that_is_cut_may_have_any_bytes(byte, size):
    whole = b"\x90" + byte * size, (byte * 100, byte * 100)
    connection = Connection(3, 1, 0.0)
    assert connection.assemble(b"\x90", ()) == (b"\x90", ())
    *parts, (last, *rest) = cut(*whole, 100)
    for first, *frames in parts:
        assert connection.assemble(first, tuple(frames)) is None
    assert connection.assemble(last, tuple(rest)) == whole


def test_a_message_in_parts_is_bounded():
    connection = Connection(3, 1, 0.0)
    assert "not msgpack" in connection.assemble(connections.PART + b"x", ())
    assert connection.assemble(b"\x90", ()) == (b"\x90", ())
    said, sent = None, 0
    while said is None:
        said, sent = connection.assemble(connections.PART, (bytes(CHUNK),)), sent + CHUNK
    assert "came in parts of" in said and sent <= PARTED_BYTES + CHUNK
    connection = Connection(3, 1, 0.0, heard=True)
    assert f"at most {PARTED_BYTES} and {MAX_PARTS}" in connection.assemble(connections.PART, (b"",) * (MAX_PARTS + 1))
    assert f"the first message has {FIRST_BYTES + 1} bytes" in Connection(3, 1, 0.0).assemble(bytes(FIRST_BYTES + 1), ())


def test_a_long_body_in_parts_is_refused_as_it_comes():
    connection = Connection(3, 1, 0.0, heard=True)
    part = connections.PART + bytes(MAX_ASKED_BYTES // 2)
    assert connection.assemble(part, ()) is None and connection.assemble(part, ()) is None
    said = connection.assemble(part, ())
    assert f"at most {MAX_ASKED_BYTES} are accepted" in said
    assert connection.faulty and not connection.body  # nothing of it is kept


def test_what_a_refused_peer_sent_ahead_is_passed_over_without_a_copy(ours, monkeypatch):
    peer, copied = enter(ours), []
    peer.sendall(zmtp.frame(codec.pack(hello("client"))))
    until(ours, Arrived)
    assemble = Connection.assemble
    monkeypatch.setattr(Connection, "assemble", lambda at, body, frames: copied.append(body) or assemble(at, body, frames))
    block = zmtp.frame(connections.PART + bytes(CHUNK - 1))
    thread = threading.Thread(target=lambda: peer.sendall(block * 5))
    thread.start()
    first, last = until(ours, Arrived), []
    while thread.is_alive():
        last += ours.poll(0.01)
    thread.join()
    ours.poll(0.01)
    assert "a body came in parts of" in first[0].fault and last == []
    assert len(copied) == 2
    peer.close()


def test_a_message_without_an_end_is_found_while_the_socket_is_never_empty(ours, monkeypatch):
    peer = enter(ours)
    peer.sendall(zmtp.frame(codec.pack(hello("client"))))
    until(ours, Arrived)
    count, ended = router.tcp.traffic, []
    monkeypatch.setattr(router.tcp, "traffic", lambda fd: count(fd)._replace(received=1 << 30))
    monkeypatch.setattr(ours, "_end", lambda connection, reason: ended.append(reason))
    peer.sendall(zmtp.frame(codec.pack(Stats(1))) * 2)
    assert ours._sock.poll(int(limit(20) * 1000))
    ours._next_poll = 0.0
    assert len(ours.poll(0.0, 1)) == 1
    assert len(ended) == 1 and "has no end" in ended[0]
    peer.close()
