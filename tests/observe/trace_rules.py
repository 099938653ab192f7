"""Rules that the events of every trace keep: Perfetto and chrome://tracing drop or misplace events that break them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

SLACK = 0.0015  # microseconds: times are rounded to nanoseconds


def check(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file, which keep the rules."""
    body = json.loads(path.read_text())
    assert body["displayTimeUnit"] == "ms"
    events = body["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    slices = defaultdict(list)
    for event in events:
        assert event["ph"] in ("X", "M", "C", "s", "f"), event
        assert event["ph"] == "M" or event["ts"] >= 0, f"Perfetto drops {event}"
        assert type(event["pid"]) is int and type(event["tid"]) is int and event["pid"] in processes
        if event["ph"] == "X":
            assert event["dur"] >= 0 and (event["pid"], event["tid"]) in named and event["name"]
            slices[event["pid"], event["tid"]].append(event)
        if event["ph"] == "C":
            assert "[bytes]" in event["name"] and all(type(n) is int and n >= 0 for n in event["args"].values())
    for rows in slices.values():
        nested(rows)
    arrows(events, slices)
    return events


def nested(rows: list[dict[str, Any]]) -> None:
    """Slices of one thread lie within one another, or apart."""
    open_: list[float] = []
    for event in sorted(rows, key=lambda e: (e["ts"], -e["dur"])):
        while open_ and open_[-1] <= event["ts"] + SLACK:
            open_.pop()
        end = event["ts"] + event["dur"]
        assert not open_ or end <= open_[-1] + SLACK, f"{event} ends after the slice around it"
        open_.append(end)


def arrows(events: list[dict[str, Any]], slices: dict) -> None:
    """Each arrow has two ends, in this order, each within a slice of its thread."""
    ends = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]].append(event)
            around = slices[event["pid"], event["tid"]]
            assert any(s["ts"] - SLACK <= event["ts"] <= s["ts"] + s["dur"] + SLACK for s in around), event
    for pair in ends.values():
        assert sorted(e["ph"] for e in pair) == ["f", "s"], pair
        start, finish = sorted(pair, key=lambda e: e["ph"] == "f")
        assert start["ts"] <= finish["ts"] and start["pid"] != finish["pid"], pair
