"""The shell around the core: bytes in, events to the core, its actions carried out. Decides nothing."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from gt import env
from gt.dispatcher.events import Action, Close, Event, Lines, Log, Malformed, PeerLost, Received, Send, Tick
from gt.dispatcher.journal import Journal
from gt.errors import ProtocolError, Refused
from gt.wire import codec
from gt.wire.auth import Access, weakness
from gt.wire.link import Gate
from gt.wire.messages import Exit, Goodbye, Welcome
from gt.wire.router import Arrived, Gone, Router

log = logging.getLogger("gt.dispatcher")

TICK = 0.25  # seconds


class CoreLike(Protocol):
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
    ) -> None:
        if core is None:
            from gt.dispatcher.core import Core  # a test brings its own and needs none of it

            core = Core(heartbeat=heartbeat, logging=bool(env.get("GT_INSTRUCTION_LOG")))
        self._core = core
        self._journal = _journal(env.get("GT_INSTRUCTION_LOG"))
        self._router = Router(host, port, heartbeat, access)
        if access is not None and (weak := weakness(access.token)):
            log.warning("%s", weak)
        self.host, self.port = host, self._router.port
        self._gates: dict[bytes, Gate] = {}
        self._workers: set[bytes] = set()
        self._parted: set[bytes] = set()  # peers that are done with, until their connection ends
        self.on_workers: Callable[[int], None] | None = None  # told how many workers there are, when that changes
        self._start = time.monotonic()
        self._reason = ""
        self._ringing = threading.RLock()  # a signal may come while the bell is closed
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._router.watch(self._bell)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

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
                for item in self._router.poll(max(0.0, min(TICK, next_tick - time.monotonic()))):
                    self._take(item)
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK
                    self._handle(Tick(self._now()))
                    if self._journal is not None:
                        self._journal.flush()
        finally:
            self._close()

    def _close(self) -> None:
        for peer, gate in self._gates.items():
            if gate.role:
                self._router.send(peer, Exit(self._reason or "it failed"))
        self._router.close()
        with self._ringing:
            bell, self._bell = self._bell, -1
            os.close(bell)
        if self._journal is not None:
            self._journal.close()

    def _now(self) -> float:
        return time.monotonic() - self._start

    def _count(self, workers: set[bytes]) -> None:
        if workers != self._workers:
            self._workers = workers
            if self.on_workers is not None:
                self.on_workers(len(workers))

    def _leave(self, peer: bytes) -> bool:
        """Forget a connection; whether there was one."""
        self._count(self._workers - {peer})
        return self._gates.pop(peer, None) is not None

    def _part(self, peer: bytes) -> None:
        """Take nothing more from a peer, not even what has come already."""
        if self._leave(peer):
            self._parted.add(peer)
        self._router.forget(peer)

    def _take(self, item: Arrived | Gone) -> None:
        """One thing from the wire becomes one event."""
        if isinstance(item, Gone):
            self._parted.discard(item.peer)
            if self._leave(item.peer):
                self._handle(PeerLost(item.peer, item.reason, self._now()))
            return
        if item.peer in self._parted:
            return
        gate = self._gates.setdefault(item.peer, Gate())
        try:
            if item.fault:
                raise ProtocolError(item.fault)
            message = codec.unpack(item.body)
            gate.admit(message, len(item.frames), max(map(len, item.frames), default=0))
        except ProtocolError as error:
            self._handle(Malformed(item.peer, str(error), self._now()))
            return
        if isinstance(message, Goodbye):
            self._part(item.peer)
            self._handle(Received(item.peer, message, (), self._now()))
            return
        self._handle(Received(item.peer, message, item.frames, self._now()))

    def _handle(self, event: Event) -> None:
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
        for action in actions:
            if type(action) is Send:
                try:
                    self._router.send(action.peer, action.message, action.frames)
                except ProtocolError as error:  # larger than a body may be: the peer misses something, so it has to go
                    unfit.append((action.peer, str(error)))
                if type(action.message) is Welcome and (gate := self._gates.get(action.peer)) and gate.role == "worker":
                    self._count(self._workers | {action.peer})
            elif type(action) is Close:
                self._part(action.peer)
            elif type(action) is Log:
                if self._journal is not None:
                    self._journal.write(action, at)
                log.debug("%s %s %s", action.kind, action.peer, action.text)
            elif type(action) is Lines and self._journal is not None:
                self._journal.write_lines(action, at)
        for peer, reason in unfit:
            log.warning("%s is given up: %s", peer.hex(), reason)
            self._drop(peer, reason)


def _journal(path: str) -> Journal | None:
    if not path:
        return None
    try:
        return Journal(path)
    except OSError as error:
        raise Refused(f"GT_INSTRUCTION_LOG={path} cannot be written: {error}") from None
