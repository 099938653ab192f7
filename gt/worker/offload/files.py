"""Bytes of evicted tensors in one file without a name, read and written by a few threads past the page cache.

The file is deleted by the kernel when its process ends, however that ends. Its slots are aligned as direct I/O asks. Where the
file system has no direct I/O, or no files without names, ordinary ones are used.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gt import env
from gt.ir.text import size

log = logging.getLogger("gt.worker")
ALIGNED_BYTES = 4096  # bytes: a multiple of the blocks of every disk
THREADS_PER_FILE = 4
IN_MEMORY = ("tmpfs", "ramfs")  # kinds of file systems
CHUNK_BYTES = 8 << 20  # of one read or write
MAX_WAITING_BYTES = 256 << 20  # bytes of buffers that are being written


class DiskFull(OSError):
    """The folder's disk is full."""


class OffloadFile:
    """One worker's file in a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        _check_allowed(folder)
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self._file, self.direct = _nameless(folder)
        except OSError as error:
            cure = "want a folder that this worker may write; try another `path` in the config's `offload`"
            raise OSError(error.errno, f"no file for offloaded tensors in {folder}: {error.strerror}; {cure}") from error
        self._threads = ThreadPoolExecutor(THREADS_PER_FILE, "gt.offload")
        self._free: dict[int, list[int]] = {}  # bytes of a slot -> offsets of the free ones
        self._end = self._slots = 0
        self._writes: deque[tuple[Future, int]] = deque()  # under way, and their bytes
        self._waiting_bytes = 0  # of these

    @property
    def unused(self) -> bool:
        """True if no slot is taken."""
        return not self._slots

    def take(self, nbytes: int) -> int:
        """The offset of a slot. DiskFull if the disk has none."""
        room = _rounded(nbytes)
        self._slots += 1
        # Slots of equal size are reused; the file never shrinks, as the same tensors are evicted in each step.
        free = self._free.get(room)
        if free:
            return free.pop()
        start = self._end
        try:
            # Blocks are reserved now: a full disk shows here, where the tensor still is in memory, and not at a later write.
            os.posix_fallocate(self._file, start, room)
        except OSError as error:
            self._slots -= 1
            left = os.statvfs(self.folder)
            have = size(left.f_bavail * left.f_frsize)
            raise DiskFull(
                error.errno, f"no room for offloaded tensors in {self.folder}: want {size(room)}, have {have}"
            ) from error
        self._end += room
        return start

    def give_back(self, start: int, nbytes: int) -> bool:
        """Free a slot. True if it was the last: then the file is closed."""
        self._free.setdefault(_rounded(nbytes), []).append(start)
        self._slots -= 1
        if self.unused:
            self.close()
        return self.unused

    def write(self, start: int, unwritten: list[mmap.mmap]) -> Future:
        """Write the buffer of `buffer_of` in this list, and empty the list. The buffer must not change until that is done."""
        # Back-pressure: buffers that wait for the disk are bounded, or eviction would fill the host's memory instead.
        while self._writes and (self._writes[0][0].done() or self._waiting_bytes > MAX_WAITING_BYTES):
            first, waited = self._writes.popleft()
            first.exception()  # waits; the tensor's own note says why it failed
            self._waiting_bytes -= waited
        nbytes = len(unwritten[0])
        writing = self._threads.submit(self._written, start, unwritten)
        self._writes.append((writing, nbytes))
        self._waiting_bytes += nbytes
        return writing

    def read(self, start: int, nbytes: int) -> Future:
        """A buffer with the bytes of a slot."""
        return self._threads.submit(self._read, start, nbytes)

    def close(self) -> None:
        self._threads.shutdown(wait=True)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _written(self, start: int, unwritten: list[mmap.mmap]) -> None:
        view = memoryview(unwritten[0])
        at = 0
        try:
            while at < len(view):
                done = os.pwrite(self._file, view[at : at + CHUNK_BYTES], start + at)
                if done <= 0:
                    raise OSError(f"{self.folder}: {at} of {len(view)} bytes could be written")
                at += done
        except OSError as error:
            log.warning("offloaded tensors stay in memory: %s", error)
            raise
        unwritten.clear()

    def _read(self, start: int, nbytes: int) -> mmap.mmap:
        buffer = buffer_of(nbytes)
        view = memoryview(buffer)
        at = 0
        while at < len(view):
            done = os.preadv(self._file, [view[at : at + CHUNK_BYTES]], start + at)
            if done <= 0:
                raise OSError(f"{self.folder}: the file of offloaded tensors ends at {start + at}, want {start + len(view)}")
            at += done
        return buffer


class InFile:
    """One evicted tensor in a file. Its buffer is kept until it is written: a failed write loses nothing.

    made: the tensor of a buffer, on the device; on_host: in host memory, of the buffer's memory. need: see Spaces.
    """

    by_caller = True  # the thread that executes instructions alone may use it

    def __init__(
        self,
        file: OffloadFile,
        data: memoryview,
        made: Any,
        closed: Any,
        on_host: Any = None,
        need: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        self._file, self._made, self._on_host, self._closed, self._need = file, made, on_host, closed, need
        self._lowered: tuple[mmap.mmap, Any] | None = None  # buffer and tensor for an op in host memory
        self.nbytes = len(data)
        self._reading: Future | None = None
        need(self.nbytes)
        buffer = buffer_of(self.nbytes)
        memoryview(buffer)[: self.nbytes] = data
        self._start = file.take(self.nbytes)
        self._write(buffer)

    def prefetch(self) -> None:
        if not self._unwritten:
            with contextlib.suppress(MemoryError):  # its use asks again
                self._read()

    def tensor(self) -> Any:
        return self._made(self._bytes())

    def host(self) -> Any:
        # One buffer serves all host ops until `used`, which writes it back if it was changed.
        if self._lowered is None:
            self._writing.exception()  # a buffer does not change while it is written
            buffer = self._bytes()
            self._lowered = buffer, self._on_host(buffer)
        return self._lowered[1]

    def used(self, changed: bool) -> None:
        lowered, self._lowered = self._lowered, None
        if changed and lowered is not None:
            self._write(lowered[0])

    def _write(self, buffer: mmap.mmap) -> None:
        self._unwritten = [buffer]  # a list for each write: the end of an earlier one does not clear it
        self._writing = self._file.write(self._start, self._unwritten)

    def _bytes(self) -> mmap.mmap:
        # While it is being written, or if that failed, the buffer itself has the value.
        buffer = next(iter(self._unwritten), None)
        if buffer is None:
            reading, self._reading = self._read(), None
            buffer = reading.result()
        return buffer

    def _read(self) -> Future:
        if self._reading is None:
            self._need(self.nbytes)
            self._reading = self._file.read(self._start, self.nbytes)
        return self._reading

    def close(self) -> None:
        for under_way in (self._writing, self._reading):
            if under_way is not None:
                under_way.exception()
        self._reading = None
        if self._file.give_back(self._start, self.nbytes):
            # The folder's entry goes with the last slot: a later eviction opens a new file.
            self._closed()


def buffer_of(nbytes: int) -> mmap.mmap:
    """Memory for direct I/O. MemoryError if the system has none."""
    # Private, since shared memory counts for no limit of this process. A child does not get it: a page that both have would be
    # copied at a write, and direct I/O under way would go to the child's.
    try:
        buffer = mmap.mmap(-1, _rounded(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"out of memory: an offloaded tensor needs {size(nbytes)}") from error
    buffer.madvise(mmap.MADV_DONTFORK)
    return buffer


def _rounded(nbytes: int) -> int:
    return max(-(-nbytes // ALIGNED_BYTES), 1) * ALIGNED_BYTES


def _check_allowed(folder: str) -> None:
    """PermissionError unless the worker's owner lets files be written in this folder. Its name comes from a client's config."""
    allowed = [os.path.realpath(part) for part in env.get("GT_OFFLOAD").split(":") if part]
    # Real paths: a symbolic link must not lead out of the allowed folders.
    real = os.path.realpath(folder)
    if allowed and not any(real == part or real.startswith(part.rstrip("/") + "/") for part in allowed):
        raise PermissionError(f"offload.path is {folder}, and GT_OFFLOAD of this worker allows {', '.join(allowed)} alone")
    if not allowed and (kind := _in_memory(real)):
        raise PermissionError(
            f"offload.path is {folder}, which is memory ({kind}) that no limit counts; want a folder on a disk, "
            f"or GT_OFFLOAD={folder} of this worker, if its owner means it"
        )


def _in_memory(path: str) -> str:
    """The kind of file system, if a folder is in memory, else "". The system's temporary folder counts as a disk."""
    while path != os.sep and not os.path.isdir(path):  # the folder is made later
        path = os.path.dirname(path)
    with contextlib.suppress(OSError, ValueError):
        device = os.stat(path).st_dev
        if device == os.stat(tempfile.gettempdir()).st_dev:
            return ""
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                mount, _, rest = line.partition(" - ")
                if mount.split()[2] == wanted and rest.split()[0] in IN_MEMORY:
                    return rest.split()[0]
    return ""


def _nameless(folder: str) -> tuple[int, bool]:
    """A file that has no name, and True if it is read and written past the page cache."""
    for direct in (os.O_DIRECT, 0):
        with contextlib.suppress(OSError):
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | direct, 0o600), bool(direct)
    file, path = tempfile.mkstemp(prefix="gt-", dir=folder)
    os.unlink(path)
    log.warning("%s has no direct I/O: offloaded tensors go through the page cache", folder)
    return file, False
