"""The order in which sessions' work goes to workers: each has only so much under way there, and they take turns.

A unit of work goes to all of its workers at once, so that all see what sessions exchange in the same order. Knows costs and
numbers of Runs; nothing of what is in them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

MIN_UNITS = 2  # units of a session under way on a worker, however long they take: one to do, one to go on with
AHEAD_SECONDS = 0.02  # estimated seconds that a session may have under way on a worker beyond these
UNIT_SECONDS = 0.004  # estimated seconds of a unit, about: an op that takes longer is one by itself
# Where another session uses the worker, it waits for work under way, and some ops take longer than is estimated. So there the
# two limits of seconds are divided: single precision on a GPU takes so much longer than half precision, which is estimated.
MAX_UNITS = 4
OPS_PER_UNIT = 64
SHARED_DIVISOR = 8


@dataclass(slots=True)
class Unit:
    """Work of one session for some workers. costs: estimated seconds on each; uploads: dropped if it is not sent."""

    owner: int
    costs: dict[int, float]
    send: Callable[[], None]
    uploads: Sequence[Any] = ()


@dataclass(slots=True)
class Flight:
    """Units of one session that one worker has not executed: (its Run, estimated seconds)."""

    units: deque[tuple[int, float]] = field(default_factory=deque)
    seconds: float = 0.0


class RunQueue:
    """`use` a worker; `offer` what is written; send what `due` yields and tell of each by `sent`; `done` when a worker says so.

    Short work of a session that is `free`, having its workers to itself, may go without.
    """

    def __init__(self) -> None:
        self._lines: dict[int, deque[Unit]] = {}  # by session, in the order of their turns
        self._flights: dict[int, dict[int, Flight]] = {}  # by worker, then by session that uses it
        self._beside: set[int] = set()  # sessions that have a worker in common with another
        self._long: dict[int, int] = {}  # by session: units under way that take long, counted on each worker
        self.waiting = 0  # units in all lines

    def enter(self, owner: int) -> None:
        self._lines[owner] = deque()

    def use(self, owner: int, worker: int) -> None:
        """A session sends something to this worker, for the first time perhaps."""
        if owner in self._lines:
            flights = self._flights.setdefault(worker, {})
            flights.setdefault(owner, Flight())
            if len(flights) > 1:
                self._beside.update(flights)

    def leave(self, owner: int) -> list[Unit]:
        """The session is over: its waiting units, which must not be sent."""
        for flights in self._flights.values():
            flights.pop(owner, None)
        left = list(self._lines.pop(owner, ()))
        self.waiting -= len(left)
        self._long.pop(owner, None)
        self._beside = {session for flights in self._flights.values() if len(flights) > 1 for session in flights}
        return left

    def lose(self, worker: int) -> None:
        """A worker is lost: nothing is under way there."""
        for owner, flight in self._flights.get(worker, {}).items():
            self._count(owner, -sum(seconds > 0 for _, seconds in flight.units))
            flight.units.clear()
            flight.seconds = 0.0

    def shared(self, owner: int) -> bool:
        """True if another session uses a worker of this one's."""
        return owner in self._beside

    def waits(self, owner: int) -> bool:
        """True if work of this session waits for its turn."""
        return bool(self._lines.get(owner))

    def contended(self, worker: int) -> bool:
        """True if more than one session uses the worker."""
        return len(self._flights.get(worker, ())) > 1

    def free(self, owner: int) -> bool:
        return owner not in self._beside and not self._long.get(owner) and not self._lines.get(owner)

    def offer(self, unit: Unit) -> bool:
        """True if the unit may be sent at once; else it waits for its turn. One of a session that is over may."""
        line = self._lines.get(unit.owner)
        if line is None or (not line and self._fits(unit)):
            return True
        line.append(unit)
        self.waiting += 1
        return False

    def sent(self, owner: int, worker: int, run: int, seconds: float) -> None:
        """A unit went to a worker that the session uses."""
        if owner in self._lines:
            flight = self._flights[worker][owner]
            flight.units.append((run, seconds))
            flight.seconds += seconds
            self._count(owner, seconds > 0)

    def done(self, worker: int, run: int) -> None:
        """A worker has executed its Runs up to this one."""
        # A Run's number acknowledges all before it.
        for owner, flight in self._flights.get(worker, {}).items():
            units = flight.units
            while units and units[0][0] <= run:
                seconds = units.popleft()[1]
                flight.seconds -= seconds
                self._count(owner, -(seconds > 0))
            # Sums of floats drift: an empty flight has exactly none.
            if not units:
                flight.seconds = 0.0

    def _count(self, owner: int, long: int) -> None:
        if long:
            self._long[owner] = self._long.get(owner, 0) + long

    def due(self) -> Iterator[Unit]:
        """Units whose turn it is, one of each session after the other. `sent` must be told before the next is asked for."""
        # Rounds until a whole round finds nothing that fits. Who is served
        # goes to the end of `_lines`, whose order is that of turns.
        served = self.waiting > 0
        while served:
            served = False
            for owner, line in list(self._lines.items()):
                if line and self._fits(line[0]):
                    self._lines[owner] = self._lines.pop(owner)  # behind the others
                    self.waiting -= 1
                    served = True
                    yield line.popleft()

    def all(self) -> Iterator[Unit]:
        """Every unit regardless of turns, so that workers execute all earlier plans before the next one."""
        while self.waiting:
            for line in self._lines.values():
                if line:
                    self.waiting -= 1
                    yield line.popleft()

    def _fits(self, unit: Unit) -> bool:
        # It has to fit on each of its workers. Without MIN_UNITS a worker would be idle while its acknowledgement travels.
        for worker, seconds in unit.costs.items():
            flights = self._flights.get(worker, {})
            flight = flights.get(unit.owner)
            if flight is None or len(flight.units) < MIN_UNITS:
                continue

            # Alone on a worker, a session may be far ahead. With others there, their next unit waits for all that is ahead.
            contended = len(flights) > 1
            if flight.seconds + seconds > (AHEAD_SECONDS / SHARED_DIVISOR if contended else AHEAD_SECONDS) or (
                contended and len(flight.units) >= MAX_UNITS
            ):
                return False
        return True

    def check(self) -> None:
        """Nothing waits whose turn it is: nobody would send it."""
        assert not any(line and self._fits(line[0]) for line in self._lines.values())
        assert self.waiting == sum(map(len, self._lines.values()))
        for flights in self._flights.values():
            assert set(flights) <= set(self._lines), "a session that is over has work under way"
        for owner in self._lines:
            under_way = [unit for flights in self._flights.values() for unit in flights.get(owner, Flight()).units]
            assert self._long.get(owner, 0) == sum(seconds > 0 for _, seconds in under_way)
