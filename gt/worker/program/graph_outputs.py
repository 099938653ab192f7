"""Outputs of a replay in graph memory, which the next replay overwrites. They are copied out lazily.

Most outputs end before anything reads them: gradients, for example, where a step begins by dropping those of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

MAX_NAMED_IDS = 4096  # ids named since a replay; with more of them its outputs are copied out
NONE: frozenset[int] = frozenset()


class PendingOutputs:
    """Outputs of the last replay of one executor. report_failure: called with the seq of the program whose outputs are lost."""

    def __init__(self, report_failure: Callable[[int, Exception], None]) -> None:
        self.seq = -1  # op number of the running program
        self._report_failure = report_failure
        self._copy: Callable[[set[int]], None] | None = None
        self._outputs: Set[int] = NONE
        self._named: set[int] = set()
        self._producer_seq = -1

    @property
    def exist(self) -> bool:
        return self._copy is not None

    def defer_copy(self, ids: Set[int], copy: Callable[[set[int]], None]) -> None:
        """A replay is over. copy: moves the tensors of such ids, and of ids named since, out of graph memory."""
        self._copy, self._outputs, self._producer_seq = copy, ids, self.seq

    def track(self, ids: Iterable[int]) -> None:
        """An instruction has these operands: its outputs may be views of graph memory."""
        self._named.update(ids)
        # A view of an output may itself have been viewed: so all ids since are kept, in bounds.
        if len(self._named) > MAX_NAMED_IDS:
            self.copy_out()

    def copy_out(self, dropped: Set[int] = NONE) -> None:
        """Copy the outputs out of graph memory, but for those that are dropped before they are read.

        A failure is reported and not raised: other workers may wait for the instructions that follow.
        """
        # Cleared before the copy: a failure must not be tried again by the next instruction.
        copy, ids = self._copy, {*self._outputs, *self._named} - dropped
        self._copy, self._outputs, self._named = None, NONE, set()
        if copy is not None:
            try:
                copy(ids)
            except Exception as error:
                self._report_failure(self._producer_seq, error)
