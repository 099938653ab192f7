"""TCP connections: a process that reads nothing, on a host that answers, keeps its connection."""

from __future__ import annotations

import contextlib
import select
import socket
import time

from gt.wire import tcp
from tests.helpers.limits import limit


def patience(sock):
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000


def until_patient(sock, seconds):
    """Look after a connection, ten times a second, until it has so many seconds."""
    until = time.monotonic() + limit(20)
    while patience(sock) != seconds:
        assert time.monotonic() < until
        select.select([], [], [], 0.1)  # the kernel's probes are no event
        tcp.tend(sock)


def test_a_full_connection_has_time_while_the_other_host_answers():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        other, _ = server.accept()
        with other:
            tcp.watch(sock)
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sock.send(bytes(1 << 16))
            assert patience(sock) == tcp.UNANSWERED_SECONDS
            until_patient(sock, tcp.UNREAD_SECONDS)
            other.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while other.recv(1 << 20):
                    pass
            until_patient(sock, tcp.UNANSWERED_SECONDS)
