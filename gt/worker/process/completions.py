"""Messages that are sent in order, each once the device has completed certain work: Runs of shared devices, reads of uploads.

A thread waits for the device. Its wait ends with the device's work, or with the process; nobody waits for the thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

from gt.wire.messages import Message

Wait = Callable[[], None]
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Pending(Generic[M]):
    """A message that is not sent yet. op: the first of its Run; fence: waits for the device, None for no wait."""

    message: M
    op: int
    fence: Wait | None


class Completions(Generic[M]):
    """`add` and `close` are called by the executing thread, `first` by any. send: sends a message, from any thread."""

    def __init__(self, send: Callable[[M], None]) -> None:
        self._send = send
        self._pending: deque[Pending[M]] = deque()
        self._queue: SimpleQueue[Pending[M] | None] = SimpleQueue()  # the same rows, for the thread
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None  # started by the first fence
        self._closed = False

    def add(self, message: M, op: int = -1, fence: Wait | None = None) -> None:
        """Send `message` after all that were added before: at once if there is nothing to wait for."""
        if fence is None and not self._pending:
            self._send(message)
            return
        row = Pending(message, op, fence)
        self._pending.append(row)
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="gt-completions", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left: this one waits
                self._finish(row)
                return
            self._thread = thread
        self._queue.put(row)

    def first(self) -> Pending[M] | None:
        """The oldest message that is not sent yet."""
        try:
            return self._pending[0]
        except IndexError:
            return None

    def close(self) -> None:
        """Send no more. The thread ends when its wait does."""
        with self._sending:
            self._closed = True
        self._queue.put(None)

    def _serve(self) -> None:
        while (row := self._queue.get()) is not None and self._finish(row):
            pass

    def _finish(self, row: Pending[M]) -> bool:
        """Wait for the device, and send the message, which is the oldest; False once nothing more is sent."""
        if row.fence is not None:
            row.fence()
        with self._sending:
            if self._closed:
                return False
            self._send(row.message)
        self._pending.popleft()  # only now: until then `add` must not overtake it
        return True
