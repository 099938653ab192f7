"""Files that clients lend: this worker reads uploads from them and writes pieces into them, each at its own offsets.

Several workers write one file, each its boxes of a tensor, so a library that writes whole files does not fit. Reads and writes
are positioned (pread, pwrite): a file that shrinks or a full disk is an error of one instruction, and no signal.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod

import numpy as np

from gt.errors import ProtocolError
from gt.ir.layout import Boxes, piece_shape, read_boxes, runs
from gt.ir.spec import Spec
from gt.wire.arena import WORDS, PeerFile, check_boxes
from gt.wire.messages import OpError, Piece, UseBlock
from gt.worker.engine.base import Engine, Tensor
from gt.worker.process.memory_budget import Budget, available

log = logging.getLogger("gt.worker")

MAX_IO_BYTES = 8 << 20  # of one read or write
SHORT_RUN_BYTES = 4096  # runs of fewer bytes are read together with what is between them
# Copies are written past the page cache, which takes a fifth of the CPU time: the steps beside a save need it
UNCACHED_BYTES = 256 << 10  # of a piece, at least: for a smaller one the disk's answer takes longer than the write
ALIGNED = mmap.PAGESIZE  # a multiple of every disk's blocks

HOST_SHARE = 0.1  # of the host's memory, at most in copies that a worker has still to write, or keeps for the next save
# Added to the writing thread's: steps matter more. Not the most: a thread that waits for a core may hold the interpreter's lock
WRITER_NICENESS = 5
SPARE_SECONDS = 600.0  # memory of copies is kept so long for the next save, which then takes no page faults


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
        rows = list(dict.fromkeys((box[0][0], box[0][1]) for box in boxes))
        parts = []
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            block = np.empty((end - begin) * row, np.uint8)
            _read(self.file.fd, block.data, self.offset + begin * row)
            whole = block.view(WORDS[self.itemsize]).reshape(end - begin, *self.shape[1:])
            cut = [(max(a, begin) - begin, min(b, end) - begin) for a, b in rows if max(a, begin) < min(b, end)]
            if cut:
                inner = dict.fromkeys(tuple(map(tuple, box[1:])) for box in boxes)
                parts.append(read_boxes(whole, [(span, *rest) for span in cut for rest in inner]))
        return np.concatenate([part.reshape(-1) for part in parts]).view(np.uint8)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _write(fd: int, data: memoryview, offset: int) -> None:
    at = 0
    while at < len(data):
        at += os.pwrite(fd, data[at : at + MAX_IO_BYTES], offset + at)


def _write_blocks(fd: int, data: memoryview, offset: int) -> int:
    """Write whole blocks past the page cache; their bytes, fewer than wanted if the file system asks for another alignment."""
    at = 0
    while at < len(data) and not at % ALIGNED:
        try:
            at += os.pwrite(fd, data[at : at + MAX_IO_BYTES], offset + at)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            break
    return at


def _read(fd: int, data: memoryview, offset: int) -> None:
    at = 0
    while at < len(data):
        got = os.preadv(fd, [data[at : at + MAX_IO_BYTES]], offset + at)
        if not got:
            raise OSError(
                f"the file ends at byte {offset + at}, want {len(data) - at} bytes more: it was cut after it was opened"
            )
        at += got


@dataclass
class WorkerFiles:
    """Files of clients by the dispatcher's key. The I/O thread calls `open` and `block`, the executing one the rest."""

    send: Callable[..., None]
    engine: Engine
    budget: Budget
    opened: dict[int, PeerFile] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0
    _copied: int = 0  # bytes of pieces, by the executing thread
    _copies_written: int = 0  # bytes of these, by the thread that writes them
    _spare: dict[int, list[np.ndarray]] = field(default_factory=dict)  # memory of copies that are written, by size
    _writer: threading.Thread | None = None
    _queue: queue.SimpleQueue[tuple[FileBlock, np.ndarray, int] | None] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.budget.reclaim = self._spare.clear

    def open(self, key: int, file: PeerFile) -> None:
        """Read or write this file from now on."""
        self.opened[key] = file

    def block(self, message: UseBlock) -> FileBlock:
        """The block of a message; ProtocolError if it is not within its file."""
        file, shape = self.opened[message.arena], tuple(message.shape)
        nbytes = prod(shape) * message.itemsize
        fits = message.itemsize in WORDS and min(shape, default=0) >= 0 and 0 <= message.offset <= file.nbytes - nbytes
        if not fits or file.writes != message.write:
            raise ProtocolError(f"a tensor {list(shape)} at {message.offset} is not within a file of {file.nbytes} bytes")
        boxes = check_boxes(message.boxes, shape)
        return FileBlock(message.key, message.arena, file, message.offset, shape, message.itemsize, boxes, message.later)

    # ---- executing thread

    def read(self, block: FileBlock, spec: Spec) -> Tensor:
        """A tensor of the block's values."""
        if block.nbytes != spec.nbytes:
            raise ValueError(f"{block.nbytes} bytes are in the file for {spec.text()}, want {spec.nbytes}")
        self.budget.need(spec.nbytes)
        self.budget.hold(spec.nbytes)
        data = block.read()
        self.bytes_read += block.nbytes
        return self.engine.upload(data, spec)

    def write(self, block: FileBlock, source: Tensor, seq: int) -> None:
        """Write a tensor's values, now or later, and answer for the piece. OSError if they cannot be written now."""
        nbytes = self.engine.spec(source).nbytes
        if nbytes == block.nbytes > 0:  # the dispatcher compares them too
            packed = self.engine.packed(source)
            data = np.frombuffer(self.engine.view(packed), np.uint8)
            if block.later and self._has_room(nbytes):
                self._begin_writer()
                self._copied += nbytes
                self._queue.put((block, data if packed is not source else self._copy(data, block), seq))
                return
            try:
                block.write(data.data)
            except OSError as error:
                raise OSError(_reason(error)) from error
            self.bytes_written += nbytes
        self.send(Piece(block.key, nbytes, nbytes))

    def _has_room(self, nbytes: int) -> bool:
        """True if a copy of so many bytes fits into the host's memory; without one they are written at once."""
        if self.budget.bounded:
            return self.budget.fits(nbytes)
        return self._copied - self._copies_written + nbytes < HOST_SHARE * available()

    def _copy(self, data: np.ndarray, block: FileBlock) -> np.ndarray:
        """A copy, aligned as its place in the file, in the memory of an earlier one if there is one of this size."""
        spares, start = self._spare.get(data.nbytes), block.offset_of_one_run()
        room = data.nbytes + (ALIGNED if data.nbytes >= UNCACHED_BYTES else 0)
        try:
            memory = spares.pop() if spares else np.empty(room, np.uint8)
        except IndexError:  # the writer has just given up all
            memory = np.empty(room, np.uint8)
        first = 0 if start is None else (start - memory.ctypes.data) % ALIGNED
        copied = memory[first : first + data.nbytes]
        np.copyto(copied, data)
        return copied

    def _keep(self, data: np.ndarray) -> None:
        """Keep a written copy's memory for the next save, in bounds; it is given up where an op needs it."""
        kept = sum(nbytes * len(spares) for nbytes, spares in list(self._spare.items())) + data.nbytes
        if kept < HOST_SHARE * available() and self.budget.spares(kept):
            self._spare.setdefault(data.nbytes, []).append(data.base)

    def _next_to_write(self) -> tuple[FileBlock, np.ndarray, int] | None:
        try:
            return self._queue.get(timeout=SPARE_SECONDS)
        except queue.Empty:
            self._spare.clear()
            return self._queue.get()

    def _begin_writer(self) -> None:
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_queued, name="gt-worker-files", daemon=True)
            self._writer.start()

    def _write_queued(self) -> None:
        """Write copies in their order, beside the executing thread."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + WRITER_NICENESS)
        while (item := self._next_to_write()) is not None:
            block, data, seq = item
            del item
            self._copies_written += block.nbytes
            try:
                block.write_uncached(data)
            except OSError as error:
                self.send(OpError(seq, "op", _reason(error)))
                continue
            if isinstance(data.base, np.ndarray):  # else it is memory of the engine
                self._keep(data)
            del data  # before the next one is awaited
            self.bytes_written += block.nbytes
            self.send(Piece(block.key, block.nbytes, block.nbytes), (), True)
            del block  # its file may be closed with it

    def close(self, key: int) -> None:
        """Take no new blocks of this file. It is closed with the last of its blocks, which may be in use."""
        self.opened.pop(key, None)

    def end(self) -> None:
        """The worker ends: write no more."""
        if self._writer is not None:
            self._queue.put(None)
            self._writer.join()
            self._writer = None
        self._spare.clear()
        self.opened.clear()
