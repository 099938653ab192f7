"""The connections of one worker to workers of other hosts, and the thread that accepts, reads and relays for it.

A thread that waits for a small message reads its connection itself, since to wake another thread costs more than to read. The
background thread takes the connection back once nobody has read it for a while. Large messages are always read by it, straight
into their memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gt.wire import tcp
from gt.worker.plane.net import handshake
from gt.worker.plane.net.handshake import Greeting
from gt.worker.plane.net.lane import Lane
from gt.worker.plane.net.peer_connection import (
    CREDIT,
    DATA,
    FAIL,
    HEADER,
    HEADER_BYTES,
    NOWAIT,
    Ended,
    Frame,
    Onward,
    PeerConnection,
    reason,
)
from gt.worker.plane.net.relay import PAUSE_BYTES, Relay
from gt.worker.plane.net.route import CONNECTED, Route, given_up, routes
from gt.worker.plane.net.strangers import Strangers, listen

log = logging.getLogger("gt.worker")

CONNECT_SECONDS = 3.0
MEET_SECONDS = 30.0  # that a process which listens may take for a connection
AGAIN_SECONDS = 0.2  # between two attempts
GRACE_SECONDS = 0.5  # from the end of a connection to that of waits on it: the dispatcher may say that the worker is lost
ENDED_SECONDS = 1.5  # pause after the other end has closed a connection, as a worker that ends does
TEND_SECONDS = 0.5  # between looks at connections
IDLE_SECONDS = 0.02  # seconds after which the background thread reads a connection that nobody has read
FULL_SECONDS = 0.01  # between two attempts to accept a connection without a free descriptor
MAX_NAMED_LANES = 1 << 13  # that a connection names first: one a worker behind it, in each epoch
READS_PER_TURN = 16  # reads of a connection before others are read
Pair = tuple[int, int]  # index of the other worker, epoch


class Network:
    """wake: called when a waiting thread should look again. failed(index, epoch, source, target, reason): a connection has."""

    def __init__(self, mark: int, wake: Callable[[], None], ports: Iterable[int]) -> None:
        self._mark, self._wake = mark, wake
        self.failed: Callable[[int, int, str, str, str], None] = lambda *_: None
        self.made: Callable[[int, int, str, str], None] = lambda *_: None  # as failed, of a connection that this end has made
        self.own = -1
        self.relay = Relay(self, wake)
        self.owned: set[PeerConnection] = set()
        self._lock = threading.Lock()  # guards the tables below; never held while waiting
        self._changed = threading.Condition(self._lock)  # they changed
        self._key = b""
        self._routes: dict[int, Route] = {}
        self._marks: dict[int, int] = {}
        self._ports: dict[int, int] = {}
        self._lanes: dict[Pair, Lane] = {}
        self._connections: dict[Pair, PeerConnection] = {}
        self._by_fd: dict[int, PeerConnection] = {}
        self._gone: set[int] = set()
        self._deadlines: list[tuple[float, PeerConnection, str]] = []
        self._tended = 0.0  # when connections were looked at
        self._connecting: set[Pair] = set()
        self._whys: dict[Pair, str] = {}  # why connections have ended
        self._threads: set[threading.Thread] = set()
        self._greetings: set[socket.socket] = set()  # that this end offers
        self._strangers = Strangers()
        self._closing = False
        self._listener = listen(ports)
        self.port: int = self._listener.getsockname()[1]
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._thread = threading.Thread(target=self._main, name="gt-net", daemon=True)
        self._thread.start()

    # ---- the world

    def introduce(self, rows: Sequence[Sequence[Any]], ways: Sequence[Sequence[Any]], key: str, own: int) -> None:
        """The newest workers and ways. Lanes of earlier epochs break: their messages are lost at one end at least."""
        with self._lock:
            if self._closing:
                return
            self.own, self._key = own, bytes.fromhex(key)
            marks = {row[0]: int(row[6].partition("-")[2] or "0", 16) for row in rows}
            # An index with another mark is a new process: the loss of the old one does not concern it.
            self._gone -= {index for index, mark in marks.items() if self._marks.get(index) != mark}
            self._marks, self._ports = marks, {row[0]: row[8] for row in rows}
            before, self._routes = self._routes, routes(ways, own)
            for (index, epoch), lane in self._lanes.items():
                if epoch != (route := self._routes.get(index, None)) and (route is None or route.epoch != epoch):
                    why = given_up(before.get(index), ways, self._whys.pop((index, epoch), ""))
                    lane.broken = lane.broken or why
            for pair, connection in list(self._connections.items()):
                route = self._routes.get(pair[0])
                # Connections of an older epoch end; one of a newer epoch may have been accepted before this world was known.
                if route is None or route.epoch > pair[1]:
                    connection.end()
            for route in self._routes.values():
                if route.kind in CONNECTED:
                    self._want(route)
            self._changed.notify_all()
        self._ring()
        self._wake()

    def _ring(self) -> None:
        """Have the background thread look again."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)

    def want(self, index: int) -> None:
        """A connection to a worker of this host is wanted, which is not made before."""
        with self._lock:
            if (route := self._routes.get(index)) is not None and route.kind == "shm":
                self._want(route)

    def _want(self, route: Route) -> None:
        """Connect, if it is this end that does: the other waits for it. With the lock."""
        pair = route.index, route.epoch
        known = pair in self._connections or pair in self._connecting or route.index in self._gone or self._closing
        # Of each pair the lower index connects, or both would, and one connection would have to be given up.
        if self.own < route.index and not known:
            self._start(self._connect, route)
            self._connecting.add(pair)

    def lane(self, index: int, epoch: int) -> Lane:
        """The lane of a pair; a frame may be here before this worker knows of the epoch."""
        lane = self._lanes.get((index, epoch))
        if lane is None:
            with self._lock:
                lane = self._lanes.setdefault((index, epoch), Lane(index, epoch))
                # The executing thread may be at a world whose successors are known here already.
                if index in self._gone:
                    lane.broken = "it is gone"
                elif (route := self._routes.get(index)) is not None and epoch < route.epoch:
                    lane.broken = lane.broken or "the way is given up for another"
        return lane

    def onward(self, target: int) -> PeerConnection | None:
        """The connection that another worker's frame takes from here, if there is one."""
        route = self._routes.get(target)
        leg = None if route is None else self._routes.get(route.next)
        return None if leg is None else self._connections.get((leg.index, leg.epoch))

    def lives(self, index: int) -> bool:
        """True unless that worker is known to be lost."""
        return index not in self._gone

    def forget_old_lanes(self, known: set[Pair]) -> None:
        """Forget lanes that no message will use again: those before the world that the executing thread has reached."""
        newest: dict[int, int] = dict(known)
        with self._lock:
            old = {pair: lane for pair, lane in self._lanes.items() if pair[1] < newest.get(pair[0], 1 << 62)}
            self._lanes = {pair: lane for pair, lane in self._lanes.items() if pair not in old}
        for lane in old.values():
            lane.close()

    def gone(self, index: int) -> None:
        """A worker is lost: its connection ends, and so does all that it relayed."""
        with self._lock:
            self._gone.add(index)
            for (other, _), lane in self._lanes.items():
                route = self._routes.get(other)
                if other == index:
                    lane.broken = lane.broken or "it is gone"
                elif route is not None and index in route.relays:
                    lane.broken = lane.broken or f"worker {index}, which relayed, is gone: the way was {route.whole}"
            for (other, _), connection in self._connections.items():
                if other == index:
                    connection.end()
            self._changed.notify_all()

    def close(self) -> None:
        with self._lock:
            self._closing = True
            for sock in self._greetings:
                tcp.shut_down(sock)
            self._strangers.end()
            for connection in self._connections.values():
                connection.end()
            self._changed.notify_all()
        self._ring()
        self._thread.join()
        for thread in list(self._threads):
            thread.join()
        ending = [connection for _, connection, _ in self._deadlines]
        for connection in {*self._connections.values(), *self._by_fd.values(), *ending}:
            connection.close()
        self._connections.clear()
        self._by_fd.clear()
        self._listener.close()
        self._epoll.close()
        os.close(self._bell)

    # ---- a waiting thread

    def connection(self, index: int, epoch: int) -> PeerConnection | None:
        """The connection that frames to a worker take; None while there is none."""
        route = self._routes.get(index)
        if route is None or route.epoch != epoch:
            return self._connections.get((index, epoch))  # a direct one of an earlier world
        if route.next == index:
            return self._connections.get((index, epoch))
        leg = self._routes.get(route.next)
        return None if leg is None else self._connections.get((leg.index, leg.epoch))

    def read(self, connection: PeerConnection, over: Callable[[], bool], alone: bool = False) -> bool:
        """Read a connection in this thread until over(), or nothing has arrived for PATIENCE_SECONDS. False if it cannot.

        alone: others are not read by this thread meanwhile.
        """
        if alone and len(self.owned) > connection.owned:
            self.release()
        if connection.ended or not connection.reading.acquire(False):
            return False
        try:
            connection.touched = True
            if not connection.owned:
                self._own(connection)
            connection.deal()
            while not over() and not connection.ended and not connection.stalled:
                connection.read()
        except BlockingIOError:  # nothing for PATIENCE_SECONDS
            pass
        except (OSError, ValueError) as error:
            self.lost(connection, error)
        finally:
            connection.reading.release()
        return not connection.ended and not connection.stalled

    def take(self, connection: PeerConnection) -> bool:
        """Have this thread alone read a connection until `leave`. False if another thread goes on reading it."""
        if not connection.reading.acquire(timeout=1.0):
            return False
        connection.touched = True
        if not connection.owned:
            self._own(connection)
        return True

    def leave(self, connection: PeerConnection) -> None:
        """The connection is not read by this thread now. It is the background thread's unless it is taken again soon."""
        connection.reading.release()

    def release(self) -> None:
        """Let the background thread read all connections again."""
        for connection in list(self.owned):
            self._disown(connection)

    def _own(self, connection: PeerConnection) -> None:
        connection.owned = True
        self.owned.add(connection)
        self.arm(connection)
        if len(self.owned) == 1:
            self._ring()  # from now on it looks who has been read lately

    def _disown(self, connection: PeerConnection) -> None:
        connection.owned = False
        self.owned.discard(connection)
        self.arm(connection)

    def arm(self, connection: PeerConnection) -> None:
        """Wait for what is to be done at a connection."""
        with self._lock:
            if connection.ended or self._by_fd.get(connection.fd) is not connection:
                return
            # A thread that waits reads an owned connection itself; a stalled one is not read for want of room onward. Neither
            # may wake the background thread by level-triggered input.
            held = connection.owned or connection.stalled
            mask = (0 if held else select.EPOLLIN) | (select.EPOLLOUT if connection.relayed or connection.paused else 0)
            if connection.stalled and not mask:
                mask = select.EPOLLET  # the end of a connection is always told: once now, since it cannot be read
            if mask != connection.mask:
                connection.mask = mask
                self._epoll.modify(connection.fd, mask)

    # ---- frames, in the thread that reads

    def passage(self, connection: PeerConnection, frame: Frame) -> Onward | None:
        return None if frame.target == self.own else self.relay.passage(connection, frame)

    def pass_on(self, connection: PeerConnection, passage: Onward) -> None:
        self.relay.pass_on(connection, passage)

    def begin(self, connection: PeerConnection, frame: Frame) -> memoryview:
        connection.placed = None
        if frame.target != self.own:
            whole = memoryview(bytearray(HEADER_BYTES + frame.nbytes))
            HEADER.pack_into(whole, 0, *frame._replace(hops=frame.hops + 1))
            return whole[HEADER_BYTES:]
        if frame.kind == DATA:
            lane = self._named(connection, frame)
            with lane.lock:
                incoming = lane.incoming(frame.key)
                # If a receive is posted already, the payload goes straight into its memory; else into a buffer until one is.
                place = incoming.begin(frame.nbytes, frame.total, frame.note, connection.early)
            if place is not None:
                connection.placed = incoming
                return place
        return memoryview(bytearray(frame.nbytes))

    def _named(self, connection: PeerConnection, frame: Frame) -> Lane:
        if (frame.source, frame.epoch) not in self._lanes:
            connection.named += 1
            if connection.named > MAX_NAMED_LANES:
                raise Ended(f"it named more than {MAX_NAMED_LANES} pairs of workers and epochs")
        return self.lane(frame.source, frame.epoch)

    def arrived(self, connection: PeerConnection, count: int) -> None:
        if connection.placed is not None:
            connection.placed.arrived(count)
            if not connection.owned:
                self._wake()

    def end(self, connection: PeerConnection, frame: Frame, payload: memoryview) -> None:
        if frame.target != self.own:
            self.relay.forward(connection, frame, memoryview(payload.obj))
            return
        lane = self._named(connection, frame)
        with lane.lock:
            # Credit rides on frames of any kind: the peer has consumed so much of this worker's messages.
            if frame.credit:
                lane.credit(frame.key, frame.credit)
            if connection.placed is not None:
                connection.placed.end()
            elif frame.kind == DATA:
                lane.incoming(frame.key).buffer(frame.total, frame.note, payload)
            elif frame.kind == FAIL:
                lane.fail(frame.key, bytes(payload).decode("utf-8", "replace"))
            elif frame.kind != CREDIT:
                raise Ended(f"it sent a frame of kind {frame.kind}")
        if not connection.owned:
            self._wake()

    # ---- connections

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        """Run a short work in a thread of its own. With the lock."""

        def run() -> None:
            try:
                work(*args)
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name="gt-net-meet", daemon=True)
        thread.start()
        self._threads.add(thread)  # only now: `close` joins it. It cannot end before, for want of the lock

    def _connect(self, route: Route) -> None:
        """Connect. A process that answers and is busy, or does not know this world yet, is asked again: its link is whole."""
        until, why = time.monotonic() + MEET_SECONDS, ""
        try:
            while not why and not self._over(route):
                try:
                    sock = self._meet(route.index, route.epoch, route.source, route.target)
                    self._enter(sock, (route.index, route.epoch), route.source, route.target)
                    return self.made(route.index, route.epoch, route.source, route.target)
                # The other end listens, and is not ready: asked for MEET_SECONDS. Other errors are the network's, and final.
                except (handshake.Later, ConnectionResetError, BrokenPipeError) as error:
                    why = reason(error) if time.monotonic() >= until else ""
                    with self._changed:
                        self._changed.wait(AGAIN_SECONDS)
                except OSError as error:
                    why = reason(error)
        finally:
            with self._lock:
                self._connecting.discard((route.index, route.epoch))
        if not self._over(route):
            self._report(route.index, route.epoch, route.source, route.target, f"no connection: {why}")

    def _over(self, route: Route) -> bool:
        """True if nobody wants a connection of this route any more."""
        with self._lock:
            return self._closing or route.index in self._gone or self._routes.get(route.index) != route

    def probe(self, index: int, source: str, target: str) -> None:
        """Have a worker prove itself between two addresses, on a connection that ends with that. OSError where it does not."""
        self._meet(index, handshake.PROBE, source, target).close()

    def _meet(self, index: int, epoch: int, source: str, target: str) -> socket.socket:
        """A connection to a worker, which has proved who it is."""
        sock = socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_STREAM)
        try:
            with self._lock:
                self._greetings.add(sock)
                key, marks, port = self._key, self._marks, self._ports.get(index, 0)
            tcp.connect(sock, source, (target, port), CONNECT_SECONDS)
            handshake.offer(sock, Greeting(self.own, index, epoch, self._mark, marks.get(index, 0)), key)
            return sock
        except OSError:
            sock.close()
            raise
        finally:
            with self._lock:
                self._greetings.discard(sock)

    def _greet(self, sock: socket.socket, address: str) -> None:
        try:
            greeting = handshake.accept(sock, self._key_of, self._mark)
            route = self._routes[greeting.source]
            # Past this line the peer has proved the key, and no longer counts against the limit for strangers.
            if not self._strangers.remove(sock):
                raise handshake.Later("too many connections wait for a handshake")
            handshake.welcome(sock)
            if greeting.epoch == handshake.PROBE:
                sock.close()
            else:
                self._enter(sock, (greeting.source, greeting.epoch), route.source, route.target)
        except (OSError, KeyError) as error:
            log.debug("a connection from %s was refused: %s", address, error)
            self._strangers.remove(sock)
            sock.close()

    def _key_of(self, greeting: Greeting) -> bytes | None:
        """The key, once this worker knows the world of the greeting."""
        until = time.monotonic() + handshake.SECONDS
        with self._changed, self._strangers.waiting() as may_wait:
            while not self._closing:
                route = self._routes.get(greeting.source)
                if route is not None and route.epoch >= greeting.epoch:
                    # Marks and epoch must be those of the world: an old process, or one of another cluster under the same
                    # index, is refused.
                    epoch = greeting.epoch and route.epoch
                    want = Greeting(greeting.source, self.own, epoch, self._marks.get(greeting.source, 0), self._mark)
                    return self._key if greeting == want and self._key else None
                left = until - time.monotonic()
                if left <= 0 or not may_wait:  # the other end asks again
                    return None
                self._changed.wait(left)
        return None

    def _enter(self, sock: socket.socket, pair: Pair, source: str, target: str) -> None:
        """A connection is made."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tcp.watch(sock)
        connection = PeerConnection(sock, *pair, source, target, self)
        with self._lock:
            if self._closing or pair in self._connections or pair[0] in self._gone:
                return sock.close()
            self._connections[pair] = self._by_fd[connection.fd] = connection
            connection.mask = select.EPOLLIN
            self._epoll.register(connection.fd, select.EPOLLIN)
            self._changed.notify_all()
        self._ring()
        log.debug("connected with worker %d, %s to %s", pair[0], source, target)
        self._wake()

    def lost(self, connection: PeerConnection, cause: OSError | ValueError) -> None:
        """A connection has ended, or a frame is wrong. Waits on it end after a grace, unless the dispatcher calls it lost."""
        error = cause if isinstance(cause, OSError) else Ended(str(cause))
        with self._lock:
            if connection.ended or self._by_fd.get(connection.fd) is not connection:
                return
            # Under the lock, once: the reading, the sending and the background thread may all notice the same end.
            del self._by_fd[connection.fd]
            self._epoll.unregister(connection.fd)
            self.owned.discard(connection)
            connection.ended = True
            cut = error.errno in tcp.CUT
            self._whys[connection.index, connection.epoch] = reason(error)
            if not self._closing:
                until = time.monotonic() + (GRACE_SECONDS if cut else ENDED_SECONDS)
                self._deadlines.append((until, connection, reason(error)))
        connection.end()
        self.relay.resume(connection)
        route = self._routes.get(connection.index)
        # Only a broken link is reported. A process that ended is the dispatcher's to notice, by that worker's link.
        if cut and connection.index not in self._gone and route is not None and route.epoch == connection.epoch:
            self.failed(connection.index, connection.epoch, connection.source, connection.target, reason(error))
        self._ring()

    def _report(self, index: int, epoch: int, source: str, target: str, why: str) -> None:
        """Waits on a connection end now."""
        text = f"the connection {source} to {target} failed: {why}"
        self.lane(index, epoch).broken = text
        with self._lock:
            newest = (route := self._routes.get(index)) is not None and route.epoch == epoch
            for (other, _), lane in self._lanes.items():
                route = self._routes.get(other)
                if newest and route is not None and route.next == index and route.epoch == lane.epoch:
                    lane.broken = lane.broken or text
        if newest:
            self.failed(index, epoch, source, target, why)
        self._wake()

    # ---- the background thread

    def _main(self) -> None:
        while not self._closing:
            try:
                ready = self._epoll.poll(self._pause())
            except InterruptedError:
                continue
            for fd, events in ready:
                if fd == self._bell:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._bell)
                elif fd == self._listener.fileno():
                    self._accept()
                elif (connection := self._by_fd.get(fd)) is not None:
                    self._serve(connection, events)
            self.relay.forward_early()
            self._tick()

    def _pause(self) -> float:
        if self.owned:
            return IDLE_SECONDS
        if self._deadlines:
            return max(0.0, min(when for when, _, _ in self._deadlines) - time.monotonic())
        return TEND_SECONDS if self._by_fd else -1

    def _serve(self, connection: PeerConnection, events: int) -> None:
        if events & select.EPOLLOUT:
            try:
                free = connection.relay()
            except OSError as error:
                self.lost(connection, error)
                return
            # Half of the limit, so that reading does not stop and go for each frame.
            if connection.relayed_bytes <= PAUSE_BYTES // 2:
                self.relay.resume(connection)
            if not free:
                time.sleep(0)  # another thread sends
            self.arm(connection)
        ended = events & (select.EPOLLHUP | select.EPOLLERR)
        if (ended or (events & select.EPOLLIN and not connection.owned)) and connection.reading.acquire(blocking=False):
            try:
                connection.deal()
                for _ in range(READS_PER_TURN):
                    if not connection.read(NOWAIT) or not (ended or connection.mask & select.EPOLLIN):
                        break
            except BlockingIOError:
                pass
            except (OSError, ValueError) as error:
                self.lost(connection, error)
            finally:
                connection.reading.release()

    def _tick(self) -> None:
        # A waiting thread that has stopped reading a connection (it computes now) gives it back after one tick without a read.
        for connection in list(self.owned):
            if connection.touched:
                connection.touched = connection.reading.locked()
            elif connection.reading.acquire(blocking=False):
                try:
                    self._disown(connection)
                finally:
                    connection.reading.release()
        now = time.monotonic()
        if now >= self._tended + TEND_SECONDS:
            self._tended = now
            for connection in self._by_fd.copy().values():
                if (silence := connection.tend()) is not None:
                    self.lost(connection, silence)
        for row in [row for row in self._deadlines if row[0] <= now]:
            self._deadlines.remove(row)
            _, connection, why = row
            if not self._closing:
                with self._lock:
                    # If the dispatcher has called the worker lost meanwhile, its word is the cause.
                    over = connection.index in self._gone
                    if self._connections.get((connection.index, connection.epoch)) is connection:
                        del self._connections[connection.index, connection.epoch]
                connection.close()
                if not over:
                    self._report(connection.index, connection.epoch, connection.source, connection.target, why)

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError):  # such as too few descriptors: it stays to be accepted
                time.sleep(FULL_SECONDS)
            return
        with self._lock:
            if not self._closing:
                self._strangers.add(sock)
                with contextlib.suppress(RuntimeError):  # too many threads
                    self._start(self._greet, sock, address[0])
                    return
        self._strangers.remove(sock)
        sock.close()
