"""Matrix products, by whatever BLAS NumPy has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gt.worker.engine.numpy.arrays import DOUBLE, INT, Array, cast, promoted, rows, wide


def matmul(a: Array, b: Array) -> Array:
    """a @ b; integers and half precision in wider numbers, which the caller rounds."""
    if a.dtype == b.dtype and a.dtype.kind in "fc":
        kind = wide(a.dtype)
        return np.matmul(a.astype(kind, copy=False), b.astype(kind, copy=False))
    return np.matmul(*cast(INT if promoted(a, b).kind in "iub" else promoted(a, b), a, b))


def _sized(dims: int, name: str) -> Callable[[Array, Array], Array]:
    """A product of operands of so many dims, whose errors read as torch's."""

    def run(self: Array, other: Array) -> Array:
        if self.shape[-1] != other.shape[dims - 2 if dims > 1 else 0]:
            shapes = f"{'x'.join(map(str, self.shape))} and {'x'.join(map(str, other.shape))}"
            raise ValueError(f"{name}: mat1 and mat2 shapes cannot be multiplied ({shapes})")
        return matmul(self, other)

    return run


def _plus(product: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """beta * self + alpha * product; a beta of 0 leaves self out, NaNs too."""

    def run(self: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
        result = product(a, b)
        if alpha != 1:
            result = result * result.dtype.type(alpha)
        if beta == 0:
            return result
        start = self.astype(result.dtype, copy=False)
        result += start if beta == 1 else start * result.dtype.type(beta)
        return result

    return run


def _baddbmm_sum(batch1: Array, batch2: Array) -> Array:
    return np.add.reduce(matmul(batch1, batch2), 0, dtype=DOUBLE if batch1.dtype.kind == "f" else None)


def _outer(vec1: Array, vec2: Array) -> Array:
    return np.outer(vec1, vec2)


def _addmm_activation(self: Array, mat1: Array, mat2: Array, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False) -> Array:
    from gt.worker.engine.numpy.activations import TABLE as activations

    return activations["gelu.default" if use_gelu else "relu.default"](_ADDMM(self, mat1, mat2, beta=beta, alpha=alpha))


_MM, _ADDMM = _sized(2, "mm"), _plus(_sized(2, "addmm"))
TABLE = rows({
    "mm": _MM,
    "bmm": _sized(3, "bmm"),
    "mv": _sized(1, "mv"),
    "dot": _sized(1, "dot"),
    "vdot": lambda self, other: matmul(self.conj(), other),
    "addmm": _ADDMM,
    "baddbmm": _plus(_sized(3, "baddbmm")),
    "addmv": _plus(_sized(1, "addmv")),
    "addbmm": _plus(_baddbmm_sum),
    "addr": _plus(_outer),
    "_addmm_activation": _addmm_activation,
})  # fmt: skip
