"""Plane `net`: shared memory within a host, TCP between hosts. Semantics are plane shm's: slots, credit, order, rank order.

Each pair of hosts has a way that the dispatcher has chosen: a connection, or workers that relay. A connection that fails breaks
the lane of its pair: waits raise Unreachable, which names both ends, until the next World gives the pair another way.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gt.ir.heap import HEAP_BYTES, SLOT_BYTES, SLOTS
from gt.worker.plane.base import ALL, Buffer, Channel, Combine, OnIssued, TeamForm, Unreachable, nothing
from gt.worker.plane.net import collectives
from gt.worker.plane.net.lane import Incoming, Lane, Outgoing
from gt.worker.plane.net.network import Network
from gt.worker.plane.net.route import Route, routes
from gt.worker.plane.net.wide_team import StreamLike, WideTeam
from gt.worker.plane.net.wire import CREDIT, DATA, FAIL, HEADER, JOINED, Wire
from gt.worker.plane.shm import Peer, ShmPlane, flat
from gt.worker.process import network_links

SMALL = 32 << 10  # bytes of a message that the waiting thread reads itself
TEAM_KEY = 1 << 63  # of streams of teams; those of channels are their offsets


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
            raise self._unreachable("no link joins their hosts, and no worker relays: `gt doctor --hosts` shows the links")
        if self.lane.broken:
            raise self._unreachable(self.lane.broken)

    def _unreachable(self, why: str) -> Unreachable:
        return Unreachable(self.index, f"no way from {self._here} to worker {self.name!r} on {self.row[3]}: {why}")


class PairStream:
    """Messages to and from one worker under one key."""

    def __init__(self, plane: NetPlane, peer: Peer, lane: Lane, key: int, slot: int, slots: int) -> None:
        self.peer, self.key, self.slot, self._keep = peer, key, slot, max(1, slots // 2)
        self._plane, self._network, self._lane = plane, plane.network, lane
        with self._lane.lock:
            self.incoming: Incoming = self._lane.incoming(key)
        self._outgoing: Outgoing = self._lane.outgoing(key, slots)
        self._wire: Wire | None = None
        self._network.want(lane.index)
        self._size = 0
        self._about = (self._network.own, peer.index, self._lane.epoch, key)

    def check(self) -> None:
        self.peer.check()
        if self._lane.broken:
            raise Unreachable(self.peer.index, f"worker {self.peer.name!r} on {self.peer.row[3]}: {self._lane.broken}")
        if self._lane.failed and (why := self._lane.failed.get(self.key)):
            raise Unreachable(self.peer.index, why)

    @property
    def wire(self) -> Wire:
        """The connection that the frames take; waits until it is made."""
        wire = self._wire
        if wire is None or wire.ended:
            network, lane = self._network, self._lane
            wire = network.wire(lane.index, lane.epoch)
            if wire is None:
                self._plane.wait(lambda: network.wire(lane.index, lane.epoch) is not None, (self,))
                wire = network.wire(lane.index, lane.epoch)
                assert wire is not None
            self._wire = wire
        return wire

    def send(self, data: memoryview, total: int, note: int = 0) -> None:
        """Send bytes of a message of `total` bytes; several calls may send one message."""
        slot = self.slot
        if len(data) <= slot:
            self._frame(DATA, data, total, note)
            return
        for start in range(0, len(data), slot):
            self._frame(DATA, data[start : start + slot], total, note)

    def _frame(self, kind: int, data: memoryview, total: int, note: int) -> None:
        out, incoming, wire = self._outgoing, self.incoming, self.wire
        if kind == DATA and out.credit <= 0:
            self._plane.wait(lambda: out.credit > 0, (self,))
        with self._lane.lock:
            if kind == DATA:
                out.credit -= 1
            credit = max(0, min(incoming.owed, 0xFFFF))
            incoming.owed -= credit
        source, target, epoch, key = self._about
        header = HEADER.pack(kind, 0, credit, len(data), source, target, epoch, key, total, note)
        try:
            wire.send(header, data, self.check)
        except OSError as error:
            self._plane.ended(self, wire, error)

    def send_small(self, data: memoryview) -> None:
        """The same as `send` for a message of one small frame."""
        out, wire = self._outgoing, self._wire
        if wire is None or wire.ended or out.credit <= 0 or len(data) > JOINED:
            self.send(data, len(data))
            return
        with self._lane.lock:
            owed = self.incoming.owed
            credit = owed if 0 < owed < 0xFFFF else 0
            out.credit -= 1
            self.incoming.owed = owed - credit
        source, target, epoch, key = self._about
        nbytes = len(data)
        frame = HEADER.pack(DATA, 0, credit, nbytes, source, target, epoch, key, nbytes, 0) + data
        try:
            if not wire.send_now(frame, self.check):
                wire.send(frame, memoryview(b""), self.check)
        except OSError as error:
            self._plane.ended(self, wire, error)

    def receive_small(self, into: memoryview) -> bool:
        """Receive a message of one small frame, if it is the next to arrive; else False, and nothing has changed."""
        incoming, wire, size = self.incoming, self._wire, len(into)
        if wire is None or not wire.owned or not incoming.idle:
            return False
        source, target, epoch, key = self._about
        header = HEADER.pack(DATA, 0, 0, size, target, source, epoch, key, size, 0)[4:]
        credit = self._network.read_one(wire, header, into)
        if credit < 0:
            return False
        with self._lane.lock:
            self._outgoing.credit += credit
            incoming.owed += 1
        while incoming.owed >= self._keep:
            self._frame(CREDIT, memoryview(b""), 0, 0)
        return True

    def post(self, into: memoryview) -> None:
        """Receive the next message there."""
        incoming, self._size = self.incoming, len(into)
        with self._lane.lock:
            incoming.post(into, max(1, -(-len(into) // self.slot)))
        while incoming.owed >= self._keep:
            self._frame(CREDIT, memoryview(b""), 0, 0)

    def wait(self) -> None:
        """Wait for the posted message."""
        incoming = self.incoming
        if incoming.done:
            return
        network, failed, lane = self._network, self._lane.failed, self._lane
        wire = self._wire if self._wire is not None else network.wire(lane.index, lane.epoch)
        if wire is not None:
            self._wire = wire
            network.read(wire, lambda: incoming.done or bool(failed), self._size > SMALL)
        if not incoming.done:
            self._plane.wait(lambda: incoming.done, (self,))

    def wait_for(self, count: int) -> None:
        """Wait for so many bytes of the posted message, or its end where it has fewer."""
        incoming = self.incoming
        if not incoming.done and incoming.at < count:
            self._plane.wait(lambda: incoming.done or incoming.at >= count, (self,))

    def fail(self, why: str) -> None:
        """Tell the other end that a collective is not carried on."""
        with contextlib.suppress(Exception):
            self._frame(FAIL, memoryview(why.encode()[:4096]), 0, 0)


class NetPlane(ShmPlane):
    """A worker's plane where its server is not on loopback, so that workers of other hosts may join."""

    transport = "net"

    def __init__(self, heap_bytes: int = HEAP_BYTES) -> None:
        super().__init__(heap_bytes)
        self.network: Network
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
        return {**info, "port": self.network.port, "links": network_links.links()}

    def introduce(self, rows: Sequence[Sequence[Any]], ways: Sequence[Sequence[Any]], key: str, own: int) -> None:
        self.network.introduce(rows, ways, key, own)

    def world(self, rows: Sequence[Sequence[Any]], ways: Sequence[Sequence[Any]] = ()) -> None:
        self._ways = {(row[0], row[1]): row for row in ways}
        self._routes = routes(ways, self.network.own)
        self._here = next((f"worker {row[1]!r} on {row[3]}" for row in rows if row[0] == self.network.own), "here")
        super().world(rows)
        self.network.settle({(index, route.epoch) for index, route in self._routes.items()})

    def abort(self, index: int, reason: str) -> None:
        if index != ALL:
            self.network.gone(index)
        super().abort(index, reason)

    def counters(self) -> dict[str, dict[str, int]]:
        return {**super().counters(), "bytes_relayed": dict(self.network.relayed)}

    def ways(self) -> dict[str, str]:
        if not self._routes:
            return {}
        with self._lock:
            peers = [peer for index, peer in sorted(self._peers.items()) if index != self.network.own]
        return {peer.name: str(peer.route) if isinstance(peer, FarPeer) else "shm" for peer in peers}

    def close(self) -> None:
        if hasattr(self, "network"):
            self.network.close()
        super().close()

    def _look_again(self) -> None:
        with self._lock:
            if self._own is not None and self._own.words[self._own.asleep]:
                self._own.ring()

    def _link_failed(self, index: int, epoch: int, source: str, target: str, reason: str) -> None:
        if self.on_link_failed is not None:
            self.on_link_failed(index, epoch, source, target, reason)

    def _stays(self, peer: Peer, row: Sequence[Any]) -> bool:
        route = self._routes.get(peer.index)
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
        peer = self._peer(channel["peer"])
        if not isinstance(peer, FarPeer):
            return super().send(channel, data)
        view = flat(data)
        stream = self._stream(peer, channel["offset"], channel["bytes"], channel["slots"])
        if len(view) <= min(JOINED, stream.slot):
            stream.send_small(view)
        else:
            stream.send(view, len(view))
        self.count(peer, len(view), 0)

    def recv(self, channel: Channel, into: Buffer) -> None:
        peer = self._peer(channel["peer"])
        if not isinstance(peer, FarPeer):
            return super().recv(channel, into)
        view = flat(into)
        stream = self._stream(peer, channel["offset"], channel["bytes"], channel["slots"])
        if len(view) <= min(JOINED, stream.slot) and stream.receive_small(view):
            self.count(peer, 0, len(view))
            return
        stream.post(view)
        stream.wait()
        self._complete(peer, stream, len(view))

    def send_chunks(self, channel: Channel, total: int, chunks: Iterable[memoryview]) -> None:
        """Send a message of `total` bytes, whose chunks of a slot each become ready one after the other."""
        peer = self._peer(channel["peer"])
        if not isinstance(peer, FarPeer):
            return self.send(channel, b"".join(chunks))
        stream = self._stream(peer, channel["offset"], channel["bytes"], channel["slots"])
        for chunk in chunks if total else (flat(b""),):
            stream.send(chunk, total)
        self.count(peer, total, 0)

    def recv_chunks(self, channel: Channel, into: memoryview) -> Iterator[tuple[int, int]]:
        """Receive as `recv` does; (start, stop) of each slot's bytes as soon as they are there."""
        peer, step = self._peer(channel["peer"]), channel["bytes"]
        done = 0
        if isinstance(peer, FarPeer) and len(into) > step:
            stream = self._stream(peer, channel["offset"], channel["bytes"], channel["slots"])
            stream.post(into)
            while done + step < len(into):
                stream.wait_for(done + step)
                if stream.incoming.done or stream.incoming.message.total != len(into):
                    break
                yield done, done + step
                done += step
            stream.wait()
            self._complete(peer, stream, len(into))
        else:
            self.recv(channel, into)
        yield done, len(into)

    def _complete(self, peer: FarPeer, stream: PairStream, want: int) -> None:
        """Count a message that is there. ValueError if it has another size."""
        sent = stream.incoming.message.total
        self.count(peer, 0, sent)
        if sent != want:
            raise ValueError(f"worker {peer.name} sent {sent} bytes, want {want}")

    def wait(self, ready: Callable[[], bool], peers: Sequence) -> None:
        if self.network.owned:
            self.network.release()
        super().wait(ready, peers)

    def ended(self, stream: PairStream, wire: Wire, error: OSError) -> None:
        """A connection ended while this thread used it: wait until that is certain, and why."""
        self.network.lost(wire, error)
        self.wait(lambda: False, (stream,))

    def _stream(self, peer: FarPeer, key: int, slot: int, slots: int) -> PairStream:
        stream = self._streams.get((peer.index, key))
        if stream is None or stream.peer is not peer:
            peer.check()
            assert peer.lane is not None
            stream = self._streams[peer.index, key] = PairStream(self, peer, peer.lane, key, slot, slots)
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
        members = [None if rank == form["rank"] else self._peer(index) for rank, index in enumerate(form["workers"])]
        if not any(isinstance(peer, FarPeer) for peer in members):
            self._wide[name] = self._version, None
            return None
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
        marks = [self._heap().mark if peer is None else int(peer.row[6].partition("-")[2], 16) for peer in members]
        text = f"{form['id']} {marks} {[row[2] for row in pairs]}".encode()
        key = TEAM_KEY | int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        return key, all(row[3] != "via" for row in pairs)

    def _make_team(self, rank: int, members: list[Peer | None], key: int, direct: bool) -> WideTeam:
        streams: dict[int, StreamLike] = {}
        for at, peer in enumerate(members):
            if peer is not None:
                lane = self.network.lane(peer.index, self._routes[peer.index].epoch)
                streams[at] = PairStream(self, peer, lane, key, SLOT_BYTES, SLOTS)
        return WideTeam(key, rank, list(members), streams, direct, self.count)
