"""The order of peers' events: start-time fair queueing (Goyal, Vin, Cheng 1996) by the seconds that they take.

A peer that sends without pause waits behind those that send little, however much it has queued and whatever that costs. Events
of one peer keep their order. Knows no clock and no socket.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Generic, TypeVar

LEAST_SECONDS = 1e-6  # charged for each event, so that events of no cost take turns too
T = TypeVar("T")


# Example: a floods with events of 8 ms, and starts at 0, 8, 16, .. ms. When b sends one, 16 is the time of the queue, and b
# starts at 16 too: at most one event of a precedes it.
class Arrivals(Generic[T]):
    """`add` an event, take the `next`, and `charge` its peer before another is taken. len: events that wait."""

    def __init__(self) -> None:
        self._time = 0.0  # start of the event in hand, in seconds of service
        self._added = self._count = 0
        self._waiting: dict[bytes, deque[T]] = {}
        self._starts: list[tuple[float, int, bytes]] = []  # heap of (start of its next event, order, peer)

    def __len__(self) -> int:
        return self._count

    def add(self, peer: bytes, event: T) -> None:
        self._count += 1
        if (waiting := self._waiting.get(peer)) is None:
            waiting = self._waiting[peer] = deque()
            self._push(self._time, peer)
        waiting.append(event)

    def next(self) -> tuple[bytes, T]:
        """The event to be handled now, and its peer; at least one waits."""
        while True:
            self._time, _, peer = heappop(self._starts)
            if waiting := self._waiting[peer]:
                self._count -= 1
                return peer, waiting.popleft()
            del self._waiting[peer]  # the others have had as much time by now

    def charge(self, peer: bytes, seconds: float) -> None:
        """The event in hand, of this peer, took so long."""
        self._push(self._time + max(seconds, LEAST_SECONDS), peer)
        if not self._count:  # nobody waits, so nobody can be preferred
            self._waiting.clear()
            self._starts.clear()

    def _push(self, start: float, peer: bytes) -> None:
        self._added += 1
        heappush(self._starts, (start, self._added, peer))
