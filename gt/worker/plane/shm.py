"""Plane `shm`: workers of one host, processes or threads, over heaps in shared memory. Needs neither torch nor a GPU.

A side that waits reads a flag a few times, then writes into its heap that it sleeps, reads once more and sleeps. A side that
sets a flag rings the doorbell if the other sleeps. Between writing and looking both have a full fence, so one of them sees the
other. No ring is lost, and no wait needs a timeout. Payload is fenced from its flag at both ends. A flag's value is its
setter's mark, constant while that worker lives, so what a killed worker left is never taken for its successor's.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from gt.errors import ConfigError
from gt.ir.heap import HEAP_BYTES, ChannelRegion, TeamRegion
from gt.wire import liveness
from gt.worker.plane import collectives
from gt.worker.plane.base import ALL, Buffer, Channel, Combine, OnIssued, PeerGone, Plane, TeamForm, Unreachable, nothing
from gt.worker.plane.batch import Failures, QueuedCollective, run_batch, unused
from gt.worker.plane.heap import OwnHeap, PeerHeap, full_fence
from gt.worker.plane.team import Team

POLLS_BEFORE_SLEEP = 10  # looks at a flag before sleeping; each lets other threads run first

Row = tuple[int, str, int, str, int, int, str, str, int]  # index, name, pid, host, heap_fd, heap_bytes, doorbell, home, port


class Peer:
    """One worker of the world as this one sees it; its successor under the same index is another Peer."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.index, self.name = row[0], row[1]
        self.gone: str | None = None  # why; never taken back
        self._heap: PeerHeap | None = None

    @property
    def near(self) -> bool:
        """True if it is on this host: its processes are seen here. A name alone is not enough, as containers share names."""
        return self.row[7] == (liveness.home() or socket.gethostname())

    @property
    def heap(self) -> PeerHeap:
        """Mapped on first use."""
        return self._heap or self._open()

    def _open(self) -> PeerHeap:
        _, name, pid, host, fd, size, doorbell, *_ = self.row
        if not self.near:
            here = socket.gethostname()
            raise Unreachable(self.index, f"worker {name!r} is on host {host!r}, plane shm on {here!r} reaches only this host")
        try:
            self._heap = PeerHeap(pid, fd, size, doorbell)
        except OSError as error:
            raise Unreachable(
                self.index,
                f"the heap of worker {name!r} (pid {pid}) cannot be opened: {error}; it has exited, or plane shm "
                "cannot see it (another user, container or pid namespace)",
            ) from error
        return self._heap

    def check(self) -> None:
        if self.gone is not None:
            raise PeerGone(self.index, self.gone)

    def close(self) -> None:
        if self._heap:
            self._heap.close()


class Side:
    """This worker's end of a channel: the region and the next slot. Each end counts for itself."""

    __slots__ = ("peer", "region", "turn")

    def __init__(self, peer: Peer, region: ChannelRegion) -> None:
        self.peer, self.region, self.turn = peer, region, 0

    def advance(self) -> int:
        slot = self.turn
        self.turn = slot + 1 if slot + 1 < self.region.slots else 0
        return slot


