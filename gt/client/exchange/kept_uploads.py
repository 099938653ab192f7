"""Values that wait for their upload: copies in shared memory or in this process, and tensors in files.

The server asks for the bytes that workers do not read by themselves, and releases a value when nobody will read it any more.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gt.client.exchange import host_buffers
from gt.client.exchange.arenas import ArenaBlock, ClientArenas
from gt.client.exchange.host_buffers import Frames
from gt.client.reports import progress
from gt.errors import ProtocolError
from gt.ir.layout import Boxes
from gt.wire.arena import upload_index
from gt.wire.messages import CHUNK, UNREADABLE, UploadChunk, UploadRequest

log = logging.getLogger("gt.client")

LONG_UPLOAD_BYTES = 16 << 20  # uploads from this size on may take a second
NO_PLACE = -1  # value of a gt.upload op whose bytes are in no arena


class FileTensor(Protocol):
    """A tensor in a file of this process, for an upload."""

    @property
    def place(self) -> int:
        """In a file that workers read; -1 if they do not."""

    def region(self, boxes: Boxes) -> tuple[int, Frames]:
        """Bytes of the boxes, and their frames, each read when its turn comes. OSError from a file that was cut since."""

    def release(self) -> None:
        """Nobody reads it any more. Called once, by any thread."""


@dataclass(slots=True)
class _Unsent:
    """A region of which frames are left to send."""

    tensor: int
    total: int
    frames: Frames
    sent: int = 0


class KeptUploads:
    """The values of one session. send: a message with its frames to the server."""

    def __init__(self, arenas: ClientArenas, send: Callable[[UploadChunk, list], None]) -> None:
        self._arenas, self._send = arenas, send
        self.copies: dict[int, np.ndarray] = {}  # by tensor
        self._in_files: dict[int, FileTensor] = {}  # by tensor
        self._blocks: dict[int, ArenaBlock] = {}  # by tensor: the block that its copy is in, if any
        self._uploading: dict[int, _Unsent] = {}  # by key
        self._unreadable: set[int] = set()  # keys of regions that ended with an error
        self._sent: Counter[int] = Counter()  # bytes in messages so far, by tensor

    @property
    def in_arenas(self) -> bool:
        """True if workers have still to read a copy from shared memory."""
        return bool(self._blocks)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that workers have still to get, as far as this process knows: of several that get them, the first counts."""
        return sum(max(array.nbytes - self._sent[tensor], 0) for tensor, array in list(self.copies.items()))

    @property
    def may_take_long(self) -> bool:
        return bool(self.copies) and self.waiting_bytes >= LONG_UPLOAD_BYTES

    @contextmanager
    def bar(self) -> Iterator[progress.Tick]:
        """Around a wait, which calls the yielded function now and then: a bar of the bytes that are waiting."""
        left = self.waiting_bytes
        with progress.bar("uploading", left) as tick:

            def look(_: int) -> None:
                nonlocal left
                now = min(self.waiting_bytes, left)
                tick(left - now)
                left = now

            yield look

    def keep(self, tensor: int, array: np.ndarray) -> int:
        """Hold a copy of `array` until Release; the value of its gt.upload op. See Session.keep."""
        block = self._arenas.take(array.nbytes)
        if block is None:
            self.copies[tensor] = host_buffers.copy(np.empty(array.shape, array.dtype), array).view(f"V{array.itemsize}")
            return NO_PLACE
        target = block.bytes(array.nbytes).view(array.dtype).reshape(array.shape)
        host_buffers.copy(target, array)
        # Only sizes of elements count from here on: V2 stands for bfloat16 as for int16
        self.copies[tensor] = target.view(f"V{array.itemsize}")
        self._blocks[tensor] = block
        return upload_index(block.place)

    def keep_in_file(self, tensor: int, source: FileTensor) -> int:
        """Hold a tensor in a file until Release; the value of its gt.upload op."""
        self._in_files[tensor] = source
        return NO_PLACE if source.place < 0 else upload_index(source.place)

    def begin(self, message: UploadRequest) -> None:
        """The server asks for the bytes of a value, in messages."""
        array, source = self.copies.get(message.tensor), self._in_files.get(message.tensor)
        if source is not None:
            try:
                total, frames = source.region(message.boxes)
            except OSError as error:  # such as too few descriptors
                self._give_up(message.key, error)
                return
        elif array is not None:
            if message.tensor in self._blocks:  # a worker cannot open the arena
                # Later values are sent by the socket at once
                self._arenas.disable()
                array = array.copy()  # frames are read after the block is used again
            total, frames = host_buffers.region_frames(array, message.boxes)
        else:
            raise ProtocolError(f"UploadRequest.tensor is {message.tensor}, want a tensor with a host copy")
        self._uploading[message.key] = _Unsent(message.tensor, total, frames)
        if message.upto or not total:
            self.send_chunks(message.key, message.upto)

    def send_chunks(self, key: int, upto: int) -> None:
        """Send those chunks of an upload that its window permits. upto: bytes from the start."""
        left = self._uploading.get(key)
        if left is None:
            if key in self._unreadable:
                return  # the window moved before the server knew
            raise ProtocolError(f"WindowUpdate.key is {key}, want an upload with bytes left to send")
        # A chunk is sent whole, once all of it is within the window
        try:
            while left.sent + min(CHUNK, left.total - left.sent) <= upto:
                offset, total, parts = next(left.frames)
                self._send(UploadChunk(key, offset, total), parts)
                end = offset + sum(map(len, parts))
                if left.tensor in self.copies:
                    self._sent[left.tensor] += end - left.sent
                left.sent = end
                if end >= total:
                    del self._uploading[key]
                    return
        except OSError as error:
            del self._uploading[key]
            self._give_up(key, error)

    def _give_up(self, key: int, error: OSError) -> None:
        """Tell the server that a region of a file cannot be read: ops that read it fail, and the session goes on."""
        log.warning("a tensor of a file cannot be uploaded: %s", error)
        # A window that the server has moved before it knows of the error is for this key still
        self._unreadable.add(key)
        self._send(UploadChunk(key, 0, UNREADABLE), [])

    def release(self, tensors: list[int]) -> None:
        """Nobody will read these values any more."""
        for tensor in tensors:
            self.copies.pop(tensor, None)
            self._sent.pop(tensor, None)
            source = self._in_files.pop(tensor, None)
            if source is not None:
                source.release()
            block = self._blocks.pop(tensor, None)
            if block is not None:
                self._arenas.free(block)

    def clear(self) -> None:
        """The session has ended."""
        for source in self._in_files.values():
            source.release()
        for held in (self.copies, self._blocks, self._in_files, self._uploading, self._unreadable, self._sent):
            held.clear()
