"""Collectives of one team that share their exchanges: many small ones cost about as much as one.

Each has its own lines of the team's buffers, and the same elements are added in the same order. So the bits are those of the
collectives one by one. The first exchange announces a digest of all sizes. Where members differ, since one could not bring its
part, they go on one by one: then only that collective fails. Knows nothing of heaps, flags or doorbells.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from gt.ir.heap import LINE, aligned
from gt.worker.plane import collectives
from gt.worker.plane.base import Combine, OnIssued, PeerGone, TeamForm
from gt.worker.plane.collectives import DIRECT_BYTES, Adder
from gt.worker.plane.team import Team

Failures = list[tuple[int, Exception]]  # the number of a collective in its batch, and why it failed
Errors = list[Exception | None]  # one for each collective of a group, in order


class QueuedCollective(NamedTuple):
    """One collective of a batch. kind: of ir.instr.COLLECTIVES. sends, outs: its sections and pieces, or the whole of each.

    combine: of no use in an all-gather.
    """

    kind: str
    form: TeamForm
    sends: Sequence[memoryview]
    outs: Sequence[memoryview]
    combine: Combine
    on_issued: OnIssued

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes in each rank's lines of the buffers; of an all-reduce, in those of every rank."""
        return tuple(map(len, self.outs if self.kind == "all_gather" else self.sends))

    def alone(self, team: Team) -> None:
        """Do it by itself."""
        if self.kind == "all_reduce":
            collectives.all_reduce(team, self.outs[0], self.combine)
        elif self.kind == "all_gather":
            collectives.all_gather(team, self.sends[0], self.outs)
        else:
            collectives.reduce_scatter(team, self.sends, self.outs[0], self.combine)


def unused(dst: memoryview, src: memoryview) -> None:
    """The combine of a collective that adds nothing."""
    raise AssertionError("nothing to add")


def run_batch(batch: Sequence[QueuedCollective], team_of: Callable[[TeamForm], Team]) -> Failures:
    """Do queued collectives of one team and kind; what failed. One without bytes here reports nothing: its caller knows."""
    failures: Failures = []
    done = 0
    try:
        team = team_of(batch[0].form)
        for group in _groups(team, batch) if len(batch) > 1 and team.size > 1 else ():
            errors = _as_one(team, batch, group)
            if errors is None:
                break
            done = group.stop
            for number, error in zip(group, errors, strict=True):
                _finish(batch[number], number, error, failures)
    except Exception as error:  # a member is gone: the rest cannot be done either
        return failures + [(n, error) for n in range(done, len(batch)) if any(batch[n].sizes)]
    for number in range(done, len(batch)):
        # A batch of one, or members that differ: one by one, where each collective compares its own size.
        queued, failure = batch[number], None
        try:
            queued.alone(team_of(queued.form))
        except Exception as error:
            if not any(queued.sizes):
                continue
            failure = error
        _finish(queued, number, failure, failures)
    return failures


def _finish(queued: QueuedCollective, number: int, failure: Exception | None, failures: Failures) -> None:
    """A collective is over: what has to be done afterwards is done, if it did not fail."""
    try:
        if failure is None:
            queued.on_issued()
    except Exception as error:
        failure = error
    if failure is not None:
        failures.append((number, failure))


def _groups(team: Team, batch: Sequence[QueuedCollective]) -> Iterator[range]:
    """Numbers of collectives that fit into the buffers together; one that is too large is alone."""
    room = _room(team, batch[0].kind)
    first, used = 0, [0] * team.size
    for number, queued in enumerate(batch):
        # By rank: lines that are taken in the buffer. A group is closed when any rank's would overflow.
        used = [have + aligned(more) for have, more in zip(used, _lines(team, queued), strict=True)]
        if number > first and max(used) > room:
            yield range(first, number)
            first, used = number, [aligned(more) for more in _lines(team, queued)]
    yield range(first, len(batch))


def _room(team: Team, kind: str) -> int:
    """Bytes of a buffer for one rank's lines."""
    return collectives.room(team) if kind == "reduce_scatter" else team.region.bytes // LINE * LINE


def _lines(team: Team, queued: QueuedCollective) -> Sequence[int]:
    return queued.sizes * team.size if queued.kind == "all_reduce" else queued.sizes


@lru_cache(maxsize=256)
def _digest(kind: str, sizes: tuple[tuple[int, ...], ...]) -> int:
    """A number that members announce who bring the same sizes, in 56 bits."""
    return int.from_bytes(hashlib.blake2b(f"{kind} {sizes}".encode(), digest_size=7).digest(), "little")


