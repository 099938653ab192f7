"""The dashboard's HTTP server: the page's files, and its events as Server-Sent Events.

The standard library's http.server does: a few readers, one page, events in one direction. Nothing but GET is served, and
nothing that a request says reaches the server that is observed.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gt.observe.dashboard.feed import Feed, encoded
from gt.observe.dashboard.page_keys import PageKeys, names_this

log = logging.getLogger("gt.dashboard")
FILES = Path(__file__).with_name("page")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MAX_CONNECTIONS = 64
REQUEST_SECONDS = 10.0  # for a request, and for a page to take an event
POLICY = "; ".join(
    ("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'",
     "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")
)  # fmt: skip
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# A browser sends no SameSite=Strict cookie along a redirect from another site's link, so that the page itself leads on.
ENTER = '<!doctype html><title>GT</title><meta http-equiv="refresh" content="0; url=/"><a href="/">Open the dashboard</a>\n'
NO_KEY = (
    "This link was used already, or has no key. The terminal in which the dashboard runs shows a new link after each use; "
    "`gt dashboard` starts a dashboard of your own.\n"
)


class PageServer(ThreadingHTTPServer):
    """Serves until `close`, in threads. host: "127.0.0.1" unless others are to see it. new_link: told each unused link."""

    daemon_threads = False
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, feed: Feed, host: str, port: int, new_link: Callable[[str], None]) -> None:
        self.feed, self.keys, self.host, self._new_link = feed, PageKeys(), host, new_link
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), PageHandler)
        self.cookie = f"gt_dashboard_{self.server_port}"  # browsers send a host's cookies to all of its ports
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.5}, name="gt-dashboard-http")
        self._thread.start()
        self._tell()

    @property
    def link(self) -> str:
        """The link that opens the page once."""
        host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/?key={self.keys.key}"

    def enter(self, key: str) -> str:
        """The cookie for a key, "" for a wrong one."""
        with self._lock:
            cookie = self.keys.exchange(key)
        if cookie:
            self._tell()
        return cookie

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def _tell(self) -> None:
        self._new_link(self.link)

    # ---- called by the base class

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = len(self._open) >= MAX_CONNECTIONS
            self._open.add(request)
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser has gone, or was too slow: its connection ends, and nothing else. Another error is ours."""
        if not isinstance(sys.exc_info()[1], OSError):
            log.exception("a request of the dashboard failed")


class PageHandler(BaseHTTPRequestHandler):
    """One request. HTTP/1.0: a connection each, so that none waits idle."""

    server: PageServer
    timeout = REQUEST_SECONDS
    server_version, sys_version = "gt", ""

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
            query = parse_qs(url.query, max_num_fields=8)
        except ValueError:
            self.send_error(400)
            return
        if not names_this(self.headers.get("Host", ""), self.server.host):
            self._send(421, "text/plain", b"this server has another name\n")
        elif url.path == "/" and "key" in query:
            self._enter(query["key"][0])
        elif not self.server.keys.admits(self._cookie()) or self.headers.get("Sec-Fetch-Site") == "cross-site":
            self._send(403, "text/plain", NO_KEY.encode())
        elif url.path == "/events":
            self._events(query.get("log") == ["1"])
        else:
            self._file({"/": "index.html", "/favicon.ico": "icon.svg"}.get(url.path, url.path[1:]))

    do_HEAD = do_GET

    def _cookie(self) -> str:
        try:
            jar = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return ""
        return jar[self.server.cookie].value if self.server.cookie in jar else ""

    def _enter(self, key: str) -> None:
        cookie = self.server.enter(key) if self.command == "GET" else ""
        if not cookie:
            self._send(403, "text/plain", NO_KEY.encode())
            return
        value = f"{self.server.cookie}={cookie}; Path=/; HttpOnly; SameSite=Strict"
        self._send(200, "text/html", ENTER.encode(), {"Set-Cookie": value})

    def _file(self, name: str) -> None:
        """A file of the page: names are those of the folder, so no path leads out of it."""
        file = next((file for file in FILES.iterdir() if file.name == name and file.suffix in TYPES), None)
        if file is None:
            self._send(404, "text/plain", b"no such file\n")
        else:
            self._send(200, TYPES[file.suffix], file.read_bytes())

    def _events(self, log: bool) -> None:
        self._begin(200, "text/event-stream", {})
        if self.command == "HEAD":
            return
        page = self.server.feed.open(log)
        try:
            while (events := self.server.feed.events(page)) is not None:
                self.wfile.write(b"".join(map(encoded, events)) or b": alive\n\n")
                self.wfile.flush()
        except OSError:  # the page is closed
            return
        finally:
            self.server.feed.leave(page)

    def _send(self, code: int, kind: str, body: bytes, more: dict[str, str] | None = None) -> None:
        self._begin(code, kind, {"Content-Length": str(len(body)), **(more or {})})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _begin(self, code: int, kind: str, more: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", **HEADERS, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """An answer without the request's own text in it."""
        self._send(code, "text/plain", b"this request is not served\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: a path may have a key."""
