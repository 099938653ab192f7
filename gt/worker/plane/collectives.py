"""Collectives in terms of a team's buffers and exchanges. Knows nothing of heaps, flags or doorbells.

Members add in rank order, so all get the same bits at any timing. Parts end at multiples of LINE bytes, so no element is split.
If combine raises, the member goes on with the exchanges and raises at the end: the others never hang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gt.ir.heap import LINE, aligned
from gt.worker.plane.base import Combine
from gt.worker.plane.team import Team

DIRECT_BYTES = 32 << 10  # bytes up to which everyone adds everything: one exchange, not two


class Adder:
    """A combine that keeps its first exception."""

    def __init__(self, combine: Combine) -> None:
        self._combine = combine
        self.failure: Exception | None = None

    def __call__(self, team: Team, out: memoryview, at: int) -> None:
        """out = every member's bytes from `at`, added in rank order."""
        count = len(out)
        if not count or self.failure:
            return
        out[:] = team.theirs(0)[at : at + count]
        try:
            for rank in range(1, team.size):
                self._combine(out, team.theirs(rank)[at : at + count])
        except Exception as error:
            self.failure = error

    def finish(self) -> None:
        if self.failure:
            raise self.failure


def all_reduce(team: Team, data: memoryview, combine: Combine) -> None:
    if team.size == 1:
        return
    add, left = Adder(combine), len(data)
    for start, stop in parts(len(data), team.region.bytes) if data else ((0, 0),):
        _all_reduce(team, data[start:stop], add, left)
        # Each part announces the bytes from it to the end: so members that brought different sizes differ at the first part.
        left -= stop - start
    add.finish()


def agree(team: Team, sizes: int) -> None:
    """Check, after an exchange, that all members announced this number of bytes; ValueError on all of them if not."""
    announced = [team.announced(rank) for rank in range(team.size)]
    if any(size != sizes for size in announced):
        raise ValueError(f"members of a collective brought {announced} bytes, want the same of all: it did not take place")


def _all_reduce(team: Team, data: memoryview, add: Adder, left: int) -> None:
    size, total = team.size, len(data)
    team.mine[:total] = data
    team.announce(left)
    team.exchange()
    agree(team, left)
    # Small: one exchange, and everybody adds everything. Large: each adds one share, and a second exchange hands it round.
    if total <= DIRECT_BYTES:
        add(team, data, 0)
        for rank in range(size):
            team.count(rank, total, total)
        return
    share = aligned(-(-total // size))
    bounds = [(min(r * share, total), min(r * share + share, total)) for r in range(size)]
    start, stop = bounds[team.rank]
    add(team, data[start:stop], start)
    team.mine[start:stop] = data[start:stop]
    team.exchange()
    for rank, (begin, end) in enumerate(bounds):
        if rank != team.rank:
            data[begin:end] = team.theirs(rank)[begin:end]
        team.count(rank, (end - begin) + (stop - start), (stop - start) + (end - begin))


def all_gather(team: Team, data: memoryview, outs: Sequence[memoryview]) -> None:
    longest, total = max(map(len, outs)), sum(map(len, outs))
    for start, stop in () if team.size == 1 else parts(longest, team.region.bytes) if longest else ((0, 0),):
        piece = data[start:stop]
        team.mine[: len(piece)] = piece
        team.announce(total)
        team.exchange()
        agree(team, total)
        for rank, out in enumerate(outs):
            if rank != team.rank:
                part = out[start:stop]
                part[:] = team.theirs(rank)[: len(part)]
                team.count(rank, len(piece), len(part))
    if len(data):
        outs[team.rank][:] = data


def reduce_scatter(team: Team, sections: Sequence[memoryview], out: memoryview, combine: Combine) -> None:
    if team.size == 1:
        if len(out):
            out[:] = sections[0]
        return
    share, add, total = room(team), Adder(combine), sum(map(len, sections))
    longest = max(map(len, sections))
    for start, stop in parts(longest, share) if longest else ((0, 0),):
        put(team, sections, start, stop, share)
        team.announce(total)
        team.exchange()
        agree(team, total)
        mine = out[start:stop]
        add(team, mine, team.rank * share)
        for rank, section in enumerate(sections):
            team.count(rank, len(section[start:stop]), len(mine))
    add.finish()


def all_to_all(team: Team, sends: Sequence[memoryview], recvs: Sequence[memoryview], longest: int = 0) -> None:
    """longest: bytes of the longest section of any two members, 0 if that is not known."""
    own = team.rank
    if team.size > 1:
        share, at, rounds = room(team), 0, 1
        need = max(1, -(-max(map(len, sends)) // share))
        while at < rounds:
            start, stop = at * share, at * share + share
            put(team, sends, start, stop, share, skip=own)
            team.announce(need)
            team.exchange()
            # Members may send different amounts. All do as many rounds as the longest needs, since exchanges have to match.
            rounds = max(team.announced(rank) for rank in range(team.size)) if at == 0 else rounds
            if longest and rounds > max(1, -(-longest // share)):
                raise ValueError(f"a member of an all-to-all of {longest} bytes at most wants {rounds} rounds: it is refused")
            for rank, out in enumerate(recvs):
                if rank != own:
                    part = out[start:stop]
                    if len(part):
                        part[:] = team.theirs(rank)[own * share : own * share + len(part)]
                    team.count(rank, len(sends[rank][start:stop]), len(part))
            at += 1
    if len(sends[own]):
        recvs[own][:] = sends[own]


def put(team: Team, pieces: Sequence[memoryview], start: int, stop: int, share: int, skip: int = -1) -> None:
    """Write this part of each rank's piece to that rank's share of the buffer."""
    mine = team.mine
    for rank, piece in enumerate(pieces):
        part = piece[start:stop]
        if len(part) and rank != skip:
            mine[rank * share : rank * share + len(part)] = part


def room(team: Team) -> int:
    """Bytes of a buffer for each rank."""
    share = team.region.bytes // team.size // LINE * LINE
    if not share:
        raise ValueError(f"team buffer of {team.region.bytes} bytes, want at least {LINE} for each of {team.size}")
    return share


def parts(total: int, step: int) -> Iterator[tuple[int, int]]:
    """[0, total) in parts of `step`; none where either is 0."""
    if step:
        for start in range(0, total, step):
            yield start, min(start + step, total)
