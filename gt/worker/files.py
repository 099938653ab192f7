"""Files that clients lend: this worker reads uploads from them and writes pieces into them, each at its own offsets.

Several workers write one file, each its boxes of a tensor, so a library that writes whole files does not fit. Reads and writes
are positioned (pread, pwrite): a file that shrinks or a full disk is an error of one instruction, and no signal.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod

import numpy as np

from gt.errors import ProtocolError
from gt.ir.layout import Boxes, piece_shape, read_boxes, runs
from gt.wire.arena import WORDS, PeerFile, check_boxes
from gt.wire.messages import ArenaOpened, OfferArena, OfferFile, OpError, Piece, UploadProgress, UseBlock
from gt.wire.process_settings import available_bytes
from gt.worker.engine.base import Engine, Tensor
from gt.worker.process.file_threads import FileThread, FileThreads, moved
from gt.worker.process.memory_budget import Budget
from gt.worker.uploads import UploadBuffers

log = logging.getLogger("gt.worker")

MAX_IO_BYTES = 8 << 20  # of one read or write
SHORT_RUN_BYTES = 4096  # runs of fewer bytes are read together with what is between them
# Copies are written past the page cache, which takes a fifth of the CPU time: the steps beside a save need it
UNCACHED_BYTES = 256 << 10  # pieces from this size on bypass the page cache; a smaller one waits longer than it writes
ALIGNED = mmap.PAGESIZE  # a multiple of every disk's blocks

HOST_SHARE = 0.1  # part of the host's memory for copies that a worker has still to write, or keeps for the next save
PART_BYTES = 1 << 20  # bytes copied at a time before they are written: they fit a core's caches
ANSWER_SECONDS = 10.0  # that the executing thread waits for the next part of a piece, where there is no room for a copy


@dataclass(frozen=True, slots=True)
class FileBlock:
    """One tensor in a file, row-major at `offset`, of which this worker has the boxes. later: see messages.Store."""

    key: int
    arena: int  # the file's number
    file: PeerFile
    offset: int
    shape: tuple[int, ...]
    itemsize: int
    boxes: Boxes
    later: bool
    thread: FileThread | None = None  # that reads and writes it

    @property
    def nbytes(self) -> int:
        """Size of the worker's piece."""
        return prod(piece_shape(self.boxes)) * self.itemsize

    def runs(self) -> Iterator[tuple[int, int]]:
        """Offset in the file and size of each contiguous run of the piece, in the order of the piece."""
        for start, nbytes in runs(self.boxes, self.shape, self.itemsize):
            yield self.offset + start, nbytes

    def write(self, data: memoryview) -> None:
        """Write the piece's bytes. OSError if the disk does not take them."""
        at = 0
        for offset, nbytes in self.runs():
            _write(self.file.fd, data[at : at + nbytes], offset)
            at += nbytes

    def write_uncached(self, data: np.ndarray) -> None:
        """As `write`, past the page cache where the memory is aligned as the file. OSError if the disk does not take them."""
        start, view = self.offset_of_one_run(), data.data
        if start is None or (data.ctypes.data - start) % ALIGNED or self.file.uncached < 0:
            self.write(view)
            return
        # Direct I/O takes whole aligned blocks: the ends before and after them go through the page cache.
        head = min(-start % ALIGNED, len(view))
        middle = head + (len(view) - head) // ALIGNED * ALIGNED
        _write(self.file.fd, view[:head], start)
        written = head + _write_blocks(self.file.uncached, view[head:middle], start + head)
        _write(self.file.fd, view[written:], start + written)

    def offset_of_one_run(self) -> int | None:
        """Offset of the piece in the file, None if it is in several runs or too small to be written past the page cache."""
        if self.nbytes < UNCACHED_BYTES:
            return None
        start, nbytes = next(self.runs())
        return start if nbytes == self.nbytes else None

    def read(self) -> np.ndarray:
        """The piece's bytes. OSError if the file does not have them."""
        # Long runs are read each into its place. Many short ones (a split last dim) are read with the gaps between them.
        first = next(self.runs(), (0, 0))
        if first[1] >= SHORT_RUN_BYTES or first[1] == self.nbytes:
            data = np.empty(self.nbytes, np.uint8)
            view, at = data.data, 0
            for offset, nbytes in self.runs():
                _read(self.file.fd, view[at : at + nbytes], offset)
                at += nbytes
            return data
        return self._read_across()

    def _read_across(self) -> np.ndarray:
        """As `read`, by blocks of leading indices of which all bytes are read."""
        boxes, row = self.boxes, prod(self.shape[1:]) * self.itemsize
        start, stop = min(box[0][0] for box in boxes), max(box[0][1] for box in boxes)
        step = max(1, MAX_IO_BYTES // max(row, 1))
        # The boxes are a product of intervals by dim: `rows` are those of dim 0, `inner` those of the others.
        rows = list(dict.fromkeys((box[0][0], box[0][1]) for box in boxes))
        parts = []
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            block = np.empty((end - begin) * row, np.uint8)
            _read(self.file.fd, block.data, self.offset + begin * row)
            whole = block.view(WORDS[self.itemsize]).reshape(end - begin, *self.shape[1:])
            # The part of each interval of rows that is within this block, counted from its start.
            cut = [(max(low, begin) - begin, min(high, end) - begin) for low, high in rows if max(low, begin) < min(high, end)]
            if cut:
                inner = dict.fromkeys(tuple(map(tuple, box[1:])) for box in boxes)
                parts.append(read_boxes(whole, [(span, *rest) for span in cut for rest in inner]))
        return np.concatenate([part.reshape(-1) for part in parts]).view(np.uint8)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _told(error: Exception) -> str:
    """The reason for which a thread of files gives up, told to its session. An error that no file explains is logged."""
    if isinstance(error, OSError):
        return _reason(error)
    if not isinstance(error, (MemoryError, ValueError, OverflowError)):
        log.error("a file of a client", exc_info=error)
    return str(error) or type(error).__name__


def _write(fd: int, data: memoryview, offset: int) -> None:
    at = 0
    while at < len(data):
        at += os.pwrite(fd, data[at : at + MAX_IO_BYTES], offset + at)
        moved()


def _write_blocks(fd: int, data: memoryview, offset: int) -> int:
    """Write whole blocks past the page cache; their bytes, fewer than wanted if the file system asks for another alignment."""
    at = 0
    while at < len(data) and not at % ALIGNED:
        try:
            at += os.pwrite(fd, data[at : at + MAX_IO_BYTES], offset + at)
            moved()
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            break
    return at


def _read(fd: int, data: memoryview, offset: int) -> None:
    at = 0
    while at < len(data):
        count = os.preadv(fd, [data[at : at + MAX_IO_BYTES]], offset + at)
        if not count:
            raise OSError(
                f"the file ends at byte {offset + at}, want {len(data) - at} bytes more: it was cut after it was opened"
            )
        at += count
        moved()


@dataclass(slots=True)
class PendingWrite:
    """A piece that is written from the memory of its tensor. data: None once that may be another tensor's."""

    block: FileBlock
    data: np.ndarray | None
    seq: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        """Read no more of the memory."""
        with self.lock:
            self.data = None

    def write(self) -> bool:
        """Write the piece part by part, each a copy; False if it was cancelled. OSError if the disk does not take it."""
        block, part = self.block, np.empty(min(PART_BYTES, self.block.nbytes), np.uint8)
        # A copy for each part, made under the lock: `cancel` waits for at most one part, and afterwards the tensor may change.
        at = first = end = 0  # in the piece, of which the bytes from `first` to `end` are in `part`
        for offset, nbytes in block.runs():
            stop = at + nbytes
            while at < stop:
                if at == end:
                    first, end = at, min(at + PART_BYTES, block.nbytes)
                    with self.lock:
                        if self.data is None:
                            return False
                        np.copyto(part[: end - first], self.data[first:end])
                count = min(stop, end) - at
                _write(block.file.fd, part[at - first : at - first + count].data, offset + nbytes - (stop - at))
                at += count
        return True


class WorkerFiles:
    """Files of clients by the dispatcher's key. The I/O thread calls `open`, `block`, `begin_read`, the executing one the rest.

    Neither waits for a file system: threads of each session open, read and write its files, and answer.
    """

    def __init__(self, send: Callable[..., None], engine: Engine, budget: Budget, uploads: UploadBuffers) -> None:
        self._send, self._engine, self._budget, self._uploads = send, engine, budget, uploads
        self.opened: dict[int, PeerFile] = {}
        self.bytes_read = self.bytes_written = 0
        self._spare: dict[int, list[np.ndarray]] = {}  # memory of copies that are written, by size
        self._waiting_bytes = 0  # bytes of copies whose writing has not begun
        self._pending: dict[int, PendingWrite] = {}  # by key of the piece
        self._of: dict[int, FileThread] = {}  # by key, of files that are open or about to be
        self._lock = threading.Lock()
        self.threads = FileThreads(self._spare.clear)
        budget.reclaim = self._spare.clear

    def open(self, owner: OfferArena, message: OfferFile) -> None:
        """Have a file opened, which is answered then. OSError if no thread is left for it, or too many do not come back."""
        thread = self.threads.of(message.owner, message.write)
        with self._lock:
            self._of[message.arena] = thread
        thread.add_file()
        try:
            thread.put(partial(self._open, thread, owner, message), partial(self._refuse, thread, message.arena))
        except OSError:
            thread.no_file()
            self.close(message.arena)
            raise

    def _open(self, thread: FileThread, owner: OfferArena, message: OfferFile) -> None:
        try:
            file = PeerFile(owner, message, thread.close)
        except Exception as error:
            log.info("file %d is not used: %s", message.arena, _told(error))
            self._refuse(thread, message.arena)
            return
        with self._lock:
            if message.arena in self._of:  # else it was closed meanwhile
                self.opened[message.arena] = file
        self._send(ArenaOpened(message.arena, True))

    def _refuse(self, thread: FileThread, key: int) -> None:
        thread.no_file()
        self._send(ArenaOpened(key, False))

    def block(self, message: UseBlock) -> FileBlock:
        """The block of a message; ProtocolError if it is not within its file."""
        file, shape = self.opened[message.arena], tuple(message.shape)
        nbytes = prod(shape) * message.itemsize
        fits = message.itemsize in WORDS and min(shape, default=0) >= 0 and 0 <= message.offset <= file.nbytes - nbytes
        if not fits or file.writes != message.write:
            raise ProtocolError(f"a tensor {list(shape)} at {message.offset} is not within a file of {file.nbytes} bytes")
        boxes, thread, size = check_boxes(message.boxes, shape), self._of[message.arena], message.itemsize
        return FileBlock(message.key, message.arena, file, message.offset, shape, size, boxes, message.later, thread)

    def begin_read(self, block: FileBlock) -> None:
        """Have a block read: its bytes are an upload then, which is awaited as one that is sent in messages."""
        assert block.thread is not None
        self._uploads.expect(block.key)
        block.thread.put(partial(self._read, block))

    def _read(self, block: FileBlock) -> None:
        try:
            if self._uploads.expects(block.key):
                self._uploads.admit(block.nbytes)
                self._uploads.deliver(block.key, block.read())
                with self._lock:
                    self.bytes_read += block.nbytes
        except Exception as error:
            _told(error)
            self._uploads.fail(block.key, error)
        self._send(UploadProgress(block.key, block.nbytes))

    # ---- executing thread

    def write(self, block: FileBlock, source: Tensor, seq: int) -> None:
        """Have a copy of a tensor's values written, and the piece answered for. OSError if that fails before it returns."""
        nbytes = self._engine.spec(source).nbytes
        if nbytes != block.nbytes or not nbytes:  # the dispatcher compares them too
            self._send(Piece(block.key, nbytes, nbytes))
            return
        assert block.thread is not None
        packed = self._engine.packed(source)
        data = np.frombuffer(self._engine.view(packed), np.uint8)
        # Three ways. With room: copy now, write later, and the step goes on. Not `later`: write from the tensor, which nobody
        # changes meanwhile. Else no room: wait here, part by part.
        if block.later and self._has_room(nbytes):
            copied = data if packed is not source else self._copy(data, block)
            with self._lock:
                self._waiting_bytes += nbytes
            block.thread.put(partial(self._write_copy, block, copied, seq), partial(self._begun, nbytes))
            return
        pending = PendingWrite(block, data, seq)
        if not block.later:  # the dispatcher sends nothing that might change the tensor before it is answered for
            self._pending[block.key] = pending
            block.thread.put(partial(self._write, pending))
            return
        try:
            block.thread.call(pending.write, ANSWER_SECONDS)
        except OSError as error:
            pending.cancel()
            raise OSError(_reason(error)) from error
        self._answer(block)

    def _has_room(self, nbytes: int) -> bool:
        """True if a copy of so many bytes fits into the host's memory; without one, the piece is waited for."""
        if self._budget.bounded:
            return self._budget.fits(nbytes)
        return self._waiting_bytes + nbytes < HOST_SHARE * available_bytes()

    def _copy(self, data: np.ndarray, block: FileBlock) -> np.ndarray:
        """A copy, aligned as its place in the file, in the memory of an earlier one if there is one of this size."""
        spares, start = self._spare.get(data.nbytes), block.offset_of_one_run()
        room = data.nbytes + (ALIGNED if data.nbytes >= UNCACHED_BYTES else 0)
        try:
            memory = spares.pop() if spares else np.empty(room, np.uint8)
        except IndexError:  # the writer has just given up all
            memory = np.empty(room, np.uint8)
        # Memory and file offset must be equal modulo a block for direct I/O: shift the copy within its memory.
        first = 0 if start is None else (start - memory.ctypes.data) % ALIGNED
        copied = memory[first : first + data.nbytes]
        np.copyto(copied, data)
        return copied

    def forget_write(self, key: int) -> None:
        """Nobody waits for this piece: instructions that follow may change its tensor, or free it."""
        pending = self._pending.pop(key, None)
        if pending is not None:
            pending.cancel()

    # ---- threads of files

    def _begun(self, nbytes: int) -> None:
        """A copy is no longer one of those that wait."""
        with self._lock:
            self._waiting_bytes -= nbytes

    def _write(self, pending: PendingWrite) -> None:
        try:
            written = pending.write()
        except Exception as error:
            self._fail(pending.seq, error)
            return
        finally:
            self.forget_write(pending.block.key)
        if written:
            self._answer(pending.block)

    def _write_copy(self, block: FileBlock, data: np.ndarray, seq: int) -> None:
        """Write a copy, beside the executing thread, and answer for the piece."""
        if block.later and block.thread is not None:
            block.thread.be_nice()
        self._begun(block.nbytes)
        try:
            block.write_uncached(data)
            if isinstance(data.base, np.ndarray):  # else it is memory of the engine
                self._keep(data)
        except Exception as error:
            self._fail(seq, error)
            return
        self._answer(block)

    def _fail(self, seq: int, error: Exception) -> None:
        """A piece cannot be written."""
        self._send(OpError(seq, "memory" if isinstance(error, MemoryError) else "op", _told(error)))

    def _answer(self, block: FileBlock) -> None:
        with self._lock:
            self.bytes_written += block.nbytes
        self._send(Piece(block.key, block.nbytes, block.nbytes), (), True)

    def _keep(self, data: np.ndarray) -> None:
        """Keep a written copy's memory for the next save, in bounds; it is given up where an op needs it."""
        kept = sum(nbytes * len(spares) for nbytes, spares in list(self._spare.items())) + data.nbytes
        if kept < HOST_SHARE * available_bytes() and self._budget.spares(kept):
            self._spare.setdefault(data.nbytes, []).append(data.base)

    # ---- the end, by the executing thread

    def close(self, key: int) -> None:
        """Take no new blocks of this file. It is closed with the last of its blocks, which may be in use."""
        with self._lock:
            self._of.pop(key, None)
            file = self.opened.pop(key, None)
        del file

    def leave(self, owner: int) -> None:
        """The session of this arena has ended, or proves its files no more."""
        ended = self.threads.leave(owner)
        with self._lock:
            left = [key for key, thread in self._of.items() if thread in ended]
        for key in left:
            self.close(key)

    def end(self) -> None:
        """The worker ends: read and write no more."""
        for key in list(self._pending):
            self.forget_write(key)
        with self._lock:
            files, self.opened = self.opened, {}
            self._of.clear()
        del files
        self._spare.clear()
        self.threads.end()
