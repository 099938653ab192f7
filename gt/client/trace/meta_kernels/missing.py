"""Meta kernels that torch lacks, of ops whose shapes depend on no value: without one, each call would wait for a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _as_first(x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """Shape and strides of the first operand."""
    return torch.empty_like(x)


def _with_mask(x: torch.Tensor, *rest: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantised values, and a mask of those within the range, which the backward pass needs."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _learned_backward(grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, *rest: Any) -> tuple:
    """Gradients of the values, the scales and the zero points."""
    return torch.empty_like(x), torch.empty_like(scale), torch.empty_like(zero_point)


def _contiguous_as(place: int) -> Callable[..., torch.Tensor]:
    """A meta kernel whose result has the shape of operand `place`, and is contiguous."""
    return lambda *args, **named: torch.empty_like(args[place], memory_format=torch.contiguous_format)


# These kernels check their operands, which the rows here do not: refusals.py tries a new kind of call on the CPU
CHECKED_BY_THE_CPU = frozenset({
    "_fake_quantize_learnable_per_channel_affine", "_fake_quantize_learnable_per_tensor_affine",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", "fake_quantize_per_channel_affine_cachemask",
    "fake_quantize_per_tensor_affine_cachemask", "_logcumsumexp",
})  # fmt: skip
MISSING: dict[str, Callable] = {
    "aten._fake_quantize_learnable_per_channel_affine.default": _as_first,
    "aten._fake_quantize_learnable_per_tensor_affine.default": _as_first,
    "aten._fake_quantize_learnable_per_channel_affine_backward.default": _learned_backward,
    "aten._fake_quantize_learnable_per_tensor_affine_backward.default": _learned_backward,
    "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default": _with_mask,
    "aten.fake_quantize_per_channel_affine_cachemask.default": _with_mask,
    "aten.fake_quantize_per_tensor_affine_cachemask.default": _with_mask,
    "aten._dirichlet_grad.default": _contiguous_as(0),
    "aten._standard_gamma_grad.default": _contiguous_as(0),
    "aten._logcumsumexp.default": _contiguous_as(0),
    "aten.multi_margin_loss_backward.default": _contiguous_as(1),
    "aten.multilabel_margin_loss_backward.default": _contiguous_as(1),
}
