"""A trace of a program as a Chrome trace: every process's slices on one clock, with lines, arrows of transfers and counters.

Workers sent numbers and times, the dispatcher numbers and lines: both are joined here. Neither is trusted. The part of a
slice before the trace began is cut off, as Perfetto drops events of negative times.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gt.client.reports.spans import Span
from gt.ir.instr import PROGRAMS, RECEIVES
from gt.logs import private_file
from gt.wire.messages import TraceRows

CLIENT, DISPATCHER, SCHEDULE, WORKERS = 1, 2, 3, 10  # processes of the trace: workers from 10 on
PIDS_PER_SESSION = 1000
HOST = 0  # thread of a worker; streams of its GPU follow
MAX_NUMBER = 1e15  # of an event: others are no times, and no JSON
SECTION = 4  # numbers of an event, and of a sample


class Place(NamedTuple):
    """A line of the program with its group and micro-batch, -1 for none."""

    file: str
    line: int
    group: str
    backward: bool
    micro: int


class Line(NamedTuple):
    """The line of the program that an instruction belongs to, and its op as the program knows it."""

    op: str
    place: Place
    layout: str

    def args(self) -> dict[str, Any]:
        place = self.place
        where = {"line": f"{place.file}:{place.line}"} if place.file else {}
        more = {"group": place.group, "layout": self.layout, "op": self.op}
        micro = {"micro-batch": place.micro} if place.micro >= 0 else {}
        return {**where, **{k: v for k, v in more.items() if v}, **micro, **({"backward": True} if place.backward else {})}


class Slice(NamedTuple):
    number: int
    seq: int
    start: float  # seconds of the client's clock
    end: float


@dataclass(slots=True)
class WorkerTrace:
    """Everything that one worker recorded. names: by definition, kind, op, bytes and peers."""

    name: str
    host: list[Slice] = field(default_factory=list)
    device: dict[str, list[Slice]] = field(default_factory=dict)  # by stream
    samples: list[tuple[float, int, int, int]] = field(default_factory=list)
    names: dict[int, tuple[str, str, int, list[int]]] = field(default_factory=dict)


@dataclass(slots=True)
class SessionRecording:
    """A session's trace. answer: of Session.end_trace; rows: its messages; spans: the client's own; begin, end: its clock.

    thread, ident: name and number of the thread that ended the trace, the program's main one.
    """

    answer: dict[str, Any]
    rows: list[TraceRows]
    spans: list[Span]
    begin: float
    end: float
    thread: str
    schedule: list[dict[str, Any]] = field(
        default_factory=list
    )  # events of the last replay's schedule, as far as there was one
    spans_dropped: int = 0
    ident: int = 0

    @property
    def dropped(self) -> int:
        """Events for which there was no room."""
        return self.spans_dropped + sum(max(row.dropped, 0) for row in self.rows)

    def workers(self) -> list[WorkerTrace]:
        """The workers, by index."""
        # Each worker's times are of its own clock, which is `ahead` of the client's by so many seconds.
        ahead = self.answer.get("ahead", [])
        workers = [WorkerTrace(name) for name in self.answer.get("workers", [])]
        for row in self.rows:
            if 0 <= row.worker < len(workers):
                worker, clock = workers[row.worker], ahead[row.worker] if row.worker < len(ahead) else 0.0
                worker.host += _slices(row.events, clock, self.begin)
                for stream, found in _by_stream(row).items():
                    worker.device.setdefault(stream, []).extend(_slices(found, clock, self.begin))
                samples = ((t - clock, int(a), int(b), int(c)) for t, a, b, c in _sections(row.counters))
                worker.samples += [sample for sample in samples if sample[0] >= self.begin]
                worker.names.update(_names(row.names))
        return workers

    def lines(self) -> dict[int, Line]:
        """By number of an op."""
        origins: dict[int, Any] = {}
        programs: dict[int, list] = {}
        lines: dict[int, Line] = {}
        for tag, *rest in (row for part in self.rows if part.worker < 0 for row in part.names):
            if tag == "origin":
                origins[rest[0]] = Place(*rest[1:])
            elif tag == "op":
                seq, op, origin, layout = rest
                lines[seq] = Line(op, origins[origin], layout)
            elif tag == "program":
                programs[rest[0]] = rest[1]
            # A replay's ops have consecutive numbers from the launch's own.
            elif tag == "launch":
                for place, (op, origin, layout) in enumerate(programs.get(rest[1], ())):
                    lines[rest[0] + place] = Line(op, origins[origin], layout)
        return lines


def write(path: str | Path, recordings: list[SessionRecording]) -> int:
    """Write a Chrome trace; the number of its slices. Times in the file are microseconds since the trace began."""
    count, first = 0, True
    # Written event by event: a trace may be larger than memory has room for twice.
    with os.fdopen(private_file(path), "w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit": "ms", "otherData": ')
        out.write(json.dumps({"dropped": sum(r.dropped for r in recordings), "clock": [_clock(r) for r in recordings]}))
        out.write(', "traceEvents": [\n')
        for event in (event for n, recording in enumerate(recordings) for event in events(recording, n, recordings[0].begin)):
            out.write(("" if first else ",\n") + json.dumps(event))
            first = False
            count += event["ph"] == "X"
        out.write("\n]}\n")
    return count


def _clock(recording: SessionRecording) -> dict[str, Any]:
    """Seconds by which clocks of other hosts were ahead, and the round trip that bounds the error."""
    return {key: recording.answer.get(key) for key in ("dispatcher", "ahead", "trip")}


def events(recording: SessionRecording, number: int = 0, since: float | None = None) -> Iterator[dict[str, Any]]:
    """The events of one session's trace. number: of the session among those of the file; since: seconds of time 0."""
    # Processes of the trace, by pid: the program, the dispatcher, the schedule, then workers. Each session has its own range.
    base, since = number * PIDS_PER_SESSION, recording.begin if since is None else since
    yield from _client(recording, base + CLIENT, since)
    yield from _dispatcher(recording, base + DISPATCHER, since)
    for event in recording.schedule:
        yield {**event, "pid": base + event["pid"]}
    workers, lines = recording.workers(), recording.lines()
    for index, worker in enumerate(workers):
        yield from _worker(worker, base + WORKERS + index, since, lines, workers)
    yield from _arrows(workers, base, since)


