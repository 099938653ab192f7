"""Recent records for observers: the last errors, kept always, and lines of the instruction log, kept while somebody asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gt.dispatcher.events import MARK, Log
from gt.dispatcher.instruction_log import line
from gt.dispatcher.state.records import NO_ORIGIN, Origin
from gt.logs import plain
from gt.wire.records import ErrorRecord, LogRecord

MAX_ERRORS = 64
MAX_LINES = 2000  # that are kept
MAX_SENT_LINES = 500  # at once
MAX_LINE_CHARACTERS, MAX_ERROR_CHARACTERS = 400, 1000


class RecentRecords:
    """errors: the newest, by number. wanted: somebody asks for lines."""

    def __init__(self) -> None:
        self.errors: deque[ErrorRecord] = deque(maxlen=MAX_ERRORS)
        self.wanted = False
        self.next_line = 0
        self._lines: deque[str] = deque(maxlen=MAX_LINES)

    def add_error(self, at: float, session: int, peer: str, text: str, op: str = "", origin: Origin = NO_ORIGIN) -> None:
        number = self.errors[-1].number + 1 if self.errors else 1
        message = "\n".join(plain(part) for part in text[:MAX_ERROR_CHARACTERS].split("\n"))
        where = (plain(op), plain(origin.file), origin.line, plain(origin.group))
        self.errors.append(ErrorRecord(number, round(at, 3), session, peer, *where, message))

    def add_lines(self, text: str, at: float) -> None:
        """Lines of a page: their time is a mark."""
        lines = text.splitlines()[-MAX_LINES:]
        self.next_line += text.count("\n")
        time = f"{at:12.6f}"
        self._lines.extend(each.replace(MARK, time)[:MAX_LINE_CHARACTERS] for each in lines)

    def add_entry(self, entry: Log, at: float) -> None:
        self._lines.append(line(entry, at, self.next_line).rstrip("\n")[:MAX_LINE_CHARACTERS])
        self.next_line += 1

    def end_lines(self) -> None:
        """Nobody asks for lines any more."""
        self.wanted = False
        self._lines.clear()

    def newer_errors(self, number: int) -> list[ErrorRecord]:
        return [error for error in self.errors if error.number > number]

    def lines_from(self, number: int) -> LogRecord | None:
        """Lines that an observer has not been sent, the newest of them; None without any."""
        new = self.next_line - number
        if new <= 0:
            return None
        sent: Sequence[str] = list(self._lines)[-min(new, MAX_SENT_LINES) :]
        return LogRecord(self.next_line, new - len(sent), list(sent))
