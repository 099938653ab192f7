"""Times of a session's instructions, while its client makes a trace. Bounded: the newest events are kept.

The steps that are called are wrapped, so nothing is slower while no trace is made. Knows neither sockets nor lines of programs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from time import monotonic
from typing import Any, NamedTuple

from gt.ir.instr import FIRST, PROGRAMS, Define
from gt.ir.spec import DTYPES, Spec
from gt.wire.messages import TraceRows
from gt.worker.engine.base import DeviceTimes
from gt.worker.instructions.communicate import peers
from gt.worker.instructions.step import Row, Step, StepOfRows, Steps
from gt.worker.process.device_trace import DeviceTrace

MAX_EVENTS, MAX_SAMPLES = 1 << 16, 1 << 13
EVENTS_PER_PART = 1 << 13
NAMES_PER_PART = 1 << 11
MAX_NAMES = 1 << 14  # definitions that a trace names
SHARE = 20  # a sample of the counters may take one part in so many of the time
MIN_PAUSE_SECONDS = 1e-3  # seconds between two samples


class Sample(NamedTuple):
    """Bytes of live tensors, and bytes sent and received so far."""

    live: int
    sent: int
    received: int


class Tracer:
    """Events of one session. The executing thread adds; `parts` is for any thread.

    begin: number of the first op of the stream or program under way. sample: the counters. definitions: bound ones by number.
    device: times of a GPU's work.
    """

    def __init__(
        self,
        begin: Callable[[], int],
        sample: Callable[[], Sample],
        definitions: Mapping[int, Any],
        device: DeviceTimes | None = None,
    ) -> None:
        self._begin, self._sample, self._definitions = begin, sample, definitions
        self._device = None if device is None else DeviceTrace(device)
        self._names: dict[int, list] = {}  # by number, of definitions that may be forgotten before the trace ends
        self._events: deque[tuple[int, int, float, float]] = deque(maxlen=MAX_EVENTS)
        self._samples: deque[tuple[float, int, int, int]] = deque(maxlen=MAX_SAMPLES)
        self._count = 0
        self._next = 0.0  # when the counters may be sampled again

    def steps(self, steps: Steps) -> TracedSteps:
        """A table of steps that records each call."""
        return TracedSteps(self, steps)

    def rows(self, code: list, rows: Sequence[Row]) -> list[Row]:
        """A program's rows whose calls are recorded. Generated functions are replaced by their instructions.

        A compiled segment stays one step, whose number is the count of its instructions, below 0. A step that is no
        instruction, as that before a replay, has no events.
        """
        traced: list[Row] = []
        for at, step in rows:
            if isinstance(step, StepOfRows) and step.separable:
                traced += [(place, self._row(code[place], row)) for place, row in step.rows]
            else:
                traced.append((at, self._row(-_count(code, step.rows) if isinstance(step, StepOfRows) else code[at], step)))
        return traced

    def _row(self, number: int, step: Step) -> Step:
        return step if 0 <= number < FIRST else self.step(number, step)

    def step(self, number: int, step: Step) -> Step:
        """A step whose calls are recorded."""
        if number not in self._names and number in self._definitions and len(self._names) < MAX_NAMES:
            self._names[number] = _name(number, self._definitions[number])
        device = self._device

        def traced(code: list, at: int) -> None:
            seq = self._begin() + code[at - 1]
            ended = None if device is None else device.begin(number, seq)
            start = monotonic()
            try:
                step(code, at)
            finally:
                end = monotonic()
                self._events.append((number, seq, start, end))
                self._count += 1
                if ended is not None:
                    ended()
                if end >= self._next:
                    self._note_counters(end)

        return traced

    def _note_counters(self, now: float) -> None:
        self._samples.append((now, *self._sample()))
        end = monotonic()
        self._next = end + max(SHARE * (end - now), MIN_PAUSE_SECONDS)

    # ---- the answer

    def parts(self, request: int, ask: bool) -> Iterator[TraceRows]:
        """Messages with everything that was recorded. ask: the device may be asked."""
        events, samples, device = list(self._events), list(self._samples), self._device
        measured = device.rows() if device is not None and ask else []
        names, streams = list(self._names.values()), [] if device is None else device.streams
        columns = (
            _cut([x for event in events for x in event], 4 * EVENTS_PER_PART),
            _cut([x for event in measured for x in event], 5 * EVENTS_PER_PART),
            _cut([x for sample in samples for x in sample], 4 * EVENTS_PER_PART),
            _cut(names, NAMES_PER_PART),
        )
        dropped = self._count - len(events) + (0 if device is None else device.count - len(measured))
        count = max(1, *map(len, columns))
        for n in range(count):
            events_, device_, samples_, names_ = (column[n] if n < len(column) else [] for column in columns)
            left = count - 1 - n
            yield TraceRows(request, 0, events_, device_, streams, samples_, names_, monotonic(), 0 if n else dropped, left)


class TracedSteps:
    """A table of steps that records each call."""

    def __init__(self, tracer: Tracer, steps: Steps) -> None:
        self._tracer, self._steps = tracer, steps

    def __getitem__(self, number: int) -> tuple[Step, int]:
        step, size = self._steps[number]
        return self._tracer.step(number, step), size


def _count(code: list, rows: Sequence[Row]) -> int:
    """Instructions that rows stand for."""
    return sum(_count(code, step.rows) if isinstance(step, StepOfRows) else code[at] >= FIRST for at, step in rows)


def _cut(rows: list, most: int) -> list[list]:
    return [rows[at : at + most] for at in range(0, len(rows), most)]


def _name(number: int, bound: Any) -> list:
    """[number, kind, op, bytes, peers] of a definition: bytes that it makes, or moves; peers of a transfer, in order."""
    define: Define | None = bound.define  # None of a program
    if define is None or define.kind in PROGRAMS:
        return [number, bound.kind, "", 0, []]
    payload = define.payload
    if define.kind == "op":
        made = [Spec.from_wire(out[1]).nbytes for out in payload["outs"] if out[0] == "new" and out[1] is not None]
        return [number, "op", payload["op"], sum(made), []]
    return [number, define.kind, payload.get("op") or "", _moved(define), list(peers(payload))]


def _moved(define: Define) -> int:
    """Bytes of a transfer or collective's result, as far as its definition has them."""
    payload = define.payload
    if "shape" in payload and payload.get("dtype") in DTYPES:
        return prod(payload["shape"]) * DTYPES[payload["dtype"]][0]
    return 0
