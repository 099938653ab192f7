"""A worker's port for other hosts, and connections there of which the other end has not proved who it is.

Whoever reaches the port can connect, so these are few: the oldest makes room for a new one, and an honest handshake is short.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from collections.abc import Iterable, Iterator

from gt.errors import ConfigError
from gt.wire import tcp

MAX_STRANGERS = 256  # fewer where descriptors are few: others of this worker need them too
MAX_EARLY_GREETINGS = 64  # that wait at a time for their world


class Strangers:
    """Connections of which each is to be admitted or discarded by the thread that greets it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socks: dict[socket.socket, None] = {}  # oldest first
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = MAX_STRANGERS if descriptors < 0 else min(MAX_STRANGERS, descriptors // 4)
        self._early = 0  # greetings that wait

    def add(self, sock: socket.socket) -> None:
        """A new connection. The oldest is ended, if they are too many."""
        with self._lock:
            if len(self._socks) >= self._most:
                oldest = next(iter(self._socks))
                del self._socks[oldest]
                tcp.shut_down(oldest)
            self._socks[sock] = None

    def remove(self, sock: socket.socket) -> bool:
        """It is no stranger any more, or over. False if it was ended before."""
        with self._lock:
            return self._socks.pop(sock, self) is None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[bool]:
        """Counts greetings of worlds that are not known yet; False for too many."""
        with self._lock:
            self._early += 1
            few = self._early <= MAX_EARLY_GREETINGS
        try:
            yield few
        finally:
            with self._lock:
                self._early -= 1

    def end(self) -> None:
        """End all."""
        with self._lock:
            for sock in self._socks:
                tcp.shut_down(sock)


def listen(ports: Iterable[int]) -> socket.socket:
    """A socket that listens on the first port that is free, for IPv4 and IPv6 where the kernel has both."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    tried = None
    for port in ports:
        try:
            listener = socket.create_server(("", port), family=family, backlog=128, dualstack_ipv6=family == socket.AF_INET6)
            listener.setblocking(False)
            return listener
        except OSError as error:
            tried = error
    raise ConfigError(f"no port of GT_PORTS is free: {tried}")
