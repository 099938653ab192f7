"""A session's batches between their arrival and their acknowledgement: those that wait to be planned, and those under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass


class NeedsLookahead(Exception):
    """The plan of an op depends on ops that are still to come."""


class NeedsPauses(Exception):
    """An op is planned for longer than a turn: it is given to a thread, in which others have turns between."""


@dataclass(slots=True)
class Batch:
    """A batch that workers are executing: acknowledged when each has come to its `runs`."""

    seq: int
    end: int
    runs: dict[int, int]


@dataclass(slots=True)
class QueuedBatch:
    """A batch that is not planned to its end."""

    seq: int
    code: list
    frames: tuple
    at: int = 0
    spent: bool = False  # the turn was over before its end
    aside: bool = False  # its next op needs pauses


class OpQueue:
    """coming: batches to plan, the first perhaps in part; pending: batches that workers execute."""

    def __init__(self) -> None:
        self.coming: deque[QueuedBatch] = deque()
        self.pending: deque[Batch] = deque()
        self.frames: tuple = ()  # frames of the batch that is being planned
        self.position = 0  # behind the op that is being planned
        self.final = False  # nothing follows that a decision could wait for
        self.due = 0  # where in the stream the clock is looked at next; 0: after this op, which takes long

    def lookahead(self) -> Iterator[tuple[list, int]]:
        """Code behind the op that is being planned, and where it begins; NeedsLookahead at its end if more may come."""
        # The first batch is planned in part: its op in hand ends at `position`.
        for place, batch in enumerate(self.coming):
            yield batch.code, batch.at if place else self.position
        if not self.final:
            raise NeedsLookahead
