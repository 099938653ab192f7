"""Notices to programs of workers that are slow, stopped, or make no progress.

Slow is a notice. An error is only what is proved: a process that is stopped, or a program of which no worker has got on for
its whole stall_timeout. Nothing is lost by that error: whoever got it may wait again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from gt import errors
from gt.dispatcher.cluster.health import COMPILE, DEVICE, LOAD, Halt, Watch, WorkerPosition
from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.session import ClientSession
from gt.dispatcher.state.validate import CREDIT
from gt.errors import WorkerStuck
from gt.ir.instr import COMMUNICATION
from gt.wire.messages import (
    Describe,
    Failed,
    Fetch,
    FinishCapture,
    Inspect,
    InspectFragments,
    Message,
    Notice,
    Ops,
    Stats,
    Store,
    Trace,
)

QUESTIONS = (Fetch, Describe, Inspect, InspectFragments, Stats, Store, Trace)
SLOW_SECONDS = (
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)  # seconds at one instruction after which a program is told, then every 600
QUIET_SECONDS = 60.0  # in which a program is not told again that it has come to a slow instruction at one line
HALTED_HEARTBEATS = 0.5  # heartbeats for which a process may be stopped: a debugger or profiler stops it for a moment
MAX_NAMED_WORKERS = 4  # workers that one message names, at most
MAX_REMEMBERED_LINES = 64  # slow lines of a program
DOING = {COMPILE: "compiling", LOAD: "loading kernels for", DEVICE: "waiting for its GPU, at"}


@dataclass(slots=True)
class Told:
    """Notices that one program has had of slow workers. key: the instruction of the last; level: its place in SLOW_SECONDS.

    files_since, files_level: the same, of files that do not answer.
    """

    lines: dict[str, float]  # when it was first told of a line
    key: tuple = ()
    level: int = 0
    files_since: float = -1.0
    files_level: int = 0


# Three kinds of wait, each with its own clock:
#   held:       questions in the inbox behind an upload that workers have not taken in     uploads.moved
#   unanswered: questions whose work is done, and whose answer is not here                 request.moved, survey.since
#   behind:     questions and batches whose work is not done                               WorkerPosition.since
# Each clock begins again at Watch.awake: what passed while the dispatcher itself slept is nobody's fault.
class Stragglers:
    """Reports of slow and stuck workers to the programs of one lease that wait for them. It remembers who was told of what."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.cluster = watch, watch.cluster
        self._told: dict[int, Told] = {}  # by session

    def forget(self, session: ClientSession) -> None:
        self._told.pop(session.number, None)

    def report(self, sessions: Iterable[ClientSession], now: float) -> None:
        """Notices and errors for the programs that wait for workers."""
        halted = self.watch.halted(HALTED_HEARTBEATS)
        for session in sessions:
            if session.uploads.awaited or session.arenas.asked:
                self._end_held(session, halted, now)
            self._end_unanswered(session, now)
            self._warn_of_files(session, now)
            behind = self._behind(session)
            if behind:
                self._end(session, behind, halted, now)
                self._warn(session, behind - set(halted), now)

    def _behind(self, session: ClientSession) -> set[int]:
        """Busy workers that have something of a program still to do."""
        runs = [request.runs for request in session.fetches.open.values()]
        if session.op_stream.pending:
            runs.append(session.op_stream.pending[-1].runs)
        return {index for one in runs for index in self._waits(one)}

    def _waits(self, runs: dict[int, int]) -> set[int]:
        places, workers = self.watch.places, self.cluster.workers
        return {index for index, run in runs.items() if index in places and workers[index].done < run}

    # ---- errors

    def _end(self, session: ClientSession, behind: set[int], halted: dict[int, Halt], now: float) -> None:
        """End waits for a stopped worker, or for workers none of which makes progress."""
        # One worker that gets on is enough: the others may be waiting for it.
        stalled = self._stalled(session, behind)
        if not stalled and behind.isdisjoint(halted):
            return
        for request in list(session.fetches.open.values()):
            waits, waited = self._waits(request.runs), now - max(request.since, self.watch.awake)
            # Seen while the question waited: a worker that was let go on since it was last looked at is not stopped.
            stopped = {index: halted[index].how for index in waits & set(halted) if halted[index].seen > request.since}
            if stopped or (stalled and waits and waited >= session.stall_timeout):
                reason = self._says(session, self._blamed(waits), now)
                session.fetches.give_up(request, self._error(session, stopped, reason))

        # A program without a question under way may wait for credit. It has no request to fail, so it is told under number -1.
        pending = session.op_stream.pending
        if pending and self._without_credit(session):
            waits = self._waits(pending[0].runs)
            stopped = {index: halted[index].how for index in waits & set(halted)}
            if stopped or (stalled and waits):
                reason = self._says(session, self._blamed(waits), now)
                self._report_stuck(session, self._error(session, stopped, reason))

    def _end_held(self, session: ClientSession, halted: dict[int, Halt], now: float) -> None:
        """End questions behind an upload that a stopped worker has to take in, or only such as do not get on."""
        uploads, waits, files = session.uploads, session.uploads.waits(), session.uploads.files
        stopped = {i: halted[i].how for i in waits & set(halted)}
        # Threads of the program's own wait for its files, whatever else these workers do
        stalled = self._silent(session, waits, uploads.moved, now) or (
            bool(files) and self._expired(session, max(uploads.moved, self.watch.awake), now)
        )
        if not waits or not (stopped or stalled):
            return
        reason = f"{self._alive(waits)} taken in nothing of an upload for {now - uploads.moved:.1f} s"
        if files:
            reason = self._files(files, now - uploads.moved)
        error = self._error(session, stopped, reason)

        if self._without_credit(session):
            self._report_stuck(session, error)

        # Questions are answered with the error; everything else stays in the inbox in its order.
        left: deque[tuple[Message, tuple]] = deque()
        for message, frames in session.inbox:
            # FinishCapture ends a call whose ops are sent and which must not be made again: it waits until the worker is lost.
            if isinstance(message, QUESTIONS) or (stalled and isinstance(message, FinishCapture)):
                session.send(Failed(message.request, errors.to_wire(error)))
            else:
                left.append((message, frames))
        session.inbox = left

        # Who asks again waits as long again, and notices of files go on as if nothing had ended.
        if stalled:
            uploads.moved = now
            if files and session.number in self._told:
                self._told[session.number].files_since = now

    def _end_unanswered(self, session: ClientSession, now: float) -> None:
        """End questions whose work is done and whose answer is not received."""
        surveys = self.watch.surveys
        # `moved` is below 0 until the work before the request is done.
        for request in [r for r in session.fetches.open.values() if r.moved >= 0]:
            error = self.unanswered(session, request.owed, request.moved, now)
            if request.kind == "store" and self._expired(session, max(request.moved, self.watch.awake), now):
                error = self._error(session, {}, self._files(request.files, now - request.moved))
            if error:
                session.fetches.give_up(request, error)
        for key, survey in [(key, survey) for key, survey in surveys.items() if survey.session is session]:
            if error := self.unanswered(session, survey.left, survey.since, now):
                session.send(Failed(surveys.pop(key).number, errors.to_wire(error)))

    def unanswered(self, session: ClientSession, waits: set[int], moved: float, now: float) -> WorkerStuck | None:
        """The error if nothing was received from workers that owe answers; None while they have time."""
        if not waits or not self._silent(session, waits, moved, now):
            return None
        return self._error(session, {}, f"{self._alive(waits)} answered nothing for {now - moved:.1f} s")

    def _silent(self, session: ClientSession, waits: set[int], moved: float, now: float) -> bool:
        """True if for a program's stall_timeout nothing was received from workers that make no other progress either."""
        places = self.watch.places
        return self._expired(session, max(moved, self.watch.awake, *(places[i].since for i in waits if i in places), 0.0), now)

    @staticmethod
    def _expired(session: ClientSession, since: float, now: float) -> bool:
        return 0 < session.stall_timeout <= now - since

    def _files(self, files: dict[str, set[int]], seconds: float) -> str:
        """Files that a program lends, and workers that wait for them."""
        shown = ", ".join(f"{name!r:.100}" for name in list(files)[:MAX_NAMED_WORKERS])
        more = f" and {len(files) - MAX_NAMED_WORKERS} more" if len(files) > MAX_NAMED_WORKERS else ""
        waits = {index for workers in files.values() for index in workers}
        return f"{self._alive(waits)} got no answer of the file system of {shown}{more} for {seconds:.1f} s"

    def _alive(self, waits: set[int]) -> str:
        names = ", ".join(self.cluster.workers[i].name for i in sorted(waits)[:MAX_NAMED_WORKERS])
        more = f" and {len(waits) - MAX_NAMED_WORKERS} more" if len(waits) > MAX_NAMED_WORKERS else ""
        return f"workers {names}{more} are alive and have" if len(waits) > 1 else f"worker {names} is alive and has"

    @staticmethod
    def _without_credit(session: ClientSession) -> bool:
        """True if a program may wait until a batch is acknowledged, and has not been told why."""
        batches = len(session.op_stream.pending) + len(session.op_stream.coming)
        batches += sum(isinstance(message, Ops) for message, _ in session.inbox)
        return batches >= CREDIT and not session.op_stream.told_stuck

    @staticmethod
    def _report_stuck(session: ClientSession, error: WorkerStuck) -> None:
        session.op_stream.told_stuck = True
        session.send(Failed(-1, errors.to_wire(error)))

    def _stalled(self, session: ClientSession, behind: set[int]) -> bool:
        """True if none of these has got on for a program's stall_timeout; 0 is no limit."""
        limit = session.stall_timeout
        return limit > 0 and all(self.watch.quiet(self.watch.places[i]) >= limit for i in behind)

    def _error(self, session: ClientSession, stopped: dict[int, str], slow: str) -> WorkerStuck:
        """slow: of workers that are not stopped."""
        again = "Nothing is lost: wait again (fetch the value once more)"
        if stopped:
            reason = "; ".join(
                f"worker {self.cluster.workers[i].name} is stopped: {stopped[i]}" for i in sorted(stopped)[:MAX_NAMED_WORKERS]
            )
            return WorkerStuck(f"{reason}. {again}; a worker that is stopped for {self.watch.heartbeat:g} s counts as lost")
        limit = f"no worker of this program has made progress for {session.stall_timeout:g} s"
        return WorkerStuck(f"{limit}: {slow}. {again}, or give a longer stall_timeout= or GT_STALL_TIMEOUT")

    # ---- notices

    def _warn(self, session: ClientSession, behind: set[int], now: float) -> None:
        """Say once a level where the slowest worker is that waits for nobody."""
        # The worker that is late longest, among those that do not wait for others.
        places, awake = self.watch.places, self.watch.awake
        late = self._blamed({i for i in behind if now - max(places[i].came, awake) >= SLOW_SECONDS[0]})
        warned = self._told.setdefault(session.number, Told({}))
        if not late:
            return

        # A new instruction begins at level 0 again.
        index, place = min(late.items(), key=lambda row: row[1].came)
        key = (index, place.life, *(place.at or ())[:2], place.came)
        if warned.key != key:
            warned.key, warned.level = key, 0

        # A level is told once. The first level of a line that is slow in every step is told once a minute.
        level = _level(now - max(place.came, awake))
        if level <= warned.level:
            return
        warned.level = level
        line = self._line(session, place)
        if level == 1 and now - warned.lines.get(line, -QUIET_SECONDS) < QUIET_SECONDS:
            return
        if level == 1:
            warned.lines[line] = now
            if len(warned.lines) > MAX_REMEMBERED_LINES:
                del warned.lines[next(iter(warned.lines))]
        session.send(Notice(f"slow: {self._says(session, late, now)}; the wait goes on, Ctrl-C ends it"))

    def _warn_of_files(self, session: ClientSession, now: float) -> None:
        """Say once a level that a file system does not answer."""
        # Files that workers read (uploads) or write (stores). A file system may be slow for as long as it likes: this is a
        # notice, with the same levels as for a slow op.
        stores = [r for r in session.fetches.open.values() if r.kind == "store" and r.moved >= 0 and r.owed]
        files, since = session.uploads.files, session.uploads.moved
        if not files and stores:
            since = max(request.moved for request in stores)
            files = {name: workers for request in stores for name, workers in request.files.items()}
        if not files:
            return
        since = max(since, self.watch.awake)
        warned = self._told.setdefault(session.number, Told({}))
        if warned.files_since != since:
            warned.files_since, warned.files_level = since, 0
        level = _level(now - since)
        if level > warned.files_level:
            warned.files_level = level
            session.send(Notice(f"slow: {self._files(files, now - since)}; the wait goes on, Ctrl-C ends it"))

    def _blamed(self, waits: set[int]) -> dict[int, WorkerPosition]:
        """Late workers that wait for no other; all of them where each waits for another."""
        places = {index: self.watch.places[index] for index in sorted(waits)}
        return {index: place for index, place in places.items() if not place.waits} or places

    def _says(self, session: ClientSession, late: dict[int, WorkerPosition], now: float) -> str:
        rows = [self._one(session, index, place, now) for index, place in list(late.items())[:MAX_NAMED_WORKERS]]
        more = f"; and {len(late) - MAX_NAMED_WORKERS} more workers" if len(late) > MAX_NAMED_WORKERS else ""
        return "; ".join(rows) + more

    def _one(self, session: ClientSession, index: int, place: WorkerPosition, now: float) -> str:
        name, seconds = self.cluster.workers[index].name, now - place.came
        if self.watch.silent(index) and self.watch.unseen(self.cluster.workers[index]):
            return self._unproved(self.cluster.workers[index], now - place.heard)
        if place.at is None:
            return f"worker {name} is alive and has not reported its work for {seconds:.1f} s"
        doing = f"{DOING[place.kind]} " if place.kind in DOING else ""
        kind = f" ({place.kind})" if place.kind in COMMUNICATION else ""
        return f"worker {name} is alive and has been at {doing}{self._line(session, place)}{kind} for {seconds:.1f} s"

    def _unproved(self, worker: Worker, seconds: float) -> str:
        """A silent worker that is not known to be stopped."""
        host, pid = worker.info.get("host", ""), worker.info.get("pid", 0)
        seen = "no other worker there can look at its process"
        if self.watch.witnesses(worker):
            seen = "another worker there sees its process, which is not stopped"
        return (
            f"worker {worker.name} has answered nothing for {seconds:.1f} s; its host {host!r:.80} is reached, and {seen}: "
            f"`ps -o stat= -p {pid}` there says T if it is stopped"
        )

    def _line(self, session: ClientSession, place: WorkerPosition) -> str:
        """The op that a worker is at, as its own program knows it."""
        if place.at is None:
            return "something"
        row = session.journal.find(place.at[2]) if isinstance(place.at[2], int) else None
        asked = next((r for r in session.fetches.open.values() if r.seq == place.at[2]), None)
        if row is None:
            return "an op of another program" if asked is None else f"reading {asked.name}"
        row = row.at(place.at[2])
        where = f"{row.origin.file}:{row.origin.line}: " if row.origin.file else ""
        group = f", group {row.origin.group}" if row.origin.group else ""
        return f"{where}{row.known.template.op}{group}"


def _level(seconds: float) -> int:
    """The number of notices in a wait of so many seconds."""
    return sum(seconds >= limit for limit in SLOW_SECONDS) + max(int(seconds // SLOW_SECONDS[-1]) - 1, 0)
