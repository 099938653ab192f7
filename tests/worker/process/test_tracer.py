"""The worker's tracer: events of calls, bounded, with names that outlive their definitions."""

from __future__ import annotations

from typing import Any

import pytest

from gt.ir.instr import FREE, Define
from gt.worker.instructions.step import StepOfRows
from gt.worker.process import tracer as tracing
from gt.worker.process.tracer import Sample, Tracer
from gt.worker.program.runner import BoundDefinition

CHANNEL = {"peer": 1, "offset": 0, "bytes": 64, "slots": 2}
SEND = Define(16, "send", {"channel": CHANNEL, "boxes": []})


class Device:
    """A device whose marks are numbers, a second apart."""

    def __init__(self, records: bool = False) -> None:
        self.records, self.count = records, 0

    def mark(self) -> Any:
        self.count += 1
        return None if self.records else float(self.count)

    def seconds(self, marks: list) -> list:
        return list(marks)


def made(device: Device | None = None) -> tuple[Tracer, dict]:
    definitions = {16: BoundDefinition("send", [], SEND), 17: BoundDefinition("program", [], None)}
    return Tracer(lambda: 100, lambda: Sample(1, 2, 3), definitions, device), definitions


def parts(tracer: Tracer, ask: bool = True) -> list:
    rows = list(tracer.parts(5, ask))
    assert [row.left for row in rows] == list(range(len(rows)))[::-1] and {row.request for row in rows} == {5}
    return rows


def test_a_call_is_an_event_with_its_number_and_times() -> None:
    tracer, definitions = made()
    called = []
    step, size = tracer.steps({16: (lambda code, at: called.append((code[at], at)), 3)})[16]
    step([16, 7, 42], 2)
    definitions.clear()  # forgotten before the trace ends
    (part,) = parts(tracer)
    number, seq, start, end = part.events
    assert (number, seq, size, called) == (16, 107, 3, [(42, 2)]) and start <= end <= part.clock
    assert part.names == [[16, "send", "", 0, [1]]] and part.counters[1:] == [1, 2, 3] and part.dropped == 0


def test_a_failed_call_is_an_event_too() -> None:
    tracer, _ = made()

    def fails(code: list, at: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tracer.step(16, fails)([16, 0], 2)
    assert len(parts(tracer)[0].events) == 4


def test_generated_functions_are_taken_apart_and_compiled_segments_are_not() -> None:
    tracer, _ = made()

    class Separable(StepOfRows):
        separable = True

    called: list[int] = []
    one, two, three = (lambda code, at, n=n: called.append(n) for n in (1, 2, 3))
    code = [16, 0, FREE, 1, 0, 16, 2]
    rows = [(0, Separable([(0, one), (2, two)], lambda code, at: called.append(-1))), (5, StepOfRows([(5, three)] * 4, three))]
    for at, step in tracer.rows(code, rows):
        step(code, at + 2)
    events = parts(tracer)[0].events
    assert called == [1, 2, 3] and events[::4] == [16, -4], "a free has no event"


def test_memory_is_bounded_and_parts_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_EVENTS", 10)
    monkeypatch.setattr(tracing, "EVENTS_PER_PART", 4)
    tracer, _ = made()
    step = tracer.step(16, lambda code, at: None)
    for n in range(25):
        step([16, n], 2)
    rows = parts(tracer)
    assert [x for row in rows for x in row.events[1::4]] == list(range(115, 125)) and sum(row.dropped for row in rows) == 15
    assert all(len(row.events) <= 16 for row in rows)


@pytest.mark.parametrize("ask", [True, False])
def test_a_devices_times_are_asked_for_where_nothing_waits(ask: bool) -> None:
    tracer, _ = made(Device())
    tracer.step(16, lambda code, at: None)([16, 3], 2)
    assert parts(tracer, ask)[0].device == ([16, 103, 1.0, 2.0] if ask else [])
    tracer, _ = made(Device(records=True))
    tracer.step(16, lambda code, at: None)([16, 3], 2)
    assert parts(tracer)[0].device == []
