"""Sends and receives of several streams at once, by one thread: it sleeps only while no connection can go on.

A collective would else wait for one member after the other, and two threads would take turns at the interpreter's lock.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gt.wire import tcp
from gt.worker.plane.net.peer_connection import CREDIT, DATA, NOWAIT, TEND, PeerConnection

if TYPE_CHECKING:
    from gt.worker.plane.net.network import Network
    from gt.worker.plane.net.peer_connection import Part
    from gt.worker.plane.net.stream import PairStream

BATCH_BYTES = 1 << 20  # bytes of frames given to the kernel in one call, or a little more
READS_PER_TURN = 8  # reads of one connection before the others have their turn
NOTHING = memoryview(b"")


class DuplexPlane(Protocol):
    """The plane. bell: descriptor that is readable once a waiting thread should look again, between waiting(True) and False."""

    network: Network

    @property
    def bell(self) -> int: ...
    def waiting(self, now: bool) -> None: ...
    def hear(self) -> None: ...


class _Queued(NamedTuple):
    """Bytes from `data` on of a message of `total` bytes; of CREDIT none."""

    stream: PairStream
    kind: int
    data: memoryview
    total: int
    note: int


class _Outlet:
    """One connection: frames that are to be sent on it, and its state."""

    __slots__ = ("connection", "ended", "full", "holds", "mask", "parts", "queue", "readable", "reads")

    def __init__(self, connection: PeerConnection, reads: bool) -> None:
        self.connection, self.reads = connection, reads  # True if this thread reads it
        self.queue: deque[_Queued] = deque()
        self.parts: list[Part] = []  # parts of the frames that are being sent, or are next
        self.holds = False  # connection.sending
        self.full = self.ended = False
        self.readable = True
        self.mask = 0

    def send(self) -> None:
        """Send what the connection takes now. OSError at its end."""
        connection = self.connection
        while self.parts or self.queue or self.holds:
            # `sending` is held across calls while a frame is half sent, as no other frame may come between.
            if not self.holds and not connection.sending.acquire(timeout=0.05):
                return  # another thread relays, which takes not long
            self.holds = True
            if not self.parts:
                self.parts = connection.take_relayed() or self._frames()
                if not self.parts:
                    self._let_go()
                    return
            if not connection.push_now(self.parts):
                self.full = True
                return

    def _frames(self) -> list[Part]:
        """The next frames for which there is credit, of the first messages first."""
        parts: list[Part] = []
        nbytes, kept = 0, deque[_Queued]()
        blocked = set()
        while self.queue and nbytes < BATCH_BYTES:
            queued = self.queue.popleft()
            stream, kind, data, total, note = queued
            # Messages of one stream keep their order; those of another may overtake one that waits for credit.
            if stream.key in blocked:
                kept.append(queued)
                continue
            while nbytes < BATCH_BYTES:
                part = stream.next_frame(data) if kind == DATA else data
                if part is None:
                    blocked.add(stream.key)
                    kept.append(queued._replace(data=data))
                    break
                parts.append(memoryview(stream.header(kind, len(part), total, note)))
                if part:
                    parts.append(part)
                nbytes += len(part)
                data = data[len(part) :]
                if not data:
                    break
            else:
                kept.append(queued._replace(data=data))
        self.queue.extendleft(reversed(kept))
        return parts

    def receive(self) -> None:
        """Deal with what is there. OSError at the end of the connection."""
        connection = self.connection
        self.readable = False
        connection.touched = True
        try:
            connection.deal()
            for _ in range(READS_PER_TURN):
                if connection.stalled or not connection.read(NOWAIT):
                    return
            self.readable = True
        except BlockingIOError:
            pass

    def _let_go(self) -> None:
        self.holds = False
        self.connection.sending.release()

    def leave(self) -> None:
        """Frames that have begun are left to be sent by others; the others' memory is free for use."""
        if self.holds:
            if self.parts:
                self.connection.hand_back(self.parts)
                self.parts = []
            self._let_go()
        self.queue.clear()


