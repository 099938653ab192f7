"""An observer's end of a link: subscribes to a running server's records, and hands out the newest."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType

from gt.errors import DispatcherLost, GTError
from gt.wire import link
from gt.wire.dealer import Dealer, LinkTimeouts
from gt.wire.messages import Exit, Message, Observe, Reject, Welcome
from gt.wire.messages import Records as RecordsMessage
from gt.wire.records import ONCE, Record, records

ANSWER_SECONDS = 30.0  # for Records of a server that is up, after the interval between them
SHORT_SECONDS = 1.0
ONCE_ROWS = [[code] for code in ONCE]
MAX_KEPT = 64  # rows sent once, of Records that nobody took in time


class RecordStream:
    """A context manager that observes the server at "host:port".

    interval: seconds between two Records, at least. wait: seconds to try for. log: lines of the instruction log are wanted,
    which may be changed at any time. Raises Refused or DispatcherLost.
    """

    def __init__(self, address: str, token: str = "", interval: float = 0.5, wait: float = 10.0, log: bool = False) -> None:
        self.address, self._log = address, log
        self.interval, self._wait = interval, wait
        self._acknowledged = -1  # number of the last Records, 0 before them, -1 before the subscription
        self._changed = threading.Condition()
        self._newest: RecordsMessage | None = None
        self._kept: deque[list] = deque(maxlen=MAX_KEPT)
        self._taken = 0
        self._failure: GTError | None = None
        self._nudged = False
        self._link = Dealer(address, self._receive, self._lost, timeouts=LinkTimeouts(wait), token=token)
        self._link.send(link.hello("observer"))

    def __enter__(self) -> RecordStream:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def log(self) -> bool:
        return self._log

    @log.setter
    def log(self, wanted: bool) -> None:
        """The server is told at once: its next Records may come much later."""
        with self._changed:
            if wanted != self._log:
                self._log = wanted
                if self._acknowledged >= 0:
                    self._subscribe(self._acknowledged)

    def next(self) -> list[Record]:
        """Records that were not taken before; waits for them. DispatcherLost if none arrive, or the link has ended.

        The wait is counted in short ones: a process that was stopped meanwhile has not waited.
        """
        seconds = ANSWER_SECONDS + self.interval
        for _ in range(round(seconds / SHORT_SECONDS)):
            if (found := self.take(SHORT_SECONDS)) is not None:
                return found
        raise DispatcherLost(f"the server at {self.address} has sent no records for {seconds:g} s: check that it runs")

    def take(self, seconds: float) -> list[Record] | None:
        """Records that were not taken before, None if none arrive within so many seconds or until `nudge`.

        Raises what has ended the link.
        """
        with self._changed:
            # Records that are here are handed out even if the link has failed since; the failure is raised at the next call.
            self._changed.wait_for(lambda: self._fresh() or self._nudged or self._failure is not None, seconds)
            self._nudged = False
            if self._newest is None or not self._fresh():
                if self._failure is not None:
                    raise self._failure
                return None
            self._taken = self._newest.number
            rows = [*self._kept, *self._newest.rows]
            self._kept.clear()
        return records(rows)

    def delay(self, seconds: float) -> str:
        """The reason to wait longer, if no Records and no failure are there within so many seconds, else ""."""
        with self._changed:
            if self._changed.wait_for(lambda: self._newest is not None or self._failure is not None, seconds):
                return ""
        if self._link.connected:
            return f"the server at {self.address} has sent no records yet"
        return f"no server at {self.address} has answered yet, and is tried for {self._wait:g} s"

    def nudge(self) -> None:
        """End a wait of another thread in `take`, or the next one, as one without records."""
        with self._changed:
            self._nudged = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End a wait in another thread."""
        self._fail(DispatcherLost("the observer has ended"))

    def close(self) -> None:
        self._link.close()

    def _fresh(self) -> bool:
        return self._newest is not None and self._newest.number > self._taken

    # ---- in the link's thread

    def _receive(self, message: Message, frames: tuple) -> None:
        if isinstance(message, Welcome):
            with self._changed:
                self._subscribe(0)
        elif isinstance(message, RecordsMessage):
            with self._changed:
                # Acknowledged on receipt, not when taken: a slow reader skips Records, and the server does not drop it.
                self._subscribe(message.number)
                # Records that nobody took are replaced; of them only rows that are sent once are kept.
                if self._newest is not None and self._fresh():
                    self._kept.extend(row for row in self._newest.rows if type(row) is list and row[:1] in ONCE_ROWS)
                self._newest = message
                self._changed.notify_all()
        elif isinstance(message, Reject):
            try:
                link.answer(message)
            except GTError as error:
                self._fail(error)
        elif isinstance(message, Exit):
            self._fail(DispatcherLost(f"the server at {self.address} has ended the connection: {message.reason}"))

    def _subscribe(self, seen: int) -> None:
        """Under the lock, so that numbers are sent in order."""
        self._acknowledged = seen
        self._link.send(Observe(seen, int(self.interval * 1000), self._log))

    def _lost(self, reason: str) -> None:
        self._fail(DispatcherLost(reason))

    def _fail(self, error: GTError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
