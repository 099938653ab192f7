"""The state of a running server as one dictionary, from the records that observers receive. Pure.

Rates are differences of the last two counts of one process, a worker's by its own clock. A rate that nobody knows is None:
before the second count, and of a worker that tells nothing any more. Counters are those of gt.stats().
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Any

from gt.wire.records import (
    USES,
    ErrorRecord,
    HostRecord,
    LayoutRecord,
    LinkRecord,
    QueueRecord,
    Record,
    ScheduleRecord,
    ServerRecord,
    SessionRecord,
    WorkerRecord,
    as_dict,
)

PARTS = ("workers", "sessions", "links", "queue", "hosts", "lines", "errors")  # of the state, beside "server"
MAX_ERRORS = 64  # of the state
MAX_LINES = 10_000  # lines of programs whose samples are counted
WHERE = ("session", "op", "file", "line", "group", "kind")  # fields of a record's `current`
# counter -> its rate: of workers, sessions, links
WORKER_RATES = {"instructions": "ops_per_second", "busy_seconds": "busy_share", "cpu_seconds": "cpu_share"}
SESSION_RATES = {"ops": "ops_per_second", "replays": "replays_per_second", "steps": "logged_per_second"}
LINK_RATES = {"bytes": "bytes_per_second"}
MUTE = frozenset(("lost", "silent"))  # states of workers that tell nothing any more


class LiveView:
    """`update` takes all records of one moment and returns the state; samples of lines are counted over all updates."""

    def __init__(self) -> None:
        # key -> (time of its counters, counters, rates)
        self._before: dict[tuple, tuple[float, dict[str, Any], dict[str, float | None]]] = {}
        self._now: dict[tuple, tuple[float, dict[str, Any], dict[str, float | None]]] = {}
        self._samples: Counter[tuple] = Counter()  # (session, file, line, op) -> workers seen at it, over all updates
        # By session, sent once for each replay or change
        self._schedules: dict[int, dict[str, Any]] = {}
        self._layouts: dict[int, dict[str, Any]] = {}
        self._errors: deque[dict[str, Any]] = deque(maxlen=MAX_ERRORS)

    def update(self, records: list[Record]) -> dict[str, Any]:
        """Keys: server, workers, sessions, links, queue, hosts, lines, errors."""
        self._now, at = {}, next((record.at for record in records if isinstance(record, ServerRecord)), 0.0)
        state: dict[str, Any] = {"server": {}, **{part: [] for part in PARTS}}
        self._schedules.update({r.session: _schedule(r) for r in records if isinstance(r, ScheduleRecord)})
        self._layouts.update({r.session: _layouts(r) for r in records if isinstance(r, LayoutRecord)})
        self._errors.extend(as_dict(record) for record in records if isinstance(record, ErrorRecord))
        state["errors"] = list(self._errors)
        workers = {record.name: record for record in records if isinstance(record, WorkerRecord)}
        for record in records:
            row = as_dict(record) if not isinstance(record, (ScheduleRecord, LayoutRecord)) else {}
            if isinstance(record, ServerRecord):
                state["server"] = row
            elif isinstance(record, WorkerRecord):
                state["workers"].append(self._worker(row))
            elif isinstance(record, SessionRecord):
                state["sessions"].append(self._session(row, at))
            elif isinstance(record, LinkRecord):
                source, key = workers.get(record.source), ("link", record.source, record.target)
                told, mute = (at, False) if source is None else (source.clock, source.state in MUTE)
                state["links"].append({**row, **self._rates(key, row, told, LINK_RATES, mute)})
            elif isinstance(record, QueueRecord):
                state["queue"].append(row)
            elif isinstance(record, HostRecord):
                state["hosts"].append(row)

        # What is kept of sessions ends with them.
        alive = {session["number"] for session in state["sessions"]}
        self._schedules = {number: row for number, row in self._schedules.items() if number in alive}
        self._layouts = {number: row for number, row in self._layouts.items() if number in alive}
        for session in state["sessions"]:
            session["memory"] = _session_memory(state["workers"], str(session["number"]))
        state["lines"] = self._lines(alive)
        self._before = self._now
        return state

    def _worker(self, row: dict[str, Any]) -> dict[str, Any]:
        # Each look at a busy worker is a sample of the line that it is at: over many looks, a profile of the program.
        current = row["current"] = dict(zip(WHERE, row["current"]))
        if current and len(self._samples) < MAX_LINES:
            self._samples[current["session"], current["file"], current["line"], current["op"]] += 1
        key, mute = ("worker", row["name"], row["pid"]), row["state"] in MUTE
        return {**row, **self._rates(key, row, row["clock"], WORKER_RATES, mute)}

    def _session(self, row: dict[str, Any], at: float) -> dict[str, Any]:
        row["current"] = dict(zip(WHERE, row["current"]))
        row["values"] = {name: value if math.isfinite(value) else str(value) for name, value in row["values"].items()}
        rates = self._rates(("session", row["number"]), row, at, SESSION_RATES)
        # Steps a second: replays of a captured step, else calls of gt.log.
        steps = rates["replays_per_second"] or (rates["logged_per_second"] if row["steps"] > 0 else None)
        return {**row, **rates, "steps_per_second": steps, "schedule": self._schedules.get(row["number"]),
                "layouts": self._layouts.get(row["number"])}  # fmt: skip

    def _rates(
        self, key: tuple, row: dict[str, Any], at: float, rates: dict[str, str], mute: bool = False
    ) -> dict[str, float | None]:
        """at: time of the row's counters. If it equals that of the row before, the process has not answered in time."""
        unknown: dict[str, float | None] = dict.fromkeys(rates.values())
        before, old, last = self._before.get(key, (at, row, unknown))
        # The same counters again keep their last rate: a worker whose answer is late has not stopped. A clock that goes back
        # is another process's, whose counters began at 0.
        seconds = at - before
        if mute or seconds < 0:
            last = unknown
        elif seconds > 0:
            last = {rate: round(max(0.0, (row[name] - old[name]) / seconds), 4) for name, rate in rates.items()}
        self._now[key] = at, {name: row[name] for name in rates}, last
        return last

    def _lines(self, alive: set[int]) -> list[dict[str, Any]]:
        """Lines of live sessions, by the number of times that a worker was seen at them."""
        self._samples = Counter({key: n for key, n in self._samples.items() if key[0] in alive})
        total = self._samples.total()
        names = ("session", "file", "line", "op")
        rows = sorted(self._samples.items(), key=lambda item: -item[1])[:50]
        return [{**dict(zip(names, key)), "samples": n, "share": round(n / total, 4)} for key, n in rows]


def _schedule(record: ScheduleRecord) -> dict[str, Any]:
    return {f: getattr(record, f) for f in ("name", "replays", "predicted", "measured", "actions", "rows", "costs")}


def _layouts(record: LayoutRecord) -> dict[str, Any]:
    names = ("spec", "layout", "mesh", "bytes", "boxes")
    splits = [dict(zip(names, row)) for row in record.splits]
    return {"number": record.number, "more": record.more, "tensors": record.tensors, "splits": splits}


def _session_memory(workers: list[dict[str, Any]], session: str) -> dict[str, int] | None:
    """Bytes by use on all workers; None if the session's client has not told."""
    told = [uses[session] for w in workers if session in (uses := w["memory"].get("uses", {}))]
    return {use: sum(uses.get(use, 0) for uses in told) for use in USES} if told else None
