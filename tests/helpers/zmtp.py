"""ZMTP 3.0 by hand, for strangers: a connection with any key, which can stop in the middle of anything."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time

from gt.wire.access import auth, server_files
from tests.helpers.limits import limit

READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"


def greeting(mechanism: str = "PLAIN") -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.encode().ljust(20, b"\0") + bytes(32)


def frame(body: bytes, more: bool = False, command: bool = False, claim: int | None = None) -> bytes:
    """claim: the length that it says it has."""
    size = len(body) if claim is None else claim
    flags = (1 if more else 0) | (4 if command else 0)
    return (bytes([flags, size]) if size < 256 else struct.pack(">BQ", flags | 2, size)) + body


def plain_hello(password: bytes, user: bytes = b"gt") -> bytes:
    return frame(b"\x05HELLO" + bytes([len(user)]) + user + bytes([len(password)]) + password, command=True)


def password(port: int, token: str = "") -> bytes:
    """The key by which this user's processes are known to their server on loopback."""
    key = auth.key(auth.read(server_files.find("127.0.0.1", port) or ""), token, "127.0.0.1", port)
    assert key is not None
    return key.password


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), limit(20))


def read(sock: socket.socket, count: int) -> bytes:
    """So many bytes, or fewer if the other side ends."""
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < count and (more := sock.recv(count - len(data))):
            data += more
    return data


def command(sock: socket.socket) -> bytes:
    """The next frame's body, of less than 256 bytes; b"" at the end of the connection."""
    head = read(sock, 2)
    return read(sock, head[1]) if len(head) == 2 else b""


def let_in(port: int, password: bytes) -> socket.socket:
    """A connection that has shown this password, and that a server took."""
    sock = connect(port)
    sock.sendall(greeting())
    assert read(sock, 64)[12:17] == b"PLAIN"
    sock.sendall(plain_hello(password))
    said = command(sock)
    assert said == b"\x07WELCOME", said
    ready = b"\x08INITIATE" + READY[6:]
    sock.sendall(frame(ready, command=True))
    assert command(sock).startswith(b"\x05READY")
    return sock


def ended(sock: socket.socket) -> bool:
    """Wait for the other side to end the connection; what it says before is dropped."""
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def pour(sock: socket.socket, block: bytes) -> bool:
    """Send a block again and again until the other side ends the connection, and hear that: a kernel whose window was full when
    its program closed may answer probes for a minute more.
    """
    until, rest = time.monotonic() + limit(20), memoryview(block)
    sock.setblocking(False)
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLOUT)
    while (left := until - time.monotonic()) > 0:
        ready = dict(poll.poll(left * 1000)).get(sock.fileno(), 0)
        try:
            if ready & ~select.POLLOUT and not sock.recv(1 << 16):
                return True
            if ready & select.POLLOUT:
                rest = rest[sock.send(rest) :] or memoryview(block)
        except BlockingIOError:
            pass
        except OSError:
            return True
    return False
