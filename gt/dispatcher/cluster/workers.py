"""The workers as the dispatcher sees them: identity, queued instructions, and places on the heap for exchange.

Pure bookkeeping: definitions are numbered here, heap offsets handed out here, since only here every use is known.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from gt.dispatcher.cluster import links
from gt.dispatcher.cluster.links import Failure, Host, Pair, Way
from gt.dispatcher.fairness.run_queue import RunQueue
from gt.errors import Refused, SystemFailure
from gt.ir.heap import MEETING_BYTES, Sizes, channel_bytes, channel_class, enough, sizes, team_bytes
from gt.ir.instr import FIRST, Define
from gt.ir.schema import Schema, common

MAX_NUMBERS_PER_RUN = 1 << 17  # numbers of one Run, about: it has to fit a body whatever a client sends
ABSENT = "it has not joined yet"
RETRY_SECONDS = 2.0  # from the failure of connections to another attempt, where no other way is left
MAX_TROUBLES = 8  # failed connections that a program is told of when it begins: many hosts have thousands
REST_SECONDS, MAX_REST_SECONDS = 10.0, 3600.0  # of a connection that failed again once used: four times longer each time


@dataclass(slots=True)
class Worker:
    """One worker process and the stream that is being written for it. runs/done count its Run messages.

    What is written stays here until the event that wrote it has been dealt with: then all of it goes, or none. A process
    that takes a lost one's place is the same Worker, so that plans that name it hold; `lives` counts these.
    """

    index: int
    name: str
    peer: bytes
    info: dict
    lost: str = ""
    known: set[int] = field(default_factory=set)
    defines: list = field(default_factory=list)
    code: list = field(default_factory=list)
    runs: int = 0
    done: int = 0
    lives: int = 1
    switches: dict | None = None  # as its newest TorchSettings said
    session: int = -1  # the same
    shared: bool = False  # the same
    weight: int = 0  # total weight of `defines`
    seconds: float = 0.0  # estimated seconds of `code` and `cuts`
    told: list = field(default_factory=list)  # definitions that are sent with the next instructions
    cuts: list = field(default_factory=list)  # (defines, code) before these
    _host: Host | None = None

    @property
    def host(self) -> Host:
        """Its host as its process has described it."""
        if self._host is None:
            self._host = links.host(self.info)
        return self._host

    def revive(self, peer: bytes, info: dict) -> None:
        """A new process, which knows and holds nothing; numbers go on, and its predecessor's unfinished work counts as done."""
        self.peer, self.info, self.lost, self.switches, self.session, self._host = peer, info, "", None, -1, None
        self.known, self.done = set(), self.runs
        self.told, self.defines, self.code, self.cuts, self.weight, self.seconds = [], [], [], [], 0, 0.0
        self.lives += 1

    def row(self) -> list:
        """Its row of World."""
        rest = (self.info.get(k, 0) for k in ("pid", "host", "heap_fd", "heap_bytes", "doorbell"))
        return [self.index, self.name, *rest, links.home(self.info), self.info.get("port", 0)]

    def define(self, definition: Define) -> int:
        """Number of the definition, sent along if this worker has not seen it."""
        number = definition.number
        if number not in self.known:
            self.known.add(number)
            self.defines.append(definition.wire())
            self.weight += definition.weight
        return number

    def announce(self, definition: Define) -> None:
        """Send it a definition that a program will name, even if the instructions of this event are discarded."""
        if definition.number not in self.known:
            self.known.add(definition.number)
            self.told.append(definition.wire())

    def cut(self) -> None:
        """Begin another Run with the next instruction."""
        if self.code:
            self.cuts.append((self.defines, self.code))
        self.defines, self.code, self.weight = [], [], 0

    def take(self) -> list[tuple[list, list]]:
        """(defines, code) of the Runs that were written since."""
        self.cut()
        cuts, self.cuts, self.seconds = self.cuts, [], 0.0
        # Definitions of programs are sent now, if need be in a Run without code:
        # what is written next may be another session's, and sent before.
        if self.told:
            cuts = cuts or [([], [])]
            cuts[0] = self.told + cuts[0][0], cuts[0][1]
            self.told = []
        return cuts

    def discard(self) -> None:
        """Unwrite all that this event has written; the definitions in it have to be sent again."""
        self.cut()
        for defines, _ in self.cuts:
            self.known.difference_update(row[0] for row in defines)
        self.cuts, self.seconds = [], 0.0


