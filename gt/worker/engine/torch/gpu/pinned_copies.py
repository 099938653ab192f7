"""Evicted tensors of a GPU in pinned host memory. Copies both ways go on streams of their own, beside compute."""

from __future__ import annotations

from concurrent.futures import Future

import torch

from gt.worker.engine.torch.gpu.times import beside, stream_of

TO_HOST, FROM_HOST = "offload to the host", "offload from the host"  # names of streams in traces


def copy_stream(device: torch.device, to_host: bool) -> torch.cuda.Stream | None:
    """The stream of a device's copies in one direction; None for a CPU, which stands for a GPU in tests."""
    return None if device.type == "cpu" else stream_of(device, TO_HOST if to_host else FROM_HOST)


def pinned_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory of the host for a tensor with these strides, pinned for a GPU."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=device.type != "cpu")


class PinnedCopy:
    """One evicted tensor (gt.worker.offload.tensors.Resting)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device, self._like = tensor.device, tensor.to("meta")
        self.nbytes = tensor.untyped_storage().nbytes()
        self._host = pinned_like(tensor, self._device)
        self.computed: Future | None = None  # the newest op in host memory that uses it
        self._back: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self._copied: torch.cuda.Event | None = None
        side = copy_stream(self._device, True)
        if side is None:
            self._host.copy_(tensor)
            return
        side.wait_stream(torch.cuda.current_stream(self._device))
        with beside(side, TO_HOST):
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(side)
        tensor.record_stream(side)  # its memory is given to nobody before it is copied

    def prefetch(self) -> None:
        if self._back is not None:
            return
        if self.computed is not None:
            self.computed.exception()
        tensor = torch.empty_strided(self._like.shape, self._like.stride(), dtype=self._like.dtype, device=self._device)
        side = copy_stream(self._device, False)
        if side is None or self._copied is None:
            self._back = tensor.copy_(self._host), None
            return
        side.wait_stream(torch.cuda.current_stream(self._device))  # which may still use what the memory was before
        side.wait_event(self._copied)
        with beside(side, FROM_HOST):
            tensor.copy_(self._host, non_blocking=True)
            done = torch.cuda.Event()
            done.record(side)
        tensor.record_stream(side)
        self._back = tensor, done

    def tensor(self) -> torch.Tensor:
        computed, self.computed = self.computed, None
        if computed is not None:
            computed.result()  # raises once, as that of a tensor which the lane sends back
        self.prefetch()
        assert self._back is not None
        tensor, done = self._back
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)
        return tensor

    def host(self) -> torch.Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host

    def used(self, changed: bool) -> None:
        if changed:
            self._back = None  # of the value before

    def close(self) -> None:
        if self._back is None and self._copied is not None:
            self._copied.synchronize()
        self._back = None  # the pinned memory is given to nobody before its copies are done: torch's allocator sees to that