def _client(recording: SessionRecording, pid: int, since: float) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", pid, 0, name="program")
    yield _meta("process_sort_index", pid, 0, sort_index=pid)
    main = (recording.thread, recording.ident)
    threads: dict[tuple[str, int], list[Span]] = {main: []}  # threads of one name are apart: their slices do not nest
    for span in recording.spans:
        if span.end < recording.begin:
            continue
        threads.setdefault((span.thread, span.ident), []).append(span)
    for tid, (thread, rows) in enumerate(threads.items()):
        yield _meta("thread_name", pid, tid, name=thread[0])
        # An outer slice before the slices within it, as nesting needs.
        rows.sort(key=lambda s: (s.start, -s.end))
        if thread == main:
            for start, end in _gaps(rows, recording.begin, recording.end):
                yield _slice("Python", "client", pid, tid, (start - since, end - since), {})
        for span in rows:
            start = max(span.start, recording.begin)
            yield _slice(span.name, "client", pid, tid, (start - since, span.end - since), span.args)


def _gaps(rows: list[Span], begin: float, end: float) -> Iterator[tuple[float, float]]:
    """The times of the main thread without a wait or a call: Python, and the recording of ops."""
    # Spans are sorted by start and may be nested: `covered` is the end of
    # what is covered so far. Spans without length are marks.
    covered = begin
    for span in rows:
        if span.end > span.start and span.start > covered:
            yield covered, span.start
        covered = max(covered, span.end) if span.end > span.start else covered
    if end > covered:
        yield covered, end


def _dispatcher(recording: SessionRecording, pid: int, since: float) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", pid, 0, name="dispatcher")
    yield _meta("process_sort_index", pid, 0, sort_index=pid)
    yield _meta("thread_name", pid, 0, name="messages")
    clock = recording.answer.get("dispatcher", 0.0)
    kinds: list[str] = []
    for part in recording.rows:
        if part.worker < 0:
            kinds = next((row[1] for row in part.names if row and row[0] == "event"), kinds)
            for row in _slices(part.events, clock, recording.begin):
                name = kinds[row.number] if 0 <= row.number < len(kinds) else "event"
                yield _slice(name, "dispatcher", pid, 0, (row.start - since, row.end - since), {})


def _worker(
    worker: WorkerTrace, pid: int, since: float, lines: dict[int, Line], workers: list[WorkerTrace]
) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", pid, 0, name=f"worker {worker.name}")
    yield _meta("process_sort_index", pid, 0, sort_index=pid)
    # Thread 0 has the instructions as the host executed them; each stream of its GPU has a thread with its kernels' times.
    streams = ((f"GPU stream: {stream}", rows) for stream, rows in sorted(worker.device.items()))
    for tid, (title, slices) in enumerate((("instructions", worker.host), *streams), HOST):
        yield _meta("thread_name", pid, tid, name=title)
        yield _meta("thread_sort_index", pid, tid, sort_index=tid)
        for row in slices:
            name, args = _described(worker, row, lines.get(row.seq), workers)
            yield _slice(name, args.pop("kind"), pid, tid, (row.start - since, row.end - since), args)
    for time, live, sent, received in worker.samples:
        at = {"ph": "C", "pid": pid, "tid": HOST, "ts": _micros(time - since)}
        yield {**at, "name": "memory of tensors [bytes]", "args": {"bytes": live}}
        yield {**at, "name": "moved [bytes]", "args": {"sent": sent, "received": received}}


