"""Connections of a port, from the events of a monitor: the connection of each peer, and those to be ended. Knows no socket.

The system reuses descriptors, so a connection is tracked from its accept to its end. Each is admitted with a ticket, which its
messages carry: the ticket's connection is the one that had the descriptor when the ticket was issued.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from gt.wire.codec import MAX_ASKED_BYTES
from gt.wire.messages import CHUNK, MAX_BODY_BYTES

SPEAK_SECONDS = 15.0  # seconds until a connection has to send a whole message
LEAVE_SECONDS = 5.0  # seconds for a refused peer to read the reason
MAX_SILENT_CONNECTIONS = 128  # connections without a message yet, at most; fewer where descriptors are few
EARLY_BYTES = 64 << 10  # bytes that one of these may send
ALL_EARLY_BYTES = 4 << 20  # bytes that all of these may send together
SENT_BYTES = 2 * CHUNK  # bytes of a message of a Dealer, at most, but for headers
UNFINISHED_BYTES = 3 * CHUNK  # bytes of an unfinished message on the wire
MAX_PARTS = 4096  # parts of a divided message, at most
PARTED_BYTES = 2 * MAX_BODY_BYTES + 16 * CHUNK  # bytes of a divided message, at most
ALL_PARTED_BYTES = 128 << 20  # bytes of divided messages on all connections together
FIRST_BYTES = 256 << 10  # bytes of a first message
BEATS_BYTES = 640  # bytes of encrypted heartbeats that a side sends within its longest permitted silence
PART = b"\xc1"  # first byte of a message part; no msgpack begins with it


@dataclass(eq=False, slots=True)
class Connection:
    """opened, closed: places in the order of accepts and ends; closed is 0 while the connection is open.

    taken: bytes of received messages. queued: of messages to its peer. body, frames, parted: the parts of a divided message so
    far; unpacked: bytes of its body. faulty: True after a part with a fault, since when no part is kept.
    """

    fd: int
    opened: int
    since: float
    closed: int = 0
    peer: bytes = b""
    leaving: float = 0.0
    taken: int = 0
    queued: int = 0
    heard: bool = False  # True after its first whole message
    body: list[bytes] = field(default_factory=list)
    frames: list = field(default_factory=list)
    parted: int = 0
    unpacked: int = 0
    faulty: bool = False

    def assemble(self, body: bytes, frames: tuple) -> tuple[bytes, tuple] | str | None:
        """Add a part: body and frames of the whole message, None before the last part, or the fault of the part."""
        whole = self._join(body, frames)
        if isinstance(whole, str):
            self.faulty, self.body, self.frames = True, [], []
        return whole

    def _join(self, body: bytes, frames: tuple) -> tuple[bytes, tuple] | str | None:
        # A stranger's first message is a Hello, which is short and whole.
        first, self.heard = not self.heard, True
        if first and len(body) > FIRST_BYTES:
            return f"the first message has {len(body)} bytes, at most {FIRST_BYTES} are taken"
        if body[:1] != PART:
            if not self.parted:
                return body, frames
            whole = b"".join([*self.body, body]), (*self.frames, *frames)
            self.body, self.frames, self.parted, self.unpacked = [], [], 0, 0
            return whole
        if first:
            return "the first message is not msgpack: it says to be a part of one"

        # A long body is refused as it comes: to keep and join its parts would take as long as to unpack it.
        self.unpacked += len(body) - 1
        if self.unpacked > MAX_ASKED_BYTES:
            return f"a body came in parts of {self.unpacked} bytes so far, at most {MAX_ASKED_BYTES} are accepted from a peer"
        self.body.append(body[1:])
        self.frames += frames
        self.parted += len(body) + sum(map(len, frames))
        if self.parted > PARTED_BYTES or len(self.frames) > MAX_PARTS:
            parts = f"{self.parted} bytes and {len(self.frames)} frames"
            return f"a message came in parts of {parts}, at most {PARTED_BYTES} and {MAX_PARTS}"
        return None


# Why tickets: ROUTER has the descriptor of a message's connection. When the message is read, that connection may have ended,
# and another may have its descriptor. Example, `_place` growing with each accept and end:
#   accepted(7) -> opened 1; ticket "1" -> place 1; ended(7) -> closed 2; accepted(7) -> opened 3
# A message with ticket "1" from descriptor 7 is of the first connection: opened 1 <= 1 < closed 2.
class Connections:
    """heartbeat: seconds that a peer may be silent. silent: number of connections that may have sent no message yet."""

    def __init__(self, heartbeat: float = 10.0, silent: int = MAX_SILENT_CONNECTIONS) -> None:
        self._beats = BEATS_BYTES / heartbeat  # bytes a second
        self._most_silent = silent
        self._open: dict[int, Connection] = {}
        self._ended: dict[int, list[Connection]] = {}  # ended since the last `settle`
        self._tickets: dict[str, tuple[int, float]] = {}  # ticket -> place in the order of events, time
        self._peers: dict[bytes, Connection] = {}
        self._place = self._given = 0
        self.growing = False  # True if the last look found a long unfinished message

    # ---- events

    def accepted(self, fd: int, now: float) -> None:
        """A connection began. If its descriptor still has an open connection here, that one has ended without an event."""
        self.ended(fd)
        self._place += 1
        self._open[fd] = Connection(fd, self._place, now)

    def ended(self, fd: int) -> None:
        """The connection of this descriptor ended."""
        connection = self._open.pop(fd, None)
        if connection is not None:
            self._place += 1
            connection.closed = self._place
            self._ended.setdefault(fd, []).append(connection)

    def ticket(self, now: float) -> str:
        """Issue a ticket for an admitted connection, after all earlier accepts and ends are known."""
        self._given += 1
        self._tickets[str(self._given)] = (self._place, now)
        return str(self._given)

    def meet(self, peer: bytes, fd: int, ticket: str) -> Connection | None:
        """The connection of a peer's first message: the one that had the descriptor when the ticket was issued.

        None if it has ended, and its end has been settled.
        """
        place, _ = self._tickets.pop(ticket, (-1, 0.0))
        latest = [self._open[fd]] if fd in self._open else []
        for connection in [*self._ended.get(fd, ()), *latest]:
            # It was open when the ticket was issued.
            if not connection.peer and connection.opened <= place and (not connection.closed or connection.closed > place):
                connection.peer = peer
                self._peers[peer] = connection
                return connection
        return None

    def collect_ended(self) -> list[bytes]:
        """Peers whose connections have ended, after all of their messages were received."""
        # Ended connections without a peer never sent a message: nobody has to be told.
        ended = [connection for row in self._ended.values() for connection in row if connection.peer]
        self._ended.clear()
        for connection in ended:
            self._peers.pop(connection.peer, None)
        return [connection.peer for connection in sorted(ended, key=lambda connection: connection.closed)]

    def disconnect(self, peer: bytes, now: float) -> None:
        """Refuse a peer: its connection ends soon."""
        if (connection := self._peers.get(peer)) is not None:
            connection.leaving = now + LEAVE_SECONDS

    # ---- state

    def of(self, peer: bytes) -> Connection | None:
        return self._peers.get(peer)

    def holds(self, connection: Connection) -> bool:
        return self._open.get(connection.fd) is connection

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    @property
    def silent(self) -> bool:
        """True while some connections have sent no message yet."""
        return len(self._open) > len(self._peers)

    @property
    def unsettled(self) -> bool:
        return bool(self._ended)

    # ---- connections to be ended

    def overdue(self, now: float, sent: dict[Connection, int]) -> dict[Connection, str]:
        """Connections that have to end, with reasons. sent: bytes that each has sent."""
        # 1. Each by itself: refused and still here, silent for too long, or too much sent without a message.
        out: dict[Connection, str] = {}
        early: list[Connection] = []  # the oldest first
        for connection in self._open.values():
            if connection.peer:
                if connection.leaving and now > connection.leaving:
                    out[connection] = "it was refused"
            elif now - connection.since > SPEAK_SECONDS:
                out[connection] = f"it said nothing in {SPEAK_SECONDS:g} s"
            elif sent.get(connection, 0) > EARLY_BYTES:
                out[connection] = f"it sent more than {EARLY_BYTES} bytes before it was let in"
            else:
                early.append(connection)

        # 2. All early ones together: a flood of connections, or of bytes, whose largest senders go first.
        for connection in early[: max(0, len(early) - self._most_silent)]:
            out[connection] = f"more than {self._most_silent} connections have said nothing"
        total = sum(sent.get(connection, 0) for connection in early)
        for connection in sorted(early, key=lambda connection: -sent.get(connection, 0)):
            if total <= ALL_EARLY_BYTES:
                break
            total -= sent.get(connection, 0)
            out[connection] = f"connections that have said nothing sent more than {ALL_EARLY_BYTES} bytes"

        # 3. Divided messages that have not ended, which the dispatcher keeps in memory.
        parted = sum(connection.parted for connection in self._open.values())
        for connection in sorted(self._open.values(), key=lambda connection: -connection.parted):
            if parted <= ALL_PARTED_BYTES:
                break
            parted -= connection.parted
            out[connection] = f"messages that have not ended have more than {ALL_PARTED_BYTES} bytes"

        # 4. Tickets whose connection never sent a message.
        for ticket in [ticket for ticket, (_, given) in self._tickets.items() if now - given > 2 * SPEAK_SECONDS]:
            del self._tickets[ticket]
        return out

    def unread(self, acked: dict[Connection, int], most: int) -> dict[Connection, str]:
        """Connections whose peers do not read their messages, while all together have more than `most` bytes to read.

        acked: bytes that each peer's host has taken, 0 where unknown.
        """
        # Bytes that a peer has not read are in this process's memory. A reader may be slow: those with most to read go first.
        left = {connection: connection.queued - nbytes for connection, nbytes in acked.items() if nbytes}
        out, total = {}, sum(nbytes for nbytes in left.values() if nbytes > 0)
        for connection in sorted(left, key=lambda connection: -left[connection]) if total > most else ():
            if total <= most:
                break
            total -= left[connection]
            out[connection] = f"it has not read {left[connection]} bytes that were sent to it"
        return out

    def unfinished(self, now: float, read: dict[Connection, int], waiting: int = 0, most: float = inf) -> dict[Connection, str]:
        """Connections with an endless message. read: bytes that were read from each before its messages were received.

        waiting: bytes of whole messages of each that may not have been received, 0 if all have. most: bytes of all connections
        that are in memory and no received messages.
        """
        out: dict[Connection, str] = {}
        self.growing = False
        held: dict[Connection, float] = {}
        for connection, nbytes in read.items():
            # Bytes read less those of whole messages. Heartbeats are no messages, and are allowed for by their rate.
            held[connection] = nbytes - connection.taken - self._beats * (now - connection.since)
            unfinished = held[connection] - waiting
            self.growing |= unfinished > CHUNK
            if connection.peer and unfinished > UNFINISHED_BYTES:
                out[connection] = f"it sent {unfinished:.0f} bytes of a message that has no end"

        # Each may be within its limit, and all together not. Honest peers wait for credit, so those with most go first.
        total = sum(nbytes for connection, nbytes in held.items() if connection not in out and nbytes > 0)
        for connection in sorted(held, key=lambda connection: -held[connection]) if total > most else ():
            if total <= most:
                break
            if connection.peer and connection not in out:
                total -= held[connection]
                out[connection] = f"it sent {held[connection]:.0f} bytes ahead, of more than {most:.0f} that wait of all"
        return out


def on_wire(nbytes: int, sealed: bool) -> int:
    """Bytes of a frame on a connection, with its header and the overhead of encryption."""
    nbytes += 33 if sealed else 0
    return nbytes + (2 if nbytes < 256 else 9)


def cut(body: bytes, frames: tuple, limit: int) -> list[list]:
    """Divide a message into parts of `limit` bytes and one frame at most. All but the last begin with PART."""
    # 1. The body's bytes but the last `limit`, one part each.
    starts = range(0, len(body) - limit, limit)
    parts: list[list] = [[PART + body[start : start + limit]] for start in starts]
    rest = body[len(starts) * limit :]
    # The last part is known by not beginning with PART: a rest that happens to begin so becomes a part too.
    if rest[:1] == PART:
        parts.append([PART + rest])
        rest = b""

    # 2. Frames in groups; the last group goes with the rest of the body.
    group: list = []
    size = len(rest)
    for frame in frames:
        nbytes = memoryview(frame).nbytes
        if group and size + nbytes > limit:
            parts.append([PART, *group])
            group, size = [], len(rest)
        group.append(frame)
        size += nbytes
    return [*parts, [rest, *group]]
