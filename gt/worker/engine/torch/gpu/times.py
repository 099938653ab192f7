"""Times of a GPU's work for traces, by CUDA events on the stream that work is issued to."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

import torch


class GpuTimes:
    """An engine.base.DeviceTimes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = torch.cuda.Stream(device)

    def mark(self) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return None
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Times by the distance to an event of now: [] until the device has come to all of them, or if it is lost."""
        try:
            if not all(mark is not None and mark.query() for mark in marks):
                return []
            now = torch.cuda.Event(enable_timing=True)
            now.record(self._clock)
            now.synchronize()
            clock = monotonic()
            return [clock - mark.elapsed_time(now) / 1e3 for mark in marks]
        except RuntimeError:
            return []
