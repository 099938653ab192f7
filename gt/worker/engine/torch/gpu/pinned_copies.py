"""Evicted tensors of a GPU in pinned host memory. Copies both ways go on streams of their own, beside compute."""

from __future__ import annotations

import torch

_streams: dict[tuple[int, bool], torch.cuda.Stream] = {}  # by device and direction


def _stream(device: torch.device, to_host: bool) -> torch.cuda.Stream:
    key = device.index or 0, to_host
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(device)
    return _streams[key]


class PinnedCopy:
    """One evicted tensor (gt.worker.offload.tensors.Resting)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device, self._like = tensor.device, tensor.to("meta")
        self.nbytes = tensor.untyped_storage().nbytes()
        self._host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
        side = _stream(self._device, True)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(side)
        tensor.record_stream(side)  # its memory is given to nobody before it is copied
        self._back: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def prefetch(self) -> None:
        if self._back is not None:
            return
        own = torch.cuda.current_stream(self._device)
        tensor = torch.empty_strided(self._like.shape, self._like.stride(), dtype=self._like.dtype, device=self._device)
        side = _stream(self._device, False)
        side.wait_stream(own)  # which may still use what the memory was before
        side.wait_event(self._copied)
        with torch.cuda.stream(side):
            tensor.copy_(self._host, non_blocking=True)
            done = torch.cuda.Event()
            done.record(side)
        tensor.record_stream(side)
        self._back = tensor, done

    def tensor(self) -> torch.Tensor:
        self.prefetch()
        assert self._back is not None
        tensor, done = self._back
        torch.cuda.current_stream(self._device).wait_event(done)
        return tensor

    def close(self) -> None:
        if self._back is None:
            self._copied.synchronize()
        self._back = None  # the pinned memory is given to nobody before its copies are done: torch's allocator sees to that
