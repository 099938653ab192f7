"""Messages between two workers on different hosts: streams with credit, as plane shm's channels have slots. Knows no socket.

A message is sent as frames, each of which ends at the end of a slot or of the message. The credit of a sender is the number of
slots that it may have under way. The receiver returns all slots of a message at once, when it takes the message into its
memory.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

MAX_STREAMS = 1 << 16  # of a lane, at most
MAX_REASON_CHARACTERS = 4096  # of another member's reason to give up
EARLY_BYTES = 1 << 30  # of frames on streams that this worker has not used yet, of one connection
BESIDE_BYTES = 256  # of memory that a frame takes beside its payload


class Announced(NamedTuple):
    """Bytes that the sender announced for a message, and the number that came with it."""

    total: int
    note: int


def slots_of(total: int, slot: int) -> int:
    """Slots of a message; one of a message without bytes too."""
    return max(1, -(-total // slot))


class Early:
    """Bytes of a connection's frames on streams whose slots are not known here yet. most: of them."""

    __slots__ = ("most", "nbytes")

    def __init__(self, most: int = EARLY_BYTES) -> None:
        self.most, self.nbytes = most, 0

    def add(self, nbytes: int) -> None:
        """ValueError if they become too many."""
        if self.nbytes + nbytes > self.most:
            raise ValueError(f"it sent more than {self.most} bytes before this worker receives")
        self.nbytes += nbytes


class Incoming:
    """The receiving end of a stream. `at`: bytes of the posted message that are there.

    A sender is believed nothing: frames that wait for a receiver are within its credit, or `begin` raises ValueError.
    """

    __slots__ = (
        "_ahead", "_buffered", "_early", "_into", "_left", "_posted", "_slot", "_slots", "at", "done", "early", "message",
        "owed",
    )  # fmt: skip

    def __init__(self) -> None:
        self._slots = self._posted = 0  # of the sender's first credit, 0 while unknown; of the last posted message
        self._ahead = 0  # slots of buffered frames, once the size of slots is known
        self.early: Early | None = None  # account of the connection whose frames came before that
        self._early = 0  # their bytes in it
        self._buffered: deque[tuple[int, int, memoryview]] = deque()  # total, note, bytes of frames that came before `post`
        self._into: memoryview | None = None
        self._left = -1  # bytes of the posted message that are still to come, -1 before its first frame
        self._slot = 1  # its bytes
        self.at = 0
        self.done = False
        self.message = Announced(0, 0)
        self.owed = 0  # credit that the sender is to get

    @property
    def begun(self) -> bool:
        """True once the size and note of the posted message are known."""
        return self._left >= 0 or self.done

    @property
    def idle(self) -> bool:
        """True if no message is buffered or expected."""
        return self._into is None and not self._buffered

    def know(self, slot: int, slots: int) -> None:
        """The bytes of a slot, and how many the sender may use before it gets credit."""
        self._slot, self._slots = slot, slots
        self._ahead = sum(slots_of(len(data), slot) for _, _, data in self._buffered)
        self.drop()

    def drop(self) -> None:
        """Frames that came early count for their connection no more."""
        if self.early is not None:
            self.early.nbytes -= self._early
            self.early, self._early = None, 0

    def post(self, into: memoryview, slot: int) -> None:
        """Take the next message into this memory; its sender may send as many slots as that has."""
        self._into, self._left, self.at, self.done, self._slot = into, -1, 0, False, slot
        # Credit for the whole message at once, since its memory is there now.
        self._posted = slots_of(len(into), slot)
        self.owed += self._posted
        while self._buffered and not self.done:
            total, note, data = self._buffered.popleft()
            self._ahead -= slots_of(len(data), slot)
            self._copy(data, total, note)

    def begin(self, nbytes: int, total: int, note: int, early: Early) -> memoryview | None:
        """Memory for a frame's bytes, of which `arrived` and `end` tell; None if it has to be buffered.

        early: account of its connection. ValueError for a frame beyond the sender's credit.
        """
        if self._into is None:
            self._check_credit(nbytes, early)
            return None
        return self._place(nbytes, total, note)

    def _check_credit(self, nbytes: int, early: Early) -> None:
        if not self._slots:
            early.add(nbytes + BESIDE_BYTES)
            self.early, self._early = early, self._early + nbytes + BESIDE_BYTES
        # The credit of the last message is the sender's before that message ends. It keeps what a shorter one left, until as
        # much has been owed
        elif self._ahead + slots_of(nbytes, self._slot) > self._slots + self._posted + max(0, -self.owed):
            raise ValueError(f"it sent more than its credit of {self._slots} slots of {self._slot} bytes")

    def _place(self, nbytes: int, total: int, note: int) -> memoryview:
        assert self._into is not None
        if self._left < 0:
            self._left, self.message = total, Announced(total, note)
        if total != len(self._into) or nbytes > self._left:
            return memoryview(bytearray(nbytes))  # a message of another size is received whole, and dropped
        return self._into[self.at : self.at + nbytes]

    def arrived(self, count: int) -> None:
        """So many bytes more of a frame are in the memory that `begin` gave. Only the thread that reads calls this."""
        self.at += count
        self._left -= count

    def end(self) -> None:
        """All bytes of such a frame have arrived."""
        if self._left <= 0:
            assert self._into is not None
            # The sender used slots by its own total; `post` had granted those of `into`. Even it out, or the credit would
            # drift.
            self.owed += slots_of(self.message.total, self._slot) - slots_of(len(self._into), self._slot)
            self._into, self.done = None, True

    def buffer(self, total: int, note: int, data: memoryview) -> None:
        """A frame for which `begin` had no memory."""
        if self._into is None:
            self._buffered.append((total, note, data))
            self._ahead += slots_of(len(data), self._slot) if self._slots else 0
        else:  # it has some now
            self._copy(data, total, note)

    def _copy(self, data: memoryview, total: int, note: int) -> None:
        self._place(len(data), total, note)[:] = data
        self.arrived(len(data))
        self.end()


