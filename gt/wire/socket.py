"""What both ends of a link over ZeroMQ share: addresses, options, and reading what has come.

`Dealer` is a client's or worker's end, with an I/O thread of its own; `Router` the dispatcher's, polled by its loop. Both see
a killed peer through the socket's monitor at once. That a peer is stopped is asked of the kernel where both are on one host
(liveness.py); elsewhere ZMTP heartbeats, which libzmq's own threads send and answer whatever Python is doing, say so, after
much longer: on a loaded machine those threads wait for their turn too.
"""

from __future__ import annotations

import socket as bsd
import struct
import threading
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils import z85

from gt.errors import DispatcherLost, SystemFailure
from gt.wire.access.auth import CURVE, PLAIN, USER, Credentials

Frames = Sequence[Any]  # bytes-like, each of at most messages.CHUNK bytes
QUEUE = 64  # messages that libzmq itself holds for a Dealer; more wait in our deque, where they cost a reference
BURST = 256  # messages taken in before anything else gets its turn
PATIENCE = 6  # heartbeats without a sign of life after which a peer that nobody can look at counts as lost
LINGER = 1.0  # seconds that closing waits for what is still to be sent
HANDSHAKE = 10.0  # seconds that a handshake may take
SEALED = 64  # bytes that encryption adds to a frame, and more
PORT = 12345  # of a server that is started by hand and told no other
SMALL = 1 << 12  # bytes of a part whose copy costs less than libzmq's object for a part that is not copied
# Flags as numbers: pyzmq's enums cost half a microsecond for each call.
NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
GONE = int(zmq.EVENT_DISCONNECTED)


def place(address: str) -> tuple[str, int]:
    """IPv4 address and port of "host:port". DispatcherLost for what cannot be an address."""
    host, port = host_and_port(address)
    return resolve(host), port


def host_and_port(address: str) -> tuple[str, int]:
    """Name and port of "host:port". DispatcherLost for a text of another form."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        want = f"host:port, such as localhost:{PORT}, with a port of 1 to 65535"
        raise DispatcherLost(f"{address!r} is not an address: want {want}")
    return host, int(port)


def resolve(host: str) -> str:
    """The IPv4 address of a host name."""
    try:
        return bsd.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        raise DispatcherLost(f"no host is called {host!r} ({error}): check the address") from None


def options(sock: zmq.Socket, heartbeat: float, longest: int) -> None:
    """Set what both ends have: a silent peer is dropped after PATIENCE heartbeats (seconds), frames have `longest` bytes."""
    sock.setsockopt(zmq.MAXMSGSIZE, longest + SEALED)
    sock.setsockopt(zmq.HEARTBEAT_IVL, max(50, int(heartbeat * 200)))
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(100, int(heartbeat * PATIENCE * 1000)))
    sock.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE * 1000))
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)


def show(sock: zmq.Socket, key: Credentials) -> None:
    """Make a socket that connects show a key, and for CURVE insist on the server's."""
    if key.mechanism == PLAIN:
        sock.setsockopt(zmq.PLAIN_USERNAME, USER)
        sock.setsockopt(zmq.PLAIN_PASSWORD, key.password)
    elif key.mechanism == CURVE:
        sock.setsockopt(zmq.CURVE_SERVERKEY, public(key.server))
        sock.setsockopt(zmq.CURVE_PUBLICKEY, public(key.client))
        sock.setsockopt(zmq.CURVE_SECRETKEY, key.client)


def ask(sock: zmq.Socket, key: Credentials) -> None:
    """Make a socket that listens ask for a key, whose holders ZAP lets in."""
    sock.setsockopt(zmq.ZAP_DOMAIN, b"gt")
    if key.mechanism == PLAIN:
        sock.setsockopt(zmq.PLAIN_SERVER, 1)
    elif key.mechanism == CURVE:
        public(key.server)
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, key.server)


def public(secret: bytes) -> bytes:
    """The public key of a secret key, both of 32 bytes."""
    if not zmq.has("curve"):
        raise SystemFailure("this libzmq was built without CURVE, which a link off loopback needs: pip install pyzmq has it")
    return z85.decode(zmq.curve_public(z85.encode(secret)))


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


def put(sock: zmq.Socket, parts: Frames) -> None:
    """Send the parts of a message without waiting; zmq.Again if the queue is full. Large parts are not copied."""
    last = len(parts) - 1
    for number, part in enumerate(parts):
        size = len(part) if type(part) is bytes else memoryview(part).nbytes
        sock.send(part, NOW if number == last else _MORE, copy=size <= SMALL)


def events_of(sock: zmq.Socket) -> int:
    """What can be done with a socket now; the signal on its descriptor is taken by this."""
    return sock.getsockopt(zmq.EVENTS)  # type: ignore[return-value]


def descriptor_of(sock: zmq.Socket) -> int:
    """Readable when a socket's state may have changed."""
    return sock.getsockopt(zmq.FD)  # type: ignore[return-value]


def monitored(monitor: zmq.Socket) -> list[tuple[int, int]]:
    """(event, value) of all that a socket's monitor has seen since."""
    found = []
    while events_of(monitor) & zmq.POLLIN:
        data = monitor.recv(zmq.NOBLOCK)
        monitor.recv()  # the address, which is the listener's
        found.append(struct.unpack("=Hi", data))
    return found
