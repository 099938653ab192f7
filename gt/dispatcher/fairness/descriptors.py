"""A server whose process has no file descriptors left: it serves those who are connected, and makes room for newcomers.

libzmq accepts connections by itself and can do so only where a descriptor is free, so a few are kept for that moment. Then
connections of peers that have said nothing for a while are ended. Whoever comes waits for that, and is refused only where no
such connection is left.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import socket
import stat
from collections.abc import Callable

log = logging.getLogger("gt.dispatcher")

KEPT_DESCRIPTORS = 16
SPARE_DESCRIPTORS = 8  # more that have to be free before the shortage is over
MAX_LOOKED_DESCRIPTORS = 4096  # descriptors that are looked at in one go
PATIENCE_SECONDS = 2.0  # seconds that a connection may say nothing while there are too few


class Reserve:
    """`poll` is called a few times a second and says whether there are too few; `close` gives everything back.

    port: where the server listens. known: the descriptors of peers that are served; told: of those
    that are to leave. Knows no clock.
    """

    def __init__(self, port: int, known: Callable[[], set[int]], told: Callable[[], set[int]]) -> None:
        self._port, self._known, self._told = port, known, told
        self._kept: list[int] = []
        # inode of a connection -> when it was first seen to say nothing; those of this round
        self._silent: dict[int, float] = {}
        self._seen: dict[int, float] = {}
        self._place = self._room = 0
        self._counted = 0  # strangers of this round so far
        self._strangers = 0  # connections that may be ended for newcomers, counted in the last whole round
        self.short = False
        self._keep(KEPT_DESCRIPTORS)

    def poll(self, now: float) -> bool:
        """True while the process has too few descriptors, which is said once."""
        # The probe: one descriptor more than is kept. While it is to be had, libzmq can accept a connection too.
        if not self.short:
            if self._keep(KEPT_DESCRIPTORS + 1):
                os.close(self._kept.pop())
                return False
            log.warning("%s; it goes on with those who are connected", self.reason())
            self.short = True
            # The kept descriptors are given up now, so that newcomers are accepted and can be told.
            self._counted, self._strangers = 0, 1  # nobody has looked yet
            self.close()

        # The shortage is over only with some to spare, or it would begin again at once.
        self._shed(now)
        if self._keep(KEPT_DESCRIPTORS + SPARE_DESCRIPTORS):
            for descriptor in self._kept[KEPT_DESCRIPTORS:]:
                os.close(descriptor)
            del self._kept[KEPT_DESCRIPTORS:]
            self._silent.clear()
            self._room = 0
            self.short = False
            log.warning("the server has descriptors again")
        else:
            self.close()
        return self.short

    def admits(self) -> bool:
        """True if one more peer may come in: while there are too few, as many as connections were ended for."""
        if self.short and self._room <= 0:
            return False
        self._room -= self.short
        return True

    @property
    def hopeful(self) -> bool:
        """True if there are connections left whose end makes room."""
        return bool(self._strangers or self._counted)

    def reason(self) -> str:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"the server has no file descriptors left, of {limit}: start it with more (`ulimit -n`)"

    def close(self) -> None:
        for descriptor in self._kept:
            os.close(descriptor)
        self._kept.clear()

    def _keep(self, count: int) -> bool:
        """True if there are so many to be had."""
        with contextlib.suppress(OSError):
            while len(self._kept) < count:
                self._kept.append(os.eventfd(0, os.EFD_CLOEXEC))
        return len(self._kept) >= count

    def _shed(self, now: float) -> None:
        """End connections to the server's port that belong to nobody who is served."""
        limit, known = resource.getrlimit(resource.RLIMIT_NOFILE)[0], self._known()
        told, ended = self._told(), 0
        # Nearly all numbers up to the limit are in use, so trying each one is no slower than reading /proc/self/fd.
        start, end = self._place, min(self._place + MAX_LOOKED_DESCRIPTORS, limit)
        for descriptor in range(start, end):
            with contextlib.suppress(OSError):
                status = os.fstat(descriptor)
                if descriptor in known or not stat.S_ISSOCK(status.st_mode) or not self._accepted(descriptor):
                    continue

                # A number of a descriptor may be used again for another connection; an inode tells them apart.
                since = self._silent.get(status.st_ino, now)
                if now - since >= PATIENCE_SECONDS:
                    _shut(descriptor)
                    ended += descriptor not in told
                    since = math.inf
                self._seen[status.st_ino] = since
                self._counted += descriptor not in told

        # A round over all descriptors takes several calls. At its end, this round's sightings replace the last one's.
        self._place = end
        if end >= limit:
            self._place, self._silent, self._seen = 0, self._seen, {}
            self._strangers, self._counted = self._counted, 0
        self._room = ended or self._room

    def _accepted(self, descriptor: int) -> bool:
        """True for a connection that was accepted at the server's port."""
        connection = socket.socket(fileno=descriptor)
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return False
            connection.getpeername()  # OSError for the one that listens
            return bool(connection.getsockname()[1] == self._port)
        finally:
            connection.detach()


def _shut(descriptor: int) -> None:
    """End a connection whose descriptor libzmq owns: it reads the end, and closes."""
    connection = socket.socket(fileno=descriptor)
    try:
        connection.shutdown(socket.SHUT_RDWR)
    finally:
        connection.detach()
