"""A turn of the dispatcher's loop is short: what takes long is done in slices, with other peers' messages in between.

Knows no clock of its own: one is given, or nothing is ever cut into slices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from gt.dispatcher.fairness.background import Inline
from gt.dispatcher.fairness.lag import Lag

SLICE_SECONDS = 0.01  # seconds
DROPS_PER_LOOK = 128  # things that are dropped between looks at the clock


class Leavings:
    """Containers that nobody needs any more, too large to be freed at once: each turn frees a slice of them.

    emptied: called with each thing that is taken out of a container. large: each thing holds thousands of others.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._rest: deque[tuple[Any, Callable[[Any], None] | None, int]] = deque()

    def __bool__(self) -> bool:
        return bool(self._rest)

    def add(self, container: Any, emptied: Callable[[Any], None] | None = None, large: bool = False) -> None:
        """A dict, list or deque that is the caller's no longer."""
        if container:
            self._rest.append((container, emptied, 1 if large else DROPS_PER_LOOK))

    def clear(self) -> None:
        """Free as much as the turn has time for."""
        while self._rest:
            container, emptied, drops = self._rest[0]
            while container:
                for _ in range(min(drops, len(container))):
                    item = container.popitem()[1] if isinstance(container, dict) else container.pop()
                    if emptied is not None:
                        emptied(item)
                # Freed before the clock is looked at, since freeing is what takes time.
                item = None
                if self._pace.spent:
                    return
            self._rest.popleft()


class Pace:
    """Says when a turn has taken long enough. `clock`: seconds; without one a turn has no end. background: for long passes."""

    def __init__(
        self, clock: Callable[[], float] | None = None, seconds: float = SLICE_SECONDS, background: Inline | None = None
    ) -> None:
        self._clock, self._seconds = clock, seconds
        self.background = background or Inline()
        self._end = float("inf")
        self.lag = Lag()
        self.leavings = Leavings(self)

    def now(self) -> float:
        """Seconds of the clock, 0 without one."""
        return self._clock() if self._clock is not None else 0.0

    def begin(self) -> None:
        if self._clock is not None:
            self._end = self._clock() + self._seconds

    @property
    def spent(self) -> bool:
        return self._clock is not None and self._clock() >= self._end

    @property
    def half_spent(self) -> bool:
        """True once work should end whose instructions are then written and packed, which takes about as long as it took."""
        return self._clock is not None and self._clock() >= self._end - self._seconds / 2
