"""The order in which sessions' work goes to workers: each has only so much under way there, and they take turns.

A unit of work goes to all of its workers at once, so that all see what sessions exchange in the same order. Knows costs and
numbers of Runs; nothing of what is in them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

LEAST = 2  # units of a session under way on a worker, however long they take: one to do, one to go on with
AHEAD = 0.02  # estimated seconds that a session may have under way on a worker beyond these
MOST = 4  # units, where another session uses the worker: what is under way is waited for
UNIT = 0.004  # estimated seconds of a unit, about: an op that takes longer is one by itself
GRAIN = 64  # ops of a unit where another session is at work: some take longer than is estimated


@dataclass(slots=True)
class Unit:
    """Work of one session for some workers. costs: estimated seconds on each; uploads: what is dropped if it is not sent."""

    owner: int
    costs: dict[int, float]
    send: Callable[[], None]
    uploads: Sequence[Any] = ()


@dataclass(slots=True)
class Flight:
    """Units of one session that one worker has not carried out: (its Run, estimated seconds)."""

    units: deque[tuple[int, float]] = field(default_factory=deque)
    seconds: float = 0.0


class RunQueue:
    """`offer` what is written; send what `due` yields, and tell of each by `sent`; `done` when a worker says so."""

    def __init__(self) -> None:
        self._lines: dict[int, deque[Unit]] = {}  # by session, in the order of their turns
        self._flights: dict[int, dict[int, Flight]] = {}  # by worker, then by session that has used it

    def enter(self, owner: int) -> None:
        self._lines[owner] = deque()

    def leave(self, owner: int) -> list[Unit]:
        """The session is over: what it had waiting, which is not to be sent."""
        for flights in self._flights.values():
            flights.pop(owner, None)
        return list(self._lines.pop(owner, ()))

    def shared(self, owner: int) -> bool:
        """Whether another session uses a worker of this one's."""
        return any(owner in flights and len(flights) > 1 for flights in self._flights.values())

    def offer(self, unit: Unit) -> bool:
        """Whether the unit may be sent at once; else it waits for its turn. One of a session that is over may."""
        line = self._lines.get(unit.owner)
        if line is None or (not line and self._fits(unit)):
            return True
        line.append(unit)
        return False

    def sent(self, owner: int, worker: int, run: int, seconds: float) -> None:
        if owner not in self._lines:
            return
        flight = self._flights.setdefault(worker, {}).setdefault(owner, Flight())
        flight.units.append((run, seconds))
        flight.seconds += seconds

    def done(self, worker: int, run: int) -> None:
        """A worker has carried out its Runs up to this one."""
        for flight in self._flights.get(worker, {}).values():
            units = flight.units
            while units and units[0][0] <= run:
                flight.seconds -= units.popleft()[1]
            if not units:
                flight.seconds = 0.0

    def lose(self, worker: int) -> None:
        """A worker is gone, and with it what it had under way."""
        self._flights.pop(worker, None)

    def due(self) -> Iterator[Unit]:
        """Units whose turn it is, one of each session after the other. `sent` must be told before the next is asked for."""
        served = True
        while served:
            served = False
            for owner, line in list(self._lines.items()):
                if line and self._fits(line[0]):
                    self._lines[owner] = self._lines.pop(owner)  # behind the others
                    served = True
                    yield line.popleft()

    def all(self) -> Iterator[Unit]:
        """Every unit, whoever's turn it is: workers are to meet what was planned until now before what comes next."""
        while any(self._lines.values()):
            for line in self._lines.values():
                if line:
                    yield line.popleft()

    def _fits(self, unit: Unit) -> bool:
        for worker, seconds in unit.costs.items():
            flights = self._flights.get(worker, {})
            flight = flights.get(unit.owner)
            if flight is None or len(flight.units) < LEAST:
                continue
            others = len(flights) > 1
            if flight.seconds + seconds > AHEAD or (others and len(flight.units) >= MOST):
                return False
        return True

    def check(self) -> None:
        """Nothing waits whose turn it is: nobody would send it."""
        assert not any(line and self._fits(line[0]) for line in self._lines.values())
        for flights in self._flights.values():
            assert set(flights) <= set(self._lines), "a session that is over has work under way"
