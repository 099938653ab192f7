"""New tensors. Their dtype is at last what the client inferred; a dtype not given is torch's default for the value.

Where torch leaves memory as it is they are zeros: it may have been another session's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gt.worker.engine.numpy.arrays import FLOAT, INT, Array, number, rows

Size = Sequence[int]


def _empty(size: Size, *, dtype: np.dtype | None = None, **_: Any) -> Array:
    return np.zeros(size, dtype or FLOAT)


def _empty_strided(size: Size, stride: Size, *, dtype: np.dtype | None = None, **_: Any) -> Array:
    return np.zeros(size, dtype or FLOAT)


def _of(value: Any) -> Callable[..., Array]:
    def run(size: Size, *, dtype: np.dtype | None = None, **_: Any) -> Array:
        return np.full(size, value, dtype or FLOAT)

    return run


def _like(value: Any) -> Callable[..., Array]:
    def run(self: Array, *, dtype: np.dtype | None = None, **_: Any) -> Array:
        return np.full_like(self, value, dtype or self.dtype)

    return run


def _new(value: Any) -> Callable[..., Array]:
    def run(self: Array, size: Size, *, dtype: np.dtype | None = None, **_: Any) -> Array:
        return np.full(size, value, dtype or self.dtype)

    return run


def _full(size: Size, fill_value: Any, *, dtype: np.dtype | None = None, **_: Any) -> Array:
    return np.full(size, fill_value if dtype is None else number(dtype, fill_value), dtype)


def _full_like(self: Array, fill_value: Any, *, dtype: np.dtype | None = None, **_: Any) -> Array:
    return np.full_like(self, number(dtype or self.dtype, fill_value), dtype or self.dtype)


def _new_full(self: Array, size: Size, fill_value: Any, *, dtype: np.dtype | None = None, **_: Any) -> Array:
    return np.full(size, number(dtype or self.dtype, fill_value), dtype or self.dtype)


def _new_empty_strided(self: Array, size: Size, stride: Size, *, dtype: np.dtype | None = None, **_: Any) -> Array:
    return np.zeros(size, dtype or self.dtype)


def _scalar(s: Any, *, dtype: np.dtype | None = None, **_: Any) -> Array:
    return np.full((), number(dtype or FLOAT, s))


def _arange(start: Any, end: Any, step: Any = 1, *, dtype: np.dtype | None = None, **_: Any) -> Array:
    if dtype is None and float not in map(type, (start, end, step)):
        dtype = INT
    whole = [int(n) for n in (start, end, step)] if dtype is not None and dtype.kind in "iu" else [start, end, step]
    if dtype == INT:
        start, end, step = whole
    count = max(int(np.ceil((end - start) / step)), 0)
    start, _end, step = whole
    return (start + step * np.arange(count)).astype(dtype or FLOAT)


def _arange_to(end: Any, **kwargs: Any) -> Array:
    return _arange(0, end, **kwargs)


def _linspace(start: Any, end: Any, steps: int, *, dtype: np.dtype | None = None, **_: Any) -> Array:
    return np.linspace(start, end, steps).astype(dtype or FLOAT)


def _eye(n: int, m: int | None = None, *, dtype: np.dtype | None = None, **_: Any) -> Array:
    return np.eye(n, m, dtype=dtype or FLOAT)


def _triangle(indices: Callable[..., tuple[Array, Array]]) -> Callable[..., Array]:
    def run(row: int, col: int, offset: int = 0, *, dtype: np.dtype | None = None, **_: Any) -> Array:
        return np.stack(indices(row, offset, col)).astype(dtype or INT)

    return run


TABLE = rows({
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "zeros": _of(0),
    "ones": _of(1),
    "full": _full,
    "scalar_tensor": _scalar,
    "empty_like": _like(0),
    "zeros_like": _like(0),
    "ones_like": _like(1),
    "full_like": _full_like,
    "new_empty": _new(0),
    "new_zeros": _new(0),
    "new_ones": _new(1),
    "new_full": _new_full,
    "new_empty_strided": _new_empty_strided,
    "arange": _arange_to,
    "arange.start|start_step": _arange,
    "linspace": _linspace,
    "eye.default|m": _eye,
    "tril_indices": _triangle(np.tril_indices),
    "triu_indices": _triangle(np.triu_indices),
})  # fmt: skip
