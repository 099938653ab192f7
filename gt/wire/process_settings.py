"""For GT's own processes: what they do all day is make and drop small objects and hold messages for a moment."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
import time

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT = 64 << 20  # bytes at the end of a heap
TURN = 0.001  # seconds
LARGE = 8 << 20  # bytes from which an allocation is the system's
YOUNG = 50_000  # objects; of so many made in a row most are gone again, and the collector passes over the rest less often
MIDDLE = 5  # such passes between two over what is left of them
NEVER = 1 << 30  # passes
EVERY = 30.0  # seconds between full passes, at least
REST = 1000  # times what the last full pass took, too
OVERDUE = 900.0  # seconds after which one is made although there is work


def keep_freed() -> None:
    """Freed memory is kept for the next message, as taking it from the system costs more than copying into it. Does nothing
    where the C library has no such setting."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_TRIM_THRESHOLD, KEPT)
        libc.mallopt(_MMAP_THRESHOLD, LARGE)


def collect_less() -> None:
    """Look for cycles less often, for a process that makes many small objects; at what there is now never again. Passes over
    all objects, 0.1 s for a million, are left to `CycleCollector`."""
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)


class CycleCollector:
    """Full passes of Python's collector, made where nobody waits for the process. Its own objects go without: those in cycles
    are of errors and callbacks."""

    def __init__(self) -> None:
        self._next = time.monotonic() + EVERY
        self._latest = self._next + OVERDUE

    def offer(self, idle: bool) -> None:
        """A pass, if one is due and nothing is to be done, or is long overdue."""
        now = time.monotonic()
        if now < self._next or (not idle and now < self._latest):
            return
        gc.collect()
        took = time.monotonic() - now
        self._next = now + max(EVERY, took * REST)
        self._latest = self._next + OVERDUE


def more_descriptors() -> None:
    """Each peer takes one: so many as the system's operator allows, not the few that a shell starts with."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def take_turns() -> None:
    """A thread that is busy leaves the interpreter to another that wakes up within a millisecond: the loop has others beside it
    that carry out long passes."""
    sys.setswitchinterval(TURN)
