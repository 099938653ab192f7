"""The dispatcher, pure: events in, actions out. Knows peers, the cluster and sessions; no socket, clock or thread.

A peer is nobody until its Hello is accepted; then it is a client with a session or a worker of the cluster. What is out of
place is refused with an error that names the field, and everybody else goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from gt import errors
from gt.dispatcher.client_messages import ClientMessages
from gt.dispatcher.cluster.admission import Admission
from gt.dispatcher.cluster.health import Survey, Watch, answer
from gt.dispatcher.cluster.leases import Exclusive, Lease, Shared, Terms, workers
from gt.dispatcher.cluster.membership import Membership
from gt.dispatcher.cluster.observers import Observers
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
from gt.dispatcher.session import ClientSession
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.memory_report import holders
from gt.dispatcher.worker_messages import WorkerMessages
from gt.errors import GTError, ProtocolError, SystemFailure
from gt.logs import Sparse
from gt.wire.messages import (
    Exit,
    Failed,
    Fetch,
    Goodbye,
    Hello,
    LinkFailed,
    LinkMade,
    Message,
    Observe,
    Ops,
    Records,
    Reject,
    Report,
    Run,
    Trace,
    UploadProgress,
)

log = logging.getLogger("gt.dispatcher")
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
        self.traces = Traces(self, self.lease)
        self.membership = Membership(self)

        # The event in hand: its actions so far, and its time.
        self._sparse = Sparse(log, MAX_LOGGED_REFUSALS)
        self._actions: list[Action] = []
        self.page: list[str] = []  # lines of the instruction log that are not written yet
        self.now = 0.0
        self.from_clients, self.from_workers = ClientMessages(self), WorkerMessages(self)
        self._on: dict[type[Message], Callable] = {
            **self.from_clients.handlers, **self.from_workers.handlers, UploadProgress: self._upload_progress,
            Hello: self.membership.hello, Goodbye: self.membership.goodbye, LinkFailed: self.membership.link_failed,
            LinkMade: self.membership.link_made, Observe: self.observers.observe, Trace: self.traces.trace,
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

    def warn(self, peer: Peer, what: object) -> None:
        """Log what a peer has done wrong, or met. Some are left out where there are many."""
        if self._sparse.allows(self.now):
            log.warning("%s: %s", self.name(peer), what)

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
        if peer in self.sessions and not self.membership.greets(peer):
            self.send(peer, Failed(-1, errors.to_wire(error)))
            self.send(peer, Exit(str(error)))
        else:
            joined = peer in self.workers or peer in self.observers.peers or self.lending.name(peer)
            self.send(peer, Exit(str(error)) if joined else Reject(errors.to_wire(error)))
        self.membership.remove(peer, str(error))
        self.close(peer)

    def _upload_progress(self, peer: Peer, message: UploadProgress, frames: tuple) -> None:
        """Handle the one message that both kinds of peers send."""
        handler = self.from_clients.taken_in if peer in self.sessions else self.from_workers.took
        handler(peer, message, frames)

    # ---- for its parts

    def lease(self, peer: Peer) -> Lease:
        lease = self.lending.of(peer)
        assert lease is not None, "whoever is a worker or a client of a session has one"
        return lease

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
