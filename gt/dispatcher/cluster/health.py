"""Questions to workers while they work: the counters of a Stats request, and their progress.

A worker gets on while it comes to other instructions, uses CPU time where that means work, or its device comes further. How
its process stands is the kernel's to say, where it can be seen. Who is told of all this, and when, is stragglers.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from gt.dispatcher.cluster.peer_info import MAX_TEXT_CHARACTERS
from gt.dispatcher.cluster.workers import Cluster, Worker
from gt.dispatcher.events import Examine, Examined
from gt.dispatcher.planning.sharded_memory import sharded_memory
from gt.dispatcher.schedule.measure import measured
from gt.dispatcher.session import ClientSession
from gt.ir.instr import COMMUNICATION
from gt.wire.liveness import POLLS_PER_HEARTBEAT, STOPPED, describe
from gt.wire.messages import Query, Report, Stats

COMPILE = "compile"  # kind of what a worker is at while it compiles a program
LOAD, DEVICE = "load", "device"  # kinds: an op that its GPU does for the first time; what waits for its GPU
LONG_SECONDS = 60.0  # seconds that these may take without a sign: kernels are loaded, a GPU does what was issued long before
WORK_SECONDS = 0.05  # seconds of CPU time that are a sign of work
JUMP_SECONDS = 2.0  # seconds between two ticks after which the dispatcher itself was asleep, or had no turn


@dataclass(slots=True)
class Survey:
    """A Stats request: the workers' answers so far."""

    session: ClientSession
    number: int
    left: set[int]
    since: float
    reports: dict[int, dict] = field(default_factory=dict)


@dataclass(slots=True)
class WorkerPosition:
    """A busy worker's last known place. came: when it came there; since: when it last got on; asked, heard: when it was asked
    last, and answered. work: CPU seconds that it told when it last got on, by itself and by the kernel. at: see Query.
    """

    life: int
    done: int
    came: float
    since: float
    asked: float
    heard: float
    at: list | None = None
    work: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @property
    def kind(self) -> str:
        return str(self.at[3]) if self.at else ""

    @property
    def waits(self) -> bool:
        """True if it may be waiting for another worker."""
        return self.kind in COMMUNICATION or self.kind == DEVICE


@dataclass(slots=True)
class Halt:
    """A worker's process that is stopped. since, seen: when that was first seen, and has been ever since, and when last."""

    life: int
    since: float
    how: str
    seen: float


@dataclass(slots=True)
class Look:
    """A question to another worker of its host about a worker that is silent. tries: how often it was asked.

    witness: index and life of the worker that is asked, whose answer alone counts.
    """

    life: int
    key: int = -1
    tries: int = 0
    witness: tuple[int, int] = (-1, -1)


