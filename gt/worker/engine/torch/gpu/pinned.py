"""Copies between a GPU and memory of the host that other processes share, on a stream of their own.

A batch is copied while the device computes the step before. Its tensor is allocated on the copying stream. Memory of
the computing stream may still be in use by issued work, and the copy would have to wait for that work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from gt.ir.spec import Spec
from gt.worker.engine.torch.dtypes import DTYPE, conform
from gt.worker.engine.torch.gpu.times import beside


class PinnedCopies:
    """An engine.base.HostCopies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None  # made with the first copy

    def _copying(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return self._stream

    def pin(self, memory: np.ndarray) -> Callable[[], None]:
        address = memory.ctypes.data
        self._check("cudaHostRegister", lambda library: library.cudaHostRegister(address, memory.nbytes, 0))

        def unpin() -> None:
            self._copying().synchronize()
            self._check("cudaHostUnregister", lambda library: library.cudaHostUnregister(address))

        return unpin

    def _check(self, name: str, call: Callable[[Any], Any]) -> None:
        """Call CUDA's library; RuntimeError with its reason if that fails."""
        library = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            error = call(library)
            if error == library.cudaError.success:
                return
            with suppress(RuntimeError):  # the driver's record of the error would fail the next op
                torch.zeros(1, device=self._device)
        raise RuntimeError(f"{name}: {library.cudaGetErrorString(error)}")

    def upload(self, source: np.ndarray, spec: Spec) -> tuple[torch.Tensor, Callable[[], None]]:
        dtype, copying, computing = DTYPE[spec.dtype], self._copying(), torch.cuda.current_stream(self._device)
        with beside(copying, "uploads"):
            data = torch.empty(spec.shape, dtype=dtype, device=self._device)
            data.copy_(torch.from_numpy(source).view(dtype).view(spec.shape), non_blocking=True)
            read = copying.record_event(torch.cuda.Event(blocking=True))
        computing.wait_event(read)
        data.record_stream(computing)
        return conform(data, spec), read.synchronize

    def download(self, tensor: torch.Tensor, target: np.ndarray) -> None:
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        computing = torch.cuda.current_stream(self._device)
        torch.from_numpy(target).view(plain.dtype).view(plain.shape).copy_(plain, non_blocking=True)
        computing.synchronize()
