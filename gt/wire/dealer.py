"""A client's or worker's end of a link: an I/O thread, whose turns a sending or waiting thread may take over."""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import garbage

from gt import errors
from gt.errors import Refused
from gt.wire import codec, tcp
from gt.wire.access.approach import Approach
from gt.wire.connections import cut
from gt.wire.liveness import POLLS_PER_HEARTBEAT, Cable, Vigil
from gt.wire.messages import CHUNK, Exit, Message, Reject, Welcome
from gt.wire.process_settings import plenty_of_cores
from gt.wire.signals import uncollected, uninterrupted
from gt.wire.socket import (
    BURST_MESSAGES,
    GONE,
    LINGER_SECONDS,
    NOW,
    Frames,
    descriptor_of,
    events_of,
    frames_of,
    monitored,
    place,
    put,
    terminate,
)

log = logging.getLogger("gt.wire")

TURN_SECONDS = 0.01  # seconds between two calls of on_turn, at most
# Seconds that a leading thread polls if its last wait was shorter: waking a core takes longer than a turn. The second is for
# hosts of many cores, where workers do it too
SPIN_SECONDS, LONG_SPIN_SECONDS = 0.001, 0.005
STEP_SECONDS = 0.1  # seconds that a leading thread sleeps, at most
_IN, _OUT = int(zmq.POLLIN), int(zmq.POLLOUT)
_open_dealers: set[int] = set()


@dataclass(frozen=True)
class LinkTimeouts:
    """connect: seconds until the dispatcher has to be reached; None: no limit. heartbeat: seconds that it may be stopped."""

    connect: float | None = 10.0
    heartbeat: float = 10.0


DEFAULT_TIMEOUTS = LinkTimeouts()


