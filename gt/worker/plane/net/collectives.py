"""Collectives of workers on several hosts, in terms of streams. Members add in rank order, as plane shm does: the same bits.

Each member adds a section of all, then all gather; where a pair has no connection, sums go along a chain. Each message
announces the bytes of its sender's whole part: members that disagree all raise ValueError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gt.ir.heap import aligned
from gt.worker.plane.base import Combine
from gt.worker.plane.collectives import DIRECT_BYTES, parts
from gt.worker.plane.net.chain import ChainReduction
from gt.worker.plane.net.wide_team import Sum, WideTeam, agree

PART_BYTES = 16 << 20  # bytes of a member's data that are under way at a time
CHUNK_BYTES = 256 << 10  # that are added at once, while they are in the processor's cache
FRAME_BYTES = 1 << 20  # bytes of a sum in one frame: each frame costs both ends some system calls


def all_reduce(team: WideTeam, data: memoryview, combine: Combine) -> None:
    total, left = Sum(combine), len(data)
    step = PART_BYTES
    for start, stop in parts(len(data), step) if data else ((0, 0),):
        part = data[start:stop]
        # Three algorithms by size and wiring. Small: everybody gets everything, one round trip. Direct connections: sections,
        # 2 (n - 1) / n of the bytes for each member. Otherwise a chain, whose members talk to their neighbours only.
        if len(part) <= DIRECT_BYTES:
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
    # A copy: the sum is written into `data`, which is this member's own term too.
    terms[team.rank] = memoryview(bytearray(data))
    agree(team.exchange([data] * team.size, terms, left))
    total.add(data, terms)
    for rank in range(team.size):
        team.count(rank, len(data), len(data))


def _sum_sections(team: WideTeam, data: memoryview, total: Sum, left: int) -> None:
    """Each member adds a section of all, and sends each chunk of the sum as soon as it is there."""
    share = aligned(-(-len(data) // team.size))
    sections = [data[min(r * share, len(data)) : min((r + 1) * share, len(data))] for r in range(team.size)]
    own = sections[team.rank]
    with team.duplex as duplex:
        results = duplex.results
        # Reduce-scatter: the terms of the own section arrive. All-gather, overlapped with it: finished chunks leave at once,
        # and the others' sums are received into their place in `data`.
        terms = _exchange_terms(team, sections, own, left)
        for other in team.others():
            duplex.post(results[other], sections[other])
        sent = 0
        for stop in _add_chunks(team, terms, own, total):
            if stop - sent >= FRAME_BYTES or stop == len(own):
                for other in team.others():
                    duplex.send(results[other], own[sent:stop], len(own))
                sent = stop
        duplex.drive(lambda: all(stream.incoming.done for stream in results.values()))
        duplex.flush()
    for other, section in enumerate(sections):
        team.count(other, len(section) + len(own), len(own) + len(section))


def _exchange_terms(team: WideTeam, sends: Sequence[memoryview], out: memoryview, note: int) -> list[memoryview]:
    """Begin to exchange sends[r] for the terms of `out`, by rank: the own one is there, others arrive.

    ValueError on all members, and nothing is under way, if they announced different notes.
    """
    duplex, size, at = team.duplex, len(out), 0
    room, terms = duplex.scratch(size * (team.size - 1)), list(sends)
    for rank in team.streams:
        terms[rank] = room[at : at + size]
        at += size
    for rank in team.others():
        duplex.post(team.streams[rank], terms[rank])
    for rank in team.others():
        duplex.send(team.streams[rank], sends[rank], len(sends[rank]), note)
    arriving = [stream.incoming for stream in team.streams.values()]
    # A message's first frame carries its note, so sizes are compared before the bulk has arrived.
    duplex.drive(lambda: all(incoming.begun for incoming in arriving))
    notes = team.notes(note)
    # The members disagree. Receive and send to the end all the same: the streams must be at a message's end for the next
    # collective.
    if any(other != note for other in notes):
        duplex.drive(lambda: all(incoming.done for incoming in arriving))
        duplex.flush()
        agree(notes)
    return terms


def _add_chunks(team: WideTeam, terms: Sequence[memoryview], out: memoryview, total: Sum) -> Iterator[int]:
    """The bytes of out that are the sum of all terms, after each chunk. A chunk is added while later ones arrive."""
    duplex, arriving = team.duplex, [stream.incoming for stream in team.streams.values()]
    for start, stop in parts(len(out), CHUNK_BYTES) if out else ((0, 0),):
        duplex.drive(lambda: all(incoming.done or incoming.at >= stop for incoming in arriving))  # noqa: B023
        chunk = out[start:stop]
        total.add(chunk, [chunk if term is out else term[start:stop] for term in terms])
        yield stop
    duplex.drive(lambda: all(incoming.done for incoming in arriving))


def all_gather(team: WideTeam, data: memoryview, outs: Sequence[memoryview]) -> None:
    agree(team.exchange([data] * team.size, outs, sum(map(len, outs))))
    for rank, out in enumerate(outs):
        team.count(rank, len(data), len(out))
    if len(data):
        outs[team.rank][:] = data


def reduce_scatter(team: WideTeam, sections: Sequence[memoryview], out: memoryview, combine: Combine) -> None:
    total, brought = Sum(combine), sum(map(len, sections))
    # A part has a section for each member, so PART_BYTES bounds all that is under way.
    step = aligned(max(1, PART_BYTES // team.size))
    longest = max(map(len, sections))
    for start, stop in parts(longest, step) if longest else ((0, 0),):
        mine, sends = out[start:stop], [section[start:stop] for section in sections]
        with team.duplex as duplex:
            for _ in _add_chunks(team, _exchange_terms(team, sends, mine, brought), mine, total):
                pass
            duplex.flush()
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
