"""An HTTP server in threads that strangers cannot fill: few connections, and those that ask for too long make room.

Whoever reaches the port can connect. So a request has a deadline, and the newest connection is served in place of the oldest
whose request is not admitted. Connections that are admitted last; each owner has few of them, and all together leave room for
requests. Knows no page and no metric.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import sys
import threading
import time
from collections import Counter
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any

from gt.wire import tcp

log = logging.getLogger("gt.observe")
MAX_CONNECTIONS = 64
MAX_ADMITTED = 48  # of them: the others are for requests
MAX_OWNED = 16  # of those that are admitted, one owner's
REQUEST_SECONDS = 10.0  # from a connection to the end of its answer, unless it is admitted; for each write of those
MAX_REQUEST_BYTES = 64 << 10  # with its headers
MAX_ERRORS_LOGGED = 16  # of one server, or strangers whose requests a library takes amiss would fill its log
POLL_SECONDS = 0.5  # between looks for requests that are late
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class BoundedServer(ThreadingHTTPServer):
    """Serves from its creation until `close`. name: of its threads."""

    daemon_threads = False
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler], name: str) -> None:
        self.host = host
        self._asking: dict[socket.socket, float] = {}  # connections that are not admitted -> when they began, oldest first
        self._admitted: dict[socket.socket, str] = {}  # connection -> its owner, oldest first
        self._lock = threading.Lock()
        self._errors = 0
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": POLL_SECONDS}, name=name)
        self._thread.start()

    def admit(self, connection: socket.socket, owner: str) -> None:
        """Let a connection last: its request is allowed.

        If an owner has too many connections, its oldest ends. If all are too many, the oldest of the owner with the most ends.
        So nobody is shut out by one who leaves pages without a word, or reads none.
        """
        with self._lock:
            if self._asking.pop(connection, None) is None:
                return
            self._admitted[connection] = owner

            # One too many: somebody's oldest connection ends.
            owned = Counter(self._admitted.values())
            if owned[owner] <= MAX_OWNED and len(self._admitted) <= MAX_ADMITTED:
                return
            greedy = owner if owned[owner] > MAX_OWNED else owned.most_common(1)[0][0]
            oldest = next(one for one, of in self._admitted.items() if of == greedy)
            del self._admitted[oldest]
            tcp.shut_down(oldest)

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        with self._lock:
            for connection in (*self._asking, *self._admitted):
                tcp.shut_down(connection)
        self.server_close()

    # ---- called by the base classes

    def process_request(self, request: Any, client_address: Any) -> None:
        # A new connection may be a person's, and the oldest that asks is
        # most likely a stranger's that says nothing: it makes room.
        with self._lock:
            full = len(self._asking) + len(self._admitted) >= MAX_CONNECTIONS
            oldest = next(iter(self._asking), None)
            if full and oldest is not None:
                del self._asking[oldest]
                tcp.shut_down(oldest)
            if not full or oldest is not None:
                self._asking[request] = time.monotonic()
        # All are admitted: there is none to make room, and the new one is refused.
        if full and oldest is None:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End requests that are late. Called between requests, and each POLL_SECONDS."""
        now = time.monotonic()
        with self._lock:
            for connection in [sock for sock, began in self._asking.items() if now - began > REQUEST_SECONDS]:
                del self._asking[connection]
                tcp.shut_down(connection)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._asking.pop(request, None)
            self._admitted.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser has gone, or was too slow: its connection ends, and nothing else. Another error is ours, or a library's."""
        if isinstance(sys.exc_info()[1], OSError):
            return
        with self._lock:
            self._errors += 1
            number = self._errors
        if number <= MAX_ERRORS_LOGGED:
            log.exception("an HTTP request failed%s", "; later ones are not logged" if number == MAX_ERRORS_LOGGED else "")


class BoundedRequest:
    """The bytes of a request, as far as BaseHTTPRequestHandler reads them. OSError after MAX_REQUEST_BYTES."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream, self._left = stream, MAX_REQUEST_BYTES
        self.close = stream.close

    def readline(self, most: int = -1) -> bytes:
        # One byte more than is left, to tell a request of exactly the limit from a longer one.
        line = self._stream.readline(min(most, self._left + 1) if most >= 0 else self._left + 1)
        self._left -= len(line)
        if self._left < 0:
            raise OSError(f"the request has more than {MAX_REQUEST_BYTES} bytes")
        return line


class RequestHeaders(HTTPMessage):
    """Headers of a request without a body. Its type is not read: the library takes seconds for some of 64 KiB."""

    def get_content_type(self) -> str:
        return "text/plain"


class BoundedHandler(BaseHTTPRequestHandler):
    """One request of a BoundedServer, without a body. HTTP/1.0: a connection each, so that none waits idle."""

    server: BoundedServer
    MessageClass = RequestHeaders
    timeout = REQUEST_SECONDS
    server_version, sys_version = "gt", ""

    def setup(self) -> None:
        super().setup()
        self.rfile = BoundedRequest(self.rfile)  # type: ignore[assignment]

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: a path may have a key."""


def names_this(host: str, asked: str) -> bool:
    """True if a request's Host is an address, this machine, or the host that was asked for.

    Another name may be somebody's who has let it point here, so that his page could read ours (DNS rebinding).
    """
    # Without its port, and without the brackets of an IPv6 address. An address cannot be rebound, a name can.
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.removeprefix("[").removesuffix("]").lower()
    if name in ("localhost", asked.lower(), socket.gethostname().lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
