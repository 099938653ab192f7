"""The dispatcher's end of all links: bound to a port, polled by its loop."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import zmq

from gt.errors import Refused
from gt.wire import codec
from gt.wire.liveness import Cable
from gt.wire.messages import Message
from gt.wire.socket import (
    BURST,
    GONE,
    LINGER,
    QUEUE,
    Frames,
    frames_of,
    monitored,
    options,
    resolve,
    terminate,
)

log = logging.getLogger("gt.wire")

ENDED = "its connection ended: the process exited, was killed, or stopped answering"


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message from a peer, not yet unpacked."""

    peer: bytes
    body: bytes
    frames: tuple


@dataclass(frozen=True, slots=True)
class Gone:
    """A peer's connection ended."""

    peer: bytes
    reason: str


class Router:
    """The dispatcher's end: bound to a port, polled by one thread, which is also the one that sends."""

    def __init__(self, host: str, port: int, heartbeat: float = 10.0) -> None:
        self._context = zmq.Context(io_threads=1)
        self._sock = self._context.socket(zmq.ROUTER)
        options(self._sock, heartbeat)
        # What is under way is bounded by credit, and a full queue would make ROUTER drop messages in silence.
        self._sock.setsockopt(zmq.SNDHWM, 0)
        self._sock.setsockopt(zmq.RCVHWM, QUEUE)
        self._sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._monitor = self._sock.get_monitor_socket(GONE)
        self.port = self._bind(host, port)
        self._poller = zmq.Poller()
        self._poller.register(self._sock, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._heartbeat = heartbeat
        self._cables: dict[bytes, Cable] = {}
        self._owner: dict[int, bytes] = {}  # file descriptor of a connection -> its peer
        self._fd: dict[bytes, int] = {}
        self._stale: dict[int, int] = {}  # ends still to be reported of connections whose descriptor is in use again
        self._dead: dict[bytes, None] = {}  # the last peers that went: what they left behind in queues is dropped
        self._packed: tuple[Message | None, bytes] = (None, b"")

    def watch(self, fd: int) -> None:
        """Let poll return when this descriptor can be read; whoever registered it reads it."""
        self._poller.register(fd, zmq.POLLIN)

    def poll(self, timeout: float) -> list[Arrived | Gone]:
        """What came within `timeout` seconds; a peer's messages always come before its end."""
        ready = dict(self._poller.poll(int(timeout * 1000)))
        found: list[Arrived | Gone] = []
        # Monitor first: a connection's end is reported after all it brought is in our queue.
        ended = [event["value"] for event in monitored(self._monitor)] if self._monitor in ready else []
        self._receive(found, 1 << 16 if ended else BURST)
        for fd in ended:
            self._end(fd, found)
        return found

    def cut_off(self) -> list[Gone]:
        """Peers whose host is gone: it has acknowledged nothing for a heartbeat."""
        found = [(peer, cable.look()) for peer, cable in self._cables.items()]
        return [self._lose(peer, f"its connection ended: {how}") for peer, how in found if how]

    def send(self, peer: bytes, message: Message, frames: Frames = ()) -> None:
        """Queue a message; one to a peer that is gone is dropped."""
        if self._packed[0] is not message:  # the same message to many peers is packed once
            self._packed = (message, codec.pack(message))
        try:
            self._sock.send_multipart([peer, self._packed[1], *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise

    def descriptors(self, peers: Iterable[bytes]) -> set[int]:
        """Those of these peers' connections."""
        return {self._fd[peer] for peer in peers if peer in self._fd}

    def forget(self, peer: bytes) -> None:
        """Drop what this peer sends from now on; its end is reported all the same."""
        self._dead[peer] = None
        if len(self._dead) > 1000:
            del self._dead[next(iter(self._dead))]

    def close(self) -> None:
        """Send what is queued, for at most LINGER seconds, and free the port."""
        self._sock.disable_monitor()
        self._monitor.close(0)
        self._sock.close(int(LINGER * 1000))
        terminate(self._context)

    def _bind(self, host: str, port: int) -> int:
        ip = host if host == "*" else resolve(host)
        try:
            self._sock.bind(f"tcp://{ip}:{port or '*'}")
        except zmq.ZMQError as error:
            self._sock.disable_monitor()
            self._monitor.close(0)
            self._sock.close(0)
            terminate(self._context)
            if error.errno == errno.EADDRINUSE:
                hint = "is in use: stop what listens there, or choose another with -p (0 picks a free one)"
                raise Refused(f"port {port} on {host} {hint}") from None
            raise Refused(f"cannot listen on {host}:{port}: {error}") from None
        return int(self._sock.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])

    def _receive(self, found: list[Arrived | Gone], burst: int) -> None:
        sock = self._sock
        for _ in range(burst):
            try:
                peer = sock.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not sock.getsockopt(zmq.RCVMORE):
                continue
            if peer in self._fd:
                body = sock.recv()
            else:
                frame = sock.recv(copy=False)
                body = frame.bytes
                if peer not in self._dead:
                    self._meet(peer, frame, found)
            frames = frames_of(sock)
            if peer not in self._dead:
                found.append(Arrived(peer, body, frames))

    def _meet(self, peer: bytes, frame: zmq.Frame, found: list[Arrived | Gone]) -> None:
        """A new peer. If its descriptor has an owner, that one's end is still on its way to us."""
        try:
            fd = frame.get(zmq.SRCFD)
        except zmq.ZMQError:  # it speaks ZMTP 1 or 2, which has no such thing, and which none of ours speaks
            self.forget(peer)
            return
        if fd in self._owner:
            self._stale[fd] = self._stale.get(fd, 0) + 1
            found.append(self._lose(self._owner[fd]))
        self._owner[fd], self._fd[peer], self._cables[peer] = peer, fd, Cable(fd, self._heartbeat)

    def _end(self, fd: int, found: list[Arrived | Gone]) -> None:
        if self._stale.get(fd):
            self._stale[fd] -= 1
        elif fd in self._owner:
            found.append(self._lose(self._owner[fd]))

    def _lose(self, peer: bytes, how: str = ENDED) -> Gone:
        fd = self._fd.pop(peer)
        del self._cables[peer]
        if self._owner.get(fd) == peer:
            del self._owner[fd]
        self.forget(peer)
        return Gone(peer, how)