class ShmPlane(Plane):
    """The plane of one worker. Its peers are workers of the same host."""

    transport = "shm"

    def __init__(self, heap_bytes: int = HEAP_BYTES) -> None:
        self._heap_bytes = heap_bytes
        self._fence = full_fence()
        self._lock = threading.Lock()  # peers and closing; never held while waiting
        self._peers: dict[int, Peer] = {}
        self._version = 0  # version of the world in _peers
        self._left: list[Peer] = []  # out of the world, their heaps still mapped
        self._own: OwnHeap | None = None
        self._out: dict[tuple[int, int], Side] = {}
        self._in: dict[tuple[int, int], Side] = {}
        self._teams: dict[tuple[int, int], Team] = {}
        self._sent: dict[str, int] = {}
        self._received: dict[str, int] = {}
        self._batch: list[QueuedCollective] | None = None  # collectives to be done as one

    # ---- any thread

    def open(self, index: int = -1) -> dict[str, Any]:
        try:
            self._own = OwnHeap(self._heap_bytes)
        except (OSError, OverflowError) as error:
            text = f"a heap of {self._heap_bytes} bytes cannot be made: {error}"
            raise ConfigError(f"{text}: GT_HEAP_SIZE says how large it is") from None
        return {"heap_fd": self._own.fd, "heap_bytes": self._own.size, "doorbell": self._own.doorbell}

    def world(self, rows: Sequence[Sequence[Any]], ways: Sequence[Sequence[Any]] = ()) -> None:
        named = {row[0]: row for row in rows}
        with self._lock:
            if self._own is None:
                return
            for index, peer in list(self._peers.items()):
                # The same index may be another process now. Its heap stays mapped until the transferring thread unmaps it:
                # that thread may be copying from it this moment.
                if index not in named or not self._stays(peer, named[index]):
                    peer.gone = peer.gone or "it left the world"
                    self._left.append(self._peers.pop(index))
            for index, row in named.items():
                if index not in self._peers:
                    self._peers[index] = self._meet(tuple(row))
            self._version += 1
            self._own.ring()

    def _stays(self, peer: Peer, row: Sequence[Any]) -> bool:
        """True if a row of the new world is the same worker."""
        # row[6] is the doorbell, whose name has the process's random mark.
        return bool(row[6] == peer.row[6])

    def _meet(self, row: Any) -> Peer:
        return Peer(row)

    def abort(self, index: int, reason: str) -> None:
        with self._lock:
            for peer in self._peers.values():
                if index in (peer.index, ALL):
                    peer.gone = peer.gone or reason
            if self._own:
                self._own.ring()

    def counters(self) -> dict[str, dict[str, int]]:
        return {"bytes_sent": self._sent.copy(), "bytes_received": self._received.copy()}

    def close(self) -> None:
        self.abort(ALL, "the plane is closed")
        with self._lock:
            for team in self._teams.values():
                team.close()
            for table in (self._out, self._in, self._teams):
                table.clear()
            for peer in (*self._peers.values(), *self._left):
                peer.close()
            self._left.clear()
            own, self._own = self._own, None
        if own:
            own.close()

    # ---- transfers

    def send(self, channel: Channel, data: Buffer) -> None:
        view, side = flat(data), self._side(self._out, channel, sending=True)
        peer, region, own, theirs = side.peer, side.region, self._heap(), side.peer.heap
        # A slot has two flags, each in the heap of the worker that waits for it: `empty` at the sender, `full` at the receiver.
        # The waiting end clears its flag itself. An empty message takes one slot too, so both ends keep counting alike.
        at, total, mark = 0, len(view), theirs.mark
        while True:
            slot = side.advance()
            empty, full, start = region.empty(slot) // 8, region.full(slot) // 8, region.slot(slot)
            if own.words[empty] != mark:
                self.wait(lambda word=empty: own.words[word] == mark, (peer,))  # type: ignore[misc]
            count = min(region.bytes, total - at)
            theirs.bytes[start : start + count] = view[at : at + count]
            # The word beside the flag carries the size of the whole message.
            theirs.words[full + 1] = total
            own.words[empty] = 0
            self._fence()  # who sees the flag sees the bytes and the size too
            theirs.words[full] = own.mark
            self.wake((peer,))
            at += count
            if at >= total:
                break
        self.count(peer, total, 0)

    def recv(self, channel: Channel, into: Buffer) -> None:
        view, side = flat(into), self._side(self._in, channel, sending=False)
        peer, region, own, theirs = side.peer, side.region, self._heap(), side.peer.heap
        at, total, sent, mark = 0, len(view), 0, theirs.mark
        while True:
            slot = side.advance()
            empty, full, start = region.empty(slot) // 8, region.full(slot) // 8, region.slot(slot)
            if own.words[full] != mark:
                self.wait(lambda word=full: own.words[word] == mark, (peer,))  # type: ignore[misc]
            self._fence()
            if at == 0:
                sent = own.words[full + 1]  # received whole, even if of another size: other pairs use the channel too
            count = min(region.bytes, sent - at)
            if sent == total:
                view[at : at + count] = own.bytes[start : start + count]
            own.words[full] = 0
            self._fence()  # the slot is read before the sender may overwrite it
            theirs.words[empty] = own.mark
            self.wake((peer,))
            at += count
            if at >= sent:
                break
        self.count(peer, 0, sent)
        if sent != total:
            raise ValueError(f"worker {peer.name} sent {sent} bytes, want {total}")

    # ---- collectives

    def batch(self) -> AbstractContextManager:
        return self._batched()

    @contextmanager
    def _batched(self) -> Iterator[Failures]:
        batch: list[QueuedCollective] = []
        failures: Failures = []
        self._batch = batch
        try:
            yield failures
        finally:
            self._batch = None
            if batch:
                # Also after an exception: other members wait for this one's part of the batch.
                failures += run_batch(batch, self._team)

    def _do(self, queued: QueuedCollective) -> None:
        """One collective, now or with the others of a batch."""
        if self._batch is not None:
            self._batch.append(queued)
            return
        queued.alone(self._team(queued.form))
        queued.on_issued()

    def all_reduce(self, team: TeamForm, data: Buffer, combine: Combine, on_issued: OnIssued = nothing) -> None:
        view = flat(data)
        self._do(QueuedCollective("all_reduce", team, (view,), (view,), combine, on_issued))

    def all_gather(self, team: TeamForm, data: Buffer, outs: Sequence[Buffer], on_issued: OnIssued = nothing) -> None:
        self._do(QueuedCollective("all_gather", team, (flat(data),), [flat(out) for out in outs], unused, on_issued))

    def reduce_scatter(
        self, team: TeamForm, sections: Sequence[Buffer], out: Buffer, combine: Combine, on_issued: OnIssued = nothing
    ) -> None:
        sends = [flat(section) for section in sections]
        self._do(QueuedCollective("reduce_scatter", team, sends, (flat(out),), combine, on_issued))

    def all_to_all(self, team: TeamForm, sends: Sequence[Buffer], recvs: Sequence[Buffer], longest: int = 0) -> None:
        collectives.all_to_all(self._team(team), [flat(data) for data in sends], [flat(out) for out in recvs], longest)

    # ---- for channels and teams

    def wait(self, ready: Callable[[], bool], peers: Sequence[Peer]) -> None:
        """Wait until ready; PeerGone as soon as a peer is gone. Memory that `ready` checks may be read afterwards."""
        own = self._heap()
        for _ in range(POLLS_BEFORE_SLEEP):
            if ready():
                return self._fence()
            os.sched_yield()
        try:
            while True:
                # No wake is lost: this end says that it sleeps and then looks at the flags once more; the other end sets flags
                # and then looks whether anybody sleeps (`wake`). With a fence between, at least one of them sees the other.
                own.words[own.asleep] = 1
                self._fence()
                if ready():
                    return self._fence()
                for peer in peers:
                    peer.check()
                own.listen()
        finally:
            own.words[own.asleep] = 0

    def wake(self, peers: Sequence[Peer]) -> None:
        """Ring the peers that sleep, after flags were set."""
        self._fence()
        for peer in peers:
            heap = peer.heap
            if heap.words[heap.asleep]:
                heap.ring()

    def count(self, peer: Peer, sent: int, received: int) -> None:
        """Count payload bytes to and from a peer."""
        self.tally(peer.name, sent, received)

    def tally(self, name: str, sent: int, received: int) -> None:
        if sent:
            self._sent[name] = self._sent.get(name, 0) + sent
        if received:
            self._received[name] = self._received.get(name, 0) + received

    def _heap(self) -> OwnHeap:
        if self._own is None:
            raise PeerGone(ALL, "the plane is not open")
        return self._own

    def _unmap_left(self) -> None:
        """Unmap the heaps of workers that left. The thread that transfers does this: it alone knows that it uses none."""
        with self._lock:
            left, self._left = self._left, []
        for table in (self._out, self._in):
            for key in [key for key, side in table.items() if side.peer in left]:
                del table[key]
        for name in [name for name, team in self._teams.items() if any(peer in left for peer in team.peers)]:
            self._teams.pop(name).close()
        for peer in left:
            peer.close()

    def _peer(self, index: int) -> Peer:
        peer = self._member(index)
        peer.check()
        return peer

    def _member(self, index: int) -> Peer:
        """A worker of the world, whether it is reached or not."""
        if self._left:
            self._unmap_left()
        peer = self._peers.get(index)
        if peer is None:
            raise PeerGone(index, "it is not in the world")
        return peer

    def _side(self, table: dict[tuple[int, int], Side], channel: Channel, sending: bool) -> Side:
        peer = self._peer(channel["peer"])
        key = peer.index, channel["offset"]
        side = table.get(key)
        if side is None or side.peer is not peer:
            region = ChannelRegion(channel["offset"], channel["bytes"], channel["slots"])
            side = table[key] = Side(peer, region)
            if sending:  # own flags, which no peer sets before it has received a message: every slot is free
                for slot in range(region.slots):
                    self._heap().words[region.empty(slot) // 8] = peer.heap.mark
        return side

    def _team(self, form: TeamForm) -> Team:
        key = form["id"], form["offset"]
        team = self._teams.get(key)
        # Fast path: the world has not changed since the team was last compared with it.
        if team is not None and team.version == self._version:
            for peer in team.peers:
                peer.check()
            return team
        # Read before the peers: if the world changes meanwhile, the team is compared once more at its next use.
        version = self._version
        rank, workers = form["rank"], form["workers"]
        peers = [self._peer(index) for at, index in enumerate(workers) if at != rank]
        if team is None or team.peers != peers:
            region = TeamRegion(form["offset"], form["bytes"], len(workers))
            team = self._teams[key] = Team(self, region, rank, peers, self._heap(), self._fence)
        team.version = version
        return team


def flat(data: Buffer) -> memoryview:
    """The bytes of a C-contiguous buffer, not copied."""
    view = data if isinstance(data, memoryview) else memoryview(data)
    if view.format == "B" and view.ndim == 1:
        return view
    return view.cast("B") if view.nbytes else memoryview(bytearray())
