"""Memory for results: cleared where it may hold data of another session, and with any strides.

A switch has torch's allocator on the host clear all memory, so no old data reaches a tensor that a kernel leaves unwritten. The
allocator of a GPU has no such switch: there, ops that leave all of their result unwritten write zeros.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

# Ops whose result is memory as it is, and those that may make a tensor's memory longer
UNWRITTEN = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"),
        *("empty_quantized", "_empty_affine_quantized", "_empty_per_channel_affine_quantized"),
    }
)
LONGER = frozenset({"resize_", "resize_as_", "_resize_output_"})
_SWITCH = "FLAGS_caffe2_cpu_allocator_do_zero_fill"


@cache
def switch() -> Any:
    """The allocator's switch that has it clear memory, a bool of C; None where this torch has none."""
    try:
        return ctypes.c_bool.in_dll(ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so")), _SWITCH)
    except (OSError, ValueError):
        return None


def cleared(base: str, op: Callable) -> Callable:
    """An op by the name of its packet, so that memory that it leaves unwritten is zero; any other op unchanged."""
    if base in UNWRITTEN:
        return lambda *args, **kwargs: _zeros(op(*args, **kwargs))
    return _longer(op) if base in LONGER else op


def _zeros(out: torch.Tensor) -> torch.Tensor:
    if span(out.shape, out.stride()) == out.numel():
        return out.zero_()
    return laid_out(out.shape, out.stride(), out.dtype, out.device).zero_()


def _longer(op: Callable) -> Callable:
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        before = tensor.untyped_storage().nbytes()
        out = op(tensor, *args, **kwargs)
        storage = out.untyped_storage()
        more = storage.nbytes() - before
        if more > 0:
            torch.empty(0, dtype=torch.uint8, device=out.device).set_(storage, before, (more,), (1,)).zero_()
        return out

    return call


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last, those between them too."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if all(shape) else 0


def laid_out(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialized tensor with these strides. Gaps between its elements are zero, since nothing writes there."""
    length = span(shape, stride)
    if length == torch.Size(shape).numel():
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return torch.zeros(length, dtype=dtype, device=device).as_strided(shape, stride)
