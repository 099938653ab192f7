"""The order of peers' events: start-time fair queueing (Goyal, Vin, Cheng 1996) by the seconds that they take.

A peer that sends without pause waits behind those that send little, however much it has queued and whatever that costs. Events
of one peer keep their order. Knows no clock and no socket.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Generic, TypeVar

LEAST_SECONDS = 1e-6  # charged for each event, so that events of no cost take turns too
WARP_SECONDS = 0.05  # that a peer may be ahead of the others, if it has taken less than they (Duda and Cheriton 1999)
MAX_IDLE_PEERS = 1024  # peers without an event whose times are remembered, at most; others count as new
T = TypeVar("T")


# Example: a and b flood with events of 8 ms, and start at 0, 0, 8, 8, 16, .. ms. When c sends one, 16 is the time of the queue.
# By that alone c would start at 16 too, behind an event of each. It has taken nothing yet, so it starts at -34, and is next.
# Then it has taken its 50 ms one by one, and starts where its last event has ended, as they do.
class Arrivals(Generic[T]):
    """`add` an event, take the `next`, and `charge` its peer before another is taken. len: events that wait."""

    def __init__(self) -> None:
        self._time = 0.0  # latest start of an event, in seconds of service
        self._start = 0.0  # start of the event in hand
        self._added = self._count = 0
        self._waiting: dict[bytes, deque[T]] = {}
        self._ends: dict[bytes, float] = {}  # ends of the last events of peers that are not in `_waiting`, oldest first
        self._starts: list[tuple[float, int, bytes]] = []  # heap of (start of its next event, order, peer)

    def __len__(self) -> int:
        return self._count

    def add(self, peer: bytes, event: T) -> None:
        self._count += 1
        if (waiting := self._waiting.get(peer)) is None:
            waiting = self._waiting[peer] = deque()
            earliest = self._time - WARP_SECONDS
            self._push(max(earliest, self._ends.pop(peer, earliest)), peer)
        waiting.append(event)

    def next(self) -> tuple[bytes, T]:
        """The event to be handled now, and its peer; at least one waits."""
        while True:
            start, _, peer = heappop(self._starts)
            if waiting := self._waiting[peer]:
                self._count -= 1
                self._start, self._time = start, max(self._time, start)
                return peer, waiting.popleft()
            del self._waiting[peer]
            self._ends[peer] = start
            if len(self._ends) > MAX_IDLE_PEERS:
                del self._ends[next(iter(self._ends))]

    def charge(self, peer: bytes, seconds: float) -> None:
        """The event in hand, of this peer, took so long."""
        self._push(self._start + max(seconds, LEAST_SECONDS), peer)
        if not self._count:  # nobody waits, so nobody can be preferred
            for table in (self._waiting, self._ends, self._starts):
                table.clear()

    def _push(self, start: float, peer: bytes) -> None:
        self._added += 1
        heappush(self._starts, (start, self._added, peer))
