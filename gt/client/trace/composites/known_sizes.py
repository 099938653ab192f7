"""Ops whose result's shape depends on values, in a recorded call that may read these: arguments or constants decide them.

`x[mask]` with a mask among the arguments has as many rows as the mask has true elements. The program has this number as a size,
and the number itself is a guard: a replay counts again. Without a recording, or for other values, the op asks a worker.
Its backward pass writes to that many rows, by their places: a kernel that gets a mask counts its rows, which no CUDA graph can.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from gt.client.current_session import current
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace.dispatch import WITH_KNOWN_SIZES, call
from gt.client.trace.op_info import Handler, OpInfo, info_of

aten = torch.ops.aten


def nonzero(tape: Any, x: RemoteTensor) -> Any:
    if not x.dim() or tape.folded(x) is None:
        return None
    count = tape.constant(_op(aten.count_nonzero.default, x))
    return None if count is None else _op(aten.nonzero_static.default, x, size=int(count))


def index(tape: Any, x: RemoteTensor, indices: list) -> Any:
    """A mask of n dims is n indices, as torch's kernel has it."""
    masks = [i for i in indices if i is not None and i.dtype == torch.bool]
    if any(type(mask) is not RemoteTensor or not mask.dim() or tape.folded(mask) is None for mask in masks):
        return None
    places: list = []
    for i in indices:
        if i is None or i.dtype != torch.bool:
            places.append(i)
        elif (rows := nonzero(tape, i)) is None:
            return None
        else:
            places += _op(aten.unbind.int, rows, 1)
    return _op(aten.index.Tensor, x, places) if masks else None


def put(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """index_put, whose masks become indices in a recording that knows their number of rows."""
    tape = current().own_tape()
    if tape is not None and tape.records and len(args) > 2 and (places := _places_written(tape, args[1], args[2])) is not None:
        args = (args[0], places, *args[2:])
    return call(info, args, kwargs)


def _places_written(tape: Any, indices: list, values: Any) -> list | None:
    """Indices of integers for those of index_put, if there are masks of known numbers of rows."""
    masks = [i for i in indices if i is not None and i.dtype == torch.bool]
    if not masks or any(type(mask) is not RemoteTensor or not mask.dim() for mask in masks) or values.numel() == 1:
        return None
    # The gradient of x[mask] has the rows that x[mask] has
    one = sum(i is not None for i in indices) == 1
    of_selection = one and type(torch._C._current_autograd_node()).__name__ == "IndexBackward0"
    places: list = []
    for i in indices:
        if i is None or i.dtype != torch.bool:
            places.append(i)
            continue
        rows = _op(aten.nonzero_static.default, i, size=values.shape[len(places)]) if of_selection else nonzero(tape, i)
        if rows is None:
            return None
        places += _op(aten.unbind.int, rows, 1)
    return places


def masked_select(tape: Any, x: RemoteTensor, mask: RemoteTensor) -> Any:
    if type(x) is not RemoteTensor or type(mask) is not RemoteTensor:
        return None
    shape = list(torch.broadcast_shapes(x.shape, mask.shape))
    if not shape or math.prod(shape) == 0:
        return None
    x, mask = (t if list(t.shape) == shape else _op(aten.expand.default, t, shape) for t in (x, mask))
    return index(tape, x, [mask])


def repeat_interleave(tape: Any, repeats: RemoteTensor, output_size: int | None = None) -> Any:
    counts = tape.folded(repeats) if repeats.numel() else None
    if counts is None or bool((counts < 0).any()):  # a worker says what is wrong with a negative number
        return None
    total = tape.constant(_op(aten.sum.default, repeats))
    return None if total is None else _op(aten.repeat_interleave.Tensor, repeats, output_size=int(total))


def _op(overload: Any, *args: Any, **kwargs: Any) -> Any:
    return call(info_of(overload), args, kwargs)


HANDLERS: dict[str, Handler | None] = dict.fromkeys(
    ("aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default"), put
)


def register() -> None:
    WITH_KNOWN_SIZES.update({
        "aten.nonzero.default": nonzero,
        "aten.index.Tensor": index,
        "aten.masked_select.default": masked_select,
        "aten.repeat_interleave.Tensor": repeat_interleave,
    })  # fmt: skip
