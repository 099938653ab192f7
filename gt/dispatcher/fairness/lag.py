"""Lag of the dispatcher's loop: the time from one look at its sockets to the next, for which every peer waits."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

log = logging.getLogger("gt.dispatcher")

LONG_SECONDS = 1.0  # seconds of a turn that are worth a warning
RECENT_TURNS = 1024
PERCENTILE = 99
WARN_AGAIN_SECONDS = 10.0  # seconds between two warnings


class Lag:
    """`turn` is told of each; `counters` is the part of gt.stats()."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_TURNS)
        self._longest = 0.0
        self._last = -WARN_AGAIN_SECONDS

    def turn(self, seconds: float, busiest: Callable[[], str], now: float) -> None:
        """A turn took so long, without the time it waited. busiest: says what took most of it, and of whom."""
        self._recent.append(seconds)
        self._longest = max(self._longest, seconds)
        if seconds >= LONG_SECONDS and now - self._last >= WARN_AGAIN_SECONDS:
            self._last = now
            log.warning("the dispatcher was busy for %.1f s, and nobody was heard, mostly with %s", seconds, busiest())

    def counters(self) -> dict[str, float]:
        """Seconds: the longest turn, and one that few of the last are longer than."""
        recent = sorted(self._recent)
        high = recent[len(recent) * PERCENTILE // 100] if recent else 0.0
        return {"loop_lag_max": round(self._longest, 6), "loop_lag_recent": round(high, 6)}