def _described(worker: WorkerTrace, row: Slice, line: Line | None, workers: list[WorkerTrace]) -> tuple[str, dict[str, Any]]:
    """Name and args of an instruction; args["kind"] is its category."""
    kind, op, nbytes, peers = worker.names.get(row.number, ("instruction", "", 0, []))
    args: dict[str, Any] = {"seq": row.seq, **(line.args() if line is not None and kind not in PROGRAMS else {})}
    if row.number < 0:
        return f"compiled: {-row.number} instructions", {**args, "kind": "compiled"}
    args.update(kind=kind, **({"bytes": nbytes} if nbytes else {}))
    others = ", ".join(workers[n].name for n in peers if 0 <= n < len(workers))
    if kind == "op":
        return op.removesuffix(".default"), args
    if others:
        args["workers"] = others
        return f"{kind} {'to' if kind == 'send' else 'from' if kind in RECEIVES else 'of'} {others}", args
    return f"{kind} {op}".strip(), args


def _arrows(workers: list[WorkerTrace], base: int, since: float) -> Iterator[dict[str, Any]]:
    """An arrow from each send to the receive of the same op. An end without the other has none."""
    # (number of the op, sender, receiver) -> its sends and its receives, in order. Chunks of one transfer are joined in pairs.
    ends: dict[tuple[int, int, int], tuple[list[Slice], list[Slice]]] = defaultdict(lambda: ([], []))
    for index, worker in enumerate(workers):
        for row in worker.host:
            kind, _, _, peers = worker.names.get(row.number, ("", "", 0, []))
            for peer in peers if kind == "send" or kind in RECEIVES else ():
                ends[(row.seq, index, peer) if kind == "send" else (row.seq, peer, index)][kind != "send"].append(row)
    number = 0
    for (_, source, target), (sends, receives) in ends.items():
        for send, receive in zip(sends, receives):
            number += 1
            flow = {"cat": "transfer", "name": "transfer", "id": base + (number << 20)}
            # An arrow ends inside of the receive's slice, or Perfetto would bind it to another; and not before the send.
            middle = (max(receive.start, min(send.start, receive.end)) + receive.end) / 2
            yield {**flow, "ph": "s", "pid": base + WORKERS + source, "tid": HOST, "ts": _micros(send.start - since)}
            yield {**flow, "ph": "f", "bp": "e", "pid": base + WORKERS + target, "tid": HOST, "ts": _micros(middle - since)}


# ---- forms


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _slice(name: str, kind: str, pid: int, tid: int, ends: tuple[float, float], args: dict[str, Any]) -> dict[str, Any]:
    start, end = map(_micros, ends)
    at = {"ts": start, "dur": round(max(end - start, 0.0), 3)}
    return {"name": name, "cat": kind, "ph": "X", "pid": pid, "tid": tid, **at, "args": args}


def _meta(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _by_stream(row: TraceRows) -> dict[str, list[float]]:
    """Sections of a device's slices, by the name of their stream."""
    by_stream: dict[str, list[float]] = {}
    for *section, stream in _sections(row.device, SECTION + 1):
        if 0 <= stream < len(row.streams) and isinstance(name := row.streams[int(stream)], str):
            by_stream.setdefault(name, []).extend(section)
    return by_stream


def _sections(numbers: list, size: int = SECTION) -> Iterable[tuple]:
    # A flat list of rows: `size` slices with this step are its columns. Rows with numbers that are no times are dropped.
    rows = zip(*(numbers[n::size] for n in range(size)))
    return (row for row in rows if all(abs(number) < MAX_NUMBER for number in row))


def _slices(numbers: list, clock: float, begin: float) -> list[Slice]:
    """clock: seconds that it is ahead of the client's; begin: of the trace, by the client's."""
    # Compared by the worker's clock, then moved to the client's: a slice that began before the trace is cut at its begin.
    begin += clock
    return [
        Slice(int(n), int(seq), max(start, begin) - clock, end - clock)
        for n, seq, start, end in _sections(numbers)
        if end >= start and end >= begin
    ]


def _names(rows: list) -> Iterator[tuple[int, tuple[str, str, int, list[int]]]]:
    for row in rows:
        if type(row) is list and [type(part) for part in row] == [int, str, str, int, list]:
            number, kind, op, nbytes, peers = row
            yield number, (kind, op, nbytes, [peer for peer in peers if type(peer) is int])
