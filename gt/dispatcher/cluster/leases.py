"""Leases of workers: every session has all of a shared server's, each session its own of an exclusive server's.

Pure bookkeeping: it says which processes have to start afresh and who comes next; whoever asks it sends the messages.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gt.config.load import check_workers
from gt.config.schema import Config
from gt.dispatcher.cluster.health import Watch
from gt.dispatcher.cluster.stragglers import Stragglers
from gt.dispatcher.cluster.workers import Cluster, Worker, ordered
from gt.dispatcher.session import ClientSession
from gt.errors import ConfigError, GTError, Refused, SessionExpired
from gt.ir.text import counted
from gt.wire.access.proof import proves
from gt.wire.messages import Hello, Notice

log = logging.getLogger("gt.dispatcher")

PATIENCE_SECONDS = 30.0  # seconds a client waits for workers that are not there
RENEWAL_SECONDS = 120.0  # seconds in which a worker starts afresh, or is lost: a cold disk takes long to import torch
REMINDER_SECONDS = 15.0  # seconds after which a client in the queue hears again that it is in it
NOTICE_SECONDS, NOTICE_SHARE = 300.0, 0.1  # a session is warned so many seconds before its time ends, or this share of its time

FREE, LENT, RENEWING, LOST = "free", "lent", "renewing", "lost"


@dataclass(frozen=True, slots=True)
class Terms:
    """The operator's terms. workers: the most that a session may have of its own; seconds: its longest time; 0: no limit.

    secret: what workers have to know beside the token; "" for nothing. most: workers that there will ever be, 0 if more may
    come. memory: bytes that a session may hold on each worker, 0 for any number. link_secret: of this start; keys of
    connections between workers are derived from it. life: a random name of this start, by which observers know another.
    """

    exclusive: bool = False
    workers: int = 0
    seconds: float = 0.0
    secret: str = ""
    most: int = 0
    memory: int = 0
    link_secret: str = field(default="", repr=False)
    life: str = ""

    def admit(self, info: dict) -> None:
        """Refused unless a worker proves to be the operator's, and its rank is one of the job's."""
        if self.most and info["rank"] >= self.most:
            there = f"worker {info['name']!r} has rank {info['rank']}, and this job has {counted(self.most, 'worker')}"
            raise Refused(f"{there}: set WORLD_SIZE and GT_WORKERS to the same for all of its processes")
        if self.secret and not proves(self.secret, info):
            raise Refused("this server takes only its operator's workers: start one with the server's --worker-token-file")

    def due(self, sessions: Mapping[bytes, ClientSession], now: float) -> Iterator[tuple[bytes, GTError | Notice]]:
        """Sessions whose time is over, with the error that ends them, and those that are to be warned of it."""
        for peer, session in list(sessions.items()) if self.seconds else ():
            # Told once, when a tenth of the time is left or five minutes, whichever is less.
            left = session.began + self.seconds - now
            if left <= 0:
                text = f"the session has had its {self.seconds:g} s (the server's --max-session-time) and is ended"
                yield peer, SessionExpired(f"{text}: save what it computes in time, then connect again")
            elif left <= min(NOTICE_SECONDS, NOTICE_SHARE * self.seconds) and not session.warned:
                session.warned = True
                yield peer, Notice(f"the session ends in {left:.0f} s: the server's --max-session-time is {self.seconds:g} s")


@dataclass(slots=True)
class Waiting:
    """A client that waits for workers. wanted: as it says, 0 for all; named: as many as its config's indices need."""

    peer: bytes
    hello: Hello
    config: Config
    until: float  # when it has waited long enough for workers that are not there
    used: frozenset[int] = frozenset()  # indices of the config
    about: dict[str, Any] = field(default_factory=dict)  # see peer_info
    place: int = 0  # in the queue of an exclusive server, from 1
    fits: bool = False  # the server has as many workers as it wants, free or not
    queued: bool = False  # so it is, or one before it
    told: tuple = ()  # the last news
    told_at: float = 0.0

    @property
    def wanted(self) -> int:
        return self.hello.switches.get("workers", 0)

    @property
    def named(self) -> int:
        return max(self.used, default=-1) + 1


