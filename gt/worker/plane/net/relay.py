"""Frames that a worker passes on. The bytes of large ones go through a pipe, and stay in the kernel.

Such a frame is divided into frames of what has arrived, each of which is whole before it begins on the next connection. So
other frames go between them, and the end of one connection leaves no part of a frame on another.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from gt.worker.plane.net.peer_connection import DATA, HEADER, MAX_HOPS, Ended, Frame, Onward, PeerConnection

PASSED_BYTES = 64 << 10  # smallest payload that is spliced through a pipe: a smaller one costs less copied
PIPE_BYTES = 1 << 20  # size asked for a pipe, if the system allows it: it holds one segment of a connection in each 4 KiB
PAUSE_BYTES = 4 << 20  # bytes waiting to be passed on, from which on their sender is not read
MAX_EARLY_BYTES, MAX_EARLY_FRAMES = 64 << 20, 1 << 16  # of frames that wait for a connection
NOWAIT = os.SPLICE_F_NONBLOCK


class Pipe:
    """Closed with the last reference to it: what is in it outlives the connection from which that came."""

    def __init__(self) -> None:
        self._descriptors: tuple[int, ...] = ()  # none if the system has none to give
        self._descriptors = self.source, self.target = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.target, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


class Piped:
    """The rest of a frame's payload, in a pipe (peer_connection.KernelBytes)."""

    __slots__ = ("_left", "_pipe")

    def __init__(self, pipe: Pipe, left: int) -> None:
        self._pipe, self._left = pipe, left

    def __len__(self) -> int:
        return self._left

    def send(self, fd: int) -> int:
        sent = os.splice(self._pipe.source, fd, self._left, flags=NOWAIT)
        self._left -= sent
        return sent


class PipeWay:
    """A peer_connection.Onward through a pipe."""

    def __init__(self, out: PeerConnection) -> None:
        self.out, self.left = out, 0
        self._pipe = Pipe()
        self._piped = Piped(self._pipe, 0)
        self._frame = Frame(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)

    @property
    def frame(self) -> Frame:
        return self._frame

    @property
    def idle(self) -> bool:
        return not self._piped

    def begin(self, frame: Frame, left: int, credit: int) -> None:
        self._frame, self.left = frame._replace(hops=frame.hops + 1, credit=credit), left

    def take(self, fd: int) -> tuple[memoryview, Piped]:
        count = os.splice(fd, self._pipe.target, self.left, flags=NOWAIT)
        if not count:
            raise Ended("its connection ended")
        self.left -= count
        self._piped = Piped(self._pipe, count)
        header = memoryview(HEADER.pack(*self._frame._replace(nbytes=count)))
        self._frame = self._frame._replace(credit=0)
        return header, self._piped


class RelayConnections(Protocol):
    """The connections of this worker, which a relay uses (network.Network)."""

    def onward(self, target: int) -> PeerConnection | None:
        """The connection on the way to a worker."""

    def lives(self, target: int) -> bool:
        """True unless a worker is lost."""

    def arm(self, connection: PeerConnection) -> None:
        """Wait in the background for what a connection is to do next."""

    def lost(self, connection: PeerConnection, error: OSError) -> None:
        """A connection has ended."""


