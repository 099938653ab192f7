"""Collectives of workers on several hosts, in terms of streams. Members add in rank order, as plane shm does: the same bits.

Each member adds a section of all, then all gather; where a pair has no connection, sums go along a chain. Each message
announces the bytes of its sender's whole part: members that disagree all raise ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence

from gt.ir.heap import aligned
from gt.worker.plane.base import Combine
from gt.worker.plane.collectives import DIRECT, parts
from gt.worker.plane.net.chain import ChainReduction
from gt.worker.plane.net.wide_team import Sum, WideTeam, agree

PART_BYTES = 16 << 20  # of a member's data that is under way at a time


def all_reduce(team: WideTeam, data: memoryview, combine: Combine) -> None:
    total, left = Sum(combine), len(data)
    step = PART_BYTES
    for start, stop in parts(len(data), step) if data else ((0, 0),):
        part = data[start:stop]
        if len(part) <= DIRECT:
            _sum_whole(team, part, total, left)
        elif team.direct or team.size == 2:
            _sum_sections(team, part, total, left)
        else:
            if not start:  # a chain's members hear of their neighbours only
                agree(team.exchange([part[:0]] * team.size, [part[:0]] * team.size, left))
            ChainReduction(team, part, total).run()
        left -= stop - start
    total.finish()


def _sum_whole(team: WideTeam, data: memoryview, total: Sum, left: int) -> None:
    room = memoryview(bytearray(len(data) * team.size))
    terms = [room[rank * len(data) : (rank + 1) * len(data)] for rank in range(team.size)]
    terms[team.rank] = memoryview(bytearray(data))
    agree(team.exchange([data] * team.size, terms, left))
    total.add(data, terms)
    for rank in range(team.size):
        team.count(rank, len(data), len(data))


def _sum_sections(team: WideTeam, data: memoryview, total: Sum, left: int) -> None:
    size, rank = team.size, team.rank
    share = aligned(-(-len(data) // size))
    sections = [data[min(r * share, len(data)) : min((r + 1) * share, len(data))] for r in range(size)]
    own = sections[rank]
    room = memoryview(bytearray(len(own) * size))
    terms = [room[r * len(own) : (r + 1) * len(own)] for r in range(size)]
    terms[rank] = own
    agree(team.exchange(sections, terms, left))
    total.add(own, terms)
    team.exchange([own] * size, sections, left)
    for other, section in enumerate(sections):
        team.count(other, len(section) + len(own), len(own) + len(section))


def all_gather(team: WideTeam, data: memoryview, outs: Sequence[memoryview]) -> None:
    agree(team.exchange([data] * team.size, outs, sum(map(len, outs))))
    for rank, out in enumerate(outs):
        team.count(rank, len(data), len(out))
    if len(data):
        outs[team.rank][:] = data


def reduce_scatter(team: WideTeam, sections: Sequence[memoryview], out: memoryview, combine: Combine) -> None:
    total, brought = Sum(combine), sum(map(len, sections))
    step = aligned(max(1, PART_BYTES // team.size))
    longest = max(map(len, sections))
    for start, stop in parts(longest, step) if longest else ((0, 0),):
        mine = out[start:stop]
        room = memoryview(bytearray(len(mine) * team.size))
        terms = [room[rank * len(mine) : (rank + 1) * len(mine)] for rank in range(team.size)]
        sends = [section[start:stop] for section in sections]
        terms[team.rank] = sends[team.rank]
        agree(team.exchange(sends, terms, brought))
        total.add(mine, terms)
        for rank, part in enumerate(sends):
            team.count(rank, len(part), len(mine))
    total.finish()


def all_to_all(team: WideTeam, sends: Sequence[memoryview], recvs: Sequence[memoryview]) -> None:
    team.exchange(sends, recvs, 0)
    for rank, out in enumerate(recvs):
        stream = team.streams.get(rank)
        if stream is not None and stream.incoming.message.total != len(out):
            got = stream.incoming.message.total
            raise ValueError(f"rank {rank} sent {got} bytes in an all-to-all, want {len(out)}: it did not take place")
        team.count(rank, len(sends[rank]), len(out))
    if len(sends[team.rank]):
        recvs[team.rank][:] = sends[team.rank]
