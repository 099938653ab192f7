"""Metrics of a running server for Prometheus: rows of one table, filled from the state that observers have. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

GAUGE, COUNTER = "gauge", "counter"


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric. part: of the state; field: of its rows; labels: label -> field."""

    name: str
    kind: str
    help: str
    part: str
    field: str
    labels: tuple[tuple[str, str], ...] = ()


_WORKER = (("worker", "name"), ("host", "host"))
_SESSION = (("session", "number"), ("user", "user"), ("program", "program"))
_LINK = (("source", "source"), ("target", "target"))
# Names follow Prometheus: gt_, the subject, the unit. Labels of a worker
# are its name and host, so a restart goes on with its row.
METRICS: tuple[MetricRow, ...] = (
    MetricRow("gt_server_seconds", COUNTER, "seconds since the server's start", "server", "at"),
    MetricRow("gt_server_loop_lag_seconds", GAUGE, "99th percentile of the loop's last turns", "server", "loop_lag"),
    MetricRow("gt_server_messages_sent", COUNTER, "messages to all peers", "server", "messages_sent"),
    MetricRow("gt_server_messages_received", COUNTER, "messages from all peers", "server", "messages_received"),
    MetricRow("gt_worker_instructions", COUNTER, "instructions executed", "workers", "instructions", _WORKER),
    MetricRow("gt_worker_busy_seconds", COUNTER, "seconds in Runs, waits included", "workers", "busy_seconds", _WORKER),
    MetricRow("gt_worker_cpu_seconds", COUNTER, "CPU time of the process", "workers", "cpu_seconds", _WORKER),
    MetricRow("gt_worker_live_bytes", GAUGE, "bytes of live tensors", "workers", "live_bytes", _WORKER),
    MetricRow("gt_worker_live_tensors", GAUGE, "live tensors", "workers", "live_tensors", _WORKER),
    MetricRow("gt_worker_memory_limit_bytes", GAUGE, "limit of a CPU worker, 0 for none", "workers", "limit", _WORKER),
    MetricRow("gt_session_ops", COUNTER, "ops planned", "sessions", "ops", _SESSION),
    MetricRow("gt_session_replays", COUNTER, "replays of captured steps", "sessions", "replays", _SESSION),
    MetricRow("gt_session_uploaded_bytes", COUNTER, "bytes uploaded", "sessions", "uploaded", _SESSION),
    MetricRow("gt_session_fetched_bytes", COUNTER, "bytes fetched", "sessions", "fetched", _SESSION),
    MetricRow("gt_session_pending_batches", GAUGE, "batches that are not executed", "sessions", "pending", _SESSION),
    MetricRow("gt_link_sent_bytes", COUNTER, "tensor bytes from worker to worker", "links", "bytes", _LINK),
)
STATES = MetricRow("gt_worker_state", GAUGE, "1 for the worker's state", "workers", "state", (*_WORKER, ("state", "state")))
LOGGED = MetricRow("gt_session_logged", GAUGE, "number that the program logs", "sessions", "values", (*_SESSION, ("name", "")))
QUEUE = MetricRow("gt_queue_clients", GAUGE, "clients that wait for workers", "queue", "")
UP = MetricRow("gt_server_up", GAUGE, "whether the server answers: 1, else 0 and no other metric", "server", "")
Sample = tuple[MetricRow, tuple[str, ...], float]  # metric, values of its labels, value


def samples(state: dict[str, Any]) -> Iterator[Sample]:
    """Samples of a state, without unknown values. {}: the state of a server that does not answer."""
    yield UP, (), float(bool(state))
    if not state:
        return
    for metric in METRICS:
        rows = state[metric.part] if metric.part != "server" else [state["server"]]
        for row in rows:
            # A worker that has never answered (age -1) has counters of 0, which are not known.
            if metric.field in row and row.get("age", 0.0) >= 0:
                yield metric, tuple(str(row[name]) for _, name in metric.labels), float(row[metric.field])
    for worker in state["workers"]:
        yield STATES, tuple(str(worker[name]) for _, name in STATES.labels), 1.0
    for session in state["sessions"]:
        of_session = tuple(str(session[name]) for _, name in _SESSION)
        for name, value in session["values"].items():
            yield LOGGED, (*of_session, name), float(value)
    yield QUEUE, (), float(len(state["queue"]))
