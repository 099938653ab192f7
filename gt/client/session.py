"""The client's end of its link: batches of ops out, values back, host copies on request, and what went wrong.

Callers never touch the socket. They append to an outbox, one atomic step that a Ctrl-C cannot tear, and wait on
threading events, which a Ctrl-C interrupts at once; the link's I/O thread numbers, packs and sends as credit allows.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gt import errors
from gt import log as logs
from gt.client import host_buffers
from gt.errors import DispatcherLost, GTError, ProtocolError, SystemFailure
from gt.ir.spec import DTYPES, Spec
from gt.wire import link, messages
from gt.wire.dealer import Dealer, LinkTimeouts
from gt.wire.messages import THROUGH, Describe, Fetch, FinishCapture, Goodbye, Inspect, Message, Ops, Stats, UploadChunk

log = logging.getLogger("gt.client")

BACKLOG = 8  # batches that wait for the server's credit before wait_credit blocks
SOON = 3.0  # seconds without an answer after which the user is told what is being waited for
WELCOME = 45.0  # seconds a server that is there may take to answer: it waits for the workers that the config names
_open: weakref.WeakSet[Session] = weakref.WeakSet()


class _Pending:
    """One request and what came of it."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: Any = None
        self.error: GTError | None = None
        self.assembly: host_buffers.Assembly | None = None

    def finish(self, value: Any = None, error: GTError | None = None) -> None:
        self.value, self.error = value, error
        self.done.set()


