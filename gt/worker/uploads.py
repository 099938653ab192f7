"""Uploads by key: the I/O thread assembles them, or a thread reads them from a file; the executing thread takes them.

Tensors themselves are a plain dict id -> tensor in the executor. Knows nothing about sockets or torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition

import numpy as np

from gt.errors import SystemFailure
from gt.wire.messages import UNREADABLE, Data

MAX_CANCELLED_UPLOADS = 4096  # cancelled uploads that are kept, for instructions that still ask for them


class Cancelled(SystemFailure):
    """An upload that an instruction waits for was cancelled."""


@dataclass
class _Arriving:
    """An upload of which not all bytes are here. left: bytes that are missing."""

    buffer: np.ndarray
    left: int


@dataclass
class UploadBuffers:
    """Buffers of uploads by key. `receive`, `expect` and `cancel` are called by the I/O thread, `take` by the executing one.

    `deliver` and `fail` are for the thread that reads a file.
    """

    _ready: Condition = field(default_factory=Condition)
    _arriving: dict[int, _Arriving] = field(default_factory=dict)
    _cancelled: dict[int, Exception] = field(default_factory=dict)
    _expected: set[int] = field(default_factory=set)  # uploads that are read from files
    _forgotten: int = -1  # the last key that was removed from these; keys count up
    _failure: str = ""
    admit: Callable[[int], None] = lambda nbytes: None  # MemoryError if there is no room for so many bytes
    epoch: int = 0  # number of times that all awaited uploads were cancelled
    bytes_received: int = 0

    def receive(self, message: Data, frame: memoryview | bytes | None) -> None:
        """Store one frame of an upload; a total below 0 cancels the upload."""
        if message.total == UNREADABLE:
            self._fail(message.key, OSError("the client cannot read its file: it was cut after it was opened"))
            return
        if message.total < 0:
            self._fail(message.key, Cancelled("the upload was cancelled: its client is gone, or a worker beside this one"))
            return
        part = self._arriving.get(message.key)
        if part is None:
            # Frames come in order: without the first one its upload has failed, and the rest would never be whole.
            if message.key in self._cancelled or message.offset:
                return
            try:
                self.admit(message.total)
                part = _Arriving(np.empty(message.total, np.uint8), message.total)
            except (MemoryError, ValueError) as error:
                self._fail(message.key, MemoryError(f"no room for an upload of {message.total} bytes: {error}"))
                return
        if frame is not None and message.total:
            data = np.frombuffer(frame, np.uint8)
            if message.offset < 0 or message.offset + len(data) > len(part.buffer):
                end = message.offset + len(data)
                raise ValueError(f"upload {message.key} has data up to byte {end}, want at most {message.total}")
            part.buffer[message.offset : message.offset + len(data)] = data
            part.left -= len(data)
            self.bytes_received += len(data)
        with self._ready:
            self._arriving[message.key] = part
            if part.left <= 0:
                self._ready.notify_all()

    # ---- from files

    def expect(self, key: int) -> None:
        """A thread reads this upload."""
        with self._ready:
            self._expected.add(key)

    def expects(self, key: int) -> bool:
        """True unless it was cancelled meanwhile."""
        return key in self._expected

    def deliver(self, key: int, buffer: np.ndarray) -> None:
        """All bytes of an upload that was expected."""
        with self._ready:
            if key in self._expected:
                self._expected.discard(key)
                self._arriving[key] = _Arriving(buffer, 0)
                self._ready.notify_all()

    def fail(self, key: int, reason: Exception) -> None:
        """An upload that was expected cannot be read."""
        if key in self._expected:
            self._fail(key, reason)

    def _fail(self, key: int, reason: Exception) -> None:
        with self._ready:
            self._arriving.pop(key, None)
            self._expected.discard(key)
            self._cancelled[key] = reason
            # Bounded, or a client that cancels without end fills the memory. Keys count up: one number stands for all that are
            # forgotten.
            if len(self._cancelled) > MAX_CANCELLED_UPLOADS:
                oldest = next(iter(self._cancelled))
                del self._cancelled[oldest]
                self._forgotten = max(self._forgotten, oldest)
            self._ready.notify_all()

    def cancel(self, reason: str) -> None:
        """Fail the uploads that instructions received so far wait for."""
        with self._ready:
            self.epoch += 1
            self._failure = reason
            self._arriving.clear()
            self._expected.clear()
            self._ready.notify_all()

    def take(self, key: int, epoch: int) -> np.ndarray:
        """The whole upload, whose buffer the caller takes over; Cancelled if it was cancelled. epoch: of the Run that asks."""
        with self._ready:
            while True:
                part = self._arriving.get(key)
                if part is not None and part.left <= 0:
                    return self._arriving.pop(key).buffer
                if key in self._cancelled:
                    raise self._cancelled.pop(key)
                if part is None and key <= self._forgotten and key not in self._expected:
                    raise Cancelled("the upload was cancelled, as were many after it")
                # All uploads were cancelled after the Run arrived: its bytes will not come. A later Run's may.
                if epoch < self.epoch:
                    raise Cancelled(self._failure)
                self._ready.wait()
