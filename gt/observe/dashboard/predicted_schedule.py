"""The predicted actions of sessions' schedules by worker, beside the measured ones. Knows no page and no server."""

from __future__ import annotations

from math import isfinite
from typing import Any

from gt.dispatcher import schedule
from gt.errors import GTError

Actions = list[list[Any]]  # [action, start, end] in seconds


class PredictedSchedules:
    """Simulates each session's schedule once, until it has another."""

    def __init__(self) -> None:
        self._lines: dict[int, tuple[tuple[str, dict], list[Actions], float]] = {}  # by session: of which schedule

    def beside(self, session: int, row: dict[str, Any]) -> dict[str, Any]:
        """A schedule of the state as the page shows it, with "planned": {worker: actions}, {} where it is not known.

        Predicted times have the unit in which workers are busy as long as measured. Times of both begin at 0.
        """
        told = {
            name: [each for each in rows if isfinite(each[1]) and isfinite(each[2])] for name, rows in row["actions"].items()
        }
        # JSON has no infinities, so actions without an end are left out.
        begin = min((start for actions in told.values() for _, start, _ in actions), default=0.0)
        ran = {name: [[a, start - begin, end - begin] for a, start, end in actions] for name, actions in told.items()}
        shown = {key: row[key] for key in ("name", "replays", "predicted", "measured")}
        return {**shown, "actions": ran, "planned": self._planned(session, row, ran)}

    def keep(self, sessions: set[int]) -> None:
        """Forget the schedules of all others."""
        self._lines = {number: line for number, line in self._lines.items() if number in sessions}

    def _planned(self, session: int, row: dict[str, Any], ran: dict[str, Actions]) -> dict[str, Actions]:
        key = row["rows"], row["costs"]
        if session not in self._lines or self._lines[session][0] != key:
            self._lines[session] = (key, *_simulated(*key))
        _, lines, busy = self._lines[session]
        unit = row["measured"]["makespan"] * (1 - row["measured"]["idle"]) / busy if busy else 0.0
        planned = {}
        for name, actions in ran.items():
            # Rows of a schedule do not name workers: a worker's row is the one that has all of its actions.
            names = {action for action, _, _ in actions}
            line = next((line for line in lines if names and names <= {action for action, _, _ in line}), None)
            if line is not None:
                planned[name] = [[action, start * unit, end * unit] for action, start, end in line]
        return planned


def _simulated(text: str, costs: dict[str, Any]) -> tuple[list[Actions], float]:
    """Actions of each row, in the unit of the costs, and the mean of the seconds that a row is busy."""
    if not text:
        return [], 0.0
    try:
        rows = schedule.parse(text)
        line = schedule.simulate(rows, schedule.Costs.from_wire(costs))
    except (GTError, ValueError, KeyError, TypeError):  # of a server of another version
        return [], 0.0
    spans = [zip(row, line.start[n], line.end[n]) for n, row in enumerate(rows)]
    return [[[str(action), start, end] for action, start, end in row] for row in spans], line.makespan * (1 - line.idle)
