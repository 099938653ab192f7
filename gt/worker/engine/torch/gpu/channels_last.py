"""Convolutions of a segment in the memory layout that a GPU's kernels are fastest in, channels last.

While a segment is traced its convolutions get channels-last operands, and results computed from them keep that layout. They get
the strides that the client inferred only where a view relies on them, and where the segment ends. Inductor folds the copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gt.ir.spec import Spec
from gt.worker.engine.torch.dtypes import conform

aten = torch.ops.aten
# op -> places of the operands that have channels
OPERANDS = {aten.convolution.default: (0, 1), aten.convolution_backward.default: (0, 1, 2)}
NAMES = frozenset({"aten.convolution.default", "aten.convolution_backward.default"})
MIN_CHANNELS = 64  # the layout gains nothing unless a side has more


def gains(kernels: Sequence[tuple[torch.Size, int, torch.dtype]]) -> bool:
    """True if convolutions with these weights (shape, groups, dtype) are faster channels last.

    The rule is that of Inductor's layout optimization: 2-D, not grouped with several channels a group, some of them large.
    """
    flat = all(len(shape) == 4 and dtype.is_floating_point for shape, _, dtype in kernels)
    grouped = any(groups > 1 and shape[1] > 1 for shape, groups, _ in kernels)
    return bool(kernels) and flat and not grouped and any(max(shape[:2]) > MIN_CHANNELS for shape, _, _ in kernels)


class ChannelsLast(TorchDispatchMode):
    """Gives convolutions channels-last operands."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        places = OPERANDS.get(func, ())
        return func(*(_last(arg) if n in places else arg for n, arg in enumerate(args)), **(kwargs or {}))


def _last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    return aten.clone.default(tensor, memory_format=torch.channels_last)


def check_but_strides(scope: dict[str, Any], stride: str, spec: Spec) -> Any:
    """The check of an op's result within such a segment: its shape and dtype, not its strides."""

    def check(out: torch.Tensor) -> torch.Tensor:
        conform(out, Spec(spec.shape, tuple(out.stride()), spec.offset, spec.dtype))
        return out

    return check


def restore_strides(slots: list[torch.Tensor], places: Sequence[int], specs: Sequence[Spec | None]) -> None:
    """Replace tensors by such with the strides that the client inferred."""
    for n in places:
        spec = specs[n]
        if spec is not None:
            slots[n] = conform(slots[n], spec)
