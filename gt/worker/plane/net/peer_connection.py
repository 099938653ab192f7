"""One TCP connection between two workers: frames in both directions. One thread at a time reads, and one sends; any may.

A frame has a header and payload. A frame for another worker is passed on unread: that is the whole of relaying. Large ones go
through a pipe (`relay.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from gt.wire import tcp
from gt.wire.liveness import Cable
from gt.worker.plane.net.lane import Early, Incoming

DATA, CREDIT, FAIL = 1, 2, 3
# All frames of a pair name its epoch, so that one of an earlier connection is never taken for one of this. `note` is what
# members of a collective compare; `key` names the channel or team.
HEADER = struct.Struct("<BBHIHHIQQQ")  # kind, hops, credit, bytes of payload, source, target, epoch, key, total, note
HEADER_BYTES = HEADER.size
STAGE_BYTES = 64 << 10  # read at once while frames are small
LARGE_BYTES = 16 << 10  # bytes of a frame after which headers are read alone, so that payload is not copied
JOINED_BYTES = 4 << 10  # bytes of a payload that is copied behind its header
WAKE_BYTES = 256 << 10  # a large frame's reader wakes for so many bytes: half the CPU time of a wake for each segment
PATIENCE_SECONDS = 0.05  # seconds that a waiting thread reads a connection itself
MAX_FRAME_BYTES = 64 << 20  # largest frame that a peer may send
MAX_HOPS = 16
FULL_SECONDS = 0.1  # that the kernel waits for room, before the sender looks whether it is still needed
TEND = 5  # such waits
NOWAIT = socket.MSG_DONTWAIT
MAX_PARTS = 1024  # buffers of one call; of more (Linux's UIO_MAXIOV) it is an error


class Frame(NamedTuple):
    """A frame's header."""

    kind: int
    hops: int
    credit: int
    nbytes: int
    source: int
    target: int
    epoch: int
    key: int
    total: int
    note: int


class KernelBytes(Protocol):
    """The rest of a payload that the kernel holds. Its length falls as it is sent."""

    def __len__(self) -> int: ...

    def send(self, fd: int) -> int:
        """Send as much as the connection takes now, which must not wait. BlockingIOError if that is nothing."""


Part: TypeAlias = memoryview | KernelBytes


class Onward(Protocol):
    """A way from one connection to `out`, for one frame after the other. left: bytes of the frame that have not arrived."""

    out: PeerConnection
    left: int

    @property
    def frame(self) -> Frame:
        """The header of the frame that passes."""

    @property
    def idle(self) -> bool:
        """True if nothing is under way."""

    def begin(self, frame: Frame, left: int, credit: int) -> None:
        """The next frame, of which `left` bytes are to come, and its credit is to be passed on."""

    def take(self, fd: int) -> tuple[memoryview, KernelBytes]:
        """A frame of the bytes that are there, while the way is idle. BlockingIOError if none are, OSError at the end."""


class Sink(Protocol):
    """The receiver of a connection's frames."""

    def passage(self, connection: PeerConnection, frame: Frame) -> Onward | None:
        """The way of a large frame that is not for this worker, if its bytes may stay in the kernel."""

    def pass_on(self, connection: PeerConnection, passage: Onward) -> None:
        """Pass on what is there. BlockingIOError if that is nothing, or nothing can be passed on now."""

    def begin(self, connection: PeerConnection, frame: Frame) -> memoryview:
        """Memory for the payload."""

    def arrived(self, connection: PeerConnection, count: int) -> None:
        """So many bytes more of the payload are there."""

    def end(self, connection: PeerConnection, frame: Frame, payload: memoryview) -> None:
        """The payload is there."""


class Ended(OSError):
    """The other end has ended the connection."""


