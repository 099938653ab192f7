"""Peers that come and go: a Hello makes a client with a session or a worker of the cluster, until its end is known.

Time ends some too: sessions that have had theirs, workers that do not start afresh, and those that are stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from gt.config.load import resolve
from gt.dispatcher.cluster.admission import SHORT_CONFIG_CHARACTERS, Admission, SharedThreads, check_links
from gt.dispatcher.cluster.health import Survey
from gt.dispatcher.cluster.leases import Exclusive, Lease, Shared, Terms, Waiting, workers
from gt.dispatcher.cluster.observers import Observers
from gt.dispatcher.cluster.peer_info import worker_info
from gt.dispatcher.cluster.tracing import Traces
from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.events import Action, Examined, Peer
from gt.dispatcher.fairness.round_robin import RoundRobin
from gt.dispatcher.fairness.time_slices import Pace
from gt.dispatcher.session import ClientSession
from gt.dispatcher.state.context import SessionContext, SessionTerms
from gt.dispatcher.state.failures import worker_lost
from gt.dispatcher.state.validate import CREDIT
from gt.errors import GTError, ProtocolError
from gt.logs import plain
from gt.wire.access.proof import world_key
from gt.wire.link import examine
from gt.wire.messages import Abort, Exit, Goodbye, Hello, LinkFailed, LinkMade, Message, Notice, Renew, Welcome, World

log = logging.getLogger("gt.dispatcher")
GOODBYE = "it said goodbye"
MAX_REASON_CHARACTERS = 4000  # characters of another reason
MEET_SECONDS = 30.0  # that a client waits for the connections between its workers' hosts
STALL_SECONDS = 300.0  # seconds, where a program says nothing of its stall_timeout
OWN = frozenset({"workers", "stall_timeout"})  # a client's switches that no worker is told


class MembershipHost(Protocol):
    """The core, as far as membership needs it."""

    heartbeat: float
    process: list
    terms: Terms
    logging: bool
    pace: Pace
    context: Callable[..., SessionContext]
    sessions: dict[Peer, ClientSession]
    lending: Exclusive | Shared
    workers: dict[Peer, Worker]
    admission: Admission
    observers: Observers
    round_robin: RoundRobin
    traces: Traces
    page: list[str]
    now: float

    def send(self, peer: Peer, message: Message, frames: tuple = ()) -> None: ...
    def close(self, peer: Peer) -> None: ...
    def act(self, actions: Iterable[Action]) -> None: ...
    def log_line(self, kind: str, peer: str, text: str = "", **fields: object) -> None: ...
    def name(self, peer: Peer) -> str: ...
    def attempt(self, peer: Peer, what: str, call: Callable, *args: object) -> None: ...
    def fault(self, peer: Peer, what: str, error: Exception) -> None: ...
    def guarded(self, session: ClientSession, what: str, call: Callable, *args: object) -> None: ...
    def refuse(self, peer: Peer, error: GTError) -> None: ...
    def surveyed(self, survey: Survey) -> None: ...


class Membership:
    """One core's: it enters and removes its sessions and workers."""

    def __init__(self, core: MembershipHost) -> None:
        self._core, self._lending, self._terms = core, core.lending, core.terms
        self._sessions, self._workers = core.sessions, core.workers
        self._admission, self._observers, self._traces = core.admission, core.observers, core.traces
        self._round_robin, self._make_context = core.round_robin, core.context
        self._next_session = 0
        self._greetings: dict[Peer, tuple[Welcome, float]] = {}  # of clients whose workers still connect, and until when

    def hello(self, peer: Peer, hello: Hello, frames: tuple) -> None:
        known = peer in self._sessions or peer in self._workers or peer in self._observers.peers
        if known or self._lending.name(peer) or self._admission.knows(peer):
            raise ProtocolError("Hello came twice on one connection")
        examine(hello)
        if hello.role == "worker":
            self._worker_joins(peer, hello)
        elif hello.role == "observer":
            self._observers.enter(peer, hello)
        elif len(hello.config) <= SHORT_CONFIG_CHARACTERS:
            self._client_asks(peer, hello)
        else:
            self._admission.reading.add(peer)
            self._core.pace.background.begin(partial(self._core.attempt, peer, "Hello", self._read, peer, hello))

    def _read(self, peer: Peer, hello: Hello) -> None:
        if peer in self._admission.reading:  # else it is gone
            self._client_asks(peer, hello)

    def _client_asks(self, peer: Peer, hello: Hello) -> None:
        admission = self._admission
        apart = partial(self._core.pace.background.apart, lambda: peer not in admission.reading)
        admission.expect(peer, hello, self._core.now, apart)
        self._admit_clients()

    def _worker_joins(self, peer: Peer, hello: Hello) -> None:
        # 1. Its info, its proof, and its place in the cluster. An error refuses it before anything knows it.
        info = worker_info(hello.info)
        self._terms.admit(info)
        name, lease = self._lending.join(peer, info)
        worker = lease.cluster.named(name) if lease is not None else None
        if lease is not None and worker is not None:
            lease.cluster.forgive(worker)

        # 2. Sessions that had lost it plan with it again.
        if lease is not None and worker is not None:
            self._workers[peer] = worker
            for session in lease.sessions.values():
                session.regain(worker)
        log.info("worker %s joined", name)
        self._core.log_line("CONNECT", name, f"worker {name if worker is None else worker.index}, {info['backend']}")

        # 3. Its Welcome and the world. Clients that wait may have enough workers now.
        names = [w.name for w in lease.cluster.workers] if lease else [name]
        self._core.send(peer, Welcome(0, name, names, [], CREDIT, self._core.process))
        if worker is not None:
            self._traces.regain(worker)
        if lease is not None:
            self._announce_world(lease, lease.cluster.form(again=True) if lease.cluster.formed else ())
        self._admit_clients()

    def _announce_world(self, lease: Lease, worlds: Sequence[Sequence[int]] = ()) -> None:
        """worlds: of each host the workers whose devices are to share memory."""
        cluster = lease.cluster
        cluster.generation += 1
        cluster.announced = True
        # The key is derived from the server's secret and the sessions'
        # numbers: workers of another lease cannot connect with it.
        rows, ways = [w.row() for w in workers(lease)], cluster.routes()
        owners = [session.number for session in lease.sessions.values()] if self._terms.exclusive else []
        key = world_key(self._terms.link_secret, owners) if ways else ""
        broken = cluster.broken() if ways else []
        world = World(cluster.generation, rows, hosts=cluster.hosts(), ways=ways, key=key, nccl=cluster.nccl, broken=broken)
        own = {index: (list(members), cluster.workers[members[0]].info["unique_id"]) for members in worlds for index in members}
        for worker in workers(lease):
            members, name = own.get(worker.index, ([], ""))
            self._core.send(worker.peer, replace(world, members=members, unique_id=name) if members else world)

    def link_failed(self, peer: Peer, message: LinkFailed, frames: tuple) -> None:
        """A worker has no connection to another: they get another way, if there is one."""
        if (ends := self._ends(peer, message)) is None:
            return
        lease, worker, other = ends
        reason = plain(message.reason, MAX_REASON_CHARACTERS)
        failed = message.epoch, (message.source, message.target), self._core.now, reason
        if (news := lease.cluster.fail_link(worker, other, *failed)) is not None:
            text = f"{message.source} to {message.target}: {reason}"
            log.warning("workers %s and %s lose their connection, %s", worker.name, other.name, text)
            self._core.log_line("ERROR", worker.name, f"no connection to {other.name}, {text}")
            self._announce_world(lease)
            self._tell(lease, [news] if news else [])
            self._greet(lease)

    def _ends(self, peer: Peer, message: LinkFailed | LinkMade) -> tuple[Lease, Worker, Worker] | None:
        """The lease, the worker and the other one of a message about their connection; None once their program has ended."""
        lease, worker = self._lending.of(peer), self._workers.get(peer)
        if lease is None or worker is None:
            return None
        if not 0 <= message.worker < len(lease.cluster.workers):
            raise ProtocolError(f"{type(message).__name__}.worker is {message.worker}, want a worker of this session")
        return lease, worker, lease.cluster.workers[message.worker]

    def link_made(self, peer: Peer, message: LinkMade, frames: tuple) -> None:
        """Two workers are connected, or a connection that had failed works again."""
        if (ends := self._ends(peer, message)) is not None:
            lease, worker, other = ends
            if message.epoch:
                lease.cluster.meet(worker, other, message.epoch)
                self._greet(lease)
            else:
                lease.cluster.mend_link(worker, other, message.source, message.target)
                self.use_mended(lease)

    def use_mended(self, lease: Lease) -> None:
        """Have pairs use connections that work again, at a moment without transfers."""
        if news := lease.cluster.use_mended() if lease.cluster.mended else []:
            for text in news:
                log.info("%s", text)
            self._announce_world(lease)
            self._tell(lease, news)

    def _tell(self, lease: Lease, news: Iterable[str]) -> None:
        """Tell the programs of a lease."""
        for text in news:
            for session in lease.sessions.values():
                self._core.send(session.peer, Notice(text))

    def _admit_clients(self) -> None:
        """Welcome every waiting client whose workers are all here, and its own if they have to be."""
        # The new list grows in order of arrival: it is `before` for each client, those that still wait and asked earlier.
        waiting, self._admission.waiting = self._admission.waiting, []
        for client in waiting:
            try:
                if self._lending.ready(client, self._admission.waiting, self._core.now):
                    self._welcome(client)
                else:
                    self._admission.waiting.append(client)
                    if (news := self._lending.news(client, self._core.now)) is not None:
                        self._core.send(client.peer, news)
            except GTError as error:
                self._core.refuse(client.peer, error)
            except Exception as error:
                self._core.fault(client.peer, "Hello", error)

    def _welcome(self, client: Waiting) -> None:
        # 1. Its workers, and its config with their indices in it.
        lease = self._lending.grant(client, self._core.now)
        config = resolve(client.config, [worker.index for worker in lease.cluster.workers if not worker.lost])
        check_links(config, lease.cluster)

        # 2. Its session.
        cluster, switches = lease.cluster, {k: v for k, v in client.hello.switches.items() if k not in OWN}
        self._workers.update({worker.peer: worker for worker in workers(lease)})
        terms = SessionTerms(
            self._terms.memory,
            client.hello.switches.get("stall_timeout", STALL_SECONDS),
            SharedThreads(switches, config, cluster),
            self._core.pace,
            self._core.page if self._core.logging or self._observers.recent.wanted else None,
        )
        context = self._make_context(self._next_session, client.peer, config, cluster, self._core.send, terms)
        session = ClientSession(context)
        session.about = client.about
        self._next_session += 1
        self._sessions[client.peer] = lease.sessions[client.peer] = session

        # 3. The workers learn of one another before the first program that may need it; then the client may begin.
        worlds = cluster.form()
        if worlds or not cluster.announced:
            self._announce_world(lease, worlds)
        self._core.log_line("CONNECT", self._core.name(client.peer), f"client with {len(config.groups)} groups")
        names, name, groups = [w.name for w in cluster.workers], self._core.name(client.peer), list(config.groups)
        ops = [schema.line for schema in context.ops.libraries.values()]
        gpus = all(worker.info.get("gpu", -1) >= 0 for worker in cluster.workers)
        welcome = Welcome(session.number, name, names, groups, CREDIT, self._core.process, ops, gpus)
        self._greetings[client.peer] = welcome, self._core.now + MEET_SECONDS
        self._greet(lease)

    def greets(self, peer: Peer) -> bool:
        """True for a client with a session that has not been welcomed yet."""
        return peer in self._greetings

    def _greet(self, lease: Lease) -> None:
        """Let clients begin whose workers have connected with one another: a way that fails would cost them their first ops."""
        for peer in [peer for peer in lease.sessions if peer in self._greetings]:
            welcome, until = self._greetings[peer]
            if lease.cluster.unmet and self._core.now < until:
                continue
            self._core.attempt(peer, "Hello", check_links, lease.sessions[peer].config, lease.cluster)
            if self._greetings.pop(peer, None) is not None:
                self._core.send(peer, welcome)
                self._observers.welcomed(peer)
                for text in lease.cluster.troubles():
                    self._core.send(peer, Notice(text))

    def goodbye(self, peer: Peer, message: Goodbye, frames: tuple) -> None:
        self.remove(peer, plain(message.reason, MAX_REASON_CHARACTERS) or GOODBYE)
        self._core.close(peer)

    def remove(self, peer: Peer, reason: str) -> None:
        """A peer is gone, or to be parted from; nothing follows for one that is nobody."""
        if self._observers.leave(peer):
            return
        self._admission.forget(peer)
        self._greetings.pop(peer, None)
        self._traces.forget(peer)

        # Forgotten first: what follows may find a fault and remove the peer again.
        session, worker, lease = self._sessions.pop(peer, None), self._workers.pop(peer, None), self._lending.of(peer)
        if session is not None and lease is not None:
            self._core.log_line("DISCONNECT", f"client{session.number}", reason)
            lease.sessions.pop(peer, None)
            lease.watch.forget(session)
            lease.stragglers.forget(session)
            self._core.guarded(session, "its end", session.close)

        # A client's end gives back its lease, and the workers of an exclusive server start afresh.
        if worker is None:
            for own in self._lending.release(peer, self._core.now):
                self._core.send(own, Renew("the session that it was lent to has ended"))
                self._workers.pop(own, None)  # none if the client was refused before its session began
        self._lending.lose(peer, reason)
        if worker is not None and lease is not None:
            self._lose_worker(lease, worker, reason)

    def _lose_worker(self, lease: Lease, worker: Worker, reason: str) -> None:
        worker.lost = reason or "its process ended"
        worker.discard()
        log.log(logging.INFO if reason == GOODBYE else logging.WARNING, "worker %s is lost: %s", worker.name, worker.lost)
        self._core.log_line("DISCONNECT", worker.name, worker.lost)
        error = str(worker_lost(worker.name, worker.lost))
        self._core.log_line("ERROR", worker.name, error)
        if reason != GOODBYE:
            self._observers.recent.add_error(self._core.now, -1, worker.name, error)

        # Workers first: those in a collective with the lost one end their wait. Then each session plans without it.
        for other in workers(lease):
            self._core.send(other.peer, Abort(worker.index, worker.lost))
        for session in list(lease.sessions.values()):
            self._core.guarded(session, "the loss of a worker", session.lose, worker)
            self._round_robin.resume(session.peer)

        # Ways that it relayed need another relay.
        if any(worker.index in row[6] for row in lease.cluster.relayed):
            self._announce_world(lease)
        lease.cluster.part(worker)
        self._greet(lease)
        for survey in lease.watch.without(worker.index):
            self._core.surveyed(survey)
        self._observers.lose(worker)
        self._traces.lose(worker)

    def tick(self) -> None:
        for peer, said in self._terms.due(self._sessions, self._core.now):
            self._core.send(peer, said) if isinstance(said, Notice) else self._core.refuse(peer, said)
        for peer in self._lending.overdue(self._core.now):
            self._core.send(peer, Exit("it was told to start afresh, and has not"))
            self._core.close(peer)
        if self._admission.waiting:
            self._admit_clients()
        for lease in list(self._lending.leases):
            self._poll(lease)
            if lease.cluster.retry_links(self._core.now):
                self._announce_world(lease)
            self.use_mended(lease)
            self._greet(lease)

    def _poll(self, lease: Lease) -> None:
        """Ask busy workers whether they get on; give up those that are stopped, and tell programs of slow ones."""
        queries, examinations = lease.watch.poll(self._core.now)
        for peer, query in queries:
            self._core.send(peer, query)
        self._core.act(examinations)
        for index, halt in lease.watch.halted(1.0).items():
            self._give_up(lease.cluster.workers[index], f"for {self._core.heartbeat:g} s {halt.how}")
        lease.stragglers.report(lease.sessions.values(), self._core.now)
        for session in [session for session in lease.sessions.values() if session.inbox]:  # its peer may have gone
            self._round_robin.resume(session.peer)

    def examined(self, event: Examined) -> None:
        lease, worker = self._lending.of(event.peer), self._workers.get(event.peer)
        if lease is not None and worker is not None:
            lease.watch.examined(worker, event)

    def _give_up(self, worker: Worker, reason: str) -> None:
        """Part from a worker that cannot go on by itself: should it be let go on, it ends."""
        peer = worker.peer
        self._core.send(peer, Exit(reason))
        self.remove(peer, reason)
        self._core.close(peer)
