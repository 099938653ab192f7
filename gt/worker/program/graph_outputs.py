"""Outputs of a replay in graph memory, which the next replay overwrites. They are copied out lazily.

Most outputs end before anything reads them: gradients, for example, where a step begins by dropping those of the step before.
Programs share one pool of memory. One whose outputs another program reads has a pool of its own, which only its own replays
overwrite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Any

MAX_NAMED_IDS = 4096  # ids named since a replay; with more of them its outputs are copied out
NONE: frozenset[int] = frozenset()
SHARED = "the pool that programs share"


@dataclass(slots=True)
class Outputs:
    """Outputs of one replay. copy: moves tensors of such ids out of its pool, for the program that begins, if one does."""

    copy: Callable[[set[int], Any], None]
    ids: Set[int]
    seq: int  # op number of the replay
    named: set[int] = field(default_factory=set)  # ids since: a view of an output may itself have been viewed
    programs: dict[Any, Set[int]] = field(default_factory=dict)  # ids that other programs have left since


class PendingOutputs:
    """Outputs of replays that are still in graph memory.

    report_failure: called with the seq of a program whose outputs are lost.
    """

    def __init__(self, report_failure: Callable[[int, Exception], None]) -> None:
        self.seq = -1  # op number of the running program
        self._report_failure = report_failure
        self._pools: dict[Any, Outputs] = {}

    @property
    def exist(self) -> bool:
        return bool(self._pools)

    def defer_copy(self, pool: Any, ids: Set[int], copy: Callable[[set[int], Any], None]) -> None:
        """A replay is over, whose outputs are in a pool. copy: as of Outputs."""
        self._pools[pool] = Outputs(copy, ids, self.seq)

    def track(self, ids: Iterable[int]) -> None:
        """An instruction has these operands: its outputs may be views of graph memory."""
        for pool, outputs in [*self._pools.items()]:
            outputs.named.update(ids)
            if len(outputs.named) > MAX_NAMED_IDS:
                self.copy_out(pool=pool)

    def track_program(self, program: Any, pool: Any, ids: Set[int]) -> None:
        """A program is over, whose results are in a pool. Some of the ids that it leaves may be views of other graph memory."""
        for other, outputs in self._pools.items():
            if other is not pool:
                outputs.programs[program] = ids

    def copy_out(self, dropped: Set[int] = NONE, pool: Any = None, program: Any = None) -> None:
        """Copy the outputs out of a pool, or of all pools, but for those that are dropped before they are read.

        program: the program that begins. A failure is reported and not raised: other workers may wait for the instructions that
        follow.
        """
        for owner in [*self._pools] if pool is None else [pool]:
            # Taken out before the copy: a failure must not be tried again by the next instruction.
            outputs = self._pools.pop(owner, None)
            if outputs is None:
                continue
            try:
                outputs.copy({*outputs.ids, *outputs.named}.union(*outputs.programs.values()) - dropped, program)
            except Exception as error:
                self._report_failure(outputs.seq, error)
