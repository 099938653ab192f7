"""Background work: long passes over what is one session's alone, in threads beside the loop.

One thread at a time has the baton, and touches what sessions share. A thread that goes apart hands it on, and takes it back
before it returns.

The core needs neither: `Inline` does everything where it is called.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MAX_THREADS = 4  # threads at once; who comes later waits, and its session with it
PATIENCE_SECONDS = 1.0  # seconds that closing waits for them


class Abandoned(BaseException):
    """Nobody wants what a thread does any more."""


class Inline:
    """No threads: a call is done at once, and nothing is ever apart. The base of Background."""

    beside = False  # True if there are threads
    pending = False  # True while a thread waits for the baton

    def begin(self, call: Callable[[], None]) -> None:
        """Have a call done, now or in turns."""
        call()

    @contextmanager
    def apart(self, over: Callable[[], bool]) -> Iterator[None]:
        """Work within touches nothing that others do. over: true if its result is of no use any more; asked afterwards."""
        yield

    def go_on(self) -> None:
        """Hand the baton to a thread that waits for it, until it goes apart or is done."""

    def close(self) -> None:
        """No thread goes on."""


# The baton passes like this (one column a thread; only the holder of the baton touches shared state):
#   loop                               thread of a leg
#   begin: starts the thread, waits
#                                      call() begins; apart(): sets `_back`
#   goes on with other peers           the long pass, beside the loop
#                                      the pass ends: joins `_ready`, wakes the loop, waits for `go`
#   go_on: sets `go`, waits for `_back`
#                                      the rest of call(); its end sets `_back`
class _Leg:
    """One call and its thread."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.go = threading.Event()
        self.thread: threading.Thread | None = None


class Background(Inline):
    """wake: called by a thread that waits for the baton, to have `go_on` called by the one that began."""

    beside = True

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._back = threading.Event()  # the baton is the loop's again
        self._ready: deque[_Leg] = deque()
        self._later: deque[_Leg] = deque()
        self._legs: dict[_Leg, None] = {}  # with a thread
        self._here = threading.local()
        self._closed = False

    @property
    def pending(self) -> bool:  # type: ignore[override]
        return bool(self._ready)

    def begin(self, call: Callable[[], None]) -> None:
        self._later.append(_Leg(call))
        self._start()

    def _start(self) -> None:
        while self._later and len(self._legs) < MAX_THREADS:
            leg = self._later.popleft()
            leg.thread = threading.Thread(target=self._main, args=(leg,), name="gt-pass", daemon=True)
            try:
                leg.thread.start()
            except RuntimeError:  # the system has no thread left: others wait for the loop, which does it
                leg.call()
                continue
            self._legs[leg] = None
            self._hand_over(leg)

    def _hand_over(self, leg: _Leg) -> None:
        leg.go.set()
        self._back.wait()
        self._back.clear()

    def go_on(self) -> None:
        if self._ready:
            self._hand_over(self._ready.popleft())
            self._start()

    @contextmanager
    def apart(self, over: Callable[[], bool]) -> Iterator[None]:
        leg: _Leg | None = getattr(self._here, "leg", None)
        if leg is None:  # in the loop's own thread
            yield
            return
        self._back.set()
        try:
            yield
        finally:
            # At the server's end nobody hands the baton over again.
            if not self._closed:
                self._ready.append(leg)
                self._wake()
                leg.go.wait()
                leg.go.clear()
            if self._closed or over():
                raise Abandoned

    def _main(self, leg: _Leg) -> None:
        self._here.leg = leg
        leg.go.wait()
        leg.go.clear()
        try:
            if not self._closed:
                leg.call()
        except Abandoned:
            pass
        finally:
            self._legs.pop(leg, None)
            self._back.set()

    def close(self) -> None:
        self._closed = True
        self._later.clear()
        # Threads inside of a pass see `_closed` at its end. One that takes longer is left: it is a daemon.
        legs, end = list(self._legs), time.monotonic() + PATIENCE_SECONDS
        for leg in legs:
            leg.go.set()
        for leg in legs:
            if leg.thread is not None:
                leg.thread.join(max(0.0, end - time.monotonic()))
