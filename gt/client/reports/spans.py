"""The client's own time as spans, for a trace or for OpenTelemetry: calls of captured functions, waits, batches of ops.

While nobody wants spans, `current` is None: a wait and a batch look at it, an op does not. Bounded: the newest are kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple

MAX_SPANS = 1 << 16
Sink = Callable[["Span"], None]


class Span(NamedTuple):
    """Seconds of the monotonic clock. thread: the name of the thread."""

    name: str
    thread: str
    start: float
    end: float
    args: dict[str, Any]


class Spans:
    """Spans of this process. sinks: called with each; any thread."""

    def __init__(self) -> None:
        self.sinks: list[Sink] = []

    def add(self, name: str, start: float, **args: Any) -> None:
        """A span that ends now."""
        span = Span(name, threading.current_thread().name, start, monotonic(), args)
        for sink in list(self.sinks):
            sink(span)

    def batch(self, code: list) -> None:
        """A batch of ops is handed over."""
        self.add("hand over ops", monotonic(), numbers=len(code))


class SpanBuffer:
    """The newest spans. `count`: of all."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self.count = 0

    def __call__(self, span: Span) -> None:
        self.spans.append(span)
        self.count += 1


current: Spans | None = None  # None while nobody wants them
_changing = threading.Lock()


def add_sink(sink: Sink) -> None:
    """Call this with every span from now on."""
    global current
    with _changing:
        current = current or Spans()
        current.sinks.append(sink)


def remove_sink(sink: Sink) -> None:
    """Call it no more."""
    global current
    with _changing:
        if current is not None and sink in current.sinks:
            current.sinks.remove(sink)
            current = current if current.sinks else None


@contextmanager
def span(name: str, **args: Any) -> Iterator[None]:
    """A span around what is inside, if somebody wants it."""
    wanted, start = current, monotonic()
    if wanted is None:
        yield
        return
    try:
        yield
    finally:
        wanted.add(name, start, **args)
