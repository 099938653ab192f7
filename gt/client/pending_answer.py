"""An answer of the dispatcher that a thread waits for."""

from __future__ import annotations

import threading
from typing import Any

from gt.client import host_buffers


class PendingAnswer:
    """One request and its answer: a value or an error, once `done` is set. into: makes the assembly of a fetched value."""

    def __init__(self, into: host_buffers.Into = host_buffers.Assembly) -> None:
        self.into = into
        self.done = threading.Event()
        self.value: Any = None
        self.error: Exception | None = None
        self.assembly: host_buffers.Assembly | None = None

    def finish(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.error = value, error
        self.done.set()
