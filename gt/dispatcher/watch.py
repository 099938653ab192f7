"""What workers are asked while they work: the counters of a Stats request, and whether they get on.

A worker that stays at one instruction for longer than the heartbeat is alive and stuck: whoever waits for it is told where it
is, and may wait again. Nothing is lost by that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gt import errors
from gt.dispatcher.cluster import Cluster, Worker
from gt.dispatcher.intake import CREDIT
from gt.dispatcher.schedule.measure import measured
from gt.dispatcher.sessions import Session
from gt.errors import WorkerStuck
from gt.wire.messages import Failed, Query, Report

LOOKS = 8  # looks at a busy worker a heartbeat
ENOUGH = 0.75  # of a heartbeat at one place; with the time between looks it is told within one
COMPILE = "compile"  # kind of what a worker is at while it compiles a program, which may take long
LOAD, DEVICE = "load", "device"  # kinds: an op that its GPU does for the first time; what waits for its GPU
LONG = 60.0  # seconds that these may take: kernels are loaded, a GPU does what was issued long before
MEETING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv", "merge"})


@dataclass(slots=True)
class Survey:
    """A Stats request: the workers' answers so far."""

    session: Session
    number: int
    left: set[int]
    reports: dict[int, dict] = field(default_factory=dict)


@dataclass(slots=True)
class Place:
    """Where a worker was last seen and when it came there, since when it is to get on, and when it was asked. at: see Query."""

    life: int
    at: list | None
    done: int
    came: float
    since: float
    asked: float


class Watch:
    def __init__(self, cluster: Cluster, heartbeat: float) -> None:
        self.cluster, self.heartbeat = cluster, heartbeat
        self.surveys: dict[int, Survey] = {}
        self.places: dict[int, Place] = {}  # by worker, of those that have something to do

    # ---- counters

    def survey(self, session: Session, number: int, program: int) -> tuple[Survey, list[tuple[bytes, Query]]]:
        """Begin to answer a Stats request: what to ask whom."""
        told = session.programs.all.get(program)
        numbers = session.programs.newest if told is None else told.numbers
        key = self.cluster.key()
        alive = [w for w in self.cluster.workers if not w.lost]
        self.surveys[key] = Survey(session, number, {w.index for w in alive})
        return self.surveys[key], [(w.peer, Query(key, True, numbers.get(w.index, []))) for w in alive]

    def answered(self, worker: Worker, report: Report) -> Survey | None:
        """A worker's Report: the survey that it completes, if any."""
        stats, at = report.body.get("stats"), report.body.get("at")
        self._seen(worker, at if isinstance(at, list) and len(at) == 5 and isinstance(at[3], str) else None)
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

    def forget(self, session: Session) -> None:
        self.surveys = {key: survey for key, survey in self.surveys.items() if survey.session is not session}

    # ---- whether they get on

    def look(self, now: float) -> list[tuple[bytes, Query]]:
        """Whom to ask where it is: workers that have something to do."""
        asked: list[tuple[bytes, Query]] = []
        for worker in self.cluster.workers:
            place = self.places.get(worker.index)
            if worker.lost or worker.done >= worker.runs:
                self.places.pop(worker.index, None)
            elif place is None or place.life != worker.lives or place.done != worker.done:
                self.places[worker.index] = Place(worker.lives, None, worker.done, now, now, now)
            elif now - place.asked >= self.heartbeat / LOOKS:
                place.asked = now
                asked.append((worker.peer, Query(self.cluster.key(), False)))
        return asked

    def _seen(self, worker: Worker, at: list | None) -> None:
        place = self.places.get(worker.index)
        prepares = any(map(self._prepares, self.places.values()))
        if place is not None and place.at != at:
            place.came = place.since = self.cluster.now if place.at is not None else place.since
            place.at = at
        prepares = prepares or (place is not None and self._prepares(place))
        for one in self.places.values():  # who prepares is to get on, and so do those who may wait for it
            kind, soon = _kind(one), self.cluster.now - one.came < LONG
            if self._prepares(one) or (prepares and (kind in MEETING or kind == DEVICE)) or (kind == DEVICE and soon):
                one.since = self.cluster.now

    def _prepares(self, place: Place) -> bool:
        """Whether a worker is at what may take long."""
        kind = _kind(place)
        return kind == COMPILE or (kind == LOAD and self.cluster.now - place.came < LONG)

    def stuck(self, now: float) -> list[Place]:
        """Places where a worker has been for too long."""
        return [place for place in self.places.values() if now - place.since >= ENOUGH * self.heartbeat]

    def tell(self, sessions: Iterable[Session], now: float) -> None:
        """End what waits for a stuck worker, naming it and its op."""
        if not self.stuck(now):
            return
        for session in sessions:
            for request in list(session.requests.open.values()):
                waits = {index for index, run in request.runs.items() if self._behind(index, run)}
                if now - request.since >= ENOUGH * self.heartbeat and (error := self._error(session, waits, now)):
                    session.requests.give_up(request, error)
            pending, coming = session.batches.pending, session.batches.coming
            if pending and len(pending) + len(coming) >= CREDIT and not session.told_stuck:
                first = pending[0]
                waits = {index for index, run in first.runs.items() if self._behind(index, run)}
                if error := self._error(session, waits, now):
                    session.told_stuck = True
                    session.send(Failed(-1, errors.to_wire(error)))

    def _behind(self, index: int, run: int) -> bool:
        worker = self.cluster.workers[index]
        return not worker.lost and worker.done < run

    def _error(self, session: Session, waits: set[int], now: float) -> WorkerStuck | None:
        """Who is to blame of the workers that are waited for: one that waits for nobody, if there is one."""
        late = {i: p for i, p in self.places.items() if now - p.since >= ENOUGH * self.heartbeat}
        if not waits & set(late):
            return None
        alone = {i: p for i, p in late.items() if _kind(p) not in MEETING and _kind(p) != DEVICE}
        said = "; ".join(self._says(session, i, p, now) for i, p in sorted((alone or late).items()))
        return WorkerStuck(
            f"{said}. Nothing is lost: wait again (fetch the value once more), or start the server with a longer --heartbeat "
            f"than {self.heartbeat:g} s"
        )

    def _says(self, session: Session, index: int, place: Place, now: float) -> str:
        name, seconds = self.cluster.workers[index].name, now - place.came
        if place.at is None:
            return f"worker {name} is alive and has not said for {seconds:.1f} s what it is doing"
        row = session.journal.find(place.at[2]) if isinstance(place.at[2], int) else None
        asked = next((r for r in session.requests.open.values() if r.seq == place.at[2]), None)
        what = "an op of another program" if asked is None else f"reading {asked.name}"
        if row is not None:
            where = f"{row.origin.file}:{row.origin.line}: " if row.origin.file else ""
            group = f", group {row.origin.group}" if row.origin.group else ""
            what = f"{where}{row.known.template.op}{group}"
        kind = " (its GPU is not through)" if place.at[3] == DEVICE else f" ({place.at[3]})" if place.at[3] in MEETING else ""
        return f"worker {name} is alive and has been at {what}{kind} for {seconds:.1f} s"


