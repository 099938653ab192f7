"""An all-reduce along the ranks: sums go up, the result comes back, chunk by chunk. Only neighbours talk.

Each connection carries the data once in each direction, as a ring does, and the order of the sum is that of the ranks.
"""

from __future__ import annotations

from gt.worker.plane.collectives import parts
from gt.worker.plane.net.wide_team import StreamLike, Sum, WideTeam

CHUNK_BYTES = 256 << 10


class ChainReduction:
    """One all-reduce of `data`, of whose size all members are agreed."""

    def __init__(self, team: WideTeam, data: memoryview, total: Sum) -> None:
        rank = team.rank
        self._below: StreamLike | None = team.streams[rank - 1] if rank else None
        self._above: StreamLike | None = team.streams[rank + 1] if rank + 1 < team.size else None
        self._team, self._data, self._total = team, data, total
        self._size, self._passed = len(data), 0
        self._sums = data if self._below is None else memoryview(bytearray(len(data)))
        # a member between adds its own chunk before the result of that chunk can be here
        self._result = memoryview(bytearray(len(data))) if self._below is None else data

    def run(self) -> None:
        below, above = self._below, self._above
        if below is not None:
            below.post(self._sums)
        if above is not None:
            above.post(self._result)
        self._climb()
        if above is not None:
            self._descend(above)
        if above is None:
            self._data[:] = self._sums
        elif below is None:
            self._data[:] = self._result
        for rank in (self._team.rank - 1, self._team.rank + 1):
            if 0 <= rank < self._team.size:
                self._team.count(rank, self._size, self._size)

    def _climb(self) -> None:
        """Add this member's chunks to those from below, and send the sums on: upwards, or as results."""
        below, above = self._below, self._above
        onwards = above or below
        assert onwards is not None
        for start, stop in parts(self._size, CHUNK_BYTES):
            chunk = self._sums[start:stop]
            if below is not None:
                below.wait_for(stop)
                self._total.add(chunk, [chunk, self._data[start:stop]])
            onwards.send(chunk, self._size)
            if above is not None:
                self._pass_back(above)

    def _descend(self, above: StreamLike) -> None:
        """Receive the results, and send them on downwards."""
        while self._below is not None and self._passed < self._size:
            above.wait_for(min(self._size, self._passed + CHUNK_BYTES))
            self._pass_back(above)
        above.wait()

    def _pass_back(self, above: StreamLike) -> None:
        come = above.incoming.at
        if self._below is not None and come > self._passed:
            self._below.send(self._result[self._passed : come], self._size)
            self._passed = come
