"""The dispatcher, pure: events in, actions out. Knows peers, the cluster and sessions; no socket, clock or thread.

A peer is nobody until its Hello is accepted; then it is a client with a session or a worker of the cluster. What is out of
place is refused with an error that names the field, and everybody else goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from gt import errors
from gt.dispatcher.cluster.admission import Admission
from gt.dispatcher.cluster.health import Survey, Watch, answer
from gt.dispatcher.cluster.leases import Exclusive, Lease, Shared, Terms, workers
from gt.dispatcher.cluster.membership import Membership
from gt.dispatcher.cluster.observers import Observers, logged
from gt.dispatcher.cluster.tracing import Traces
from gt.dispatcher.cluster.workers import Cluster, Worker
from gt.dispatcher.events import (
    Action,
    Close,
    Event,
    Examined,
    Lines,
    Log,
    Malformed,
    Peer,
    PeerLost,
    Received,
    Send,
    Tick,
    Turn,
    TurnWanted,
)
from gt.dispatcher.fairness.round_robin import RoundRobin
from gt.dispatcher.fairness.time_slices import Pace
from gt.dispatcher.planning.op_stream import MAX_WAITING_BATCHES
from gt.dispatcher.programs.profile import record_times
from gt.dispatcher.session import ClientSession
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.failures import op_failed
from gt.dispatcher.state.fetches import MAX_REQUESTS
from gt.dispatcher.state.memory_report import holders, memory_report
from gt.errors import GTError, ProtocolError, SystemFailure
from gt.logs import Sparse
from gt.wire.messages import (
    MAX_OTHERS,
    THROUGH,
    ArenaOpened,
    CloseArenas,
    Describe,
    Described,
    Done,
    Exit,
    Failed,
    Fetch,
    FinishCapture,
    Goodbye,
    Hello,
    Inspect,
    InspectFragments,
    Interrupt,
    LinkFailed,
    Message,
    Metrics,
    Observe,
    OfferArena,
    OfferFile,
    OpError,
    Ops,
    Paused,
    Piece,
    Records,
    Reject,
    Report,
    Run,
    Stats,
    Store,
    TensorRoles,
    Trace,
    TraceRows,
    UploadChunk,
    UploadProgress,
)

log = logging.getLogger("gt.dispatcher")
MAX_ERROR_CHARACTERS = 4000  # characters of a worker's report on a failure
MAX_LOGGED_REFUSALS = 20  # refusals logged in a second


class Core:
    """`logging`: make Log actions, with the plan's lines, for somebody who reads them. process: of the dispatcher, see
    wire.liveness. terms: on which workers are lent.
    """

    def __init__(
        self,
        heartbeat: float = 10.0,
        logging: bool = False,
        process: Sequence = (),
        terms: Terms | None = None,
        pace: Pace | None = None,
        context: Callable[..., SessionContext] = SessionContext,
    ) -> None:
        # Terms of the server.
        self.heartbeat, self.process = heartbeat, list(process)
        self.terms = terms or Terms()
        self.logging = logging
        self.pace = pace or Pace()
        self.context = context  # makes a session's

        # Who is connected, and which workers each session has.
        self.sessions: dict[Peer, ClientSession] = {}
        home = self.process[1] if self.process else ""
        lend = self.terms.exclusive
        self.lending = Exclusive(heartbeat, home, self.terms) if lend else Shared(heartbeat, home, self.sessions)
        self.workers: dict[Peer, Worker] = {}
        self.received = self.sent = self.relayed = 0

        # Parts, each with the messages that it handles itself (below).
        self.admission = Admission(self.lending, most=self.terms.most)
        self.round_robin = RoundRobin(self, self.pace)
        self.observers = Observers(self)
        self.traces = Traces(self, self._lease)
        self.membership = Membership(self)

        # The event in hand: its actions so far, and its time.
        self._sparse = Sparse(log, MAX_LOGGED_REFUSALS)
        self._actions: list[Action] = []
        self.page: list[str] = []  # lines of the instruction log that are not written yet
        self.now = 0.0
        self._on: dict[type[Message], Callable] = {
            Hello: self.membership.hello, Ops: self._ops, Fetch: self._fetch, Describe: self._describe, Inspect: self._inspect,
            FinishCapture: self._finish_capture, Stats: self._stats, UploadChunk: self._upload_chunk,
            Goodbye: self.membership.goodbye, Piece: self._piece, Described: self._described, Report: self._report,
            Done: self._done, OpError: self._op_error, UploadProgress: self._upload_progress,
            InspectFragments: self._inspect_fragments,
            OfferArena: self._offer_arena, CloseArenas: self._close_arenas, ArenaOpened: self._arena_opened,
            OfferFile: self._offer_file, Store: self._store, Metrics: self._metrics, TensorRoles: self._tensor_roles,
            Observe: self.observers.observe, Trace: self.traces.trace, TraceRows: self._trace_rows, Interrupt: self._interrupt,
            LinkFailed: self.membership.link_failed, Paused: self._paused,
        }  # fmt: skip

    @property
    def cluster(self) -> Cluster:
        """The workers of a shared server."""
        assert isinstance(self.lending, Shared)
        return self.lending.common.cluster

    @property
    def watch(self) -> Watch:
        """The watch of a shared server."""
        assert isinstance(self.lending, Shared)
        return self.lending.common.watch

    def handle(self, event: Event) -> list[Action]:
        """The actions that follow from one event, in their order."""
        # 1. The time of the event is the time for all that follows from it.
        self._actions = []
        self.now = event.at
        for lease in self.lending.leases:
            lease.cluster.now = event.at
        self.pace.begin()
        began = self.pace.now() if self.traces.open else -1.0

        # 2. Its consequences.
        if isinstance(event, Received):
            self._receive(event)
        elif isinstance(event, PeerLost):
            self.membership.remove(event.peer, event.reason)
        elif isinstance(event, Malformed):
            self.refuse(event.peer, ProtocolError(event.reason))
        elif isinstance(event, Tick):
            self.membership.tick()
            self.observers.tick()
            self.traces.tick()
        elif isinstance(event, Examined):
            self.membership.examined(event)
        elif isinstance(event, Turn):
            self.round_robin.go_on()

        # 3. What is left over: a slice of large garbage, the log's lines, and a wish for another turn.
        if self.pace.leavings:
            self.pace.leavings.clear()
        if self.page:
            self._turn_page()
        if self.round_robin.pending:
            self._actions.append(TurnWanted())
        if began >= 0:
            self.traces.note(event, began)
        return self._actions

    def check(self) -> None:
        """Assert the invariants that hold between events; tests call it after each."""
        # The parts by themselves, then what they must agree on: each session and worker is in exactly one lease.
        for session in self.sessions.values():
            session.table.check()
            session.programs.check()
            assert len(session.op_stream.coming) <= MAX_WAITING_BATCHES
            session.uploads.check()
        self.round_robin.check()
        self.observers.check()
        for lease in self.lending.leases:
            lease.cluster.check()
            assert all(self.workers[w.peer] is w and self.lending.of(w.peer) is lease for w in workers(lease))
            assert all(self.sessions[peer] is s and self.lending.of(peer) is lease for peer, s in lease.sessions.items())
        assert len(self.workers) == sum(len(workers(lease)) for lease in self.lending.leases)
        self.lending.check()

    # ---- in and out

    def send(self, peer: Peer, message: Message, frames: tuple = ()) -> None:
        self.sent += 1
        self._actions.append(Send(peer, message, frames))
        # Runs are logged by their plan lines, one for each op; Records would make a line for each look of an observer.
        if (self.logging or self.observers.recent.wanted) and not isinstance(message, (Run, Records)):
            self.log_line("SEND", self.name(peer), type(message).__name__, bytes=sum(len(f) for f in frames))

    def close(self, peer: Peer) -> None:
        self._actions.append(Close(peer))

    def act(self, actions: Iterable[Action]) -> None:
        self._actions += actions

    def log_line(self, kind: str, peer: str, text: str = "", **fields: object) -> None:
        if self.logging or self.observers.recent.wanted:
            self._turn_page()
            entry = Log(kind, peer, text, fields)
            self._actions += [entry] if self.logging else ()
            if self.observers.recent.wanted:
                self.observers.recent.add_entry(entry, self.now)

    def _turn_page(self) -> None:
        """Put out the lines that scribes have written, before any other line."""
        if self.page:
            text = "".join(self.page)
            self._actions += [Lines(text)] if self.logging else ()
            self.page.clear()
            if self.observers.recent.wanted:
                self.observers.recent.add_lines(text, self.now)

    def write_log(self, wanted: bool) -> None:
        """Begin to write the instruction log for observers, or end it. One that is kept in a file goes on either way."""
        for session in self.sessions.values() if not self.logging else ():
            session.emitter.write_log(self.page if wanted else None)

    def name(self, peer: Peer) -> str:
        if peer in self.workers:
            return self.workers[peer].name
        if peer in self.observers.peers:
            return "an observer"
        return f"client{self.sessions[peer].number}" if peer in self.sessions else self.lending.name(peer) or peer.hex()[:8]

    def _receive(self, event: Received) -> None:
        self.received += 1
        # A worker that was told to start afresh: its last messages are of a session that has ended.
        if event.peer in self.lending.renewing:
            return
        if event.peer not in self.sessions:
            self.handle_message(event.peer, event.message, event.frames)
        elif type(event.message) is Ops and event.message.fetch:
            self._receive_ops_and_fetch(event, event.message.fetch)
        else:
            self._receive_of_client(event)

    def _receive_ops_and_fetch(self, event: Received, fetch: list) -> None:
        """A batch and a question: two messages in one, whose instructions are sent to workers together."""
        session = self.sessions[event.peer]
        if len(fetch) != 3 or any(type(number) is not int for number in fetch):
            self.refuse(event.peer, ProtocolError(f"Ops.fetch is {fetch!r:.60}, want three integers, or nothing"))
            return
        # The batch may have been refused, and its session ended: then the question has nobody to answer.
        with session.op_stream.asked():
            self._receive_of_client(event)
            if event.peer in self.sessions:
                self._receive_of_client(Received(event.peer, Fetch(*fetch), (), event.at))

    def _receive_of_client(self, event: Received) -> None:
        if not self.round_robin.waits(event):
            self.handle_message(event.peer, event.message, event.frames)
            # The message may have ended a stall, or begun work that takes several turns.
            session = self.sessions.get(event.peer)
            if session is not None and (session.inbox or session.op_stream.busy):
                self.round_robin.resume(event.peer)

    def handle_message(self, peer: Peer, message: Message, frames: tuple) -> None:
        """Handle a message. A bad one disconnects its sender, and no other."""
        handler = self._on.get(type(message))
        if handler is None:
            self.refuse(peer, ProtocolError(f"{type(message).__name__} is not for the dispatcher"))
        else:
            self.attempt(peer, type(message).__name__, handler, peer, message, frames)

    def attempt(self, peer: Peer, what: str, call: Callable, *args: object) -> None:
        """Call this for a peer. An error disconnects this peer, and no other."""
        try:
            call(*args)
        except GTError as error:
            self.refuse(peer, error)
        except Exception as error:
            self.fault(peer, what, error)

    def fault(self, peer: Peer, what: str, error: Exception) -> None:
        """An unexpected exception: disconnect the peer whose message raised it. Others are unaffected."""
        if self._sparse.allows(self.now):
            log.exception("%s: %s failed", self.name(peer), what)
        text = f"internal error of the server: {type(error).__name__}: {error!s:.500}"
        self.refuse(peer, SystemFailure(f"{text} (at {what})"))

    def guarded(self, session: ClientSession, what: str, call: Callable, *args: object) -> None:
        """Call this for one of several sessions. An error ends this session, and no other."""
        try:
            call(*args)
        except Exception as error:
            self.fault(session.peer, what, error)

    def warn(self, peer: Peer, error: GTError) -> None:
        if self._sparse.allows(self.now):
            log.warning("%s: %s", self.name(peer), error)

    def refuse(self, peer: Peer, error: GTError) -> None:
        """Tell the peer what was wrong, and disconnect it: its later messages are dropped."""
        self.warn(peer, error)
        self.log_line("ERROR", self.name(peer), str(error))
        number = self.sessions[peer].number if peer in self.sessions else -1
        self.observers.recent.add_error(self.now, number, self.name(peer), str(error))

        # What its event has written so far may be half of a collective, which would leave workers waiting for one another.
        lease = self.lending.of(peer)
        for worker in lease.cluster.workers if lease is not None else ():
            worker.discard()

        # A client gets the error as an exception of its next wait. Reject is for a peer that has not been welcomed.
        if peer in self.sessions:
            self.send(peer, Failed(-1, errors.to_wire(error)))
            self.send(peer, Exit(str(error)))
        else:
            joined = peer in self.workers or peer in self.observers.peers or self.lending.name(peer)
            self.send(peer, Exit(str(error)) if joined else Reject(errors.to_wire(error)))
        self.membership.remove(peer, str(error))
        self.close(peer)

    # ---- clients

    def _session(self, peer: Peer) -> ClientSession:
        session = self.sessions.get(peer)
        if session is None:
            raise ProtocolError("the session has not been welcomed yet")
        return session

    def _ops(self, peer: Peer, message: Ops, frames: tuple) -> None:
        session = self._session(peer)
        self.log_line("RECV", self.name(peer), f"Ops {message.seq}", bytes=sum(len(f) for f in frames))
        session.op_stream.accept(message, frames)

    def _fetch(self, peer: Peer, message: Fetch, frames: tuple) -> None:
        wanted = "of every device" if message.tensor == THROUGH else f"%{message.tensor}"
        self.log_line("RECV", self.name(peer), f"Fetch {wanted}")
        self._session(peer).fetches.fetch(message.request, message.tensor, message.place)

    def _describe(self, peer: Peer, message: Describe, frames: tuple) -> None:
        self._session(peer).fetches.describe(message.request, message.tensors)

    def _inspect(self, peer: Peer, message: Inspect, frames: tuple) -> None:
        self._session(peer).fetches.inspect(message.request, message.tensor)

    def _inspect_fragments(self, peer: Peer, message: InspectFragments, frames: tuple) -> None:
        session = self._session(peer)
        session.op_stream.finish()
        session.send(Report(message.request, session.op_stream.fragments.report(message.slot)))

    def _finish_capture(self, peer: Peer, message: FinishCapture, frames: tuple) -> None:
        session = self._session(peer)
        self.round_robin.begin_thread(
            session, "FinishCapture", lambda: session.send(Report(message.request, session.programs.seal(message)))
        )

    def _stats(self, peer: Peer, message: Stats, frames: tuple) -> None:
        session, watch = self._session(peer), self._lease(peer).watch
        if sum(survey.session is session for survey in watch.surveys.values()) >= MAX_REQUESTS:
            raise ProtocolError(f"Stats.request {message.request} is one of more than {MAX_REQUESTS} under way")
        survey, asked = watch.survey(session, message)
        for worker, query in asked:
            self.send(worker, query)
        if not survey.left:
            for one in watch.without(-1):
                self.surveyed(one)

    def _interrupt(self, peer: Peer, message: Interrupt, frames: tuple) -> None:
        self._session(peer).op_stream.interrupt(message.upto)
        self.round_robin.resume(peer)

    def _paused(self, peer: Peer, message: Paused, frames: tuple) -> None:
        worker = self._worker(peer)
        for session in list(self._lease(peer).sessions.values()):
            if session.number == message.session:
                self.guarded(session, "an interrupt", session.op_stream.paused, worker.index, message.seq)

    def _metrics(self, peer: Peer, message: Metrics, frames: tuple) -> None:
        self._session(peer).logged = logged(message)

    def _tensor_roles(self, peer: Peer, message: TensorRoles, frames: tuple) -> None:
        session = self._session(peer)
        session.roles.tell(message.rows, self.now)
        if self.observers.active:
            session.roles.renew(session.table, session.cluster.workers, session.number, self.now)

    def _upload_chunk(self, peer: Peer, message: UploadChunk, frames: tuple) -> None:
        session = self._session(peer)
        session.uploads.host(message, frames)
        session.send_held()

    def _offer_arena(self, peer: Peer, message: OfferArena, frames: tuple) -> None:
        session = self._session(peer)
        session.arenas.offer(message)
        session.uploads.moved = self.now

    def _offer_file(self, peer: Peer, message: OfferFile, frames: tuple) -> None:
        session = self._session(peer)
        session.arenas.offer_file(message)
        session.uploads.moved = self.now

    def _store(self, peer: Peer, message: Store, frames: tuple) -> None:
        self.log_line("RECV", self.name(peer), f"Store of {len(message.rows)} tensors")
        self._session(peer).fetches.store(message.request, message.rows, message.later, message.file)

    def _close_arenas(self, peer: Peer, message: CloseArenas, frames: tuple) -> None:
        self._session(peer).arenas.close(message)

    # ---- workers

    def _lease(self, peer: Peer) -> Lease:
        lease = self.lending.of(peer)
        assert lease is not None, "whoever is a worker or a client of a session has one"
        return lease

    def _worker(self, peer: Peer) -> Worker:
        worker = self.workers.get(peer)
        if worker is None:
            raise ProtocolError("the message is one of workers, and this peer is not a worker")
        return worker

    def _session_of(self, peer: Peer, key: int) -> ClientSession | None:
        """The session of a worker that waits for an answer under this key."""
        return next((s for s in self._lease(peer).sessions.values() if key in s.fetches.by_key), None)

    def _piece(self, peer: Peer, message: Piece, frames: tuple) -> None:
        worker, session = self._worker(peer), self._session_of(peer, message.key)
        self.log_line("WORKER_RECV", worker.name, f"Piece {message.key}", bytes=sum(len(f) for f in frames))
        if session is not None:
            session.fetches.piece(worker.index, message, frames)
            self._resume(session)

    def _resume(self, session: ClientSession) -> None:
        """Resume a session whose wait may be over."""
        if session.inbox:
            self.round_robin.resume(session.peer)

    def _described(self, peer: Peer, message: Described, frames: tuple) -> None:
        worker, session = self._worker(peer), self._session_of(peer, message.request)
        if session is not None:
            session.fetches.described(worker.index, message.request, message.specs)

    def _upload_progress(self, peer: Peer, message: UploadProgress, frames: tuple) -> None:
        if peer in self.sessions:
            self.sessions[peer].fetches.taken_in(message.key, message.upto)
            return
        worker = self._worker(peer)
        key = message.key
        session = next(
            (s for s in self._lease(peer).sessions.values() if key in s.uploads.open or key in s.uploads.reads), None
        )
        if session is not None:
            session.uploads.took(worker.index, key, message.upto)
            # A worker has read its part of a file, which held back the instructions that use it.
            if session.outbox.held and not session.uploads.awaited:
                session.send_held()
                self._resume(session)

    def _arena_opened(self, peer: Peer, message: ArenaOpened, frames: tuple) -> None:
        worker = self._worker(peer)
        session = next((s for s in self._lease(peer).sessions.values() if message.arena in s.arenas.by_key), None)
        if session is not None:
            session.arenas.opened(worker.index, message)
            session.uploads.decide()
            session.send_held()
            self.round_robin.resume(session.peer)

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
        lease = self._lease(peer)
        sessions = [s for s in lease.sessions.values() if worker.index in s.emitter.used]
        if message.times:
            record_times(sessions, message.times)
        lease.cluster.finished(worker, message.seq)
        self.log_line("WORKER_RECV", worker.name, f"Done {message.seq}")
        for session in sessions:
            self.guarded(session, "an acknowledgement", session.op_stream.acknowledge)
            if session.inbox:
                self.round_robin.resume(session.peer)

    def _op_error(self, peer: Peer, message: OpError, frames: tuple) -> None:
        """An instruction failed: the session that issued the op learns of it, with the op's origin."""
        worker, lease = self._worker(peer), self._lease(peer)
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
                    self.guarded(session, "an interrupt", session.drop, skipped)
            return

        # Op numbers are unique over all sessions, so one journal at most has it. An answer to a client is in no journal.
        for session in sessions:
            row = session.journal.find(message.seq)
            if row is None:
                if session.fetches.failed(message.seq, worker.name, message.message):
                    self._resume(session)
                    return
                continue

            # A peer that does not answer, or a tensor that is not there, follows from a worker's loss, which has been told.
            follows = message.kind == "peer" or (message.kind == "missing" and session.failures.missing)
            if follows and (loss := session.failures.loss()) is not None:
                self.guarded(session, "a failed op", session.failures.taint, message.seq, loss, message.others)
                return

            # The user's error: the line of the op, the worker's words, and who holds the memory if it was short.
            who = memory_report(session, worker, message.memory) if message.memory else ""
            if session.failures.dropped and message.kind == "missing":
                who = ", since an interrupt (Ctrl-C) dropped the op that makes it: compute it again"
            error = op_failed(row, message.seq, message.kind, message.message[:MAX_ERROR_CHARACTERS] + who, worker.name)
            failed = row.at(message.seq)
            self.log_line("ERROR", worker.name, str(error), op=failed.known.template.op, group=failed.origin.group)

            full = message.kind == "memory"
            self.observers.recent.add_error(
                self.now, session.number, worker.name, str(error), failed.known.template.op, failed.origin
            )
            self.guarded(session, "a failed op", session.failures.trouble, message.seq, error, message.others, full)
            return

        # Nobody's: its session has ended meanwhile.
        if self._sparse.allows(self.now):
            log.warning("worker %s: op %d failed: %s", worker.name, message.seq, message.message)

    def _trace_rows(self, peer: Peer, message: TraceRows, frames: tuple) -> None:
        self.traces.rows(peer, self._worker(peer), message)

    def _report(self, peer: Peer, message: Report, frames: tuple) -> None:
        worker = self._worker(peer)
        self.observers.answered(worker, message)
        survey = self._lease(peer).watch.answered(worker, message)
        if survey is not None:
            self.surveyed(survey)

    def surveyed(self, survey: Survey) -> None:
        """Every worker has answered a Stats request."""
        if survey.session.peer in self.sessions:
            session, rows = survey.session, survey.reports
            # Workers name tensors by id; the client wants the lines that made them.
            for index, row in rows.items():
                if "holders" in row:
                    row["holders"] = holders(session, session.cluster.workers[index], row["holders"])
            body, bubbles = answer(survey, self.sent, self.received, self.relayed)
            if bubbles:
                self.log_line("SCHEDULE", self.name(survey.session.peer), bubbles)
            self.send(survey.session.peer, Report(survey.number, body))
