"""TCP connections by descriptor: received bytes, end, and the mechanism of a server's port."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
import termios
from typing import NamedTuple

UNANSWERED_SECONDS = 2.5
# The other host, or a link to it, is gone: other errors of a connection are the other process's end
CUT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})
UNREAD_SECONDS = 60.0  # limit while the other host answers that its process reads nothing
_PROBES = struct.Struct("=4xB3xI12xI28xI")  # of struct tcp_info: backoff, rto in microseconds, unacked, last_ack_recv in ms
_ACKED, _RECEIVED = 120, 128  # offsets of tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info, since Linux 4.1
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03"  # start of a ZMTP 3 greeting, up to the version


class Traffic(NamedTuple):
    """Bytes received on a connection, those of them not read yet, and bytes sent that the other host has taken. 0: unknown."""

    received: int = 0
    unread: int = 0
    acked: int = 0


def traffic(fd: int) -> Traffic:
    """The bytes that the kernel has counted on a connection."""
    with contextlib.suppress(OSError, struct.error):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=fd)
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED + 8)
        finally:
            sock.detach()
        # The kernel counts bytes whether they are read or not, so the difference is the bytes that libzmq has taken.
        unread = array.array("i", [0])
        fcntl.ioctl(fd, termios.FIONREAD, unread)
        acked, came = struct.unpack_from("=QQ", info, _ACKED)
        return Traffic(came, unread[0], acked)
    return Traffic()


def duplicate(fd: int) -> int:
    """A second descriptor of the connection, -1 where none is free."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    except OSError:
        return -1


def shut_down(sock: socket.socket) -> None:
    """End a connection in both directions. The thread that reads it sees the end, and closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def end(fd: int) -> None:
    """As `shut_down`, by a connection's descriptor."""
    with contextlib.suppress(OSError):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=fd)
        try:
            shut_down(sock)
        finally:
            sock.detach()


def watch(sock: socket.socket) -> None:
    """Have the kernel end a connection to a host that answers nothing for UNANSWERED_SECONDS. Busy processes do not matter."""
    # Probes each second while the connection is idle; TCP_USER_TIMEOUT bounds how long probes or data may go unacknowledged.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        sock.setsockopt(socket.IPPROTO_TCP, option, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNANSWERED_SECONDS * 1000))


def connect(sock: socket.socket, source: str, target: tuple[str, int], seconds: float) -> None:
    """Connect from an address within so many seconds, watched as `watch` says."""
    sock.settimeout(seconds)
    watch(sock)
    sock.bind((source, 0))
    sock.connect(target)


def tend(sock: socket.socket) -> None:
    """Give a full connection time as long as the other host answers: the kernel counts a process that does not read as silent.

    To be called about once a second while the connection takes no bytes; `watch` has been called before.
    """
    backoff, rto, unacked, silent = _PROBES.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _PROBES.size))
    # A window of no bytes is probed at doubling intervals. A retransmission backs off too, and then bytes are unacknowledged.
    unread = backoff and not unacked and silent < max(UNANSWERED_SECONDS * 1000, 1.5 * (rto << backoff) / 1000)
    seconds = UNREAD_SECONDS if unread else UNANSWERED_SECONDS
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def watch_descriptor(fd: int) -> None:
    """The same by a connection's descriptor, unless the other end is on this host."""
    with contextlib.suppress(OSError):
        sock = socket.socket(fileno=fd)
        try:
            address = sock.getpeername()[0].removeprefix("::ffff:")
            if not ipaddress.ip_address(address).is_loopback:
                watch(sock)
        finally:
            sock.detach()


def mechanism(ip: str, port: int, seconds: float = 1.0) -> str | None:
    """Mechanism in a port's ZMTP greeting: PLAIN, CURVE or NULL; "" if it is no ZMTP; None without an answer."""
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
    # A ZMTP 3 greeting: signature (10 bytes, 0xff ... 0x7f), version (2), mechanism (20, padded with zeros), and 32 more.
    if len(greeting) < 32 or greeting[0] != 0xFF or greeting[9] != 0x7F:
        return "" if greeting else None
    return greeting[12:32].rstrip(b"\0").decode("ascii", "replace")


def listens(ip: str, port: int, seconds: float = 1.0) -> bool:
    """True if a process listens at an address."""
    try:
        with socket.create_connection((ip, port), seconds):
            return True
    except OSError:
        return False
