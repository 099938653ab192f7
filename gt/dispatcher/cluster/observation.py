"""Records of the server's state at one moment, from workers' answers and what the dispatcher knows itself. Pure.

A worker's answers are not trusted: a counter of another type counts as 0. Texts of peers are cut, because 64
observers are sent them and each may leave some Records unread. They are put on one line, because terminals show them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from gt.dispatcher.cluster.health import schedule_report, stamps
from gt.dispatcher.cluster.leases import Lease, Waiting
from gt.dispatcher.cluster.peer_info import MAX_TEXT_CHARACTERS
from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.session import ClientSession
from gt.logs import plain
from gt.wire.records import HostRecord, LinkRecord, QueueRecord, Record, ScheduleRecord, SessionRecord, WorkerRecord

MAX_NAMES = 1024  # entries of a map that a worker tells
MAX_GROUPS = 64  # names of a config's groups
MAX_ACTIONS = 4096  # actions of one worker's last replay: a record has to fit a body
MAX_SCHEDULE_ACTIONS = 32768  # actions of all workers together
MAX_ROWS_CHARACTERS = 1 << 18  # characters of a schedule as text


@dataclass(slots=True)
class WorkerAnswer:
    """The newest answer of one worker's process. at: seconds since the server's start."""

    life: int
    at: float
    stats: dict[str, Any] = field(default_factory=dict)
    position: list = field(default_factory=list)  # Report.body["at"], [] for none


Answers = dict[str, WorkerAnswer]  # by worker's name


def lease_records(lease: Lease, answers: Answers, now: float, silent: float) -> Iterator[Record]:
    """Records of a lease's workers, sessions and links. silent: seconds after which a worker that has not answered is so."""
    current: dict[int, list] = {}  # by session
    for worker in lease.cluster.workers:
        # An answer of the process before does not speak for its successor.
        answer = answers.get(worker.name)
        if answer is not None and answer.life != worker.lives:
            answer = None
        where = _current(lease, answer.position) if answer is not None and worker.done < worker.runs else []
        if where:
            current.setdefault(where[0], where)
        yield _worker(lease, worker, answer, where, (now, silent))
        sent = _counts(answer.stats.get("bytes_sent")) if answer is not None else {}
        yield from (LinkRecord(worker.name, peer, nbytes) for peer, nbytes in sent.items())
    for session in lease.sessions.values():
        yield _session(session, current.get(session.number, []), now)


def idle_record(name: str, info: dict, restarting: bool) -> WorkerRecord:
    """A worker of an exclusive server that no session has."""
    state = "restarting" if restarting else "free"
    return WorkerRecord(name, *_about(info), "", state, "", [], -1, 0.0, 0, 0.0, 0.0, 0, 0, {}, 0, [])


def host_records(workers: list[WorkerRecord]) -> Iterator[HostRecord]:
    hosts: dict[str, list[str]] = {}
    for worker in workers:
        if worker.state != "lost":
            hosts.setdefault(worker.host, []).append(worker.name)
    return (HostRecord(name, names) for name, names in hosts.items())


def queue_records(waiting: list[Waiting]) -> Iterator[QueueRecord]:
    for place, client in enumerate(waiting, 1):
        about = client.about
        yield QueueRecord(place, about["user"], about["program"], client.wanted)


def schedule_record(session: ClientSession, answers: Answers) -> ScheduleRecord | None:
    """The last replay in a schedule, from answers about this session's programs; None if there was none."""
    names = [worker.name for worker in session.cluster.workers if not worker.lost and worker.name in answers]
    # Actions first, then text: what does not fit a body is left out, and the record says the rest.
    report = schedule_report(session, [answers[name].stats for name in names])
    if report is None:
        return None
    actions = {name: stamps(answers[name].stats.get("actions"))[:MAX_ACTIONS] for name in names}
    if sum(map(len, actions.values())) > MAX_SCHEDULE_ACTIONS:
        actions = {}
    replays = session.programs.launches
    text = report["rows"] if len(report["rows"]) <= MAX_ROWS_CHARACTERS else ""
    told = report["name"], report["predicted"], report["measured"], actions, text, report["costs"]
    return ScheduleRecord(session.number, replays, *told)


