"""Times of a GPU's work, with a stand-in for CUDA's events: clocks that drift apart, other streams, a lost device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gt.worker.engine.torch.gpu import times
from gt.worker.engine.torch.gpu.times import GpuTimes, Moment, beside, listening, look, on_the_host

RATE, OFFSET = 1 + 40e-6, 7000.0  # the device's clock beside the host's


class Host:
    """The host's clock, at which the device does work at once. Recording an event takes `latency`."""

    def __init__(self) -> None:
        self.now, self.latency, self.lost, self.captures, self.made = 100.0, iter(lambda: 0.0, 1.0), False, False, 0

    def clock(self) -> float:
        return self.now

    def event(self, **how: Any) -> Event:
        self.made += 1
        return Event(self)


class Event:
    """A CUDA event: its distance to another is in milliseconds of the device's clock."""

    def __init__(self, host: Host, done: bool = True) -> None:
        self.host, self.at, self.done = host, 0.0, done

    def record(self, stream: Any = None) -> None:
        if self.host.lost:
            raise RuntimeError("CUDA error: the device is lost")
        self.host.now += next(self.host.latency) / 2
        self.at = self.host.now * RATE + OFFSET

    def synchronize(self) -> None:
        self.host.now += next(self.host.latency) / 2

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


def recorded(event: Event) -> Event:
    """As torch's Stream.record_event; Event.record returns nothing."""
    event.record()
    return event


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A GPU by stand-ins; every stream has a number."""
    host, numbers = Host(), iter(range(1, 99))
    stream = SimpleNamespace(record_event=recorded)

    def made(device: Any) -> SimpleNamespace:
        return SimpleNamespace(device_index=0, cuda_stream=next(numbers), record_event=recorded)

    monkeypatch.setattr(times, "monotonic", host.clock)
    monkeypatch.setattr(torch.cuda, "Event", host.event)
    monkeypatch.setattr(torch.cuda, "Stream", made)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: host.captures)
    yield host
    times._listening.clear()
    times._names.clear()


def test_the_look_that_takes_least_counts() -> None:
    host = Host()
    host.latency = iter([3e-3, 3e-3, 2e-5, 2e-5, 1e-3, 1e-3])
    moment = look(lambda: recorded(Event(host)), host.clock, 3)
    assert moment.seconds == pytest.approx(100.003 + 1e-5) and moment.event.at == pytest.approx(moment.seconds * RATE + OFFSET)


def test_moments_are_right_though_the_clocks_drift_apart() -> None:
    host = Host()
    began = Moment(recorded(Event(host)), host.now)
    marks, want = [], []
    for _ in range(60):
        host.now += 1.0
        marks.append(recorded(Event(host)))
        want.append(host.now)
    now = Moment(recorded(Event(host)), host.now)
    assert on_the_host(marks, began, now) == pytest.approx(want, abs=1e-7)
    alone = on_the_host(marks, None, now)
    assert max(abs(a - b) for a, b in zip(alone, want, strict=True) if a is not None) > 2e-3, "without a second look"


def test_a_mark_that_was_not_reached_has_no_time_and_spoils_no_other() -> None:
    host = Host()
    reached, pending = recorded(Event(host)), recorded(Event(host, done=False))
    assert on_the_host([reached, pending], None, Moment(recorded(Event(host)), host.now)) == [pytest.approx(100.0), None]


def test_a_lost_device_and_one_that_records_give_no_times(host: Host) -> None:
    gpu = GpuTimes(torch.device("cuda:0"))
    began, mark = gpu.clocks(), gpu.mark()
    assert gpu.seconds([mark], began) == [pytest.approx(100.0)] and gpu.mark(mark) is mark, "a spare mark is used again"
    host.captures = True
    assert gpu.mark() is None
    host.captures, host.lost = False, True
    assert gpu.mark() is None and gpu.clocks() is None and gpu.seconds([mark], began) == []


def test_work_on_other_streams_is_noted_while_somebody_listens(host: Host) -> None:
    gpu, heard = GpuTimes(torch.device("cuda:0")), []
    first, second = (torch.cuda.Stream(torch.device("cuda:0")) for _ in range(2))
    with beside(first, "uploads"):
        pass
    assert host.made == 0, "nothing is recorded without a trace"
    assert gpu.listen(lambda name, begin, end: heard.append((name, end.at - begin.at)), gpu.mark) == (None, None)
    for stream in (first, second, first):
        with beside(stream, "uploads"):
            host.now += 1.0
    then = listening(0)
    gpu.listen(None, None)
    with beside(second, "uploads"):
        pass
    with pytest.raises(ZeroDivisionError), beside(second, "uploads", then):  # by a thread that was asked while it was traced
        1 / 0
    second_ = pytest.approx(RATE)
    assert heard == [("uploads", second_), ("uploads 2", second_), ("uploads", second_), ("uploads 2", 0.0)]
