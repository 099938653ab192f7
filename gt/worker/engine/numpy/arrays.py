"""Arrays with torch's semantics of tensors: dtypes by torch's names, storages, strides, and torch's rules of type promotion.

A tensor is an np.ndarray; its storage is the array that owns the memory, whose first element has offset 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from gt.errors import UnsupportedOp
from gt.ir.spec import DTYPES, Spec

Array: TypeAlias = np.ndarray
_LACKS = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "complex32")
DTYPE: dict[str, np.dtype] = {name: np.dtype(name) for name in DTYPES if name not in _LACKS}
NAME = {dtype: name for name, dtype in DTYPE.items()}
# Of placeholders of failed ops: as many bytes, and nothing that can be computed with.
_OPAQUE = {name: np.dtype(f"V{DTYPES[name][0]}") for name in _LACKS}
_OPAQUE_NAME = {dtype: name for name, dtype in _OPAQUE.items()}
FLOAT, DOUBLE, HALF, INT, BOOL = map(np.dtype, ("float32", "float64", "float16", "int64", "bool"))


def dtype_of(name: str) -> np.dtype:
    """The dtype of a name of torch's; UnsupportedOp where NumPy has none."""
    dtype = DTYPE.get(name)
    if dtype is None:
        raise UnsupportedOp(f"the numpy engine has no {name}: run with GT_BACKEND=torch")
    return dtype


def storable(name: str) -> np.dtype:
    """A dtype of as many bytes, for every name."""
    return DTYPE.get(name) or _OPAQUE[name]


def name_of(dtype: np.dtype) -> str:
    return NAME.get(dtype) or _OPAQUE_NAME[dtype]


# ---- memory


def owner(x: Array) -> Array:
    """The array whose memory this one shows."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def offset(x: Array) -> int:
    """Storage offset in elements."""
    return (x.ctypes.data - owner(x).ctypes.data) // x.itemsize if x.base is not None and x.size else 0


def _flat(x: Array) -> Array:
    """All memory of a dense array in one dim, not copied."""
    # By falling strides the dims are in the order of memory, so the reshape copies nothing.
    order = sorted(range(x.ndim), key=lambda dim: -x.strides[dim])
    return x.transpose(order).reshape(-1)


def strided(storage: Array, shape: Sequence[int], stride: Sequence[int], start: int, dtype: np.dtype | None = None) -> Array:
    """as_strided of the memory of an array that owns it; strides and start in elements. ValueError beyond its end."""
    dtype = dtype or storage.dtype
    size = dtype.itemsize
    if start < 0:
        raise ValueError(f"storage offset {start} is below 0")
    if 0 in shape:
        return np.empty(tuple(shape), dtype)  # NumPy checks even strides that lead nowhere
    return np.ndarray(tuple(shape), dtype, _flat(storage), start * size, tuple(step * size for step in stride))


def laid_out(spec: Spec, zero: bool = False) -> Array:
    """New memory with the spec's shape and strides, and any dtype."""
    # Elements from the first to the last, gaps between them too.
    span = 1 + sum((n - 1) * step for n, step in zip(spec.shape, spec.stride, strict=True)) if spec.numel else 0
    memory = (np.zeros if zero or span != spec.numel else np.empty)(span, storable(spec.dtype))  # gaps are never written
    return strided(memory, spec.shape, spec.stride, 0)


def conform(out: Any, spec: Spec) -> Array:
    """An output as the client inferred it: in its dtype, with its strides, at the start of memory of its own."""
    out = np.asarray(out)
    if out.shape != spec.shape:
        raise ValueError(f"the result has shape {list(out.shape)}, want {spec.text()}")
    out = out.astype(dtype_of(spec.dtype), copy=False)
    size = out.itemsize
    same = all(extent < 2 or have == want * size for extent, have, want in zip(spec.shape, out.strides, spec.stride))
    if not spec.numel or (same and (out.base is None or owner(out).nbytes == out.nbytes)):
        return out
    if any(n > 1 and step == 0 for n, step in zip(spec.shape, spec.stride)):
        return out  # no memory of its own to lay out
    result = laid_out(spec)
    result[...] = out
    return result


def check_strides(scope: dict[str, Any], stride: str, spec: Spec) -> Callable[[Any], Array]:
    """conform, quick where nothing is to be done; codegen.Check."""
    dtype = dtype_of(spec.dtype)
    shape, steps = spec.shape, tuple(step * dtype.itemsize for step in spec.stride)

    def check(out: Any) -> Array:
        if type(out) is Array and out.shape == shape and out.strides == steps and out.dtype == dtype and out.base is None:
            return out
        return conform(out, spec)

    return check


