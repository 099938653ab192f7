"""Observers of the server: who they are, when they get Records, and the questions to workers that Records take.

While nobody observes, a tick finds no observer and does nothing else. An observer may only subscribe. One that does not
acknowledge its Records is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gt.dispatcher.cluster.admission import Admission
from gt.dispatcher.cluster.leases import Exclusive, Lease, Shared, Terms
from gt.dispatcher.cluster.look_budget import MAX_PAUSE_SECONDS, LookBudget
from gt.dispatcher.cluster.observation import (
    Answers,
    WorkerAnswer,
    host_records,
    idle_record,
    lease_records,
    queue_records,
    schedule_record,
)
from gt.dispatcher.cluster.peer_info import MAX_NAME_CHARACTERS
from gt.dispatcher.cluster.recent_records import RecentRecords
from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.events import Peer
from gt.dispatcher.fairness.time_slices import Pace
from gt.dispatcher.session import ClientSession
from gt.dispatcher.state.records import Logged
from gt.errors import GTError, ProtocolError, Refused
from gt.logs import plain
from gt.wire.messages import MAX_VALUES, Hello, Message, Metrics, Observe, Query, Records, Report, Watched, Welcome
from gt.wire.records import LayoutRecord, Record, ScheduleRecord, ServerRecord, WorkerRecord, replay_mark, rows

MAX_OBSERVERS = 64
MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = 0.5, 60.0  # seconds between two Records
WORKER_SECONDS = 0.03  # least interval for each worker: the dispatcher spends about 0.3 ms on its Query, Report and record
IDLE_SHARE = 200  # times as long as the slowest worker takes to count, so that counting takes 0.5% of its time
PATIENCE_SECONDS = 1.0  # seconds for workers' answers; then Records are sent without them
MAX_UNREAD_RECORDS = 16  # Records that an observer has not acknowledged


class ObserversHost(Protocol):
    """The core, as far as observers need it."""

    sessions: dict[Peer, ClientSession]
    lending: Exclusive | Shared
    admission: Admission
    pace: Pace
    terms: Terms
    process: list
    sent: int
    received: int
    now: float

    def send(self, peer: Peer, message: Message, frames: tuple = ()) -> None: ...
    def refuse(self, peer: Peer, error: GTError) -> None: ...
    def write_log(self, wanted: bool) -> None: ...


@dataclass(slots=True)
class Observer:
    """sent, seen: numbers of the last Records sent and acknowledged. interval: seconds, 0 before it has subscribed.

    replays, layouts: by session, the marks of the newest schedule and layouts that it was sent. errors, lines: numbers of the
    last error, and of the next line of the log; log: it wants these.
    """

    interval: float = 0.0
    sent: int = 0
    seen: int = 0
    due: float = 0.0
    replays: dict[int, tuple] = field(default_factory=dict)
    layouts: dict[int, int] = field(default_factory=dict)
    errors: int = 0
    lines: int = 0
    log: bool = False


class Observers:
    """Observers of one core."""

    def __init__(self, core: ObserversHost) -> None:
        self._core = core
        self.peers: dict[Peer, Observer] = {}
        self.recent = RecentRecords()
        self._answers: Answers = {}
        self._schedules: dict[int, ScheduleRecord] = {}  # by session
        self._asked: dict[Peer, int] = {}  # worker -> request that it has not answered
        self._began = self._next = 0.0  # times: the observation under way began, the next may begin
        self._under_way = False
        self._turn = 0  # counts observations
        self._cost = self._counting = 0.0  # CPU seconds of the slowest worker's answer, and of all
        self._budget = LookBudget()

    @property
    def active(self) -> bool:
        """True if somebody has subscribed."""
        return any(observer.interval for observer in self.peers.values())

    # ---- who observes

    def enter(self, peer: Peer, hello: Hello) -> None:
        """An observer's Hello; Refused if there are too many."""
        if len(self.peers) >= MAX_OBSERVERS:
            raise Refused(f"{MAX_OBSERVERS} observers are connected, and no more can be: close one, or use `gt top` for all")
        self.peers[peer] = Observer()
        names = [w.name for lease in self._core.lending.leases for w in lease.cluster.workers]
        self._core.send(peer, Welcome(0, "observer", names, [], MAX_UNREAD_RECORDS, self._core.process))

    def leave(self, peer: Peer) -> bool:
        """An observer is gone; False if the peer was none."""
        was, known = self.active, self.peers.pop(peer, None) is not None
        self._follow_log()
        if was and not self.active:
            self._end()
        return known

    def _end(self) -> None:
        """Nobody observes any more."""
        self._answers, self._schedules, self._asked, self._under_way = {}, {}, {}, False
        self._tell_clients(self._core.sessions)

    def observe(self, peer: Peer, message: Observe, frames: tuple) -> None:
        """Take a subscription or an acknowledgement; ProtocolError for Records that were not sent."""
        observer, was = self.peers.get(peer), self.active
        if observer is None:
            raise ProtocolError("the message is one of observers, and this peer is not an observer")
        if not observer.seen <= message.seen <= observer.sent:
            raise ProtocolError(f"Observe.seen is {message.seen}, want {observer.seen} to {observer.sent}")

        observer.seen = message.seen
        observer.interval = max(MIN_INTERVAL_SECONDS, min(message.interval / 1000, MAX_INTERVAL_SECONDS))
        if observer.log != message.log:
            observer.log, observer.lines = message.log, self.recent.next_line
            self._follow_log()
            # Its first lines do not wait for a pause.
            if message.log:
                observer.due, self._next = 0.0, min(self._next, max(self._core.now, self._began) + MIN_INTERVAL_SECONDS)
        # Nor do its first Records.
        if not observer.sent:
            self._next = min(self._next, self._began + MIN_INTERVAL_SECONDS)

        # The first observer of all: clients begin to tell roles and numbers.
        if not was:
            self._next = 0.0
            self._tell_clients(self._core.sessions)

    def _follow_log(self) -> None:
        """Have the instruction log written, as long as an observer wants its lines."""
        wanted = any(observer.log for observer in self.peers.values())
        if wanted != self.recent.wanted:
            self._core.write_log(wanted)
            self.recent.end_lines()
            self.recent.wanted = wanted

    def _tell_clients(self, peers: Iterable[Peer]) -> None:
        for peer in peers:
            self._core.send(peer, Watched(self.active))

    def welcomed(self, client: Peer) -> None:
        """A session begins."""
        if self.active:
            self._tell_clients([client])

    # ---- when

    def tick(self) -> None:
        """Begin an observation, or end one whose workers take too long."""
        if not self.peers:
            return
        now = self._core.now
        if self._under_way:
            if now - self._began >= PATIENCE_SECONDS:
                self._finish()
        elif now >= self._next and any(o.interval and now >= o.due for o in self.peers.values()):
            self._begin(now)

    def _begin(self, now: float) -> None:
        self._under_way, self._began = True, now
        self._turn += 1
        self._asked = {}

        # The next observation begins after a pause that grows with the number of workers and the cost of their counting.
        leases = self._core.lending.leases
        count = sum(len(lease.cluster.workers) for lease in leases)
        # A new observer gets two Records soon, since rates are differences of two.
        new = any(o.interval and not o.sent for o in self.peers.values())
        counting = 0.0 if new else min(IDLE_SHARE * self._cost, MAX_PAUSE_SECONDS)
        self._next = now + max(MIN_INTERVAL_SECONDS, WORKER_SECONDS * count, counting)
        self._cost = self._counting = 0.0

        for lease in leases:
            shown = self._shown(lease)
            numbers: Mapping[int, list[int]] = shown.programs.newest if shown is not None else {}
            for worker in lease.cluster.workers:
                if not worker.lost:
                    key = self._asked[worker.peer] = lease.cluster.key()
                    self._core.send(worker.peer, Query(key, True, numbers.get(worker.index, [])))
        if not self._asked:
            self._finish()

    def _shown(self, lease: Lease) -> ClientSession | None:
        """The session whose schedule this observation asks for: they take turns."""
        scheduled = [session for session in lease.sessions.values() if session.programs.order.get("rows")]
        return scheduled[self._turn % len(scheduled)] if scheduled else None

    def answered(self, worker: Worker, report: Report) -> None:
        """Take a worker's Report, if it answers an observation."""
        if self._asked.get(worker.peer) != report.request:
            return
        del self._asked[worker.peer]
        stats, at, took = (report.body.get(name) for name in ("stats", "at", "took"))
        if isinstance(stats, dict):
            position = at if isinstance(at, list) else []
            self._answers[worker.name] = WorkerAnswer(worker.lives, self._core.now, stats, position)
        if type(took) is float and 0 <= took <= MAX_INTERVAL_SECONDS / IDLE_SHARE:
            self._cost = max(self._cost, took)
            self._counting += took
        if not self._asked and self._under_way:
            self._finish()

    def lose(self, worker: Worker) -> None:
        """A worker is lost: nobody waits for its answer."""
        if self._asked.pop(worker.peer, None) is not None and not self._asked and self._under_way:
            self._finish()

    # ---- what

    def _finish(self) -> None:
        """Send the Records of this moment to every observer that is due."""
        self._under_way, now = False, self._core.now
        due = {peer: o for peer, o in self.peers.items() if o.interval and now >= o.due}
        for peer in [peer for peer, o in due.items() if o.sent - o.seen >= MAX_UNREAD_RECORDS]:
            behind = due.pop(peer)
            text = (
                f"the observer has not acknowledged {behind.sent - behind.seen} Records, want fewer than {MAX_UNREAD_RECORDS}"
            )
            self._core.refuse(peer, Refused(f"{text}: read faster, or ask for a longer interval"))

        ops = sum(session.op_stream.ops for session in self._core.sessions.values())
        self._budget.pay(now, self._answers, ops, len(due), self._counting)
        # The budget's pause does not hold up an observer that waits for its first two Records.
        if all(o.sent for o in self.peers.values() if o.interval):
            self._next = max(self._next, now + self._budget.pause)

        # What moves is made once for all of them; what changes seldom, for each that has not got it.
        wire = rows(self._records(now)) if due else []
        for peer, observer in due.items():
            observer.sent += 1
            observer.due = self._began + (observer.interval if observer.sent > 1 else MIN_INTERVAL_SECONDS)
            self._core.send(peer, Records(observer.sent, wire + rows(self._new_records(observer))))

    def _new_records(self, observer: Observer) -> list[Record]:
        """Schedules, layouts, errors and lines that an observer has not been sent: they are large, and change seldom."""
        marks = {number: replay_mark(r.replays, r.measured) for number, r in self._schedules.items()}
        schedules = [record for number, record in self._schedules.items() if observer.replays.get(number) != marks[number]]
        observer.replays = marks
        told = [record for s in self._core.sessions.values() if (record := s.roles.layouts) is not None]
        layouts: list[LayoutRecord] = [r for r in told if observer.layouts.get(r.session) != r.number]
        observer.layouts = {record.session: record.number for record in told}
        errors = self.recent.newer_errors(observer.errors)
        observer.errors = errors[-1].number if errors else observer.errors
        lines = self.recent.lines_from(observer.lines) if observer.log else None
        observer.lines = lines.number if lines is not None else observer.lines
        return [*schedules, *layouts, *errors, *([lines] if lines is not None else [])]

    def _records(self, now: float) -> list[Record]:
        """All records but those of schedules, which are noted by session."""
        core, lending = self._core, self._core.lending
        lag = core.pace.lag.counters()["loop_lag_recent"]
        sharing = "exclusive" if isinstance(lending, Exclusive) else "shared"
        interval = round(self._next - self._began, 3)
        # Answers of workers that are in no lease any more are dropped here.
        workers = {worker.name for lease in lending.leases for worker in lease.cluster.workers}
        self._answers = {name: answer for name, answer in self._answers.items() if name in workers}
        moving = now, sharing, interval, len(self.peers), core.sent, core.received, lag
        listed: list[Record] = [ServerRecord(*moving, core.terms.life)]
        for session in core.sessions.values():
            session.roles.renew(session.table, session.cluster.workers, session.number, now)
        for lease in lending.leases:
            listed += lease_records(lease, self._answers, now, PATIENCE_SECONDS + self._next - self._began)
            shown = self._shown(lease)
            record = schedule_record(shown, self._answers) if shown is not None else None
            if record is not None:
                self._schedules[record.session] = record
        listed += [idle_record(*row) for row in lending.idle()]
        listed += host_records([record for record in listed if isinstance(record, WorkerRecord)])
        listed += queue_records(core.admission.waiting)
        alive = {session.number for session in core.sessions.values()}
        self._schedules = {number: record for number, record in self._schedules.items() if number in alive}
        return listed

    def check(self) -> None:
        """Invariants between events; tests call it."""
        assert all(o.seen <= o.sent <= o.seen + MAX_UNREAD_RECORDS for o in self.peers.values())
        assert not self._under_way or self._asked or not self.peers
        assert not (self.peers.keys() & self._core.sessions.keys())


def logged(message: Metrics) -> Logged:
    """Metrics, checked; ProtocolError for a bad name or number."""
    if not 0 <= message.steps < 1 << 62 or len(message.values) > MAX_VALUES:
        text = f"Metrics has {message.steps} steps and {len(message.values)} values"
        raise ProtocolError(f"{text}, want a count, and at most {MAX_VALUES} values")
    for name, value in message.values.items():
        if not 0 < len(name) <= MAX_NAME_CHARACTERS or type(value) not in (int, float):
            raise ProtocolError(f"Metrics.values has {name!r:.40}: {value!r:.40}, want a name and a number")
    return Logged(message.steps, {plain(name): float(value) for name, value in message.values.items()})
