"""The connections of a port, as a monitor tells of them: which peer is whose, and who has to go. Knows no socket.

A descriptor names one connection after another. A connection is known from its accept to its end, and each is let in with a
ticket of its own, which its messages carry: the connection of a ticket is the one that had the descriptor when it was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gt.wire.messages import CHUNK, MAX_BODY

SPEAK = 15.0  # seconds in which a connection has to say something that counts
LEAVE = 5.0  # seconds that a refused peer has to read why
SILENT = 128  # connections that have said nothing yet, at most: fewer where descriptors are few
EARLY = 64 << 10  # bytes that one of them may send, and
ALL_EARLY = 4 << 20  # all of them together
UNFINISHED = 3 * CHUNK  # bytes of a message on the wire whose end has not come: the longest that a Dealer sends has two
PARTS = 4096  # frames of a message that comes in several, and
PARTED = 2 * MAX_BODY + 16 * CHUNK  # its bytes
ALL_PARTED = 128 << 20  # bytes of such messages on all connections together
FIRST = 256 << 10  # bytes of a first message
BEATS = 640  # bytes of heartbeats, encrypted, that either side sends while it is silent for as long as it may be
PART = b"\xc1"  # begins what is only a part of a message: no msgpack does


@dataclass(eq=False, slots=True)
class Connection:
    """opened, closed: places in the order of accepts and ends; closed is 0 while it is open.

    taken: bytes of its messages that have been received. body, frames, parted: of a message that comes in several.
    """

    fd: int
    opened: int
    since: float
    closed: int = 0
    peer: bytes = b""
    leaving: float = 0.0
    taken: int = 0
    heard: bool = False  # whether a whole message has come
    body: list[bytes] = field(default_factory=list)
    frames: list = field(default_factory=list)
    parted: int = 0

    def join(self, body: bytes, frames: tuple) -> tuple[bytes, tuple] | str | None:
        """A whole message, as body and frames; None if more of it is to come; or what is wrong with it."""
        first, self.heard = not self.heard, True
        if first and len(body) > FIRST:
            return f"the first message has {len(body)} bytes, at most {FIRST} are taken"
        if body[:1] != PART:
            if not self.parted:
                return body, frames
            whole = b"".join([*self.body, body]), (*self.frames, *frames)
            self.body, self.frames, self.parted = [], [], 0
            return whole
        if first:
            return "the first message is not msgpack: it says to be a part of one"
        self.body.append(body[1:])
        self.frames += frames
        self.parted += len(body) + sum(map(len, frames))
        if self.parted > PARTED or len(self.frames) > PARTS:
            return f"a message came in parts of {self.parted} bytes and {len(self.frames)} frames, at most {PARTED} and {PARTS}"
        return None


class Connections:
    """heartbeat: seconds that a peer may be silent for; silent: connections that may have said nothing yet."""

    def __init__(self, heartbeat: float = 10.0, silent: int = SILENT) -> None:
        self._beats = BEATS / heartbeat  # bytes a second
        self._most_silent = silent
        self._open: dict[int, Connection] = {}
        self._ended: dict[int, list[Connection]] = {}  # since the last `settle`
        self._tickets: dict[str, tuple[int, float]] = {}  # ticket -> place at which it was given, when
        self._peers: dict[bytes, Connection] = {}
        self._place = self._given = 0
        self.growing = False  # whether at the last look a message was long that has no end yet

    # ---- what happens

    def accepted(self, fd: int, now: float) -> None:
        """A connection began. If one that had its descriptor is still open here, its end went unsaid."""
        self.ended(fd)
        self._place += 1
        self._open[fd] = Connection(fd, self._place, now)

    def ended(self, fd: int) -> None:
        """The connection that has this descriptor ended."""
        connection = self._open.pop(fd, None)
        if connection is not None:
            self._place += 1
            connection.closed = self._place
            self._ended.setdefault(fd, []).append(connection)

    def ticket(self, now: float) -> str:
        """For a connection that is let in, once all accepts and ends before are known."""
        self._given += 1
        self._tickets[str(self._given)] = (self._place, now)
        return str(self._given)

    def meet(self, peer: bytes, fd: int, ticket: str) -> Connection | None:
        """The connection of a peer's first message: the one that had the descriptor when the ticket was given. None if it has
        ended, and its end has been settled."""
        place, _ = self._tickets.pop(ticket, (-1, 0.0))
        latest = [self._open[fd]] if fd in self._open else []
        for connection in [*self._ended.get(fd, ()), *latest]:
            if not connection.peer and connection.opened <= place and (not connection.closed or connection.closed > place):
                connection.peer = peer
                self._peers[peer] = connection
                return connection
        return None

    def settle(self) -> list[bytes]:
        """Peers whose connections have ended, once all that these brought has been received."""
        ended = [connection for row in self._ended.values() for connection in row if connection.peer]
        self._ended.clear()
        for connection in ended:
            self._peers.pop(connection.peer, None)
        return [connection.peer for connection in sorted(ended, key=lambda connection: connection.closed)]

    def leave(self, peer: bytes, now: float) -> None:
        """A peer is refused: its connection ends soon."""
        if (connection := self._peers.get(peer)) is not None:
            connection.leaving = now + LEAVE

    # ---- what is known

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
        """True while some have said nothing yet."""
        return len(self._open) > len(self._peers)

    @property
    def unsettled(self) -> bool:
        return bool(self._ended)

    # ---- who has to go

    def overdue(self, now: float, sent: dict[Connection, int]) -> dict[Connection, str]:
        """Connections that have to end, and why. sent: bytes that each has sent."""
        out: dict[Connection, str] = {}
        early: list[Connection] = []  # the oldest first
        for connection in self._open.values():
            if connection.peer:
                if connection.leaving and now > connection.leaving:
                    out[connection] = "it was refused"
            elif now - connection.since > SPEAK:
                out[connection] = f"it said nothing in {SPEAK:g} s"
            elif sent.get(connection, 0) > EARLY:
                out[connection] = f"it sent more than {EARLY} bytes before it was let in"
            else:
                early.append(connection)
        for connection in early[: max(0, len(early) - self._most_silent)]:
            out[connection] = f"more than {self._most_silent} connections have said nothing"
        total = sum(sent.get(connection, 0) for connection in early)
        for connection in sorted(early, key=lambda connection: -sent.get(connection, 0)):
            if total <= ALL_EARLY:
                break
            total -= sent.get(connection, 0)
            out[connection] = f"connections that have said nothing sent more than {ALL_EARLY} bytes"
        held = sum(connection.parted for connection in self._open.values())
        for connection in sorted(self._open.values(), key=lambda connection: -connection.parted):
            if held <= ALL_PARTED:
                break
            held -= connection.parted
            out[connection] = f"messages that have not ended have more than {ALL_PARTED} bytes"
        for ticket in [ticket for ticket, (_, given) in self._tickets.items() if now - given > 2 * SPEAK]:
            del self._tickets[ticket]
        return out

    def unfinished(self, now: float, read: dict[Connection, int]) -> dict[Connection, str]:
        """Connections whose message has no end. read: bytes that were read from each before its messages were all received."""
        out = {}
        self.growing = False
        for connection, nbytes in read.items():
            held = nbytes - connection.taken - self._beats * (now - connection.since)
            self.growing |= held > CHUNK
            if connection.peer and held > UNFINISHED:
                out[connection] = f"it sent {held:.0f} bytes of a message that has no end"
        return out


def on_wire(nbytes: int, sealed: bool) -> int:
    """Bytes that a frame takes on a connection: with its head, and what encryption adds."""
    nbytes += 33 if sealed else 0
    return nbytes + (2 if nbytes < 256 else 9)


def cut(body: bytes, frames: tuple, limit: int) -> list[list]:
    """A message as several, each of `limit` bytes and a frame at most. All but the last begin with PART."""
    starts = range(0, len(body) - limit, limit)
    parts: list[list] = [[PART + body[start : start + limit]] for start in starts]
    rest = body[len(starts) * limit :]
    if rest[:1] == PART:  # the last part may not begin so
        parts.append([PART + rest])
        rest = b""
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
