"""The recent past of a server for curves: samples of its states, in bounded memory, and each worker's largest memory. Pure."""

from __future__ import annotations

from typing import Any

from gt.wire.records import USES

MAX_SAMPLES = 480  # then two neighbours become one, so that the samples cover twice the time
MAX_VALUES = 8  # numbers of gt.log that have a curve, of one session


class History:
    """`add` takes a state of LiveView. samples: {"at", "workers": {name: row}, "sessions": {number: row}}, oldest first."""

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self.peaks: dict[str, dict[str, Any]] = {}  # by worker: "bytes", "at", "uses", "current", "pid"
        self._merges = 0  # times that samples were merged
        self._every = 1  # states that make one sample
        self._pending: list[dict[str, Any]] = []
        self._life = ""  # of the server

    @property
    def epoch(self) -> tuple[str, int]:
        """While it is equal, samples are added and none changes."""
        return self._life, self._merges

    def add(self, state: dict[str, Any]) -> None:
        at, life = state["server"].get("at", 0.0), state["server"].get("life", "")
        if life != self._life:  # another server has its place, whose sessions have the same numbers
            self.__init__()  # type: ignore[misc]
            self._life = life
        for worker in state["workers"]:
            if worker["age"] >= 0:
                self._note_peak(worker, at)
        names = {worker["name"] for worker in state["workers"]}
        self.peaks = {name: peak for name, peak in self.peaks.items() if name in names}

        # After k merges, 2 ** k states make one sample, so the samples cover the whole past in bounded memory.
        self._pending.append(_sample(state, at))
        if len(self._pending) >= self._every:
            self.samples.append(_merged(self._pending))
            self._pending = []
        if len(self.samples) > MAX_SAMPLES:
            self.samples = [_merged(self.samples[i : i + 2]) for i in range(0, len(self.samples), 2)]
            self._every, self._merges = self._every * 2, self._merges + 1

    def _note_peak(self, worker: dict[str, Any], at: float) -> None:
        # Another pid is another process, whose memory began at nothing.
        peak = self.peaks.get(worker["name"])
        if peak is None or peak["pid"] != worker["pid"] or worker["live_bytes"] > peak["bytes"]:
            self.peaks[worker["name"]] = {
                "bytes": worker["live_bytes"],
                "at": at,
                "uses": _uses(worker),
                "current": worker["current"],
                "pid": worker["pid"],
            }


def _uses(worker: dict[str, Any]) -> dict[str, int]:
    """Bytes of all sessions' tensors by use; those whose use is not known are "other"."""
    told = list(worker["memory"].get("uses", {}).values())
    uses = {use: sum(row.get(use, 0) for row in told) for use in USES}
    return {**uses, "other": max(0, worker["live_bytes"] - sum(uses.values()))}


def _sample(state: dict[str, Any], at: float) -> dict[str, Any]:
    workers = {
        w["name"]: {"live": w["live_bytes"], "busy": w["busy_share"], "ops": w["ops_per_second"], **_uses(w)}
        for w in state["workers"]
        if w["age"] >= 0
    }
    sessions = {
        str(s["number"]): {
            "ops": s["ops_per_second"],
            "steps": s["steps_per_second"],
            "values": dict(list(s["values"].items())[:MAX_VALUES]),  # texts are of numbers that are not finite
        }
        for s in state["sessions"]
    }
    return {"at": at, "workers": workers, "sessions": sessions}


def _merged(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """One sample for several neighbours: the newest, with each worker's row of the largest memory, so that no peak is lost."""
    newest = samples[-1]
    workers = {
        name: max((s["workers"][name] for s in samples if name in s["workers"]), key=lambda row: row["live"])
        for name in newest["workers"]
    }
    return {**newest, "workers": workers}
