"""Critical sections in which signals, as Ctrl-C, and the collector wait; waits that signals may end at any moment."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # module signal wraps the same functions in enums, which costs ten times as much
import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

_get, _set = _signal.getsignal, _signal.signal
_threshold, _set_threshold = gc.get_threshold, gc.set_threshold
_ident = threading.get_ident
# Ctrl-C, and signals whose handlers programs have raise an exception too, as after signal.alarm
_NUMBERS = tuple(
    int(number)
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGALRM, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2)
)
# New objects until a pass over the youngest, in a pause: so many are never reached. No program sets this very number
NEVER_OBJECTS = (1 << 31) - 1009
_NONE: Any = ()  # of a block that delays nothing


class _Main:
    """The main thread, which alone runs handlers. In the child of a fork it is the one that forked."""

    ident = threading.main_thread().ident

    @classmethod
    def forked(cls) -> None:
        cls.ident = _ident()


os.register_at_fork(after_in_child=_Main.forked)


class uninterrupted:
    """`with uninterrupted():` the program's handlers run at the end of the block. Other threads than the main one run none.

    No signal is lost: all handlers run and are put back, whatever one of them raises meanwhile.
    """

    __slots__ = ("_before", "_ended", "_seen")

    def __enter__(self) -> None:
        self._before: list[tuple[int, Any]] = _NONE
        self._seen: list[tuple[int, Any]] = _NONE
        self._ended = False
        if _ident() != _Main.ident:
            return
        try:
            for number in _NUMBERS:
                before = _get(number)
                if type(before) is int:  # the system's default, or ignored, as most signals are
                    continue
                # Another block has put its own handler there: it is around this one, or it could not put the program's back.
                if type(before) is MethodType and before.__func__ is _noting:
                    block: Any = before.__self__
                    if not block._ended:
                        return  # an outer block delays them
                    before = block._handler(number)
                if callable(before):
                    if self._before is _NONE:
                        self._before, self._seen = [], []
                    self._before.append((number, before))
                    _set(number, self._note)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._ended = True
        if self._before is _NONE:
            return
        try:
            self._restore()
        finally:
            if self._seen:
                self._deliver()

    def _note(self, number: int, frame: Any) -> None:
        if self._ended:  # the handler could not be put back: another one raised
            self._handler(number)(number, frame)
        else:
            self._seen.append((number, frame))

    def _handler(self, number: int) -> Any:
        return next(before for mine, before in self._before if mine == number)

    def _restore(self) -> None:
        raised: BaseException | None = None
        for number, before in self._before:
            try:
                _set(number, before)
            except BaseException as error:  # raised by a handler, which the system calls before it sets another
                raised = error
        # `_set` runs handlers of pending signals first, which may raise (KeyboardInterrupt), and then has set nothing.
        if raised is not None:
            for number, before in self._before:
                _set(number, before)
            raise raised

    def _deliver(self) -> None:
        # The first handler may raise. The others run all the same, and the first error is the context of theirs.
        number, frame = self._seen.pop(0)
        try:
            self._handler(number)(number, frame)
        finally:
            if self._seen:
                self._deliver()


_noting: FunctionType = uninterrupted._note  # type: ignore[assignment]


class _Uncollected:
    """`with uncollected:` the collector makes no pass inside, unless it is called. One pause, which all of GT's users share.

    A pass runs finalizers of the program, in any thread. One that uses a tensor would wait for a lock that its thread holds.
    The main thread enters `uninterrupted()` first: Ctrl-C amid an end would leave the pause open.

    A program's gc.disable() and gc.enable() stay as they are, in any thread: the pause is a threshold that is never reached.
    No lock protects it, since a pass may begin before the pause does. The interpreter changes threads at ends of calls, and so
    not between the look at `_inside` and the call that ends the pause.
    """

    def __init__(self) -> None:
        self._inside: list[int] = []  # the thread of each block that is open
        self._young = _threshold()[0]  # the program's threshold, but for the pause
        os.register_at_fork(after_in_child=self._forked)

    def __enter__(self) -> None:
        self._inside.append(_ident())
        young = _threshold()[0]
        if young != NEVER_OBJECTS:  # or it is a pause already
            self._young = young
            _set_threshold(NEVER_OBJECTS)

    def __exit__(self, *_: object) -> None:
        self._inside.remove(_ident())
        young = _threshold()[0]
        if not self._inside and young == NEVER_OBJECTS:  # or the program has set another one
            _set_threshold(self._young)

    def _forked(self) -> None:
        """In the child of a fork, which has this thread alone."""
        mine = _ident()
        self._inside[:] = [thread for thread in self._inside if thread == mine]
        if not self._inside and _threshold()[0] == NEVER_OBJECTS:
            _set_threshold(self._young)


uncollected = _Uncollected()


class Waiters:
    """Threads that wait for changes, as at a threading.Condition, whose lock no caller needs to hold.

    A handler that raises within threading.Condition or Event may leave its lock released: the wait then ends in a RuntimeError
    in place of KeyboardInterrupt, and so may another thread that has the lock. Here a wait is one call of a lock of its own.
    """

    def __init__(self) -> None:
        self._locks: list[Any] = []  # one a waiting thread, held until there is a change

    def wait_for(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until ready(), which is asked at each change, for so many seconds at most. Returns ready()."""
        end = None if seconds is None else time.monotonic() + seconds
        lock = threading.Lock()
        lock.acquire()
        self._locks.append(lock)  # before ready() is asked, so that no change is missed
        try:
            while not ready():
                left = -1.0 if end is None else end - time.monotonic()
                if end is not None and left <= 0:
                    return False
                lock.acquire(timeout=left)
            return True
        finally:
            self._locks.remove(lock)

    def notify_all(self) -> None:
        """Have all waiting threads ask again."""
        for lock in self._locks.copy():
            with contextlib.suppress(RuntimeError):  # it has a change to look at already
                lock.release()


class Latch:
    """An event that is set once. As a threading.Event, for threads that Ctrl-C may interrupt."""

    def __init__(self) -> None:
        self._set = False
        self._waiters = Waiters()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.notify_all()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is set, for so many seconds at most. True if it is."""
        return self._set or self._waiters.wait_for(self.is_set, seconds)
