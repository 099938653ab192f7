"""The worker's tracer: events of calls, bounded, with names that outlive their definitions."""

from __future__ import annotations

from typing import Any

import pytest

from gt.ir.instr import FREE, Define
from gt.worker.instructions.step import StepOfRows
from gt.worker.process import device_trace
from gt.worker.process import tracer as tracing
from gt.worker.process.tracer import Sample, Tracer
from gt.worker.program.runner import BoundDefinition

CHANNEL = {"peer": 1, "offset": 0, "bytes": 64, "slots": 2}
SEND = Define(16, "send", {"channel": CHANNEL, "boxes": []})


class Device:
    """A device whose marks are lists of one number, a second apart."""

    def __init__(self, records: bool = False, completed: float = 1e9) -> None:
        self.records, self.completed, self.count, self.made = records, completed, 0, 0
        self.listening: tuple = (None, None)

    def mark(self, spare: Any = None) -> Any:
        self.count += 1
        if self.records:
            return None
        self.made += spare is None
        mark = [0.0] if spare is None else spare
        mark[0] = float(self.count)
        return mark

    def listen(self, listener: Any, mark: Any) -> tuple:
        before, self.listening = self.listening, (listener, mark)
        return before

    def clocks(self) -> Any:
        return "began"

    def seconds(self, marks: list, began: Any) -> list:
        assert began == "began"
        return [mark[0] if mark[0] <= self.completed else None for mark in marks]

    def beside(self, name: str) -> None:
        """Work on another stream."""
        listener, mark = self.listening
        if listener is not None:
            listener(name, mark(), mark())


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
    (part,) = parts(tracer, ask)
    assert (part.device, part.dropped) == (([16, 103, 1.0, 2.0, 0], 0) if ask else ([], 1))
    tracer, _ = made(Device(records=True))
    tracer.step(16, lambda code, at: None)([16, 3], 2)
    assert parts(tracer)[0].device == [] and parts(tracer)[0].dropped == 0


def test_work_on_other_streams_belongs_to_the_instruction_that_asked_for_it() -> None:
    device = Device()
    tracer, _ = made(device)
    inner = tracer.step(16, lambda code, at: device.beside("uploads"))

    def outer(code: list, at: int) -> None:
        inner(code, 4)
        device.beside("offload")

    device.beside("uploads")  # nothing is traced yet
    tracer.step(17, outer)([17, 3, 16, 4], 2)
    device.beside("uploads")
    (part,) = parts(tracer)
    rows = {(number, part.streams[stream]): (start, end) for number, _, start, end, stream in zip(*[iter(part.device)] * 5)}
    assert rows == {(16, "uploads"): (3, 4), (16, "compute"): (2, 5), (17, "offload"): (6, 7), (17, "compute"): (1, 8)}
    assert device.listening == (None, None), "nothing is noted without a trace"


def test_marks_are_bounded_and_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_trace, "MAX_SLICES", 10)
    monkeypatch.setattr(device_trace, "MAX_STREAMS", 3)
    device = Device()
    tracer, _ = made(device)
    for n in range(40):
        tracer.step(16, lambda code, at, n=n: device.beside(f"stream {n}"))([16, n], 2)
    (part,) = parts(tracer)
    assert device.count == 160 and device.made <= 2 * 10 + 4
    assert part.device[1::5] == [100 + n for n in range(35, 40) for _ in "ab"] and part.dropped == 70
    assert part.streams == ["compute", "stream 0", "stream 1", "other streams"]


def test_work_that_the_device_has_not_done_is_left_out_alone() -> None:
    tracer, _ = made(Device(completed=3.0))
    for n in range(2):
        tracer.step(16, lambda code, at: None)([16, n], 2)
    (part,) = parts(tracer)
    assert part.device == [16, 100, 1.0, 2.0, 0] and part.dropped == 1


def test_steps_that_are_no_instructions_have_no_events() -> None:
    tracer, _ = made()
    code, called = [16, 0, FREE, 1, 0, 16, 2], []
    nothing = StepOfRows((), lambda code, at: called.append(at))
    rows = [(0, nothing), *((at, lambda code, at: None) for at in (0, 2, 5))]
    graph = StepOfRows(rows, lambda code, at: called.append(at))
    for at, step in tracer.rows(code, [(0, nothing), (0, graph), (5, nothing)]):
        step(code, at + 2)
    assert called == [2, 2, 7] and parts(tracer)[0].events[::4] == [-2], "marks and frees are not counted"
