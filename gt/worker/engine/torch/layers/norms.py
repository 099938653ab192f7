"""Norms on the CPU: with statistics in float32 for half precision, as the client infers them, and RMS norms as one op.

The CPU's kernels have statistics in half. RMS norms have a kernel on GPUs only. Here they are computed by the ops that torch's
CPU has for them, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

Tensor: TypeAlias = torch.Tensor
HALF = (torch.float16, torch.bfloat16)


def host(name: str, op: Callable) -> Callable:
    """A norm's op, or the one that differentiates it, for tensors of the CPU; any other op as it is."""
    if name in ("aten.native_layer_norm.default", "aten.native_batch_norm.default"):
        return _widened(op)
    if name == "aten.native_layer_norm_backward.default":
        return lambda grad, x, shape, mean, rstd, weight, *rest: op(
            grad, x, shape, *_as_kept((mean, rstd), x, weight), weight, *rest
        )
    if name == "aten.native_batch_norm_backward.default":
        return lambda grad, x, weight, mean, var, *saved_and_rest: op(
            grad, x, weight, mean, var, *_as_kept(saved_and_rest[:2], x, weight), *saved_and_rest[2:]
        )
    return RMS_NORMS.get(name, op)


def _widened(op: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        out, *saved = op(*args, **kwargs)
        return (out, *[s.float() if s.dtype in HALF else s for s in saved])

    return call


def _as_kept(saved: tuple, x: Tensor, weight: Tensor | None) -> list:
    """Statistics in the dtype that the CPU's forward had them in: that of the weight."""
    kept = x.dtype if weight is None else weight.dtype
    return [s.to(kept) if kept in HALF and s is not None else s for s in saved]


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """x * rstd * weight and rstd = 1 / sqrt(mean(x^2) + eps) over the last dims, of `shape`; half precision in float32."""
    wide = _wide(x)
    least = torch.finfo(wide.real.dtype).eps if eps is None else eps
    rstd = wide.pow(2).mean(_last(x, shape), keepdim=True).add_(least).rsqrt_()
    out = wide * rstd
    return (out if weight is None else out * weight).to(x.dtype), rstd


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and weight by the formulas, and in the order, of autograd for the ops of the forward."""
    grad, wide, dims = _wide(grad), _wide(x), _last(x, shape)
    of_weight = None
    if mask[1] and weight is not None:
        lead = list(range(x.dim() - len(shape)))
        product = grad * (wide * rstd)
        of_weight = (product.sum(lead) if lead else product).to(weight.dtype)
    if not mask[0]:
        return None, of_weight
    scaled = grad if weight is None else grad * weight
    # d rstd / d x = -rstd^3 x / n: the two terms of the product rule below are the direct one, and that by way of the mean
    # square.
    of_mean = (scaled * wide).sum(dims, keepdim=True) * -0.5 * rstd.pow(3)
    count = math.prod(shape)
    return (scaled * rstd + of_mean.expand_as(wide) / count * (wide * 2.0)).to(x.dtype), of_weight


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def _last(x: Tensor, shape: Sequence[int]) -> list[int]:
    return list(range(x.dim() - len(shape), x.dim()))


RMS_NORMS: dict[str, Callable[..., Any]] = {
    "aten._fused_rms_norm.default": _rms_norm,
    "aten._fused_rms_norm_backward.default": _rms_norm_backward,
}
