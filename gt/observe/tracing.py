"""Traces of whatever a program does between two moments, in all of its sessions: begun here, written by trace_file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from gt.client.reports import spans
from gt.errors import GTError, ProgramError
from gt.observe import timeline, trace_file

log = logging.getLogger("gt")


class Tracing:
    """One trace. `begin` and `end` are called around each session; `close` writes the file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.report: dict[str, Any] = {}
        self._recordings: list[trace_file.SessionRecording] = []
        self._buffer: spans.SpanBuffer | None = None
        self._began = 0.0
        if not self.path.absolute().parent.is_dir():
            raise FileNotFoundError(
                f"the trace {self.path} cannot be written: there is no folder {self.path.absolute().parent}"
            )

    def begin(self, session: Any) -> None:
        """Record what this session does from now on."""
        begin = getattr(session, "begin_trace", None)
        if begin is None:
            raise ProgramError("a program that is only planned has no trace: see gt.plan")
        # Workers record before the client does, so no span of the client lacks its instructions.
        begin()
        self._buffer, self._began = spans.SpanBuffer(), monotonic()
        spans.add_sink(self._buffer)

    def end(self, session: Any, flush: Callable[[], None]) -> None:
        """The session is about to end, or the trace: collect what was recorded. flush: hands all ops over."""
        if self._buffer is None:
            return
        buffer, self._buffer = self._buffer, None
        end = monotonic()
        # Whatever fails below, the program's own spans are written.
        answer, rows, stats = {}, [], {}
        try:
            # The wait for the last ops is the program's time too, and is recorded; the questions below are not.
            self._wait_for_ops(session, flush)
            spans.remove_sink(buffer)
            end = monotonic()
            answer, rows = session.end_trace()
            self._say_missing(answer.get("missing", []))
            stats = session.stats()
        except GTError as error:
            lacks = "does not show the schedule of its replays" if answer else "has only the program's own time"
            log.warning("the trace %s %s: %s", self.path, lacks, error)
        finally:
            spans.remove_sink(buffer)  # where the wait failed
        recording = trace_file.SessionRecording(
            answer, rows, list(buffer.spans), self._began, end, threading.current_thread().name,
            spans_dropped=buffer.count - len(buffer.spans), ident=threading.get_ident(),
        )  # fmt: skip

        # The last replay's schedule is shown only if that replay was within the trace.
        if stats.get("schedule") is not None:
            began = min(start for row in stats["workers"] for _, start, _ in row["actions"])
            if began >= self._began:
                first = (self._recordings or [recording])[0].begin
                recording.schedule = timeline.events(stats, first, trace_file.SCHEDULE)
                self.report["schedule"] = stats["schedule"]
        self._recordings.append(recording)

    def _wait_for_ops(self, session: Any, flush: Callable[[], None]) -> None:
        """Wait for the ops of the trace. One that failed, or a stopped worker, is no reason to lose the others' rows."""
        try:
            flush()
            session.synchronize()
        except GTError as error:
            log.warning("the trace %s ends before its last ops: %s", self.path, error)

    def _say_missing(self, missing: list[str]) -> None:
        if missing:
            self.report.setdefault("missing", []).extend(missing)
            log.warning("the trace %s lacks rows: %s", self.path, "; ".join(missing))

    def close(self) -> None:
        """Write the file."""
        if self._recordings:
            self.report["slices"] = trace_file.write(self.path, self._recordings)
            self.report["dropped"] = sum(recording.dropped for recording in self._recordings)
            if self.report["dropped"]:
                log.warning("the trace %s has the newest events: %d older ones had no room", self.path, self.report["dropped"])
