"""A thread that makes calls which block, in order, so that the thread that wants their results can give them up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class CallThread:
    """The thread begins with the first call. After `abandon` a new one makes later calls."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] | None = None
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], Any]) -> Future:
        """The result or exception of a call that follows all calls before it."""
        future: Future = Future()
        if self._calls is None:
            calls: queue.SimpleQueue = queue.SimpleQueue()
            thread = threading.Thread(target=_serve, args=(calls,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system has no thread left: this call fails, and the next one tries again
                future.set_exception(error)
                return future
            self._calls, self._thread = calls, thread
        self._calls.put((future, call))
        return future

    def abandon(self) -> None:
        """Leave the thread to the call that it is in; it ends after that."""
        calls, self._calls, self._thread = self._calls, None, None
        if calls is not None:
            calls.put(None)

    def close(self, seconds: float) -> None:
        """End the thread, and wait so long for it."""
        thread = self._thread
        self.abandon()
        if thread is not None:
            thread.join(seconds)


def _serve(calls: queue.SimpleQueue) -> None:
    while (row := calls.get()) is not None:
        future, call = row
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del row, future, call  # what a call holds is given back now, not with the next call