def _kind(place: Place) -> str:
    return str(place.at[3]) if place.at else ""


def answer(survey: Survey, sent: int, received: int, relayed: int) -> tuple[dict[str, Any], str]:
    """The body of a Stats answer; what it says of the newest replay's schedule, "" if it was in none."""
    workers = [survey.reports[i] for i in sorted(survey.reports)]
    actions, transfers = ([_stamps(row.get(what)) for row in workers] for what in ("actions", "transfers"))
    body: dict[str, Any] = {"dispatcher": counters(survey.session, sent, received, relayed), "workers": workers}
    order, ran = survey.session.programs.order, measured(actions, transfers)
    if not order.get("rows") or not ran:
        return body, ""
    bubble = order["bubble"]
    predicted = {"bubble": bubble, "idle": round(sum(bubble) / len(bubble), 4), "makespan": order["makespan"]}
    body["schedule"] = {**{k: order[k] for k in ("name", "rows", "costs")}, "predicted": predicted, "measured": ran}
    took = f"{ran['makespan'] * 1e3:.3f} ms"
    return body, f"{order['name']}: bubble {ran['idle']:.2%} of {took} measured, {predicted['idle']:.2%} predicted"


def _stamps(rows: Any) -> list:
    """A worker's actions or transfers, if they are such: what a worker says is not trusted."""
    fit = isinstance(rows, list) and all(
        isinstance(one, (list, tuple)) and [type(part) for part in one] == [str, float, float] for one in rows
    )
    return rows if isinstance(rows, list) and fit else []


def counters(session: Session, sent: int, received: int, relayed: int) -> dict[str, Any]:
    """The dispatcher's part of a client's Stats."""
    return {
        "ops_planned": session.ops,
        "instructions_sent": session.emitter.sent,
        "messages_sent": sent,
        "messages_received": received,
        "plan_cache_hits": session.planner.hits,
        "programs": len(session.programs.all),
        "replays": session.programs.launches,
        "runs_sent": sum(worker.runs for worker in session.cluster.workers),
        "tensor_bytes_uploaded": session.uploaded,
        "tensor_bytes_fetched": session.requests.fetched,
        "tensor_bytes_relayed": relayed,
        **session.pace.lag.counters(),
    }
