"""Gathering and scattering, sorting, and ops whose output's shape depends on values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gt.errors import UnsupportedOp
from gt.worker.engine.numpy.arrays import BOOL, Array, axis_of, number, rows, sample, write
from gt.worker.engine.numpy.layers import sums_by_row, within

# ---- by index tensors


def _key(indices: Sequence[Array | None]) -> tuple:
    """NumPy's index; uint8 tensors are masks to torch."""
    return tuple(slice(None) if i is None else i.astype(BOOL) if i.dtype == np.uint8 else i for i in indices)


def _index(self: Array, indices: Sequence[Array | None]) -> Array:
    key = (*_key(indices), ...)
    result = self[key]
    return result.copy() if np.may_share_memory(result, self) else result


def _index_put_(self: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    key = _key(indices)
    if not accumulate:
        self[key] = values
    elif len(key) == 1 and key[0].dtype != BOOL and self.ndim > 1 and values.shape == key[0].shape + self.shape[1:]:
        places = within(np.where(key[0] < 0, key[0] + len(self), key[0]), len(self), "index_put_")
        sums_by_row(self, places.reshape(-1), values.reshape(-1, *self.shape[1:]).astype(self.dtype))
    else:
        np.add.at(self, key, values.astype(self.dtype))
    return self


def _along(self: Array, dim: int, index: Array, what: str) -> tuple[Array, Array, int]:
    """The part of self that an index of this shape reaches, the index, the axis."""
    x, i, axis = sample(self), sample(index), axis_of(dim, self)
    # torch allows an index that is smaller than the tensor in the other dims: only that corner is used.
    cut = tuple(slice(None) if d == axis else slice(n) for d, n in enumerate(i.shape))
    return x[cut], within(i, x.shape[axis], what), axis


def _gather(self: Array, dim: int, index: Array, *, sparse_grad: bool = False) -> Array:
    if not index.size:
        return np.empty(index.shape, self.dtype)
    x, i, axis = _along(self, dim, index, "gather")
    return np.take_along_axis(x, i, axis).reshape(index.shape)


def _places(i: Array, axis: int) -> tuple:
    grid = list(np.ogrid[tuple(slice(n) for n in i.shape)])
    grid[axis] = i
    return tuple(grid)


def _source(src: Any, i: Array) -> Any:
    """The part of a scatter's source that is used; a number is its own."""
    return sample(src)[tuple(slice(n) for n in i.shape)] if isinstance(src, np.ndarray) else src


REDUCE: dict[str, np.ufunc] = {
    "sum": np.add, "add": np.add, "prod": np.multiply, "multiply": np.multiply, "amax": np.maximum, "amin": np.minimum,
}  # fmt: skip


def _scatter_(self: Array, dim: int, index: Array, src: Any, *, reduce: str | None = None) -> Array:
    if not index.size:
        return self
    x, i, axis = _along(self, dim, index, "scatter")
    values = _source(src, i)
    if reduce is None:
        np.put_along_axis(x, i, values, axis)
    else:
        REDUCE[reduce].at(x, _places(i, axis), np.asarray(values).astype(x.dtype))
    return self


def _scatter_add_(self: Array, dim: int, index: Array, src: Array) -> Array:
    return _scatter_(self, dim, index, src, reduce="add")


def _scatter_reduce_(self: Array, dim: int, index: Array, src: Array, reduce: str, *, include_self: bool = True) -> Array:
    if reduce not in REDUCE or not include_self:
        raise UnsupportedOp(f"the numpy engine lacks aten.scatter_reduce with {reduce=} and {include_self=}")
    return _scatter_(self, dim, index, src, reduce=reduce)


def _at(dim: int, x: Array, index: Any) -> tuple:
    return (*(slice(None),) * axis_of(dim, x), index)


def _index_select(self: Array, dim: int, index: Array) -> Array:
    x, i = sample(self), within(sample(index), sample(self).shape[axis_of(dim, self)], "index_select")
    found = np.take(x, i, axis_of(dim, self))
    return found if self.ndim else found.reshape(())


def _index_add_(self: Array, dim: int, index: Array, source: Array, *, alpha: Any = 1) -> Array:
    x, axis = sample(self), axis_of(dim, self)
    i = within(sample(index), x.shape[axis], "index_add")
    scaled = (source if alpha == 1 else source * number(self.dtype, alpha)).astype(self.dtype, copy=False)
    sums_by_row(np.moveaxis(x, axis, 0), i, np.moveaxis(sample(scaled), axis, 0))
    return self


def _index_copy_(self: Array, dim: int, index: Array, source: Array) -> Array:
    x = sample(self)
    x[_at(dim, self, within(sample(index), x.shape[axis_of(dim, self)], "index_copy"))] = source
    return self


def _index_fill_(self: Array, dim: int, index: Array, value: Any) -> Array:
    sample(self)[_at(dim, self, sample(index))] = value
    return self


def _take(self: Array, index: Array) -> Array:
    return self.reshape(-1)[index]


# ---- by masks


def _masked_fill_(self: Array, mask: Array, value: Any) -> Array:
    np.copyto(self, np.asarray(value).astype(self.dtype), where=mask.astype(BOOL, copy=False))
    return self


def _masked_fill(self: Array, mask: Array, value: Any) -> Array:
    return np.where(mask != 0, np.asarray(value).astype(self.dtype), self)


def _masked_select(self: Array, mask: Array) -> Array:
    x, m = np.broadcast_arrays(self, mask)
    return x[m != 0]


def _masked_scatter_(self: Array, mask: Array, source: Array) -> Array:
    m = np.broadcast_to(mask != 0, self.shape)
    need = int(m.sum())
    if need > source.size:
        raise ValueError(f"masked_scatter: the mask has {need} ones, the source {source.size} elements")
    self[m] = source.reshape(-1)[:need]
    return self


def _masked_scatter(self: Array, mask: Array, source: Array) -> Array:
    return _masked_scatter_(np.broadcast_to(self, np.broadcast_shapes(self.shape, mask.shape)).copy(), mask, source)


def _nonzero(self: Array) -> Array:
    return np.argwhere(self)


def _nonzero_static(self: Array, *, size: int, fill_value: int = -1) -> Array:
    rows = np.argwhere(self)[:size]
    return np.concatenate([rows, np.full((size - len(rows), self.ndim), fill_value, rows.dtype)])


# ---- order


def _order(x: Array, axis: int, descending: bool) -> Array:
    """Indices of a stable sort; NaN counts as the largest."""
    if not descending:
        return np.argsort(x, axis, kind="stable")
    back = np.argsort(np.flip(x, axis), axis, kind="stable")
    return np.flip(x.shape[axis] - 1 - back, axis)


def _sort(self: Array, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> tuple[Array, Array]:
    x, axis = sample(self), axis_of(dim, self)
    order = _order(x, axis, descending)
    return np.take_along_axis(x, order, axis).reshape(self.shape), order.reshape(self.shape)


def _sort_stable(self: Array, *, stable: bool | None, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    return _sort(self, dim, descending)


def _topk(self: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Array, Array]:
    values, order = _sort(self, dim, largest)
    if not self.ndim:
        return values, order
    cut = _at(dim, self, slice(k))
    return values[cut], order[cut]


def _unique2(
    self: Array, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Array, Array, Array]:
    values, inverse, counts = np.unique(self, return_inverse=True, return_counts=True)
    none = np.empty(0, np.int64)
    return values, inverse.reshape(self.shape) if return_inverse else none, counts if return_counts else none


def _repeat_interleave(repeats: Array, *, output_size: int | None = None) -> Array:
    if output_size is not None and repeats.sum() != output_size:
        raise ValueError(f"repeats add up to {repeats.sum()}, want output_size, which is {output_size}")
    return np.repeat(np.arange(len(repeats)), repeats)


def _searchsorted(
    sorted_sequence: Array, self: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: Array | None = None,
) -> Array:  # fmt: skip
    """1-D sequences only."""
    if sorted_sequence.ndim != 1:
        raise UnsupportedOp("the numpy engine lacks aten.searchsorted in sequences of more than one dim")
    found = np.searchsorted(sorted_sequence, self, side or ("right" if right else "left"), sorter)
    return np.asarray(found).astype(np.int32 if out_int32 else np.int64)


def _bucketize(self: Any, boundaries: Array, *, out_int32: bool = False, right: bool = False) -> Array:
    return _searchsorted(boundaries, self, out_int32=out_int32, right=right)


def fill_(self: Array, value: Any) -> Array:
    return write(self, value)


Function = Callable[..., Any]
TABLE: dict[str, Function] = rows({
    "index.Tensor": _index,
    "_unsafe_index.Tensor": _index,
    "index_put_": _index_put_,
    "gather": _gather,
    "scatter_.src|value": _scatter_,
    "scatter_.reduce|value_reduce": _scatter_,
    "scatter_add_": _scatter_add_,
    "scatter_reduce_.two": _scatter_reduce_,
    "index_select": _index_select,
    "index_add_": _index_add_,
    "index_copy_": _index_copy_,
    "index_fill_.int_Scalar|int_Tensor": _index_fill_,
    "take": _take,
    "masked_fill_.Scalar|Tensor": _masked_fill_,
    "masked_fill.Scalar|Tensor": _masked_fill,
    "masked_scatter": _masked_scatter,
    "masked_select": _masked_select,
    "masked_scatter_": _masked_scatter_,
    "nonzero": _nonzero,
    "nonzero_static": _nonzero_static,
    "sort": _sort,
    "sort.stable": _sort_stable,
    "topk": _topk,
    "_unique2": _unique2,
    "repeat_interleave.Tensor": _repeat_interleave,
    "searchsorted.Tensor|Scalar": _searchsorted,
    "bucketize.Tensor|Scalar": _bucketize,
    "fill_.Scalar|Tensor": fill_,
    "zero_": lambda self: write(self, 0),
})  # fmt: skip
