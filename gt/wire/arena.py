"""Arenas: memory that a client shares with the workers of its host, so that uploads and fetched values cross no socket.

The client owns an arena, because it copies a tensor before anybody knows which workers will need which part. An arena is
anonymous memory (memfd) of mode 0600. It has no name in a file system, so nothing is left when a process is killed. A worker
opens it through /proc/PID/fd/FD, two numbers that the client states, and believes none of the client's words:

- Path: only numbers enter it, of a process of the worker's own user. It is first opened with O_PATH, which changes no file.
- Kind: it must be memory of this name, of the worker's own user, with no rights for others. The name is read first, since a
  file system might never answer.
- Proof: it must begin with the proof that the dispatcher derives from the client's nonce and session. So a client on another
  host, in another pid namespace or of another user keeps using the socket. A proof opens no arena for another session.
- Size: seals forbid any change of size, and usual pages are allocated by a call that may fail: no access ends in SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from math import prod

import numpy as np

from gt.errors import ProtocolError
from gt.ir.layout import Boxes
from gt.wire import liveness
from gt.wire.messages import OfferArena, OfferFile

NAME = "gt-arena"  # of the memory, as /proc shows it
HEADER_BYTES = 4096  # before the first block; the nonce is at its start
BLOCK_BYTES = 4096  # blocks begin at multiples of this
PAGE_BYTES = 2 << 20  # a huge page; an arena is a multiple of it
MAX_ARENA_BYTES = 1 << 40
NONCE_BYTES = 16
WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # a NumPy type of that size, whatever the element means
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# MADV_POPULATE_READ and _WRITE of Linux 5.14, which map or allocate pages, or fail with an error instead of a signal
_POPULATE_READ, _POPULATE_WRITE = 22, 23
_OFFSET_BITS = 40


def owner_proof(nonce: str, session: int) -> str:
    """The first bytes of an arena, in hex: only who has the nonce can make them, and for this session alone."""
    return hashlib.blake2b(f"{session}:{nonce}".encode(), digest_size=NONCE_BYTES).hexdigest()


def place(arena: int, offset: int) -> int:
    """A block's place as one number, 0 or more."""
    return arena << _OFFSET_BITS | offset


def parse_place(number: int) -> tuple[int, int]:
    """Arena and offset of a place."""
    return number >> _OFFSET_BITS, number & ((1 << _OFFSET_BITS) - 1)


def upload_index(place: int) -> int:
    """The value of a gt.upload op whose bytes are at this place; the inverse of itself. 0 or more is a frame, -1 no place."""
    return -2 - place


