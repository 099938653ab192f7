"""Random ops that a GPU draws by itself. They are the numbers that the host would draw. The kernels are philox_kernel.py.

The host draws other ops, and dtypes that the kernels lack (random.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gt.worker.engine import draws
from gt.worker.engine.philox import Words
from gt.worker.engine.torch.dtypes import NAME
from gt.worker.engine.torch.gpu import philox_kernel as kernel

SINGLE = frozenset({torch.float32, torch.float16, torch.bfloat16})


def uniform(key: kernel.PhiloxKey, words: Words, target: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    if low > high:
        raise ValueError(f"uniform expects from <= to, got {low} and {high}")
    drawn = kernel.uniform(key, words, target.shape, draws.DIGITS[NAME[target.dtype]])
    if (low, high) != (0.0, 1.0):
        first, last = np.float32(low), np.float32(high)
        drawn.mul_(float(last - first)).add_(float(first))
        drawn.masked_fill_(drawn >= float(last), float(first))
    return target.copy_(drawn)


def normal(key: kernel.PhiloxKey, words: Words, target: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    if std < 0:
        raise ValueError(f"normal expects std >= 0, got {std}")
    return target.copy_(kernel.normal(key, words, target.shape).mul_(std).add_(mean))


def bernoulli(key: kernel.PhiloxKey, words: Words, target: torch.Tensor, p: float = 0.5) -> torch.Tensor:
    if not 0 <= p <= 1:
        raise ValueError(f"bernoulli expects a probability in [0, 1], got {p}")
    return target.copy_(kernel.hits(key, words, target.shape, p))


def dropout(
    key: kernel.PhiloxKey, words: Words, x: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    return kernel.dropout(key, words, x, p)


# op -> (key, words, *its arguments), on a tensor of one of these dtypes
DRAW: dict[str, Callable[..., Any]] = {
    "aten.uniform_.default": uniform,
    "aten.normal_.default": normal,
    "aten.bernoulli_.float": bernoulli,
    "aten.native_dropout.default": dropout,
}


def draws_here(target: Any) -> bool:
    """True if kernels draw for this tensor."""
    return isinstance(target, torch.Tensor) and target.is_cuda and target.dtype in SINGLE
