"""Symmetric memory of GPUs: channels of slots, teams of buffers, and flags that a stream sets and waits for.

Each member has one arena, with the dispatcher's offsets. A flag is 0 or 1: a peer sets it, and the member that waited for it
resets it. So all work on a stream may be recorded and replayed. Collectives of NCCL_MIN_BYTES and more go by NCCL.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from gt.ir.heap import LINE, ChannelRegion, TeamRegion, aligned
from gt.worker.plane import nccl_bindings
from gt.worker.plane.base import Buffer, Channel, Combine, OnIssued, SlotCursors, TeamForm, Unrecoverable, issuing, nothing
from gt.worker.plane.collectives import parts
from gt.worker.plane.kernels import Passage, split_message

DIRECT_BYTES = 256 << 10  # up to which every member of an all-reduce adds everything
# By number of members (of more: the last): bytes from which NCCL is faster than members that read one another's memory. For an
# all-reduce of two H200s it is faster at every size (benchmarks/gpu/bench_plane.py); more members are not measured.
NCCL_MIN_BYTES = {2: 0}


@dataclass(slots=True)
class _ChannelEnd:
    """One end of a channel and its next slot. Each end counts for itself."""

    region: ChannelRegion
    peer: int  # its rank in the world
    next_slot: int = 0

    def advance(self, steps: int) -> int:
        slot = self.next_slot
        self.next_slot = (slot + steps) % self.region.slots
        return slot


@dataclass(frozen=True, slots=True)
class ArenaMemory:
    """Symmetric memory of one member. members: indices of workers in rank order; own: the index of this one."""

    members: Sequence[int]
    own: int
    address: int
    nbytes: int


class Arena:
    """The transfers and collectives of plane.base.Plane on memory of the device.

    Buffers are flat uint8 tensors of `engine` (Engine.direct). ring: NCCL for large collectives, None without it.
    """

    name = "nvshmem"
    recordable = True

    def __init__(self, plane: Any, library: Any, engine: Any, memory: ArenaMemory, ring: Any = None) -> None:
        self.plane, self.library, self.engine, self.ring = plane, library, engine, ring
        self.members, self.base = list(memory.members), memory.address
        self.rank = self.members.index(memory.own)
        ranks = range(len(self.members))
        self.addresses = [self.base if rank == self.rank else library.peer(self.base, rank) for rank in ranks]
        self.memory = [engine.memory(address, memory.nbytes) for address in self.addresses]
        self.memory[self.rank][:] = 0
        engine.finish()
        library.barrier()  # no member writes before all memory is zero
        self._out: dict[tuple[int, int], _ChannelEnd] = {}
        self._in: dict[tuple[int, int], _ChannelEnd] = {}
        self._teams: dict[int, _Team] = {}
        self._batch: list[tuple[TeamForm, Buffer, Combine, OnIssued]] | None = None

    # ---- transfers. A slot is full while its full flag is 1 at the receiver, taken while its other flag is 1 at the sender.

    @issuing()
    def send(self, channel: Channel, data: Buffer) -> None:
        check_present(data)
        end = self._end(self._out, channel)
        passage = self._passage(end, len(data), self.addresses[end.peer], self.base)
        self.library.send(self.engine.address(data), len(data), passage, self.engine.stream())
        self.plane.count_bytes(channel["peer"], len(data), 0)

    @issuing()
    def recv(self, channel: Channel, into: Buffer) -> None:
        check_present(into)
        end = self._end(self._in, channel)
        passage = self._passage(end, len(into), self.base, self.addresses[end.peer])
        self.library.recv(self.engine.address(into), len(into), passage, self.engine.stream())
        self.plane.count_bytes(channel["peer"], 0, len(into))

    def _passage(self, end: _ChannelEnd, nbytes: int, receiver: int, sender: int) -> Passage:
        """The passage of the next message. receiver, sender: addresses of their arenas in this process."""
        region = end.region
        chunks = split_message(nbytes, region.bytes)
        # Flags are where they are waited for: `full` in the receiver's arena, `empty` in the sender's. No stream polls over
        # the link.
        slots, full, empty = receiver + region.slot(0), receiver + region.full(0), sender + region.empty(0)
        return Passage(region, slots, full, empty, end.advance(chunks.steps), chunks)

    def reset_cursors(self, channels: Iterable[Sequence[int]]) -> None:
        """Both ends of these channels begin with the first slot, as when they were recorded."""
        for peer, offset, sends in channels:
            end = (self._out if sends else self._in).get((peer, offset))
            if end is not None:
                end.next_slot = 0

    def cursors(self) -> SlotCursors:
        tables = ((self._out, True), (self._in, False))
        return {(*key, sends): end.next_slot for table, sends in tables for key, end in table.items()}

    def restore_cursors(self, cursors: SlotCursors) -> None:
        for (peer, offset, sends), slot in cursors.items():
            (self._out if sends else self._in)[peer, offset].next_slot = slot

    # ---- collectives. Members add in rank order, so all get the same bits.

    @contextmanager
    def batch(self) -> Iterator[tuple]:
        """All-reduces within it are issued together at its end: as one if NCCL is faster for all their bytes."""
        self._batch = []
        try:
            yield ()
        finally:
            batch, self._batch = self._batch, None
        with issuing():
            for _, group in groupby(batch, key=lambda row: row[0]["id"]):
                self._batched(list(group))
        for *_, on_issued in batch:  # once all is issued, since other members wait for that
            on_issued()

    def _batched(self, batch: list[tuple[TeamForm, Buffer, Combine, OnIssued]]) -> None:
        """All-reduces of one team."""
        team, total = self._team(batch[0][0]), sum(len(data) for _, data, _, _ in batch)
        if len(batch) > 1 and team.by_nccl(total) and all(nccl_bindings.can_reduce(combine) for _, _, combine, _ in batch):
            # Members meet when the communicator is made, which cannot be done within a group.
            comm = team.comm
            with self.ring.group():
                for _, data, combine, _ in batch:
                    self._by_ring(team, comm, data, combine)
        else:
            for form, data, combine, _ in batch:
                self._all_reduce(form, data, combine)

    def _by_ring(self, team: _Team, comm: Any, data: Buffer, combine: Combine) -> None:
        self.ring.all_reduce(comm, self.engine.address(data), len(data), combine, self.engine.stream())
        for rank in range(team.size):
            team.count(rank, *_share(len(data), rank, team))

    def all_reduce(self, form: TeamForm, data: Buffer, combine: Combine, on_issued: OnIssued = nothing) -> None:
        check_present(data)
        # A collective of a batch is issued at the end of it: only then are all their bytes known.
        if self._batch is not None:
            self._batch.append((form, data, combine, on_issued))
            return
        self._all_reduce(form, data, combine)
        on_issued()

    @issuing()
    def _all_reduce(self, form: TeamForm, data: Buffer, combine: Combine) -> None:
        team, total = self._team(form), len(data)
        if team.by_nccl(total) and nccl_bindings.can_reduce(combine):
            self._by_ring(team, team.comm, data, combine)
            return
        # By parts that fit into the team's buffer, the same parts on all members.
        for start, stop in parts(total, team.bytes) if team.size > 1 else ():
            team.all_reduce(data[start:stop], combine)
            for rank in range(team.size):
                team.count(rank, *_share(stop - start, rank, team))

    def all_gather(self, form: TeamForm, data: Buffer, outs: Sequence[Buffer], on_issued: OnIssued = nothing) -> None:
        check_present(data)
        self._all_gather(form, data, outs)
        on_issued()

    @issuing()
    def _all_gather(self, form: TeamForm, data: Buffer, outs: Sequence[Buffer]) -> None:
        team, size = self._team(form), len(data)
        if len(set(map(len, outs))) == 1 and team.by_nccl(size * team.size):
            # NCCL wants one contiguous result. The outs usually are neighbours within one tensor; else it goes through
            # staging.
            row = None if self._in_a_row(outs) else self.engine.staging((size * team.size,), "uint8")
            into = self.engine.address(outs[0] if row is None else row)
            self.ring.all_gather(team.comm, self.engine.address(data), into, size, self.engine.stream())
            for rank, out in enumerate(outs):
                if row is not None:
                    out[:] = row[rank * size : (rank + 1) * size]
                team.count(rank, size, size)
            return
        for start, stop in parts(max(map(len, outs)), team.bytes) if team.size > 1 else ():
            piece = data[start:stop]
            # Write the own buffer, meet (0), read the others', meet again (1) before anybody overwrites a buffer.
            team.mine[: len(piece)] = piece
            team.exchange(0)
            for rank, out in enumerate(outs):
                if rank != team.rank:
                    part = out[start:stop]
                    part[:] = team.theirs(rank)[: len(part)]
                    team.count(rank, len(piece), len(part))
            team.exchange(1)
        outs[team.rank][:] = data

    def reduce_scatter(
        self, form: TeamForm, sections: Sequence[Buffer], out: Buffer, combine: Combine, on_issued: OnIssued = nothing
    ) -> None:
        check_present(out)
        self._reduce_scatter(form, sections, out, combine)
        on_issued()

    @issuing()
    def _reduce_scatter(self, form: TeamForm, sections: Sequence[Buffer], out: Buffer, combine: Combine) -> None:
        team = self._team(form)
        if team.size == 1:
            out[:] = sections[0]
            return
        size = len(out)
        if len(set(map(len, sections))) == 1 and team.by_nccl(size * team.size) and nccl_bindings.can_reduce(combine):
            row = sections[0] if self._in_a_row(sections) else self.engine.staging((size * team.size,), "uint8")
            for rank, section in enumerate(sections if row is not sections[0] else ()):
                row[rank * size : (rank + 1) * size] = section
            source, into = self.engine.address(row), self.engine.address(out)
            self.ring.reduce_scatter(team.comm, source, into, size, combine, self.engine.stream())
            for rank in range(team.size):
                team.count(rank, size, size)
            return
        share = team.bytes // team.size // LINE * LINE
        for start, stop in parts(max(map(len, sections)), share):
            for rank, section in enumerate(sections):
                part = section[start:stop]
                team.mine[rank * share : rank * share + len(part)] = part
                team.count(rank, len(part), len(out[start:stop]))
            team.exchange(0)
            # Every buffer has a term of this member's section at the same offset; all are added in rank order.
            team.add(out[start:stop], team.rank * share, combine)
            team.exchange(1)

    @issuing()
    def all_to_all(self, form: TeamForm, sends: Sequence[Buffer], recvs: Sequence[Buffer], longest: int = 0) -> None:
        check_present(sends[0])
        team = self._team(form)
        share, own = team.bytes // team.size // LINE * LINE, team.rank
        for start, stop in parts(longest, share) if team.size > 1 else ():
            for rank, piece in enumerate(sends):
                if rank != own:
                    part = piece[start:stop]
                    team.mine[rank * share : rank * share + len(part)] = part
                    team.count(rank, len(part), len(recvs[rank][start:stop]))
            team.exchange(0)
            for rank, out in enumerate(recvs):
                if rank != own:
                    part = out[start:stop]
                    part[:] = team.theirs(rank)[own * share : own * share + len(part)]
            team.exchange(1)
        recvs[own][:] = sends[own]

    # ----

    def _in_a_row(self, parts: Sequence[Buffer]) -> bool:
        first, size = self.engine.address(parts[0]), len(parts[0])
        return all(self.engine.address(part) == first + rank * size for rank, part in enumerate(parts))

    def _flags(self, offset: int, count: int) -> Any:
        return self.engine.words(self.memory[self.rank][offset : offset + 8 * count])

    def _team(self, form: TeamForm) -> _Team:
        if form["id"] not in self._teams:
            self._teams[form["id"]] = _Team(self, form)
        return self._teams[form["id"]]

    def _end(self, table: dict[tuple[int, int], _ChannelEnd], channel: Channel) -> _ChannelEnd:
        key = channel["peer"], channel["offset"]
        if key not in table:
            region = ChannelRegion(channel["offset"], channel["bytes"], channel["slots"])
            table[key] = _ChannelEnd(region, self.members.index(channel["peer"]))
        return table[key]


class _Team:
    """Members that write their own buffers and read each other's, between two exchanges: 0 before reading, 1 after.

    An exchange sets a flag at every other member and waits for theirs. No member can reach an exchange while another is still
    at the one before it, so two sets of flags suffice.
    """

    def __init__(self, arena: Arena, form: TeamForm) -> None:
        self._arena, self.rank, self.size, self.bytes = arena, form["rank"], len(form["workers"]), form["bytes"]
        self._region = TeamRegion(form["offset"], form["bytes"], self.size)
        self._workers = list(form["workers"])
        self._ranks = [arena.members.index(index) for index in form["workers"]]
        self._comm: Any = None

    def by_nccl(self, nbytes: int) -> bool:
        """True if a collective of so many bytes (the whole, not one member's part) goes by NCCL; the same on all members."""
        least = NCCL_MIN_BYTES.get(self.size, NCCL_MIN_BYTES[max(NCCL_MIN_BYTES)])
        return self._arena.ring is not None and self.size > 1 and nbytes >= least

    @property
    def comm(self) -> Any:
        """NCCL's communicator. The first member passes on its id through its buffer; all members meet at the first use."""
        if self._comm is None:
            arena = self._arena
            if self.rank == 0:
                arena.engine.write(self.mine[: nccl_bindings.ID_BYTES], arena.ring.unique_id())
            self.exchange(0)
            # `read` waits for the device, so the second exchange, which frees the buffer, is behind it.
            name = arena.engine.read(self.theirs(0)[: nccl_bindings.ID_BYTES])
            self.exchange(1)
            self._comm = arena.ring.join(name, self.rank, self.size)
        return self._comm

    def _buffer(self, rank: int, half: int) -> Any:
        start = self._region.buffer(half)
        return self._arena.memory[self._ranks[rank]][start : start + self.bytes]

    @property
    def mine(self) -> Any:
        """This member's buffer."""
        return self._buffer(self.rank, 0)

    def theirs(self, rank: int) -> Any:
        return self._buffer(rank, 0)

    def exchange(self, half: int) -> None:
        arena, stream = self._arena, self._arena.engine.stream()
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank in others:
            arena.library.signal(arena.base + self._region.flag(self.rank, half), 1, self._ranks[rank], stream)
        for rank in others:
            arena.library.wait(arena.base + self._region.flag(rank, half), 1, stream)
        # This member resets its own flags, in stream order behind the waits. A peer sets them again only after the other
        # half's exchange, which this member signals later.
        arena._flags(self._region.flag(0, half), self.size).zero_()

    def add(self, out: Any, at: int, combine: Combine) -> None:
        """out = every member's bytes from `at`, added in rank order."""
        if len(out):
            out[:] = self.theirs(0)[at : at + len(out)]
            for rank in range(1, self.size):
                combine(out, self.theirs(rank)[at : at + len(out)])

    def all_reduce(self, data: Any, combine: Combine) -> None:
        """Reduce at most `bytes`: all members add everything, or each adds a share that the others read."""
        total = len(data)
        self.mine[:total] = data
        self.exchange(0)
        if total <= DIRECT_BYTES:
            self.add(data, 0, combine)
            self.exchange(1)
            return
        # Reduce-scatter into the second buffer, then all-gather from it: each member adds 1 / size of the data.
        bounds = [_bounds(total, rank, self.size) for rank in range(self.size)]
        start, stop = bounds[self.rank]
        self.add(data[start:stop], start, combine)
        self._buffer(self.rank, 1)[start:stop] = data[start:stop]
        self.exchange(1)  # members may read the second buffers until their next exchange 0
        for rank, (start, stop) in enumerate(bounds):
            if rank != self.rank:
                data[start:stop] = self._buffer(rank, 1)[start:stop]

    def count(self, rank: int, sent: int, received: int) -> None:
        if rank != self.rank:
            self._arena.plane.count_bytes(self._workers[rank], sent, received)


def _bounds(total: int, rank: int, size: int) -> tuple[int, int]:
    share = aligned(-(-total // size))
    return min(rank * share, total), min(rank * share + share, total)


def _share(total: int, rank: int, team: _Team) -> tuple[int, int]:
    """Bytes of an all-reduce to and from a member."""
    if total <= DIRECT_BYTES:
        return total, total
    (start, stop), (begin, end) = _bounds(total, team.rank, team.size), _bounds(total, rank, team.size)
    both = stop - start + end - begin
    return both, both


def check_present(data: Buffer) -> None:
    """Unrecoverable for a member that brings no part: the others would wait on their devices for ever."""
    if isinstance(data, memoryview):
        raise Unrecoverable("it cannot take part in a transfer that others are waiting in")
