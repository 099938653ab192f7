"""Results of a call that share memory: the caller may write to one of them, and the others have to change with it.

Each replay writes the memory of its results again, so the caller gets copies. The memory is copied once, as a flat tensor, and
each result is a view of the copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gt.client.capture.aliasing import CallMemory
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace.dispatch import call
from gt.client.trace.op_info import info_of

aten = torch.ops.aten
_CLONE, _VIEW, _VIEW_DTYPE = info_of(aten.clone.default), info_of(aten.as_strided.default), info_of(aten.view.dtype)
_FLIPS = {"aten._conj.default": info_of(aten._conj.default), "aten._neg_view.default": info_of(aten._neg_view.default)}


@dataclass(eq=False)
class SharedMemory:
    """Memory of several results, which a call copies once.

    source: a result of the smallest elements. start, end: in its elements, from the first to behind the last of all results.
    flips: ops by which a result is apart from the source, by the tensor's id.
    """

    source: RemoteTensor
    start: int
    end: int
    flips: dict[int, frozenset[str]]

    def view(self, tensor: RemoteTensor, copies: dict[tuple, RemoteTensor]) -> RemoteTensor:
        """The result as a view of the memory's copy. copies: of this call so far, with the memory's copy by its dtypes."""
        unit, dtype = self.source.dtype, tensor.dtype
        if (self, unit) not in copies:
            whole = call(_VIEW, (self.source, [self.end - self.start], [1], self.start))
            copies[self, unit] = call(_CLONE, (whole,))
        if (self, dtype) not in copies:
            copies[self, dtype] = call(_VIEW_DTYPE, (copies[self, unit], dtype))
        place = tensor.storage_offset() - self.start * unit.itemsize // dtype.itemsize
        view = call(_VIEW, (copies[self, dtype], list(tensor.shape), list(tensor.stride()), place))
        for op in self.flips[tensor._ref.id]:
            view = call(_FLIPS[op], (view,))
        return view


def shared_memory(results: Mapping[int, RemoteTensor], memory: CallMemory) -> dict[int, SharedMemory]:
    """The memory of each result that shares it with another one. results: by the ids of their tensors, as the answer."""
    groups: dict[int, dict[int, RemoteTensor]] = defaultdict(dict)
    for number, tensor in results.items():
        if tensor.numel():
            groups[memory.owner(tensor)][number] = tensor
    spans: dict[int, SharedMemory] = {}
    for members in groups.values():
        if len(members) > 1:
            # In bytes first, since views of one memory may have several dtypes. Whole elements of the largest are copied.
            source = min(members.values(), key=lambda tensor: tensor.dtype.itemsize)
            unit, largest = source.dtype.itemsize, max(tensor.dtype.itemsize for tensor in members.values())
            starts, ends = zip(*map(_byte_span, members.values()), strict=True)
            start, end = min(starts) // largest * largest, -(-max(ends) // largest) * largest
            own = memory.flips.get(source._ref.id, frozenset())
            flips = {t._ref.id: memory.flips.get(t._ref.id, frozenset()) ^ own for t in members.values()}
            spans |= dict.fromkeys(members, SharedMemory(source, start // unit, end // unit, flips))
    return spans


def _byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes from the start of a tensor's memory to its first element, and behind its last one."""
    first, nbytes = tensor.storage_offset(), tensor.dtype.itemsize
    last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first * nbytes, (last + 1) * nbytes
