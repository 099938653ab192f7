"""Memory that GPUs put and read among themselves: channels of slots, teams of buffers, flags that a stream sets and waits for.

Each member has one arena, with the dispatcher's offsets. Flags are 0 or 1: set by a peer, put back by who waited for them; so
all that is issued to a stream may be recorded and done again. Large collectives are NCCL's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from gt.ir.heap import LINE, ChannelRegion, TeamRegion, aligned
from gt.worker.plane import nccl_bindings
from gt.worker.plane.base import Buffer, Channel, Combine, Doomed, TeamForm, Then, Turns, issuing, nothing
from gt.worker.plane.collectives import parts
from gt.worker.plane.kernels import Passage, cut

DIRECT = 256 << 10  # bytes up to which an all-reduce has every member add everything


@dataclass(slots=True)
class _Side:
    """One end of a channel: the slot that comes next. Both ends count for themselves."""

    region: ChannelRegion
    peer: int  # its rank in the world
    turn: int = 0

    def advance(self, steps: int) -> int:
        slot = self.turn
        self.turn = (slot + steps) % self.region.slots
        return slot


class Arena:
    """What plane.base.Plane does, on memory of the device: buffers are flat uint8 tensors of `engine` (Engine.direct)."""

    name = "nvshmem"

    def __init__(
        self, plane: Any, library: Any, engine: Any, members: Sequence[int], own: int, base: int, nbytes: int, ring: Any = None
    ) -> None:
        self.plane, self.library, self.engine, self.members, self.base = plane, library, engine, list(members), base
        self.ring = ring  # an nccl.Nccl, for what is large
        self.rank = self.members.index(own)
        self.addresses = [base if rank == self.rank else library.peer(base, rank) for rank in range(len(self.members))]
        self.memory = [engine.memory(address, nbytes) for address in self.addresses]
        self.memory[self.rank][:] = 0
        engine.finish()
        library.barrier()  # nobody writes before all are clear
        self._out: dict[tuple[int, int], _Side] = {}
        self._in: dict[tuple[int, int], _Side] = {}
        self._teams: dict[int, _Team] = {}
        self._batch: list[tuple[TeamForm, Buffer, Combine, Then]] | None = None

    # ---- transfers. A slot is full while its full flag is 1 at the receiver, taken while its other flag is 1 at the sender.

    @issuing()
    def send(self, channel: Channel, data: Buffer) -> None:
        present(data)
        side = self._side(self._out, channel)
        passage = self._passage(side, len(data), self.addresses[side.peer], self.base)
        self.library.send(self.engine.address(data), len(data), passage, self.engine.stream())
        self.plane.count_bytes(channel["peer"], len(data), 0)

    @issuing()
    def recv(self, channel: Channel, into: Buffer) -> None:
        present(into)
        side = self._side(self._in, channel)
        passage = self._passage(side, len(into), self.base, self.addresses[side.peer])
        self.library.recv(self.engine.address(into), len(into), passage, self.engine.stream())
        self.plane.count_bytes(channel["peer"], 0, len(into))

    def _passage(self, side: _Side, nbytes: int, receiver: int, sender: int) -> Passage:
        """Of the next message. receiver, sender: their arenas, in this process."""
        region = side.region
        how = cut(nbytes, region.bytes)
        slots, full, empty = receiver + region.slot(0), receiver + region.full(0), sender + region.empty(0)
        return Passage(region, slots, full, empty, side.advance(how.steps), how)

    def rewind(self, channels: Iterable[Sequence[int]]) -> None:
        """Both ends of these [peer, offset, whether it sends] go on with the first slot, as when they were recorded."""
        for peer, offset, sends in channels:
            side = (self._out if sends else self._in).get((peer, offset))
            if side is not None:
                side.turn = 0

    def turns(self) -> Turns:
        tables = ((self._out, True), (self._in, False))
        return {(*key, sends): side.turn for table, sends in tables for key, side in table.items()}

    def resume(self, turns: Turns) -> None:
        for (peer, offset, sends), turn in turns.items():
            (self._out if sends else self._in)[peer, offset].turn = turn

    # ---- collectives. What adds, adds in rank order: all members get the same bits.

    @contextmanager
    def batch(self) -> Iterator[None]:
        """All-reduces within it are issued together at its end: as one, if NCCL is the faster for all their bytes."""
        self._batch = []
        try:
            yield
        finally:
            batch, self._batch = self._batch, None
        with issuing():
            for _, group in groupby(batch, key=lambda one: one[0]["id"]):
                self._batched(list(group))
        for *_, then in batch:  # once all is issued: others wait for that
            then()

    def _batched(self, some: list[tuple[TeamForm, Buffer, Combine, Then]]) -> None:
        """All-reduces of one team."""
        team, total = self._team(some[0][0]), sum(len(data) for _, data, _, _ in some)
        if len(some) > 1 and team.large(total) and all(nccl_bindings.adds(combine) for _, _, combine, _ in some):
            comm = team.comm  # members meet for it by themselves, which cannot be done within a group
            with self.ring.group():
                for _, data, combine, _ in some:
                    self._by_ring(team, comm, data, combine)
        else:
            for form, data, combine, _ in some:
                self._all_reduce(form, data, combine)

    def _by_ring(self, team: _Team, comm: Any, data: Buffer, combine: Combine) -> None:
        self.ring.all_reduce(comm, self.engine.address(data), len(data), combine, self.engine.stream())
        for rank in range(team.size):
            team.count(rank, *_share(len(data), rank, team))

    def all_reduce(self, form: TeamForm, data: Buffer, combine: Combine, then: Then = nothing) -> None:
        present(data)
        if self._batch is not None:
            self._batch.append((form, data, combine, then))
            return
        self._all_reduce(form, data, combine)
        then()

    @issuing()
    def _all_reduce(self, form: TeamForm, data: Buffer, combine: Combine) -> None:
        team, total = self._team(form), len(data)
        if team.large(total) and nccl_bindings.adds(combine):
            self._by_ring(team, team.comm, data, combine)
            return
        for start, stop in parts(total, team.bytes) if team.size > 1 else ():
            team.all_reduce(data[start:stop], combine)
            for rank in range(team.size):
                team.count(rank, *_share(stop - start, rank, team))

    @issuing()
    def all_gather(self, form: TeamForm, data: Buffer, outs: Sequence[Buffer]) -> None:
        present(data)
        team, size = self._team(form), len(data)
        if len(set(map(len, outs))) == 1 and team.large(size * team.size):
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
            team.mine[: len(piece)] = piece
            team.exchange(0)
            for rank, out in enumerate(outs):
                if rank != team.rank:
                    part = out[start:stop]
                    part[:] = team.theirs(rank)[: len(part)]
                    team.count(rank, len(piece), len(part))
            team.exchange(1)
        outs[team.rank][:] = data

    @issuing()
    def reduce_scatter(self, form: TeamForm, sections: Sequence[Buffer], out: Buffer, combine: Combine) -> None:
        present(out)
        team = self._team(form)
        if team.size == 1:
            out[:] = sections[0]
            return
        size = len(out)
        if len(set(map(len, sections))) == 1 and team.large(size * team.size) and nccl_bindings.adds(combine):
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
            team.add(out[start:stop], team.rank * share, combine)
            team.exchange(1)

    @issuing()
    def all_to_all(self, form: TeamForm, sends: Sequence[Buffer], recvs: Sequence[Buffer], longest: int = 0) -> None:
        present(sends[0])
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

    def _side(self, table: dict[tuple[int, int], _Side], channel: Channel) -> _Side:
        key = channel["peer"], channel["offset"]
        if key not in table:
            region = ChannelRegion(channel["offset"], channel["bytes"], channel["slots"])
            table[key] = _Side(region, self.members.index(channel["peer"]))
        return table[key]


class _Team:
    """Members that write their own buffers and read each other's, between two exchanges: 0 before reading, 1 after.

    An exchange sets a flag at every other member and waits for theirs. None can be at one while another is still at the one
    before, so two sets of flags do.
    """

    def __init__(self, arena: Arena, form: TeamForm) -> None:
        self._arena, self.rank, self.size, self.bytes = arena, form["rank"], len(form["workers"]), form["bytes"]
        self._region = TeamRegion(form["offset"], form["bytes"], self.size)
        self._workers = list(form["workers"])
        self._ranks = [arena.members.index(index) for index in form["workers"]]
        self._comm: Any = None

    def large(self, nbytes: int) -> bool:
        """Whether a collective of so many bytes is NCCL's: all members say the same."""
        return self._arena.ring is not None and self.size > 1 and nccl_bindings.serves(self.size, nbytes)

    @property
    def comm(self) -> Any:
        """NCCL's communicator. The first member's id for it comes by way of its buffer; all meet when they first use it."""
        if self._comm is None:
            arena = self._arena
            if self.rank == 0:
                arena.engine.write(self.mine[: nccl_bindings.ID_BYTES], arena.ring.unique_id())
            self.exchange(0)
            name = arena.engine.read(self.theirs(0)[: nccl_bindings.ID_BYTES])
            self.exchange(1)
            self._comm = arena.ring.join(name, self.rank, self.size)
        return self._comm

    def _buffer(self, rank: int, half: int) -> Any:
        start = self._region.buffer(half)
        return self._arena.memory[self._ranks[rank]][start : start + self.bytes]

    @property
    def mine(self) -> Any:
        """What this member brings."""
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
        arena._flags(self._region.flag(0, half), self.size).zero_()

    def add(self, out: Any, at: int, combine: Combine) -> None:
        """out = every member's bytes from `at`, added in rank order."""
        if len(out):
            out[:] = self.theirs(0)[at : at + len(out)]
            for rank in range(1, self.size):
                combine(out, self.theirs(rank)[at : at + len(out)])

    def all_reduce(self, data: Any, combine: Combine) -> None:
        """Of at most `bytes`: all add everything, or each a share, which the others read."""
        total = len(data)
        self.mine[:total] = data
        self.exchange(0)
        if total <= DIRECT:
            self.add(data, 0, combine)
            self.exchange(1)
            return
        bounds = [_bounds(total, rank, self.size) for rank in range(self.size)]
        start, stop = bounds[self.rank]
        self.add(data[start:stop], start, combine)
        self._buffer(self.rank, 1)[start:stop] = data[start:stop]
        self.exchange(1)  # who reads the second buffers is not done at its end, but before its next exchange 0
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
    """Bytes that an all-reduce takes to and from a member."""
    if total <= DIRECT:
        return total, total
    (start, stop), (begin, end) = _bounds(total, team.rank, team.size), _bounds(total, rank, team.size)
    both = stop - start + end - begin
    return both, both


def present(data: Buffer) -> None:
    """A member that cannot bring its part would leave the others waiting on their devices for ever."""
    if isinstance(data, memoryview):
        raise Doomed("it cannot take part in a transfer that others are waiting in")