class Dealer:
    """A link to the dispatcher. Callbacks must not wait for messages of the link.

    on_message(message, frames): called for each message.
    on_turn(): called in each turn, every 10 ms at the latest; it may call send.
    on_lost(reason): called once, when the dispatcher dies, is not reached within `timeouts.connect`, or is stopped for
        `timeouts.heartbeat`. If its process cannot be seen, several times that of silence count. Not called after close() or a
        Reject.

    A turn is one round of work at the socket: receive, call back, send. The link has a thread that takes turns. A thread that
    sends (`push`) or waits (`lead`) takes turns itself, which saves waking one thread to wake another. Meanwhile the link's
    thread stays aside: it sleeps until its next turn is due. One thread at a time uses the socket. A thread leaves work at
    the socket only where another thread is about to take a turn, since libzmq signals new messages once.
    """

    def __init__(
        self,
        address: str,
        on_message: Callable[[Message, tuple[Any, ...]], None],
        on_lost: Callable[[str], None],
        *,
        on_turn: Callable[[], None] | None = None,
        timeouts: LinkTimeouts = DEFAULT_TIMEOUTS,
        token: str = "",
    ) -> None:
        self.address = address
        self.messages_sent = self.bytes_sent = 0
        self._on_message, self._on_lost, self._on_turn = on_message, on_lost, on_turn
        self._wait, self._heartbeat = timeouts.connect, timeouts.heartbeat
        self._approach = Approach(address, *place(address), token, self._heartbeat)
        self._queue: deque[list[Any]] = deque()
        # Descriptors that wake a sleeping thread: the link's own (`_bell`), and the one that leads (`_call`).
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._call = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = self._over = self._deaf = False
        self._pid = os.getpid()
        self._lock = threading.Lock()  # held to ring a bell and to close it
        self._using = threading.Lock()  # held to touch the socket
        self._user = 0  # the thread in a turn
        self._leading = threading.Lock()
        self._leader = 0
        self._quick = False  # True if a leader's last wait was short
        self._spin = LONG_SPIN_SECONDS if plenty_of_cores() else SPIN_SECONDS if on_turn is not None else 0.0
        self._aside = 0.0  # time until which the link's thread leaves messages to others
        self._due = 0.0  # time of the next turn, 10 ms after the last that a sending thread took
        self._fault: Exception | None = None  # error of a turn in another thread
        self._sock: zmq.Socket | None = None  # once connected, until closed
        self._vigil: Vigil | None = None  # once the dispatcher has named its process
        self._next_poll = 0.0  # time of the next look at it
        self._thread = threading.Thread(target=self._main, name="gt-link", daemon=True)
        _open_dealers.add(id(self))
        self._thread.start()

    def send(self, message: Message, frames: Frames = (), wake: bool = True) -> None:
        """Queue a message, from any thread. Frames are read later and must not change. Dropped after the link's end.

        wake=False: leave it for the next turn, which another message is about to cause.
        """
        body = codec.pack(message)
        if self._over:
            return
        nbytes = len(body) + sum(memoryview(frame).nbytes for frame in frames)
        self.messages_sent += 1
        self.bytes_sent += nbytes
        # The server ends a connection with a long unfinished message, so a larger one is divided, see connections.py.
        if nbytes <= 2 * CHUNK and len(body) <= CHUNK:
            self._queue.append([body, *frames])
        else:
            self._queue.extend(cut(body, tuple(frames), CHUNK))
        if wake:
            self.wake()

    def watch_host(self) -> None:
        """Have the connection end soon after the server's host is gone, unless that is this host."""
        tcp.watch_descriptor(self._approach.descriptor)

    def close(self) -> None:
        """Send queued messages (for at most LINGER_SECONDS), then leave no thread and no socket behind."""
        # A fork has a copy of this object, and neither its threads nor a right to its socket.
        if self._pid != os.getpid():
            return
        self._closing = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def connected(self) -> bool:
        """True from the end of the handshake to that of the link."""
        return self._sock is not None

    @property
    def inside(self) -> bool:
        """True in a callback of this link."""
        return self._user == threading.get_ident()

    def wake(self) -> None:
        """Have the link's thread take a turn now."""
        if not self.inside:
            self._ring(self._bell)

    def push(self) -> None:
        """Take a turn now, in this thread unless another thread is in a turn."""
        if self.inside:
            return
        # With work left, or another thread in a turn, the link's thread
        # has to look again. Otherwise it may sleep until its turn.
        if self._sock is None or self._turn_here() is not False:
            self.wake()
        else:
            self._aside = self._due = time.monotonic() + TURN_SECONDS

    def lead(self, done: Callable[[], bool], limit: float = float("inf")) -> bool:
        """Take turns until done(), for `limit` seconds at most, and return done().

        Returns at once if another thread leads, before there is a connection, and after its end. A signal interrupts it.
        """
        # One thread leads. Others sleep, and are woken by the callback that has what they wait for.
        if self._sock is None or self.inside or not self._leading.acquire(blocking=False):
            return done()
        try:
            self._leader = threading.get_ident()
            self._take_the_lead(done, time.monotonic() + limit)
        finally:
            self._leader = 0
            self._aside = time.monotonic() + TURN_SECONDS
            self._leading.release()
        return done()

    def resume(self) -> None:
        """Let the link's thread receive messages at once again."""
        self._aside = 0.0
        self.wake()

    def _take_the_lead(self, done: Callable[[], bool], end: float) -> None:
        poller = select.poll()
        poller.register(self._call, select.POLLIN)
        poller.register(self._descriptor, select.POLLIN)

        # Spin only if the last answer came at once: then the next one
        # probably does, and sleeping would cost more than the wait.
        start = time.monotonic()
        spin = start + self._spin if self._quick else start
        while not done() and not self._over:
            now = time.monotonic()
            self._aside = now + 2 * STEP_SECONDS
            more = self._turn_here()
            # The link's thread is in a turn, and may be past the sending.
            if more is None:
                self.wake()
            if done() or self._over or now > end:
                break

            # Sleep until a message or a call, for STEP_SECONDS at most: `_aside` has to be renewed in time.
            ready = poller.poll(0)
            while not (ready or more) and time.monotonic() < spin:
                os.sched_yield()
                ready = poller.poll(0)
            for fd, _ in ready or poller.poll(0 if more else min(STEP_SECONDS, max(0.0, end - now)) * 1000):
                if fd == self._call:
                    os.eventfd_read(fd)
        self._quick = time.monotonic() - start < self._spin

    def _turn_here(self) -> bool | None:
        """Take a turn in the calling thread: True if work is left; None if no turn could be taken."""
        # A KeyboardInterrupt within a turn would leave half a message at the socket, or the lock held.
        with uninterrupted(), uncollected:
            if not self._using.acquire(blocking=False):
                return None
            try:
                return None if self._sock is None else self._turn(self._sock)
            except Exception as error:
                self._fault = error  # ends the link
                self._ring(self._bell)
                return None
            finally:
                self._using.release()

    def _ring(self, bell: int) -> None:
        with self._lock:
            if not self._over and self._pid == os.getpid():
                os.eventfd_write(bell, 1)

    # ---- at the socket, one thread at a time

    def _turn(self, sock: zmq.Socket) -> bool:
        """Receive, call back, send. True if work is left."""
        self._user = threading.get_ident()
        try:
            came = self._receive(sock)
            if self._on_turn is not None:
                self._on_turn()
            sent = self._transmit(sock)
            # What the leading thread waits for may be among the messages that this thread has received.
            if came and self._leader and self._leader != self._user:
                self._ring(self._call)
            # Reading the events has consumed the signal of the descriptor for what came before. After a use of the socket, more
            # may be there without a signal
            return (came or sent) and bool(events_of(sock) & (_IN | (_OUT if self._queue else 0)))
        finally:
            self._user = 0

    def _receive(self, sock: zmq.Socket, burst: int = BURST_MESSAGES) -> bool:
        """Receive up to `burst` messages. True if there was one."""
        for count in range(burst):
            if not events_of(sock) & _IN:
                return count > 0
            body = sock.recv(NOW)
            frames = frames_of(sock)
            message = codec.unpack(body)
            # After Exit the server reads no more, so close() need not wait for what is queued.
            self._deaf |= type(message) is Exit
            # From here on the server's process can be watched, if it is on this host.
            if type(message) is Welcome:
                match message.process:
                    case [int(pid), str(home)]:
                        self._vigil = Vigil(pid, home, POLLS_PER_HEARTBEAT)
            self._on_message(message, frames)
        return True

    def _transmit(self, sock: zmq.Socket) -> bool:
        """Send what is queued. True if there was something."""
        queue, tried = self._queue, False
        while queue:
            tried = True
            try:
                put(sock, queue[0])
            except zmq.Again:
                break
            queue.popleft()  # only once it is sent: zmq.Again leaves the message in its place
        return tried

    # ---- in the link's thread

    def _main(self) -> None:
        context = zmq.Context(io_threads=1)
        try:
            reason = self._arrive(context) or self._serve()
        except Exception as error:  # any error of a callback ends the link, with this reason
            log.exception("the link to %s failed", self.address)
            reason = f"the link to {self.address} failed: {type(error).__name__}: {error}"
        finally:
            # Other threads first, then the socket, then its context: the reverse of how they began.
            self._close_bells()
            self._queue.clear()
            self._approach.close(int(LINGER_SECONDS * 1000) if self._closing and not self._deaf else 0)
            terminate(context)
            self._stop_helper()
        if reason and not self._closing:
            self._on_lost(reason)

    def _close_bells(self) -> None:
        """End all use of the socket by other threads."""
        # 1. No turn begins any more; one under way is waited for.
        with self._using:
            self._sock = None
        # 2. A leading thread is woken and returns. Only then may its descriptor be closed: a reused number would be another's.
        with self._lock:
            self._over = True
            os.eventfd_write(self._call, 1)
        led = self._leading.acquire(timeout=LINGER_SECONDS)  # never released again
        with self._lock:
            os.close(self._bell)
            if led:
                os.close(self._call)

    def _stop_helper(self) -> None:
        """Stop pyzmq's helper thread for uncopied frames with the last link. It is started again when needed."""
        _open_dealers.discard(id(self))
        if not _open_dealers and garbage.gc.thread is not None and not garbage.gc.refs:
            garbage.gc.stop()

    def _arrive(self, context: zmq.Context) -> str:
        """Wait for a connection, or close(); the reason if there will be none, else "". Nothing is sent before.

        A server sends no Reject to a peer without a key. So this end turns a refusal into a Reject, which ends the link.
        """
        deadline = math.inf if self._wait is None else time.monotonic() + self._wait
        approach = self._approach
        bell = select.poll()
        bell.register(self._bell, select.POLLIN)
        # Attempts until one connects, none can, or the time is over. A pause ends early when close() rings.
        while not self._closing:
            if approach.attempt(context, self._bell, deadline, lambda: self._closing):
                assert approach.sock is not None
                self._descriptor = descriptor_of(approach.sock)
                self._sock = approach.sock
                break
            if refusal := approach.refusal(patient=self._wait is None):
                self._on_message(Reject(errors.to_wire(Refused(refusal))), ())
                break
            if time.monotonic() > deadline:
                assert self._wait is not None
                return approach.why(self._wait)
            end = time.monotonic() + approach.pause
            while not self._closing and (left := end - time.monotonic()) > 0:
                if bell.poll(left * 1000):
                    os.eventfd_read(self._bell)
        return ""

    def _serve(self) -> str:
        """Take turns until the link ends; the reason of the end, "" after close()."""
        sock, monitor = self._sock, self._approach.monitor
        if sock is None or monitor is None:
            return ""

        # While another thread takes the turns, this one polls only the bell and the monitor (`few`).
        events = descriptor_of(monitor)
        full, few = select.poll(), select.poll()
        for what in (events, self._bell):
            full.register(what, select.POLLIN)
            few.register(what, select.POLLIN)
        full.register(self._descriptor, select.POLLIN)
        cable = Cable(self._approach.descriptor, self._heartbeat)
        more, last = True, 0.0
        while True:
            aside = not more and time.monotonic() < self._aside
            ready = (few if aside else full).poll(TURN_SECONDS * 1000 if aside else 0 if more else self._pause())

            # A sending thread took its turn meanwhile, and would have to wait for the interpreter.
            if aside and not ready and (now := time.monotonic()) < self._due and now - last < STEP_SECONDS:
                continue
            # The leading thread receives it.
            if len(ready) == 1 and ready[0][0] == self._descriptor and time.monotonic() < self._aside:
                continue
            if any(fd == self._bell for fd, _ in ready):
                os.eventfd_read(self._bell)

            # Its own turn: first the reasons to end, then the messages.
            last = time.monotonic()
            with uncollected, self._using:
                if self._fault is not None:
                    raise self._fault
                if self._watch(sock, monitor):
                    return f"the connection to the server at {self.address} was lost"
                if ended := self._ended(cable):
                    return f"the connection to the server at {self.address} was lost: {ended}"
                more = self._turn(sock)
                if self._closing:
                    return self._flush(sock)

    def _watch(self, sock: zmq.Socket, monitor: zmq.Socket) -> bool:
        """True once the connection has ended, and its last messages have been received."""
        if not any(event == GONE for event, _ in monitored(monitor)):
            return False
        # The server's last messages, such as an Exit with its reason, are in the queue already.
        self._user = threading.get_ident()
        self._receive(sock, burst=1 << 20)
        return True

    def _ended(self, cable: Cable) -> str:
        """The reason, once it is certain that the dispatcher's process is stopped or its host is gone, else ""."""
        if (now := time.monotonic()) < self._next_poll:
            return ""
        self._next_poll = now + self._heartbeat / POLLS_PER_HEARTBEAT
        return cable.poll() or ("" if self._vigil is None else self._vigil.poll())

    def _pause(self) -> int:
        """Milliseconds to sleep in poll."""
        return int(1000 * (TURN_SECONDS if self._on_turn is not None else min(1.0, self._heartbeat / POLLS_PER_HEARTBEAT)))

    def _flush(self, sock: zmq.Socket) -> str:
        deadline = time.monotonic() + LINGER_SECONDS
        while self._queue and not self._deaf and (left := deadline - time.monotonic()) > 0:
            sock.poll(int(left * 1000), zmq.POLLOUT)
            self._transmit(sock)
        return ""
