"""Host copies of tensors: regions of arrays that are uploaded, and pieces from which fetched tensors are assembled or stored.

Boxes are of the global tensor. A message carries a worker's local tensor, row-major, which holds the boxes in order. NumPy
only, and no dtypes: an element is a number of bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np

from gt.client.reports import progress
from gt.errors import ProtocolError
from gt.ir.layout import Boxes, piece_shape, read_boxes, runs, write_boxes
from gt.wire.arena import WORDS, check_boxes
from gt.wire.messages import CHUNK

Frames = Iterator[
    tuple[int, int, list[memoryview]]
]  # messages of a region: offset, total bytes and frames of each; one message at least

LONG_COPY_BYTES, PART_BYTES = 256 << 20, 64 << 20  # a copy from this size on may take a second and is done in parts


def copy(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Copy an array into another of its shape and dtype, which is returned; a long copy shows a bar on a terminal."""
    if source.nbytes < LONG_COPY_BYTES or not source.ndim:
        np.copyto(target, source)
        return target
    rows = max(1, len(source) * PART_BYTES // source.nbytes)
    with progress.bar("copying a tensor for its upload", source.nbytes) as tick:
        for at in range(0, len(source), rows):
            np.copyto(target[at : at + rows], source[at : at + rows])
            tick(source[at : at + rows].nbytes)
    return target


def region_frames(array: np.ndarray, rows: Boxes) -> tuple[int, Frames]:
    """Bytes of the local tensor of these boxes, and its frames. A region that is not contiguous is copied with the first."""
    boxes = check_boxes(rows, array.shape)

    def cut() -> Frames:
        piece = read_boxes(array, boxes)
        flat = memoryview(piece.reshape(-1).view(np.uint8)) if piece.nbytes else memoryview(b"")
        for offset in range(0, max(len(flat), 1), CHUNK):
            yield offset, len(flat), [flat[offset : offset + CHUNK]] if len(flat) else []

    return prod(piece_shape(boxes)) * array.itemsize, cut()


def file_frames(fd: int, start: int, shape: tuple[int, ...], itemsize: int, rows: Boxes) -> tuple[int, Frames]:
    """As `region_frames`, of a tensor in a file at `start`. Each frame is read when its turn comes, and may be an OSError."""
    boxes, file = check_boxes(rows, shape), _OwnFile(fd)
    total = prod(piece_shape(boxes)) * itemsize

    def read() -> Frames:
        parts, place, room = runs(boxes, shape, itemsize), 0, 0
        for offset in range(0, max(total, 1), CHUNK):
            # Runs are contiguous bytes of the region in the file; one may begin in a frame and end in the next
            data = memoryview(bytearray(min(CHUNK, total - offset)))
            at = 0
            while at < len(data):
                if not room:
                    place, room = next(parts)
                count = os.preadv(file.fd, [data[at : at + room]], start + place)
                if not count:
                    raise OSError(f"the file ends at byte {start + place}: it was cut after it was opened")
                at, place, room = at + count, place + count, room - count
            yield offset, total, [data] if len(data) else []

    return total, read()


class Assembly:
    """A tensor of `shape` that is assembled from pieces [key, boxes]. Frames of pieces are received in any order."""

    def __init__(self, shape: tuple[int, ...], itemsize: int, pieces: list) -> None:
        self.data = np.empty(prod(shape) * itemsize, np.uint8)
        # Elements are words of their size: boxes are copied without a dtype
        whole = self.data.view(WORDS[itemsize]).reshape(shape)
        self._pieces: Mapping[int, _Piece | _StoredPiece]
        self._pieces = {key: _Piece(whole, check_boxes(rows, shape)) for key, rows in pieces}

    @property
    def keys(self) -> list[int]:
        return list(self._pieces)

    @property
    def complete(self) -> bool:
        return all(piece.left == 0 for piece in self._pieces.values())

    def add(self, key: int, offset: int, total: int, data: Any) -> None:
        """Add one frame of a piece; data is None where total is 0. ProtocolError for bytes that are not the piece's."""
        self._pieces[key].add(offset, total, data)


class FileAssembly(Assembly):
    """A tensor of `nbytes` bytes that is assembled in a file at `start`: no more of it than a frame is in memory."""

    def __init__(self, fd: int, start: int, nbytes: int, shape: tuple[int, ...], itemsize: int, pieces: list) -> None:
        if nbytes != prod(shape) * itemsize:
            raise ProtocolError(f"Value.shape is {list(shape)}, want a value of {nbytes} bytes")
        self.data, file = np.empty(0, np.uint8), _OwnFile(fd)
        self._pieces = {key: _StoredPiece(file, start, check_boxes(rows, shape), shape, itemsize) for key, rows in pieces}


class _Piece:
    """One piece. It is written in place if its box is contiguous, otherwise collected first and copied at the end."""

    def __init__(self, whole: np.ndarray, rows: Boxes) -> None:
        self._whole, self._rows = whole, rows
        first = (*(slice(start, stop) for start, stop in rows[0]), ...)  # the ellipsis keeps a 0-dim result an array
        run = whole[first]
        # As pieces split along dim 0 are: their frames are copied once, into the result
        self._direct = len(rows) == 1 and run.flags.c_contiguous
        self._local = run if self._direct else np.empty(piece_shape(rows), whole.dtype)
        self._bytes = self._local.reshape(-1).view(np.uint8)
        self.left = self._bytes.nbytes

    def add(self, offset: int, total: int, data: Any) -> None:
        size = 0 if data is None else len(data)
        # The bytes are a worker's, and come through the server: no offset of theirs may lead outside of the piece
        if total != self._bytes.nbytes or not 0 <= offset <= total - size or size > self.left:
            raise ProtocolError(
                f"Piece has {size} bytes at offset {offset} of {total}, want a frame of a piece of {self._bytes.nbytes} bytes"
            )
        if size:
            self._bytes[offset : offset + size] = np.frombuffer(data, np.uint8)
        self.left -= size
        if self.left == 0 and not self._direct:
            write_boxes(self._whole, self._rows, self._local)


Into = Callable[[tuple[int, ...], int, list], Assembly]  # (shape of a value, bytes of an element, pieces) -> Assembly


class _OwnFile:
    """A descriptor of its own of an open file: a late frame is of no other file that has the number by then."""

    def __init__(self, fd: int) -> None:
        self.fd = os.dup(fd)

    def __del__(self) -> None:
        os.close(self.fd)


class _StoredPiece:
    """One piece in a file, whose frames are received in order. OSError if the disk does not take one."""

    def __init__(self, file: _OwnFile, start: int, rows: Boxes, shape: tuple[int, ...], itemsize: int) -> None:
        self._file, self._start, self._runs = file, start, runs(rows, shape, itemsize)
        self._total = self.left = prod(piece_shape(rows)) * itemsize
        self._place, self._room = 0, 0  # in the run that has begun

    def add(self, offset: int, total: int, data: Any) -> None:
        size = 0 if data is None else len(data)
        # In order, as a run goes on where the last frame ended
        if total != self._total or offset != total - self.left or size > self.left:
            raise ProtocolError(
                f"Piece has {size} bytes at offset {offset} of {total}, want byte {self._total - self.left} of {self._total}"
            )
        at = 0
        while at < size:
            if not self._room:
                self._place, self._room = next(self._runs)
            step = min(size - at, self._room)
            write(self._file.fd, memoryview(data)[at : at + step], self._start + self._place)
            at, self._place, self._room = at + step, self._place + step, self._room - step
        self.left -= size


def write(fd: int, data: memoryview, offset: int) -> None:
    """Write all of the bytes at an offset of a file. OSError if the disk does not take them."""
    at = 0
    while at < len(data):
        at += os.pwrite(fd, data[at:], offset + at)