@dataclass(slots=True)
class Lease:
    """Workers that see one another, and the sessions that they serve, by peer."""

    cluster: Cluster
    watch: Watch
    stragglers: Stragglers
    sessions: dict[bytes, ClientSession] = field(default_factory=dict)

    @classmethod
    def of(cls, heartbeat: float, home: str, sessions: dict[bytes, ClientSession] | None = None) -> Lease:
        """One of no workers yet. home: of the dispatcher's process, see wire.liveness."""
        cluster = Cluster()
        watch = Watch(cluster, heartbeat, home)
        return cls(cluster, watch, Stragglers(watch), {} if sessions is None else sessions)


class Shared:
    """Every session has every worker, one that joins later too. `renewing`: peers of processes that start afresh, none here."""

    def __init__(self, heartbeat: float, home: str, sessions: dict[bytes, ClientSession]) -> None:
        self.common = Lease.of(heartbeat, home, sessions)
        self.leases = [self.common]
        self.renewing: frozenset[bytes] = frozenset()

    def of(self, peer: bytes) -> Lease | None:
        """The lease of a worker or client."""
        return self.common

    def name(self, peer: bytes) -> str:
        """The name of a worker that no session has, "" for none such."""
        return ""

    def join(self, peer: bytes, info: dict) -> tuple[str, Lease | None]:
        """A worker joins: its name, and its lease from now on. Refused if the name is taken."""
        cluster = self.common.cluster
        holder = cluster.named(info["name"]) if info["name"] else None
        if holder is not None and not holder.lost and holder.index != info["rank"]:  # else the rank is the cause
            raise taken(info["name"])
        return cluster.add(peer, info).name, self.common

    def lose(self, peer: bytes, reason: str) -> None:
        """A worker's connection has ended."""

    def examine(self, client: Waiting) -> None:
        """Raise an error that waiting cannot remove."""

    def ready(self, client: Waiting, before: Sequence[Waiting], now: float) -> bool:
        """True once every worker is here that a client needs; Refused or ConfigError if it has waited long enough."""
        # Three conditions: as many workers as the client wants, all that its config names, and none of those lost. Each may
        # come true while it waits; when it has waited long enough, the first that does not hold is its error.
        names, wanted = self._names(), client.wanted
        late = now >= client.until
        if not names or len(names) < wanted:
            if not late:
                return False
            raise few(len(names), wanted)
        everyone = [worker.name for worker in self.common.cluster.workers]
        try:
            check_workers(client.config, everyone)
        except ConfigError:
            if late or wanted:
                raise
            return False
        gone = [worker for worker in self.common.cluster.workers if worker.lost and worker.index in client.used]
        if gone and late:
            lost = f"worker {gone[0].name} is lost ({gone[0].lost:.200}), and {len(names)} are here"
            raise Refused(f"{lost}: start another one with `gt worker`, or name others in the config")
        return not gone

    def news(self, client: Waiting, now: float) -> Notice | None:
        """The workers that a client waits for, if that has changed since it was told."""
        text = f"it has {len(self._names())} of the {max(client.wanted, client.named, 1)} workers that the program wants"
        client.told, before = (text,), client.told
        return Notice(text) if client.told != before else None

    def grant(self, client: Waiting, now: float) -> Lease:
        """The workers of a client that is ready."""
        self.common.cluster.arrange()
        return self.common

    def release(self, peer: bytes, now: float) -> list[bytes]:
        """A client's session has ended: workers that have to start afresh."""
        return []

    def idle(self) -> list[tuple[str, dict, bool]]:
        """Workers that no session has: name, info, and True for one that starts afresh. None here."""
        return []

    def overdue(self, now: float) -> list[bytes]:
        """Workers that should have started afresh by now, and are still connected."""
        return []

    def check(self) -> None:
        """Invariants between events; tests call it."""

    def _names(self) -> list[str]:
        return [w.name for w in self.common.cluster.workers if not w.lost]


# States of a slot:
#   FREE -> LENT (grant) -> RENEWING (its session has ended) -> FREE (the restarted process joins)
#   LENT -> LOST (its process is gone) -> LENT (a successor joins, for the same session), or removed at the session's end
#   RENEWING -> removed, if the process does not restart in time; FREE -> removed, if the process is gone
@dataclass(slots=True)
class WorkerSlot:
    """One worker of an exclusive server, by name: the process that is it now, and the lease that it is of. Lost: a lease's."""

    name: str
    peer: bytes = b""
    info: dict[str, Any] = field(default_factory=dict)
    state: str = FREE
    lease: Lease | None = None
    since: float = 0.0  # when it was told to start afresh


