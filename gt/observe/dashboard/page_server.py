"""The dashboard's HTTP server: the page's files, and its events as Server-Sent Events.

The standard library's http.server does: a few readers, one page, events in one direction. Nothing but GET is served, and
nothing that a request says reaches the server that is observed.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from gt.observe.bounded_server import BoundedHandler, BoundedServer, names_this
from gt.observe.dashboard.feed import Feed, encoded
from gt.observe.dashboard.page_keys import PageKeys

FILES = Path(__file__).with_name("page")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "; ".join(
    ("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'",
     "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")
)  # fmt: skip
RETRY_MS = 1000  # until a browser connects again, once its connection has ended
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# A browser sends no SameSite=Strict cookie along a redirect from another site's link, so that the page itself leads on.
ENTER = (
    '<!doctype html><title>GT</title><meta http-equiv="refresh" content="0; url=/#proof={0}">'
    '<a href="/#proof={0}">Open the dashboard</a>\n'
)
NO_KEY = (
    "This link was used already, or has no key. The terminal in which the dashboard runs shows a new link after each use; "
    "`gt dashboard` starts a dashboard of your own.\n"
)


class PageServer(BoundedServer):
    """Serves until `close`, in threads. host: "127.0.0.1" unless others are to see it. new_link: told each unused link."""

    def __init__(self, feed: Feed, host: str, port: int, new_link: Callable[[str], None]) -> None:
        self.feed, self.keys, self._new_link = feed, PageKeys(), new_link
        self._keys_lock = threading.Lock()
        super().__init__(host, port, PageHandler, "gt-dashboard-http")
        try:
            self._new_link(self.link)
        except BaseException:  # such as a terminal that is gone: nobody else could end the server's thread
            self.close()
            raise

    @property
    def cookie(self) -> str:
        """The name of its cookie: browsers send a host's cookies to all of its ports."""
        return f"gt_dashboard_{self.server_port}"

    @property
    def link(self) -> str:
        """The link that opens the page once."""
        host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/?key={self.keys.key}"

    def enter(self, key: str) -> str:
        """The cookie for a key, "" for a wrong one."""
        with self._keys_lock:
            cookie = self.keys.exchange(key)
        if cookie:
            self._new_link(self.link)
        return cookie


class PageHandler(BoundedHandler):
    server: PageServer

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
            query = parse_qs(url.query, max_num_fields=8)
        except ValueError:
            self.send_error(400)
            return
        # In this order: the right host, then a link with a key, then the
        # cookie; events also want the proof, which only the page has.
        if not names_this(self.headers.get("Host", ""), self.server.host):
            self._send(421, "text/plain", b"this server has another name\n")
        elif url.path == "/" and "key" in query:
            self._enter(query["key"][0])
        elif not self.server.keys.admits(self._cookie()) or self.headers.get("Sec-Fetch-Site") == "cross-site":
            self._send(403, "text/plain", NO_KEY.encode())
        elif url.path == "/events":
            if self.server.keys.proves(self._cookie(), query.get("proof", [""])[0]):
                self._events(query.get("log") == ["1"])
            else:
                self._send(403, "text/plain", NO_KEY.encode())
        else:
            self._file({"/": "index.html", "/favicon.ico": "icon.svg"}.get(url.path, url.path[1:]))

    do_HEAD = do_GET

    def _cookie(self) -> str:
        """The dashboard's cookie, "" for none. http.cookies takes seconds for quotes in strangers' cookies."""
        pairs = (part.strip().partition("=") for part in self.headers.get("Cookie", "").split(";"))
        return next((value for name, _, value in pairs if name == self.server.cookie), "")

    def _enter(self, key: str) -> None:
        cookie = self.server.enter(key) if self.command == "GET" else ""
        if not cookie:
            self._send(403, "text/plain", NO_KEY.encode())
            return
        value = f"{self.server.cookie}={cookie}; Path=/; HttpOnly; SameSite=Strict"
        body = ENTER.format(self.server.keys.proof)
        self._send(200, "text/html", body.encode(), {"Set-Cookie": value})

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
        # From here on the connection has no deadline; its owner is the cookie, that is, one browser.
        self.server.admit(self.connection, self._cookie())
        page = self.server.feed.open(log)
        try:
            self.wfile.write(f"retry: {RETRY_MS}\n\n".encode())
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
