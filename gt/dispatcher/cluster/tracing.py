"""Traces of sessions: who records, which op has which number, and the dispatcher's own time.

A worker knows the numbers and times of instructions; only here their lines, groups and layouts are known. The client joins both
by number. The memory of a trace is bounded: of each kind of record the newest are kept. A trace ends without the rows of a
worker that is lost or answers nothing, and names it. Knows the clock of Pace only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from gt.dispatcher.cluster.leases import Lease
from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.events import Event, Peer, Received
from gt.dispatcher.fairness.time_slices import Pace
from gt.dispatcher.session import ClientSession
from gt.dispatcher.state.failures import Launched, Planned, Sealed, layout_of
from gt.dispatcher.state.records import Origin
from gt.errors import ProtocolError, to_wire
from gt.ir.layout import Layout
from gt.wire.messages import Failed, Message, Report, Trace, TraceRows

MAX_OPS, MAX_EVENTS = 1 << 16, 1 << 15  # of one trace
MAX_LAUNCHED_OPS = 1 << 15  # ops of all programs that a trace names
MAX_PARTS = 64  # TraceRows of one worker
ROWS_PER_PART = 1 << 13
MAX_SECONDS = 1e12  # largest reading of a clock that is believed
PINGS = 4  # questions for the clock of a worker on another host
ALL = -1  # number of the dispatcher in TraceRows.worker


class TracedOp(NamedTuple):
    """An op, or a program's replay with the journal of its ops."""

    seq: int
    op: str
    origin: Origin
    layout: Layout | None
    ops: Sequence[Planned] = ()


class TraceHost(Protocol):
    """The core, as far as traces need it."""

    sessions: dict[Peer, ClientSession]
    pace: Pace
    now: float
    process: list

    def send(self, peer: Peer, message: Message, frames: tuple = ()) -> None: ...


