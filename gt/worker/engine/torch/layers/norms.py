"""Norms in half precision with statistics in float32, as the client infers them. The CPU's kernels have them in half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
    return op


def _widened(op: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        out, *saved = op(*args, **kwargs)
        return (out, *[s.float() if s.dtype in HALF else s for s in saved])

    return call


def _as_kept(saved: tuple, x: torch.Tensor, weight: torch.Tensor | None) -> list:
    """Statistics in the dtype that the CPU's forward had them in: that of the weight."""
    kept = x.dtype if weight is None else weight.dtype
    return [s.to(kept) if kept in HALF and s is not None else s for s in saved]
