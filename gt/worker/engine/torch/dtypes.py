"""Names of torch's dtypes, and checks of outputs against the client's shape inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gt.ir.spec import DTYPES, Spec
from gt.worker.engine.torch.memory import laid_out

DTYPE: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
# kind of a constant -> torch's objects by name
CONSTANTS: dict[str, dict[str, Any]] = {
    "dtype": DTYPE,
    "layout": {"strided": torch.strided},
    "memory_format": {
        "contiguous_format": torch.contiguous_format,
        "preserve_format": torch.preserve_format,
        "channels_last": torch.channels_last,
        "channels_last_3d": torch.channels_last_3d,
    },
}
NAME = {dtype: name for name, dtype in DTYPE.items()}
UNLESS = "{out}.stride() != {stride}"  # codegen.Source.unless of `check_strides`


def conform(out: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The output with the strides that the client inferred, on which later views rely; ValueError for another shape."""
    if tuple(out.shape) != spec.shape or out.dtype != DTYPE[spec.dtype]:
        raise ValueError(f"the result is {NAME[out.dtype]}{list(out.shape)}, want {spec.text()}")
    # The stride of a dim of one element is never used, so it may differ.
    if all(size < 2 or a == b for size, a, b in zip(spec.shape, out.stride(), spec.stride, strict=True)) or not spec.numel:
        return out
    if any(size > 1 and step == 0 for size, step in zip(spec.shape, spec.stride, strict=True)):
        return out  # no memory of its own to lay out
    return laid_out(spec.shape, spec.stride, out.dtype, out.device).copy_(out)


def check_strides(scope: dict[str, Any], stride: str, spec: Spec) -> Callable[[torch.Tensor], torch.Tensor]:
    """A check that conforms an output. It stores under the name `stride` the strides that need no second check."""
    scope[stride] = None

    def check(out: torch.Tensor) -> torch.Tensor:
        result = conform(out, spec)
        if result is out:
            scope[stride] = out.stride()
        return result

    return check


def check_view(scope: dict[str, Any], shape: str, spec: Spec) -> Callable[[torch.Tensor], None]:
    """A check of a view's shape and dtype; its strides follow from its base. It stores the checked shape under this name."""
    scope[shape] = None

    def check(out: torch.Tensor) -> None:
        if tuple(out.shape) != spec.shape or out.dtype != DTYPE[spec.dtype]:
            raise ValueError(f"the result is {NAME[out.dtype]}{list(out.shape)}, want {spec.text()}")
        scope[shape] = out.shape

    return check
