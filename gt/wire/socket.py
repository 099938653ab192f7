"""What both ends of a link over ZeroMQ share: addresses, options, and reading what has come.

`Dealer` is a client's or worker's end, with an I/O thread of its own; `Router` the dispatcher's, polled by its loop. Both see
a killed peer through the socket's monitor at once. That a peer is stopped is asked of the kernel where both are on one host
(liveness.py); elsewhere ZMTP heartbeats, which libzmq's own threads send and answer whatever Python is doing, say so, after
much longer: on a loaded machine those threads wait for their turn too.
"""

from __future__ import annotations

import contextlib
import socket as bsd
import threading
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from gt.errors import DispatcherLost
from gt.wire.messages import MAX_BODY

Frames = Sequence[Any]  # bytes-like, each of at most messages.CHUNK bytes
QUEUE = 64  # messages that libzmq itself holds for a Dealer; more wait in our deque, where they cost a reference
BURST = 256  # messages taken in before anything else gets its turn
PATIENCE = 6  # heartbeats without a sign of life after which a peer that nobody can look at counts as lost
LINGER = 1.0  # seconds that closing waits for what is still to be sent
GONE = zmq.EVENT_DISCONNECTED
FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


def endpoint(address: str) -> str:
    """`tcp://ip:port` of "host:port"; `ipc://...` stays. DispatcherLost for what cannot be an address."""
    if address.startswith("ipc://"):
        return address
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise DispatcherLost(f"{address!r} is not an address: want host:port, such as localhost:12345")
    return f"tcp://{resolve(host)}:{port}"


def resolve(host: str) -> str:
    """The IPv4 address of a host name."""
    try:
        return bsd.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        raise DispatcherLost(f"no host is called {host!r} ({error}): check the address") from None


def options(sock: zmq.Socket, heartbeat: float) -> None:
    """What both ends set: a silent peer is dropped after PATIENCE heartbeats (seconds), and no frame is larger than a body."""
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_BODY)
    sock.setsockopt(zmq.HEARTBEAT_IVL, max(50, int(heartbeat * 200)))
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(100, int(heartbeat * PATIENCE * 1000)))
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)


def terminate(context: zmq.Context) -> None:
    """End a context whose sockets are closed. In one of 900 times, where a connection had just ended, libzmq waited for ever:
    then it is left to it.
    """
    thread = threading.Thread(target=context.term, name="zmq-term", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, and begins no thread any more
        context.term()
    else:
        thread.join(3 * LINGER)


def frames_of(sock: zmq.Socket) -> tuple[Any, ...]:
    """The rest of a message whose first frame has been read, not copied."""
    rest = []
    while sock.getsockopt(zmq.RCVMORE):
        rest.append(sock.recv(copy=False).buffer)
    return tuple(rest)


def events_of(sock: zmq.Socket) -> int:
    """What can be done with a socket now; the signal on its descriptor is taken by this."""
    return sock.getsockopt(zmq.EVENTS)  # type: ignore[return-value]


def descriptor_of(sock: zmq.Socket) -> int:
    """Readable when a socket's state may have changed."""
    return sock.getsockopt(zmq.FD)  # type: ignore[return-value]


def monitored(monitor: zmq.Socket) -> list[Any]:
    """What a socket's monitor has seen since."""
    found = []
    with contextlib.suppress(zmq.Again):
        while True:
            found.append(recv_monitor_message(monitor, zmq.NOBLOCK))
    return found
