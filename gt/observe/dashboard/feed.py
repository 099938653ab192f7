"""The dashboard's observer: states of a server while somebody looks, and events for the pages that are open.

A thread observes the server while a page is open, and a while longer. Pages wait in threads of their own.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from gt.errors import GTError
from gt.observe.dashboard.history import History
from gt.observe.dashboard.predicted_schedule import PredictedSchedules
from gt.observe.live_view import LiveView
from gt.observe.record_stream import RecordStream
from gt.wire.records import LogRecord, Record, replay_mark

log = logging.getLogger("gt.observe")

LINGER_SECONDS = 60.0  # without a page, until the server is no longer observed
RETRY_SECONDS = 2.0  # after a link has ended
ALIVE_SECONDS = 15.0  # without an event, until a page is sent a sign of life
MAX_LOG_LINES = 2000
ONCE = ("schedule", "layouts")  # of a session's row: events of their own, for they are large and change seldom

Event = tuple[str, Any]  # name, data


class Page:
    """The events that one open page has been sent. log: it shows the instruction log."""

    def __init__(self, log: bool) -> None:
        self.log = log
        self.version = -1
        self.next_line = 0
        self.epoch: object = None  # of the history that it has
        self.samples = 0  # of that history
        self.life = ""  # of the server that the two below are of: another one's sessions have the same numbers
        self.replays: dict[int, tuple] = {}  # by session: marks
        self.layouts: dict[int, int] = {}

    def follow(self, life: str) -> None:
        if life != self.life:
            self.life, self.replays, self.layouts = life, {}, {}


class Feed:
    """connect: opens a stream of records, with lines of the instruction log or without. always: also while no page is open."""

    def __init__(self, connect: Callable[[bool], RecordStream], always: bool = False) -> None:
        self._connect, self._always = connect, always
        self._changed = threading.Condition()
        self._pages: set[Page] = set()
        self._closed = False
        self._stream: RecordStream | None = None
        self._version = 0  # of everything below
        self._view, self._history, self._predicted = LiveView(), History(), PredictedSchedules()
        self._state: dict[str, Any] | None = None
        self._schedules: dict[int, dict[str, Any]] = {}
        self._life = ""  # of the server that they are of
        self._problem = ""
        self._lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self._next_line = 0
        self._thread = threading.Thread(target=self._observe, name="gt-dashboard-feed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            stream = self._stream
            self._changed.notify_all()
        if stream is not None:
            stream.stop()
        self._thread.join()

    # ---- pages, in their threads

    def open(self, log: bool = False) -> Page:
        page = Page(log)
        with self._changed:
            self._pages.add(page)
            self._ask_for_log()
            self._changed.notify_all()
        return page

    def leave(self, page: Page) -> None:
        with self._changed:
            self._pages.discard(page)
            self._ask_for_log()
            self._changed.notify_all()

    def _ask_for_log(self) -> None:
        """At once: the thread that observes may wait for Records meanwhile."""
        if self._stream is not None:
            self._stream.log = self._log_wanted()

    def events(self, page: Page) -> list[Event] | None:
        """Events that are new to a page: waits for them; [] as a sign of life, None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._version > page.version, ALIVE_SECONDS)
            if self._closed:
                return None
            # The time is over: the page gets a sign of life, which also finds out whether it is still open.
            if self._version <= page.version:
                return []
            page.version = self._version
            return self._new(page)

    def _new(self, page: Page) -> list[Event]:
        events: list[Event] = []
        if self._state is not None:
            samples = self._history.samples
            # While samples are only added, a page needs the new ones alone; after a merge, or with another server, all of them.
            if page.epoch != self._history.epoch:
                page.epoch = self._history.epoch
                events.append(("history", samples))
            else:
                events.append(("sample", samples[page.samples :]))
            page.samples = len(samples)
            events.append(("state", {**_small(self._state), "peaks": self._history.peaks}))
            events += self._once(page)
        if page.log:
            new = self._next_line - page.next_line
            lines = list(self._lines)[-new:] if new else []
            events.append(("log", {"lines": lines, "missed": new - len(lines) if page.next_line else 0}))
            page.next_line = self._next_line
        events.append(("problem", self._problem))
        return events

    def _once(self, page: Page) -> list[Event]:
        """Schedules and layouts that a page has not been sent, each with its session's number."""
        assert self._state is not None
        events: list[Event] = []
        page.follow(self._state["server"].get("life", ""))
        for session in self._state["sessions"]:
            number, layouts, order = session["number"], session["layouts"], self._schedules.get(session["number"])
            if order is not None and page.replays.get(number) != (mark := _mark(order)):
                page.replays[number] = mark
                events.append(("schedule", {"session": number, **order}))
            if layouts is not None and page.layouts.get(number) != layouts["number"]:
                page.layouts[number] = layouts["number"]
                events.append(("layouts", {"session": number, **layouts}))
        return events

    # ---- the server, in the feed's thread

    def _observe(self) -> None:
        while self._wanted(None):
            try:
                with self._connect(self._log_wanted()) as stream:
                    with self._changed:
                        self._stream = stream
                    # Rates and schedules begin anew: the server may be another one.
                    self._view, self._predicted = LiveView(), PredictedSchedules()
                    while self._wanted(LINGER_SECONDS):
                        stream.log = self._log_wanted()
                        self._take(stream.next())
                with self._changed:
                    self._state = None  # the next page waits for a new one
            except (GTError, ValueError, OSError) as error:  # OSError: too few descriptors for a link
                self._pause(str(error))
            except Exception as error:  # a fault of ours: without this thread, pages would show an old state as a new one
                problem = f"the dashboard has failed: {type(error).__name__}: {error}"
                if problem != self._problem:
                    log.exception("%s", problem)
                self._pause(problem)
            finally:
                with self._changed:
                    self._stream = None

    def _pause(self, problem: str) -> None:
        """Show a problem to all pages, and wait before the next attempt."""
        with self._changed:
            self._problem = problem
            self._bump()
            self._changed.wait_for(lambda: self._closed, RETRY_SECONDS)

    def _wanted(self, seconds: float | None) -> bool:
        """True once somebody looks; False at the end, or if nobody looks for so long."""
        with self._changed:
            wanted = self._changed.wait_for(lambda: self._closed or self._pages or self._always, seconds)
            return bool(wanted) and not self._closed

    def _log_wanted(self) -> bool:
        with self._changed:
            return any(page.log for page in self._pages)

    def _take(self, records: list[Record]) -> None:
        state = self._view.update(records)
        # Another server at the same address: its sessions have the same numbers, and nothing else in common.
        life = state["server"].get("life", "")
        if life != self._life:
            with self._changed:
                self._life, self._schedules = life, {}
        # A simulation is repeated only for another replay. All of this is done without the lock, as it takes a while.
        schedules = {
            s["number"]: self._predicted.beside(s["number"], s["schedule"])
            if s["number"] not in self._schedules or _mark(self._schedules[s["number"]]) != _mark(s["schedule"])
            else self._schedules[s["number"]]
            for s in state["sessions"]
            if s["schedule"] is not None
        }
        self._predicted.keep(set(schedules))
        with self._changed:
            self._state, self._schedules, self._problem = state, schedules, ""
            self._history.add(state)
            for record in records:
                if isinstance(record, LogRecord):
                    # Another server counts its lines from 0: ours goes on, since open pages have its numbers.
                    self._next_line = record.number if record.number > self._next_line else self._next_line + len(record.lines)
                    self._lines.extend(record.lines)
            self._bump()

    def _bump(self) -> None:
        self._version += 1
        self._changed.notify_all()


def _mark(order: dict[str, Any]) -> tuple:
    return replay_mark(order["replays"], order["measured"])


def _small(state: dict[str, Any]) -> dict[str, Any]:
    """A state without the parts that are events of their own."""
    sessions = [{key: value for key, value in session.items() if key not in ONCE} for session in state["sessions"]]
    return {**state, "sessions": sessions}


def encoded(event: Event) -> bytes:
    """An event as the event stream of a page has it: JSON has no line end."""
    name, data = event
    return f"event: {name}\ndata: {json.dumps(data, allow_nan=False, separators=(',', ':'))}\n\n".encode()
