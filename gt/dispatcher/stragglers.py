"""Programs are told of workers that are slow, stopped, or do not get on.

Slow is a notice. An error is only what is proved: a process that is stopped, or a program of which no worker has got on for
its whole stall_timeout. Nothing is lost by that error: whoever got it may wait again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gt import errors
from gt.dispatcher.intake import CREDIT
from gt.dispatcher.sessions import Session
from gt.dispatcher.watch import COMPILE, DEVICE, LOAD, MEETING, Place, Watch
from gt.errors import WorkerStuck
from gt.wire.messages import Failed, Notice

SLOW = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0)  # seconds at one instruction after which a program is told, then every 600
SAME = 60.0  # seconds in which a program is not told for the second time that it has come to a slow instruction at one line
HALTED = 0.5  # of a heartbeat: a process that is stopped for a moment is looked at by a debugger
NAMED = 4  # workers that one message names, at most
REMEMBERED = 64  # slow lines of a program
DOING = {COMPILE: "compiling", LOAD: "loading kernels for", DEVICE: "waiting for its GPU, at"}


@dataclass(slots=True)
class Told:
    """Notices that one program has had of slow workers. key: the instruction that the last was of; level: its place in SLOW."""

    lines: dict[str, float]  # when it was first told of a line
    key: tuple = ()
    level: int = 0


class Stragglers:
    def __init__(self, watch: Watch) -> None:
        self.watch, self.cluster = watch, watch.cluster
        self._told: dict[int, Told] = {}  # by session

    def forget(self, session: Session) -> None:
        self._told.pop(session.number, None)

    def tell(self, sessions: Iterable[Session], now: float) -> None:
        """Notices and errors for the programs that wait for workers."""
        if not self.watch.places:
            return
        halted = {i: halt.how for i, halt in self.watch.halted(HALTED).items()}
        for session in sessions:
            behind = self._behind(session)
            if behind:
                self._end(session, behind, halted, now)
                self._warn(session, behind - set(halted), now)

    def _behind(self, session: Session) -> set[int]:
        """Busy workers that have something of a program still to do."""
        runs = [request.runs for request in session.requests.open.values()]
        if session.batches.pending:
            runs.append(session.batches.pending[-1].runs)
        return {index for one in runs for index in self._waits(one)}

    def _waits(self, runs: dict[int, int]) -> set[int]:
        places, workers = self.watch.places, self.cluster.workers
        return {index for index, run in runs.items() if index in places and workers[index].done < run}

    # ---- errors

    def _end(self, session: Session, behind: set[int], halted: dict[int, str], now: float) -> None:
        """End what waits for a worker that is stopped, or for workers of which none gets on."""
        stalled = self._stalled(session, behind)
        if not stalled and behind.isdisjoint(halted):
            return
        for request in list(session.requests.open.values()):
            waits, waited = self._waits(request.runs), now - max(request.since, self.watch.awake)
            stopped = {i: halted[i] for i in waits & set(halted)}
            if stopped or (stalled and waits and waited >= session.stall_timeout):
                session.requests.give_up(request, self._error(session, waits, stopped, now))
        pending, coming = session.batches.pending, session.batches.coming
        if pending and len(pending) + len(coming) >= CREDIT and not session.told_stuck:
            waits = self._waits(pending[0].runs)
            stopped = {i: halted[i] for i in waits & set(halted)}
            if stopped or (stalled and waits):
                session.told_stuck = True
                session.send(Failed(-1, errors.to_wire(self._error(session, waits, stopped, now))))

    def _stalled(self, session: Session, behind: set[int]) -> bool:
        """True if none of these has got on for a program's stall_timeout; 0 is no limit."""
        limit = session.stall_timeout
        return limit > 0 and all(self.watch.quiet(self.watch.places[i]) >= limit for i in behind)

    def _error(self, session: Session, waits: set[int], stopped: dict[int, str], now: float) -> WorkerStuck:
        again = "Nothing is lost: wait again (fetch the value once more)"
        if stopped:
            said = "; ".join(f"worker {self.cluster.workers[i].name} is stopped: {stopped[i]}" for i in sorted(stopped)[:NAMED])
            return WorkerStuck(f"{said}. {again}; one that stays so for {self.watch.heartbeat:g} s is given up")
        limit = f"no worker of this program has got on for {session.stall_timeout:g} s"
        said = self._says(session, self._blamed(waits), now)
        return WorkerStuck(f"{limit}: {said}. {again}, or give a longer stall_timeout= or GT_STALL_TIMEOUT")

    # ---- notices

    def _warn(self, session: Session, behind: set[int], now: float) -> None:
        """Say once a level where the slowest worker is that waits for nobody."""
        places, awake = self.watch.places, self.watch.awake
        late = self._blamed({i for i in behind if now - max(places[i].came, awake) >= SLOW[0]})
        told = self._told.setdefault(session.number, Told({}))
        if not late:
            return
        index, place = min(late.items(), key=lambda row: row[1].came)
        key = (index, place.life, *(place.at or ())[:2], place.came)
        if told.key != key:
            told.key, told.level = key, 0
        level = _level(now - max(place.came, awake))
        if level <= told.level:
            return
        told.level = level
        line = self._line(session, place)
        if level == 1 and now - told.lines.get(line, -SAME) < SAME:
            return
        if level == 1:
            told.lines[line] = now
            if len(told.lines) > REMEMBERED:
                del told.lines[next(iter(told.lines))]
        session.send(Notice(f"slow: {self._says(session, late, now)}; it goes on, Ctrl-C ends the wait"))

    def _blamed(self, waits: set[int]) -> dict[int, Place]:
        """Late workers that wait for no other; all of them where each waits for another."""
        places = {index: self.watch.places[index] for index in sorted(waits)}
        return {index: place for index, place in places.items() if not place.waits} or places

    def _says(self, session: Session, late: dict[int, Place], now: float) -> str:
        rows = [self._one(session, index, place, now) for index, place in list(late.items())[:NAMED]]
        more = f"; and {len(late) - NAMED} more workers" if len(late) > NAMED else ""
        return "; ".join(rows) + more

    def _one(self, session: Session, index: int, place: Place, now: float) -> str:
        name, seconds = self.cluster.workers[index].name, now - place.came
        if place.at is None:
            return f"worker {name} is alive and has not said for {seconds:.1f} s what it is doing"
        doing = f"{DOING[place.kind]} " if place.kind in DOING else ""
        kind = f" ({place.kind})" if place.kind in MEETING else ""
        return f"worker {name} is alive and has been at {doing}{self._line(session, place)}{kind} for {seconds:.1f} s"

    def _line(self, session: Session, place: Place) -> str:
        """The op that a worker is at, as its own program knows it."""
        if place.at is None:
            return "something"
        row = session.journal.find(place.at[2]) if isinstance(place.at[2], int) else None
        asked = next((r for r in session.requests.open.values() if r.seq == place.at[2]), None)
        if row is None:
            return "an op of another program" if asked is None else f"reading {asked.name}"
        row = row.at(place.at[2])
        where = f"{row.origin.file}:{row.origin.line}: " if row.origin.file else ""
        group = f", group {row.origin.group}" if row.origin.group else ""
        return f"{where}{row.known.template.op}{group}"


def _level(seconds: float) -> int:
    """The number of notices in a wait of so many seconds."""
    return sum(seconds >= limit for limit in SLOW) + max(int(seconds // SLOW[-1]) - 1, 0)
