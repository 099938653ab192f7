"""The shell around the core: bytes in, events to the core, its actions executed. Decides nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from gt import env
from gt.dispatcher.events import (
    Action,
    Close,
    Event,
    Examine,
    Examined,
    Lines,
    Log,
    Malformed,
    PeerLost,
    Received,
    Send,
    Tick,
    Turn,
    TurnWanted,
)
from gt.dispatcher.fairness.arrivals import Arrivals
from gt.dispatcher.fairness.background import Background
from gt.dispatcher.fairness.descriptors import Reserve
from gt.dispatcher.fairness.time_slices import Pace
from gt.dispatcher.instruction_log import InstructionLog
from gt.errors import ProtocolError, Refused, to_wire
from gt.wire import codec, liveness
from gt.wire.access import auth
from gt.wire.access.auth import Access, weakness
from gt.wire.link import Gate
from gt.wire.messages import Exit, Goodbye, Hello, Reject, Welcome
from gt.wire.process_settings import CycleCollector
from gt.wire.router import Arrived, Gone, Router
from gt.wire.socket import written

if TYPE_CHECKING:
    from gt.dispatcher.cluster.leases import Terms

log = logging.getLogger("gt.dispatcher")

TICK_SECONDS = 0.25  # seconds
BUSY_SECONDS = 0.005  # seconds after which messages wait for the next turn, and the sockets are looked at
MOST_WAITING = 64  # events that are received and not handled, at most, but for those of connections that have ended


class CoreLike(Protocol):
    """The part of Core that the shell calls; a test gives another."""

    def handle(self, event: Event) -> list[Action]: ...


class Server:
    """Bound on construction (Refused if that fails), then `run` until `stop`, which any thread or signal may call."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        access: Access | None = None,
        heartbeat: float = 10.0,
        core: CoreLike | None = None,
        terms: Terms | None = None,
    ) -> None:
        self._call = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # a thread wants the baton
        self._called = False
        self._background = Background(self._wake)
        self._pace = Pace(time.monotonic, background=self._background)
        if core is None:
            from gt.dispatcher.cluster.leases import Terms
            from gt.dispatcher.core import Core  # a test brings its own and needs none of it

            logged = bool(env.get("GT_INSTRUCTION_LOG"))
            terms = replace(terms or Terms(), link_secret=auth.made(), life=secrets.token_hex(8))
            core = Core(heartbeat, logged, liveness.process(), terms, self._pace)
        self._core = core

        # Bound here, so that the caller learns of a port in use before `run`.
        self._journal = _journal(env.get("GT_INSTRUCTION_LOG"))
        self._router = Router(host, port, heartbeat, access)
        if access is not None and (weak := weakness(access.token)):
            log.warning("%s", weak)
        self.host, self.port = host, self._router.port

        # Peers by the identity of their connection: one has a gate from its first message on, a name once it is welcomed.
        self._gates: dict[bytes, Gate] = {}
        self._workers: set[bytes] = set()
        self._names: dict[bytes, str] = {}  # names of peers that were welcomed
        self._parted: set[bytes] = set()  # peers that are done with, until their connection ends
        self._held: dict[bytes, Hello] = {}  # Hello of each peer that waits for free descriptors
        self.on_workers: Callable[[int], None] | None = None  # told how many workers there are, when that changes
        self._start = time.monotonic()
        self._cycles = CycleCollector()
        self._reason = ""
        self._items: Arrivals[Arrived | Gone] = Arrivals()  # events that came and are not handled yet
        self._again = False  # the core wants a turn
        self._event: Event | None = None  # the last that was handled
        self._busiest: Event | None = None  # the event that took longest in the last turn

        # `stop` rings the bell from any thread or signal handler; threads of long passes ring `_call`. Both wake `poll`.
        self._ringing = threading.RLock()  # a signal may come while the bell is closed
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._router.watch(self._bell)
        self._router.watch(self._call)
        descriptors = self._router.descriptors
        self._reserve = Reserve(self.port, lambda: descriptors(self._gates), lambda: descriptors(self._parted))

    @property
    def address(self) -> str:
        return written(self.host.partition(",")[0], self.port)

    @property
    def worker_names(self) -> list[str]:
        """Names of the workers that are connected. Any thread may ask: one that has just gone has no name any more."""
        return sorted(name for peer in self._workers if (name := self._names.get(peer)))

    def stop(self, reason: str = "it was told to stop") -> None:
        self._reason = self._reason or reason
        with self._ringing:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def run(self) -> None:
        """Serve until stopped; then tell every peer, and leave no socket behind."""
        next_tick = time.monotonic()
        try:
            while not self._reason:
                # 1. Look at the sockets, also while some peers' messages wait: another's may have come. Few are received, and
                # further ones wait in libzmq's bounded queues, of which it reads in turn.
                alone = self._look(next_tick) if len(self._items) < MOST_WAITING else None
                # 2. A thread has rung. Two may ring before one look, whose read takes both.
                if self._called:
                    self._called = False
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._call)

                # 3. Messages, then a slice of long work, then a tick if one is due.
                begin = time.monotonic()
                self._serve(begin, alone)
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + TICK_SECONDS
                    self._tick()
                    now = time.monotonic()
                self._pace.lag.turn(now - begin, self._blame, now - self._start)
        finally:
            self._close()

    def _look(self, next_tick: float) -> Arrived | Gone | None:
        """Take in arrived messages. The usual case is one event while none waits: it is returned, and needs no queue."""
        items = self._items
        idle = not items
        wait = max(0.0, min(TICK_SECONDS, next_tick - time.monotonic())) if idle and not self._again else 0.0
        events = self._router.poll(wait, MOST_WAITING - len(items))
        if idle:
            self._cycles.offer(idle=not events and wait > 0 and not self._called)
            if len(events) == 1:
                return events[0]
        for event in events:
            items.add(event.peer, event)
        return None

    def _serve(self, begin: float, alone: Arrived | Gone | None) -> None:
        """Handle events for BUSY_SECONDS, then a slice of long work; note the event that took longest."""
        items = self._items
        longest, last, end = 0.0, begin, begin + BUSY_SECONDS
        # The usual case, without a look at the clock.
        if alone is not None:
            self._handle_item(alone)
            self._busiest = self._event
        while items and last < end:
            peer, item = items.next()
            self._handle_item(item)
            now = time.monotonic()
            items.charge(peer, now - last)
            if now - last > longest:
                longest, self._busiest = now - last, self._event
            last = now

        # Long work gets one slice a turn, even while messages arrive without pause.
        if self._again or self._background.pending:
            self._again, before = False, time.monotonic()
            self._handle(Turn(self._now()))
            if time.monotonic() - before > max(longest, before - last):
                self._busiest = self._event

    def _wake(self) -> None:
        os.eventfd_write(self._call, 1)
        self._called = True

    def _tick(self) -> None:
        for gone in self._router.cut_off():
            self._router.send(gone.peer, Exit(gone.reason))  # should it be heard again
            self._handle_item(gone)
        self._handle(Tick(self._now()))
        self._reserve.poll(self._now())
        self._answer_held()
        if self._journal is not None:
            self._journal.flush()

    def _blame(self) -> str:
        """The event that took longest in the last turn, and its peer."""
        event = self._busiest
        peer = getattr(event, "peer", b"")
        what = type(event.message if isinstance(event, Received) else event).__name__
        return f"{what} of {self._names.get(peer) or peer.hex()}" if peer else what

    def _close(self) -> None:
        for peer, gate in self._gates.items():
            if gate.role:
                self._router.send(peer, Exit(self._reason or "it failed"))
        self._background.close()
        self._router.close()
        self._reserve.close()
        with self._ringing:
            bell, self._bell = self._bell, -1
            os.close(bell)
            os.close(self._call)
        if self._journal is not None:
            self._journal.close()

    def _now(self) -> float:
        return time.monotonic() - self._start

    def _count(self, workers: set[bytes]) -> None:
        if workers != self._workers:
            self._workers = workers
            if self.on_workers is not None:
                self.on_workers(len(workers))

    def _forget(self, peer: bytes) -> bool:
        """Forget a connection; True if there was one."""
        self._count(self._workers - {peer})
        self._held.pop(peer, None)
        return self._gates.pop(peer, None) is not None

    def _part(self, peer: bytes) -> None:
        """Take nothing more from a peer, not even messages that are received already."""
        if self._forget(peer):
            self._parted.add(peer)
        self._router.disconnect(peer)

    def _handle_item(self, item: Arrived | Gone) -> None:
        """One thing from the wire becomes one event."""
        if isinstance(item, Gone):
            self._parted.discard(item.peer)
            self._names.pop(item.peer, None)
            if self._forget(item.peer):
                self._handle(PeerLost(item.peer, item.reason, self._now()))
            return
        if item.peer in self._parted:
            return

        # Unpack and check in the order of trust: size and nesting before the body is parsed, then the sender's role and state.
        gate = self._gates.get(item.peer)
        if gate is None:
            gate = self._gates[item.peer] = Gate()
        frames = item.frames
        try:
            if item.fault:
                raise ProtocolError(item.fault)
            codec.weigh(item.body)
            message = codec.unpack(item.body)
            gate.admit(message, len(frames), max(map(len, frames)) if frames else 0)
        except ProtocolError as error:
            self._handle(Malformed(item.peer, str(error), self._now()))
            return

        # A newcomer while the process lacks descriptors waits, see `_answer_held`.
        if type(message) is Hello and not self._reserve.admits():
            self._held[item.peer] = message
            return
        if type(message) is Goodbye:
            self._part(item.peer)
            frames = ()
        self._handle(Received(item.peer, message, frames, self._now()))

    def _answer_held(self) -> None:
        """Admit peers that connected while descriptors were short; refuse them if no other connection can make room."""
        for peer, hello in list(self._held.items()):
            if self._reserve.admits():
                del self._held[peer]
                self._handle(Received(peer, hello, (), self._now()))
            elif not self._reserve.hopeful:
                self._router.send(peer, Reject(to_wire(Refused(self._reserve.reason()))))
                self._part(peer)

    def _handle(self, event: Event) -> None:
        self._event = event
        try:
            self._perform(self._core.handle(event), event.at)
        except Exception as error:  # a fault of ours ends the one session or worker it came with, not the server
            log.exception("%s of %s failed", type(event).__name__, getattr(event, "peer", b"").hex())
            if isinstance(event, (Received, Malformed)):
                self._drop(event.peer, f"internal error of the server: {type(error).__name__}: {error}")

    def _drop(self, peer: bytes, reason: str) -> None:
        self._router.send(peer, Exit(reason))
        self._part(peer)
        self._handle(PeerLost(peer, reason, self._now()))

    def _perform(self, actions: Iterable[Action], at: float) -> None:
        unfit: list[tuple[bytes, str]] = []
        examine: list[Examine] = []
        for action in actions:
            if type(action) is Send:
                try:
                    self._router.send(action.peer, action.message, action.frames)
                except ProtocolError as error:
                    # Larger than a body may be. The peer would miss something, so it has to leave.
                    unfit.append((action.peer, str(error)))
                if type(action.message) is Welcome:
                    self._names[action.peer] = action.message.name
                    if (gate := self._gates.get(action.peer)) and gate.role == "worker":
                        self._count(self._workers | {action.peer})
                        self._router.watch_host(action.peer)
            elif type(action) is Examine:
                examine.append(action)
            elif type(action) is Close:
                self._part(action.peer)
            elif type(action) is Log:
                if self._journal is not None:
                    self._journal.write(action, at)
                log.debug("%s %s %s", action.kind, action.peer, action.text)
            elif type(action) is Lines and self._journal is not None:
                self._journal.write_lines(action, at)
            elif type(action) is TurnWanted:
                self._again = True

        # These make further events, whose actions must not be mixed with the ones above.
        for peer, reason in unfit:
            log.warning("%s is given up: %s", peer.hex(), reason)
            self._drop(peer, reason)
        for one in examine:
            self._handle(Examined(one.peer, *liveness.sight(one.pid, one.home), self._now()))


def _journal(path: str) -> InstructionLog | None:
    if not path:
        return None
    try:
        return InstructionLog(path)
    except OSError as error:
        raise Refused(f"GT_INSTRUCTION_LOG={path} cannot be written: {error}") from None
