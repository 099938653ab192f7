"""CPU time of a worker, by which the dispatcher sees that a long instruction makes progress."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from gt.wire.liveness import descendants_seconds

COMPILING = ("compile", "load")


class Effort:
    """CPU time of the thread that calls `begin`, as any thread may ask.

    host: whether ops are computed by that thread. It takes its part in what its pools of threads do, and sleeps where it waits
    for another worker. Where a device computes, it may spin while it waits: then its time says nothing, but for compilation.
    """

    def __init__(self, host: bool) -> None:
        self._host = host
        self._clock: int | None = None

    def begin(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def seconds(self, kind: str) -> float:
        """CPU seconds so far, during an instruction of this kind. Compilation includes descendant processes."""
        if self._clock is None or not (self._host or kind in COMPILING):
            return 0.0
        used = 0.0
        with contextlib.suppress(OSError):  # the thread has ended
            used = time.clock_gettime(self._clock)
        return used + descendants_seconds(os.getpid()) if kind in COMPILING else used
