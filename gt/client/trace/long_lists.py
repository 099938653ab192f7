"""List ops with more tensors than one op may have, done as several: chunks of their lists, and their results together.

torch has no such limit: a fused optimizer has the lists of all parameters, a stack one loss a step, iteration one view a row.
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
_JOINED = frozenset({"cat", "stack"})
_TAKEN_APART = frozenset(
    ["unbind", "split", "split_with_sizes", "unbind_copy", "split_with_sizes_copy", "unsafe_split", "unsafe_split_with_sizes"]
)


def in_chunks(info: OpInfo, entry: Entry, args: tuple, kwargs: dict) -> Any:
    """Call a list op once for each chunk, of which entry.number says how many; a chunk may be divided again.

    UnsupportedOp for an op that has no such rule.
    """
    count = entry.number
    if info.name.startswith(_ELEMENTWISE):
        return _elementwise(info, count, args, kwargs)
    given, base = {**dict(zip(info.names, args, strict=False)), **kwargs}, info.name.split(".")[1]
    if base in _JOINED:
        return _join(info, count, **given)
    if base in _TAKEN_APART and not info.writes:
        return _take_apart(info, count, **given)
    raise _too_long(info)


def register() -> None:
    """Have calls with too many tensors carried out in chunks."""
    SEVERAL_OPS[LONG] = in_chunks


def _too_long(info: OpInfo) -> UnsupportedOp:
    return UnsupportedOp(f"{info.name} has more tensors than one op may have: call it several times, with fewer tensors each")


def _ranges(info: OpInfo, length: int, count: int) -> Iterator[slice]:
    if length < 2:
        raise _too_long(info)
    step = -(-length // min(count, length))
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _elementwise(info: OpInfo, count: int, args: tuple, kwargs: dict) -> Any:
    """Each list is cut alike; what is no list (a rate, whether a gradient is infinite) is every call's."""
    named = {**dict(zip(info.names, args, strict=False)), **kwargs}
    length = next(len(named[name]) for name in info.names if info.named[name] == TENSORS and named.get(name))

    def cut(name: str, arg: Any, part: slice) -> Any:
        of_each = info.named[name] in (TENSORS, VALUES) and isinstance(arg, (list, tuple)) and len(arg) == length
        return arg[part] if of_each else arg

    made: list = []
    for part in _ranges(info, length, count):
        some = tuple(cut(name, arg, part) for name, arg in zip(info.names, args, strict=False))
        got = call(info, some, {name: cut(name, arg, part) for name, arg in kwargs.items()})
        made.extend(got or ())
    return made if info.func._schema.returns else None


def _join(info: OpInfo, count: int, tensors: Any, dim: int = 0) -> Any:
    """Chunks are joined, then what they give. All have the result's dtype before: a chain of promotions may round twice."""
    stacked, dtype = ".stack." in info.name, tensors[0].dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    tensors = [t if t.dtype == dtype else aten._to_copy.default(t, dtype=dtype) for t in tensors]
    dim = dim % (tensors[0].dim() + 1) if stacked else dim
    one = info_of(aten.stack.default if stacked else aten.cat.default)
    joined = [call(one, (tensors[part], dim)) for part in _ranges(info, len(tensors), count)]
    return call(info_of(aten.cat.default), (joined, dim))


def _take_apart(info: OpInfo, count: int, self: Any, dim: int = 0, **sizes: Any) -> Any:
    """Stretches of the dim are taken apart, each by itself."""
    extent = self.shape[dim]
    ((name, given),) = sizes.items() or (("", 1),)
    lengths = given if isinstance(given, (list, tuple)) else [min(given, extent - n) for n in range(0, extent, given)]
    made: list = []
    start = 0
    for part in _ranges(info, len(lengths), count):
        stop = start + sum(lengths[part])
        stretch = call(info_of(aten.slice.Tensor), (self, dim, start, stop))
        rest = () if not name else (lengths[part],) if given is lengths else (given,)
        made.extend(call(info, (stretch, *rest, dim)))
        start = stop
    return made