def check_view(scope: dict[str, Any], shape: str, spec: Spec) -> Callable[[Any], None]:
    """A check that a view has a spec's shape and dtype; codegen.CheckView."""
    scope[shape] = None

    def check(out: Array) -> None:
        if out.shape != spec.shape or name_of(out.dtype) != spec.dtype:
            raise ValueError(f"the result is {name_of(out.dtype)}{list(out.shape)}, want {spec.text()}")
        scope[shape] = out.shape

    return check


# ---- type promotion

_ORDER = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}
_SCALAR = {bool: BOOL, int: INT, float: FLOAT, complex: np.dtype("complex64")}
_promoted: dict[tuple, np.dtype] = {}


def _wider(a: np.dtype, b: np.dtype) -> np.dtype:
    """torch.promote_types: an integer does not widen a float."""
    # A higher kind wins whole (int64 + float16 is float16); within one kind the wider dtype does.
    high, low = (a, b) if _ORDER[a.kind] >= _ORDER[b.kind] else (b, a)
    both_inexact = _ORDER[low.kind] >= 2
    return np.promote_types(high, low) if both_inexact or _ORDER[high.kind] == _ORDER[low.kind] else high


def _over(high: np.dtype | None, low: np.dtype | None) -> np.dtype | None:
    """The dtype of tensors with dims, unless 0-dim tensors or numbers are of a higher kind."""
    if high is None or low is None:
        return high or low
    if _ORDER[high.kind] >= _ORDER[low.kind]:
        return high
    return np.promote_types(high, low) if high == DOUBLE and low.kind == "c" else low


def promoted(*args: Any) -> np.dtype:
    """torch.result_type of arrays and numbers."""
    key = tuple((a.dtype, a.ndim == 0) if isinstance(a, np.ndarray) else type(a) for a in args)
    dtype = _promoted.get(key)
    if dtype is None:
        dtype = _promoted[key] = _promote(args)
    return dtype


def _promote(args: tuple) -> np.dtype:
    kinds: list[np.dtype | None] = [None, None, None]  # dtypes by category: tensors with dims, 0-dim tensors, numbers
    for arg in args:
        at, dtype = (int(arg.ndim == 0), arg.dtype) if isinstance(arg, np.ndarray) else (2, _SCALAR[type(arg)])
        kinds[at] = dtype if kinds[at] is None else _wider(kinds[at], dtype)  # type: ignore[arg-type]
    found = _over(kinds[0], _over(kinds[1], kinds[2]))
    assert found is not None
    return found


def inexact(dtype: np.dtype) -> np.dtype:
    """The dtype in which torch computes an op that gives fractions."""
    return dtype if dtype.kind in "fc" else FLOAT


def wide(dtype: np.dtype) -> np.dtype:
    """The dtype for sums and functions of half precision."""
    return FLOAT if dtype == HALF else dtype


def number(dtype: np.dtype, value: Any) -> Any:
    """A Python number in a dtype; integers that do not fit wrap around."""
    return dtype.type(value) if dtype.kind in "fcb" else np.asarray(value).astype(dtype)[()]


def cast(dtype: np.dtype, *args: Any) -> list:
    """Arrays and numbers in a dtype; no copy where they are in it."""
    return [a.astype(dtype, copy=False) if isinstance(a, np.ndarray) else number(dtype, a) for a in args]


def together(*args: Any) -> list:
    """Operands in the dtype that torch computes in."""
    return cast(wide(promoted(*args)), *args)


def fractions(*args: Any) -> list:
    """As `together`, with integers as floats."""
    return cast(wide(inexact(promoted(*args))), *args)


def axis_of(dim: int, x: Array) -> int:
    """A dim as an index from 0; IndexError as torch has it."""
    ndim = max(x.ndim, 1)
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim {dim} is out of range for {x.ndim} dims")
    return dim % ndim


def sample(x: Array) -> Array:
    """x with at least one dim: torch lets a dim of a 0-dim tensor be 0."""
    return x if x.ndim else x.reshape(1)


def write(target: Array, values: Any) -> Array:
    """target[:] = values, cast to its dtype."""
    target[...] = values
    return target


def rows(table: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """`add.Tensor|Scalar` as one row for each overload; a name alone is its default overload."""
    made = {}
    for key, run in table.items():
        base, _, overloads = key.partition(".")
        for overload in (overloads or "default").split("|"):
            made[f"{base}.{overload}"] = run
    return made