class Session:
    """A connection to a dispatcher, made in the constructor: Refused, ConfigError or DispatcherLost if it cannot be."""

    def __init__(
        self,
        address: str,
        config_text: str = "",
        config_path: str = "",
        switches: dict[str, Any] | None = None,
        token: str = "",
        wait: float = 10.0,
        heartbeat: float = 10.0,
    ) -> None:
        if logs.asked("client"):
            logs.setup("client")
        self.address = address
        self.failure: GTError | None = None
        # Called by the I/O thread about every 10 ms, to submit what is stale. It must not wait for anything.
        self.on_idle: Callable[[], None] | None = None
        self._pid = os.getpid()
        self._pending: dict[int, _Pending] = {}
        self._pieces: dict[int, _Pending] = {}  # key of a piece under way -> its fetch
        self._kept: dict[int, np.ndarray] = {}
        self._uploading: dict[int, Any] = {}  # key -> array and boxes, then the frames that are still to be sent
        self._numbers = itertools.count()
        self._outbox: deque[Message | tuple[Any, ...]] = deque()
        self._room = threading.Condition()
        self._window = link.Window(0)
        self._unraised: GTError | None = None
        self._refused: GTError | None = None  # what was told last that no request answers
        self._noticed = ""  # why there is no welcome yet
        self._notices = 0  # that say so
        self._queued = False  # in the queue for workers of its own
        self._fetches = 0
        self._handlers: dict[type[Message], Callable[[Any, tuple[Any, ...]], None]] = {
            messages.Ack: self._ack,
            messages.UploadRequest: self._need,
            messages.WindowUpdate: lambda m, _: self._more(m.key, m.upto),
            messages.Release: self._release,
            messages.Value: self._value,
            messages.Piece: self._piece,
            messages.Described: lambda m, _: self._finish(m.request, m.specs),
            messages.Report: lambda m, _: self._finish(m.request, m.body),
            messages.Failed: self._failed,
            messages.Notice: self._notice,
            messages.Welcome: self._greeted,
            messages.Reject: self._greeted,
            messages.Exit: lambda m, _: self._end(self._parted(m.reason)),
        }
        self._greeting = _Pending()
        self._link = Dealer(
            address,
            self._on_message,
            self._on_lost,
            on_turn=self._turn,
            timeouts=LinkTimeouts(wait, heartbeat),
            token=token,
        )
        try:
            self._link.send(link.hello("client", config_text, config_path, switches=switches or {}))
            welcome = self._welcomed(address, wait)
        except BaseException:
            self._link.close()
            raise
        self.workers: list[str] = welcome.workers
        self.groups: list[str] = welcome.groups
        self.number: int = welcome.session
        _open.add(self)

    def _welcomed(self, address: str, wait: float) -> messages.Welcome:
        """The answer to Hello. Who is in the queue for workers waits as long as the server says so now and then."""
        if not self._greeting.done.wait(SOON) and not self._queued:
            log.warning("waiting for the server at %s: %s", address, self._noticed or "it is not up yet")
        heard = 0
        while not self._greeting.done.wait(wait + WELCOME):
            if heard == self._notices:
                raise DispatcherLost(
                    f"the server at {address} does not answer (tried for {wait + WELCOME:g} s): check that it runs"
                )
            heard = self._notices
        if self.failure:
            raise self.failure
        return link.answer(self._greeting.value)

    # ---- for the recorder; any thread

    def submit(self, templates: list, origins: list, code: list, frames: Sequence[Any] = ()) -> None:
        """Queue a batch of the op stream, in order; the lists are the session's from now on. Never waits."""
        self._check()
        self._outbox.append((templates, origins, code, frames))
        self._link.push()

    @property
    def waiting(self) -> bool:
        """Whether a thread waits for an answer: what has ended is freed with what follows."""
        return bool(self._pending)

    def has_credit(self) -> bool:
        return len(self._outbox) < BACKLOG

    def wait_credit(self) -> None:
        """Wait until the workers have caught up with what was submitted, so that a fast program cannot fill memory."""
        if self._link.inside or self.has_credit():
            return
        if not self._link.lead(self._may_go_on):
            with self._room:
                while not self._may_go_on():
                    self._room.wait()
        if not self.has_credit():
            self._raise_unraised()

    def _may_go_on(self) -> bool:
        return self.has_credit() or self.failure is not None or self._unraised is not None

    def fetch(self, tensor: int) -> tuple[tuple[int, ...], str, np.ndarray]:
        """(shape, dtype, bytes as a row-major uint8 array) of a tensor's value."""
        return self._ask(lambda request: Fetch(request, tensor))

    def synchronize(self) -> None:
        """Wait until all workers, and their devices, have done what was submitted."""
        self._ask(lambda request: Fetch(request, THROUGH))

    def describe(self, tensors: list[int]) -> list[Spec]:
        """Specs of the outputs of a dynamic op."""
        return [Spec.from_wire(row) for row in self._ask(lambda request: Describe(request, tensors))]

    def seal(self, program: int, *what: Any) -> dict[str, Any]:
        """Make a program of what was recorded; see messages.FinishCapture for the rest and the answer."""
        return self._ask(lambda request: FinishCapture(request, program, *what))

    def inspect(self, tensor: int) -> dict[str, Any]:
        """Layout, mesh and pieces of a tensor."""
        return self._ask(lambda request: Inspect(request, tensor))

    def stats(self, program: int = -1) -> dict[str, Any]:
        """The dispatcher's and workers' counters, and under "client" this link's. program: see messages.Stats."""
        body = self._ask(lambda request: Stats(request, program))
        mine = {
            "messages_sent": self._link.messages_sent,
            "bytes_sent": self._link.bytes_sent,
            "fetches": self._fetches,
        }
        return {**body, "client": mine}

    def keep(self, tensor: int, array: np.ndarray) -> None:
        """Hold a host copy for gt.upload: any NumPy array of the tensor's shape and element size, until Release."""
        self._kept[tensor] = array

    def close(self) -> None:
        """Leave: no thread, no socket. Safe to call twice, and in a forked child, where it does nothing."""
        if self._pid != os.getpid():
            return
        _open.discard(self)
        self.on_idle = None
        self._outbox.clear()  # or what is left would be sent after the goodbye
        self.on_idle = None
        if self.failure is None:
            self._end(SystemFailure("the session is closed"))
            self._link.send(Goodbye())  # the last: what waited for credit is no longer wanted
        self._link.close()
        self._kept.clear()
        self._uploading.clear()

    # ---- waiting

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise SystemFailure("remote tensors cannot be used in a forked process (a DataLoader worker?): use x.cpu() first")
        if self.failure is not None:
            raise errors.from_wire(errors.to_wire(self.failure))

    def _ask(self, question: Callable[[int], Message]) -> Any:
        self._check()
        self._raise_unraised()
        request, pending = next(self._numbers), _Pending()
        self._pending[request] = pending
        try:
            self._outbox.append(question(request))
            # The first turn that is led sends it. A link that has ended saw this request, or ended before: then failure is set.
            if self.failure is None and not self._link.lead(pending.done.is_set):
                self._link.wake()
                pending.done.wait()
        finally:
            self._pending.pop(request, None)
            if self._pending:  # others wait for what this thread has taken in
                self._link.resume()
            if pending.assembly is not None:
                for key in pending.assembly.keys:
                    self._pieces.pop(key, None)
        if pending.error is not None:
            raise pending.error
        self._check()
        self._raise_unraised()
        return pending.value

    def _raise_unraised(self) -> None:
        error, self._unraised = self._unraised, None
        if error is not None:
            raise error

    def put_off(self, error: GTError) -> None:
        """What failed before and was raised where it says nothing: the next wait raises it."""
        self._unraised = self._unraised or error

    # ---- in the I/O thread

    def _turn(self) -> None:
        if self.on_idle is not None and not self._outbox:
            self.on_idle()
        self._pump()

    def _pump(self) -> None:
        """Send what waits, in order; a batch needs credit, and what is behind it waits with it."""
        outbox, full = self._outbox, len(self._outbox) >= BACKLOG
        while outbox:
            item = outbox[0]
            if isinstance(item, tuple):
                if self._window.full or not self._greeting.done.is_set():
                    break
                templates, origins, code, frames = item
                self._link.send(Ops(self._window.take(), templates, origins, code), frames)
            else:
                self._fetches += isinstance(item, Fetch)
                self._link.send(item)
            outbox.popleft()
        if full:
            with self._room:
                self._room.notify_all()

    def _on_message(self, message: Message, frames: tuple[Any, ...]) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"the server sent {type(message).__name__}, which no client takes")
        handler(message, frames)

    def _on_lost(self, reason: str) -> None:
        if self._greeting.done.is_set():
            reason += ", and with it all remote tensors: connect to a running server, or call gt.shutdown() and start again"
        self._end(DispatcherLost(reason))

    def _parted(self, reason: str) -> GTError:
        """Why the server goes on without this session, or stops: what it said of that before."""
        if self._refused is not None and str(self._refused) == reason:
            return self._refused
        return DispatcherLost(f"the server at {self.address} has stopped: {reason}")

    def _end(self, failure: GTError) -> None:
        """Whatever waits, and everything later, fails with this; the first cause stays."""
        if self.failure is None:
            self.failure = failure
        self._outbox.clear()
        with self._room:
            self._room.notify_all()
        self._greeting.done.set()
        for pending in list(self._pending.values()):
            pending.done.set()

    def _greeted(self, message: Any, frames: tuple[Any, ...]) -> None:
        if isinstance(message, messages.Welcome):
            self._window = link.Window(message.credit)
        self._greeting.finish(message)

    def _notice(self, message: messages.Notice, frames: tuple[Any, ...]) -> None:
        if self._greeting.done.is_set():
            log.warning("%s", message.text)
            return
        self._notices += 1
        self._queued = message.place > 0
        if self._queued and message.text != self._noticed:
            log.warning("waiting for the server at %s: %s", self.address, message.text)
        self._noticed = message.text

    def _finish(self, request: int, value: Any = None, error: GTError | None = None) -> None:
        pending = self._pending.get(request)  # none: the caller was interrupted
        if pending is not None:
            pending.finish(value, error)

    def _ack(self, message: messages.Ack, frames: tuple[Any, ...]) -> None:
        self._window.ack(message.seq)

    def _failed(self, message: messages.Failed, frames: tuple[Any, ...]) -> None:
        error = errors.from_wire(message.error)
        if message.request >= 0:
            self._finish(message.request, error=error)
            return
        self._refused = error
        if self._unraised is None:
            self._unraised = error
            with self._room:
                self._room.notify_all()

    def _need(self, message: messages.UploadRequest, frames: tuple[Any, ...]) -> None:
        array = self._kept.get(message.tensor)
        if array is None:
            raise ProtocolError(f"UploadRequest.tensor is {message.tensor}, of which no host copy is kept")
        self._uploading[message.key] = (array, message.boxes)
        if message.upto or not any(all(start < stop for start, stop in box) for box in message.boxes):
            self._more(message.key, message.upto)

    def _more(self, key: int, upto: int) -> None:
        """Send what of an upload may be sent by now."""
        left = self._uploading.get(key)
        if left is None:
            raise ProtocolError(f"WindowUpdate.key is {key}, of which nothing is left to send")
        if isinstance(left, tuple):  # not begun: what has to be copied out of it is copied now
            left = self._uploading[key] = deque(host_buffers.frames(host_buffers.region(*left)))
        while left and left[0][0] + sum(map(len, left[0][2])) <= upto:
            offset, total, parts = left.popleft()
            self._link.send(UploadChunk(key, offset, total), parts)
        if not left:
            del self._uploading[key]

    def _release(self, message: messages.Release, frames: tuple[Any, ...]) -> None:
        for tensor in message.tensors:
            self._kept.pop(tensor, None)

    def _value(self, message: messages.Value, frames: tuple[Any, ...]) -> None:
        pending = self._pending.get(message.request)
        if pending is None:
            return
        if message.dtype not in DTYPES:
            raise ProtocolError(f"Value.dtype is {message.dtype!r}")
        shape = tuple(message.shape)
        pending.assembly = host_buffers.Assembly(shape, DTYPES[message.dtype][0], message.pieces)
        pending.value = (shape, message.dtype, pending.assembly.data)
        if frames:
            pending.assembly.add(message.pieces[0][0], 0, len(frames[0]), frames[0])
        else:
            self._pieces.update(dict.fromkeys(pending.assembly.keys, pending))
        self._settle(pending)

    def _piece(self, message: messages.Piece, frames: tuple[Any, ...]) -> None:
        if message.total > messages.AHEAD:
            self._link.send(messages.UploadProgress(message.key, message.offset + len(frames[0])))
        pending = self._pieces.get(message.key)
        if pending is None or pending.assembly is None:
            return  # of a fetch that was interrupted
        pending.assembly.add(message.key, message.offset, message.total, frames[0] if frames else None)
        self._settle(pending)

    def _settle(self, pending: _Pending) -> None:
        if pending.assembly is not None and pending.assembly.complete:
            pending.done.set()


@atexit.register
def _close_all() -> None:
    for session in list(_open):
        session.close()
