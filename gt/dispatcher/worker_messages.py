"""Messages of workers to the dispatcher: each is passed to the session that waits for it, or whose op it is about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gt.dispatcher.cluster.health import Survey
from gt.dispatcher.cluster.leases import Lease
from gt.dispatcher.cluster.membership import Membership
from gt.dispatcher.cluster.observers import Observers
from gt.dispatcher.cluster.tracing import Traces
from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.events import Peer
from gt.dispatcher.fairness.round_robin import RoundRobin
from gt.dispatcher.programs.profile import record_times
from gt.dispatcher.session import ClientSession
from gt.dispatcher.state.failures import Planned, op_failed
from gt.dispatcher.state.memory_report import memory_report
from gt.errors import ProtocolError
from gt.wire.messages import (
    MAX_OTHERS,
    ArenaOpened,
    Described,
    Done,
    Message,
    OpError,
    Paused,
    Piece,
    Report,
    TraceRows,
    UploadProgress,
)

MAX_ERROR_CHARACTERS = 4000  # characters of a worker's report on a failure


class WorkerMessagesHost(Protocol):
    """The core, as far as these messages need it."""

    workers: dict[Peer, Worker]
    observers: Observers
    round_robin: RoundRobin
    traces: Traces
    membership: Membership
    now: float

    def guarded(self, session: ClientSession, what: str, call: Callable, *args: object) -> None: ...
    def warn(self, peer: Peer, what: object) -> None: ...
    def log_line(self, kind: str, peer: str, text: str = "", **fields: object) -> None: ...
    def name(self, peer: Peer) -> str: ...
    def lease(self, peer: Peer) -> Lease: ...
    def surveyed(self, survey: Survey) -> None: ...


class WorkerMessages:
    """`handlers`: the method for each message, which gets the peer, the message and its frames."""

    def __init__(self, core: WorkerMessagesHost) -> None:
        self._core = core
        self.handlers: dict[type[Message], Callable] = {
            Piece: self._piece, Described: self._described, ArenaOpened: self._arena_opened, Done: self._done,
            Paused: self._paused, OpError: self._op_error, TraceRows: self._trace_rows, Report: self._report,
        }  # fmt: skip

    def _worker(self, peer: Peer) -> Worker:
        worker = self._core.workers.get(peer)
        if worker is None:
            raise ProtocolError("the message is one of workers, and this peer is not a worker")
        return worker

    def _session_of(self, peer: Peer, key: int) -> ClientSession | None:
        """The session of a worker that waits for an answer under this key."""
        return next((s for s in self._core.lease(peer).sessions.values() if key in s.fetches.by_key), None)

    def _piece(self, peer: Peer, message: Piece, frames: tuple) -> None:
        worker, session = self._worker(peer), self._session_of(peer, message.key)
        self._core.log_line("WORKER_RECV", worker.name, f"Piece {message.key}", bytes=sum(len(f) for f in frames))
        if session is not None:
            session.fetches.piece(worker.index, message, frames)
            self._resume(session)

    def _resume(self, session: ClientSession) -> None:
        """Resume a session whose wait may be over."""
        if session.inbox:
            self._core.round_robin.resume(session.peer)

    def _described(self, peer: Peer, message: Described, frames: tuple) -> None:
        worker, session = self._worker(peer), self._session_of(peer, message.request)
        if session is not None:
            session.fetches.described(worker.index, message.request, message.specs)

    def took(self, peer: Peer, message: UploadProgress, frames: tuple) -> None:
        """Handle the progress of an upload on its way to this worker, or of its part of a file."""
        worker = self._worker(peer)
        key = message.key
        session = next(
            (s for s in self._core.lease(peer).sessions.values() if key in s.uploads.open or key in s.uploads.reads), None
        )
        if session is not None:
            session.uploads.took(worker.index, key, message.upto)
            # A worker has read its part of a file, which held back the instructions that use it.
            if session.outbox.held and not session.uploads.awaited:
                session.send_held()
                self._resume(session)

    def _arena_opened(self, peer: Peer, message: ArenaOpened, frames: tuple) -> None:
        worker = self._worker(peer)
        session = next((s for s in self._core.lease(peer).sessions.values() if message.arena in s.arenas.by_key), None)
        if session is not None:
            session.arenas.opened(worker.index, message)
            session.uploads.decide()
            session.send_held()
            self._core.round_robin.resume(session.peer)

    def _done(self, peer: Peer, message: Done, frames: tuple) -> None:
        worker = self._worker(peer)
        # Runs are executed in order, so one number acknowledges all before it. It cannot go back, nor beyond what was sent.
        if not worker.done <= message.seq <= worker.runs:
            raise ProtocolError(f"Done.seq is {message.seq}, want {worker.done} to {worker.runs}, which are done and sent")
        if len(message.pieces) != len(frames):
            raise ProtocolError(f"Done.pieces has {len(message.pieces)} keys and {len(frames)} frames, want as many of both")
        # Small answers travel with the acknowledgement. They are taken first: `finished` may let their requests be answered.
        for key, frame in zip(message.pieces, frames, strict=True):
            self._piece(peer, Piece(key, 0, len(frame)), (frame,))
        lease = self._core.lease(peer)
        sessions = [s for s in lease.sessions.values() if worker.index in s.emitter.used]
        if message.times:
            record_times(sessions, message.times)
        lease.cluster.finished(worker, message.seq)
        self._core.log_line("WORKER_RECV", worker.name, f"Done {message.seq}")
        for session in sessions:
            self._core.guarded(session, "an acknowledgement", session.op_stream.acknowledge)
            if session.inbox:
                self._core.round_robin.resume(session.peer)
        if lease.cluster.mended:
            self._core.membership.use_mended(lease)

    def _paused(self, peer: Peer, message: Paused, frames: tuple) -> None:
        worker = self._worker(peer)
        for session in list(self._core.lease(peer).sessions.values()):
            if session.number == message.session:
                self._core.guarded(session, "an interrupt", session.op_stream.paused, worker.index, message.seq)

    def _op_error(self, peer: Peer, message: OpError, frames: tuple) -> None:
        """Handle the failure of an instruction: the session that issued its op learns of it, with the op's origin."""
        worker, lease = self._worker(peer), self._core.lease(peer)
        numbers, issued = (message.seq, *message.others), lease.cluster.seq
        if len(message.others) > MAX_OTHERS or max(numbers) > issued:
            got = f"OpError has {len(message.others)} others and the number {max(numbers)}"
            raise ProtocolError(f"{got}, want up to {MAX_OTHERS}, and numbers up to {issued}, which are issued")
        # A session that this worker was sent nothing of has no op there that could fail.
        sessions = [s for s in lease.sessions.values() if worker.index in s.emitter.used]

        # Ops that a worker skipped for a Ctrl-C are of one program. Others have lost nothing.
        if message.kind == "interrupted":
            skipped = {*numbers}
            for session in sessions:
                if session.issued(skipped):
                    self._core.guarded(session, "an interrupt", session.drop, skipped)
            return

        # Op numbers are unique over all sessions, so one journal at most has it. An answer to a client is in no journal.
        for session in sessions:
            if (row := session.journal.find(message.seq)) is not None:
                self._failed(worker, session, row, message)
                return
            if session.fetches.failed(message.seq, worker.name, message.message):
                self._resume(session)
                return

        # Nobody's: its session has ended meanwhile.
        self._core.warn(peer, f"op {message.seq} failed: {message.message}")

    def _failed(self, worker: Worker, session: ClientSession, row: Planned, message: OpError) -> None:
        """Tell a session that its op has failed on a worker. row: of the op in its journal."""
        # A peer that does not answer, or a tensor that is not there, follows from a worker's loss, which has been told.
        follows = message.kind == "peer" or (message.kind == "missing" and session.failures.missing)
        if follows and (loss := session.failures.loss()) is not None:
            self._core.guarded(session, "a failed op", session.failures.taint, message.seq, loss, message.others)
            return

        # The user's error: the line of the op, the worker's words, and who holds the memory if it was short.
        detail = memory_report(session, worker, message.memory) if message.memory else ""
        if session.failures.dropped and message.kind == "missing":
            detail = ", since an interrupt (Ctrl-C) dropped the op that makes it: compute it again"
        error = op_failed(row, message.seq, message.kind, message.message[:MAX_ERROR_CHARACTERS] + detail, worker.name)
        failed = row.at(message.seq)
        self._core.log_line("ERROR", worker.name, str(error), op=failed.known.template.op, group=failed.origin.group)

        full = message.kind == "memory"
        self._core.observers.recent.add_error(
            self._core.now, session.number, worker.name, str(error), failed.known.template.op, failed.origin
        )
        self._core.guarded(session, "a failed op", session.failures.trouble, message.seq, error, message.others, full)

    def _trace_rows(self, peer: Peer, message: TraceRows, frames: tuple) -> None:
        self._core.traces.rows(peer, self._worker(peer), message)

    def _report(self, peer: Peer, message: Report, frames: tuple) -> None:
        worker = self._worker(peer)
        self._core.observers.answered(worker, message)
        survey = self._core.lease(peer).watch.answered(worker, message)
        if survey is not None:
            self._core.surveyed(survey)