class PeerConnection:
    """A connection to one worker. `sink` gets the frames that arrive, in the thread that reads. index: of that worker."""

    def __init__(self, sock: socket.socket, index: int, epoch: int, source: str, target: str, sink: Sink) -> None:
        self.sock, self.index, self.epoch = sock, index, epoch  # the worker at the other end
        self.source, self.target = source, target  # addresses
        self.fd = sock.fileno()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, int(FULL_SECONDS * 1e6)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(PATIENCE_SECONDS * 1e6)))
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._room = select.poll()
        self._room.register(self.fd, select.POLLOUT)
        self._wake_bytes = 1  # that have to be there before a wait for the connection ends
        self.reading = threading.Lock()  # held by the thread that reads
        self.sending = threading.Lock()  # held by the thread that sends
        self.owned = self.touched = False  # a waiting thread reads it, and has done so lately
        self.placed: Incoming | None = None  # the stream in whose memory the frame's bytes are put, not in a buffer
        self.early = Early()
        self.named = 0  # lanes that its frames have named first
        self.mask = 0  # events that the background thread waits for
        self.relayed: deque[Part] = deque()  # rest of frames to be passed on
        self.relayed_bytes = 0
        self._counting = threading.Lock()
        self.paused: list[PeerConnection] = []  # connections that are not read until these are sent
        self.stalled = False  # it is one of them
        self.ended = False
        self._sink = sink
        self._cable = Cable(self.fd, 0.0)
        self._bytes = bytearray(STAGE_BYTES)
        self._stage = memoryview(self._bytes)
        self._start = self._stop = 0
        self._frame = Frame(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        self._payload = self._rest = memoryview(b"")
        self._large = False
        self._waits = True  # the kernel waits in calls of the socket, unless they say NOWAIT
        self._passing: Onward | None = None  # the way of the frame that arrives, if it is passed on through a pipe
        self.passages: dict[int, Onward] = {}  # by index of the worker at the other end

    # ---- reading

    def read(self, flags: int = 0) -> bool:
        """Read once, and deal with the bytes. False if no more are there now, as far as is known.

        BlockingIOError if there are none, OSError at the end of the connection.
        """
        rest = self._rest
        if not flags and (self._wake_bytes > 1 or not self._waits):
            self._poll.poll(PATIENCE_SECONDS * 1000)  # recv itself would wait for bytes after those that it has copied
            flags = NOWAIT

        # Three states: a frame passes through a pipe, the rest of a payload is awaited, or headers are.
        if self._passing is not None:
            return self._pass_on(self._passing)
        if rest:
            count = self.sock.recv_into(rest, 0, flags)
            if not count:
                raise Ended("its connection ended")
            self._rest = rest = rest[count:]
            self._sink.arrived(self, count)
            if rest:
                if len(rest) < self._wake_bytes:
                    self._wake_at(len(rest))
                return False
            if self._wake_bytes > 1:
                self._wake_at(1)
            self._sink.end(self, self._frame, self._payload)
            return True
        stop = self._stop
        # After a large frame another is likely: only its header is read, so that its payload can be received in place. Else as
        # much as there is (0: no limit).
        limit = HEADER_BYTES - (stop - self._start) if self._large else 0
        count = self.sock.recv_into(self._stage[stop:], limit, flags)
        if not count:
            raise Ended("its connection ended")
        self._stop = stop + count
        self._unpack()
        return bool(self._rest)

    def read_one(self, header: bytes, into: memoryview, size: int) -> int:
        """Read once. If that is one frame with this header from its fourth byte on, and of `size` bytes: its credit, else -1.

        Much cheaper than `read`, and only for a reader that expects that frame. Errors as of `read`.
        """
        # Fast path of small messages: one system call and one comparison of the header, without unpacking it.
        if self._rest or self._stop or self._large:
            return -1
        stage = self._stage
        if not self._waits:
            self._poll.poll(PATIENCE_SECONDS * 1000)
        count = self.sock.recv_into(stage)
        if count == HEADER_BYTES + size and stage[0] == DATA and self._bytes.startswith(header, 4):
            into[:] = stage[HEADER_BYTES:count]
            return stage[2] | stage[3] << 8
        if not count:
            raise Ended("its connection ended")
        self._stop = count
        return -1

    def deal(self) -> None:
        """Deal with the bytes of `read_one`."""
        if self._stop:
            self._unpack()

    def _unpack(self) -> None:
        """Deal with the frames of the stage."""
        stage, start, stop = self._stage, self._start, self._stop
        while stop - start >= HEADER_BYTES:
            frame = Frame._make(HEADER.unpack_from(stage, start))
            start += HEADER_BYTES
            nbytes = frame.nbytes
            # Limits before any memory is allocated: a peer's header is not trusted.
            if nbytes > MAX_FRAME_BYTES:
                raise Ended(f"it sent a frame of {nbytes} bytes, at most {MAX_FRAME_BYTES} are taken")
            if frame.hops > MAX_HOPS:
                raise Ended(f"it sent a frame over {frame.hops} workers, at most {MAX_HOPS} are taken")
            self._large = nbytes > LARGE_BYTES
            # Bytes of the payload that were read along with the header.
            have = min(nbytes, stop - start)
            if self._large and have < nbytes and (passage := self._sink.passage(self, frame)) is not None:
                self._begin_passage(passage, frame, stage[start : start + have])
                start += have
                break
            payload = self._sink.begin(self, frame)
            if have:
                payload[:have] = stage[start : start + have]
                start += have
                self._sink.arrived(self, have)
            if have < nbytes:
                if self._large:
                    self._wake_at(min(nbytes - have, WAKE_BYTES))
                self._frame, self._payload, self._rest = frame, payload, payload[have:]
            else:
                self._sink.end(self, frame, payload)
        left = stop - start
        if left and start:
            # The beginning of the next header moves to the front. A copy, as the two ranges may overlap.
            stage[:left] = bytes(stage[start:stop])
        self._start, self._stop = 0, left

    def _begin_passage(self, passage: Onward, frame: Frame, have: memoryview) -> None:
        """Pass a frame on as it arrives; the bytes that were read with its header as a frame of their own."""
        if have:
            part = frame._replace(nbytes=len(have))
            payload = self._sink.begin(self, part)
            payload[:] = have
            self._sink.end(self, part, payload)
        # The credit is passed on once: with the bytes in hand, or else with the rest.
        left = frame.nbytes - len(have)
        passage.begin(frame, left, credit=0 if have else frame.credit)
        self._passing = passage
        self._wake_at(min(left, WAKE_BYTES))

    def _pass_on(self, passage: Onward) -> bool:
        """As `read`, of a frame that is passed on as it arrives."""
        if passage.out.ended:  # the rest of the frame is lost too, though the next may have another way
            self._passing = None
            self._frame = passage.frame._replace(nbytes=passage.left, hops=MAX_HOPS)
            self._payload = self._rest = self._sink.begin(self, self._frame)
            return True
        self._sink.pass_on(self, passage)
        if left := passage.left:
            if left < self._wake_bytes:
                self._wake_at(left)
            return False
        self._passing = None
        self._wake_at(1)
        return True

    def wait_outside(self) -> None:
        """Have no call of the socket wait, which splice to it needs: there are waits before such calls from now on."""
        if self._waits:
            self._waits = False
            self.sock.setblocking(False)

    def _wake_at(self, count: int) -> None:
        """A wait ends with so many bytes. They are of one frame that has begun, so they will be there."""
        self._wake_bytes = count
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    # ---- sending

    def send(self, parts: list[memoryview], check: Callable[[], None], later: int = 0) -> None:
        """Send whole frames; waits while the connection is full. check: raises once nobody waits for them any more.

        later: bytes that may be copied and left to `relay`, in place of a wait.
        """
        rest: list[Part] = [*parts]
        with self.sending:
            if self.relayed and self.relayed_bytes + sum(map(len, parts)) <= later:
                self.queue(memoryview(b"".join(parts)))
                return
            # Order on the wire: relayed rests first, then these frames; a frame is never split by another.
            self._drain(check)
            if self.push_now(rest):
                return
            if sum(map(len, rest)) <= later:
                self.hand_back(rest)
            else:
                self._push(rest, check)

    def _push(self, parts: list[Part], check: Callable[[], None]) -> None:
        number = 0
        try:
            while not self.push_now(parts, 0):
                check()
                number += 1
                if number % TEND == 0:
                    tcp.tend(self.sock)
        except BaseException:  # a frame that has begun has to be ended, or the other end takes the next one for its rest
            self.hand_back(parts)
            raise

    def push_now(self, parts: list[Part], flags: int = NOWAIT) -> bool:
        """Send as much as the connection takes now, which leaves `parts`. False if some is left. With `sending`.

        Without NOWAIT the kernel waits for room, for the time that the socket has for it.
        """
        if not (flags or self._waits):
            self._room.poll(FULL_SECONDS * 1000)
            flags = NOWAIT
        try:
            while parts:
                first = parts[0]
                if not isinstance(first, memoryview):
                    first.send(self.sock.fileno())
                    if first:
                        return False
                    del parts[0]
                    continue
                if len(parts) == 1:
                    sent = self.sock.send(first, flags)
                else:
                    sent = self.sock.sendmsg(memories(parts), (), flags)
                # Drop the parts that are sent whole, and cut the one that is sent in part.
                while sent and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent and isinstance(rest := parts[0], memoryview):
                    parts[0] = rest[sent:]
                    return False
        except BlockingIOError:
            return False
        return True

    def take_relayed(self) -> list[Part]:
        """Take the frames, or rests of frames, that go before any other. With `sending`."""
        parts: list[Part] = []
        while self.relayed:
            parts.append(self.relayed.popleft())
            self._relayed_more(-len(parts[-1]))
        return parts

    def hand_back(self, parts: Sequence[Part]) -> None:
        """Leave the rest of frames to be sent before any other frame. With `sending`."""
        # Bytes are copied, since their owner may reuse the memory once `send` has returned.
        for part in reversed(parts):
            self._relayed_more(len(part))
            self.relayed.appendleft(memoryview(bytes(part)) if isinstance(part, memoryview) else part)

    def _drain(self, check: Callable[[], None]) -> None:
        """Send the rest of relayed frames first: a frame is never divided by another."""
        while self.relayed:
            self._push(self.take_relayed(), check)

    def queue(self, *frame: Part) -> None:
        """A frame to be passed on by `relay`, or with the next frame that is sent."""
        self._relayed_more(sum(map(len, frame)))
        self.relayed.extend(frame)

    def _relayed_more(self, nbytes: int) -> None:
        with self._counting:
            self.relayed_bytes += nbytes

    def relay(self) -> bool:
        """Send relayed frames as far as the connection takes them now. False if another thread sends, which does it then."""
        if not self.sending.acquire(blocking=False):
            return False
        try:
            while self.relayed:
                part = self.relayed[0]
                size = len(part)
                try:
                    sent = self.sock.send(part, NOWAIT) if isinstance(part, memoryview) else part.send(self.sock.fileno())
                except BlockingIOError:
                    break
                self._relayed_more(-sent)
                if sent == size:
                    self.relayed.popleft()
                elif isinstance(part, memoryview):
                    self.relayed[0] = part[sent:]
            return True
        finally:
            self.sending.release()

    def tend(self) -> OSError | None:
        """Keep it while the other host answers; the error of its end else. To be called about twice a second."""
        # The kernel's own limit begins anew with bytes that are sent while its probes are unanswered.
        if self._cable.poll():
            return OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        if self.relayed:
            tcp.tend(self.sock)
        return None

    def end(self) -> None:
        """End the connection: a thread that reads or sends fails at once."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.ended = True
        self._passing = None
        self.passages.clear()  # and with them their pipes, once what is in them is sent
        self.relayed.clear()
        self.sock.close()


def memories(parts: Sequence[Part]) -> list[memoryview]:
    """The parts that are in memory, up to the first in a pipe, as many as one call may send."""
    found = []
    for part in parts[:MAX_PARTS]:
        if not isinstance(part, memoryview):
            break
        found.append(part)
    return found


def reason(error: OSError) -> str:
    """The error without its number."""
    return error.strerror or str(error) or type(error).__name__