class Watch:
    """home: of the dispatcher's own process, see wire.liveness."""

    def __init__(self, cluster: Cluster, heartbeat: float, home: str = "") -> None:
        self.cluster, self.heartbeat, self.home = cluster, heartbeat, home
        self.surveys: dict[int, Survey] = {}
        self.places: dict[int, WorkerPosition] = {}  # by worker, of those that have something to do
        self.halts: dict[int, Halt] = {}  # by worker, of those whose process is stopped
        self.looks: dict[int, Look] = {}  # by worker, of silent ones that the dispatcher cannot see
        self.awake = 0.0  # since when the dispatcher has had its turns: nobody is to blame for what was before
        self._ticked = self._examined = 0.0

    # ---- counters

    def survey(self, session: ClientSession, asked: Stats) -> tuple[Survey, list[tuple[bytes, Query]]]:
        """Begin to answer a Stats request: a survey, and a question for each worker that is not lost."""
        told = session.programs.all.get(asked.program)
        numbers = session.programs.newest if told is None else told.numbers
        key = self.cluster.key()
        alive = [w for w in self.cluster.workers if not w.lost]
        self.surveys[key] = Survey(session, asked.request, {w.index for w in alive}, self.cluster.now)
        holders = session.number if asked.holders else -1
        return self.surveys[key], [(w.peer, Query(key, True, numbers.get(w.index, []), holders)) for w in alive]

    def answered(self, worker: Worker, report: Report) -> Survey | None:
        """A worker's Report: the survey that it completes, if any."""
        stats, at = report.body.get("stats"), report.body.get("at")
        fit = isinstance(at, list) and len(at) == 5 and isinstance(at[3], str)
        self._looked(worker, report)
        self._seen(worker, at if fit else None, report.body.get("work"))
        survey = self.surveys.get(report.request)
        if survey is None or worker.index not in survey.left:
            return None
        if isinstance(stats, dict):
            survey.reports[worker.index] = {"name": worker.name, **stats}
        survey.left.discard(worker.index)
        return self._complete(report.request)

    def _complete(self, key: int) -> Survey | None:
        return None if self.surveys[key].left else self.surveys.pop(key)

    def without(self, index: int) -> list[Survey]:
        """A worker is lost, or -1 for none: the surveys that are complete without it."""
        for open_ in self.surveys.values():
            open_.left.discard(index)
        return [survey for key in list(self.surveys) if (survey := self._complete(key)) is not None]

    def forget(self, session: ClientSession) -> None:
        self.surveys = {key: survey for key, survey in self.surveys.items() if survey.session is not session}

    # ---- whether they get on

    def poll(self, now: float) -> tuple[list[tuple[bytes, Query]], list[Examine]]:
        """Queries to busy workers about their progress, and the processes to examine."""
        # The dispatcher itself had no turn, as on a suspended machine: all clocks of blame begin again.
        if now - self._ticked > JUMP_SECONDS:
            self.awake = now
        self._ticked = now
        queries: list[tuple[bytes, Query]] = []
        for worker in self.cluster.workers:
            # Only busy workers have a place. It begins anew when the worker has finished another Run, or is another process.
            place = self.places.get(worker.index)
            if worker.lost or worker.done >= worker.runs:
                self.places.pop(worker.index, None)
                if self.unseen(worker):
                    self.halts.pop(worker.index, None)
            elif place is None or place.life != worker.lives or place.done != worker.done:
                soon = now - self.heartbeat / POLLS_PER_HEARTBEAT  # it is asked for the first time at the next tick
                self.places[worker.index] = WorkerPosition(worker.lives, worker.done, now, now, soon, now)
            elif now - place.asked >= self.heartbeat / POLLS_PER_HEARTBEAT:
                place.asked = now
                queries.append((worker.peer, Query(self.cluster.key(), False)))
                queries += self._look(worker)
        return queries, self._examine(now)

    def _examine(self, now: float) -> list[Examine]:
        # A restarted worker has another process: what was seen of the old one does not count.
        self.halts = {i: halt for i, halt in self.halts.items() if self._living(i, halt.life)}
        if not self.home or now - self._examined < self.heartbeat / POLLS_PER_HEARTBEAT:
            return []
        self._examined = now
        return [
            Examine(w.peer, w.info["pid"], self.home)
            for w in self.cluster.workers
            if not w.lost and w.info.get("home") == self.home and w.info.get("pid")
        ]

    # A worker of another host is seen by the other workers there, which share its pid namespace. Their word counts for one that
    # answers nothing itself: so none can have a healthy one called stopped.
    def silent(self, index: int) -> bool:
        """True for a busy worker that has left questions unanswered."""
        place = self.places.get(index)
        return place is not None and self.cluster.now - max(place.heard, self.awake) > self._patience

    @property
    def _patience(self) -> float:
        return 2 * self.heartbeat / POLLS_PER_HEARTBEAT

    def witnesses(self, worker: Worker) -> list[Worker]:
        """Workers that can look at a worker's process."""
        home = worker.info.get("home")
        others = [w for w in self.cluster.workers if w is not worker and not w.lost and w.info.get("home") == home]
        return [other for other in others if home and not self.silent(other.index)]

    def unseen(self, worker: Worker) -> bool:
        """True if the dispatcher's own kernel shows nothing of a worker's process."""
        return not self.home or worker.info.get("home") != self.home

    def _look(self, worker: Worker) -> list[tuple[bytes, Query]]:
        """A question about a silent worker, to each of its witnesses in turn."""
        index, pid = worker.index, worker.info.get("pid", 0)
        witnesses = self.witnesses(worker) if pid and self.unseen(worker) and self.silent(index) else []
        if not witnesses:
            self.looks.pop(index, None)
            if self.unseen(worker):  # an old sighting proves nothing, once nobody looks any more
                self.halts.pop(index, None)
            return []
        look = self.looks.get(index)
        if look is None or look.life != worker.lives:
            look = self.looks[index] = Look(worker.lives)
        look.key, look.tries = self.cluster.key(), look.tries + 1
        witness = witnesses[look.tries % len(witnesses)]
        look.witness = witness.index, witness.lives
        return [(witness.peer, Query(look.key, False, process=pid))]

    def _looked(self, witness: Worker, report: Report) -> None:
        """Another worker's word on a silent one, if it was asked."""
        asked = witness.index, witness.lives
        found = (i for i, look in self.looks.items() if look.key == report.request and look.witness == asked)
        index = next(found, None)
        sight = report.body.get("sight")
        if index is None or not isinstance(sight, list) or [type(part) for part in sight] != [str, float]:
            return
        state, seconds = sight
        if self._living(index, self.looks[index].life) and self.silent(index) and len(state) <= 1 and isfinite(seconds):
            worker = self.cluster.workers[index]
            self.examined(worker, Examined(worker.peer, state, seconds, self.cluster.now))

    def _living(self, index: int, life: int) -> bool:
        worker = self.cluster.workers[index]
        return not worker.lost and worker.lives == life

    def examined(self, worker: Worker, event: Examined) -> None:
        """Take the kernel's word on a worker's process. A silent process that uses CPU time makes progress."""
        index, place = worker.index, self.places.get(worker.index)
        # `since` stays that of the first sighting; only `seen` moves.
        if event.state == "" or event.state not in STOPPED:
            self.halts.pop(index, None)
        else:
            first = Halt(worker.lives, event.at, describe(worker.info["pid"], event.state), event.at)
            self.halts.setdefault(index, first).seen = event.at

        # Its loop does not answer (a long op holds the interpreter), so its CPU time speaks for it. In a collective it may
        # spin, which uses CPU time and is no progress.
        if place is not None and not place.waits and event.at - place.heard > self._patience:
            self._worked(place, 1, event.seconds)

    def halted(self, share: float) -> dict[int, Halt]:
        """Workers whose process has been stopped for this share of a heartbeat, as seen by one that was awake."""
        now, found = self.cluster.now, dict[int, Halt]()
        for index, halt in self.halts.items():
            fresh = not self.unseen(self.cluster.workers[index]) or now - halt.seen <= 2 * self._patience
            if fresh and now - max(halt.since, self.awake) >= share * self.heartbeat:
                found[index] = halt
        return found

    def quiet(self, place: WorkerPosition) -> float:
        """Seconds in which a worker has not got on."""
        return self.cluster.now - max(place.since, self.awake)

    def _seen(self, worker: Worker, at: list | None, work: Any) -> None:
        place, now = self.places.get(worker.index), self.cluster.now
        if self.unseen(worker):  # what it says itself is newer than what another has seen
            self.halts.pop(worker.index, None)
        if place is not None:
            place.heard = now
            # The first answer only tells where it has been all the time.
            if place.at != at:
                place.came, place.since = (now, now) if place.at is not None else (place.came, place.since)
                place.at = at
            if type(work) is float:
                self._worked(place, 0, work)
            # Kernels that load, and a GPU with a long queue, give no sign: they have LONG_SECONDS without one.
            if place.kind in (LOAD, DEVICE) and now - place.came < LONG_SECONDS:
                place.since = now

    def _worked(self, place: WorkerPosition, source: int, seconds: float) -> None:
        """CPU time, as one source counts it: some is used for nothing but to answer."""
        if not 0 <= seconds - place.work[source] < WORK_SECONDS:
            place.work[source] = seconds
            place.since = self.cluster.now