# Life of a trace:
#   1. Trace(on): every worker is asked to record. Workers on other hosts answer PINGS times, which measures their clocks.
#   2. All have answered (`left` is empty): the client's request is answered and its program goes on; ops and events are noted.
#   3. Trace(off): every worker sends its rows in parts, which are passed on. Behind the last come the dispatcher's own rows.
@dataclass(slots=True)
class SessionTrace:
    """A trace under way. left: workers that have not answered; request: of the client, that is answered then.

    moved: when the workers were asked, or the last of them answered. missing: workers whose rows it lacks, and why.
    """

    session: ClientSession
    key: int
    request: int
    left: set[int]
    moved: float
    ending: bool = False
    ops: deque[TracedOp] = field(default_factory=lambda: deque(maxlen=MAX_OPS))
    events: deque[tuple[str, float, float]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    counts: list[int] = field(default_factory=lambda: [0, 0])  # ops and events so far
    asked: dict[int, float] = field(default_factory=dict)  # when each worker was asked last
    pings: dict[int, int] = field(default_factory=dict)
    clocks: dict[int, tuple[float, float]] = field(
        default_factory=dict
    )  # by worker: seconds of the round trip, its clock ahead
    parts: dict[int, int] = field(default_factory=dict)  # TraceRows of each worker
    missing: dict[int, str] = field(default_factory=dict)

    def note_op(self, row: Planned) -> None:
        """The journal has a new row."""
        ops = row.ops if isinstance(row, Launched) else ()
        self.counts[0] += 1
        self.ops.append(TracedOp(row.seq, row.known.template.op, row.origin, layout_of(row), ops))


class Traces:
    """One core's. `open` has a trace for each client that makes one."""

    def __init__(self, core: TraceHost, lease_of: Callable[[Peer], Lease]) -> None:
        self._core, self._lease_of = core, lease_of
        self.open: dict[Peer, SessionTrace] = {}

    # ---- the client

    def trace(self, peer: Peer, message: Trace, frames: tuple) -> None:
        """Begin a trace, or end it. One that begins takes the place of another, whose client has given up its wait."""
        session = self._core.sessions.get(peer)
        if session is None:
            raise ProtocolError("the session has not been welcomed yet")

        # A client whose wait was interrupted may ask again, while workers are still being asked or are answering.
        cluster, trace = session.cluster, self.open.get(peer)
        if not message.on and (trace is None or trace.left):
            raise ProtocolError("Trace.on is False, want True: no trace has begun, or it is being ended")
        if trace is not None and message.on and trace.left and not trace.ending:
            trace.request = message.request  # the workers have been asked
            return

        alive, now = {w.index for w in cluster.workers if not w.lost}, self._core.now
        if message.on or trace is None:
            self.forget(peer)
            trace = self.open[peer] = SessionTrace(session, cluster.key(), message.request, alive, now)
            session.journal.trace(trace.note_op)
        else:
            session.journal.trace(None)
            trace.ending, trace.request, trace.left, trace.moved = True, message.request, alive, now
        for index in alive:
            self._ask(trace, cluster.workers[index])
        self._complete(peer, trace)

    def _ask(self, trace: SessionTrace, worker: Worker) -> None:
        trace.asked[worker.index] = self._core.pace.now()
        self._core.send(worker.peer, Trace(trace.key, not trace.ending, trace.session.number))

    def forget(self, peer: Peer) -> None:
        """The client is gone, or waits no more: workers record nothing for it."""
        trace = self.open.pop(peer, None)
        if trace is not None and not trace.ending:
            trace.ending = True
            trace.session.journal.trace(None)
            for worker in trace.session.cluster.workers:
                if not worker.lost:
                    self._core.send(worker.peer, Trace(trace.key, False, trace.session.number))

    # ---- workers

    def rows(self, peer: Peer, worker: Worker, message: TraceRows) -> None:
        """A worker's answer. Parts of a trace that has ended otherwise mean nothing."""
        own = next(
            ((p, t) for p, t in self.open.items() if t.key == message.request and p in self._lease_of(peer).sessions), None
        )
        if own is None:
            return
        if not abs(message.clock) < MAX_SECONDS:
            raise ProtocolError(f"TraceRows.clock is {message.clock!r}, want seconds")

        # Every answer is also a reading of the worker's clock.
        client, trace = own
        index = worker.index
        self._note_clock(trace, index, message.clock)
        if index not in trace.left:
            return

        # Beginning: a worker of another host is asked some more times for its clock. Ending: its rows are passed on.
        trace.moved = self._core.now
        if not trace.ending:
            trace.pings[index] = trace.pings.get(index, 0) + 1
            home = self._core.process[1] if self._core.process else ""
            if worker.info.get("home") != home and trace.pings[index] < PINGS:
                self._ask(trace, worker)
                return
            trace.left.discard(index)
        else:
            trace.parts[index] = trace.parts.get(index, 0) + 1
            if trace.parts[index] > MAX_PARTS:
                raise ProtocolError(f"TraceRows has more than {MAX_PARTS} parts")
            self._relay(client, trace, index, message)
            if message.left <= 0:
                trace.left.discard(index)
        self._complete(client, trace)

    def _relay(self, client: Peer, trace: SessionTrace, index: int, part: TraceRows) -> None:
        rows = part.events, part.device, part.streams, part.counters, part.names
        self._core.send(client, TraceRows(trace.request, index, *rows, part.clock, part.dropped, part.left))

    def _note_clock(self, trace: SessionTrace, index: int, clock: float) -> None:
        # As in NTP: the worker read its clock about halfway. Of several
        # trips the shortest has the least error, at most half of it.
        now, asked = self._core.pace.now(), trace.asked.pop(index, None)
        if asked is not None:
            trip = now - asked, clock - (asked + now) / 2
            trace.clocks[index] = min(trip, trace.clocks.get(index, trip))

    def lose(self, worker: Worker) -> None:
        """A worker is lost: nobody waits for its answer."""
        # Traces of other leases have other workers with the same index, so objects are compared.
        for peer, trace in list(self.open.items()):
            if trace.session.cluster.workers[worker.index : worker.index + 1] == [worker]:
                waited = worker.index in trace.left
                if waited or not trace.ending:
                    trace.missing[worker.index] = f"worker {worker.name} is lost: {worker.lost}"
                trace.left.discard(worker.index)
                if waited:
                    self._complete(peer, trace)

    def regain(self, worker: Worker) -> None:
        """Another process has the place of a lost worker: it records too."""
        for trace in self.open.values():
            if not trace.ending and trace.session.cluster.workers[worker.index : worker.index + 1] == [worker]:
                self._ask(trace, worker)

    def tick(self) -> None:
        """End waits for workers that answer nothing: a trace does not begin without them, and ends without their rows."""
        for peer, trace in list(self.open.items()):
            silent = self._lease_of(peer).stragglers.unanswered(trace.session, trace.left, trace.moved, self._core.now)
            if silent is None:
                continue
            if trace.ending:
                names = ((index, trace.session.cluster.workers[index].name) for index in trace.left)
                trace.missing |= {index: f"worker {name} is alive and has not answered" for index, name in names}
                trace.left = set()
                self._complete(peer, trace)
            else:
                self.forget(peer)
                self._core.send(peer, Failed(trace.request, to_wire(silent)))

    # ---- the dispatcher's own time, and the answer

    def note(self, event: Event, began: float) -> None:
        """An event has been dealt with since `began`."""
        end = self._core.pace.now()
        # A client's message belongs to its trace alone; workers and the clock serve all traces.
        if isinstance(event, Received):
            name, peer = type(event.message).__name__, event.peer
            traces = [self.open[peer]] if peer in self.open else []
            if not traces and peer not in self._core.sessions:
                name = f"{name} of a worker"
                traces = list(self.open.values())
        else:
            name, traces = type(event).__name__, list(self.open.values())
        for trace in traces:
            trace.counts[1] += 1
            trace.events.append((name, began, end))

    def _complete(self, peer: Peer, trace: SessionTrace) -> None:
        """Answer the client once all workers have answered."""
        if trace.left:
            return
        if trace.ending:
            del self.open[peer]
            for part in self._parts(trace):
                self._core.send(peer, part)
        homes = [w.info.get("home", "") for w in trace.session.cluster.workers]
        own = self._core.process[1] if self._core.process else ""
        # Clocks of one host are one clock, and need no measurement.
        ahead = [0.0 if own and home == own else trace.clocks.get(index, (0.0, 0.0))[1] for index, home in enumerate(homes)]
        body = {"clock": self._core.pace.now(), "workers": [w.name for w in trace.session.cluster.workers], "ahead": ahead}
        body["missing"] = [trace.missing[index] for index in sorted(trace.missing)]
        self._core.send(peer, Report(trace.request, body))

    def _parts(self, trace: SessionTrace) -> Iterator[TraceRows]:
        """The dispatcher's own rows: events by kind, and in `names` the origins and ops.

        Rows: ["event", kinds]; ["origin", number, file, line, group, backward, micro-batch]; ["op", seq, op, origin, layout].
        A replay is ["launch", seq, program], behind the program's ["program", number, [[op, origin, layout], ...]].
        """
        # Events are flat numbers, four each: kind, 0, start, end. They go with the first part; names may need several.
        kinds: dict[str, int] = {}
        events: list[float] = []
        for name, start, end in trace.events:
            events += [kinds.setdefault(name, len(kinds)), 0, start, end]
        rows = list(_rows(trace))
        cuts = [rows[at : at + ROWS_PER_PART] for at in range(0, len(rows), ROWS_PER_PART)] or [[]]
        dropped = sum(trace.counts) - len(trace.ops) - len(trace.events)
        now = self._core.pace.now()
        for n, cut in enumerate(cuts):
            first = n == 0
            names = [["event", list(kinds)], *cut] if first else cut
            left = len(cuts) - 1 - n
            yield TraceRows(trace.request, ALL, events if first else [], [], [], [], names, now, dropped if first else 0, left)


def _rows(trace: SessionTrace) -> Iterator[list[Any]]:
    # Each origin and program is written once, before its first use, and named by number afterwards. Objects are compared by
    # identity, as equal origins of two ops are one object in the journal.
    origins: dict[int, int] = {}
    programs: dict[int, int] = {}
    held: list[Any] = []  # keeps the objects alive whose identity is a key
    named = 0

    def origin(row: Origin) -> Iterator[list[Any]]:
        if id(row) not in origins:
            origins[id(row)] = len(origins)
            held.append(row)
            yield ["origin", origins[id(row)], row.file, row.line, row.group, row.backward, row.micro]

    for op in trace.ops:
        yield from origin(op.origin)
        if not op.ops:
            yield ["op", op.seq, op.op, origins[id(op.origin)], _text(op.layout)]
            continue
        # A replay names its program, whose ops were sealed once: all replays share the list.
        if id(op.ops) not in programs and named + len(op.ops) <= MAX_LAUNCHED_OPS:
            named += len(op.ops)
            programs[id(op.ops)] = len(programs)
            held.append(op.ops)
            for row in op.ops:
                yield from origin(row.origin)
            yield ["program", programs[id(op.ops)], [_sealed(row, origins) for row in op.ops]]
        yield ["launch", op.seq, programs.get(id(op.ops), -1)]


def _sealed(row: Planned, origins: dict[int, int]) -> list[Any]:
    layout = row.layout if isinstance(row, Sealed) else None
    return [row.known.template.op, origins[id(row.origin)], _text(layout)]


def _text(layout: Layout | None) -> str:
    return "" if layout is None else f"{layout} {layout.mesh.text()}"