class Outgoing:
    """The sending end of a stream. granted: slots that the receiver has room for, in all; used: those that were sent.

    Each counter has one writer, so a sender needs no lock: the thread that reads, and the thread that sends.
    """

    __slots__ = ("granted", "used")

    def __init__(self, slots: int) -> None:
        self.granted, self.used = slots, 0

    @property
    def credit(self) -> int:
        """Slots that may be sent."""
        return self.granted - self.used


class Lane:
    """Both directions between this worker and another, in one epoch of the pair; it never works again once it is broken."""

    def __init__(self, index: int, epoch: int) -> None:
        self.index, self.epoch = index, epoch
        self.lock = threading.Lock()  # guards the streams' states
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
                # Credit may arrive before this end has used the stream: the peer posts first.
                stream = self._out[key] = Outgoing(slots + self._early.pop(key, 0))
        return stream

    def credit(self, key: int, count: int) -> None:
        """The other end has room for so many slots more. With the lock."""
        stream = self._out.get(key)
        if stream is not None:
            stream.granted += count
        elif len(self._early) < MAX_STREAMS:
            self._early[key] = self._early.get(key, 0) + count

    def fail(self, key: int, why: str) -> None:
        """Another member of a collective gave up. With the lock."""
        if len(self.failed) < MAX_STREAMS:
            self.failed[key] = why[:MAX_REASON_CHARACTERS]

    def close(self) -> None:
        """No frame of this lane is waited for any more."""
        with self.lock:
            for stream in self._in.values():
                stream.drop()

    def forget(self, key: int) -> None:
        """A team is over."""
        with self.lock:
            if key in self._in:
                self._in[key].drop()
            for table in (self._in, self._out, self._early, self.failed):
                table.pop(key, None)
