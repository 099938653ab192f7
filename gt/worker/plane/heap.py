"""One symmetric heap a worker in anonymous shared memory, and the doorbell that wakes its owner.

Both are opened through /proc/<pid>/fd/<fd>: nothing has a name, so nothing is left when a process dies. A last page, which the
dispatcher does not allocate, holds the owner's mark and whether the owner sleeps.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import threading
from collections.abc import Callable
from typing import IO

from gt.wire.arena import open_memory, sealed_memory

PAGE_BYTES = 4096
NAME = "gt-heap"  # of the memory, as /proc shows it


def full_fence() -> Callable[[], None]:
    """A full memory barrier, for one thread: no load or store moves across a call of it.

    Python has none, so a lock that is always held is released and taken again. On x86 taking it is a locked
    instruction. On ARM releasing it is a store-release and taking it a load-acquire. These two in this order are never
    reordered with each other, so neither is anything before the first with anything after the second.
    """
    lock = threading.Lock()
    lock.acquire()
    release, acquire = lock.release, lock.acquire

    def fence() -> None:
        release()
        acquire()

    return fence


class Heap:
    """A mapping of one heap: `bytes`, and `words`, the same as int64; a flag at offset n is words[n // 8].

    An aligned int64 is read and written whole, by memoryview as by C.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(fd, size + PAGE_BYTES)
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("q")
        self.owner = size // 8  # words: the owner's mark, whether it sleeps
        self.asleep = self.owner + 1

    def close(self) -> None:
        self.words.release()
        self.bytes.release()
        with contextlib.suppress(BufferError):  # a slice is still in use: the mapping ends with it
            self._map.close()


class OwnHeap(Heap):
    """This worker's heap and doorbell. `doorbell` is "<fd of the pipe's end>-<mark>", for World rows."""

    def __init__(self, size: int) -> None:
        if size <= 0 or size % PAGE_BYTES:
            raise ValueError(f"heap of {size} bytes, want a multiple of {PAGE_BYTES}")
        self.fd = sealed_memory(NAME, size + PAGE_BYTES)
        super().__init__(self.fd, size)
        # 61 bits and never 0: tells this worker's flags from those of one that had its place before
        self.mark = int.from_bytes(os.urandom(8), "little") >> 3 | 1
        self.words[self.owner] = self.mark
        self._bell, self._rope = os.pipe()
        os.set_blocking(self._rope, False)
        self.doorbell = f"{self._rope}-{self.mark:016x}"

    @property
    def bell(self) -> int:
        """Descriptor that is readable while a ring is unheard."""
        return self._bell

    def listen(self) -> None:
        """Sleep until the bell rings. Earlier rings count, any number of them as one."""
        os.read(self._bell, PAGE_BYTES)

    def ring(self) -> None:
        """Wake the owner, from another thread. A full pipe holds rings enough already."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._rope, b"\0")

    def close(self) -> None:
        super().close()
        for fd in (self.fd, self._bell, self._rope):
            os.close(fd)


class PeerHeap(Heap):
    """Another worker's heap and bell, or this one's opened from outside. OSError if they cannot be opened."""

    def __init__(self, pid: int, fd: int, size: int, doorbell: str) -> None:
        rope, mark = parse(doorbell)
        # A worker's description of itself may be false. Only a heap's own memory and a pipe are opened, and the kernel permits
        # that to processes of the same user alone.
        process = os.open(f"/proc/{pid:d}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            descriptor = open_memory(process, fd, NAME, size + PAGE_BYTES)
            try:
                super().__init__(descriptor, size)
            finally:
                os.close(descriptor)
            self.mark = mark
            # A pid may have been given to another worker since the World was sent.
            if self.words[self.owner] != mark:
                raise OSError(f"descriptor {fd} of process {pid} is another worker's heap")
            self._rope = _pipe(process, rope)
        except OSError:
            if hasattr(self, "words"):
                self.close()
            raise
        finally:
            os.close(process)

    def ring(self) -> None:
        """Wake the owner. If it is gone, the dispatcher fails the waits on it."""
        with contextlib.suppress(BrokenPipeError):
            self._rope.write(b"\0")  # None if the pipe is full, which holds rings enough

    def close(self) -> None:
        super().close()
        if hasattr(self, "_rope"):
            self._rope.close()


def parse(doorbell: str) -> tuple[int, int]:
    """(fd, mark) of a doorbell."""
    fd, _, mark = doorbell.partition("-")
    try:
        parsed = int(fd), int(mark, 16)
    except ValueError:
        raise OSError(f"{doorbell!r} is not a doorbell of this plane") from None
    if not parsed[1]:
        raise OSError(f"{doorbell!r} lacks the mark that every heap has")
    return parsed


def _pipe(process: int, number: int) -> IO[bytes]:
    """A pipe's end to write to. OSError for anything else, which is not opened: a device would act on that."""
    descriptor = os.open(f"fd/{number:d}", os.O_PATH | os.O_CLOEXEC, dir_fd=process)
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            raise OSError(f"descriptor {number} of the process is not a worker's doorbell")
        return os.fdopen(os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC), "wb", buffering=0)
    finally:
        os.close(descriptor)
