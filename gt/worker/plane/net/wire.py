"""One TCP connection between two workers: frames in both directions. One thread at a time reads, and one sends; any may.

A frame has a header and payload. A frame for another worker is passed on unread: that is the whole of relaying.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from gt.wire import tcp

DATA, CREDIT, FAIL = 1, 2, 3
HEADER = struct.Struct("<BBHIHHIQQQ")  # kind, hops, credit, bytes of payload, source, target, epoch, key, total, note
HEADER_BYTES = HEADER.size
STAGE_BYTES = 64 << 10  # read at once while frames are small
LARGE = 16 << 10  # bytes of a frame after which headers are read alone, so that payload is not copied
JOINED = 4 << 10  # bytes of a payload that is copied behind its header
MAX_FRAME_BYTES = 64 << 20  # of a peer's frame
MAX_HOPS = 16
PAUSE_BYTES = 4 << 20  # of frames that wait to be relayed, from which on their sender is not read
TEND = 5  # waits of 100 ms for a full connection
NOWAIT, WHOLE = socket.MSG_DONTWAIT, socket.MSG_WAITALL


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


class Sink(Protocol):
    """The receiver of a wire's frames."""

    def begin(self, wire: Wire, frame: Frame) -> memoryview:
        """Memory for the payload."""

    def end(self, wire: Wire, frame: Frame, payload: memoryview) -> None:
        """The payload is there."""


class Ended(OSError):
    """The other end has ended the connection."""


class Wire:
    def __init__(self, sock: socket.socket, index: int, epoch: int, source: str, target: str, sink: Sink) -> None:
        self.sock, self.index, self.epoch = sock, index, epoch  # the worker at the other end
        self.source, self.target = source, target  # addresses
        self.fd = sock.fileno()
        self.reading = threading.Lock()  # held by the thread that reads
        self.sending = threading.Lock()  # held by the thread that sends
        self.owned = self.touched = False  # a waiting thread reads it, and has done so lately
        self.placed = False  # the sink has given a frame's own place, not a buffer
        self.mask = 0  # events that the background thread waits for
        self.relayed: deque[memoryview] = deque()  # rest of frames to be passed on
        self.relayed_bytes = 0
        self._counting = threading.Lock()
        self.paused: list[Wire] = []  # wires that are not read until these are sent
        self.ended = False
        self._sink = sink
        self._stage = memoryview(bytearray(STAGE_BYTES))
        self._start = self._stop = 0
        self._frame = Frame(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        self._payload = self._rest = memoryview(b"")
        self._large = False

    # ---- reading

    def read(self, flags: int = 0) -> None:
        """Read once, and deal with the bytes. BlockingIOError if there are none, OSError at the end of the connection."""
        rest = self._rest
        if rest:
            got = self.sock.recv_into(rest, 0, flags or WHOLE)
            if not got:
                raise Ended("its connection ended")
            self._rest = rest = rest[got:]
            if not rest:
                self._sink.end(self, self._frame, self._payload)
            return
        stop = self._stop
        limit = HEADER_BYTES - (stop - self._start) if self._large else 0
        got = self.sock.recv_into(self._stage[stop:], limit, flags)
        if not got:
            raise Ended("its connection ended")
        self._stop = stop + got
        self._unpack()

    def read_one(self, header: bytes, into: memoryview) -> int:
        """Read once. If that is one frame that begins with `header` and has as many bytes as `into`: its credit, else -1.

        Much cheaper than `read`, and only for a reader that expects that frame. Errors as of `read`.
        """
        if self._rest or self._stop or self._large:
            return -1
        stage, size = self._stage, len(into)
        got = self.sock.recv_into(stage)
        if got == HEADER_BYTES + size and stage[4:HEADER_BYTES] == header:
            into[:] = stage[HEADER_BYTES:got]
            if stage[0] == DATA:
                return stage[2] | stage[3] << 8
        if not got:
            raise Ended("its connection ended")
        self._stop = got
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
            if nbytes > MAX_FRAME_BYTES:
                raise Ended(f"it sent a frame of {nbytes} bytes, at most {MAX_FRAME_BYTES} are taken")
            self._large = nbytes > LARGE
            payload = self._sink.begin(self, frame)
            have = min(nbytes, stop - start)
            if have:
                payload[:have] = stage[start : start + have]
                start += have
            if have < nbytes:
                self._frame, self._payload, self._rest = frame, payload, payload[have:]
            else:
                self._sink.end(self, frame, payload)
        left = stop - start
        if left and start:
            stage[:left] = bytes(stage[start:stop])
        self._start, self._stop = 0, left

    # ---- sending

    def send(self, header: bytes, payload: memoryview, check: Callable[[], None]) -> None:
        """Send a frame; waits while the connection is full. check: raises once nobody waits for it any more."""
        with self.sending:
            self._drain(check)
            if len(payload) <= JOINED:
                self._push([memoryview(header + bytes(payload))], check)
            else:
                self._push([memoryview(header), payload], check)

    def send_now(self, frame: bytes, check: Callable[[], None]) -> bool:
        """Send a small frame if nothing is in its way, which is cheaper than `send`. False if nothing was sent."""
        if self.relayed or not self.sending.acquire(blocking=False):
            return False
        try:
            sent = self.sock.send(frame, NOWAIT)
            if sent < len(frame):
                self._push([memoryview(frame)[sent:]], check)
        except BlockingIOError:
            return False
        finally:
            self.sending.release()
        return True

    def _push(self, parts: list[memoryview], check: Callable[[], None]) -> None:
        while parts:
            try:
                sent = self.sock.send(parts[0], NOWAIT) if len(parts) == 1 else self.sock.sendmsg(parts, (), NOWAIT)
            except BlockingIOError:
                self._wait(check)
                continue
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    def _wait(self, check: Callable[[], None]) -> None:
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        number = 0
        while not poll.poll(100):
            check()
            number += 1
            if number % TEND == 0:
                tcp.tend(self.sock)
        check()

    def _drain(self, check: Callable[[], None]) -> None:
        """Send the rest of relayed frames first: a frame is never divided by another."""
        while self.relayed:
            part = self.relayed.popleft()
            self._relayed_more(-len(part))
            self._push([part], check)

    def queue(self, frame: memoryview) -> None:
        """A frame to be passed on by `relay`, or with the next frame that is sent."""
        self._relayed_more(len(frame))
        self.relayed.append(frame)

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
                try:
                    sent = self.sock.send(part, NOWAIT)
                except BlockingIOError:
                    break
                self._relayed_more(-sent)
                if sent == len(part):
                    self.relayed.popleft()
                else:
                    self.relayed[0] = part[sent:]
            return True
        finally:
            self.sending.release()

    def end(self) -> None:
        """End the connection: a thread that reads or sends fails at once."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.ended = True
        self.sock.close()
