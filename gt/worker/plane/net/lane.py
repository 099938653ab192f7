"""Messages between two workers on different hosts: streams with credit, as plane shm's channels have slots. Knows no socket.

A message is sent as frames of at most a slot's bytes. A sender may have as many frames under way as the channel has slots; the
receiver returns one credit for each frame that it has taken, or in advance for all frames of a message whose memory is there.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

MAX_STREAMS = 1 << 16  # of a lane, at most


class Announced(NamedTuple):
    """Bytes that the sender announced for a message, and the number that came with it."""

    total: int
    note: int


class Incoming:
    """The receiving end of a stream. `at`: bytes of the posted message that are there."""

    __slots__ = ("_buffered", "_debt", "_into", "_left", "at", "done", "message", "owed")

    def __init__(self) -> None:
        self._buffered: deque[tuple[int, int, memoryview]] = deque()  # total, note, bytes of frames that came before `post`
        self._into: memoryview | None = None
        self._left = -1  # bytes of the posted message that are still to come, -1 before its first frame
        self._debt = 0  # frames of the posted message that were credited, and have not come
        self.at = 0
        self.done = False
        self.message = Announced(0, 0)
        self.owed = 0  # credit that the sender is to get

    @property
    def idle(self) -> bool:
        """True if no message is buffered or expected."""
        return self._into is None and not self._buffered

    def post(self, into: memoryview, frames: int) -> None:
        """Take the next message into this memory, of `frames` frames if it has the size that is expected."""
        self._into, self._left, self.at, self.done = into, -1, 0, False
        self._debt = frames
        self.owed += frames
        while self._buffered and not self.done:
            total, note, data = self._buffered.popleft()
            place = self.begin(len(data), total, note)
            assert place is not None
            place[:] = data
            self.end(len(data), total, note, place, True)

    def begin(self, nbytes: int, total: int, note: int) -> memoryview | None:
        """Memory for a frame's bytes, None if it has to be buffered."""
        if self._into is None:
            return None
        if self._left < 0:
            self._left, self.message = total, Announced(total, note)
        if total != len(self._into) or nbytes > self._left:
            return memoryview(bytearray(nbytes))  # a message of another size is received whole, and dropped
        return self._into[self.at : self.at + nbytes]

    def end(self, nbytes: int, total: int, note: int, data: memoryview, placed: bool) -> bool:
        """A frame's bytes are there. True if the posted message has got on."""
        if not placed:
            if self._into is None:
                self._buffered.append((total, note, data))
                return False
            place = self.begin(nbytes, total, note)
            assert place is not None
            place[:] = data
        self.at += nbytes
        self._left -= nbytes
        self._debt -= 1
        if self._left <= 0:
            self.owed -= self._debt  # the message had another number of frames than was expected
            self._into, self._debt, self.done = None, 0, True
        return True


class Outgoing:
    """The sending end of a stream. credit: frames that may be sent."""

    __slots__ = ("credit",)

    def __init__(self, slots: int) -> None:
        self.credit = slots


class Lane:
    """Both directions between this worker and another, in one epoch of the pair; it never works again once it is broken."""

    def __init__(self, index: int, epoch: int) -> None:
        self.index, self.epoch = index, epoch
        self.lock = threading.Lock()  # of the streams' states
        self.broken = ""  # why
        self.failed: dict[int, str] = {}  # collectives' keys -> why another member gave up
        self._in: dict[int, Incoming] = {}
        self._out: dict[int, Outgoing] = {}
        self._early: dict[int, int] = {}  # credit of streams that this end has not used yet

    def incoming(self, key: int) -> Incoming:
        stream = self._in.get(key)
        if stream is None:
            if len(self._in) >= MAX_STREAMS:
                raise ValueError(f"worker {self.index} sends more than {MAX_STREAMS} streams")
            stream = self._in[key] = Incoming()
        return stream

    def outgoing(self, key: int, slots: int) -> Outgoing:
        stream = self._out.get(key)
        if stream is None:
            with self.lock:
                stream = self._out[key] = Outgoing(slots + self._early.pop(key, 0))
        return stream

    def credit(self, key: int, count: int) -> None:
        """The other end has room for so many frames more. With the lock."""
        stream = self._out.get(key)
        if stream is not None:
            stream.credit += count
        elif len(self._early) < MAX_STREAMS:
            self._early[key] = self._early.get(key, 0) + count

    def forget(self, key: int) -> None:
        """A team is over."""
        with self.lock:
            for table in (self._in, self._out, self._early, self.failed):
                table.pop(key, None)
