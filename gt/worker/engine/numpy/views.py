"""Views with torch's aliasing, and ops that copy a tensor into another order or shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gt.worker.engine.numpy.arrays import Array, axis_of, dtype_of, offset, owner, promoted, rows, strided, write

# ---- views


def as_strided(self: Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Array:
    start = offset(self) if storage_offset is None else storage_offset
    return strided(owner(self), size, stride, start, self.dtype)


def view(self: Array, size: Sequence[int]) -> Array:
    """ValueError where only a copy could have that shape."""
    result = self.reshape(size)
    if result.size and owner(result) is not owner(self):
        raise ValueError(f"view: strides {self.strides} of shape {self.shape} do not allow shape {tuple(size)}")
    return result


def expand(self: Array, size: Sequence[int], *, implicit: bool = False) -> Array:
    lead = len(size) - self.ndim
    shape = [self.shape[d - lead] if n == -1 else n for d, n in enumerate(size)]
    # A new or stretched dim has stride 0: all its elements are one.
    steps = [0] * lead + [step if n == shape[lead + d] else 0 for d, (n, step) in enumerate(zip(self.shape, self.strides))]
    if any(n not in (1, m) for n, m in zip(self.shape, shape[lead:])):
        raise ValueError(f"expand: shape {self.shape} does not expand to {tuple(size)}")
    return _part(self, shape, steps, 0)


def _part(x: Array, shape: Sequence[int], steps: Sequence[int], start: int) -> Array:
    """Memory of x, steps and start (after that of x) in bytes."""
    size = x.itemsize
    return strided(owner(x), shape, [step // size for step in steps], offset(x) + start // size, x.dtype)


def _t(self: Array) -> Array:
    return self.T


def _transpose(self: Array, dim0: int, dim1: int) -> Array:
    return self.swapaxes(dim0, dim1) if self.ndim else self[...]


def _permute(self: Array, dims: Sequence[int]) -> Array:
    return self.transpose([d % max(self.ndim, 1) for d in dims])


def _slice(self: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    return self[(slice(None),) * axis_of(dim, self) + (slice(start, end, step), ...)]


def _select(self: Array, dim: int, index: int) -> Array:
    return self[(slice(None),) * axis_of(dim, self) + (index, ...)]


def _split(self: Array, split_size: int, dim: int = 0) -> list[Array]:
    length = self.shape[axis_of(dim, self)]
    cuts = range(0, max(length, 1), split_size) if split_size else [0]
    return [_slice(self, dim, start, start + split_size) for start in cuts]


def _split_with_sizes(self: Array, split_sizes: Sequence[int], dim: int = 0) -> list[Array]:
    ends = np.cumsum(split_sizes).tolist()
    return [_slice(self, dim, end - n, end) for end, n in zip(ends, split_sizes)]


def _unbind(self: Array, dim: int = 0) -> list[Array]:
    return [_select(self, dim, i) for i in range(self.shape[axis_of(dim, self)])]


def _squeeze(self: Array, dim: Any = None) -> Array:
    dims = range(self.ndim) if dim is None else [axis_of(d, self) for d in ([dim] if isinstance(dim, int) else dim)]
    return self.reshape(self.shape) if self.ndim == 0 else self.squeeze(tuple(d for d in dims if self.shape[d] == 1))


def _unsqueeze(self: Array, dim: int) -> Array:
    return np.expand_dims(self, dim)


def _diagonal(self: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    axis1, axis2 = axis_of(dim1, self), axis_of(dim2, self)
    rows, columns = self.shape[axis1] + min(offset, 0), self.shape[axis2] - max(offset, 0)
    rest = [axis for axis in range(self.ndim) if axis not in (axis1, axis2)]
    # A step along the diagonal goes along both axes at once: its stride is the sum of theirs.
    start = self.strides[axis2] * offset if offset > 0 else -self.strides[axis1] * offset
    shape = [*(self.shape[axis] for axis in rest), max(min(rows, columns), 0)]
    return _part(self, shape, [*(self.strides[axis] for axis in rest), self.strides[axis1] + self.strides[axis2]], start)


def _unfold(self: Array, dimension: int, size: int, step: int) -> Array:
    if not self.ndim:
        return _part(self, [size], [self.itemsize], 0)
    x, axis = self, axis_of(dimension, self)
    shape, steps = [*x.shape, size], [*x.strides, x.strides[axis]]
    shape[axis], steps[axis] = (x.shape[axis] - size) // step + 1, x.strides[axis] * step
    return _part(x, shape, steps, 0)


def _view_dtype(self: Array, dtype: np.dtype) -> Array:
    return self.view(dtype)


def _as_real(self: Array) -> Array:
    part = self.real
    return _part(part, (*self.shape, 2), (*self.strides, part.itemsize), 0)


def _as_complex(self: Array) -> Array:
    kind = np.dtype(f"c{2 * self.itemsize}") if self.itemsize > 2 else dtype_of("complex32")
    steps = [step // kind.itemsize for step in self.strides[:-1]]
    return strided(owner(self), self.shape[:-1], steps, offset(self) // 2, kind)


# ---- copies


def cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    kept = [x for x in tensors if x.shape != (0,)] or tensors[:1]  # torch takes an empty 1-D tensor among any shapes
    return np.concatenate(kept, axis_of(dim, kept[0]), dtype=promoted(*tensors))


def _stack(tensors: Sequence[Array], dim: int = 0) -> Array:
    return np.stack(tensors, dim, dtype=promoted(*tensors))


def _repeat(self: Array, repeats: Sequence[int]) -> Array:
    return np.tile(self, repeats)


def _roll(self: Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> Array:
    return np.roll(self, tuple(shifts), tuple(dims)) if len(dims) else np.roll(self, shifts[0])


def _pad(self: Array, pad: Sequence[int], value: Any = 0) -> Array:
    """pad: (before, after) of the last dim, then of the one before it, and so on; below 0 it cuts."""
    edges = [(0, 0)] * (self.ndim - len(pad) // 2) + list(zip(pad[-2::-2], pad[-1::-2]))
    kept = self[tuple(slice(max(-a, 0), n - max(-b, 0)) for n, (a, b) in zip(self.shape, edges))]
    return np.pad(kept, [(max(a, 0), max(b, 0)) for a, b in edges], constant_values=value or 0)


def _backward_of(part: Callable[..., Array]) -> Callable[..., Array]:
    """Zeros with the gradient where the view took its elements from."""

    def run(grad_output: Array, input_sizes: Sequence[int], *args: Any) -> Array:
        gradient = np.zeros(input_sizes, grad_output.dtype)
        part(gradient, *args)[...] = grad_output
        return gradient

    return run


def _unfold_backward(grad_in: Array, input_sizes: Sequence[int], dim: int, size: int, step: int) -> Array:
    gradient = np.zeros(input_sizes, grad_in.dtype)
    windows = _unfold(gradient, dim, size, step)
    for at in range(size):  # within one place of the window no element comes twice where step > 0
        windows[..., at] += grad_in[..., at]
    return gradient


def _clone(self: Array, *, memory_format: str | None = None) -> Array:
    return self.copy("K")


def _to_copy(self: Array, *, dtype: np.dtype | None = None, **_: Any) -> Array:
    return self.astype(dtype or self.dtype, "K")


def _copy(self: Array, src: Array, non_blocking: bool = False) -> Array:
    return np.broadcast_to(src, self.shape).astype(self.dtype)


def copy_(self: Array, src: Array, non_blocking: bool = False) -> Array:
    return write(self, src)


VIEWS = rows({
    "view.default": view,
    "view.dtype": _view_dtype,
    "_unsafe_view": view,
    "as_strided": as_strided,
    "alias": lambda self: self[...],
    "detach": lambda self: self[...],
    "t": _t,
    "transpose.int": _transpose,
    "permute": _permute,
    "expand": expand,
    "slice.Tensor": _slice,
    "select.int": _select,
    "split.Tensor": _split,
    "split_with_sizes": _split_with_sizes,
    "unbind.int": _unbind,
    "squeeze.default|dim|dims": _squeeze,
    "unsqueeze": _unsqueeze,
    "diagonal": _diagonal,
    "unfold": _unfold,
    "view_as_real": _as_real,
    "view_as_complex": _as_complex,
})  # fmt: skip
TABLE = {**VIEWS, **rows({
    "cat": cat,
    "stack": _stack,
    "repeat": _repeat,
    "flip": lambda self, dims: np.flip(self, [axis_of(d, self) for d in dims] if self.ndim else ()).copy(),
    "roll": _roll,
    "tril": lambda self, diagonal=0: np.tril(self, diagonal),
    "triu": lambda self, diagonal=0: np.triu(self, diagonal),
    "constant_pad_nd": _pad,
    "slice_backward": _backward_of(_slice),
    "select_backward": _backward_of(_select),
    "diagonal_backward": _backward_of(_diagonal),
    "unfold_backward": _unfold_backward,
    "clone": _clone,
    "_to_copy": _to_copy,
    "copy": _copy,
    "copy_": copy_,
})}  # fmt: skip