def answer(survey: Survey, sent: int, received: int, relayed: int) -> tuple[dict[str, Any], str]:
    """The body of a Stats answer, and its text on the newest replay's schedule, "" without one."""
    workers = [survey.reports[i] for i in sorted(survey.reports)]
    body: dict[str, Any] = {"dispatcher": counters(survey.session, sent, received, relayed), "workers": workers}
    planner = survey.session.planner
    if planner.sharded.stage or planner.offload.active:
        body["sharding"] = sharded_memory(planner.sharded.stage, survey.session.context.table.rows.values())
    if planner.offload.active:
        body["offload"] = str(planner.offload.choice)
    order = schedule_report(survey.session, workers)
    if order is None:
        return body, ""
    body["schedule"], ran, predicted = order, order["measured"], order["predicted"]
    took = f"{ran['makespan'] * 1e3:.3f} ms"
    return body, f"{order['name']}: bubble {ran['idle']:.2%} of {took} measured, {predicted['idle']:.2%} predicted"


def schedule_report(session: ClientSession, workers: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Stats of the session's newest replay in a schedule, None if it was in none. workers: their stats."""
    actions, transfers = ([stamps(row.get(name)) for row in workers] for name in ("actions", "transfers"))
    order, ran = session.programs.order, measured(actions, transfers)
    if not order.get("rows") or not ran:
        return None
    bubble = order["bubble"]
    predicted = {"bubble": bubble, "idle": round(sum(bubble) / len(bubble), 4), "makespan": order["makespan"]}
    return {**{k: order[k] for k in ("name", "rows", "costs")}, "predicted": predicted, "measured": ran}


def stamps(rows: Any) -> list:
    """A worker's actions or transfers, checked: a worker's word is not trusted."""
    return rows if isinstance(rows, list) and all(map(_is_stamp, rows)) else []


def _is_stamp(row: Any) -> bool:
    """True for [name, start, end], times being finite."""
    if not isinstance(row, (list, tuple)) or [type(part) for part in row] != [str, float, float]:
        return False
    return len(row[0]) <= MAX_TEXT_CHARACTERS and isfinite(row[1]) and isfinite(row[2])


def counters(session: ClientSession, sent: int, received: int, relayed: int) -> dict[str, Any]:
    """The dispatcher's part of a client's Stats."""
    return {
        "ops_planned": session.op_stream.ops,
        "instructions_sent": session.emitter.sent,
        "messages_sent": sent,
        "messages_received": received,
        "plan_cache_hits": session.planner.hits,
        "programs": len(session.programs.all),
        "replays": session.programs.launches,
        "runs_sent": sum(worker.runs for worker in session.cluster.workers),
        "tensor_bytes_uploaded": session.context.uploaded,
        "tensor_bytes_fetched": session.fetches.fetched,
        "tensor_bytes_shared": session.arenas.bytes_shared,
        "tensor_bytes_relayed": relayed,
        **session.pace.lag.counters(),
    }
