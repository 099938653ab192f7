"""A team whose workers are on several hosts: exchanges over streams, sums in rank order. Knows no algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gt.worker.plane.base import Combine, PeerGone, Unreachable
from gt.worker.plane.net.duplex import Duplex
from gt.worker.plane.net.stream import SMALL_BYTES


class WideTeam:
    """peers: by rank, None for this member. duplex: streams by rank. direct: a connection joins each pair."""

    def __init__(self, rank: int, peers: list, duplex: Duplex, direct: bool, count: Callable[..., None]) -> None:
        self.rank, self.size, self.peers, self.direct = rank, len(peers), peers, direct
        self.duplex, self.streams = duplex, duplex.streams
        self.key = next(iter(self.streams.values())).key
        self.failed: tuple[int, str] | None = None
        self._count = count

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around one collective: where this member cannot carry it on, the others are told, and none waits for it."""
        if self.failed is not None:
            raise Unreachable(*self.failed)
        try:
            for stream in self.streams.values():
                stream.check()
            yield
        # After this the streams are out of step: the team stays failed until the world is formed anew.
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
        streams = self.streams
        # Small messages fit into the kernel's buffers: send all, then wait for each. Larger ones need both directions driven
        # at once, or two members that send to each other would block for ever.
        if max(max(len(sends[rank]), len(recvs[rank])) for rank in streams) <= SMALL_BYTES:
            for rank in self.others():
                streams[rank].post(recvs[rank])
            for rank in self.others():
                streams[rank].send(sends[rank], len(sends[rank]), note)
            for rank in self.others():
                streams[rank].wait()
        else:
            with self.duplex as duplex:
                for rank in self.others():
                    duplex.post(streams[rank], recvs[rank])
                for rank in self.others():
                    duplex.send(streams[rank], sends[rank], len(sends[rank]), note)
                duplex.drive(lambda: all(stream.incoming.done for stream in streams.values()))
                duplex.flush()
        return self.notes(note)

    def notes(self, own: int) -> list[int]:
        """The numbers that all announced."""
        return [own if rank == self.rank else self.streams[rank].incoming.message.note for rank in range(self.size)]


class Sum:
    """Adds in rank order; keeps the first exception of combine, as the other members go on."""

    def __init__(self, combine: Combine) -> None:
        self._combine = combine
        self._failure: Exception | None = None

    def add(self, out: memoryview, terms: Sequence[memoryview]) -> None:
        """out = the sum of the terms. out may be a term, if no term overlaps it otherwise. terms[0] may be written over."""
        if not len(out) or self._failure:
            return
        own = next((rank for rank, term in enumerate(terms) if term is out), 0)
        if terms[own] is not out:
            out[:] = terms[0]
        try:
            # Rank order for every member, whatever its own rank: terms 0 to own - 1 are summed first, then this one, then the
            # rest.
            if own:  # the terms before it are added by themselves, and then to it: a + b is b + a to the bit
                for term in terms[1:own]:
                    self._combine(terms[0], term)
                self._combine(out, terms[0])
            for term in terms[own + 1 :]:
                self._combine(out, term)
        except Exception as error:
            self._failure = error

    def finish(self) -> None:
        if self._failure:
            raise self._failure


def agree(notes: Sequence[int]) -> None:
    """ValueError on all members unless all announced the same number of bytes."""
    if any(note != notes[0] for note in notes):
        raise ValueError(f"members of a collective brought {list(notes)} bytes, want the same of all: it did not take place")