def _worker(lease: Lease, worker: Worker, answer: WorkerAnswer | None, where: list, clock: tuple[float, float]) -> WorkerRecord:
    now, silent = clock
    stats, info = answer.stats if answer is not None else {}, worker.info
    age = now - answer.at if answer is not None else -1.0
    busy = worker.done < worker.runs
    # Silent is a worker whose newest answer is old, whatever it has to do.
    state = "lost" if worker.lost else "silent" if age > silent else "busy" if busy else "idle"
    memory: dict[str, Any] = {"arena": 0 if worker.lost else info.get("heap_bytes", 0)}
    # A lost worker's tensors are gone; its counters are the last known.
    if worker.lost:
        stats = {**stats, "live_tensors": 0, "live_bytes": 0}
    elif answer is not None:
        live = memory["sessions"] = _counts(stats.get("session_bytes"))
        memory["uses"] = _uses(lease, worker.name, live, sum(_counts(stats.get("offloaded")).values()))
        memory["process" if info.get("device") == "cpu" else "peak"] = _count(
            stats, "memory_used" if info.get("device") == "cpu" else "peak_bytes"
        )
    return WorkerRecord(
        worker.name,
        *_about(info),
        _text(stats.get("transport")),
        state,
        _text(worker.lost),
        [s.number for s in lease.sessions.values() if worker.index in s.emitter.used],
        round(age, 3),
        _seconds(stats, "clock"),
        _count(stats, "instructions"),
        _seconds(stats, "busy_seconds"),
        _seconds(stats, "cpu_seconds"),
        _count(stats, "live_tensors"),
        _count(stats, "live_bytes"),
        memory,
        _count(stats, "memory_limit"),
        where,
    )


def _uses(lease: Lease, worker: str, live: dict[str, int], away: int) -> dict[str, dict[str, int]]:
    """Bytes of each session's tensors by use, as far as its client has told roles. away: offloaded bytes."""
    told = {str(s.number): s.roles.uses(worker, live.get(str(s.number), 0), away) for s in lease.sessions.values()}
    return {number: uses for number, uses in told.items() if uses is not None}


def _session(session: ClientSession, current: list, now: float) -> SessionRecord:
    about, cluster = session.about, session.cluster
    return SessionRecord(
        session.number,
        about["user"],
        about["program"],
        about["host"],
        about["pid"],
        [w.name for w in cluster.workers],
        [_text(name) for name in islice(session.config.groups, MAX_GROUPS)],
        round(now - session.began, 3),
        session.op_stream.ops,
        session.emitter.sent,
        session.programs.launches,
        session.logged.steps,
        session.logged.values,
        current,
        _waits(session),
        len(session.op_stream.pending),
        session.context.uploaded,
        session.fetches.fetched,
    )


def _waits(session: ClientSession) -> str:
    if session.op_stream.in_thread:
        return "planning"
    if session.outbox.held:
        return "an upload"
    if session.cluster.queue.waits(session.number):
        return "its turn"
    return "workers" if session.op_stream.pending else ""


def _current(lease: Lease, position: list) -> list:
    """[session, op, file, line, group, kind] of a worker's position, [] if its op is no longer known."""
    # Report.body["at"] has five parts, of which the third is the op's number and the fourth the instruction's kind.
    seq, kind = position[2:4] if len(position) == 5 else (None, "")
    if type(seq) is not int or type(kind) is not str:
        return []
    for session in lease.sessions.values():
        # Rows are in order of op numbers. A replay covers many numbers, so the row may begin before `seq`.
        rows = session.journal.rows
        place = bisect_right(rows, seq, key=lambda row: row.seq) - 1
        if place >= 0 and rows[place].seq <= seq < rows[place].end:
            op = rows[place].at(seq)
            origin = op.origin
            file = plain(origin.file[-MAX_TEXT_CHARACTERS:])
            return [session.number, op.known.template.op, file, origin.line, _text(origin.group), plain(kind[:40])]
    return []


def _about(info: dict) -> tuple[str, int, str, str]:
    """Host, pid, backend and device of a worker's Hello.info."""
    return _text(info.get("host")), int(info.get("pid", 0)), _text(info.get("backend")), _text(info.get("device"))


def _text(value: Any) -> str:
    """A text of a peer on one line, "" for a value that is no text."""
    return plain(value[:MAX_TEXT_CHARACTERS]) if isinstance(value, str) else ""


def _count(stats: dict[str, Any], name: str) -> int:
    value = stats.get(name)
    return value if type(value) is int and 0 <= value < 1 << 62 else 0


def _seconds(stats: dict[str, Any], name: str) -> float:
    value = stats.get(name)
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e12 else 0.0


def _counts(value: Any) -> dict[str, int]:
    """A map from names to counts, as far as it is one."""
    if not isinstance(value, dict):
        return {}
    rows = list(value.items())[:MAX_NAMES]
    return {plain(name[:64]): n for name, n in rows if type(name) is str and type(n) is int and 0 <= n < 1 << 62}