class Relay:
    """Bytes that one worker passes on, in the threads that read. relayed: bytes of payload by "source>target"."""

    def __init__(self, network: RelayConnections, wake: Callable[[], None]) -> None:
        self.relayed: Counter[str] = Counter()
        self._network, self._wake = network, wake
        # By target: frames to be passed on once there is a connection, with those that they came by
        self._early: dict[int, list[tuple[PeerConnection, Frame, memoryview]]] = {}
        self._early_frames = self._early_bytes = 0
        self._lock = threading.Lock()  # of these

    def passage(self, connection: PeerConnection, frame: Frame) -> Onward | None:
        """The way through a pipe of a frame for another worker, if it can take one."""
        out = self._network.onward(frame.target) if frame.kind == DATA and frame.nbytes >= PASSED_BYTES else None
        if out is None or self._lost(frame, out):
            return None
        self.forward_early()  # which came before this frame
        # A pipe for each pair of connections, made at the first large frame and then kept.
        passage = connection.passages.get(out.index)
        if passage is None or passage.out is not out:
            try:
                passage = connection.passages[out.index] = PipeWay(out)
            except OSError:  # too few descriptors
                return None
            out.wait_outside()
        return passage

    def pass_on(self, connection: PeerConnection, passage: Onward) -> None:
        """Pass on the part of a frame that has arrived. BlockingIOError if nothing is, or the pipe is not free."""
        out, frame = passage.out, passage.frame
        if not passage.idle:
            self._pause(connection, out)
            raise BlockingIOError
        header, payload = passage.take(connection.sock.fileno())
        self._count(frame, len(payload))
        out.queue(header, payload)
        self._send(connection, out, 0)

    def forward(self, connection: PeerConnection, frame: Frame, whole: memoryview) -> None:
        """Pass on a frame that is in memory, behind those to the same worker that came before."""
        # Queued under a lock: another thread may be passing on the early ones, now that their connection is there.
        with self._lock:
            out = self._network.onward(frame.target)
            queued = self._queue_early(frame.target, out) if frame.target in self._early else []
            if self._lost(frame, out):
                pass  # the pair's ends learn from the dispatcher that their way is over
            elif out is not None:
                self._queue(frame, whole, out)
                queued.append((connection, out))
            # A frame may come before this worker has its own connection onward. They are kept in bounds; a frame that is
            # dropped here ends when its pair's way is given up.
            elif self._early_bytes < MAX_EARLY_BYTES and self._early_frames < MAX_EARLY_FRAMES:
                self._early.setdefault(frame.target, []).append((connection, frame, whole))
                self._early_frames += 1
                self._early_bytes += len(whole)
        for source, onward in queued:
            self._send(source, onward, PAUSE_BYTES)

    def forward_early(self) -> None:
        """Pass on the frames that were here before the connection that they take."""
        if not self._early:
            return
        with self._lock:
            queued = [pair for target in [*self._early] for pair in self._queue_early(target, self._network.onward(target))]
        for source, onward in queued:
            self._send(source, onward, PAUSE_BYTES)

    def _queue_early(self, target: int, out: PeerConnection | None) -> list[tuple[PeerConnection, PeerConnection]]:
        """Queue the early frames to a worker at its connection, if there is one. Returns pairs of source and connection."""
        if out is None and self._network.lives(target):
            return []
        queued = []
        for connection, frame, whole in self._early.pop(target):
            self._early_frames -= 1
            self._early_bytes -= len(whole)
            if out is not None and not self._lost(frame, out):
                self._queue(frame, whole, out)
                queued.append((connection, out))
        return queued

    def _queue(self, frame: Frame, whole: memoryview, out: PeerConnection) -> None:
        self._count(frame, frame.nbytes)
        out.queue(whole)

    def resume(self, out: PeerConnection) -> None:
        """Read again the connections whose frames `out` did not take."""
        paused, out.paused = out.paused, []
        for connection in paused:
            connection.stalled = False
            self._network.arm(connection)
        if paused:
            self._wake()

    def _lost(self, frame: Frame, out: PeerConnection | None) -> bool:
        return not self._network.lives(frame.target) or frame.hops >= MAX_HOPS or (out is not None and out.ended)

    def _count(self, frame: Frame, nbytes: int) -> None:
        if nbytes:
            self.relayed[f"{frame.source}>{frame.target}"] += nbytes

    def _send(self, connection: PeerConnection, out: PeerConnection, limit: int) -> None:
        """Send frames queued at `out`. `connection`, its source, is not read while more than `limit` bytes are left."""
        try:
            out.relay()
        except OSError as error:
            self._network.lost(out, error)
            return
        # Back-pressure: the source is not read until `out` has taken its bytes, so a relay's memory stays bounded and TCP
        # slows the sender.
        if out.relayed_bytes > limit:
            self._pause(connection, out)
        elif out.relayed:
            self._network.arm(out)

    def _pause(self, connection: PeerConnection, out: PeerConnection) -> None:
        """Read a connection no more until `out` has taken its frames."""
        if connection not in out.paused:
            out.paused.append(connection)
            connection.stalled = True
            self._network.arm(connection)
        self._network.arm(out)
