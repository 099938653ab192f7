"""Settings of GT's own processes, which create many small objects and hold messages for moments."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gt.wire import signals

PR_SET_PDEATHSIG = 1
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
KEPT_BYTES = 64 << 20  # free bytes at the end of a heap that glibc keeps
TURN_SECONDS = 0.001  # seconds
LARGE_BYTES = 8 << 20  # bytes from which an allocation is mapped by the system
# New objects until a pass of the collector over the youngest. A pass takes up to 0.5 us for each, since they are not in the
# CPU's caches, and nobody is served meanwhile. Fewer make more passes, but a survivor is met as often.
YOUNG_OBJECTS = 20_000
# Passes over the youngest for each pass over the middle generation, which meets all that they left. A survivor is met once by
# either number.
MIDDLE = 1
NEVER_PASSES = 1 << 30  # passes over the middle generation until a full pass
EVERY_SECONDS = 30.0  # seconds between full passes, at least
REST_FACTOR = 1000  # times the length of the last full pass, also at least
OVERDUE_SECONDS = 900.0  # seconds after which a full pass runs even beside work
PLENTY_CORES = 16  # of a GPU's host; a thread that polls for moments takes none from others there
OWN_FROZEN = 5000  # objects. Python 3.12 starts with some hundreds frozen; to thaw them costs nothing


def keep_freed() -> None:
    """Keep freed memory for the next message: memory from the system costs more than a copy into it.

    Does nothing where the C library has no such setting.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        libc.mallopt(_MMAP_THRESHOLD, LARGE_BYTES)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent (its forking thread) ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent ended before we could ask: the kernel sends no signal for that.
    if os.getppid() != parent:
        os._exit(1)


def collect_less() -> None:
    """Collect cycles less often, and never among the objects that exist now.

    Full passes, 0.1 s for a million objects, are left to `CycleCollector`.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, MIDDLE, NEVER_PASSES)


def program_froze() -> bool:
    """True if the program has frozen objects, and not the interpreter alone."""
    return gc.get_freeze_count() > OWN_FROZEN


@contextmanager
def uncollected() -> Iterator[None]:
    """Without passes of the collector inside, for imports: their objects stay, and passes take an eighth of their time.

    All objects count as old afterwards, so that the next pass over the youngest does not meet the new ones.
    """
    with signals.uncollected:
        try:
            yield
        finally:
            # Otherwise the program has frozen objects itself, which unfreezing would give back.
            if gc.isenabled() and not program_froze():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation


class CycleCollector:
    """Full passes of Python's collector, at times when nobody waits for the process.

    GT's own objects rarely need them: only errors and callbacks form cycles.
    """

    def __init__(self) -> None:
        self._next = time.monotonic() + EVERY_SECONDS
        self._latest = self._next + OVERDUE_SECONDS

    def offer(self, idle: bool) -> None:
        """Run a full pass if one is due and the process is idle, or if it is long overdue."""
        now = time.monotonic()
        if now < self._next or (not idle and now < self._latest):
            return
        gc.collect()
        # Passes take at most 1/REST_FACTOR of the time.
        took = time.monotonic() - now
        self._next = now + max(EVERY_SECONDS, took * REST_FACTOR)
        self._latest = self._next + OVERDUE_SECONDS


def plenty_of_cores() -> bool:
    """True if the process may use so many cores that a thread which polls for moments takes none from others."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return affinity is not None and len(affinity(0)) >= PLENTY_CORES


def more_descriptors() -> None:
    """Raise the limit of descriptors to the system's maximum: each peer needs one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def take_turns() -> None:
    """Let a busy thread release the interpreter within a millisecond: long passes run in threads beside the loop."""
    sys.setswitchinterval(TURN_SECONDS)


@contextmanager
def cycles_collected() -> Iterator[None]:
    """Free the reference cycles that are made inside, unless it raises.

    A full collection visits all objects of the process: 0.1 s and more beside torch and a few libraries. So the objects from
    before are frozen meanwhile. Those that the program itself has frozen stay so, and others are visited then.
    """
    freezes = not program_froze()
    if freezes:
        gc.collect(1)  # or young cycles from before would become old ones, which wait long for a collection
        gc.freeze()
        _Frozen.meanwhile = True
    try:
        yield
        gc.collect()
    finally:
        if freezes:
            _Frozen.meanwhile = False
            gc.unfreeze()


class _Frozen:
    """Objects that `cycles_collected` has frozen, and gives back."""

    meanwhile = False


def referrers(things: list) -> list:
    """The objects that refer to these, frozen ones too."""
    frozen = program_froze()
    if frozen:
        gc.unfreeze()  # a search meets no frozen objects
    try:
        return [other for other in gc.get_referrers(*things) if other is not things]
    finally:
        if frozen and not _Frozen.meanwhile:
            gc.freeze()


def available_bytes() -> int:
    """Bytes that the processes of this host may have: its memory, or the least limit of its control groups."""
    return min(
        [os.sysconf("SC_PHYS_PAGES") * resource.getpagesize(), *_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]
    )


def _groups(own: Path, root: Path) -> Iterator[int]:
    """Limits of this process's control groups and of those above them, of either version."""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            top, name = (root / "memory", "memory.limit_in_bytes") if kinds else (root, "memory.max")
            folder = top / path.strip("/")
            for place in (folder, *folder.parents):
                with contextlib.suppress(OSError, ValueError):
                    yield int((place / name).read_text())
                if place == top:
                    break
