"""Spans for OpenTelemetry where a provider is configured, and what torch.profiler says of the time on workers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import gt
from gt.client.frameworks import profiler
from gt.client.reports import spans

pytestmark = pytest.mark.usefixtures("plain_threads")


class Provider:
    """A provider with the one method that is used, and its tracer."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, int, int, dict]] = []

    def get_tracer(self, name: str) -> Any:
        assert name == "gt"
        return self

    def start_span(self, name: str, start_time: int, attributes: dict) -> Any:
        outer = self

        class Open:
            def end(self, end_time: int) -> None:
                outer.spans.append((name, start_time, end_time, attributes))

        return Open()


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Provider:
    """Stands for a configured provider, also where the package is not installed."""
    made, trace, sdk = Provider(), ModuleType("opentelemetry.trace"), ModuleType("opentelemetry.sdk.trace")
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: made, raising=False)
    monkeypatch.setattr(sdk, "TracerProvider", Provider, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", trace)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", sdk)
    return made


def test_waits_and_replays_are_spans_of_a_configured_provider(provider: Provider, session: Callable) -> None:
    session("")
    step = gt.compile(lambda x: (x * 2).sum())
    for _ in range(5):
        step(torch.ones(4, device="remote")).item()
    gt.shutdown()
    names = [name for name, *_ in provider.spans]
    assert "gt: wait for a value" in names and any(name.startswith("gt: record ") for name in names)
    assert all(start < end and attributes["thread.name"] for _, start, end, attributes in provider.spans)
    assert not any("hand over" in name for name in names), "batches are no spans"
    assert spans.current is None


def test_without_a_provider_nothing_is_made(session: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.sdk.trace", raising=False)
    session("")
    torch.ones(4, device="remote").sum().item()
    assert spans.current is None


def test_the_package_takes_the_spans(session: Callable) -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from gt.client.reports.telemetry import SpanExporter

    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    SpanExporter(provider.get_tracer("gt"))(spans.Span("wait", "MainThread", 1.0, 2.0, {"program": 3, "why": "x", "odd": []}))
    (span,) = memory.get_finished_spans()
    assert span.name == "gt: wait" and span.end_time - span.start_time == pytest.approx(1e9, abs=1e3)
    assert dict(span.attributes) == {"gt.program": 3, "gt.why": "x", "thread.name": "MainThread"}


def test_torchs_profiler_says_once_where_the_time_on_workers_is(
    session: Callable, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler._Told, "told", False)
    session("")
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "gt"):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                torch.ones(4, device="remote").sum().item()
        assert profile.key_averages()
    assert [record.message for record in caplog.records if "torch.profiler" in record.message] == [
        "torch.profiler shows this process only: for the time on workers use `with gt.trace(path):`"
    ]