def ordered(members: list[Any], info: Callable[[Any], dict]) -> list[Any]:
    """Workers in the order of their indices: by rank, then by host, within a host by GPU, else as they have joined."""
    hosts: dict[str, Host] = {}
    for member in members:
        one = links.host(info(member))
        hosts.setdefault(one.home, one)
    place = {home: at for at, home in enumerate(links.order(list(hosts.values())))}

    def key(member: Any) -> tuple:
        about = info(member)
        rank = about.get("rank", -1)
        return rank < 0, rank, place[links.home(about)], about.get("gpu", -1)

    return sorted(members, key=key)


class HeapFull(SystemFailure):
    """No place for another channel or team."""


class Cluster:
    """Workers by index, with heap regions for pairs and teams."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self._numbers = itertools.count(FIRST)  # several threads take from it
        self.heap_used = MEETING_BYTES
        self.generation = 0
        self.announced = False  # the newest World has these indices
        self.settled = False  # a session has used the indices
        self.seq = 0  # number of the next op, over all sessions
        self.next_key = 0
        self.now = 0.0  # time of the event that is being handled
        self.queue = RunQueue()
        self.formed: dict[int, int] = {}  # workers whose devices share memory, and which of their lives do
        self._channels: dict[int, tuple[int, Sizes]] = {}
        self._teams: dict[tuple[int, ...], tuple[int, int, int]] = {}
        self.relayed: list[list] = []  # rows of the newest `routes` with workers that relay
        self.nccl: list[list[int]] = []  # pairs of the newest `routes` that NCCL joins
        self._failed: dict[Failure, float] = {}  # connections between hosts, and when they failed
        self._reasons: dict[Failure, str] = {}  # of those that programs have been told of, why
        self.mended: set[Failure] = set()  # those of them that work again, and are not used yet
        self._again: dict[Failure, tuple[int, float]] = {}  # those that were used again: how often, and when last
        self._resting: set[Failure] = set()  # those that the newest `broken` left out, as they had failed again
        self._hosts: list[Host] = []  # those of the newest `ways`
        self._known: dict[tuple[Host, Host], list[Pair]] = {}  # what these may connect by
        self._routes: dict[tuple[int, int], tuple] = {}  # pairs of workers on different hosts -> their way, and whose it is
        self._epochs: dict[tuple[int, int], int] = {}  # how often that has changed
        self._met: dict[tuple[int, int], int] = {}  # pairs of workers -> the newest epoch in which they are connected
        self.unmet: set[tuple[int, int]] = set()  # those of the newest `routes` that are to connect, and have not yet

    def add(self, peer: bytes, info: dict, ranked: bool = True) -> Worker:
        """A worker joins; one of the name of a lost worker takes its place. ranked: its index is its rank, if it has one."""
        name, rank = info.get("name") or "", info.get("rank", -1) if ranked else -1
        if rank >= 0:
            return self._place(peer, info, rank)

        # A successor of a lost worker: by name, or nameless in any place that somebody had. Programs that name the index go on.
        for worker in self.workers:
            if worker.lost and (worker.name == name or not (name or worker.lost == ABSENT)):
                worker.revive(peer, info)
                return worker
        index = len(self.workers)
        worker = Worker(index, name or self._free_name(index), peer, info)
        self.workers.append(worker)
        return worker

    def _place(self, peer: bytes, info: dict, rank: int) -> Worker:
        """A worker joins whose index its launcher has chosen. Refused if another one has that rank."""
        # Lower ranks that have not joined yet get places without a process.
        while len(self.workers) <= rank:
            index = len(self.workers)
            self.workers.append(Worker(index, self._free_name(index), b"", {}, ABSENT))
        worker = self.workers[rank]
        if not worker.lost:
            here = f"worker {worker.name} on {worker.info.get('host')} has rank {rank} already"
            raise Refused(f"{here}: give each process of a job a RANK of its own, or each worker a GT_RANK")
        absent = worker.lost == ABSENT
        worker.revive(peer, info)
        if absent and (name := info.get("name")):
            for other in self.workers:
                if other.name == name:  # the name that was kept for one that has not joined
                    other.name = self._free_name(other.index)
            worker.name = name
        return worker

    def _free_name(self, index: int) -> str:
        names = {worker.name for worker in self.workers}
        return next(name for n in itertools.count(index) if (name := f"w{n}") not in names)

    def arrange(self) -> None:
        """Order workers of several hosts by host, before anything depends on their indices. Ranks are an order already."""
        ranked = any(worker.info.get("rank", -1) >= 0 for worker in self.workers)
        # Plans, heaps and programs name workers by index, so indices may change only before the first session.
        settled, self.settled = self.settled, True
        if settled or self.formed or ranked or any(worker.lost for worker in self.workers):
            return
        before, self.workers = self.workers, ordered(self.workers, lambda worker: worker.info)
        for index, worker in enumerate(self.workers):
            worker.index = index
        self.announced = self.announced and self.workers == before

    # ---- ways between hosts

    def hosts_of(self, members: Iterable[Worker]) -> list[Host]:
        """The hosts of workers that are not lost, each once."""
        hosts: dict[str, Host] = {}
        for worker in members:
            if not worker.lost:
                hosts.setdefault(worker.host.home, worker.host)
        return list(hosts.values())

    def ways(self) -> dict[tuple[str, str], Way]:
        """The way of each pair of hosts."""
        # A search among two hosts' addresses takes up to some milliseconds. A worker that joins, a link that fails and a
        # client each ask. So the ways between hosts that are still there are kept.
        hosts = self.hosts_of(self.workers)
        if hosts != self._hosts:
            self._hosts, living = hosts, set(hosts)
            self._known = {pair: found for pair, found in self._known.items() if living.issuperset(pair)}
        return links.ways(hosts, frozenset(self._failed), self._known)

    def fail_link(
        self, worker: Worker, peer: Worker, epoch: int, addresses: tuple[str, str], now: float, reason: str = ""
    ) -> str | None:
        """No connection between these addresses was made, or it broke: news for programs, "" if they have been told.

        None if it is not the way of the two in this epoch.
        """
        # Both ends report the same failure, and late ones concern a way that is no longer in use: only the first one counts.
        one, other = links.home(worker.info), links.home(peer.info)
        way = self.ways().get((one, other)) if not (worker.lost or peer.lost) else None
        if way is None or not way.connected or (way.source, way.target) != addresses:
            return None
        if self._epochs.get((min(worker.index, peer.index), max(worker.index, peer.index))) != epoch:
            return None
        row = (one, other, *addresses) if one <= other else (other, one, *addresses[::-1])
        self._failed[row] = now
        self.mended.discard(row)
        if row in self._again and now - self._again[row][1] > MAX_REST_SECONDS:
            del self._again[row]  # it has worked long enough
        known, self._reasons[row] = row in self._reasons, reason
        return "" if known else self._trouble(row)

    def _trouble(self, row: Failure) -> str:
        """News of a connection that has failed, and of what is used now."""
        names = {host.home: host.name for host in self._hosts}
        one, other, source, target = row
        way = self.ways()[one, other]
        text = f"hosts {names[one]} and {names[other]}: {source} to {target} failed: {self._reasons[row]}"
        if "timed out" in text:
            text += " (a firewall that drops it, or a cable)"
        if way.connected:
            return f"{text}; {way.source} to {way.target} is tried now"
        if way.kind == "via":
            return f"{text}; {' and '.join(names[home] for home in way.via)} relays until it is back, which is slower"
        # All ways have failed, each for a reason of its own.
        rows = sorted(other for other in self._failed if other[:2] == row[:2] and other != row)
        before = [f"; so did {other[2]} to {other[3]}: {self._reasons.get(other, 'unknown')}" for other in rows]
        end = "nothing else joins them, and all is tried again: `gt doctor --hosts` says what is wrong"
        return f"{text}{''.join(before)}; {end}"

    def troubles(self) -> list[str]:
        """News of connections that have failed, and would be used: of the first ones, and how many others there are."""
        self.ways()  # of the hosts that are here now
        homes = {host.home for host in self._hosts}
        rows = [row for row in self._reasons if row in self._failed and homes.issuperset(row[:2])]
        more = [f"and {len(rows) - MAX_TROUBLES} other connections between hosts have failed: see `gt doctor --hosts`"]
        return [self._trouble(row) for row in rows[:MAX_TROUBLES]] + more * (len(rows) > MAX_TROUBLES)

    def broken(self) -> list[list]:
        """Rows of World.broken: connections that have failed, of pairs that have another way meanwhile."""
        self._resting = {row for row in self._failed if self._rests(row)}
        if len(self._resting) == len(self._failed):
            return []
        first: dict[str, int] = {}
        for worker in self.workers:
            if not worker.lost:
                first.setdefault(worker.host.home, worker.index)
        ways, rows = self.ways(), []
        for one, other, source, target in self._failed.keys() - self._resting:
            if one in first and other in first and ways[one, other].kind != "none":
                a, b = first[one], first[other]
                rows.append([a, b, source, target] if a < b else [b, a, target, source])
        return sorted(rows)

    def _rests(self, row: Failure) -> bool:
        """True for a failed connection that is not to be tried yet.

        An attempt says little: a short greeting passes where large packets are dropped, or another worker's port is closed.
        """
        count, _ = self._again.get(row, (0, 0.0))
        rest = min(REST_SECONDS * 4.0 ** min(count - 1, 9), MAX_REST_SECONDS) if count else 0.0
        return self.now - self._failed[row] < rest

    def mend_link(self, worker: Worker, peer: Worker, source: str, target: str) -> None:
        """A connection works again between these addresses. It is used once `use_mended` says so."""
        one, other = links.home(worker.info), links.home(peer.info)
        row = (one, other, source, target) if one <= other else (other, one, target, source)
        if row in self._failed and not self._rests(row):
            self.mended.add(row)

    def use_mended(self) -> list[str]:
        """Use connections that work again, if no transfer is under way, which would be lost: news for programs."""
        living = [worker for worker in self.workers if not worker.lost]
        if self.queue.waiting or any(worker.done < worker.runs or worker.code or worker.cuts for worker in living):
            return []
        names, news = {host.home: host.name for host in self._hosts}, []
        for row in self.mended & {*self._failed}:
            del self._failed[row]
            self._reasons.pop(row, None)
            self._again[row] = self._again.get(row, (0, 0.0))[0] + 1, self.now
            one, other, source, target = row
            news.append(f"hosts {names.get(one)} and {names.get(other)} have their connection {source} to {target} again")
        self.mended.clear()
        return news

    def meet(self, worker: Worker, peer: Worker, epoch: int) -> None:
        """Two workers are connected in an epoch of theirs."""
        pair = min(worker.index, peer.index), max(worker.index, peer.index)
        if self._epochs.get(pair) == epoch:
            self._met[pair] = epoch
            self.unmet.discard(pair)

    def part(self, worker: Worker) -> None:
        """A worker is lost: nobody waits for its connections."""
        self.unmet = {pair for pair in self.unmet if worker.index not in pair}

    def retry_links(self, now: float) -> bool:
        """Try connections again where nothing else is left to try, or that have rested. True if there are any."""
        if not self._failed or now - max(self._failed.values()) < RETRY_SECONDS:
            return False
        rested = {row for row in self._resting if row in self._failed and not self._rests(row)}
        self._resting -= rested
        cut = {pair for pair, way in self.ways().items() if way.kind == "none"}
        again = [row for row in self._failed if row[:2] in cut]
        for row in again:
            del self._failed[row]
        return bool(rested or again)

    def forgive(self, worker: Worker) -> None:
        """A worker has joined: its host's connections are tried anew."""
        home = links.home(worker.info)
        self._failed = {row: at for row, at in self._failed.items() if home not in row[:2]}
        self._reasons = {row: why for row, why in self._reasons.items() if home not in row[:2]}
        self._again = {row: used for row, used in self._again.items() if home not in row[:2]}
        self.mended &= {*self._failed}

    def routes(self) -> list[list]:
        """Rows of World.ways. The epoch of a pair grows whenever its way, or a worker of it, is another than before."""
        living = [worker for worker in self.workers if not worker.lost]
        hosts: dict[str, list[Worker]] = {}
        for worker in living:
            hosts.setdefault(links.home(worker.info), []).append(worker)
        self.relayed, self.nccl, self.unmet = [], [], set()
        if len(hosts) < 2:
            return []

        # Pairs with direct ways first: the epoch of a relayed way names the epochs of its legs, so it changes with them.
        ways, rows = self.ways(), []
        direct: dict[tuple[int, int], int] = {}
        ways |= {(host.home, host.home): links.within(host) for host in self.hosts_of(living)}
        pairs = [(a, b) for a in living for b in living if a.index < b.index]
        pairs.sort(key=lambda pair: len(ways[links.home(pair[0].info), links.home(pair[1].info)].via))
        for a, b in pairs:
            way = ways[links.home(a.info), links.home(b.info)]
            # Pairs share out the relaying among the workers of the host between.
            relays = [hosts[home][(a.index + b.index) % len(hosts[home])] for home in way.via]
            path = [a, *relays, b]
            legs = [direct[min(x.index, y.index), max(x.index, y.index)] for x, y in pairwise(path)] if relays else []

            # Peers are part of the way: a restarted process has none of the old connections.
            now = (way, [(worker.index, worker.lives, worker.peer) for worker in path], legs)
            key = a.index, b.index
            if self._routes.get(key) != now:
                self._routes[key], self._epochs[key] = now, self._epochs.get(key, 0) + 1
            direct[key] = self._epochs[key]
            rows.append([*key, self._epochs[key], way.kind, way.source, way.target, [worker.index for worker in relays]])
            if links.by_nccl(a.info, b.info, way):
                self.nccl.append([*key])
            if way.connected and self._met.get(key) != self._epochs[key]:
                self.unmet.add(key)
        self.relayed = [row for row in rows if row[6]]
        return rows

    def named(self, name: str) -> Worker | None:
        return next((w for w in self.workers if w.name == name), None)

    def hosts(self) -> dict[str, int]:
        """Numbers of workers that compute in their host's memory, by host."""
        return dict(Counter(links.home(w.info) for w in self.workers if not w.lost and w.info.get("device") == "cpu"))

    def library_ops(self) -> dict[str, Schema]:
        """Schemas of the libraries' ops that all workers have."""
        return common(w.info.get("ops") or {} for w in self.workers if not w.lost)

    def finished(self, worker: Worker, run: int) -> None:
        """Note that a worker has executed its Runs up to this one, and send work whose turn has come."""
        worker.done = run
        self.queue.done(worker.index, run)
        if self.queue.waiting:
            self.take_turns()

    def take_turns(self) -> None:
        for unit in self.queue.due():
            unit.send()

    def send_all(self) -> None:
        """All that waits for its turn: it was planned with the workers in mind that there were until now."""
        for unit in self.queue.all():
            unit.send()

    def check(self) -> None:
        """Invariants between events; tests call it."""
        for worker in self.workers:
            assert not worker.code and not worker.cuts and not worker.defines, f"half a batch is left for {worker.name}"
            assert worker.done <= worker.runs
        self.queue.check()

    def number(self) -> int:
        """A new name for one definition."""
        return next(self._numbers)

    def key(self) -> int:
        """A new name for one upload or answer."""
        self.next_key += 1
        return self.next_key

    def _allocate(self, nbytes: int, members: tuple[int, ...]) -> int:
        # Symmetric: an offset has one meaning on all workers. Nothing is given back: channels and teams are kept for good.
        offset = self.heap_used
        limit = min(self.workers[i].info.get("heap_bytes", 0) for i in members)
        if offset + nbytes > limit:
            text = f"the symmetric heap of {limit} bytes has no room for {nbytes} more, {offset} are taken by earlier groups"
            larger = enough(limit, offset + nbytes) >> 20
            raise HeapFull(f"{text}: start the workers with GT_HEAP_SIZE={larger}MiB, or use fewer different groups")
        self.heap_used += nbytes
        return offset

    def _sizes(self, members: tuple[int, ...]) -> Sizes:
        return sizes(min(self.workers[i].info.get("heap_bytes", 0) for i in members))

    def channel(self, source: int, target: int) -> tuple[int, Sizes]:
        """Heap offset and sizes for messages source -> target; pairs that never meet in a heap share one."""
        # Both directions of a pair and all other pairs of its class use one region, see channel_class.
        shared = channel_class(source, target)
        if shared not in self._channels:
            sizes = self._sizes((source, target))
            self._channels[shared] = self._allocate(channel_bytes(sizes.slot, sizes.slots), (source, target)), sizes
        return self._channels[shared]

    def team(self, workers: tuple[int, ...]) -> tuple[int, int, int]:
        """(id, heap offset, buffer size) of a team, made on first use."""
        if workers not in self._teams:
            buffer = self._sizes(workers).buffer
            self._teams[workers] = len(self._teams), self._allocate(team_bytes(buffer, len(workers)), workers), buffer
        return self._teams[workers]

    def team_payload(self, workers: tuple[int, ...], rank: int) -> dict:
        number, offset, buffer = self.team(workers)
        return {"id": number, "workers": list(workers), "rank": rank, "offset": offset, "bytes": buffer}

    def channel_payload(self, source: int, target: int, peer: int) -> dict:
        offset, sizes = self.channel(source, target)
        return {"peer": peer, "offset": offset, "bytes": sizes.slot, "slots": sizes.slots}

    def form(self, again: bool = False) -> list[list[int]]:
        """Workers whose devices are to share memory from here on, by host: all of one that can, unless some do already.

        again: only once all of a host are back that did so before.
        """
        # By host: workers that can take part now, and those that did before.
        hosts: dict[str, list[int]] = {}
        before: dict[str, set[int]] = {}
        for worker in self.workers:
            if worker.index in self.formed:
                before.setdefault(links.home(worker.info), set()).add(worker.index)
            if not worker.lost and worker.info.get("unique_id"):
                hosts.setdefault(links.home(worker.info), []).append(worker.index)

        # A host forms only once none of its former members lives in the old world: its memory is still mapped there.
        worlds = []
        for home, able in hosts.items():
            former = before.get(home, set())
            if len(able) < 2 or (again and not (former and former <= set(able))) or any(map(self._shares, former)):
                continue
            self.formed = {i: lives for i, lives in self.formed.items() if i not in former}
            self.formed.update((i, self.workers[i].lives) for i in able)
            worlds.append(able)
        return worlds

    def _shares(self, index: int) -> bool:
        """True if the process that shares its device's memory is there."""
        return not self.workers[index].lost and self.workers[index].lives == self.formed[index]
