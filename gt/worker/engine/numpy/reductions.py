"""Reductions and scans: one row each. Sums of floats are taken in float64, so their order does not matter to the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gt.worker.engine.numpy.arrays import BOOL, DOUBLE, INT, Array, axis_of, fractions, inexact, rows, sample, wide

Dims = Sequence[int] | int | None
_WIDER = {"f": DOUBLE, "c": np.dtype("complex128"), "i": INT, "u": INT, "b": INT}


def axes(x: Array, dim: Dims) -> tuple[int, ...]:
    """The dims of a reduction as NumPy's axes; none given is all."""
    if x.ndim == 0:
        return ()
    if dim is None or dim == []:
        return tuple(range(x.ndim))
    return tuple(axis_of(d, x) for d in ([dim] if isinstance(dim, int) else dim))


def total(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """The sum in the widest dtype of its kind."""
    return np.add.reduce(x, axes(x, dim), dtype=_WIDER[x.dtype.kind], keepdims=keepdim)


def count(x: Array, dim: Dims) -> int:
    """Elements that one result is made of."""
    return int(np.prod([x.shape[axis] for axis in axes(x, dim)], dtype=np.int64))


def _typed(x: Array, dtype: np.dtype | None) -> Array:
    return x if dtype is None else x.astype(dtype, copy=False)


def _sum(self: Array, dim: Dims = None, keepdim: bool = False, *, dtype: np.dtype | None = None) -> Array:
    return total(_typed(self, dtype), dim, keepdim)


def _mean(self: Array, dim: Dims = None, keepdim: bool = False, *, dtype: np.dtype | None = None) -> Array:
    x = _typed(self, dtype)
    return total(x, dim, keepdim) / np.float64(count(x, dim))


def _prod(self: Array, dim: Dims = None, keepdim: bool = False, *, dtype: np.dtype | None = None) -> Array:
    x = _typed(self, dtype)
    return np.multiply.reduce(x, axes(x, dim), dtype=_WIDER[x.dtype.kind], keepdims=keepdim)


def _variance(self: Array, dim: Dims, correction: Any, keepdim: bool) -> tuple[Array, Array]:
    """(variance, mean), in the widest dtype; a correction of None is Bessel's 1."""
    mean = _mean(self, dim, True)
    off = np.abs(self - mean)
    # Degrees of freedom. Below 0 they count as 0, and the division gives inf or nan, as torch's does.
    left = np.float64(max(count(self, dim) - (1 if correction is None else correction), 0))
    mean = mean if keepdim else mean.reshape([n for at, n in enumerate(mean.shape) if at not in axes(self, dim)])
    return total(off * off, dim, keepdim) / left, mean


def _var(self: Array, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Array:
    return _variance(self, dim, correction, keepdim)[0]


def _std(self: Array, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Array:
    return np.sqrt(_variance(self, dim, correction, keepdim)[0])


def _var_mean(self: Array, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Array, Array]:
    return _variance(self, dim, correction, keepdim)


def _std_mean(self: Array, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Array, Array]:
    variance, mean = _variance(self, dim, correction, keepdim)
    return np.sqrt(variance), mean


def _extreme(f: np.ufunc) -> Callable[..., Array]:
    def run(self: Array, dim: Dims = None, keepdim: bool = False) -> Array:
        return f.reduce(self, axes(self, dim), keepdims=keepdim)

    return run


def _truth(f: np.ufunc) -> Callable[..., Array]:
    def run(self: Array, dim: Dims = None, keepdim: bool = False) -> Array:
        return f.reduce(self, axes(self, dim), dtype=BOOL, keepdims=keepdim)

    return run


def _extreme_at(pick: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    """max.dim: (values, indices)."""

    def run(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
        x, axis = sample(self), axis_of(dim, self)
        at = pick(x, axis, keepdims=True)
        values = np.take_along_axis(x, at, axis)
        if keepdim and self.ndim:
            return values, at
        return values.squeeze(axis), at.squeeze(axis)

    return run


def _place(pick: Callable[..., Array]) -> Callable[..., Array]:
    def run(self: Array, dim: int | None = None, keepdim: bool = False) -> Array:
        if dim is None:
            at = np.asarray(pick(self))
            return at.reshape((1,) * self.ndim) if keepdim else at
        return pick(sample(self), axis_of(dim, self), keepdims=keepdim and self.ndim > 0)

    return run


def _scan(f: np.ufunc) -> Callable[..., Array]:
    def run(self: Array, dim: int, *, dtype: np.dtype | None = None) -> Array:
        x = _typed(self, dtype)
        return f.accumulate(sample(x), axis_of(dim, x), dtype=_WIDER[x.dtype.kind]).reshape(x.shape)

    return run


def vector_norm(self: Array, ord: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: np.dtype | None = None) -> Array:
    size = np.abs(_typed(self, dtype)).astype(DOUBLE)
    return NORMS[ord](size, axes(self, dim), keepdim) if ord in NORMS else _power_norm(size, axes(self, dim), keepdim, ord)


def _power_norm(size: Array, dims: tuple[int, ...], keepdim: bool, ord: Any) -> Array:
    return np.add.reduce(size**ord, dims, keepdims=keepdim) ** (1 / ord)


NORMS: dict[Any, Callable[[Array, tuple[int, ...], bool], Array]] = {
    2: lambda x, dims, keep: np.sqrt(np.add.reduce(x * x, dims, keepdims=keep)),
    1: lambda x, dims, keep: np.add.reduce(x, dims, keepdims=keep),
    0: lambda x, dims, keep: np.add.reduce(x != 0, dims, dtype=DOUBLE, keepdims=keep),
    float("inf"): lambda x, dims, keep: np.maximum.reduce(x, dims, keepdims=keep),
    float("-inf"): lambda x, dims, keep: np.minimum.reduce(x, dims, keepdims=keep),
}


def _norm(self: Array, p: Any = 2, dim: Dims = None, keepdim: bool = False) -> Array:
    return vector_norm(self, 2 if p is None else p, dim, keepdim)


def _logsumexp(self: Array, dim: Dims, keepdim: bool = False) -> Array:
    (x,) = fractions(self)
    dims = axes(x, dim)
    top = np.maximum.reduce(x, dims, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0).astype(x.dtype)
    found = np.log(total(np.exp(x - top), dim, True)) + top
    return found if keepdim else found.reshape([n for at, n in enumerate(x.shape) if at not in dims])


def _logcumsumexp(self: Array, dim: int) -> Array:
    return np.logaddexp.accumulate(self.astype(DOUBLE), axis_of(dim, self)) if self.ndim else self.copy()


def _count_nonzero(self: Array, dim: Dims = None) -> Array:
    return total(self != 0, dim)


def _nansum(self: Array, dim: Dims = None, keepdim: bool = False, *, dtype: np.dtype | None = None) -> Array:
    return total(np.nan_to_num(_typed(self, dtype), nan=0.0, posinf=np.inf, neginf=-np.inf), dim, keepdim)


def _aminmax(self: Array, *, dim: int | None = None, keepdim: bool = False) -> tuple[Array, Array]:
    return _extreme(np.minimum)(self, dim, keepdim), _extreme(np.maximum)(self, dim, keepdim)


def _bincount(self: Array, weights: Array | None = None, minlength: int = 0) -> Array:
    found = np.bincount(self, weights, minlength)
    return found if weights is None else found.astype(inexact(weights.dtype) if weights.dtype.kind == "f" else DOUBLE)


def half_as_single(f: Callable[..., Any]) -> Callable[..., Any]:
    """f of half precision's values in float32; the result is rounded where it has to be."""

    def run(self: Array, *args: Any, **kwargs: Any) -> Any:
        return f(self.astype(wide(self.dtype), copy=False), *args, **kwargs)

    return run


_TABLE: dict[str, Callable[..., Any]] = {
    "sum.default|dim_IntList": _sum,
    "mean.default|dim": _mean,
    "prod.default|dim_int": _prod,
    "nansum": _nansum,
    "var.correction": _var,
    "std.correction": _std,
    "var_mean.correction": _var_mean,
    "std_mean.correction": _std_mean,
    "amax": _extreme(np.maximum),
    "amin": _extreme(np.minimum),
    "aminmax": _aminmax,
    "max": _extreme(np.maximum),
    "min": _extreme(np.minimum),
    "max.dim": _extreme_at(np.argmax),
    "min.dim": _extreme_at(np.argmin),
    "argmax": _place(np.argmax),
    "argmin": _place(np.argmin),
    "any.default|dim|dims": _truth(np.logical_or),
    "all.default|dim|dims": _truth(np.logical_and),
    "cumsum": _scan(np.add),
    "cumprod": _scan(np.multiply),
    "logcumsumexp": _logcumsumexp,
    "logsumexp": _logsumexp,
    "linalg_vector_norm": vector_norm,
    "norm.Scalar|ScalarOpt_dim": _norm,
    "count_nonzero.default|dim_IntList": _count_nonzero,
    "bincount": _bincount,
}
TABLE = rows({name: half_as_single(run) for name, run in _TABLE.items()})
