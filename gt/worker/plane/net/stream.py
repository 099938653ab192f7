"""One end of a stream of messages to a worker of another host: credit, headers, and the waits of a thread for one message."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from gt.worker.plane.base import Unreachable
from gt.worker.plane.net.lane import Incoming, Lane, Outgoing, slots_of
from gt.worker.plane.net.network import Network
from gt.worker.plane.net.peer_connection import CREDIT, DATA, FAIL, HEADER, JOINED_BYTES, NOWAIT, PeerConnection
from gt.worker.plane.shm import Peer

SMALL_BYTES = 32 << 10  # bytes of a message that the waiting thread reads itself
# Bytes that a sender may be ahead of its receiver in a stream, and that wait in memory for a connection that is full. So
# transfers go on while both ends compute. Larger messages are never copied: their sender waits.
AHEAD_BYTES = 16 << 20
NOTHING = memoryview(b"")
FRAME_BYTES = 8 << 20  # frame size of a large message: 1 MiB takes a third more CPU time, larger ones save nothing
BATCH_BYTES = 2 << 20  # bytes of frames given to the kernel in one call, or a little more


class StreamPlane(Protocol):
    """The plane."""

    network: Network

    def wait(self, ready: Callable[[], bool], peers: Sequence) -> None: ...
    def ended(self, stream: PairStream, connection: PeerConnection, error: OSError) -> None: ...


class PairStream:
    """Messages to and from one worker under one key."""

    def __init__(self, plane: StreamPlane, peer: Peer, lane: Lane, key: int, slot: int, slots: int) -> None:
        # Both ends compute the same number of slots: it is the sender's first credit, and half of it is what a receiver may
        # owe.
        slots = max(slots, AHEAD_BYTES // slot)
        self.peer, self.key, self.slot, self._keep = peer, key, slot, slots // 2
        self._plane, self._network, self._lane = plane, plane.network, lane
        self.name, self.small = peer.name, min(slot, JOINED_BYTES)  # small: bytes up to which `send_small` sends a message
        self._slots = max(1, FRAME_BYTES // slot)  # slots that one frame may carry
        with self._lane.lock:
            self.incoming: Incoming = self._lane.incoming(key)
            self.incoming.know(slot, slots)
        self._outgoing: Outgoing = self._lane.outgoing(key, slots)
        self._connection: PeerConnection | None = None
        self._network.want(lane.index)
        self._size = 0
        self._headers: dict[int, tuple[bytes, bytes]] = {}  # by size
        self.version = -1  # version of the plane's world in which `peer` was looked up
        self._about = (self._network.own, peer.index, self._lane.epoch, key)

    def check(self) -> None:
        self.peer.check()
        if self._lane.broken:
            raise Unreachable(self.peer.index, f"worker {self.peer.name!r} on {self.peer.row[3]}: {self._lane.broken}")
        if self._lane.failed and (why := self._lane.failed.get(self.key)):
            raise Unreachable(self.peer.index, why)

    @property
    def failing(self) -> bool:
        """True if `check` raises."""
        lane = self._lane
        return bool(self.peer.gone is not None or lane.broken or (lane.failed and self.key in lane.failed))

    @property
    def owes(self) -> bool:
        """True if the other end is to get credit now."""
        return self.incoming.owed >= self._keep

    @property
    def connection(self) -> PeerConnection:
        """The connection that the frames take; waits until it is made."""
        connection = self._connection
        if connection is None or connection.ended:
            network, lane = self._network, self._lane
            connection = network.connection(lane.index, lane.epoch)
            if connection is None:
                self._plane.wait(lambda: network.connection(lane.index, lane.epoch) is not None, (self,))
                connection = network.connection(lane.index, lane.epoch)
                assert connection is not None
            self._connection = connection
        return connection

    def send(self, data: memoryview, total: int, note: int = 0) -> None:
        """Send bytes of a message of `total` bytes; several calls may send one message."""
        # A small message may be copied and left to the background thread, so this worker computes on while it is sent.
        later = AHEAD_BYTES if total <= AHEAD_BYTES else 0
        while True:
            parts: list[memoryview] = []
            count = 0
            # As many frames as credit and BATCH_BYTES allow go to the kernel in one system call.
            while count < BATCH_BYTES and (payload := self.next_frame(data)) is not None:
                parts += joined(self.header(DATA, len(payload), total, note), payload)
                data = data[len(payload) :]
                count += len(payload)
                if not data:
                    break
            if not parts:
                self._plane.wait(lambda: self._outgoing.credit > 0, (self,))
                continue
            self._send(self.connection, parts, later)
            if not data:
                return

    def next_frame(self, data: memoryview) -> memoryview | None:
        """As much of the data as the next frame takes, whose credit is used; None if there is no credit."""
        out = self._outgoing
        if out.granted <= out.used:
            return None
        payload = data[: min(out.granted - out.used, self._slots) * self.slot]
        out.used += slots_of(len(payload), self.slot)
        return payload

    def header(self, kind: int, nbytes: int, total: int, note: int) -> bytes:
        """The header of a frame. It takes along the credit that is owed."""
        incoming = self.incoming
        with self._lane.lock:
            # The field has 16 bits; the rest is owed still.
            credit = max(0, min(incoming.owed, 0xFFFF))
            incoming.owed -= credit
        source, target, epoch, key = self._about
        return HEADER.pack(kind, 0, credit, nbytes, source, target, epoch, key, total, note)

    def _notify(self, kind: int, data: memoryview) -> None:
        """Send a frame that needs no credit."""
        self._send(self.connection, joined(self.header(kind, len(data), 0, 0), data), AHEAD_BYTES)

    def _send(self, connection: PeerConnection, parts: list[memoryview], later: int) -> None:
        try:
            connection.send(parts, self.check, later)
        except OSError as error:
            self._plane.ended(self, connection, error)
        finally:
            if connection.relayed:
                self._network.arm(connection)  # the background thread sends the rest

    def send_small(self, data: memoryview, size: int) -> bool:
        """Send a message of one small frame, if nothing is in its way; else False, and nothing has changed.

        As `send` in much less time: a message of few bytes takes as long as the calls made for it.
        """
        out, connection, lane = self._outgoing, self._connection, self._lane
        if (
            connection is None
            or out.granted <= out.used
            or connection.relayed
            or connection.ended
            or lane.broken
            or lane.failed
            or self.peer.gone is not None
            or not connection.sending.acquire(False)
        ):
            return False
        out.used += 1
        try:
            # Credit is kept back until half the slots are owed: until then a prepared header without credit will do.
            if self.incoming.owed < self._keep:
                frame = (self._headers.get(size) or self._remember(size))[0] + data
            else:
                frame = self.header(DATA, size, size, 0) + data
            try:
                sent = connection.sock.send(frame, NOWAIT)
            except BlockingIOError:
                sent = 0
            if sent < len(frame):
                connection.hand_back([memoryview(frame)[sent:]])
                self._network.arm(connection)
            return True
        except OSError as error:
            failure = error
        finally:
            connection.sending.release()
        self._plane.ended(self, connection, failure)
        return True

    def receive_small(self, into: memoryview, size: int) -> bool:
        """Receive a message of one small frame, if it is the next to arrive; else False, and nothing has changed.

        Only from a connection that this thread has read before.
        """
        incoming, connection, lane = self.incoming, self._connection, self._lane
        if (
            connection is None
            or not connection.owned
            or connection.ended
            or lane.broken
            or lane.failed
            or self.peer.gone is not None
        ):
            return False
        # A buffered message is before this one in the stream.
        if not incoming.idle or not connection.reading.acquire(False):
            return False
        credit = -1
        try:
            connection.touched = True
            if connection.owned:
                credit = connection.read_one((self._headers.get(size) or self._remember(size))[1], into, size)
                if credit < 0:
                    connection.deal()
        except BlockingIOError:
            pass
        except (OSError, ValueError) as error:
            self._network.lost(connection, error)
        finally:
            connection.reading.release()
        if credit < 0:
            return False
        incoming.owed += 1  # no message is posted, so no other thread writes it
        if credit:
            with self._lane.lock:
                self._outgoing.granted += credit
        if incoming.owed > self._keep:
            self._notify(CREDIT, NOTHING)
        return True

    def _remember(self, size: int) -> tuple[bytes, bytes]:
        """Headers of small messages of a size: of those that are sent, and of those that arrive without their first bytes."""
        source, target, epoch, key = self._about
        sent = HEADER.pack(DATA, 0, 0, size, source, target, epoch, key, size, 0)
        arriving = HEADER.pack(DATA, 0, 0, size, target, source, epoch, key, size, 0)[4:]
        found = self._headers[size] = sent, arriving
        return found

    def expect(self, into: memoryview) -> None:
        """Receive the next message there; its credit is sent with the next frame."""
        self._size = len(into)
        with self._lane.lock:
            self.incoming.post(into, self.slot)

    def post(self, into: memoryview) -> None:
        """Receive the next message there."""
        self.expect(into)
        while self.owes:
            self._notify(CREDIT, NOTHING)

    def wait(self) -> None:
        """Wait for the posted message."""
        incoming = self.incoming
        self._wait(lambda: incoming.done)

    def wait_for(self, count: int) -> None:
        """Wait for so many bytes of the posted message, or its end where it has fewer."""
        incoming = self.incoming
        self._wait(lambda: incoming.done or incoming.at >= count)

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait for bytes of the posted message. This thread reads the connection, unless another does."""
        if ready():
            return
        network, lane = self._network, self._lane
        connection = self._connection if self._connection is not None else network.connection(lane.index, lane.epoch)
        if connection is not None:
            self._connection = connection
            # Reading in this thread saves a wake-up. Once nothing has come for a while, the background thread reads and wakes
            # it.
            while network.read(connection, lambda: ready() or self.failing, self._size > SMALL_BYTES) and not ready():
                self.check()
        if not ready():
            self._plane.wait(ready, (self,))

    def fail(self, why: str) -> None:
        """Tell the other end that a collective is not carried on."""
        with contextlib.suppress(Exception):
            self._notify(FAIL, memoryview(why.encode()[:4096]))


def joined(header: bytes, payload: memoryview) -> list[memoryview]:
    """A frame, of as few parts as is cheap."""
    return [memoryview(header + payload)] if len(payload) <= JOINED_BYTES else [memoryview(header), payload]
