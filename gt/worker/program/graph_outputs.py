"""What a replay left in memory that the next one writes over: copied out when something else comes, not when it is over.

Most of it ends before anything reads it: gradients, where a step begins by dropping those of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

MOST = 4096  # names since: beyond so many, it is copied out
NONE: frozenset[int] = frozenset()


class Lent:
    """Of one executor. failed: is told what launched the replay, by its seq, and why what that left is lost."""

    def __init__(self, failed: Callable[[int, Exception], None]) -> None:
        self.seq = -1  # of the program that is carried out
        self._failed = failed
        self._copy: Callable[[set[int]], None] | None = None
        self._left: Set[int] = NONE
        self._names: set[int] = set()
        self._by = -1

    @property
    def there(self) -> bool:
        return self._copy is not None

    def lend(self, ids: Set[int], copy: Callable[[set[int]], None]) -> None:
        """A replay is over. copy: has those of these ids, and of others named since, that lie there lie elsewhere."""
        self._copy, self._left, self._by = copy, ids, self.seq

    def named(self, ids: Iterable[int]) -> None:
        """What may lie there too."""
        self._names.update(ids)
        if len(self._names) > MOST:
            self.settle()

    def settle(self, dropped: Set[int] = NONE) -> None:
        """What was left is copied out, unless it is dropped before it is read. What comes next is done in any case: others may
        wait for it.
        """
        copy, ids = self._copy, {*self._left, *self._names} - dropped
        self._copy, self._left, self._names = None, NONE, set()
        if copy is not None:
            try:
                copy(ids)
            except Exception as error:
                self._failed(self._by, error)
