"""The dispatcher, pure: events in, actions out. Knows peers, the cluster and sessions; no socket, clock or thread.

A peer is nobody until its Hello is accepted; then it is a client with a session or a worker of the cluster. What is out of
place is refused with an error that names the field, and everybody else goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gt import errors
from gt.config.load import check_workers, load
from gt.dispatcher.cluster import Cluster, Worker
from gt.dispatcher.events import Action, Close, Event, Log, Malformed, Peer, PeerLost, Received, Send, Tick
from gt.dispatcher.failures import op_failed, worker_lost
from gt.dispatcher.plan.known import Known
from gt.dispatcher.sessions import Origin, Session
from gt.errors import GTError, ProtocolError, Refused
from gt.ir.text import PlanLine
from gt.wire.link import examine
from gt.wire.messages import (
    Abort,
    Data,
    Describe,
    Described,
    Done,
    Failed,
    Fetch,
    Goodbye,
    Hello,
    Host,
    Inspect,
    Message,
    Ops,
    Piece,
    Query,
    Reject,
    Report,
    Run,
    Stats,
    Switch,
    Trouble,
    Welcome,
    World,
)

log = logging.getLogger("gt.dispatcher")
CREDIT = 64  # batches a client may have under way
GOODBYE = "it said goodbye"
PATIENCE = 30.0  # seconds a client's Hello waits for the workers that its config names


@dataclass(slots=True)
class Waiting:
    """A client whose config names workers that have not come yet."""

    peer: Peer
    hello: Hello
    until: float


@dataclass(slots=True)
class Survey:
    """A Stats request: the workers' answers so far."""

    session: Session
    number: int
    left: set[int]
    reports: dict[int, dict]


