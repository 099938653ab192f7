"""The lane of a GPU's worker for ops in host memory: a thread of its own, and pinned copies on streams of their own.

The copy of a gradient begins when its op is issued, after all earlier work, and the lane waits for it. So the op on one bucket
computes while the next bucket's gradients are copied. A changed parameter goes back on another stream. The executing thread
waits for it where it looks the parameter up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from gt.worker.engine.torch.gpu.pinned_copies import FROM_HOST, TO_HOST, copy_stream, pinned_like
from gt.worker.engine.torch.gpu.times import Listening, beside, listening


class GpuHostLane:
    """A gt.worker.engine.base.HostLane. host: an engine of the CPU. The device may be a CPU too, as in tests."""

    def __init__(self, device: torch.device, host: Any) -> None:
        self.device = device
        self._thread = ThreadPoolExecutor(1, "gt.host_lane")
        self.bind, self.in_memory, self.shared = host.bind, host.in_memory, host.shared

    def submit(self, work: Callable[[], Any]) -> Future:
        return self._thread.submit(work)

    def copy(self, tensor: torch.Tensor) -> DeviceCopy:
        return DeviceCopy(self, tensor)

    def run(self, call: Callable, operands: Sequence[Any], values: Sequence, outs: int) -> list[Any]:
        """An op that fails is known where its results or its targets are looked up. A later op on its targets fails too."""
        # The lane is one thread, so earlier ops are over by then; `result()` is asked for their failures.
        before = [operand.computed for operand in operands if getattr(operand, "computed", None) is not None]

        def work() -> Sequence[torch.Tensor]:
            for earlier in before:
                earlier.result()
            with torch.no_grad():  # which is a setting of each thread
                results = call(*[operand.host() for operand in operands], *values)
            return results if outs > 1 else [results] * outs

        done = self.submit(work)
        # Buffers of files belong to the executing thread: the op is over before that touches them again.
        if any(getattr(operand, "by_caller", False) for operand in operands):
            done.result()
        for operand in operands:
            operand.computed = done
        return [HostResult(self, done, n) for n in range(outs)]


class DeviceCopy:
    """The pinned copy of a tensor on the device (gt.worker.engine.base.HostCopy)."""

    def __init__(self, lane: GpuHostLane, tensor: torch.Tensor) -> None:
        self._lane = lane
        self._pinned = pinned_like(tensor, lane.device)
        self.nbytes = tensor.numel() * tensor.element_size()
        self._copied: Callable[[], None] = _nothing
        self.computed: Future | None = None
        self.sent: torch.cuda.Event | None = None  # the newest copy back to the device, set by the lane

    def begin(self, tensor: torch.Tensor) -> None:
        if self.computed is not None:
            self.computed.exception()  # the lane may still read the copy of the value before
            self.computed = None
        self._wait_until_sent()
        stream = copy_stream(self._lane.device, True)
        if stream is None:
            self._pinned.copy_(tensor)
            return
        computing = torch.cuda.current_stream(self._lane.device)
        # Order by events alone: the copy waits for the producer, the next writer of the tensor waits for the copy.
        stream.wait_stream(computing)
        with beside(stream, TO_HOST):
            self._pinned.copy_(tensor, non_blocking=True)
            copied = stream.record_event(torch.cuda.Event(blocking=True))
        self._copied = copied.synchronize
        computing.wait_event(copied)  # a later op, or a replay of a graph, may write to this memory
        tensor.record_stream(stream)  # whose allocation may be another stream's

    def host(self) -> torch.Tensor:
        self._copied()
        self._wait_until_sent()  # an op may change it
        return self._pinned

    def _wait_until_sent(self) -> None:
        if self.sent is not None:
            self.sent.synchronize()

    def used(self, changed: bool) -> None:
        """Its tensor is sent back by `send`."""

    def send(self, tensor: torch.Tensor) -> OnItsWay | None:
        back = OnItsWay(self._lane, tensor, self, self._pinned)
        if not self._lane.shared(tensor):
            return back
        back.tensor()  # whoever looks up a view of this memory would not wait
        return None


class OnItsWay:
    """A tensor of the device that the lane changes (gt.worker.offload.tensors.Resting): whoever looks it up waits."""

    def __init__(self, lane: GpuHostLane, tensor: torch.Tensor, copy: DeviceCopy, pinned: torch.Tensor) -> None:
        self._lane, self._tensor, self._copy, self._pinned = lane, tensor, copy, pinned
        self.nbytes, self.computed = copy.nbytes, copy.computed
        self._sent: Future | None = None
        self._stream = copy_stream(lane.device, False)
        # Ops issued so far still read the old value on the device: the copy back waits for them.
        self._readers = None if self._stream is None else torch.cuda.current_stream(lane.device).record_event()
        self.begin()

    def begin(self) -> None:
        """Send the value that the lane's ops so far have computed."""
        computed, listeners = self.computed, listening(self._lane.device.index or 0)
        self._sent = self._lane.submit(lambda: self._send(computed, listeners))

    def _send(self, computed: Future | None, listeners: Listening) -> torch.cuda.Event | None:
        readers = self._readers  # of the value before, issued before
        if computed is not None:
            computed.result()
        if self._stream is None or readers is None:
            self._tensor.copy_(self._pinned)
            return None
        self._stream.wait_event(readers)
        with beside(self._stream, FROM_HOST, listeners):
            self._tensor.copy_(self._pinned, non_blocking=True)
            self._copy.sent = self._stream.record_event(torch.cuda.Event(blocking=True))
        self._tensor.record_stream(self._stream)  # it may be freed before the copy is over
        return self._copy.sent

    def prefetch(self) -> None:
        """It is on its way."""

    def tensor(self) -> torch.Tensor:
        sending, self._sent = self._sent, None
        sent = None if sending is None else sending.result()  # raises once: the next look-up finds the value from before
        self._sent = sending
        if sent is not None:
            torch.cuda.current_stream(self._lane.device).wait_event(sent)
        return self._tensor

    def close(self) -> None:
        if self._sent is not None:
            self._sent.exception()

    def host(self) -> torch.Tensor:
        return self._copy.host()

    def used(self, changed: bool) -> None:
        self._copy.computed = self.computed
        if changed:
            self.begin()


class HostResult:
    """A result of an op in the lane (gt.worker.offload.tensors.Resting). It comes to the device when it is looked up."""

    def __init__(self, lane: GpuHostLane, done: Future, place: int) -> None:
        self._lane, self._done, self._place = lane, done, place
        self.computed = done
        self.nbytes = 0  # not known before the op is over

    def prefetch(self) -> None:
        pass

    def tensor(self) -> torch.Tensor:
        self.computed.result()  # of the last op that uses it
        return self.host().to(self._lane.device)

    def close(self) -> None:
        self._done.exception()

    def host(self) -> torch.Tensor:
        return self._done.result()[self._place]

    def used(self, changed: bool) -> None:
        pass


def _nothing() -> None:
    """Nothing has to be waited for."""
