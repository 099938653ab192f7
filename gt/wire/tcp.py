"""Connections by their descriptors: how much came on one, ending one, and what mechanism a server's port speaks."""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
import termios

_RECEIVED = 128  # offset of tcpi_bytes_received in struct tcp_info, which Linux has had since 4.1
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03"  # of ZMTP 3, up to where a peer has to say what it speaks itself


def received(fd: int) -> tuple[int, int]:
    """Bytes that have come on a connection, and how many of them nobody has read. (0, 0) where that cannot be known."""
    with contextlib.suppress(OSError, struct.error):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=fd)
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED + 8)
        finally:
            sock.detach()
        unread = array.array("i", [0])
        fcntl.ioctl(fd, termios.FIONREAD, unread)
        return struct.unpack_from("=Q", info, _RECEIVED)[0], unread[0]
    return 0, 0


def duplicate(fd: int) -> int:
    """Another descriptor of the same connection, -1 if there is none."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    except OSError:
        return -1


def end(fd: int) -> None:
    """End a connection, both ways; whoever reads it sees its end."""
    with contextlib.suppress(OSError):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=fd)
        try:
            sock.shutdown(socket.SHUT_RDWR)
        finally:
            sock.detach()


def mechanism(ip: str, port: int, seconds: float = 1.0) -> str | None:
    """The mechanism that a port's ZMTP greeting names: PLAIN, CURVE or NULL; "" if it is no ZMTP; None if nothing answers."""
    try:
        with socket.create_connection((ip, port), seconds) as sock:
            sock.settimeout(seconds)
            sock.sendall(_GREETING)
            greeting = b""
            while len(greeting) < 64:
                data = sock.recv(64 - len(greeting))
                if not data:
                    break
                greeting += data
    except OSError:
        return None
    if len(greeting) < 32 or greeting[0] != 0xFF or greeting[9] != 0x7F:
        return "" if greeting else None
    return greeting[12:32].rstrip(b"\0").decode("ascii", "replace")


def listens(ip: str, port: int, seconds: float = 1.0) -> bool:
    """True if anything takes connections at an address."""
    try:
        with socket.create_connection((ip, port), seconds):
            return True
    except OSError:
        return False
