"""The last replay in gt.stats() as a Chrome trace (chrome://tracing, ui.perfetto.dev), beside the predicted schedule."""

from __future__ import annotations

from typing import Any

from gt.dispatcher import schedule
from gt.errors import ProgramError

KINDS = {
    "F": "forward", "B": "backward", "I": "gradient of inputs", "W": "gradient of weights", "L": "loss", "R": "all-reduce",
    "O": "optimizer",
}  # fmt: skip
MEASURED, PREDICTED = 1, 2  # processes of the trace


def chrome(stats: dict[str, Any]) -> dict[str, Any]:
    """The trace, in microseconds. "measured" has a thread for each worker, and one for its overlapped transfers; "predicted"
    has a thread for each row of the schedule.

    Predicted times are scaled so that workers are busy as long as measured. ProgramError without a scheduled replay.
    """
    if stats.get("schedule") is None:
        raise ProgramError(
            "no replay in a schedule to show: give gt.compile a schedule, and call the step until it is replayed "
            "(the function's explain() says why it is not)"
        )
    return {"traceEvents": events(stats), "displayTimeUnit": "ms", "otherData": stats["schedule"]}


def events(stats: dict[str, Any], since: float | None = None, first: int = MEASURED) -> list[dict[str, Any]]:
    """The events of a scheduled replay. since: seconds of time 0, by default its beginning. first: its first process."""
    workers = [(row["name"], row["actions"]) for row in stats["workers"] if row["actions"]]
    workers += [(f"{row['name']} transfers", row["transfers"]) for row in stats["workers"] if row.get("transfers")]
    # Workers of one host have one clock. The earliest action is time 0, or begins at its time in a larger trace.
    begin = min(start for _, actions in workers for _, start, _ in actions)
    since = begin if since is None else since
    measured = [(name, [(a, start - since, end - since) for a, start, end in actions]) for name, actions in workers]
    planned = [
        (name, [(a, start + begin - since, end + begin - since) for a, start, end in rows])
        for name, rows in _predicted(stats["schedule"])
    ]
    return _process(first, "measured", measured) + _process(first + PREDICTED - MEASURED, "predicted", planned)


def _predicted(order: dict[str, Any]) -> list[tuple[str, list[tuple[str, float, float]]]]:
    rows = schedule.parse(order["rows"])
    line = schedule.simulate(rows, schedule.Costs.from_wire(order["costs"]))
    ran = order["measured"]
    # Predicted times have the unit of their costs. The unit is chosen so that
    # workers are busy as long as measured: then only the waits differ.
    unit = ran["makespan"] * (1 - ran["idle"]) / (line.makespan * (1 - line.idle))
    threads = []
    for place, row in enumerate(rows):
        spans = zip(row, line.start[place], line.end[place])
        threads.append((f"row {place}", [(str(action), start * unit, end * unit) for action, start, end in spans]))
    return threads


def _process(pid: int, name: str, threads: list[tuple[str, list]]) -> list[dict[str, Any]]:
    events = [_meta("process_name", pid, 0, name)]
    for tid, (thread, actions) in enumerate(threads):
        events.append(_meta("thread_name", pid, tid, thread))
        for action, start, end in actions:
            kind = ",".join(KINDS[letter] for letter in action if letter in KINDS)
            at = {"ts": round(start * 1e6, 3), "dur": round((end - start) * 1e6, 3)}
            events.append({"name": action, "cat": kind, "ph": "X", "pid": pid, "tid": tid, **at})
    return events


def _meta(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def said(order: dict[str, Any]) -> str:
    """Predicted and measured bubble in one line."""
    ran = order["measured"]
    return (
        f"{order['name']}: {ran['makespan'] * 1e3:.3f} ms, bubble {ran['idle']:.2%} measured, "
        f"{order['predicted']['idle']:.2%} predicted"
    )
