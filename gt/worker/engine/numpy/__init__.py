"""The numpy engine: ops in a process without torch. Tests compare it with torch.

A tensor is an np.ndarray, a view one that shares its memory. The functions of ops are in the tables of this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any

import numpy as np

from gt.errors import ConfigError
from gt.ir.spec import Spec
from gt.ir.template import Const
from gt.worker.engine.base import IDENTITY, Combine
from gt.worker.engine.codegen import Call, Source, fitting
from gt.worker.engine.numpy import blas
from gt.worker.engine.numpy.arrays import (
    DTYPE,
    Array,
    check_strides,
    check_view,
    conform,
    dtype_of,
    laid_out,
    name_of,
    offset,
    owner,
    storable,
)
from gt.worker.engine.numpy.table import resolve
from gt.worker.offload.host_ops import HostEngineLane


class NumpyEngine:
    """An engine.base.Engine. NumPy's floating point errors are not errors, as they are not torch's."""

    name, kind = "numpy", "cpu"
    clock = staticmethod(perf_counter)
    direct = progress = copies = times = early = None

    def __init__(self, device: str = "") -> None:
        if device not in ("", "cpu"):
            raise ConfigError(f"the numpy engine runs on the cpu, not on {device!r}: use --device cpu, or --backend torch")

    def load(self, libraries: Sequence[str]) -> list[str]:
        if libraries:
            raise ConfigError(f"the libraries {', '.join(libraries)} need torch: use --backend torch, or none")
        return []

    def guard(self) -> AbstractContextManager:
        return np.errstate(all="ignore")

    def bind(self, payload: dict[str, Any]) -> Call:
        return self.source(payload).function()

    def source(self, payload: dict[str, Any]) -> Source:
        run = resolve(payload["op"], payload["random"])
        fitting(payload)
        return Source(run, payload, _constant, check_strides, check_view)

    # ---- memory

    def empty(self, shape: Sequence[int], dtype: str) -> Array:
        return np.empty(tuple(shape), storable(dtype))

    def zeros(self, spec: Spec) -> Array:
        return laid_out(spec, zero=True)

    def filled(self, like: Array, op: str) -> Array:
        value: Any = IDENTITY[op]
        if value in (float("inf"), float("-inf")) and like.dtype.kind not in "fc":
            kind = like.dtype
            ends = (False, True) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
            value = ends[value > 0]
        return np.full(like.shape, value, like.dtype)

    def clone(self, tensor: Array) -> Array:
        return np.array(tensor, order="C")

    def copy(self, dst: Array, src: Array) -> None:
        dst[...] = src

    def flat(self, tensor: Array, shape: Sequence[int]) -> Array:
        return tensor.reshape(tuple(shape))

    def packed(self, tensor: Array) -> Array:
        return tensor if tensor.flags.c_contiguous else np.array(tensor, order="C")

    def staging(self, shape: Sequence[int], dtype: str) -> Array:
        return self.empty(shape, dtype)

    def adopt(self, tensor: Array) -> Array:
        return tensor

    def view(self, tensor: Array) -> memoryview:
        return tensor.reshape(-1).view(np.uint8).data if tensor.size else memoryview(bytearray())

    def upload(self, buffer: Any, spec: Spec) -> Array:
        if len(buffer) != spec.nbytes:
            raise ValueError(f"{len(buffer)} bytes were sent for {spec.text()}, want {spec.nbytes}")
        data = np.asarray(buffer, np.uint8).view(dtype_of(spec.dtype)).reshape(spec.shape)
        return conform(data, spec) if spec.numel else self.zeros(spec)

    def combine(self, op: str, dtype: str) -> Combine:
        kind, reduce = DTYPE.get(dtype), COMBINE[op]
        if kind is None:
            return _nothing

        def run(dst: memoryview, src: memoryview) -> None:
            if len(dst):
                target = np.frombuffer(dst, kind)
                reduce(target, np.frombuffer(src, kind), out=target)

        return run

    def divide(self, tensor: Array, by: int) -> None:
        np.true_divide(tensor, by, out=tensor, casting="unsafe")

    # ---- what there is

    def spec(self, tensor: Array) -> Spec:
        steps = tuple(step // tensor.itemsize for step in tensor.strides)
        return Spec(tensor.shape, steps, offset(tensor), name_of(tensor.dtype))

    def dtype(self, tensor: Array) -> str:
        return name_of(tensor.dtype)

    def storage(self, tensor: Array) -> tuple[int, int]:
        memory = owner(tensor)
        return memory.ctypes.data, memory.nbytes

    def host_rates(self) -> list[float]:
        return []

    def lane(self) -> HostEngineLane:
        return HostEngineLane(self)

    def evicted(self, tensor: Array) -> None:
        return None

    def shared(self, tensor: Array) -> bool:
        return False

    def memory_of(self, tensor: Array) -> None:
        return None

    def in_memory(self, buffer: Any, spec: Spec) -> Array:
        raise AssertionError("no tensor of this engine has such a form")

    def peak(self) -> int:
        return 0

    def switch(self, switches: dict[str, Any]) -> None:
        if switches.get("threads"):
            blas.set_threads(int(switches["threads"]))

    def bound(self, nbytes: int) -> None:
        """It has no device with memory of its own: gt.worker.process.memory_budget bounds the process."""

    def clear(self) -> None:
        """Nothing to do: its ops hand out zeros where torch's hand out memory as it is."""

    def poisoned(self, error: BaseException) -> bool:
        return False


COMBINE: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "product": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "norm2": np.hypot,
}


def _nothing(dst: memoryview, src: memoryview) -> None:
    """Placeholders of dtypes that NumPy lacks hold nothing to be combined; their collectives take place."""


def _constant(const: Const) -> Any:
    """dtype: NumPy's; complex: Python's; others are names, and the device None."""
    if const.kind == "device":
        return None
    if const.kind == "complex":
        return complex(*const.value)
    return dtype_of(const.value) if const.kind == "dtype" else const.value
