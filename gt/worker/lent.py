"""What a replay left in memory that the next one writes over: copied out when something else comes, not when it is over.

Most of it ends before anything reads it: gradients, where a step begins by dropping those of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

MOST = 4096  # names since: beyond so many, it is copied out


class Lent:
    """Of one executor."""

    def __init__(self) -> None:
        self._copy: Callable[[set[int]], None] | None = None
        self._ids: set[int] = set()

    @property
    def there(self) -> bool:
        return self._copy is not None

    def lend(self, ids: set[int], copy: Callable[[set[int]], None]) -> None:
        """A replay is over. copy: has those of these ids, and of others named since, that lie there lie elsewhere."""
        self._copy, self._ids = copy, set(ids)

    def named(self, ids: Iterable[int]) -> None:
        """What may lie there too."""
        self._ids.update(ids)
        if len(self._ids) > MOST:
            self.settle()

    def settle(self, dropped: Set[int] = frozenset()) -> None:
        """What was left is copied out, unless it is dropped before it is read."""
        copy, ids = self._copy, self._ids
        self._copy, self._ids = None, set()
        if copy is not None:
            copy(ids - dropped)
