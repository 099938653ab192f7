"""An all-reduce along the ranks: sums go up, the result comes back, chunk by chunk. Only neighbours talk.

Each connection carries the data once in each direction, as a ring does, and the order of the sum is that of the ranks.
"""

from __future__ import annotations

from gt.worker.plane.collectives import parts
from gt.worker.plane.net.wide_team import Sum, WideTeam

CHUNK_BYTES = 256 << 10


class ChainReduction:
    """One all-reduce of `data`, of whose size all members are agreed."""

    def __init__(self, team: WideTeam, data: memoryview, total: Sum) -> None:
        rank = team.rank
        self._below = team.streams[rank - 1] if rank else None
        self._above = team.streams[rank + 1] if rank + 1 < team.size else None
        self._team, self._data, self._total, self._duplex = team, data, total, team.duplex
        self._size, self._passed = len(data), 0
        room = self._duplex.scratch(len(data))
        # Ranks 0 .. n-1 in a row. Sums climb from 0 to n-1, whose sums are the result; results descend to 0. Both flows are
        # pipelined by chunks.
        self._sums = data if self._below is None else room
        # A member between may receive results into its data: it adds its own chunk before the result of that chunk can be here.
        self._result = room if self._below is None else data

    def run(self) -> None:
        below, above, duplex = self._below, self._above, self._duplex
        with duplex:
            if below is not None:
                duplex.post(below, self._sums)
            if above is not None:
                duplex.post(above, self._result)
            self._climb()
            self._descend()
            duplex.flush()
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
        # The top member's sums are the results already: they go back down.
        onwards = above or below
        assert onwards is not None
        for start, stop in parts(self._size, CHUNK_BYTES):
            chunk = self._sums[start:stop]
            if below is not None:
                arriving = below.incoming
                self._duplex.drive(lambda: arriving.done or arriving.at >= stop)  # noqa: B023
                self._total.add(chunk, [chunk, self._data[start:stop]])
            # Results that have arrived meanwhile go down at once, so both directions of each link are busy.
            self._duplex.send(onwards, chunk, self._size)
            self._pass_back()

    def _descend(self) -> None:
        """Receive the results, and send them on downwards."""
        if self._above is None:
            return
        arriving = self._above.incoming
        while self._below is not None and self._passed < self._size:
            stop = min(self._size, self._passed + CHUNK_BYTES)
            self._duplex.drive(lambda: arriving.done or arriving.at >= stop)  # noqa: B023
            self._pass_back()
        self._duplex.drive(lambda: arriving.done)

    def _pass_back(self) -> None:
        if self._above is None or self._below is None:
            return
        incoming = self._above.incoming
        arrived = self._size if incoming.done else incoming.at // CHUNK_BYTES * CHUNK_BYTES  # whole slots
        if arrived > self._passed:
            self._duplex.send(self._below, self._result[self._passed : arrived], self._size)
            self._passed = arrived
