"""Planes of GPU workers whose server is not on loopback: within a host as before, between hosts by NCCL or host memory.

Each host has a world of its own (World.members). Host memory goes by plane net, which also carries NCCL's ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gt import env
from gt.worker.plane.base import Channel, TeamForm
from gt.worker.plane.gpu import DevicePlane
from gt.worker.plane.internode import nccl_settings
from gt.worker.plane.internode.communicators import InternodeNccl
from gt.worker.plane.internode.nccl_settings import NcclLog
from gt.worker.plane.internode.staging import StagedTransport
from gt.worker.plane.internode.transport import InternodeTransport, Pairs, joined
from gt.worker.plane.nccl import NcclPlane
from gt.worker.plane.net.plane import FarPeer, NetPlane
from gt.worker.plane.net.route import CONNECTED
from gt.worker.plane.nvshmem import NvshmemPlane
from gt.worker.process import network_links
from gt.worker.process.rdma_devices import rdma_devices

Check = Callable[[], None]  # raises PeerGone once a member is not there


class InternodePlane(DevicePlane, NetPlane):
    """The part that a host's world lacks: transfers with workers outside of it."""

    transport = "net"

    def __init__(self, engine: Any, heap_bytes: int) -> None:
        super().__init__(engine, heap_bytes)
        self._beyond: InternodeTransport | None = None
        self._nccl: InternodeNccl | None = None
        self._pairs: Pairs = frozenset()
        self._log: NcclLog | None = None

    def open(self, index: int = -1) -> dict[str, Any]:
        return {**super().open(index), "nccl": "" if self._ring is None else self._ring.version}

    def join_by_nccl(self, pairs: Sequence[Sequence[int]]) -> None:
        self._pairs = frozenset((a, b) for a, b in pairs)

    def world(self, rows: Sequence[Sequence[Any]], ways: Sequence[Sequence[Any]] = ()) -> None:
        super().world(rows, ways)
        if self._ring is not None and ways and self._log is None:  # before NCCL reads its variables, which it does once
            self._log = NcclLog()
            # NCCL takes the interfaces by which the dispatcher joined the hosts, not those that it would guess.
            sources = [route.source for route in self._routes.values() if route.kind in CONNECTED]
            nccl_settings.apply(nccl_settings.settings(sources, network_links.links(), rdma_devices()))
        engine = self._engine
        if self._beyond is None:
            staged = StagedTransport(self, engine.direct, engine.combine)
            self._nccl = None if self._ring is None else InternodeNccl(self._ring, engine.direct, self, self.count_bytes)
            self._beyond = InternodeTransport(staged, self._nccl)
        self._beyond.own, self._beyond.pairs = self.network.own, self._pairs

    def device_transport(self, workers: Sequence[int]) -> Any:
        return super().device_transport(workers) or self._beyond

    def abort(self, index: int, reason: str) -> None:
        super().abort(index, reason)
        if (nccl := self._nccl) is not None:
            nccl.lose(index)

    def ways(self) -> dict[str, str]:
        ways = super().ways()
        with self._lock:
            peers = [peer for peer in self._peers.values() if peer.name in ways]
        for peer in peers:
            if isinstance(peer, FarPeer):
                by_nccl = self._nccl is not None and joined(self._pairs, (self.network.own, peer.index))
                ways[peer.name] = f"{'nccl' if by_nccl else 'host memory'}, {ways[peer.name]}"
            elif peer.index in self._members and self._transport is not None:
                ways[peer.name] = self._transport.name
        return ways

    def facts(self) -> dict[str, Any]:
        facts = self._log.facts() if self._log is not None else {}
        return {"nccl": {**facts, "variables": env.starting("NCCL_")}} if self._log is not None else {}

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.close()
        super().close()

    # ---- for communicators

    @contextmanager
    def pair(self, channel: Channel) -> Iterator[tuple[Any, Check]]:
        """Around a message by NCCL: the pair's key, another one for another process or way, and a check of the pair.

        The other end is told of a failure, so that it does not wait.
        """
        peer = self._peer(channel["peer"])
        if not isinstance(peer, FarPeer):
            yield peer.row[6], peer.check
            return
        stream = self._far(channel)
        assert stream is not None
        try:
            stream.check()
            # The key has the process's doorbell and the way's epoch: a change of either makes a new communicator.
            yield (peer.row[6], peer.lane and peer.lane.epoch), stream.check
        except Exception as error:
            stream.fail(str(error))
            raise

    @contextmanager
    def team(self, form: TeamForm) -> Iterator[tuple[Any, Check]]:
        """The same around a collective."""
        wide = self._team_of_hosts(form)
        if wide is None:
            peers = [self._peer(index) for rank, index in enumerate(form["workers"]) if rank != form["rank"]]

            def check_near() -> None:
                for peer in peers:
                    peer.check()

            yield [peer.row[6] for peer in peers], check_near
            return

        def check() -> None:
            for stream in wide.streams.values():
                stream.check()

        with wide.together():
            yield wide.key, check


class InternodeNvshmemPlane(NvshmemPlane, InternodePlane):
    """NVSHMEM within a host."""


class InternodeNcclPlane(NcclPlane, InternodePlane):
    """NCCL within a host too."""


class HostMemoryPlane(InternodePlane):
    """Host memory for all transfers of a GPU worker."""

    name = "net"

    def open(self, index: int = -1) -> dict[str, Any]:
        return {**super().open(index), "unique_id": ""}

    def unique_id(self) -> str:
        return ""

    def join(self, members: Sequence[int], own: int, unique_id: str) -> None:
        return None
