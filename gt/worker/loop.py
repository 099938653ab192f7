"""A worker's process: one link to the dispatcher, one plane to the other workers, instructions executed in order.

The link's I/O thread handles messages that must not wait for an instruction (Data, Abort, Query). The thread that calls `run`
executes, until Exit, SIGTERM or the end of the link. A World is queued among the Runs. The Runs before it were planned with its
predecessor. If they wait for a lost worker, they must see its end, never its successor.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket as bsd
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gt import env, errors, logs
from gt.wire import liveness
from gt.wire.access.auth import loopback
from gt.wire.access.proof import proof
from gt.wire.dealer import Dealer, LinkTimeouts
from gt.wire.link import hello
from gt.wire.messages import (
    CHUNK,
    MAX_PIECES,
    Abort,
    CloseArenas,
    Data,
    Done,
    Exit,
    Goodbye,
    LinkFailed,
    LinkMade,
    Message,
    OfferArena,
    OfferFile,
    Paused,
    Piece,
    PrepareCompilation,
    Query,
    Reject,
    Renew,
    Report,
    Run,
    Skip,
    TorchSettings,
    Trace,
    TraceRows,
    UploadProgress,
    UseBlock,
    Welcome,
    WindowUpdate,
    World,
)
from gt.wire.process_settings import keep_freed, more_descriptors
from gt.wire.socket import resolve, written
from gt.worker.engine.registry import open_engine
from gt.worker.executor import Executor
from gt.worker.plane.base import ALL, Plane, Unrecoverable
from gt.worker.plane.registry import open_plane
from gt.worker.process.completions import Completions
from gt.worker.process.memory_budget import MIN_LIMIT_BYTES, Budget
from gt.worker.process.profiler import take_times
from gt.worker.process.progress import Effort
from gt.worker.program.runner import Poisoned

log = logging.getLogger("gt.worker")
MAX_RUNS_PER_DONE = 8
# A Run of fewer numbers that took more seconds is answered by itself
SHORT_RUN_NUMBERS, LONG_RUN_SECONDS = 400, 5e-4
DEBUG_RUN_SECONDS = 0.5  # from which the debug log has a Run's time
MAX_JOINED_BYTES = 16 << 10  # bytes of a fetched piece that is sent with its Run's Done
EXIT_SECONDS = 2.0  # until a process that shares memory with others is ended
HOT_SECONDS = 0.02  # after an instruction in which another is likely
NOBODY = -1  # no session yet
MAX_SMALL_UPLOAD_BYTES = 64 << 10  # bytes of an upload that is not acknowledged by UploadProgress


class Terminated(BaseException):
    """SIGTERM, raised in the executing thread."""


class Loop:
    """One worker's handling of messages. `receive` and `lost` are called by the I/O thread."""

    def __init__(
        self,
        engine: Any,
        plane: Plane,
        joined: Callable[[str], None] | None = None,
        renew: Callable[[str], object] | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.name = ""
        self._joined = joined
        self.renew = renew  # restarts the process under its name; None if it cannot, or is about to end
        self.executor = Executor(engine, plane, self.send, budget)
        self._home = liveness.home() or bsd.gethostname()
        self.link: Dealer | None = None
        self.done = self._running = -1  # the last Run executed (on a GPU: issued), and the one under way
        self._ran = 0.0, 0.0  # seconds in Runs, and when the one under way began, 0.0 for none; one value, for other threads
        self._unreported = 0  # Runs executed that no Done has reported
        self._pieces: list[tuple[int, memoryview | bytes]] = []  # small ones, whole, which the next Done takes along
        self._completions: Completions[Done] = Completions(self.send)
        self._shared = False  # a Run is done once the device has completed it
        self._engine, self._plane = engine, plane
        plane.on_link_failed = lambda *failure: self.send(LinkFailed(*failure))
        plane.on_link_made = lambda *link: self.send(LinkMade(*link))
        self._effort = Effort(engine.progress is None)
        self._inbox: queue.SimpleQueue[tuple[Message, int]] = queue.SimpleQueue()
        self._exit: Exit | None = None
        self._why = ""
        self._session = NOBODY  # the session that the next Runs belong to
        self._members: frozenset[int] = frozenset()  # workers whose memory it shares, or will once it handles that World

    def send(self, message: Message, frames: tuple = (), alone: bool = False) -> None:
        """Send a message, from any thread. A Piece is not flushed: it leaves with its Run's Done, or the next message.

        alone: flush a Piece too, which belongs to no Run under way.
        """
        assert self.link is not None
        if type(message) is Piece and message.total > CHUNK and message.offset == 0:
            self._send_done()  # the piece may be forwarded once earlier Runs are done
        # A small whole piece saves its message: it is sent within the Done that follows anyhow.
        if type(message) is Piece and frames and 0 < message.total <= MAX_JOINED_BYTES and len(self._pieces) < MAX_PIECES:
            self._pieces.append((message.key, frames[0]))
            return
        # Queue without waking the I/O thread; `push` below flushes. A fetch of many chunks so costs one wake-up.
        self.link.send(message, frames, wake=False)
        if alone or type(message) is not Piece:
            self.link.push()

    # ---- I/O thread

    def receive(self, message: Message, frames: tuple) -> None:
        """Handle one message of the dispatcher. Messages that can wait are queued for the executing thread."""
        match message:
            case Data():
                self._receive_data(message, frames)
            case UseBlock() | OfferArena() | OfferFile():
                self.executor.arenas.receive(message)
            case Run() | TorchSettings() | World() | CloseArenas() | PrepareCompilation() | Skip():
                self._receive_in_order(message)
            case Query():
                self._answer(message)
            case Trace():
                self._trace(message)
            case WindowUpdate():
                self._widen_window(message)
            case Abort():
                self._abort(message)
            case Welcome():
                self._welcomed(message)
            case Renew(reason):
                self._start_afresh(reason)
            case Exit():
                self._end(message)
            case Reject(error):
                self.lost(str(errors.from_wire(error)))
            case _:
                log.warning("a worker got %s, which it does not expect", type(message).__name__)

    def _abort(self, message: Abort) -> None:
        index, reason = message.index, message.reason
        log.debug("abort of worker %d: %s", index, reason)
        self._plane.abort(index, reason)
        # A dead process may have left flags in shared memory that no longer change, and kernels may spin on them: only a new
        # process is free of those.
        if index in self._members:
            self._start_afresh(f"worker {index}, whose memory it shares, is gone: {reason}")
        if index == ALL:
            self.executor.uploads.cancel(reason)

    def _answer(self, query: Query) -> None:
        began = time.thread_time()
        counted = self.executor.stats(query.programs, query.holders) if query.stats else {}
        stats = {"name": self.name, **self._usage(), **counted} if query.stats else {}
        took = time.thread_time() - began
        at = self._at()
        work = self._effort.seconds(at[3]) if at is not None else 0.0
        body = {"done": self.done, "at": at, "work": work, "took": took, "stats": stats}
        if query.process:
            body["sight"] = [*liveness.sight(query.process, liveness.home())]
        self.send(Report(query.request, body))

    def _trace(self, message: Trace) -> None:
        """Begin a trace of a session, or end it and send it."""
        if message.on:
            self.executor.begin_trace(message.session)
        parts = [] if message.on else list(self.executor.end_trace(message.session, message.request))
        for part in parts or [TraceRows(message.request, 0, [], [], [], [], [], time.monotonic(), 0, 0)]:
            self.send(part)

    def _receive_in_order(self, message: Run | TorchSettings | World | CloseArenas | PrepareCompilation | Skip) -> None:
        """Queue it for the executing thread, but for the beginning of an interrupt."""
        if isinstance(message, Skip) and message.on:
            # An interrupt has two parts: Skip(since < 0) pauses and is answered by Paused; a second one names the seq from
            # which to skip. Both overtake the queued Runs, since they are about those.
            if message.since >= 0:
                self.executor.skip(message.session, message.since)
            else:
                self.send(Paused(message.session, self.executor.pause(message.session)))
            return
        if isinstance(message, World):
            self._introduce(message)
        # The number is taken now, on arrival. The executing thread compares it later: a larger one then means that the message
        # is stale, as another interrupt or abort came between.
        count = self.executor.pauses[message.session] if isinstance(message, Skip) else self.executor.uploads.epoch
        self._inbox.put((message, count))

    def _receive_data(self, message: Data, frames: tuple) -> None:
        self.executor.uploads.receive(message, frames[0] if frames else None)
        if message.total < 0:
            self.executor.arenas.forget_read(message.key)
        if message.total > MAX_SMALL_UPLOAD_BYTES:
            self.send(UploadProgress(message.key, message.offset + len(frames[0])))

    def _widen_window(self, message: WindowUpdate) -> None:
        self.executor.downloads.widen_window(message.key, message.upto)
        if message.upto < 0:  # once more behind the Runs before it, of which one may begin the piece
            self._inbox.put((message, 0))

    def _welcomed(self, message: Welcome) -> None:
        self.name = message.name
        if self.link is not None:
            self.link.watch_host()
        log.info("connected as %s", self.name)
        if self._joined is not None:
            self._joined(self.name)

    def _introduce(self, world: World) -> None:
        own_index = self._own(world)
        self._plane.introduce(world.workers, world.ways, world.key, own_index, world.broken)
        if own_index in world.members:
            self._members = frozenset(world.members)

    def _start_afresh(self, reason: str) -> None:
        """Restart the process at once: nobody waits for the instruction under way."""
        log.info("%s: this process starts afresh", reason)
        try:
            if self._exit is None and self.renew is not None:
                self.renew(self.name)
        except OSError as error:
            reason = f"{reason}, and it cannot be started afresh: {error}"
        self.lost(reason)

    def _usage(self) -> dict[str, float]:
        """Seconds that this process was busy, and of CPU time, with the moment on its own clock. By any thread."""
        # One read of one tuple: the executing thread replaces it whole, so the pair is consistent without a lock.
        (busy, began), clock = self._ran, time.monotonic()
        if began:
            busy += max(0.0, clock - began)
        return {"busy_seconds": round(busy, 6), "cpu_seconds": round(time.process_time(), 6), "clock": round(clock, 6)}

    def _own(self, world: World) -> int:
        return next((row[0] for row in world.workers if row[1] == self.name), -1)

    def _at(self) -> list | None:
        """The instruction under way in the executing thread, else the one that is awaited on the device; for Query."""
        running, where = self._running, self.executor.where()
        if where is not None and running > self.done:
            return [running, *where]
        # No Run is under way, but a GPU may still execute what was issued: name the oldest work that it has not completed.
        pending, progress = self._completions.first(), self._engine.progress
        if pending is None or progress is None:
            return None
        return [pending.message.seq, 0, pending.op, "device", progress.completed()]

    def lost(self, reason: str) -> None:
        """The link ended. After an Exit this changes nothing."""
        if self._exit is None:
            self._why = reason
            self._end(Exit(reason))

    def _end(self, message: Exit) -> None:
        """Fail all waits, and have the executing thread stop."""
        self._exit = message
        if self._members:  # the executing thread may wait for the device, which waits for another worker
            _end_soon()
        self._plane.abort(ALL, message.reason)
        self.executor.uploads.cancel(message.reason)
        self.executor.end_pauses()
        self._inbox.put((message, 0))

    # ---- executing thread

    def serve(self) -> str:
        """Carry out messages until the end; the reason why it ended, "" for an Exit."""
        self._effort.begin()
        while True:
            message, epoch = self._next()
            if self._exit is not None:  # nobody waits for the Runs that are still queued
                log.info("exit: %s", self._exit.reason)
                return self._why
            if isinstance(message, TorchSettings):
                self._switch(message)
                continue
            if isinstance(message, Skip):
                self.executor.resume(message.session, epoch)
                continue
            if isinstance(message, CloseArenas):
                self.executor.arenas.close(message)
                continue
            if isinstance(message, PrepareCompilation):
                self._prepare(message)
                continue
            if isinstance(message, WindowUpdate):
                self.executor.cancel_fetch(message.key)
                continue
            if isinstance(message, World):
                log.debug("world %d: %d workers", message.generation, len(message.workers))
                # Host memory is divided by the number of workers on this host.
                self.executor.budget.share(message.hosts.get(self._home, 1))
                self._plane.join_by_nccl(message.nccl)
                self._plane.world(message.workers, message.ways)
                own = self._own(message)
                if own in message.members:
                    # Collective: each member waits here for the others. Transfers that were bound before go by the device from
                    # now on.
                    self._plane.form(message.members, own, message.unique_id)
                    self.executor.rebind_transfers()
                continue
            assert isinstance(message, Run)

            # A Run. The busy seconds restart at `began`, so that a Query during it counts its part.
            self._running, began = message.seq, time.monotonic()
            self._ran = self._ran[0], began
            # Pieces that are fetched in place are copied before the Run may overwrite their tensors.
            self.executor.downloads.copy_unsent()
            if message.defines:
                self.executor.define(message.defines)
            self.executor.run(message.code, message.base, epoch, message.timed)
            self.done, took = message.seq, time.monotonic() - began
            self._ran = self._ran[0] + took, 0.0
            if took > DEBUG_RUN_SECONDS:
                log.debug("run %d took %.2f s", message.seq, took)
            self._unreported += 1
            # A GPU shared by sessions: Done is sent when the device has completed the Run, so that time slices are real time
            # and not the time to issue.
            if self._shared:
                self._send_done(message.base + (message.code[1] if message.code else 0), self._engine.progress.fence())
                continue
            # The dispatcher may have kept others back for it.
            long = len(message.code) < SHORT_RUN_NUMBERS and took > LONG_RUN_SECONDS
            if self._unreported >= MAX_RUNS_PER_DONE or long:
                self._send_done()

    def _prepare(self, message: PrepareCompilation) -> None:
        prepare = getattr(self._engine, "prepare_compilation", None)
        if prepare is None:
            return
        try:
            prepare(message.idle)
        except Exception as error:  # the program that needs the compiler reports it, and is executed without one
            log.info("a compiler cannot be prepared", exc_info=error)

    def _switch(self, message: TorchSettings) -> None:
        """The Runs of another session follow."""
        self._engine.switch(message.switches)
        # Another session's values may still be in the allocator's memory: it clears what it hands out from now on.
        if self._session not in (NOBODY, message.session):
            self._engine.clear()
        self._session = self.executor.session = message.session
        self._shared = message.shared and self._engine.progress is not None
        self.executor.budget.serve(message.session, message.memory)

    def _next(self) -> tuple[Message, int]:
        """The next message. Soon after an instruction this thread reads the link itself."""
        if self._inbox.empty():
            self._send_done()
        if self._inbox.empty() and self.link is not None:
            # This thread polls the socket itself for HOT_SECONDS: that saves a switch between threads for each op of an eager
            # program.
            self.link.lead(self._busy, HOT_SECONDS)
        return self._inbox.get()

    def _busy(self) -> bool:
        return not self._inbox.empty()

    def _send_done(self, op: int = -1, fence: Callable[[], None] | None = None) -> None:
        if not self._unreported:
            return
        self._unreported = 0
        pieces, self._pieces = self._pieces, []
        times = take_times(self.executor.times)
        # Nothing is under way on the device: the Done takes the small pieces along in one message. Otherwise it must follow
        # the Dones before it, which wait for the device.
        if fence is None and self._completions.first() is None:
            self.send(Done(self.done, times, [key for key, _ in pieces]), tuple(frame for _, frame in pieces))
            return
        assert self.link is not None
        for key, frame in pieces:  # they do not wait for the device
            self.link.send(Piece(key, 0, len(frame)), (frame,), wake=False)
        self._completions.add(Done(self.done, times), op, fence)

    def leave(self, why: str) -> None:
        """Send Goodbye as the last message, and end the link."""
        self.renew = None  # a worker that was told to end does not restart
        self._completions.close()
        self.executor.arenas.end()
        if self.link is not None:
            self.send(Goodbye(why))
            self.link.close()


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of one worker, from its operator or from the program that starts it.

    host, port: the server's address.
    name: the name that it asks for, "" for the next free one.
    device: "" takes a GPU if the engine has one.
    wait: seconds to look for the server, None for ever.
    secret: the secret of the server's workers, "" where it asks for none.
    memory: limit in bytes, of the device on a GPU. 0 takes GT_MEMORY_LIMIT; without that a CPU worker has its share of the
        host's memory, and a GPU worker no limit.
    libraries: modules whose ops it executes.
    rank: its index, -1 lets the dispatcher choose.
    """

    host: str
    port: int
    token: str = ""
    name: str = ""
    backend: str = "torch"
    device: str = ""
    wait: float | None = 10.0
    secret: str = ""
    memory: int = 0
    libraries: Sequence[str] = ()
    rank: int = -1

    @property
    def limit(self) -> int:
        """Bytes of the memory limit that was asked for, 0 for none; ConfigError if GT_MEMORY_LIMIT is no size."""
        return self.memory or env.size("GT_MEMORY_LIMIT", 0, least=MIN_LIMIT_BYTES)


def run(
    options: WorkerOptions,
    joined: Callable[[str], None] | None = None,
    renew: Callable[[str], object] | None = None,
    ready: Callable[[], None] | None = None,
) -> str:
    """Be a worker until Exit, SIGTERM or the end of the link. Returns the reason why it ended, "" if it was asked to.

    joined: called with the name that the server gave.
    renew: restarts the process under that name, when a session that had it to itself ends, or leaves its device unusable.
        Without it the worker ends then. May be called in the main thread of a forked child.
    ready: called once the options have proved right, before the server is looked for.
    """
    logs.setup("worker", f"gt.worker {options.name}".strip())
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminated) if main else None
    if main:
        keep_freed()
        more_descriptors()
    plane: Plane | None = None
    budget = Budget()
    loop, why, spoiled = None, "", False
    try:
        limit = options.limit
        engine = open_engine(options.backend, options.device)
        ops = engine.load(options.libraries)
        # The order matters: the engine decides the plane, and the plane's ports are part of Hello.
        wide = bool(env.get("GT_IFNAME")) or not loopback(resolve(options.host))
        plane = open_plane(env.get("GT_TRANSPORT"), engine, wide)
        info = plane.open()
        # Limits of a process hold for a worker that is a process of its own; a thread's worker shares its program's.
        if main and engine.kind == "cpu":
            budget.open(limit)
        elif limit:
            engine.bound(limit)
        loop = Loop(engine, plane, joined, renew, budget)
        if ready is not None:
            ready()
        _join(loop, options, {"device": engine.kind, "ops": ops, "rates": engine.host_rates(), **info})
        return loop.serve()
    except Terminated:
        return ""
    except KeyboardInterrupt:
        return "interrupted"
    except (errors.GTError, Unrecoverable) as error:
        why = str(error)
    except Poisoned as error:
        why, spoiled = f"the device cannot be used any more: {error}", True
    finally:
        if main:
            # A second SIGTERM must not interrupt the clean-up.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _leave(loop, plane, why)
        budget.close()
        if main:
            signal.signal(signal.SIGTERM, before)
    if spoiled and loop is not None and renew is not None:
        log.warning("%s; it starts afresh", why)
        renew(loop.name)
    return why


def _join(loop: Loop, options: WorkerOptions, info: dict[str, Any]) -> None:
    """Connect and say Hello. The link's thread starts here: the link is in place before anything is answered."""
    address = written(options.host, options.port)
    loop.link = Dealer(address, loop.receive, loop.lost, timeouts=LinkTimeouts(options.wait), token=options.token)
    # As the server will read it, since the proof covers it
    about = {"name": logs.sendable(options.name), "pid": os.getpid(), "host": bsd.gethostname(), "home": liveness.home()}
    about.update(backend=options.backend, rank=options.rank, gpu=_gpu(info["device"], options.device), **info)
    if options.secret:
        about["proof"] = proof(options.secret, about)
    loop.send(hello("worker", info=about))


def _gpu(kind: str, device: str) -> int:
    """The number of a worker's GPU on its host, -1 for none."""
    if kind == "cpu":
        return -1
    number = device.partition(":")[2]
    # CUDA numbers the visible GPUs from 0; the dispatcher compares the host's numbers.
    at, visible = int(number) if number.isdecimal() else 0, env.visible_gpus()
    return int(visible[at]) if visible and at < len(visible) and visible[at].isdecimal() else at


def _leave(loop: Loop | None, plane: Plane | None, why: str) -> None:
    if loop is not None:
        loop.leave(why)
    if plane is not None:
        plane.close()


def _end_soon() -> None:
    leaving = threading.Timer(EXIT_SECONDS, os._exit, (1,))
    leaving.daemon = True
    leaving.start()


def _terminated(number: int, frame: Any) -> None:
    raise Terminated
