"""List ops with more tensors than one op may have: they are recorded in chunks, and the chunks' results are joined.

torch has no such limit. A fused optimizer takes the lists of all parameters, a stack one loss a step, iteration one view a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gt.client.trace.dispatch import SEVERAL_OPS, call
from gt.client.trace.op_info import LONG, TENSORS, VALUES, Entry, OpInfo, info_of
from gt.errors import UnsupportedOp

aten = torch.ops.aten
_ELEMENTWISE = ("aten._foreach_", "aten._fused_", "aten._amp_foreach_")
_JOINS = frozenset({"cat", "stack"})
_SPLITS = frozenset(
    ["unbind", "split", "split_with_sizes", "unbind_copy", "split_with_sizes_copy", "unsafe_split", "unsafe_split_with_sizes"]
)


def in_chunks(info: OpInfo, entry: Entry, args: tuple, kwargs: dict) -> Any:
    """Call a list op once for each chunk, of which entry.number says how many; a chunk may be divided again.

    UnsupportedOp for an op that has no such rule.
    """
    count = entry.number
    if info.name.startswith(_ELEMENTWISE):
        return _elementwise(info, count, args, kwargs)
    named, base = {**dict(zip(info.names, args, strict=False)), **kwargs}, info.name.split(".")[1]
    if base in _JOINS:
        return _concatenate(info, count, **named)
    if base in _SPLITS and not info.writes:
        return _split(info, count, **named)
    raise _too_long(info)


def register() -> None:
    """Have calls with too many tensors executed in chunks."""
    SEVERAL_OPS[LONG] = in_chunks


def _too_long(info: OpInfo) -> UnsupportedOp:
    return UnsupportedOp(f"{info.name} has more tensors than one op may have: call it several times, with fewer tensors each")


def _ranges(info: OpInfo, length: int, count: int) -> Iterator[slice]:
    if length < 2:
        raise _too_long(info)
    # Rounded up: at most `count` ranges, of one length but for the last
    step = -(-length // min(count, length))
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _elementwise(info: OpInfo, count: int, args: tuple, kwargs: dict) -> Any:
    """All lists are cut alike; every call gets the arguments that are no lists, such as a learning rate."""
    named = {**dict(zip(info.names, args, strict=False)), **kwargs}
    length = next(len(named[name]) for name in info.names if info.named[name] == TENSORS and named.get(name))

    def cut(name: str, arg: Any, part: slice) -> Any:
        per_tensor = info.named[name] in (TENSORS, VALUES) and isinstance(arg, (list, tuple)) and len(arg) == length
        return arg[part] if per_tensor else arg

    results: list = []
    for part in _ranges(info, length, count):
        chunk = tuple(cut(name, arg, part) for name, arg in zip(info.names, args, strict=False))
        results.extend(call(info, chunk, {name: cut(name, arg, part) for name, arg in kwargs.items()}) or ())
    return results if info.func._schema.returns else None


def _concatenate(info: OpInfo, count: int, tensors: Any, dim: int = 0) -> Any:
    """Join chunks, then their results. All tensors get the result's dtype first: a chain of promotions may round twice."""
    stacked, dtype = ".stack." in info.name, tensors[0].dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    tensors = [t if t.dtype == dtype else aten._to_copy.default(t, dtype=dtype) for t in tensors]
    dim = dim % (tensors[0].dim() + 1) if stacked else dim
    join = info_of(aten.stack.default if stacked else aten.cat.default)
    joined = [call(join, (tensors[part], dim)) for part in _ranges(info, len(tensors), count)]
    return call(info_of(aten.cat.default), (joined, dim))


def _split(info: OpInfo, count: int, self: Any, dim: int = 0, **sizes: Any) -> Any:
    """Divide ranges of the dim, one at a time."""
    extent = self.shape[dim]
    ((name, size),) = sizes.items() or (("", 1),)
    # Lengths of all parts. With one size the last part may be shorter
    lengths = size if isinstance(size, (list, tuple)) else [min(size, extent - n) for n in range(0, extent, size)]
    parts: list = []
    start = 0
    for part in _ranges(info, len(lengths), count):
        stop = start + sum(lengths[part])
        # The slice holds exactly the parts of this range, so that the op divides it at the same places
        stretch = call(info_of(aten.slice.Tensor), (self, dim, start, stop))
        rest = () if not name else (lengths[part],) if size is lengths else (size,)
        parts.extend(call(info, (stretch, *rest, dim)))
        start = stop
    return parts
