"""The dispatcher, pure: events in, actions out. Knows peers, the cluster and sessions; no socket, clock or thread.

A peer is nobody until its Hello is accepted; then it is a client with a session or a worker of the cluster. What is out of
place is refused with an error that names the field, and everybody else goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from gt import errors
from gt.dispatcher.admission import Admission, Waiting, shared_out, worker_info
from gt.dispatcher.batches import MOST_WAITING
from gt.dispatcher.cluster import Cluster, Worker
from gt.dispatcher.events import Action, Close, Event, Lines, Log, Malformed, Peer, PeerLost, Received, Send, Tick
from gt.dispatcher.failures import op_failed, worker_lost
from gt.dispatcher.intake import CREDIT
from gt.dispatcher.requests import MOST
from gt.dispatcher.scribe import Scribe
from gt.dispatcher.sessions import Session
from gt.dispatcher.times import tell
from gt.dispatcher.watch import Survey, Watch, answer
from gt.errors import GTError, ProtocolError, Refused, SystemFailure
from gt.log import Sparse
from gt.wire.link import examine
from gt.wire.messages import (
    THROUGH,
    Abort,
    Describe,
    Described,
    Done,
    Exit,
    Failed,
    Fetch,
    Goodbye,
    Hello,
    Host,
    Inspect,
    Message,
    Notice,
    Ops,
    Piece,
    Reject,
    Report,
    Run,
    Seal,
    Stats,
    Took,
    Trouble,
    Welcome,
    World,
)

log = logging.getLogger("gt.dispatcher")
GOODBYE = "it said goodbye"
SAID = 4000  # characters of another reason
DEFERRED = (Ops, Fetch, Describe, Inspect, Seal, Stats)  # what a stalled session keeps for later, in order
SPOKEN = 20  # refusals logged in a second
MOST_DEFERRED = CREDIT + MOST + 1


class Core:
    """`logging`: make Log actions, with the plan's lines, for somebody who reads them."""

    def __init__(self, heartbeat: float = 10.0, logging: bool = False) -> None:
        self.heartbeat = heartbeat
        self.logging = logging
        self.cluster = Cluster()
        self.sessions: dict[Peer, Session] = {}
        self.workers: dict[Peer, Worker] = {}
        self.received = self.sent = self.relayed = 0
        self.admission = Admission(self.cluster)
        self.watch = Watch(self.cluster, heartbeat)
        self._sparse = Sparse(log, SPOKEN)
        self._actions: list[Action] = []
        self._page: list[str] = []  # of the instruction log
        self._next_session = 0
        self._now = 0.0
        self._on: dict[type[Message], Callable] = {
            Hello: self._hello, Ops: self._ops, Fetch: self._fetch, Describe: self._describe, Inspect: self._inspect,
            Seal: self._seal, Stats: self._stats, Host: self._host, Goodbye: self._goodbye, Piece: self._piece,
            Described: self._described, Report: self._report, Done: self._done, Trouble: self._trouble, Took: self._took,
        }  # fmt: skip

    def handle(self, event: Event) -> list[Action]:
        """What follows from one event, in the order in which it has to be done."""
        self._actions = []
        self._now = self.cluster.now = event.at
        if isinstance(event, Received):
            self._receive(event)
        elif isinstance(event, PeerLost):
            self._lost(event.peer, event.reason)
        elif isinstance(event, Malformed):
            self._refuse(event.peer, ProtocolError(event.reason))
        elif isinstance(event, Tick):
            self._tick()
        self._turn_page()
        return self._actions

    def check(self) -> None:
        """What must always be true between events; tests call it after every one."""
        for session in self.sessions.values():
            session.table.check()
            assert len(session.inbox) <= MOST_DEFERRED and (session.stalled or not session.inbox)
            assert len(session.batches.coming) <= MOST_WAITING
            assert bool(session.held) == session.stalled and session.uploads.awaited <= len(session.uploads.open)
        for worker in self.cluster.workers:
            assert not worker.code and not worker.cuts and not worker.defines, f"half a batch is left for {worker.name}"
            assert worker.done <= worker.runs
        assert all(self.workers[w.peer] is w for w in self.cluster.workers if not w.lost)

    # ---- in and out

    def send(self, peer: Peer, message: Message, frames: tuple = ()) -> None:
        self.sent += 1
        self._actions.append(Send(peer, message, frames))
        if self.logging and not isinstance(message, Run):
            self._log("SEND", self._name(peer), type(message).__name__, bytes=sum(len(f) for f in frames))

    def _log(self, kind: str, peer: str, text: str = "", **fields: object) -> None:
        if self.logging:
            self._turn_page()
            self._actions.append(Log(kind, peer, text, fields))

    def _turn_page(self) -> None:
        """What scribes have written so far comes before what comes next."""
        if self._page:
            self._actions.append(Lines("".join(self._page)))
            self._page.clear()

    def _name(self, peer: Peer) -> str:
        if peer in self.workers:
            return self.workers[peer].name
        return f"client{self.sessions[peer].number}" if peer in self.sessions else peer.hex()[:8]

    def _receive(self, event: Received) -> None:
        self.received += 1
        session = self.sessions.get(event.peer)
        if session is not None and isinstance(event.message, DEFERRED):
            if self._stalled(event.peer, session, event.message):
                if len(session.inbox) >= MOST_DEFERRED:
                    self._refuse(
                        event.peer, ProtocolError(f"{type(event.message).__name__} came, {MOST_DEFERRED} wait already")
                    )
                else:
                    session.inbox.append((event.message, event.frames))
                return
            if event.peer not in self.sessions:
                return  # what it sent before was refused
        self._take(event.peer, event.message, event.frames)
        self._resume(event.peer)

    def _take(self, peer: Peer, message: Message, frames: tuple) -> None:
        """Deal with a message; whatever is wrong with it, its sender alone has the harm."""
        handler = self._on.get(type(message))
        if handler is None:
            self._refuse(peer, ProtocolError(f"{type(message).__name__} is not for the dispatcher"))
        else:
            self._attempt(peer, type(message).__name__, handler, peer, message, frames)

    def _attempt(self, peer: Peer, what: str, call: Callable, *args: object) -> None:
        """Do what a peer asked; it alone has the harm."""
        try:
            call(*args)
        except GTError as error:
            self._refuse(peer, error)
        except Exception as error:
            self._fault(peer, what, error)

    def _resume(self, peer: Peer) -> None:
        """What came while a session was stalled."""
        while (session := self.sessions.get(peer)) is not None and session.inbox:
            if self._stalled(peer, session, session.inbox[0][0]):
                return
            if session.inbox:  # or the session has just ended
                self._take(peer, *session.inbox.popleft())

    def _stalled(self, peer: Peer, session: Session, message: Message) -> bool:
        """Whether a message has to wait; a question ends the waiting of what was sent before it."""
        if not session.stalled and not isinstance(message, Ops):
            self._attempt(peer, "Ops", session.batches.finish)
            if not isinstance(message, Seal):
                session.programs.later.let_go()
        return session.stalled

    def _fault(self, peer: Peer, what: str, error: Exception) -> None:
        """A fault of ours, or of a message in a way that nobody thought of: it ends the one peer that it came with."""
        if self._sparse.allows(self._now):
            log.exception("%s: %s failed", self._name(peer), what)
        text = f"internal error of the server: {type(error).__name__}: {error!s:.500}"
        self._refuse(peer, SystemFailure(f"{text} (at {what})"))

    def _guarded(self, session: Session, what: str, call: Callable, *args: object) -> None:
        """Do something for one of several sessions: its faults are its own."""
        try:
            call(*args)
        except Exception as error:
            self._fault(session.peer, what, error)

    def _refuse(self, peer: Peer, error: GTError) -> None:
        """Tell the peer what was wrong, and part from it: what it sends afterwards means nothing any more."""
        if self._sparse.allows(self._now):
            log.warning("%s: %s", self._name(peer), error)
        self._log("ERROR", self._name(peer), str(error))
        for worker in self.cluster.workers:
            worker.discard()
        if peer in self.sessions:
            self.send(peer, Failed(-1, errors.to_wire(error)))
            self.send(peer, Exit(str(error)))
        else:
            self.send(peer, Exit(str(error)) if peer in self.workers else Reject(errors.to_wire(error)))
        self._lost(peer, str(error))
        self._actions.append(Close(peer))

    # ---- coming and going

    def _hello(self, peer: Peer, hello: Hello, frames: tuple) -> None:
        if peer in self.sessions or peer in self.workers or self.admission.knows(peer):
            raise ProtocolError("Hello came twice on one connection")
        examine(hello)
        if hello.role == "worker":
            self._worker_joins(peer, hello)
        else:
            self.admission.expect(peer, hello, self._now)
            self._admit_clients()

    def _worker_joins(self, peer: Peer, hello: Hello) -> None:
        info = worker_info(hello.info)
        name = info["name"]
        holder = self.cluster.named(name) if name else None
        if holder is not None and not holder.lost:
            raise Refused(f"a worker named {name!r} is here already: choose another --name")
        worker = self.cluster.add(peer, info)
        self.workers[peer] = worker
        self.cluster.generation += 1
        for session in self.sessions.values():
            session.regain(worker)
        log.info("worker %s joined", worker.name)
        self._log("CONNECT", worker.name, f"worker {worker.index}, {info['backend']}")
        self.send(peer, Welcome(0, worker.name, [w.name for w in self.cluster.workers], [], CREDIT))
        self._tell_world(self.cluster.form(again=True) if self.cluster.formed else ())
        self._admit_clients()

    def _tell_world(self, members: Sequence[int] = ()) -> None:
        """members: those whose devices are to share memory."""
        rows = [w.row() for w in self.cluster.workers if not w.lost]
        name = self.cluster.workers[members[0]].info["unique_id"] if members else ""
        for peer in self.workers:
            self.send(peer, World(self.cluster.generation, rows, list(members), name))

    def _admit_clients(self) -> None:
        """Welcome every waiting client whose config's workers are all here."""
        waiting, self.admission.waiting = self.admission.waiting, []
        for client in waiting:
            try:
                if self.admission.ready(client, self._now):
                    self._welcome(client)
                else:
                    self.admission.waiting.append(client)
                    told, client.told = client.told, self.admission.missing(client)
                    if client.told != told:
                        self.send(client.peer, Notice(client.told))
            except GTError as error:
                self._refuse(client.peer, error)
            except Exception as error:
                self._fault(client.peer, "Hello", error)

    def _welcome(self, client: Waiting) -> None:
        config, switches = client.config, client.hello.switches
        members = self.cluster.form()
        if members:  # before the first program that may need it
            self._tell_world(members)
        session = Session(self._next_session, client.peer, config, self.cluster, self.send)
        session.switches = lambda worker: shared_out(switches, config, self.cluster, worker)
        self._next_session += 1
        self.sessions[client.peer] = session
        if self.logging:
            session.scribe = session.emitter.scribe = Scribe(session, self._page)
        self._log("CONNECT", self._name(client.peer), f"client with {len(config.groups)} groups")
        names = [w.name for w in self.cluster.workers]
        self.send(client.peer, Welcome(session.number, self._name(client.peer), names, list(config.groups), CREDIT))

    def _goodbye(self, peer: Peer, message: Goodbye, frames: tuple) -> None:
        self._lost(peer, message.reason[:SAID] or GOODBYE)
        self._actions.append(Close(peer))

    def _lost(self, peer: Peer, reason: str) -> None:
        self.admission.forget(peer)
        session = self.sessions.pop(peer, None)
        if session is not None:
            self._log("DISCONNECT", f"client{session.number}", reason)
            self.watch.forget(session)
            self._guarded(session, "its end", session.close)
        worker = self.workers.pop(peer, None)
        if worker is not None:
            self._lose_worker(worker, reason)

    def _lose_worker(self, worker: Worker, reason: str) -> None:
        worker.lost = reason or "its process ended"
        worker.discard()
        log.log(logging.INFO if reason == GOODBYE else logging.WARNING, "worker %s is lost: %s", worker.name, worker.lost)
        self._log("DISCONNECT", worker.name, worker.lost)
        self._log("ERROR", worker.name, str(worker_lost(worker.name, worker.lost)))
        for peer in self.workers:
            self.send(peer, Abort(worker.index, worker.lost))
        for session in list(self.sessions.values()):
            self._guarded(session, "the loss of a worker", session.lose, worker)
            self._resume(session.peer)
        for survey in self.watch.without(worker.index):
            self._surveyed(survey)

    def _tick(self) -> None:
        if self.admission.waiting:
            self._admit_clients()
        for peer, query in self.watch.look(self._now):
            self.send(peer, query)
        self.watch.tell(self.sessions.values(), self._now)

    # ---- clients

    def _session(self, peer: Peer) -> Session:
        session = self.sessions.get(peer)
        if session is None:
            raise ProtocolError("the session has not been welcomed yet")
        return session

    def _ops(self, peer: Peer, message: Ops, frames: tuple) -> None:
        session = self._session(peer)
        self._log("RECV", self._name(peer), f"Ops {message.seq}", bytes=sum(len(f) for f in frames))
        session.batches.take(message, frames)

    def _fetch(self, peer: Peer, message: Fetch, frames: tuple) -> None:
        what = "of every device" if message.tensor == THROUGH else f"%{message.tensor}"
        self._log("RECV", self._name(peer), f"Fetch {what}")
        self._session(peer).requests.fetch(message.request, message.tensor)

    def _describe(self, peer: Peer, message: Describe, frames: tuple) -> None:
        self._session(peer).requests.describe(message.request, message.tensors)

    def _inspect(self, peer: Peer, message: Inspect, frames: tuple) -> None:
        self._session(peer).requests.inspect(message.request, message.tensor)

    def _seal(self, peer: Peer, message: Seal, frames: tuple) -> None:
        session = self._session(peer)
        body = session.programs.seal(message)
        session.send(Report(message.request, body))

    def _stats(self, peer: Peer, message: Stats, frames: tuple) -> None:
        session = self._session(peer)
        if sum(survey.session is session for survey in self.watch.surveys.values()) >= MOST:
            raise ProtocolError(f"Stats.request {message.request} is one of more than {MOST} under way")
        survey, asked = self.watch.survey(session, message.request, message.program)
        for worker, query in asked:
            self.send(worker, query)
        if not survey.left:
            for one in self.watch.without(-1):
                self._surveyed(one)

    def _host(self, peer: Peer, message: Host, frames: tuple) -> None:
        session = self._session(peer)
        session.uploads.host(message, frames)
        session.release()

    # ---- workers

    def _worker(self, peer: Peer) -> Worker:
        worker = self.workers.get(peer)
        if worker is None:
            raise ProtocolError("only a worker says that")
        return worker

    def _session_of(self, key: int) -> Session | None:
        return next((s for s in self.sessions.values() if key in s.requests.by_key), None)

    def _piece(self, peer: Peer, message: Piece, frames: tuple) -> None:
        worker, session = self._worker(peer), self._session_of(message.key)
        self._log("WORKER_RECV", worker.name, f"Piece {message.key}", bytes=sum(len(f) for f in frames))
        if session is not None:
            session.requests.piece(worker.index, message, frames)

    def _described(self, peer: Peer, message: Described, frames: tuple) -> None:
        worker, session = self._worker(peer), self._session_of(message.request)
        if session is not None:
            session.requests.described(worker.index, message.request, message.specs)

    def _took(self, peer: Peer, message: Took, frames: tuple) -> None:
        if peer in self.sessions:
            self.sessions[peer].requests.took(message.key, message.upto)
            return
        worker = self._worker(peer)
        session = next((s for s in self.sessions.values() if message.key in s.uploads.open), None)
        if session is not None:
            session.uploads.took(worker.index, message.key, message.upto)

    def _done(self, peer: Peer, message: Done, frames: tuple) -> None:
        worker = self._worker(peer)
        if not worker.done <= message.seq <= worker.runs:
            raise ProtocolError(f"Done.seq is {message.seq}, of {worker.runs} Runs {worker.done} were done")
        tell(self.sessions.values(), message.times)
        worker.done = message.seq
        self._log("WORKER_RECV", worker.name, f"Done {message.seq}")
        for session in list(self.sessions.values()):
            if worker.index in session.emitter.used:
                self._guarded(session, "an acknowledgement", session.settle_batches)

    def _trouble(self, peer: Peer, message: Trouble, frames: tuple) -> None:
        """An instruction failed: the session that issued the op learns of it, with the op's origin."""
        worker = self._worker(peer)
        for session in self.sessions.values():
            row = session.journal.find(message.seq)
            if row is None:
                if session.requests.failed(message.seq, worker.name, message.message):
                    return
                continue
            if message.kind == "peer" and (loss := session.loss()) is not None:  # the loss itself has been told
                self._guarded(session, "a failed op", session.taint, message.seq, loss)
                return
            error = op_failed(row, message.seq, message.kind, message.message, worker.name)
            failed = row.at(message.seq)
            self._log("ERROR", worker.name, str(error), op=failed.known.template.op, group=failed.origin.group)
            self._guarded(session, "a failed op", session.trouble, message.seq, error)
            return
        if self._sparse.allows(self._now):
            log.warning("worker %s: op %d failed: %s", worker.name, message.seq, message.message)

    def _report(self, peer: Peer, message: Report, frames: tuple) -> None:
        survey = self.watch.answered(self._worker(peer), message)
        if survey is not None:
            self._surveyed(survey)

    def _surveyed(self, survey: Survey) -> None:
        """Every worker has answered a Stats request."""
        if survey.session.peer in self.sessions:
            body, said = answer(survey, self.sent, self.received, self.relayed)
            if said:
                self._log("SCHEDULE", self._name(survey.session.peer), said)
            self.send(survey.session.peer, Report(survey.number, body))
