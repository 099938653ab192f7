"""Access to the dashboard's page: a key that opens it once, and the cookie that a browser has from then on. Pure."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections import deque

MAX_BROWSERS = 64  # cookies; the oldest is forgotten


class PageKeys:
    """The key of the next browser, and the cookies of those that have shown one."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(32)
        self._cookies: deque[str] = deque(maxlen=MAX_BROWSERS)

    def exchange(self, key: str) -> str:
        """The cookie for a key, which is worth nothing from then on; "" for another."""
        if not hmac.compare_digest(key.encode(), self.key.encode()):
            return ""
        self.key = secrets.token_urlsafe(32)
        self._cookies.append(secrets.token_urlsafe(32))
        return self._cookies[-1]

    def admits(self, cookie: str) -> bool:
        known = [hmac.compare_digest(cookie.encode(), one.encode()) for one in self._cookies]
        return any(known)


def names_this(host: str, asked: str) -> bool:
    """True if a request's Host is an address, this machine, or the host that was asked for.

    Another name may be somebody's who has let it point here, so that his page could read ours (DNS rebinding).
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.removeprefix("[").removesuffix("]").lower()
    if name in ("localhost", asked.lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
