"""A team over shared memory: members write their own buffers, set flags, and read each other's buffers.

There are two buffers in turn, so one exchange has one barrier. A member overwrites a buffer two exchanges later. By then all
have signalled the exchange between, which they do after reading.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gt.ir.heap import TeamRegion
from gt.worker.plane.heap import Heap, OwnHeap


class Waiter(Protocol):
    """The plane."""

    def wait(self, ready: Callable[[], bool], peers: Sequence) -> None: ...
    def wake(self, peers: Sequence) -> None: ...
    def count(self, peer: Any, sent: int, received: int) -> None: ...


class Team:
    """One member's state. `peers` are the others in rank order; all members count exchanges alike."""

    def __init__(
        self, plane: Waiter, region: TeamRegion, rank: int, peers: list, own: OwnHeap, fence: Callable[[], None]
    ) -> None:
        self.plane, self.region, self.rank, self.size, self.peers = plane, region, rank, region.members, peers
        self.version = -1
        self._heaps: list[Heap] = [peer.heap for peer in peers]
        self._heaps.insert(rank, own)
        self._own, self._fence = own, fence
        self._arrivals = [region.flag(r) // 8 for r in range(self.size) if r != rank]
        self._at = 0  # the buffer to be written next
        # Flags count from a number that only this set of processes has: a new process in the team starts it afresh.
        marks = b"".join(heap.words[heap.owner].to_bytes(8, "little") for heap in self._heaps)
        # 61 bits, so that counting up never overflows the int64 of a flag. Each exchange adds one.
        self._mark = int.from_bytes(hashlib.blake2b(marks, digest_size=8).digest(), "little") >> 3
        self._buffers = [
            [heap.bytes[region.buffer(half) : region.buffer(half) + region.bytes] for heap in self._heaps] for half in (0, 1)
        ]

    @property
    def mine(self) -> memoryview:
        """This member's buffer, to be written before the next exchange."""
        return self._buffers[self._at][self.rank]

    def theirs(self, rank: int) -> memoryview:
        """The buffer that the rank-th member (this one too) wrote before the last exchange; valid until the next."""
        return self._buffers[1 - self._at][rank]

    def announce(self, number: int) -> None:
        """Announce a number along with this member's buffer."""
        self._own.words[self.region.header(self._at) // 8] = number

    def announced(self, rank: int) -> int:
        return self._heaps[rank].words[self.region.header(1 - self._at) // 8]

    def exchange(self) -> None:
        """Every member's buffer becomes readable to all. The last to arrive, who needs no sleep, wakes the others.

        Of all fences of one exchange one is last, and its member sees every flag set. So at least one member wakes, after every
        flag was set. A flag that is ahead by one is of a member that has left this exchange already.
        """
        self._mark += 1
        self._at = 1 - self._at
        flag = self.region.flag(self.rank) // 8
        self._fence()
        for peer in self.peers:
            peer.heap.words[flag] = self._mark
        self._fence()
        # The fence before the flags orders the buffer's bytes, the one after them the look at the others' flags.
        if self._arrived():
            self.plane.wake(self.peers)
        else:
            self.plane.wait(self._arrived, self.peers)

    def _arrived(self) -> bool:
        words, mark = self._own.words, self._mark
        return all(0 <= words[at] - mark <= 1 for at in self._arrivals)

    def count(self, rank: int, sent: int, received: int) -> None:
        """Count payload to and from the rank-th member; a member's own does not count."""
        if rank != self.rank:
            self.plane.count(self.peers[rank - (rank > self.rank)], sent, received)

    def close(self) -> None:
        """Release the views of the heaps."""
        for half in self._buffers:
            for view in half:
                view.release()
        self._buffers.clear()
