"""Spec of a tensor: shape, strides, offset and dtype, without data. Dtypes have torch's names; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

# name of a torch dtype -> (bytes of an element, short name in plan notation)
DTYPES: dict[str, tuple[int, str]] = {
    "float64": (8, "f64"),
    "float32": (4, "f32"),
    "float16": (2, "f16"),
    "bfloat16": (2, "bf16"),
    "float8_e4m3fn": (1, "f8e4m3"),
    "float8_e5m2": (1, "f8e5m2"),
    "complex32": (4, "c32"),
    "complex64": (8, "c64"),
    "complex128": (16, "c128"),
    "int64": (8, "i64"),
    "int32": (4, "i32"),
    "int16": (2, "i16"),
    "int8": (1, "i8"),
    "uint8": (1, "u8"),
    "uint16": (2, "u16"),
    "uint32": (4, "u32"),
    "uint64": (8, "u64"),
    "bool": (1, "b8"),
}
MAX_DIMS = 64  # torch's limit for a tensor
LARGEST = 1 << 63


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape, strides and storage offset (both in elements) and dtype of a strided tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][0]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, not of the viewed storage."""
        return self.numel * self.itemsize

    @property
    def form(self) -> tuple[tuple[int, ...], tuple[int, ...], str]:
        """Shape, strides and dtype: all but the place in the storage."""
        return self.shape, self.stride, self.dtype

    def text(self) -> str:
        """`f32[8,16]`, as in plans and error messages."""
        return f"{DTYPES[self.dtype][1]}[{','.join(map(str, self.shape))}]"

    def wire(self) -> list:
        return [list(self.shape), list(self.stride), self.offset, self.dtype]

    @classmethod
    def from_wire(cls, row: list) -> Spec:
        """Inverse of wire; ValueError names a value that no tensor can have."""
        shape, stride, offset, dtype = row
        if type(dtype) is not str or dtype not in DTYPES:
            raise ValueError(f"unknown dtype {dtype!r:.40}")
        if type(shape) is not list or type(stride) is not list or len(shape) != len(stride) or len(shape) > MAX_DIMS:
            both = f"shape {shape!r:.80} and stride {stride!r:.80}"
            raise ValueError(f"{both} differ in length, or have more than {MAX_DIMS} dims")
        # Bounded, or products of a hostile shape would be numbers without end.
        numbers = [*shape, *stride, offset]
        if any(type(n) is not int or not 0 <= n < LARGEST for n in numbers):
            raise ValueError(
                f"shape {shape!r:.80}, stride {stride!r:.80} or offset {offset!r:.40} has no whole number from 0 up"
            )
        spec = interned(tuple(shape), tuple(stride), offset, dtype)
        if spec.nbytes >= LARGEST:
            raise ValueError(f"{spec.text():.80} has {spec.nbytes} bytes, more than any memory holds")
        return spec


@lru_cache(maxsize=1 << 15)
def interned(shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: str) -> Spec:
    """A cache with one object for each spec: operands are compared with their template's specs by identity first."""
    return Spec(shape, stride, offset, dtype)


def contiguous(shape: tuple[int, ...], dtype: str) -> Spec:
    """The row-major spec of a shape."""
    return Spec(tuple(shape), row_major_stride(shape), 0, dtype)


def row_major_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of row-major memory, as torch counts them: an empty dim counts as one element."""
    stride, step = [], 1
    for extent in reversed(shape):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride))
