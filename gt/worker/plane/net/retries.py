"""Connections that have failed, tried again now and then while the pair has another way. Knows no socket.

An attempt disturbs nothing: messages take the other way until the dispatcher gives the pair a new one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

RETRY_SECONDS = 2.0  # between two attempts
Attempt = tuple[int, str, str]  # the other worker, own address, its


class Retries:
    """probe: connects, or raises OSError. mended: called, once, for an attempt that succeeds."""

    def __init__(self, probe: Callable[[int, str, str], None], mended: Callable[[int, str, str], None]) -> None:
        self._probe, self._mended = probe, mended
        self._changed = threading.Condition()
        self._wanted: tuple[Attempt, ...] = ()
        self._thread: threading.Thread | None = None
        self._ended = False

    def want(self, attempts: Sequence[Attempt]) -> None:
        """Try these from now on, and no others."""
        with self._changed:
            if self._ended:
                return
            self._wanted = tuple(attempts)
            if attempts and self._thread is None:
                self._thread = threading.Thread(target=self._main, name="gt-net-retry", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended, self._wanted = True, ()
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the attempt under way, after `end`."""
        if self._thread is not None:
            self._thread.join()

    def _main(self) -> None:
        """Try all that is wanted in turn. The thread ends once nothing is, or all is mended."""
        said: set[Attempt] = set()
        while True:
            with self._changed:
                said &= {*self._wanted}
                left = [attempt for attempt in self._wanted if attempt not in said]
                if not left:
                    self._thread = None if not self._ended else self._thread
                    return
                self._changed.wait_for(lambda: self._ended, RETRY_SECONDS)
                left = [attempt for attempt in left if attempt in self._wanted]
            for attempt in left:
                if attempt not in self._wanted:  # or this is over
                    continue
                with contextlib.suppress(OSError):
                    self._probe(*attempt)
                    self._mended(*attempt)
                    said.add(attempt)