class Core:
    """`logging`: make Log actions, with the plan's lines, for somebody who reads them."""

    def __init__(self, token: str = "", heartbeat: float = 10.0, logging: bool = False) -> None:
        self.token, self.heartbeat = token, heartbeat
        self.logging = logging
        self.cluster = Cluster()
        self.sessions: dict[Peer, Session] = {}
        self.workers: dict[Peer, Worker] = {}
        self.received = self.sent = self.relayed = 0
        self._waiting: list[Waiting] = []
        self._surveys: dict[int, Survey] = {}
        self._uploads: dict[int, Session] = {}
        self._actions: list[Action] = []
        self._next_session = 0
        self._now = 0.0
        self._on: dict[type[Message], Callable] = {
            Hello: self._hello, Ops: self._ops, Fetch: self._fetch, Describe: self._describe, Inspect: self._inspect,
            Stats: self._stats, Host: self._host, Goodbye: self._goodbye, Piece: self._piece, Described: self._described,
            Report: self._report, Done: self._done, Trouble: self._trouble,
        }  # fmt: skip

    def handle(self, event: Event) -> list[Action]:
        """What follows from one event, in the order in which it has to be done."""
        self._actions = []
        self._now = event.at
        if isinstance(event, Received):
            self._receive(event)
        elif isinstance(event, PeerLost):
            self._lost(event.peer, event.reason)
        elif isinstance(event, Malformed):
            self._refuse(event.peer, ProtocolError(event.reason))
        elif isinstance(event, Tick):
            self._tick()
        return self._actions

    def check(self) -> None:
        """What must always be true; tests call it after every event."""
        for session in self.sessions.values():
            session.table.check()

    # ---- in and out

    def send(self, peer: Peer, message: Message, frames: tuple = ()) -> None:
        self.sent += 1
        self._actions.append(Send(peer, message, frames))
        if self.logging and not isinstance(message, Run):
            self._log("SEND", self._name(peer), type(message).__name__, bytes=sum(len(f) for f in frames))

    def _log(self, kind: str, peer: str, text: str = "", **fields: object) -> None:
        if self.logging:
            self._actions.append(Log(kind, peer, text, fields))

    def _name(self, peer: Peer) -> str:
        if peer in self.workers:
            return self.workers[peer].name
        return f"client{self.sessions[peer].number}" if peer in self.sessions else peer.hex()[:8]

    def _receive(self, event: Received) -> None:
        self.received += 1
        peer, message = event.peer, event.message
        try:
            self._on[type(message)](peer, message, event.frames)
        except ProtocolError as error:
            self._refuse(peer, error)
        except GTError as error:
            self._refuse(peer, error, close=peer not in self.sessions)

    def _refuse(self, peer: Peer, error: GTError, close: bool = True) -> None:
        """Tell the peer what was wrong; a client whose stream is broken cannot go on."""
        log.warning("%s: %s", self._name(peer), error)
        self._log("ERROR", self._name(peer), str(error))
        if peer in self.sessions:
            self.send(peer, Failed(-1, errors.to_wire(error)))
        elif peer not in self.workers:
            self.send(peer, Reject(errors.to_wire(error)))
        if close and peer not in self.workers:
            self._lost(peer, str(error))
            self._actions.append(Close(peer))

    # ---- coming and going

    def _hello(self, peer: Peer, hello: Hello, frames: tuple) -> None:
        examine(hello, self.token)
        if hello.role == "worker":
            self._worker_joins(peer, hello)
        else:
            self._waiting.append(Waiting(peer, hello, self._now + PATIENCE))
            self._admit_clients()

    def _worker_joins(self, peer: Peer, hello: Hello) -> None:
        name = hello.info.get("name") or ""
        holder = self.cluster.named(name) if name else None
        if holder is not None and not holder.lost:
            raise Refused(f"a worker named {name!r} is here already: choose another --name")
        worker = self.cluster.add(peer, hello.info)
        self.workers[peer] = worker
        self.cluster.generation += 1
        log.info("worker %s joined", worker.name)
        self._log("CONNECT", worker.name, f"worker {worker.index}, {hello.info.get('backend', '')}")
        self.send(peer, Welcome(0, worker.name, [w.name for w in self.cluster.workers], [], CREDIT))
        self._tell_world()
        self._admit_clients()

    def _tell_world(self) -> None:
        keys = ("pid", "host", "heap_fd", "heap_bytes", "doorbell")
        rows = [[w.index, w.name, *(w.info.get(k, 0) for k in keys)] for w in self.cluster.workers if not w.lost]
        for peer in self.workers:
            self.send(peer, World(self.cluster.generation, rows))

    def _admit_clients(self) -> None:
        """Welcome every waiting client whose config's workers are all here."""
        waiting, self._waiting = self._waiting, []
        for client in waiting:
            try:
                if not self._admit(client):
                    self._waiting.append(client)
            except GTError as error:
                self._refuse(client.peer, error)

    def _admit(self, client: Waiting) -> bool:
        hello = client.hello
        config = load(hello.config, hello.config_path)
        names = [w.name for w in self.cluster.workers if not w.lost]
        wanted = int(hello.switches.get("workers", 0))
        late = self._now >= client.until
        if not names or len(names) < wanted:
            if not late:
                return False
            raise Refused(
                f"{len(names)} workers are connected, the program wants {max(wanted, 1)}: start more with `gt worker`"
            )
        try:
            check_workers(config, names)
        except errors.ConfigError:
            if late or wanted:
                raise
            return False
        self._welcome(client, config, names)
        return True

    def _welcome(self, client: Waiting, config: object, names: list[str]) -> None:
        session = Session(self._next_session, client.peer, config, self.cluster, self.send)  # type: ignore[arg-type]
        self._next_session += 1
        self.sessions[client.peer] = session
        if self.logging:
            self._watch(session)
        for worker in self.cluster.workers:
            if not worker.lost:
                self.send(worker.peer, Switch(self._switches(client.hello.switches, config, worker)))
        self._log("CONNECT", self._name(client.peer), f"client with {len(config.groups)} groups")  # type: ignore[attr-defined]
        groups = list(config.groups)  # type: ignore[attr-defined]
        self.send(client.peer, Welcome(session.number, self._name(client.peer), names, groups, CREDIT))

    def _switches(self, switches: dict, config: object, worker: Worker) -> dict:
        """The program's switches, its threads shared out among the workers it uses on one host: eight workers with all
        the cores' threads each spend their time in one another's way (seen: 30 times slower on two cores)."""
        used = {index for group in config.groups.values() for index in group.flat}  # type: ignore[attr-defined]
        beside = sum(self.cluster.workers[index].info.get("host") == worker.info.get("host") for index in used)
        threads = switches.get("threads", 0)
        return {**switches, "threads": max(threads // beside, 1)} if threads and beside > 1 else switches

    def _goodbye(self, peer: Peer, message: Goodbye, frames: tuple) -> None:
        self._lost(peer, GOODBYE)
        self._actions.append(Close(peer))

    def _lost(self, peer: Peer, reason: str) -> None:
        self._waiting = [w for w in self._waiting if w.peer != peer]
        session = self.sessions.pop(peer, None)
        if session is not None:
            self._log("DISCONNECT", f"client{session.number}", reason)
            session.close()
        worker = self.workers.pop(peer, None)
        if worker is not None:
            self._lose_worker(worker, reason)

    def _lose_worker(self, worker: Worker, reason: str) -> None:
        worker.lost = reason or "its process ended"
        log.log(logging.INFO if reason == GOODBYE else logging.WARNING, "worker %s is lost: %s", worker.name, worker.lost)
        self._log("DISCONNECT", worker.name, worker.lost)
        self._log("ERROR", worker.name, str(worker_lost(worker.name, worker.lost)))
        for peer in self.workers:
            self.send(peer, Abort(worker.index, worker.lost))
        for session in self.sessions.values():
            session.lose(worker)
        for survey in list(self._surveys.values()):
            self._surveyed(survey, worker.index, {})

    def _tick(self) -> None:
        if self._waiting:
            self._admit_clients()

    # ---- clients

    def _session(self, peer: Peer) -> Session:
        session = self.sessions.get(peer)
        if session is None:
            raise ProtocolError("the session has not been welcomed yet")
        return session

    def _ops(self, peer: Peer, message: Ops, frames: tuple) -> None:
        session = self._session(peer)
        self._log("RECV", self._name(peer), f"Ops {message.seq}", bytes=sum(len(f) for f in frames))
        session.run(message, frames)

    def _fetch(self, peer: Peer, message: Fetch, frames: tuple) -> None:
        self._log("RECV", self._name(peer), f"Fetch %{message.tensor}")
        self._session(peer).requests.fetch(message.request, message.tensor)

    def _describe(self, peer: Peer, message: Describe, frames: tuple) -> None:
        self._session(peer).requests.describe(message.request, message.tensors)

    def _inspect(self, peer: Peer, message: Inspect, frames: tuple) -> None:
        self._session(peer).requests.inspect(message.request, message.tensor)

    def _stats(self, peer: Peer, message: Stats, frames: tuple) -> None:
        key = self.cluster.key()
        alive = {w.index for w in self.cluster.workers if not w.lost}
        survey = self._surveys[key] = Survey(self._session(peer), message.request, alive, {})
        for index in alive:
            self.send(self.cluster.workers[index].peer, Query(key))
        if not alive:
            self._surveyed(survey, -1, {})

    def _host(self, peer: Peer, message: Host, frames: tuple) -> None:
        """Bytes of a host copy: on to the workers that wait for them."""
        requests = self._session(peer).requests
        targets = requests.uploads.get(message.key)
        if targets is None:
            raise ProtocolError(f"Host.key {message.key} was not asked for")
        for index in targets:
            worker = self.cluster.workers[index]
            if not worker.lost:
                self.send(worker.peer, Data(message.key, message.offset, message.total), frames)
        if message.offset + sum(len(f) for f in frames) >= message.total:
            del requests.uploads[message.key]

    # ---- workers

    def _session_of(self, key: int) -> Session | None:
        return next((s for s in self.sessions.values() if key in s.requests.by_key), None)

    def _piece(self, peer: Peer, message: Piece, frames: tuple) -> None:
        session = self._session_of(message.key)
        self._log("WORKER_RECV", self._name(peer), f"Piece {message.key}", bytes=sum(len(f) for f in frames))
        if session is not None:
            session.requests.piece(message, frames)

    def _described(self, peer: Peer, message: Described, frames: tuple) -> None:
        session = self._session_of(message.request)
        if session is not None:
            session.requests.described(message.request, message.specs)

    def _done(self, peer: Peer, message: Done, frames: tuple) -> None:
        worker = self.workers[peer]
        worker.done = max(worker.done, message.seq)
        self._log("WORKER_RECV", worker.name, f"Done {message.seq}")
        for session in list(self.sessions.values()):
            if worker.index in session.emitter.used:
                session.settle_batches()

    def _trouble(self, peer: Peer, message: Trouble, frames: tuple) -> None:
        """An instruction failed: the session that issued the op learns of it, with the op's origin."""
        worker = self.workers[peer]
        for session in self.sessions.values():
            row = session.journal.find(message.seq)
            if row is None:
                continue
            if message.kind == "peer" and self._gone_peers():
                return  # the loss itself has been told
            error = op_failed(row, message.kind, message.message, worker.name)
            self._log("ERROR", worker.name, str(error), op=row.known.template.op, group=row.origin.group)
            session.trouble(message.seq, error)
            return
        log.warning("worker %s: op %d failed: %s", worker.name, message.seq, message.message)

    def _gone_peers(self) -> bool:
        return any(w.lost for w in self.cluster.workers)

    def _report(self, peer: Peer, message: Report, frames: tuple) -> None:
        survey = self._surveys.get(message.request)
        if survey is not None:
            self._surveyed(survey, self.workers[peer].index, message.body.get("stats", {}))

    def _surveyed(self, survey: Survey, index: int, stats: dict) -> None:
        """One worker's answer to a Stats request; the last one completes it."""
        if index in survey.left and stats:
            survey.reports[index] = {"name": self.cluster.workers[index].name, **stats}
        survey.left.discard(index)
        if survey.left:
            return
        self._surveys = {k: s for k, s in self._surveys.items() if s is not survey}
        if survey.session.peer in self.sessions:
            workers = [survey.reports[i] for i in sorted(survey.reports)]
            body = {"dispatcher": self._counters(survey.session), "workers": workers}
            self.send(survey.session.peer, Report(survey.number, body))

    def _counters(self, session: Session) -> dict:
        return {
            "ops_planned": session.ops,
            "instructions_sent": session.emitter.sent,
            "messages_sent": self.sent,
            "messages_received": self.received,
            "plan_cache_hits": session.planner.hits,
            "tensor_bytes_uploaded": session.uploaded,
            "tensor_bytes_fetched": session.requests.fetched,
            "tensor_bytes_relayed": self.relayed,
        }

    # ---- the instruction log

    def _watch(self, session: Session) -> None:
        """Log every op that comes and every step that is planned."""
        name = f"client{session.number}"

        def where(origin: Origin) -> dict:
            line = f"{origin.file}:{origin.line}" if origin.file else ""
            return {"seq": session.emitter.seq, "group": origin.group, "origin": line}

        def received(known: Known, origin: Origin, ins: Sequence[int]) -> None:
            operands = " ".join(f"%{i}" for i in ins)
            self._log("RECV", name, operands, op=known.template.op, **where(origin))

        def planned(line: PlanLine) -> None:
            workers = ",".join(self.cluster.workers[i].name for i in line.workers)
            moved = line.note.partition(" B")[0]
            fields = {"layout": line.layout, "bytes": int(moved) if moved.isdigit() else "", **where(session.origin)}
            self._log("WORKER_SEND", workers, str(line), op=line.op.partition(" ")[0], **fields)

        session.on_op = received
        session.emitter.plan = planned
