"""Logging set-up: silent by default; GT_VERBOSE and GT_DEBUG_* make a process say on stderr what it does."""

from __future__ import annotations

import logging

from gt import env

PARTS = {"client": "GT_DEBUG_CLIENT", "dispatcher": "GT_DEBUG_DISPATCHER", "worker": "GT_DEBUG_WORKER"}


class Sparse:
    """Lets at most `limit` lines a second through and says how many more there were. Knows no clock."""

    def __init__(self, logger: logging.Logger, limit: int) -> None:
        self._logger, self._limit = logger, limit
        self._second, self._said, self._more = 0.0, 0, 0

    def allows(self, now: float) -> bool:
        if now - self._second >= 1:
            if self._more:
                self._logger.warning("%d more of the last second's refusals are not shown", self._more)
            self._second, self._said, self._more = now, 0, 0
        self._said += 1
        self._more += self._said > self._limit
        return self._said <= self._limit


def asked(part: str) -> bool:
    """Whether somebody wants to read what this part of GT does."""
    return env.flag("GT_VERBOSE") or env.flag(PARTS[part])


def setup(part: str, name: str = "") -> None:
    """Set up the logger "gt" of this process: part is client, dispatcher or worker; name is shown before each line."""
    logger = logging.getLogger("gt")
    level = logging.DEBUG if env.flag(PARTS[part]) else logging.INFO if env.flag("GT_VERBOSE") else logging.WARNING
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        logger.addHandler(handler)
        logger.propagate = False
    shown = name or f"gt.{part}"
    logger.handlers[0].setFormatter(logging.Formatter(f"%(asctime)s {shown} %(levelname)s %(message)s"))
