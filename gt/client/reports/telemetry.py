"""OpenTelemetry spans of the program's waits and captured calls, if the program has configured a provider.

Without the package, or without a provider, nothing happens. GT configures none.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from gt.client import current_session
from gt.client.reports import spans
from gt.client.reports.spans import Span
from gt.client.trace.recorder import Recorder

LIBRARY = "gt"
MIN_SECONDS = 1e-4  # shortest span that is exported: batches of ops are no spans


class SpanExporter:
    """A sink of spans that makes OpenTelemetry's, under the span that is current when each ends."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._offset = time.time() - time.monotonic()  # from the monotonic clock to the calendar's

    def __call__(self, span: Span) -> None:
        if span.end - span.start < MIN_SECONDS:
            return
        start, end = (int((seconds + self._offset) * 1e9) for seconds in (span.start, span.end))
        attributes = {f"gt.{key}": value for key, value in span.args.items() if isinstance(value, (str, int, float, bool))}
        made = self._tracer.start_span(
            f"gt: {span.name}", start_time=start, attributes={**attributes, "thread.name": span.thread}
        )
        made.end(end_time=end)


def _tracer() -> Any:
    """The tracer of the configured provider; None if there is none. A program that has one has imported the package."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or sys.modules.get("opentelemetry.sdk.trace") is None:
        return None
    provider = trace.get_tracer_provider()
    kind = sys.modules["opentelemetry.sdk.trace"].TracerProvider
    return provider.get_tracer(LIBRARY) if isinstance(provider, kind) else None


def begin(recorder: Recorder) -> Any:
    """Export spans of a session, to its end."""
    tracer = _tracer()
    if tracer is None:
        return lambda: None
    exporter = SpanExporter(tracer)
    spans.add_sink(exporter)
    return lambda: spans.remove_sink(exporter)


def register() -> None:
    """Export from the next session on."""
    current_session.on_connect.append(begin)
