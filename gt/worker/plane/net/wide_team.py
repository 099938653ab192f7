"""A team whose workers are on several hosts: exchanges over streams, sums in rank order. Knows no algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from gt.worker.plane.base import Combine, PeerGone, Unreachable


class StreamLike(Protocol):
    """A stream to another member."""

    incoming: Any

    def check(self) -> None: ...
    def send(self, data: memoryview, total: int, note: int = 0) -> None: ...
    def post(self, into: memoryview) -> None: ...
    def wait(self) -> None: ...
    def wait_for(self, count: int) -> None: ...
    def fail(self, why: str) -> None: ...


class WideTeam:
    """key: of its streams. peers: by rank, None for this member. streams: by rank. direct: a connection joins each pair."""

    def __init__(
        self, key: int, rank: int, peers: list, streams: dict[int, StreamLike], direct: bool, count: Callable[..., None]
    ) -> None:
        self.key, self.rank, self.size, self.peers, self.streams, self.direct = key, rank, len(peers), peers, streams, direct
        self.failed: tuple[int, str] | None = None
        self._count = count

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around one collective: where this member cannot carry it on, the others are told, and none waits for it."""
        if self.failed is not None:
            raise Unreachable(*self.failed)
        try:
            yield
        except PeerGone as error:
            self.failed = error.index, error.reason
            for stream in self.streams.values():
                stream.fail(error.reason)
            raise

    def count(self, rank: int, sent: int, received: int) -> None:
        if rank != self.rank:
            self._count(self.peers[rank], sent, received)

    def others(self) -> Iterator[int]:
        """Ranks of the others, from the next one on, so that not all send to the same member."""
        for step in range(1, self.size):
            yield (self.rank + step) % self.size

    def exchange(self, sends: Sequence[memoryview], recvs: Sequence[memoryview], note: int) -> list[int]:
        """Send sends[r] to each rank, and receive recvs[r] from it; the numbers that all announced. Own entries are unused."""
        notes = [note] * self.size
        for rank in self.others():
            self.streams[rank].post(recvs[rank])
        for rank in self.others():
            self.streams[rank].send(sends[rank], len(sends[rank]), note)
        for rank in self.others():
            self.streams[rank].wait()
            notes[rank] = self.streams[rank].incoming.message.note
        return notes


class Sum:
    """Adds in rank order; keeps the first exception of combine, as the other members go on."""

    def __init__(self, combine: Combine) -> None:
        self._combine = combine
        self._failure: Exception | None = None

    def add(self, out: memoryview, terms: Sequence[memoryview]) -> None:
        """out = the sum of the terms. out may be a term other than the first, if no term overlaps it otherwise."""
        if not len(out) or self._failure:
            return
        first = terms[0]
        if len(terms) > 1 and any(term is out for term in terms[1:]):
            first = memoryview(bytearray(first))
        into = first if first is not terms[0] else out
        if into is out and first is not out:
            out[:] = first
        try:
            for term in terms[1:]:
                self._combine(into, term)
        except Exception as error:
            self._failure = error
            return
        if into is not out:
            out[:] = into

    def finish(self) -> None:
        if self._failure:
            raise self._failure


def agree(notes: Sequence[int]) -> None:
    """ValueError on all members unless all announced the same number of bytes."""
    if any(note != notes[0] for note in notes):
        raise ValueError(f"members of a collective brought {list(notes)} bytes, want the same of all: it did not take place")