def _as_one(team: Team, batch: Sequence[QueuedCollective], group: range) -> Errors | None:
    """Do a group of a batch, and why each failed; None, and nothing is done, if members differ, as the first group shows."""
    members = batch[group.start : group.stop]
    # Sizes are compared once for each batch, in its first group; later groups follow from the same sizes.
    digest = _digest(batch[0].kind, tuple([queued.sizes for queued in batch])) if not group.start else 0
    if len(members) > 1:
        return _KINDS[batch[0].kind](team, members, digest)
    if digest and not _exchange(team, digest):
        return None
    try:
        members[0].alone(team)
    except PeerGone:
        raise
    except Exception as error:
        return [error]
    return [None]


def _exchange(team: Team, digest: int) -> bool:
    """An exchange; False if members differ. digest: 0 where they have agreed already."""
    team.announce(digest)
    team.exchange()
    return not digest or all(team.announced(rank) == digest for rank in range(team.size))


def _starts(sizes: Sequence[int]) -> list[int]:
    """The places where pieces begin, one after the other, each in lines of its own; and the end."""
    return [0, *accumulate(map(aligned, sizes))]


def _all_reduces(team: Team, batch: Sequence[QueuedCollective], digest: int) -> Errors | None:
    # One joined buffer, each collective's data in lines of its own: starts are [0, 64, 192, 256] for 40, 100 and 8 bytes.
    data = [queued.outs[0] for queued in batch]
    starts, adders = _starts(list(map(len, data))), [Adder(queued.combine) for queued in batch]
    for start, part in zip(starts, data):
        team.mine[start : start + len(part)] = part
    if not _exchange(team, digest):
        return None

    # Below DIRECT_BYTES each member adds all. Else rank r adds the lines [r * share, (r + 1) * share) of the joined buffer,
    # which may cut through a collective: `_within` gives the parts.
    total = starts[-1]
    share = total if total <= DIRECT_BYTES else aligned(-(-total // team.size))
    pieces = [[*_within(data, starts, rank * share, rank * share + share)] for rank in range(team.size)]
    own = pieces[0 if share == total else team.rank]
    for number, start, part in own:
        adders[number](team, part, start)
    if share < total:
        for _, start, part in own:
            team.mine[start : start + len(part)] = part
        team.exchange()
    for rank in range(team.size):
        for _, start, part in pieces[rank] if share < total and rank != team.rank else ():
            part[:] = team.theirs(rank)[start : start + len(part)]
        both = sum(len(part) for _, _, part in (*own, *pieces[rank])) if share < total else sum(map(len, data))
        team.count(rank, both, both)
    return [adder.failure for adder in adders]


def _within(data: Sequence[memoryview], starts: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, memoryview]]:
    """Number, place in the buffer and bytes of each part of the data between two places, which are multiples of LINE."""
    for number, (start, part) in enumerate(zip(starts, data)):
        first, last = max(begin, start), min(end, start + len(part))
        if first < last:
            yield number, first, part[first - start : last - start]


def _reduce_scatters(team: Team, batch: Sequence[QueuedCollective], digest: int) -> Errors | None:
    # The buffer has a share for each rank, in which the sections of all collectives for that rank follow one another.
    share, own = collectives.room(team), team.rank
    starts = [_starts([len(queued.sends[rank]) for queued in batch]) for rank in range(team.size)]
    for rank in range(team.size):
        for queued, start in zip(batch, starts[rank]):
            section = queued.sends[rank]
            team.mine[rank * share + start : rank * share + start + len(section)] = section
    if not _exchange(team, digest):
        return None
    adders = [Adder(queued.combine) for queued in batch]
    for add, queued, start in zip(adders, batch, starts[own]):
        add(team, queued.outs[0], own * share + start)
    mine = sum(len(queued.outs[0]) for queued in batch)
    for rank in range(team.size):
        team.count(rank, sum(len(queued.sends[rank]) for queued in batch), mine)
    return [adder.failure for adder in adders]


def _all_gathers(team: Team, batch: Sequence[QueuedCollective], digest: int) -> Errors | None:
    starts = [_starts([len(queued.outs[rank]) for queued in batch]) for rank in range(team.size)]
    for queued, start in zip(batch, starts[team.rank]):
        team.mine[start : start + len(queued.sends[0])] = queued.sends[0]
    if not _exchange(team, digest):
        return None
    mine = sum(len(queued.sends[0]) for queued in batch)
    for rank in range(team.size):
        for queued, start in zip(batch, starts[rank]):
            out = queued.outs[rank]
            if len(out):
                out[:] = queued.sends[0] if rank == team.rank else team.theirs(rank)[start : start + len(out)]
        team.count(rank, mine, sum(len(queued.outs[rank]) for queued in batch))
    return [None] * len(batch)


_KINDS: dict[str, Callable[[Team, Sequence[QueuedCollective], int], Errors | None]] = {
    "all_reduce": _all_reduces,
    "reduce_scatter": _reduce_scatters,
    "all_gather": _all_gathers,
}
