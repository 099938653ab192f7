"""A bounce buffer: pinned memory of the host, through which a GPU's bytes pass on their way to another host.

Copies go on streams of their own, ordered with compute by events: compute goes on, and a copy waits for nothing later.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gt.worker.engine.torch.gpu.times import beside, stream_of

TO_OTHERS, FROM_OTHERS = "to other hosts", "from other hosts"  # names of streams, other ones than offload's


class BounceBuffer:
    """An engine.base.PinnedBuffer. Its memory goes back to torch's allocator, which waits for copies that are under way."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device, self._gpu = device, device.type != "cpu"
        self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._gpu and nbytes > 0)
        self.memory = memoryview(self._host.numpy()) if nbytes else memoryview(bytearray())
        self._ordered: set[bool] = set()  # directions whose stream comes after the work that was issued before

    def fetch(self, source: torch.Tensor, at: int) -> Callable[[], None]:
        target = self._host[at : at + len(source)]
        if not self._gpu:
            target.copy_(source)
            return _nothing
        stream = self._stream(to_host=True)
        with beside(stream, TO_OTHERS):
            target.copy_(source, non_blocking=True)
            done = stream.record_event(torch.cuda.Event(blocking=True))
        source.record_stream(stream)  # its memory is given to nobody before it is copied
        return done.synchronize

    def put(self, target: torch.Tensor, at: int) -> None:
        source = self._host[at : at + len(target)]
        if not self._gpu:
            target.copy_(source)
            return
        stream = self._stream(to_host=False)
        with beside(stream, FROM_OTHERS):
            target.copy_(source, non_blocking=True)
        target.record_stream(stream)
        torch.cuda.current_stream(self._device).wait_stream(stream)

    def _stream(self, to_host: bool) -> torch.cuda.Stream:
        """The direction's stream, after the work that was issued before this buffer's first copy."""
        stream = stream_of(self._device, TO_OTHERS if to_host else FROM_OTHERS)
        if to_host not in self._ordered:
            self._ordered.add(to_host)
            stream.wait_stream(torch.cuda.current_stream(self._device))
        return stream


def _nothing() -> None:
    pass
