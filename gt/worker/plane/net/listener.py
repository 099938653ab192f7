"""The socket at which a worker hears workers of other hosts."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from gt.errors import ConfigError


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
