"""The client's own time as spans, for a trace or for OpenTelemetry: calls of captured functions, waits, batches of ops.

While nobody wants spans, `current` is None: a wait and a batch look at it, an op does not. Bounded: the newest are kept.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import Any, NamedTuple

MAX_SPANS = 1 << 16
_BETWEEN = (contextlib.__file__, threading.__file__)  # modules that call GT, or are called by it, on its way to the program
_GT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
Sink = Callable[["Span"], None]


class Span(NamedTuple):
    """Seconds of the monotonic clock. thread: the name of the thread, which others may have too; ident: its number."""

    name: str
    thread: str
    start: float
    end: float
    args: dict[str, Any]
    ident: int = 0


class Spans:
    """Spans of this process. sinks: called with each; any thread."""

    def __init__(self) -> None:
        self.sinks: list[Sink] = []

    def add(self, name: str, start: float, **args: Any) -> None:
        """A span that ends now. It gets the line of the program that it is of, if there is one."""
        end, line = monotonic(), user_line()
        thread, about = threading.current_thread().name, {**({"line": line} if line else {}), **args}
        span = Span(name, thread, start, end, about, threading.get_ident())
        for sink in list(self.sinks):
            sink(span)

    def batch(self, code: list) -> None:
        """A batch of ops is handed over."""
        self.add("hand over ops", monotonic(), numbers=len(code))


def user_line() -> str:
    """File and line of the innermost frame that is the program's own, "" in a thread of GT's."""
    torch = sys.modules.get("torch")
    libraries = (_GT,) if torch is None else (_GT, os.path.dirname(str(torch.__file__)) + os.sep)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in _BETWEEN and not file.startswith(libraries) and not file.startswith("<frozen"):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


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
