"""Plane `net`: shared memory within a host, TCP between hosts. Semantics are plane shm's: slots, credit, order, rank order.

Each pair of hosts has a way that the dispatcher has chosen: a connection, or workers that relay. A connection that fails breaks
the lane of its pair: waits raise Unreachable, which names both ends, until the next World gives the pair another way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gt.ir.heap import HEAP_BYTES, SLOT_BYTES, SLOTS
from gt.worker.plane.base import ALL, Buffer, Channel, Combine, OnIssued, PeerGone, Rows, TeamForm, Unreachable, nothing
from gt.worker.plane.net import collectives
from gt.worker.plane.net.duplex import Duplex
from gt.worker.plane.net.handshake import PROBE
from gt.worker.plane.net.lane import Lane
from gt.worker.plane.net.network import Network
from gt.worker.plane.net.peer_connection import PeerConnection
from gt.worker.plane.net.retries import Retries
from gt.worker.plane.net.route import Route, routes
from gt.worker.plane.net.stream import PairStream
from gt.worker.plane.net.wide_team import WideTeam
from gt.worker.plane.shm import Peer, ShmPlane, flat
from gt.worker.process import network_links

TEAM_KEY = 1 << 63  # added to a team's stream number; a channel's stream number is its offset


class FarPeer(Peer):
    """A worker of another host, in one epoch of the pair."""

    def __init__(self, row: Any, here: str, route: Route | None, lane: Lane | None) -> None:
        super().__init__(row)
        self.route, self.lane = route, lane
        self._here = here

    @property
    def heap(self) -> Any:
        raise self._unreachable("no memory is shared between hosts")

    def check(self) -> None:
        super().check()
        if self.lane is None:
            raise self._unreachable("no link joins their hosts, or all fail, and no worker relays: see `gt doctor --hosts`")
        if self.lane.broken:
            raise self._unreachable(self.lane.broken)

    def _unreachable(self, why: str) -> Unreachable:
        return Unreachable(self.index, f"no way from {self._here} to worker {self.name!r} on {self.row[3]}: {why}")


class NetPlane(ShmPlane):
    """A worker's plane where its server is not on loopback, so that workers of other hosts may join."""

    transport = "net"

    def __init__(self, heap_bytes: int = HEAP_BYTES) -> None:
        super().__init__(heap_bytes)
        self.network: Network
        self._retries: Retries
        self._here = ""  # this worker in an error
        self._routes: dict[int, Route] = {}
        self._streams: dict[tuple[int, int], PairStream] = {}
        self._wide: dict[tuple[int, int], tuple[int, WideTeam | None]] = {}
        self._ways: dict[tuple[int, int], Sequence[Any]] = {}

    # ---- any thread

    def open(self, index: int = -1) -> dict[str, Any]:
        info = super().open(index)
        assert self._own is not None
        self.network = Network(self._own.mark, self._look_again, network_links.ports())
        self.network.failed = self._link_failed
        self.network.made = self._link_made
        self._retries = Retries(self.network.probe, lambda index, *link: self._link_made(index, PROBE, *link))
        facts = {"links": network_links.links(), "routes": network_links.routes(), "scope": network_links.namespace()}
        return {**info, "port": self.network.port, **facts}

    def introduce(self, rows: Rows, ways: Rows, key: str, own: int, broken: Rows = ()) -> None:
        self.network.introduce(rows, ways, key, own)
        self._retries.want([(b, source, target) for a, b, source, target in broken if a == own])

    def world(self, rows: Sequence[Sequence[Any]], ways: Sequence[Sequence[Any]] = ()) -> None:
        self._ways = {(row[0], row[1]): row for row in ways}
        self._routes = routes(ways, self.network.own)
        self._here = next((f"worker {row[1]!r} on {row[3]}" for row in rows if row[0] == self.network.own), "here")
        super().world(rows)
        self.network.forget_old_lanes({(index, route.epoch) for index, route in self._routes.items()})

    def abort(self, index: int, reason: str) -> None:
        if index != ALL:
            self.network.gone(index)
        super().abort(index, reason)

    def counters(self) -> dict[str, dict[str, int]]:
        return {**super().counters(), "bytes_relayed": dict(self.network.relay.relayed)}

    def ways(self) -> dict[str, str]:
        if not self._routes:
            return {}
        with self._lock:
            peers = [peer for index, peer in sorted(self._peers.items()) if index != self.network.own]
        return {peer.name: str(peer.route) if isinstance(peer, FarPeer) else "shm" for peer in peers}

    def close(self) -> None:
        if hasattr(self, "network"):
            self._retries.end()
            self.network.close()
            self._retries.join()
        super().close()

    def _look_again(self) -> None:
        with self._lock:
            if self._own is not None and self._own.words[self._own.asleep]:
                self._own.ring()

    def _link_failed(self, index: int, epoch: int, source: str, target: str, reason: str) -> None:
        if self.on_link_failed is not None:
            self.on_link_failed(index, epoch, source, target, reason)

    def _link_made(self, index: int, epoch: int, source: str, target: str) -> None:
        if self.on_link_made is not None:
            self.on_link_made(index, epoch, source, target)

    def _stays(self, peer: Peer, row: Sequence[Any]) -> bool:
        route = self._routes.get(peer.index)
        # A new epoch of the pair is a new lane, with new counts of credit: so it is another Peer here, though the same
        # process.
        now = route.epoch if route is not None and route.kind != "none" else None
        before = peer.lane.epoch if isinstance(peer, FarPeer) and peer.lane is not None else None
        return super()._stays(peer, row) and now == before

    def _meet(self, row: Any) -> Peer:
        peer = Peer(row)
        if peer.near:
            return peer
        route = self._routes.get(peer.index)
        lane = self.network.lane(peer.index, route.epoch) if route is not None and route.kind != "none" else None
        return FarPeer(row, self._here, route, lane)

    # ---- transfers

    def send(self, channel: Channel, data: Buffer) -> None:
        stream = self._streams.get((channel["peer"], channel["offset"]))
        view = flat(data)
        size = len(view)
        if stream is None or stream.version != self._version or size > stream.small or not stream.send_small(view, size):
            if (stream := self._far(channel)) is None:
                return super().send(channel, data)
            stream.send(view, size)
        sent = self._sent  # as `count` does, which small messages do not call
        sent[stream.name] = sent.get(stream.name, 0) + size

    def recv(self, channel: Channel, into: Buffer) -> None:
        stream = self._streams.get((channel["peer"], channel["offset"]))
        view = flat(into)
        size = len(view)
        if stream is None or stream.version != self._version or size > stream.small or not stream.receive_small(view, size):
            if (stream := self._far(channel)) is None:
                return super().recv(channel, into)
            stream.post(view)
            stream.wait()
            self._complete(stream, size)
            return
        received = self._received
        received[stream.name] = received.get(stream.name, 0) + size

    def send_chunks(self, channel: Channel, total: int, chunks: Iterable[memoryview]) -> None:
        """Send a message of `total` bytes, whose chunks of a slot each become ready one after the other."""
        stream = self._far(channel)
        if stream is None:
            return self.send(channel, b"".join(chunks))
        for chunk in chunks if total else (flat(b""),):
            stream.send(chunk, total)
        self.count(stream.peer, total, 0)

    def recv_chunks(self, channel: Channel, into: memoryview) -> Iterator[tuple[int, int]]:
        """Receive as `recv` does; (start, stop) of each slot's bytes as soon as they are there."""
        stream, step = self._far(channel), channel["bytes"]
        done = 0
        if stream is not None and len(into) > step:
            stream.post(into)
            while done + step < len(into):
                stream.wait_for(done + step)
                if stream.incoming.done or stream.incoming.message.total != len(into):
                    break
                yield done, done + step
                done += step
            stream.wait()
            self._complete(stream, len(into))
        else:
            self.recv(channel, into)
        yield done, len(into)

    def _complete(self, stream: PairStream, want: int) -> None:
        """Count a message that is there. ValueError if it has another size."""
        sent = stream.incoming.message.total
        self.count(stream.peer, 0, sent)
        if sent != want:
            raise ValueError(f"worker {stream.peer.name} sent {sent} bytes, want {want}")

    def wait(self, ready: Callable[[], bool], peers: Sequence) -> None:
        if self.network.owned:
            self.network.release()
        super().wait(ready, peers)

    @property
    def bell(self) -> int:
        return self._heap().bell

    def waiting(self, now: bool) -> None:
        """Have the bell ring once a connection's reader, or another worker, has something for the executing thread."""
        own = self._heap()
        own.words[own.asleep] = int(now)
        self._fence()

    def hear(self) -> None:
        """Take note of the bell's rings."""
        self._heap().listen()

    def ended(self, stream: PairStream, connection: PeerConnection, error: OSError) -> None:
        """A connection ended while this thread used it: wait until that is certain, and why."""
        # `lost` sets a deadline after which the lane breaks. The dispatcher may name the cause before; either ends this wait.
        self.network.lost(connection, error)
        self.wait(lambda: False, (stream,))

    def _far(self, channel: Channel) -> PairStream | None:
        """The stream of a channel to a worker of another host, None of this host. PeerGone if the worker is."""
        name, version = (channel["peer"], channel["offset"]), self._version
        stream = self._streams.get(name)
        if stream is not None and stream.version == version and not stream.failing:
            return stream
        peer = self._peer(channel["peer"])
        if not isinstance(peer, FarPeer):
            return None
        peer.check()
        if stream is None or stream.peer is not peer:
            assert peer.lane is not None
            stream = PairStream(self, peer, peer.lane, channel["offset"], channel["bytes"], channel["slots"])
            self._streams[name] = stream
        stream.version = version
        return stream

    # ---- collectives

    def all_reduce(self, team: TeamForm, data: Buffer, combine: Combine, on_issued: OnIssued = nothing) -> None:
        if (wide := self._team_of_hosts(team)) is None:
            return super().all_reduce(team, data, combine, on_issued)
        with wide.together():
            collectives.all_reduce(wide, flat(data), combine)
        on_issued()

    def all_gather(self, team: TeamForm, data: Buffer, outs: Sequence[Buffer], on_issued: OnIssued = nothing) -> None:
        if (wide := self._team_of_hosts(team)) is None:
            return super().all_gather(team, data, outs, on_issued)
        with wide.together():
            collectives.all_gather(wide, flat(data), [flat(out) for out in outs])
        on_issued()

    def reduce_scatter(
        self, team: TeamForm, sections: Sequence[Buffer], out: Buffer, combine: Combine, on_issued: OnIssued = nothing
    ) -> None:
        if (wide := self._team_of_hosts(team)) is None:
            return super().reduce_scatter(team, sections, out, combine, on_issued)
        with wide.together():
            collectives.reduce_scatter(wide, [flat(section) for section in sections], flat(out), combine)
        on_issued()

    def all_to_all(self, team: TeamForm, sends: Sequence[Buffer], recvs: Sequence[Buffer], longest: int = 0) -> None:
        if (wide := self._team_of_hosts(team)) is None:
            return super().all_to_all(team, sends, recvs, longest)
        with wide.together():
            collectives.all_to_all(wide, [flat(data) for data in sends], [flat(out) for out in recvs])

    def _team_of_hosts(self, form: TeamForm) -> WideTeam | None:
        """The team, if its workers are on several hosts."""
        name = form["id"], form["offset"]
        version, team = self._wide.get(name, (-1, None))
        if version == self._version:
            return team
        # A member may be cut off from this one alone. That is found within the collective, so that the others are told.
        members = [None if rank == form["rank"] else self._member(index) for rank, index in enumerate(form["workers"])]
        if not any(isinstance(peer, FarPeer) for peer in members):
            self._wide[name] = self._version, None
            return None
        for peer in members:
            if peer is not None and peer.index not in self._routes:
                raise PeerGone(peer.index, peer.gone or "it is not in the world")
        key, direct = self._agreement(form, members)
        if team is None or team.key != key:
            team = self._make_team(form["rank"], members, key, direct)
        self._wide[name] = self._version, team
        return team

    def _agreement(self, form: TeamForm, members: list[Peer | None]) -> tuple[int, bool]:
        """The key of a team's streams, which is another for other processes or ways; True if a connection joins each pair."""
        indices = frozenset(form["workers"])
        pairs = [row for pair, row in sorted(self._ways.items()) if indices.issuperset(pair)]
        for a, b, _, kind, *_ in pairs:
            if kind == "none":
                raise Unreachable(b, f"workers {a} and {b} are of one collective, and nothing joins their hosts")
        # All members hash the same facts: processes in rank order, and epochs of all pairs. A change of any gives fresh
        # streams.
        marks = [self._heap().mark if peer is None else int(peer.row[6].partition("-")[2], 16) for peer in members]
        text = f"{form['id']} {marks} {[row[2] for row in pairs]}".encode()
        # The lowest bit is 0: the second stream of each pair, for results, has the key with 1.
        key = TEAM_KEY | int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2 << 1
        return key, all(row[3] != "via" for row in pairs)

    def _make_team(self, rank: int, members: list[Peer | None], key: int, direct: bool) -> WideTeam:
        streams, results = ({at: self._wide_stream(peer, k) for at, peer in enumerate(members) if peer} for k in (key, key ^ 1))
        return WideTeam(rank, list(members), Duplex(self, streams, results), direct, self.count)

    def _wide_stream(self, peer: Peer, key: int) -> PairStream:
        lane = self.network.lane(peer.index, self._routes[peer.index].epoch)
        return PairStream(self, peer, lane, key, SLOT_BYTES, SLOTS)