class Exclusive:
    """A session has workers of its own, 0 to n - 1 to itself; a process that has served one starts afresh before the next.

    Who asks first is served first: a later client never gets workers that an earlier one waits for. One that wants more than
    the server has at all holds up nobody.
    """

    def __init__(self, heartbeat: float, home: str, terms: Terms) -> None:
        self.terms, self.heartbeat, self.home = terms, heartbeat, home
        self.slots: dict[str, WorkerSlot] = {}
        self.leases: list[Lease] = []
        self.renewing: set[bytes] = set()  # their messages mean nothing any more
        self._of: dict[bytes, Lease] = {}
        self._peers: dict[bytes, WorkerSlot] = {}  # by connected process, those too that are about to restart

    def of(self, peer: bytes) -> Lease | None:
        return self._of.get(peer)

    def name(self, peer: bytes) -> str:
        return self._peers[peer].name if peer in self._peers else ""

    # ---- workers

    def join(self, peer: bytes, info: dict) -> tuple[str, Lease | None]:
        """A worker joins: restarted, in place of a lost one, or new. In place of a lost one it has that one's lease."""
        # A nameless worker first takes the place of a lost one, whose session waits for it.
        slot = self.slots.get(info["name"]) if info["name"] else self._vacant()
        if slot is None:
            name = info["name"] or next(name for i in itertools.count() if (name := f"w{i}") not in self.slots)
            slot = self.slots[name] = WorkerSlot(name)
        elif slot.state in (FREE, LENT):
            raise taken(slot.name)
        self._part(slot)  # end the process before it, whose end is not known yet
        slot.peer, slot.info, slot.state = peer, {**info, "name": slot.name}, FREE if slot.lease is None else LENT
        self._peers[peer] = slot
        if slot.lease is not None:
            self._of[peer] = slot.lease
            slot.lease.cluster.add(peer, slot.info, ranked=False)
        return slot.name, slot.lease

    def _vacant(self) -> WorkerSlot | None:
        return next((slot for slot in self.slots.values() if slot.state == LOST), None)

    def _drop(self, slot: WorkerSlot) -> None:
        """Its process is gone: its place is kept for the session that has it, and for nobody else."""
        self._part(slot)
        slot.state = LOST
        if slot.lease is None:
            del self.slots[slot.name]

    def _part(self, slot: WorkerSlot) -> None:
        self.renewing.discard(slot.peer)
        self._of.pop(slot.peer, None)
        self._peers.pop(slot.peer, None)
        slot.peer = b""

    def lose(self, peer: bytes, reason: str) -> None:
        slot = self._peers.get(peer)
        if slot is None:
            return
        # Its end was asked of it: the slot waits for the restarted process.
        if slot.state == RENEWING:
            self._part(slot)
            return
        if slot.lease is None:
            log.warning("worker %s, which was free, is lost: %s", slot.name, reason)
        self._drop(slot)

    def idle(self) -> list[tuple[str, dict, bool]]:
        return [(slot.name, slot.info, slot.state == RENEWING) for slot in self.slots.values() if slot.lease is None]

    def overdue(self, now: float) -> list[bytes]:
        hung = []
        for slot in list(self.slots.values()):
            if slot.state == RENEWING and now - slot.since >= RENEWAL_SECONDS:
                log.warning("worker %s is lost: it did not restart within %g s", slot.name, RENEWAL_SECONDS)
                hung += [slot.peer] if slot.peer else []
                self._drop(slot)
        return hung

    # ---- clients

    def examine(self, client: Waiting) -> None:
        """Raise an error that waiting cannot remove: more workers than allowed, or a config that names more than wanted."""
        most = self.terms.workers
        if most and client.wanted > most:
            raise Refused(f"workers={client.wanted}, and a session may have {most} (the server's --max-workers): ask for fewer")

        # A session's workers are numbered from 0, so its config cannot name one beyond its share.
        share, why = (client.wanted, "the program asks for") if client.wanted else (most, "the server's --max-workers gives it")
        group = next((g for g in client.config.groups.values() if share and max(g.flat, default=-1) >= share), None)
        if group is not None:
            raise ConfigError(
                f"{client.config.where(group.name)} names worker {max(group.flat)}, and the session has {share} of its own, "
                f"0 to {share - 1}, which {why}: {'ask for more, or ' if client.wanted else ''}name fewer"
            )

    def _count(self, state: str = "") -> int:
        """Workers in a state; by default all that are not lost."""
        return sum(slot.state == state if state else slot.state != LOST for slot in self.slots.values())

    def _share(self, client: Waiting) -> int:
        """The number of workers that a client gets."""
        return client.wanted or min(filter(None, (self._count(), self.terms.workers)), default=0)

    def ready(self, client: Waiting, before: Sequence[Waiting], now: float) -> bool:
        """True once its turn has come and its workers are free; Refused if the server has had too few for too long."""
        # `before`: clients that asked earlier and still wait. Only those that could be served at all hold up later ones.
        have, need = self._count(), max(client.wanted, client.named, 1)
        ahead = bool(before) and before[-1].queued
        client.place, client.fits = len(before) + 1, have >= need
        client.queued = client.fits or ahead
        if client.fits:
            client.until = now + PATIENCE_SECONDS  # from when it has too few, if ever
        elif now >= client.until:
            raise few(have, need)
        return client.fits and not ahead and self._count(FREE) >= self._share(client)

    def news(self, client: Waiting, now: float) -> Notice | None:
        """The notice of a waiting client's place when that changes, and from time to time as a sign of life; else None."""
        have, free, afresh = self._count(), self._count(FREE), self._count(RENEWING)
        if client.fits:
            share = self._share(client)
            text = f"place {client.place} in its queue, for {share} worker{'s' * (share > 1)} of its own"
            text += f"; {free} of {have} are free"
            text += f", {afresh} restart" * bool(afresh)
            text += f"; a session may take {self.terms.seconds:g} s" * bool(self.terms.seconds)
        else:
            need = max(client.wanted, client.named, 1)
            text = f"place {client.place} in its queue; it has {have} of the {need} workers that the program wants"
        # How many are free is news to the first alone: the others would hear of every one that comes and goes.
        state = (client.place, client.fits, have, (free, afresh) if client.place == 1 else ())
        if state == client.told and now - client.told_at < REMINDER_SECONDS:
            return None
        client.told, client.told_at = state, now
        return Notice(text, client.place)

    def grant(self, client: Waiting, now: float) -> Lease:
        # Workers of one host first, by GPU: a session's workers should be neighbours.
        free = [slot for slot in self.slots.values() if slot.state == FREE]
        free = ordered(free, lambda slot: slot.info)[: self._share(client)]
        lease = Lease.of(self.heartbeat, self.home)
        lease.cluster.now = now
        for slot in free:
            lease.cluster.add(slot.peer, slot.info, ranked=False)
            slot.lease, slot.state = lease, LENT
            self._of[slot.peer] = lease
        self._of[client.peer] = lease
        self.leases.append(lease)
        return lease

    def release(self, peer: bytes, now: float) -> list[bytes]:
        lease = self._of.pop(peer, None)
        if lease is None:
            return []
        self.leases.remove(lease)

        # Each process starts afresh: what a program left in it (memory, loaded code) is not the next program's to see.
        renewed = []
        for slot in [slot for slot in self.slots.values() if slot.lease is lease]:
            slot.lease = None
            if slot.state == LOST:
                self._drop(slot)
                continue
            slot.state, slot.since = RENEWING, now
            del self._of[slot.peer]
            renewed.append(slot.peer)
        self.renewing.update(renewed)
        return renewed

    def check(self) -> None:
        for name, slot in self.slots.items():
            assert slot.name == name and (slot.lease is not None) == (slot.state in (LENT, LOST))
            assert slot.lease is None or slot.lease in self.leases
            assert bool(slot.peer) == (slot.state in (FREE, LENT)) or slot.state == RENEWING
            assert not slot.peer or self._peers[slot.peer] is slot
            assert self._of.get(slot.peer) is slot.lease or slot.state == LOST
            assert (slot.peer in self.renewing) == (slot.state == RENEWING and bool(slot.peer))
        leased = [worker.name for lease in self.leases for worker in lease.cluster.workers]
        assert len(leased) == len(set(leased)) and all(len(lease.sessions) == 1 for lease in self.leases), leased
        assert len(self._peers) == sum(bool(slot.peer) for slot in self.slots.values())


def taken(name: str) -> Refused:
    return Refused(f"a worker named {name!r} is here already: choose another --name")


def few(have: int, want: int) -> Refused:
    return Refused(f"{have} workers are connected, the program wants {max(want, 1)}: start more with `gt worker`")


def workers(lease: Lease) -> list[Worker]:
    """Those of a lease that are not lost."""
    return [worker for worker in lease.cluster.workers if not worker.lost]
