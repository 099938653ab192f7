"""Records that observers receive, every one once: a row of messages.Records is `[code, *fields]`.

Counters count from the start of their process or session; rates are differences of two records. A number that nobody knows is
absent: -1 where a field needs a number, "" for a text, no entry in a map.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gt.wire.codec import RowTypes

# Uses of a session's memory: roles that its client tells, and the rest of its live tensors
WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS = USES = ("weights", "gradients", "optimizer", "activations")


@dataclass(frozen=True, slots=True)
class Record:
    """Base class."""


@dataclass(frozen=True, slots=True)
class ServerRecord(Record):
    """The dispatcher. at: seconds since its start; sharing: "shared" or "exclusive"; interval: seconds between two Records.

    life: a random name of this run of the server; where it differs, another server is there. loop_lag: seconds that few of
    the last turns of its loop are longer than. Messages: of all peers.
    """

    at: float
    sharing: str
    interval: float
    observers: int
    messages_sent: int
    messages_received: int
    loop_lag: float
    life: str


@dataclass(frozen=True, slots=True)
class WorkerRecord(Record):
    """A worker. state: "idle", "busy", "silent" (it has not answered in time), "free" (of no session), "restarting" or "lost".

    age: seconds since it told its counters, -1 for never; then the counters are 0. clock: the moment of the counters, in
    seconds of its process's own clock, for rates. busy_seconds: its thread executed Runs, and waited within them; cpu_seconds:
    CPU time of its process. memory: bytes by use; {"sessions": {number: bytes of live tensors}, "uses": {number: bytes by
    USES}, "arena": for exchange with other workers, "peak": of a GPU, "process": that a CPU worker has taken}. "uses" lacks
    sessions that have not told the roles of their tensors. limit: bytes, 0 for none. current: [session, op, file, line, group,
    kind] of the instruction under way, [] for none.
    """

    name: str
    host: str
    pid: int
    backend: str
    device: str
    transport: str
    state: str
    reason: str
    sessions: list
    age: float
    clock: float
    instructions: int
    busy_seconds: float
    cpu_seconds: float
    live_tensors: int
    live_bytes: int
    memory: dict
    limit: int
    current: list


@dataclass(frozen=True, slots=True)
class SessionRecord(Record):
    """A client's session. seconds: since it began. ops: planned; replays: of captured steps; steps: calls of gt.log.

    values: what gt.log was told last. current: as of a worker, of the first worker that is busy with it. waits: why it does not
    go on, "" if it does. pending: batches that are not executed. uploaded, fetched: bytes of tensors.
    """

    number: int
    user: str
    program: str
    host: str
    pid: int
    workers: list
    groups: list
    seconds: float
    ops: int
    instructions: int
    replays: int
    steps: int
    values: dict
    current: list
    waits: str
    pending: int
    uploaded: int
    fetched: int


@dataclass(frozen=True, slots=True)
class ScheduleRecord(Record):
    """The last replay of a session in a schedule. replays: of the session. A look within a replay has a part of its actions:
    see `replay_mark`.

    predicted, measured, rows, costs: as of gt.stats()["schedule"]; rows is "" where they are too long. actions: by worker
    [action, start, end] in seconds of the machine's monotonic clock.
    """

    session: int
    replays: int
    name: str
    predicted: dict
    measured: dict
    actions: dict
    rows: str
    costs: dict


@dataclass(frozen=True, slots=True)
class LayoutRecord(Record):
    """Layouts of a session's parameters. number: from 1, another one for other layouts.

    tensors: [name, place in splits]: many are split in one way. splits: [spec, layout, mesh, bytes, {worker: boxes of its
    piece}]. more: parameters that are left out.
    """

    session: int
    number: int
    tensors: list
    splits: list
    more: int


@dataclass(frozen=True, slots=True)
class ErrorRecord(Record):
    """A failed op, a lost worker or a refused peer. number: from 1. at: seconds since the server's start.

    session: -1 for none. Of an op: its name, line and group.
    """

    number: int
    at: float
    session: int
    peer: str
    op: str
    file: str
    line: int
    group: str
    text: str


@dataclass(frozen=True, slots=True)
class LogRecord(Record):
    """Lines of the instruction log, for an observer that asks for them. number: of the line after the last of `lines`.

    missed: lines before the first that were too many to send.
    """

    number: int
    missed: int
    lines: list


@dataclass(frozen=True, slots=True)
class QueueRecord(Record):
    """A client that waits for workers. place: from 1; wanted: number of workers, 0 for all."""

    place: int
    user: str
    program: str
    wanted: int


@dataclass(frozen=True, slots=True)
class HostRecord(Record):
    """A machine with workers that are not lost. workers: their names."""

    name: str
    workers: list


@dataclass(frozen=True, slots=True)
class LinkRecord(Record):
    """Tensor bytes that a worker has sent directly to another, since it started."""

    source: str
    target: str
    bytes: int


# A record's code is its place here, so a new one goes to the end.
RECORDS: tuple[type[Record], ...] = (
    ServerRecord, WorkerRecord, SessionRecord, ScheduleRecord, QueueRecord, HostRecord, LinkRecord, LayoutRecord, ErrorRecord,
    LogRecord,
)  # fmt: skip
_ROWS: RowTypes[Record] = RowTypes(
    "record", RECORDS, {"int": (int,), "float": (float, int), "str": (str,), "list": (list,), "dict": (dict,)}
)
# Codes of records that are sent once: the others are sent anew each time
ONCE = frozenset(map(RECORDS.index, (ScheduleRecord, LayoutRecord, ErrorRecord, LogRecord)))


def replay_mark(replays: int, measured: dict[str, Any]) -> tuple:
    """Differs between two replays, and between parts of one: some workers may answer before its end."""
    return replays, measured.get("makespan"), measured.get("idle"), *(measured.get("bubble") or ())


def as_dict(record: Record) -> dict[str, Any]:
    """The fields of a record by name. Their values are not copied."""
    code, *values = _ROWS.row(record)
    return dict(zip(_ROWS.names[code], values, strict=True))


def rows(records: Iterable[Record]) -> list[list]:
    """The wire form of records."""
    return [[*_ROWS.row(record)] for record in records]


def records(wire: Sequence[Any]) -> list[Record]:
    """The records of a wire form. ProtocolError names the field that does not fit."""
    return list(map(_ROWS.parse, wire))
