"""Metadata of a remote tensor, interned so that cache keys compare it by identity."""

from __future__ import annotations

import torch

from gt.errors import UnsupportedOp
from gt.ir.spec import DTYPES, MAX_DIMS, Spec, row_major_stride

_table: dict[tuple, Meta] = {}
_row_major: dict[tuple, Meta] = {}  # of these, by shape and dtype


class Meta:
    """Shape, strides and storage offset (in elements) and dtype; equal ones are one object.

    wrapper: the arguments that make a tensor object of this metadata, once there was one.
    """

    __slots__ = ("dtype", "nbytes", "offset", "shape", "stride", "wrapper")

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype) -> None:
        self.shape, self.stride, self.offset, self.dtype = shape, stride, offset, dtype
        self.nbytes = self.numel * dtype.itemsize
        self.wrapper: tuple = ()

    @property
    def spec(self) -> Spec:
        return Spec(self.shape, self.stride, self.offset, dtype_name(self.dtype))

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def without_offset(self) -> Meta:
        """The same metadata at the start of a storage."""
        return intern(self.shape, self.stride, 0, self.dtype) if self.offset else self

    def stand_in(self) -> torch.Tensor:
        """A tensor on torch's meta device with the same metadata."""
        if not self.offset:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)) if self.numel else 0
        # empty_strided has no offset: a view of memory that is just large enough
        base = torch.empty(self.offset + last + 1, dtype=self.dtype, device="meta")
        return base.as_strided(self.shape, self.stride, self.offset)


def dtype_name(dtype: torch.dtype) -> str:
    """The name without `torch.`, such as "float32"."""
    return str(dtype)[6:]


def intern(shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype) -> Meta:
    """The Meta of these values; UnsupportedOp for more dims than torch's ops take, or a dtype that workers do not have."""
    key = (shape, stride, offset, dtype)
    meta = _table.get(key)
    if meta is None:
        if len(shape) > MAX_DIMS:
            raise UnsupportedOp(f"a tensor of {len(shape)} dims: torch's ops take {MAX_DIMS} at most")
        if dtype_name(dtype) not in DTYPES:
            raise UnsupportedOp(f"a remote tensor of {dtype}: want one of {', '.join(DTYPES)}; try its bytes as uint8")
        meta = _table.setdefault(key, Meta(*key))
    return meta


def of(tensor: torch.Tensor) -> Meta:
    return intern(tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)


def of_spec(spec: Spec) -> Meta:
    return intern(spec.shape, spec.stride, spec.offset, getattr(torch, spec.dtype))


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Meta:
    key = (tuple(shape), dtype)
    meta = _row_major.get(key)
    if meta is None:
        meta = _row_major[key] = intern(key[0], row_major_stride(shape), 0, dtype)
    return meta


def clear() -> None:
    """Forget all metas: called when template numbers end, never while a key is built."""
    _table.clear()
    _row_major.clear()
