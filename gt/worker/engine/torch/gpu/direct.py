"""The torch engine for steps that move data between GPUs: views are of the GPU's own memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from gt.worker.engine.base import Moves
from gt.worker.engine.torch.dtypes import DTYPE
from gt.worker.engine.torch.gpu.bounce_buffer import BounceBuffer
from gt.worker.engine.torch.gpu.times import Listening, beside, listening


class GpuEngine(Moves, Protocol):
    """The engine that a DirectEngine belongs to (TorchEngine)."""

    @property
    def device(self) -> torch.device: ...


class Raw:
    """Memory of a GPU that torch did not allocate."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


class Combination:
    """A reduction of bytes, with its name and dtype for libraries that have it."""

    __slots__ = ("_dtype", "_reduce", "kind", "op")

    def __init__(self, op: str, kind: str, reduce: Callable) -> None:
        self.op, self.kind, self._dtype, self._reduce = op, kind, DTYPE[kind], reduce

    def __call__(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if dst.numel():
            self._reduce(dst.view(self._dtype), src.view(self._dtype))


class DirectEngine:
    """Engine.direct of a TorchEngine. A view is a flat uint8 tensor."""

    def __init__(self, engine: GpuEngine, combines: dict[str, Callable]) -> None:
        self.device, self._combines = engine.device, combines
        self._sides: dict[Hashable, torch.cuda.Stream] = {}
        self.copy, self.flat, self.dtype, self.divide = engine.copy, engine.flat, engine.dtype, engine.divide

    def packed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().resolve_conj().resolve_neg().contiguous()

    def staging(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=DTYPE[dtype], device=self.device)

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel():
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # view(-1) keeps an odd stride of one element

    def combine(self, op: str, dtype: str) -> Combination:
        return Combination(op, dtype, self._combines[op])

    # ---- for planes

    def address(self, view: torch.Tensor) -> int:
        return view.data_ptr()

    def words(self, view: torch.Tensor) -> torch.Tensor:
        return view.view(torch.int64)

    def memory(self, address: int, nbytes: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
        return torch.as_tensor(Raw(address, nbytes), device=self.device)

    def stream(self) -> int:
        return 0 if self.device.type == "cpu" else torch.cuda.current_stream(self.device).cuda_stream

    def write(self, view: torch.Tensor, data: bytes) -> None:
        view.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def read(self, view: torch.Tensor) -> bytes:
        return view.cpu().numpy().tobytes()

    def finish(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)

    # ---- for transfers between hosts

    def bounce(self, nbytes: int) -> BounceBuffer:
        return BounceBuffer(self.device, nbytes)

    def side_stream(self, use: Hashable) -> int:
        if self.device.type == "cpu":
            return 0
        if use not in self._sides:
            self._sides[use] = torch.cuda.Stream(self.device)
        stream = self._sides[use]
        # Work issued there begins after all that compute has issued so far.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return stream.cuda_stream

    def issuing_to(self, stream: int) -> AbstractContextManager:
        if self.device.type == "cpu":
            return torch.no_grad()
        side = any(own.cuda_stream == stream for own in self._sides.values())
        return self._issuing_to(stream, listening(self.device.index or 0) if side else (None, None))

    @contextmanager
    def _issuing_to(self, stream: int, listeners: Listening) -> Iterator[None]:
        torch.cuda.set_device(self.device)
        with torch.no_grad(), beside(torch.cuda.ExternalStream(stream, self.device), "transfers", listeners):
            yield

    def fence(self) -> Callable[[], None]:
        if self.device.type == "cpu":
            return lambda: None
        return torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(blocking=True)).synchronize


def direct(engine: Any, combines: dict[str, Callable]) -> DirectEngine | None:
    """The DirectEngine of an engine on a GPU, None on the host."""
    return None if engine.host else DirectEngine(engine, combines)
