"""Times of one session's work on a GPU, by stream, while its client makes a trace. Bounded: the newest are kept.

A mark is a point in a stream's work, before and after that of an instruction. Marks become times when the trace ends. Marks of
slices that had no room are used again. Knows no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from gt.worker.engine.base import DeviceTimes

MAX_SLICES = 1 << 14
MAX_STREAMS = 64  # with names of their own
COMPUTE, OTHERS = "compute", "other streams"


class DeviceSlice(NamedTuple):
    """Work of an instruction on one stream, between two marks."""

    number: int
    seq: int
    stream: int
    first: Any
    last: Any


class DeviceTrace:
    """Slices of one session. The executing thread calls `begin`; `rows` is for any thread."""

    def __init__(self, device: DeviceTimes) -> None:
        self._device = device
        self._began: Any = None  # the device's clock beside the host's, at the first slice
        self._slices: deque[DeviceSlice] = deque()
        self._spare: list[Any] = []  # marks that nobody needs any more
        self._places = {COMPUTE: 0}  # by name of a stream
        self.count = 0
        self._lock = Lock()  # several threads note their work

    @property
    def streams(self) -> list[str]:
        """Names of streams, by their numbers."""
        return list(self._places)

    def begin(self, number: int, seq: int) -> Callable[[], None] | None:
        """An instruction is about to issue its work: a function to call once it has. None while the device records."""
        device = self._device
        if self._began is None:
            self._began = device.clocks()
        first = self._mark()
        if first is None:
            return None
        outer = device.listen(partial(self._note, number, seq), self._mark)

        def end() -> None:
            device.listen(*outer)
            self._note(number, seq, COMPUTE, first, self._mark())

        return end

    def _mark(self) -> Any:
        try:
            spare = self._spare.pop()
        except IndexError:
            spare = None
        return self._device.mark(spare)

    def _note(self, number: int, seq: int, stream: str, first: Any, last: Any) -> None:
        """Work of an instruction on a stream, by the thread that issued it."""
        if first is None or last is None:
            return
        with self._lock:
            places = self._places
            if stream not in places and len(places) >= MAX_STREAMS:
                stream = OTHERS
            self._slices.append(DeviceSlice(number, seq, places.setdefault(stream, len(places)), first, last))
            self.count += 1
            if len(self._slices) > MAX_SLICES:
                old = self._slices.popleft()
                self._spare += [old.first, old.last]

    def rows(self) -> list[tuple[int, int, float, float, int]]:
        """Number, seq, start, end and stream of each slice that the device has completed. It is asked, which may take long."""
        slices = list(self._slices)
        if not slices:
            return []
        marks = [mark for row in slices for mark in (row.first, row.last)]
        times = self._device.seconds(marks, self._began)
        rows = []
        for row, start, end in zip(slices, times[::2], times[1::2]):
            if start is not None and end is not None:
                rows.append((row.number, row.seq, start, end, row.stream))
        return rows