class Duplex:
    """The streams to the other members of a team, by rank; `results`: a second one to each.

    Within `with`, this thread alone reads their connections, as far as no other does. Outside of it only the streams
    themselves are used.
    """

    def __init__(self, plane: DuplexPlane, streams: Mapping[int, PairStream], results: Mapping[int, PairStream]) -> None:
        self.streams, self.results = streams, results
        self._plane = plane
        self._outlets: dict[PairStream, _Outlet] = {}
        self._by_fd: dict[int, _Outlet] = {}
        self._scratch = memoryview(bytearray())

    def __enter__(self) -> Duplex:
        plane, network = self._plane, self._plane.network
        # Waits, so before anything is held
        connections = {rank: (stream, stream.connection) for rank, stream in self.streams.items()}
        try:
            self._poll = select.poll()
            self._poll.register(plane.bell, select.POLLIN)
            for rank, (stream, connection) in connections.items():
                outlet = self._by_fd.get(connection.fd)
                if outlet is None:
                    # Several members may be behind one relay: one outlet for each connection, not for each stream.
                    outlet = self._by_fd[connection.fd] = _Outlet(connection, network.take(connection))
                    outlet.mask = select.POLLIN if outlet.reads else 0
                    self._poll.register(connection.fd, outlet.mask)
                self._outlets[stream] = self._outlets[self.results[rank]] = outlet
            plane.waiting(True)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave()

    def _leave(self) -> None:
        self._plane.waiting(False)
        for outlet in self._by_fd.values():
            outlet.leave()
            self._give_up(outlet)
        self._outlets.clear()
        self._by_fd.clear()

    def _give_up(self, outlet: _Outlet) -> None:
        if outlet.reads:
            outlet.reads = False
            self._plane.network.leave(outlet.connection)
        self._plane.network.arm(outlet.connection)

    # ---- within `with`

    def post(self, stream: PairStream, into: memoryview) -> None:
        """Receive a stream's next message there."""
        stream.expect(into)
        if stream.owes:
            self._queue(_Queued(stream, CREDIT, NOTHING, 0, 0))

    def send(self, stream: PairStream, data: memoryview, total: int, note: int = 0) -> None:
        """Send bytes of a message of `total` bytes, in order with others of the stream. `data` is read until `flush`."""
        self._queue(_Queued(stream, DATA, data, total, note))

    def _queue(self, queued: _Queued) -> None:
        outlet = self._outlets[queued.stream]
        outlet.queue.append(queued)
        if not outlet.full and not outlet.ended:
            self._try(outlet, outlet.send)

    def drive(self, ready: Callable[[], bool]) -> None:
        """Send and receive until `ready`; the streams' errors."""
        outlets = list(self._by_fd.values())
        idle = 0
        while not ready():
            again = False
            for outlet in outlets:
                if outlet.reads and outlet.readable:
                    self._try(outlet, outlet.receive)
                if (outlet.parts or outlet.queue) and not outlet.full and not outlet.ended:
                    self._try(outlet, outlet.send)
                again = again or (outlet.readable and outlet.reads)
            for stream in self.streams.values():
                if stream.failing:
                    stream.check()
            # Nothing could be read or sent: sleep until poll or the bell says otherwise.
            if not again and not ready():
                idle = 0 if self._sleep() else idle + 1
                if idle and idle % TEND == 0:
                    for outlet in outlets:
                        if outlet.full and not outlet.ended:
                            tcp.tend(outlet.connection.sock)

    def flush(self) -> None:
        """Send all that was queued."""
        outlets = list(self._by_fd.values())
        self.drive(lambda: not any(outlet.parts or outlet.queue for outlet in outlets))

    def _sleep(self) -> bool:
        """Wait until a connection can go on, for 100 ms at most. True if one can, or the bell has rung."""
        plane, poll = self._plane, self._poll
        for outlet in self._by_fd.values():
            if outlet.ended:
                continue
            reads = outlet.reads and not outlet.connection.stalled
            mask = (select.POLLIN if reads else 0) | (select.POLLOUT if outlet.full else 0)
            if mask != outlet.mask:
                outlet.mask = mask
                poll.modify(outlet.connection.fd, mask)
        ready = poll.poll(100)
        for fd, events in ready:
            if fd not in self._by_fd:
                plane.hear()
                continue
            if events & select.POLLOUT:
                self._by_fd[fd].full = False
            if events & ~select.POLLOUT:
                self._by_fd[fd].readable = True
        for stream in self.streams.values():
            stream.check()
        return bool(ready)

    def _try(self, outlet: _Outlet, work: Callable[[], None]) -> None:
        """The connection's end is an error only for messages that need it: their lane breaks then."""
        try:
            work()
        except (OSError, ValueError) as error:
            self._plane.network.lost(outlet.connection, error)
            outlet.ended = True
            self._poll.unregister(outlet.connection.fd)
            self._give_up(outlet)

    def scratch(self, nbytes: int) -> memoryview:
        """Memory for a collective's own use; what it held is not kept."""
        if len(self._scratch) < nbytes:
            self._scratch = memoryview(bytearray(nbytes))
        return self._scratch[:nbytes]