class OwnArena:
    """An arena of this process. OSError if there is no memory for it."""

    def __init__(self, number: int, nbytes: int, session: int) -> None:
        """nbytes: of the blocks that it is to hold. session: number of the session that it belongs to."""
        self.number = number
        self.nbytes = -(-(HEADER_BYTES + nbytes) // PAGE_BYTES) * PAGE_BYTES
        self._fd = sealed_memory(NAME, self.nbytes)
        try:
            self._map = mmap.mmap(self._fd, self.nbytes)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
            self._nonce = os.urandom(NONCE_BYTES).hex()
            self._populated = 0
            self.populate(HEADER_BYTES)
            self._map[:NONCE_BYTES] = bytes.fromhex(owner_proof(self._nonce, session))
            self.bytes = np.frombuffer(self._map, np.uint8)
        except BaseException:
            os.close(self._fd)
            raise

    def populate(self, end: int) -> None:
        """Allocate the pages up to byte `end`; OSError, and no signal at a later access, if there is no memory."""
        # Blocks are given out from the front, so pages are allocated as far as they are needed, and never twice.
        end = min(-(-end // PAGE_BYTES) * PAGE_BYTES, self.nbytes)
        if end <= self._populated:
            return
        try:
            self._map.madvise(_POPULATE_WRITE, self._populated, end - self._populated)
        except (OSError, ValueError):  # also an older kernel
            os.posix_fallocate(self._fd, self._populated, end - self._populated)
        self._populated = end

    def offer(self) -> OfferArena:
        """The message by which workers find it."""
        return OfferArena(self.number, os.getpid(), self._fd, self.nbytes, self._nonce, liveness.home())

    def close(self) -> None:
        """Nobody opens it any more. Its memory is freed with the last array of it, here and in workers.

        An error that somebody keeps holds this object by its frames, so the mapping does not wait for the object's end.
        """
        os.close(self._fd)
        self.bytes = np.empty(0, np.uint8)
        del self._map


class PeerArena:
    """An arena of a client, mapped by a worker. OSError unless it is proved to be the client's, see above."""

    def __init__(self, offer: OfferArena) -> None:
        self.offer, self.nbytes = offer, offer.nbytes
        with _process(offer) as process:
            fd = _open_proved(offer, process)
        try:
            self._map = mmap.mmap(fd, self.nbytes)
        finally:
            os.close(fd)
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self._populated = bytearray(-(-self.nbytes // PAGE_BYTES))  # by page: 1 if it is mapped

    def populate(self, start: int, end: int) -> None:
        """Map these bytes' pages at once, which takes a tenth of the time of as many page faults. MemoryError without memory.

        No other pages: the client may have allocated none of them, and mapping a page allocates it.
        """
        # One madvise for the pages of a block; those that are mapped already cost little.
        pages = slice(start // PAGE_BYTES, -(-end // PAGE_BYTES))
        if all(self._populated[pages]):
            return
        first = pages.start * PAGE_BYTES
        try:
            self._map.madvise(_POPULATE_READ, first, min(pages.stop * PAGE_BYTES, self.nbytes) - first)
        except OSError as error:
            if error.errno != errno.EINVAL:  # which an older kernel answers
                raise MemoryError(f"no memory for bytes {start} to {end} of an arena: {error}") from None
        self._populated[pages] = b"\1" * (pages.stop - pages.start)


class PeerFile:
    """A file that a client lends, opened by a worker. OSError unless a regular file of a process that an arena proves.

    No path is sent: the file is a descriptor of that process.

    The process has the worker's user, so the worker gets no rights that the process lacks. Its open descriptor is what is
    lent, whatever the file's name leads to by now.
    """

    def __init__(self, owner: OfferArena, offer: OfferFile, close: Callable[[Iterable[int]], None] | None = None) -> None:
        """close: closes its descriptors, at its end; a file system may keep whoever does so waiting, as it may here."""
        self.nbytes, self.writes, self.fd = offer.nbytes, offer.write, -1
        self._close = close or _close
        self._uncached: int | None = None
        with _process(owner) as process:
            os.close(_open_proved(owner, process))
            descriptor = os.open(f"fd/{offer.fd:d}", os.O_PATH | os.O_CLOEXEC, dir_fd=process)
        # An O_PATH descriptor names the file without opening it: a device or a pipe would act on, or wait at, an open.
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or about.st_size != offer.nbytes:
                raise OSError(
                    f"descriptor {offer.fd} is not a file of {offer.nbytes} bytes: mode {about.st_mode:o}, size {about.st_size}"
                )
            if offer.write and about.st_uid != os.geteuid():
                raise OSError(f"the file belongs to user {about.st_uid}, want {os.geteuid()} to write it")
            # Opened by the descriptor in hand, whose kind was checked: a path could lead elsewhere by now. O_NONBLOCK and
            # O_NOCTTY matter only if it is no regular file after all.
            how = os.O_WRONLY if offer.write else os.O_RDONLY
            self.fd = os.open(f"/proc/self/fd/{descriptor}", how | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
        finally:
            os.close(descriptor)

    @property
    def uncached(self) -> int:
        """A descriptor that writes past the page cache, -1 where the file system has none. For one thread."""
        if self._uncached is None:
            try:
                self._uncached = os.open(f"/proc/self/fd/{self.fd}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError:
                self._uncached = -1
        return self._uncached

    def close(self) -> None:
        """Read and write no more."""
        open_ones = [fd for fd in (self.fd, self._uncached) if fd is not None and fd >= 0]
        self.fd = self._uncached = -1
        if open_ones:
            self._close(open_ones)

    def __del__(self) -> None:
        self.close()


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@contextlib.contextmanager
def _process(offer: OfferArena) -> Iterator[int]:
    """The directory in /proc of an offer's process: it never becomes another process's with the same number."""
    if not offer.home or offer.home != liveness.home():
        raise OSError(f"the arena's owner is in {offer.home!r:.80}, this process in {liveness.home()!r}")
    process = os.open(f"/proc/{offer.pid:d}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if (owner := os.fstat(process).st_uid) != os.geteuid():
            raise OSError(f"process {offer.pid} is of user {owner}, want own user {os.geteuid()}")
        yield process
    finally:
        os.close(process)


def _open_proved(offer: OfferArena, process: int) -> int:
    """A descriptor of the arena that is offered, once it is proved to be this process's and the client's."""
    # Any process of this user could make such memory, but only the client knows the proof.
    fd = open_memory(process, offer.fd, NAME, offer.nbytes)
    try:
        if not HEADER_BYTES < offer.nbytes <= MAX_ARENA_BYTES:
            raise OSError(f"the arena has {offer.nbytes} bytes, at most {MAX_ARENA_BYTES} are taken")
        if not hmac.compare_digest(os.pread(fd, NONCE_BYTES, 0).hex().encode(), offer.nonce.encode("utf-8", "replace")):
            raise OSError("the arena does not begin with the proof that it is its owner's")
    except BaseException:
        os.close(fd)
        raise
    return fd


def sealed_memory(name: str, nbytes: int) -> int:
    """A descriptor of anonymous memory, whose size is sealed: no one can shrink it under a reader, whose access would end in
    SIGBUS.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_memory(process: int, number: int, name: str, nbytes: int) -> int:
    """A descriptor of another process's `sealed_memory`; OSError for anything else, which is not opened.

    process: its directory in /proc. number: of its descriptor, which may name anything.
    """
    # 1. Its name, before it is opened even with O_PATH: a network's file system may ask its server then.
    if not os.readlink(f"fd/{number:d}", dir_fd=process).startswith(f"/memfd:{name} "):
        raise OSError(f"descriptor {number} of the process is not {name}")

    # 2. The descriptor may have become another file since, so the name is read again of the one in hand. Then kind and owner.
    descriptor = os.open(f"fd/{number:d}", os.O_PATH | os.O_CLOEXEC, dir_fd=process)
    try:
        own = f"/proc/self/fd/{descriptor}"
        named = os.readlink(own).startswith(f"/memfd:{name} ")
        about = os.fstat(descriptor) if named else None
        if about is None or not stat.S_ISREG(about.st_mode):
            raise OSError(f"descriptor {number} of the process is not {name}")
        if about.st_uid != os.geteuid() or about.st_mode & 0o177:
            raise OSError(f"{name} of user {about.st_uid}, mode {about.st_mode & 0o777:o}: want own user's, mode 600")
        fd = os.open(own, os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(descriptor)

    # 3. Open: pages and size.
    try:
        if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
            raise OSError(f"{name} has huge pages, of which the system may have none left at an access")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError(f"the size of {name} is not sealed")
        if (size := os.fstat(fd).st_size) != nbytes:
            raise OSError(f"{name} has {size} bytes, its owner says {nbytes}")
    except BaseException:
        os.close(fd)
        raise
    return fd


def tensor(memory: np.ndarray, offset: int, shape: tuple[int, ...], itemsize: int) -> np.ndarray:
    """The row-major tensor at this offset of an arena's bytes, as words of its element size; ProtocolError outside of it."""
    # Offsets are another process's word: checked here, once, for every access.
    nbytes = prod(shape) * itemsize
    if itemsize not in WORDS or min(shape, default=0) < 0 or not HEADER_BYTES <= offset <= len(memory) - nbytes:
        raise ProtocolError(f"a tensor {list(shape)} of {itemsize} bytes each at {offset} is not within {len(memory)} bytes")
    return memory[offset : offset + nbytes].view(WORDS[itemsize]).reshape(shape)


def check_boxes(rows: Boxes, shape: tuple[int, ...]) -> Boxes:
    """The boxes of a message; ProtocolError unless they are boxes of a tensor of this shape."""
    try:
        fits = bool(rows) and all(
            len(box) == len(shape) and all(0 <= start <= stop <= n for (start, stop), n in zip(box, shape)) for box in rows
        )
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ProtocolError(f"{rows!r:.80} are not boxes of a tensor of shape {shape}")
    return rows
