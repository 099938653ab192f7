"""The client's connection to a dispatcher: batches of ops out, values back, host copies on request, and errors.

Callers never touch the socket. They append to an outbox, one atomic step that Ctrl-C cannot tear, and wait on
latches, which Ctrl-C interrupts at once. The link's I/O thread numbers, packs and sends as credit allows.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from gt import errors, logs
from gt.client.exchange.answers import AwaitedAnswers, PendingAnswer
from gt.client.exchange.arenas import ClientArenas
from gt.client.exchange.host_buffers import Assembly, Into
from gt.client.exchange.kept_uploads import FileTensor, KeptUploads
from gt.client.reports import progress, spans
from gt.client.reports.this_process import about_process
from gt.errors import DispatcherLost, GTError, ProtocolError, SystemFailure
from gt.ir.schema import library_schemas
from gt.ir.spec import DTYPES, Spec
from gt.wire import link, liveness, messages
from gt.wire.dealer import Dealer, LinkTimeouts
from gt.wire.messages import (
    CHUNK,
    THROUGH,
    Describe,
    Fetch,
    FinishCapture,
    Goodbye,
    Inspect,
    InspectFragments,
    Interrupt,
    Message,
    Metrics,
    Ops,
    Stats,
    Store,
    TensorRoles,
    Trace,
    TraceRows,
)
from gt.wire.signals import Waiters

log = logging.getLogger("gt.client")

MAX_WAITING_BATCHES = 8  # for the server's credit; then wait_credit blocks
BUSY_BATCHES = 4  # that workers have not executed: they will not be idle soon
SHORT_SECONDS = 0.05  # seconds that workers take for a short batch; Ctrl-C waits for the one that they have begun
TICK_SECONDS = 0.5  # between two looks at a wait that shows a bar
FEW_CORES = 2  # fewer than a program, a dispatcher and a worker that all have work
ROOM_SECONDS = 0.25  # until a wait for room becomes a wait for all workers
FIRST_NOTICE_SECONDS = 3.0  # without an answer; then a warning tells the user
WELCOME_SECONDS = 45.0  # for a server that is up: it waits for the workers that the config names
WAITS: dict[type[Message], str] = {
    Fetch: "wait for a value", Describe: "wait for a shape", FinishCapture: "wait for a program", Inspect: "wait for a layout",
    Stats: "wait for counters",
}  # fmt: skip
Question = Callable[[int], Message]  # makes the message of a request number
_open: weakref.WeakSet[Session] = weakref.WeakSet()


class Session:
    """A connection to the dispatcher at "host:port", which the constructor opens.

    config: text and path of the YAML. switches: settings for the workers, see gt.api. wait: seconds to try for.
    heartbeat: seconds between two signs of life. Raises Refused, ConfigError or DispatcherLost.
    """

    def __init__(
        self,
        address: str,
        config: tuple[str, str] = ("", ""),
        switches: dict[str, Any] | None = None,
        token: str = "",
        wait: float = 10.0,
        heartbeat: float = 10.0,
    ) -> None:
        if logs.asked("client"):
            logs.setup("client")
        self.address = address
        self.failure: GTError | None = None
        # The I/O thread calls it about every 10 ms, to submit stale ops. It must not wait for anything.
        self.on_idle: Callable[[], None] | None = None
        self.why_lost: Callable[[], str] = str  # why a server that this program started has ended; may wait a moment
        self._pid = os.getpid()
        self._answers = AwaitedAnswers()
        self._outbox: deque[Message | tuple[Any, ...]] = deque()
        self._arenas = ClientArenas(self._outbox.append)
        self._uploads = KeptUploads(self._arenas, lambda message, frames: self._link.send(message, frames))
        self._room = Waiters()
        self._window = link.Window(0)
        self._deferred_error: GTError | None = None  # raised by the next wait
        self.interrupts = 0  # each may have dropped ops that were submitted
        self._last_unsolicited: GTError | None = None  # the last error that answers no request
        self._last_notice = ""  # why there is no Welcome yet
        self._notice_count = 0  # received before the Welcome
        self._queued = False  # the server has no free workers for this session yet
        self._fetches = self._submitted = 0  # batches so far
        self._trace_rows: list[TraceRows] = []  # rows of the trace that ends
        self.failures = 0  # errors that were reported
        self.losses = 0  # reports that a worker was lost, and tensors with it
        self.watched = False  # somebody observes the server
        self.compiles = False  # a captured program was launched for the first time, and no answer was awaited since
        self._handlers = self._message_handlers()
        self._greeting = PendingAnswer()
        timeouts = LinkTimeouts(wait, heartbeat)
        self._link = Dealer(address, self._on_message, self._on_lost, on_turn=self._turn, timeouts=timeouts, token=token)
        try:
            self._link.send(link.hello("client", *config, switches=switches or {}, info=about_process()))
            welcome = self._await_welcome(address, wait)
        except BaseException:
            self._link.close()
            raise
        self.workers, self.groups = welcome.workers, welcome.groups  # names
        self.number: int = welcome.session
        self.gpus: bool = welcome.gpus  # each worker has one
        self._beside = bool(liveness.home()) and liveness.home() in welcome.process[1:]  # the dispatcher has this host's clock
        # Early batches then delay this program by as much as they save, or more
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.shares_cores = self._beside and cores <= FEW_CORES
        self._arenas.session = welcome.session
        self.library_ops = library_schemas(welcome.ops)
        _open.add(self)

    def _message_handlers(self) -> dict[type[Message], Callable[[Any, tuple[Any, ...]], None]]:
        """The method for each message that a client receives; it gets the message and its frames."""
        return {
            messages.Ack: self._ack,
            messages.UploadRequest: lambda m, _: self._uploads.begin(m),
            messages.WindowUpdate: lambda m, _: self._uploads.send_chunks(m.key, m.upto),
            messages.Release: self._release,
            messages.Value: self._value,
            messages.Piece: self._piece,
            messages.Described: lambda m, _: self._answers.finish(m.request, m.specs),
            messages.Report: lambda m, _: self._answers.finish(m.request, m.body),
            messages.Failed: self._failed,
            messages.Notice: self._notice,
            messages.TraceRows: lambda m, _: self._trace_rows.append(m),
            messages.Watched: self._watch,
            messages.Welcome: self._answer_to_hello,
            messages.Reject: self._answer_to_hello,
            messages.Exit: lambda m, _: self._fail_all(self._why_exited(m.reason)),
        }

    def _await_welcome(self, address: str, wait: float) -> messages.Welcome:
        """Wait for the answer to Hello; without a limit as long as the server keeps sending notices."""
        if not self._greeting.done.wait(FIRST_NOTICE_SECONDS) and not self._queued:
            log.warning("waiting for the server at %s: %s", address, self._last_notice or "it is not up yet")
        notices_seen = 0
        while not self._greeting.done.wait(wait + WELCOME_SECONDS):
            if notices_seen == self._notice_count:
                raise DispatcherLost(
                    f"the server at {address} does not answer (tried for {wait + WELCOME_SECONDS:g} s): check that it runs"
                )
            notices_seen = self._notice_count
        if self.failure:
            raise self.failure
        return link.answer(self._greeting.value)

    # ---- for the recorder; any thread

    def submit(self, templates: list, origins: list, code: list, frames: Sequence[Any] = (), asks: bool = False) -> None:
        """Queue a batch of the op stream, in order. The session owns the lists from now on. Never waits.

        asks: the caller is about to ask for a value, and sends both then.
        """
        self._check()
        if spans.current is not None:
            spans.current.batch(code)
        self._outbox.append((templates, origins, code, frames))
        self._submitted += 1
        if not asks:
            self._link.push()

    @property
    def waiting(self) -> bool:
        """True while a thread waits for an answer."""
        return bool(self._answers.pending)

    @property
    def busy(self) -> bool:
        """True if workers have several batches before them, each of which takes little time."""
        return len(self._outbox) + self._window.ahead >= BUSY_BATCHES and self._window.seconds < SHORT_SECONDS

    def take_turn(self) -> None:
        """Receive what has come, and send what is queued."""
        self._check()
        self._link.push()

    def has_credit(self) -> bool:
        """True if another batch can be queued before wait_credit blocks."""
        return len(self._outbox) < MAX_WAITING_BATCHES

    def wait_credit(self) -> None:
        """Wait until few batches are queued, so that a program faster than its workers cannot fill memory."""
        if self._link.inside or self.has_credit():
            return
        with spans.span("wait until workers have taken ops"):
            if not self._link.lead(self._unblocked):
                self._room.wait_for(self._unblocked)
        if not self.has_credit():
            self._raise_deferred()

    def interrupt(self) -> None:
        """Drop submitted ops that no worker has begun, where the server can: see messages.Interrupt. Never waits."""
        self.interrupts += 1
        if self.failure is None and self._pid == os.getpid():
            self._link.send(Interrupt(self._submitted - 1))

    def _unblocked(self) -> bool:
        return self.has_credit() or self.failure is not None or self._deferred_error is not None

    def fetch(self, tensor: int, nbytes: int = 0) -> tuple[tuple[int, ...], str, np.ndarray]:
        """Shape, dtype and bytes of a tensor's value, the bytes as a row-major uint8 array. Waits.

        nbytes: of the value, 0 if unknown; a large one is received in a block of shared memory.
        """
        self._check()
        block = self._arenas.take(nbytes) if nbytes > CHUNK else None
        if block is None:
            return self._ask(lambda request: Fetch(request, tensor))
        try:
            shape, dtype, data = self._ask(lambda request: Fetch(request, tensor, block.place))
        except BaseException:
            self._arenas.abandon(block)
            raise
        if data is None:
            data = block.bytes(prod(shape) * DTYPES[dtype][0]).copy()
        self._arenas.free(block)
        return shape, dtype, data

    def fetch_into(self, tensor: int, into: Into) -> tuple[tuple[int, ...], str]:
        """Have a tensor's value assembled by `into`; its shape and dtype. Waits. OSError if a disk does not take it."""
        return self.wait(self.begin(lambda request: Fetch(request, tensor), into))[:2]

    def synchronize(self) -> None:
        """Wait until all workers and their devices have executed all submitted ops."""
        self._ask(lambda request: Fetch(request, THROUGH))

    def describe(self, tensors: list[int]) -> list[Spec]:
        """Specs of a dynamic op's outputs. Waits."""
        return [Spec.from_wire(row) for row in self._ask(lambda request: Describe(request, tensors))]

    def seal(self, program: int, *what: Any) -> dict[str, Any]:
        """Make a program of the last recording. messages.FinishCapture describes the rest and the answer. Waits."""
        with progress.bar("planning a captured step", unit="s") as tick:
            return self._ask(lambda request: FinishCapture(request, program, *what), tick)

    def inspect(self, tensor: int) -> dict[str, Any]:
        """Layout, mesh and pieces of a tensor. Waits."""
        return self._ask(lambda request: Inspect(request, tensor))

    def inspect_fragments(self, slot: int) -> dict[str, Any]:
        """Counts of a function's ops and of those that programs executed. Waits."""
        return self._ask(lambda request: InspectFragments(request, slot))

    def stats(self, program: int = -1, holders: bool = False) -> dict[str, Any]:
        """Counters of the dispatcher and the workers, and of this link under "client". Waits.

        program, holders: see messages.Stats.
        """
        body = self._ask(lambda request: Stats(request, program, holders))
        mine = {"messages_sent": self._link.messages_sent, "bytes_sent": self._link.bytes_sent, "fetches": self._fetches}
        return {**body, "client": mine}

    def begin_trace(self) -> dict[str, Any]:
        """Have workers and dispatcher record what this session does. Answer: see `_timed_ask`. Waits."""
        self._trace_rows.clear()
        return self._timed_ask(lambda request: Trace(request, True))

    def end_trace(self) -> tuple[dict[str, Any], list[TraceRows]]:
        """End the recording: the answer of the dispatcher, and everything that was recorded. Waits."""
        answer = self._timed_ask(lambda request: Trace(request, False))
        rows, self._trace_rows = self._trace_rows, []
        return answer, rows

    def _timed_ask(self, question: Callable[[int], Message]) -> dict[str, Any]:
        """An answer of the dispatcher with "ahead" of each worker's clock and "dispatcher", by how much clocks are ahead of
        this process's. Those of one host are one clock; else the time of the answer is as good as half of its round trip.
        """
        asked = time.monotonic()
        answer = dict(self._ask(question))
        own = 0.0 if self._beside else answer["clock"] - (asked + time.monotonic()) / 2
        return {**answer, "dispatcher": own, "trip": time.monotonic() - asked, "ahead": [own + n for n in answer["ahead"]]}

    def log(self, steps: int, values: dict[str, float]) -> None:
        """Send numbers that the program logs. Never waits."""
        self._outbox.append(Metrics(steps, values))
        self._link.push()

    def tell_roles(self, rows: list) -> None:
        """Send the roles of tensors. Never waits."""
        self._outbox.append(TensorRoles(rows))
        self._link.push()

    def keep(self, tensor: int, array: np.ndarray) -> int:
        """Hold a copy of `array` for an upload until Release; the value of its gt.upload op.

        array: of the tensor's shape and element size, of any NumPy dtype. The copy is in shared memory, if workers use it.
        """
        self._check()
        return self._uploads.keep(tensor, array)

    def keep_in_file(self, tensor: int, source: FileTensor) -> int:
        """Hold a tensor in a file for an upload until Release; the value of its gt.upload op."""
        self._check()
        return self._uploads.keep_in_file(tensor, source)

    def lend_file(self, fd: int, nbytes: int, write: bool) -> int:
        """Offer an open file to the workers of this host: its number among arenas, 0 if workers cannot share it."""
        self._check()
        return self._arenas.lend(fd, nbytes, write)

    def take_back_file(self, number: int) -> None:
        """End the loan of a file."""
        if self.failure is None:
            self._arenas.take_back(number)

    def shares_file(self, number: int) -> bool:
        """True if every worker has opened this file. Waits."""
        return bool(number) and self.wait(self.begin_store([], False, number))["shared"]

    def begin_store(self, rows: list, later: bool, file: int = 0) -> int:
        """Have workers write tensors into files, see messages.Store. Returns the request, for `wait`."""
        return self.begin(lambda request: Store(request, rows, later, file))

    def crowded(self, nbytes: int) -> bool:
        """True if workers have still to read so much of earlier uploads that the next should wait: see `wait_room`."""
        return self._arenas.crowded(nbytes)

    def wait_room(self, nbytes: int) -> None:
        """Wait until workers have read enough of earlier uploads, or have nothing left to do.

        The dispatcher may keep ops until it knows those that follow; so a wait that lasts ends in a question, which it answers.
        """
        if self._link.inside:
            return

        def ready() -> bool:
            return not self._arenas.crowded(nbytes) or self._idle or self.failure is not None

        if not self._link.lead(ready, ROOM_SECONDS):
            self._room.wait_for(ready, ROOM_SECONDS)
        if not ready():
            self.synchronize()
            self._arenas.reclaim()
        elif self._idle:
            self._arenas.reclaim()

    @property
    def _idle(self) -> bool:
        """True if workers have executed all that was submitted."""
        return not self._outbox and self._window.acked == self._window.sent

    def close(self) -> None:
        """End the session, its thread and its socket. May be called twice; does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        _open.discard(self)
        self.on_idle = None
        self._outbox.clear()  # or batches would be sent after the goodbye
        if self.failure is None:
            self._fail_all(SystemFailure("the session is closed"))
            self._link.send(Goodbye())
        self._link.close()
        self._uploads.clear()
        self._arenas.close()

    # ---- waiting

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise SystemFailure("remote tensors cannot be used in a forked process (a DataLoader worker?): use x.cpu() first")
        if self.failure is not None:
            raise errors.from_wire(errors.to_wire(self.failure))

    def _ask(self, question: Question, tick: progress.Tick | None = None) -> Any:
        """The answer to a message of a request's number. tick: called now and then meanwhile."""
        if self.compiles and tick is None and progress.shown():
            self.compiles = False
            with progress.bar("first replay of a captured step, which workers may compile", unit="s") as tick:
                return self._ask(question, tick)
        if tick is None and self._uploads.may_take_long and progress.shown():
            with self._uploads.bar() as tick:
                return self._ask(question, tick)
        with spans.span("" if spans.current is None else WAITS.get(type(question(0)), "wait for an answer")):
            return self.wait(self.begin(question), tick)

    def begin(self, question: Question, into: Into = Assembly) -> int:
        """Ask a question; its number, for `wait`. into: see PendingAnswer."""
        self._check()
        self._raise_deferred()
        request = self._answers.expect(into)
        self._outbox.append(question(request))
        return request

    def forget(self, request: int) -> None:
        """Nobody waits for this answer any more."""
        self._answers.forget(request)

    def wait(self, request: int, tick: progress.Tick | None = None) -> Any:
        """The answer to a question, or its error. tick: called now and then meanwhile."""
        pending = self._answers.pending[request]
        try:
            # The first turn that this thread leads sends it. A link that has ended saw this request, or has set failure before.
            if self.failure is None and not self._link.lead(pending.done.is_set, TICK_SECONDS if tick else float("inf")):
                self._link.wake()
                while not pending.done.wait(TICK_SECONDS if tick else None):
                    tick(0)  # type: ignore[misc] # without one the wait has no limit
        except KeyboardInterrupt:
            self.interrupt()
            raise
        finally:
            self._answers.forget(request)
            if self._answers.pending:  # other threads wait for answers that this thread would have received
                self._link.resume()
        if pending.error is not None:
            raise pending.error
        self._check()
        self._raise_deferred()
        return pending.value

    def _raise_deferred(self) -> None:
        error, self._deferred_error = self._deferred_error, None
        if error is not None:
            raise error

    def defer_error(self, error: GTError) -> None:
        """Keep an error that the caller could not raise; the next wait raises it."""
        self._deferred_error = self._deferred_error or error

    # ---- in the I/O thread

    def _turn(self) -> None:
        if self.on_idle is not None and not self._outbox:
            self.on_idle()
        self._pump()

    def _pump(self) -> None:
        """Send the outbox in order. A batch needs credit, and messages behind it wait with it. A Fetch goes with its batch."""
        outbox, full = self._outbox, len(self._outbox) >= MAX_WAITING_BATCHES
        while outbox:
            item = outbox[0]
            if isinstance(item, tuple):
                if self._window.full or not self._greeting.done.is_set():
                    break
                templates, origins, code, frames = item
                follows = outbox[1] if len(outbox) > 1 else None
                fetch = [follows.request, follows.tensor, follows.place] if isinstance(follows, Fetch) else []
                self._link.send(Ops(self._window.take(), templates, origins, code, fetch), frames)
                if fetch:
                    self._fetches += 1
                    outbox.popleft()
            else:
                self._fetches += isinstance(item, Fetch)
                self._link.send(item)
            outbox.popleft()
        if full:
            self._room.notify_all()

    def _on_message(self, message: Message, frames: tuple[Any, ...]) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"the server sent {type(message).__name__}, which no client handles")
        handler(message, frames)

    def _on_lost(self, reason: str) -> None:
        if self._greeting.done.is_set():
            why = self.why_lost()
            reason += f" ({why})" * bool(why)
            reason += ", and with it all remote tensors: connect to a running server, or call gt.shutdown() and start again"
        self._fail_all(DispatcherLost(reason))

    def _why_exited(self, reason: str) -> GTError:
        """The error for an Exit: the one that the server has announced, or a lost dispatcher."""
        if self._last_unsolicited is not None and str(self._last_unsolicited) == reason:
            return self._last_unsolicited
        return DispatcherLost(f"the server at {self.address} has stopped: {self.why_lost() or reason}")

    def _fail_all(self, failure: GTError) -> None:
        """Fail all waits and all later calls with this error; the first one stays."""
        if self.failure is None:
            self.failure = failure
        self._outbox.clear()
        self._room.notify_all()
        self._greeting.done.set()
        self._answers.end_waits()

    def _answer_to_hello(self, message: Any, frames: tuple[Any, ...]) -> None:
        if isinstance(message, messages.Welcome):
            self._window = link.Window(message.credit)
        self._greeting.finish(message)

    def _notice(self, message: messages.Notice, frames: tuple[Any, ...]) -> None:
        if self._greeting.done.is_set():
            log.warning("%s", message.text)
            return
        self._notice_count += 1
        self._queued = message.place > 0
        if self._queued and message.text != self._last_notice:
            log.warning("waiting for the server at %s: %s", self.address, message.text)
        self._last_notice = message.text

    def _watch(self, message: messages.Watched, frames: tuple[Any, ...]) -> None:
        self.watched = message.on

    def _ack(self, message: messages.Ack, frames: tuple[Any, ...]) -> None:
        self._window.ack(message.seq, time.monotonic())
        self._note_room()

    def _note_room(self) -> None:
        """Wake threads in `wait_room`, but for a thread that leads the link: it looks by itself."""
        if self._uploads.in_arenas:
            self._room.notify_all()

    def _failed(self, message: messages.Failed, frames: tuple[Any, ...]) -> None:
        error = errors.from_wire(message.error)
        self.failures += 1
        self.losses += isinstance(error, errors.WorkerLost)
        if message.request >= 0:
            self._answers.finish(message.request, error=error)
            return
        self._last_unsolicited = error
        if self._deferred_error is None:
            self._deferred_error = error
            self._room.notify_all()

    def _release(self, message: messages.Release, frames: tuple[Any, ...]) -> None:
        self._uploads.release(message.tensors)
        self._note_room()

    def _value(self, message: messages.Value, frames: tuple[Any, ...]) -> None:
        if message.acked >= 0:
            self._window.ack(message.acked, time.monotonic())
            self._note_room()
        self._answers.value(message, frames)

    def _piece(self, message: messages.Piece, frames: tuple[Any, ...]) -> None:
        if message.total > messages.AHEAD:
            self._link.send(messages.UploadProgress(message.key, message.offset + len(frames[0])))
        self._answers.piece(message, frames)


@atexit.register
def _close_all() -> None:
    for session in list(_open):
        session.close()
