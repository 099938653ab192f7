"""Helpers of both ends of a link over ZeroMQ: addresses, options, and reading of messages.

`Dealer` is a client's or worker's end, with an I/O thread of its own. `Router` is the dispatcher's end, polled by its loop.
Both see the end of a killed peer at once, through the socket's monitor. On one host the kernel shows that a peer is stopped
(liveness.py). On other hosts ZMTP heartbeats show it. libzmq's threads send these, which a loaded machine may delay, so their
limit is much longer.
"""

from __future__ import annotations

import re
import socket as bsd
import struct
import threading
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils import z85

from gt import env
from gt.errors import ConfigError, DispatcherLost, SystemFailure
from gt.wire.access.auth import CURVE, PLAIN, USER, Credentials

Frames = Sequence[Any]  # bytes-like, at most messages.CHUNK bytes each
QUEUE_MESSAGES = 64  # messages in libzmq's queue of a Dealer; more wait in its deque, where they cost a reference
BURST_MESSAGES = 256  # messages received in a row before other work
PATIENCE_HEARTBEATS = 6  # silent heartbeats after which a peer on another host counts as lost
LINGER_SECONDS = 1.0  # seconds that close() waits for queued messages
HANDSHAKE_SECONDS = 10.0  # seconds that a handshake may take
SEALED_BYTES = 64  # upper bound of the bytes that encryption adds to a frame
PORT = 12345  # default port of a server that is started by hand
PAGE_PORT = 9471  # default port of the page that shows a server
ADDRESS = f"host:port, such as localhost:{PORT} or [::1]:{PORT}, with a port of 1 to 65535"
_ADDRESS = re.compile(r"(?:tcp://)?(?:\[([^\s\[\]/]+)\]|([^\s\[\]:/]+)):(\d{1,5})", re.ASCII)
SMALL_BYTES = 1 << 12  # bytes of a part whose copy costs less than libzmq's object for a part that is not copied
# Flags as numbers: pyzmq's enums cost half a microsecond for each call.
NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
GONE = int(zmq.EVENT_DISCONNECTED)


def place(address: str) -> tuple[str, int]:
    """IP address and port of "host:port". DispatcherLost for another text."""
    host, port = host_and_port(address)
    return resolve(host), port


def host_and_port(address: str) -> tuple[str, int]:
    """Name and port of "host:port", an IPv6 address being in brackets. DispatcherLost for another text."""
    # An IPv6 address has colons of its own, so it must be in brackets: "::1:80" would be ambiguous.
    match = _ADDRESS.fullmatch(str(address))
    if match is None or not 0 < int(match[3]) < 1 << 16:
        raise DispatcherLost(f"{address!r:.80} is not an address: want {ADDRESS}")
    return match[1] or match[2], int(match[3])


def server_of_environment(default: str = "") -> str:
    """The address in GT_SERVER, or the default. ConfigError for a text that is no address."""
    address = env.get("GT_SERVER")
    if not address:
        return default
    try:
        host_and_port(address)
    except DispatcherLost:
        raise ConfigError(f"GT_SERVER is {address!r:.80}, want {ADDRESS}") from None
    return address


def port(text: str) -> int:
    """The port that an option of a command names; 0 is a free one. Raises ArgumentTypeError, whose text argparse shows."""
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise ArgumentTypeError(f"{text!r} is not a port: want 0 to 65535")
    return int(text)


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """A parser for an option that is a number above 0, of a limit or of seconds."""

    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not 0 < number < 1 << 31:
            raise ArgumentTypeError(f"got {text!r}, want a {'whole ' if kind is int else ''}number above 0")
        return number

    return read


