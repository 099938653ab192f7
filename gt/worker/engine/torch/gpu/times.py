"""Times of a GPU's work for traces, by CUDA events on the streams that work is issued to.

`beside` issues work to a stream other than compute's. While a trace is made, it notes the time of that work too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, NamedTuple

import torch

from gt.worker.engine.base import Listener, Marker

CLOCK_LOOKS = 3  # at both clocks: the one that took least counts
MIN_SECONDS = 0.1  # between two looks that tell how fast the clocks go
Listening = tuple[Listener | None, Marker | None]

_listening: dict[int, Listening] = {}  # by device, while an instruction is traced
_streams: dict[tuple[int, str], torch.cuda.Stream] = {}  # by device and name
_names: dict[int, dict[tuple[str, int], str]] = {}  # by device, of streams that were used in traces


class Moment(NamedTuple):
    """An event that a device had come to at a moment of the host's clock."""

    event: Any
    seconds: float


class GpuTimes:
    """An engine.base.DeviceTimes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._number = device, device.index or 0
        self._clock = torch.cuda.Stream(device)

    def mark(self, spare: Any = None) -> Any:
        try:
            if torch.cuda.is_current_stream_capturing():
                return None
            event = torch.cuda.Event(enable_timing=True) if spare is None else spare
            return torch.cuda.current_stream(self._device).record_event(event)
        except RuntimeError:  # the device is lost, which the work itself tells
            return None

    def listen(self, listener: Listener | None, mark: Marker | None) -> Listening:
        before = listening(self._number)
        _listening[self._number] = listener, mark
        return before

    def clocks(self) -> Moment | None:
        with suppress(RuntimeError):
            return look(lambda: self._clock.record_event(torch.cuda.Event(enable_timing=True)), monotonic, CLOCK_LOOKS)
        return None

    def seconds(self, marks: Sequence[Any], began: Moment | None) -> list[float | None]:
        now = self.clocks()
        try:
            return [] if now is None else on_the_host(marks, began, now)
        except RuntimeError:
            return []


def look(record: Callable[[], Any], clock: Callable[[], float], count: int) -> Moment:
    """The moment of an event, which lies between the looks at the clock before and after it: half-way of the closest two."""
    best, shortest = None, float("inf")
    for _ in range(count):
        before = clock()
        event = record()
        event.synchronize()
        after = clock()
        # The host may be interrupted between the looks; the closest pair of looks was interrupted least.
        if after - before < shortest:
            best, shortest = Moment(event, (before + after) / 2), after - before
    assert best is not None
    return best


def on_the_host(marks: Sequence[Any], began: Moment | None, now: Moment) -> list[float | None]:
    """Marks as moments of the host's clock, by their distance to `now`; None for one that the device has not come to.

    The clocks go at different speeds, by up to some milliseconds a minute. `began` tells how much.
    """
    rate = 1.0
    if began is not None and (passed := began.event.elapsed_time(now.event) / 1e3) >= MIN_SECONDS:
        rate = (now.seconds - began.seconds) / passed
    return [now.seconds - rate * mark.elapsed_time(now.event) / 1e3 if mark.query() else None for mark in marks]


# ---- other streams


def stream_of(device: torch.device, name: str) -> torch.cuda.Stream:
    """A device's stream for one kind of copies."""
    key = device.index or 0, name
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(device)
    return _streams[key]


def listening(device: int) -> Listening:
    """The present listener. For a thread that will issue work for the calling one."""
    return _listening.get(device, (None, None))


@contextmanager
def beside(stream: torch.cuda.Stream, name: str, listeners: Listening | None = None) -> Iterator[None]:
    """Issue work to a stream. name: of the stream in a trace. listeners: of when the work was asked for, by default of now."""
    with torch.cuda.stream(stream):
        listener, mark = listening(stream.device_index) if listeners is None else listeners
        if listener is None or mark is None:
            yield
            return
        first = mark()
        try:
            yield
        finally:
            listener(_unique(stream, name), first, mark())


def _unique(stream: torch.cuda.Stream, name: str) -> str:
    """The name; with a number, where another stream has it."""
    names = _names.setdefault(stream.device_index, {})
    key = name, stream.cuda_stream
    if key not in names:
        same = sum(known == name for known, _ in names)
        names[key] = f"{name} {same + 1}" if same else name
    return names[key]
