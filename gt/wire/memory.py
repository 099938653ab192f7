"""For GT's own processes: what they do all day is make and drop small objects and hold messages for a moment."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT = 64 << 20  # bytes at the end of a heap
TURN = 0.001  # seconds
LARGE = 8 << 20  # bytes from which an allocation is the system's
YOUNG = 50_000  # objects; of so many made in a row most are gone again, and the collector passes over the rest less often


def keep_freed() -> None:
    """Freed memory is kept for the next message, as taking it from the system costs more than copying into it. Does nothing
    where the C library has no such setting."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_TRIM_THRESHOLD, KEPT)
        libc.mallopt(_MMAP_THRESHOLD, LARGE)


def collect_less() -> None:
    """Look for cycles less often: for a process that makes many small objects, and holds nothing large in them."""
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])


def more_descriptors() -> None:
    """Each peer takes one: so many as the system's operator allows, not the few that a shell starts with."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def take_turns() -> None:
    """A thread that is busy leaves the interpreter to another that wakes up within a millisecond: the loop has others beside it
    that carry out long passes."""
    sys.setswitchinterval(TURN)
