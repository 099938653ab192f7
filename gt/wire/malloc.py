"""For GT's own processes: memory that is freed is kept for the next message, since taking it from the system costs more than
copying into it."""

from __future__ import annotations

import contextlib
import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT = 64 << 20  # bytes at the end of a heap
LARGE = 8 << 20  # bytes from which an allocation is the system's


def keep_freed() -> None:
    """Does nothing where the C library has no such setting."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_TRIM_THRESHOLD, KEPT)
        libc.mallopt(_MMAP_THRESHOLD, LARGE)
