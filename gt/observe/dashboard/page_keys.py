"""Access to the dashboard's page: a key that opens it once, and the cookie and proof that a browser has from then on. Pure.

A browser sends its cookies to every port of a host, so whoever serves another port can learn the cookie. The proof is kept by
the page, and browsers show it to no other port.
"""

from __future__ import annotations

import hmac
import secrets
from collections import deque

MAX_BROWSERS = 64  # cookies; the oldest is forgotten


class PageKeys:
    """The key of the next browser, and the cookies of those that have shown one."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(32)
        self.proof = secrets.token_hex(32)
        self._cookies: deque[str] = deque(maxlen=MAX_BROWSERS)

    def exchange(self, key: str) -> str:
        """The cookie for a key, which is worth nothing from then on; "" for another."""
        # A link works once: one that was seen in a history or over a shoulder afterwards opens nothing.
        if not hmac.compare_digest(key.encode(), self.key.encode()):
            return ""
        self.key = secrets.token_urlsafe(32)
        self._cookies.append(secrets.token_urlsafe(32))
        return self._cookies[-1]

    def admits(self, cookie: str) -> bool:
        known = [hmac.compare_digest(cookie.encode(), one.encode()) for one in list(self._cookies)]  # others may enter
        return any(known)

    def proves(self, cookie: str, proof: str) -> bool:
        """True for a cookie that admits, with the proof."""
        return self.admits(cookie) and hmac.compare_digest(proof.encode(), self.proof.encode())