def written(host: str, port: int | str) -> str:
    """The text "host:port" that `host_and_port` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str) -> str:
    """The IP address of a host name; of several the first, and IPv4 before IPv6."""
    try:
        rows = bsd.getaddrinfo(host, None, type=bsd.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise DispatcherLost(f"no host is called {host!r} ({error}): check the address") from None
    # "localhost" may be ::1 and 127.0.0.1, and servers listen on IPv4 by default. A link-local IPv6 address needs its scope.
    family, *_, address = min(rows, key=lambda row: row[0] != bsd.AF_INET)
    scope = f"%{address[3]}" if family == bsd.AF_INET6 and len(address) > 3 and address[3] else ""
    return f"{str(address[0]).partition('%')[0]}{scope}"


def endpoint(sock: zmq.Socket, ip: str, port: int | str) -> str:
    """libzmq's name of an address, for which the socket is made ready."""
    if ":" in ip:
        sock.setsockopt(zmq.IPV6, 1)
    return f"tcp://{written(ip, port)}"


def options(sock: zmq.Socket, heartbeat: float, longest: int) -> None:
    """Set options of both ends: a silent peer is dropped after PATIENCE_HEARTBEATS, frames have at most `longest` bytes.

    heartbeat: seconds; 0 waits for a silent peer for ever.
    """
    # libzmq ends a connection whose frame is longer, before it allocates memory for the frame.
    sock.setsockopt(zmq.MAXMSGSIZE, longest + SEALED_BYTES)
    # Five ZMTP heartbeats a GT heartbeat; the peer's libzmq answers them from a thread of its own.
    if heartbeat:
        sock.setsockopt(zmq.HEARTBEAT_IVL, max(50, int(heartbeat * 200)))
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(100, int(heartbeat * PATIENCE_HEARTBEATS * 1000)))
    sock.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)


def show(sock: zmq.Socket, key: Credentials) -> None:
    """Make a connecting socket show a key, and for CURVE check the server's."""
    if key.mechanism == PLAIN:
        sock.setsockopt(zmq.PLAIN_USERNAME, USER)
        sock.setsockopt(zmq.PLAIN_PASSWORD, key.password)
    elif key.mechanism == CURVE:
        sock.setsockopt(zmq.CURVE_SERVERKEY, public(key.server))
        sock.setsockopt(zmq.CURVE_PUBLICKEY, public(key.client))
        sock.setsockopt(zmq.CURVE_SECRETKEY, key.client)


def ask(sock: zmq.Socket, key: Credentials) -> None:
    """Make a listening socket ask for a key, which ZAP checks."""
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
    """End a context whose sockets are closed.

    libzmq waited for ever in one of 900 ends, where a connection had just ended. The context is then left behind.
    """
    thread = threading.Thread(target=context.term, name="zmq-term", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending, and starts no thread
        context.term()
    else:
        thread.join(3 * LINGER_SECONDS)


def frames_of(sock: zmq.Socket) -> tuple[Any, ...]:
    """The remaining frames of a message, without copies."""
    rest = []
    while sock.getsockopt(zmq.RCVMORE):
        rest.append(sock.recv(copy=False).buffer)
    return tuple(rest)


def put(sock: zmq.Socket, parts: Frames) -> None:
    """Send the parts of a message without waiting; zmq.Again if the queue is full. Large parts are not copied."""
    # Only the first part can meet a full queue: libzmq takes a message
    # whole or not at all, so zmq.Again leaves nothing half sent.
    last = len(parts) - 1
    for number, part in enumerate(parts):
        size = len(part) if type(part) is bytes else memoryview(part).nbytes
        sock.send(part, NOW if number == last else _MORE, copy=size <= SMALL_BYTES)


def events_of(sock: zmq.Socket) -> int:
    """Events of a socket (POLLIN, POLLOUT). Reading them consumes the signal on its descriptor."""
    return sock.getsockopt(zmq.EVENTS)  # type: ignore[return-value]


def descriptor_of(sock: zmq.Socket) -> int:
    """A descriptor that is readable when the socket's state may have changed."""
    return sock.getsockopt(zmq.FD)  # type: ignore[return-value]


def monitored(monitor: zmq.Socket) -> list[tuple[int, int]]:
    """(event, value) of all new events of a socket's monitor."""
    events = []
    while events_of(monitor) & zmq.POLLIN:
        data = monitor.recv(zmq.NOBLOCK)
        monitor.recv()  # the address, which is the listener's
        events.append(struct.unpack("=Hi", data))
    return events
