"""Results of a call that are arguments, or views of them: the caller gets its own memory, where a program filled a copy.

A view may have another dtype, as x.view(torch.int32) and x.real, and may conjugate or negate what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gt.client.capture.aliasing import CallMemory, one_of
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace.dispatch import call
from gt.client.trace.op_info import info_of

aten = torch.ops.aten
_VIEW, _VIEW_DTYPE = info_of(aten.as_strided.default), info_of(aten.view.dtype)
_FLIPS = {"aten._conj.default": info_of(aten._conj.default), "aten._neg_view.default": info_of(aten._neg_view.default)}


@dataclass(frozen=True, slots=True)
class ViewPlace:
    """The place of a view in an argument: sizes, strides and offset, in elements of its dtype.

    flips: ops that conjugate or negate what the view reads.
    """

    sizes: list[int]
    strides: list[int]
    offset: int
    dtype: torch.dtype
    flips: frozenset[str]

    def of(self, tensor: RemoteTensor) -> RemoteTensor:
        """The view of the caller's argument."""
        offset = tensor.storage_offset()
        if tensor.dtype != self.dtype:
            # The rest of the memory as a flat tensor, which alone may have elements of another size. Of larger elements
            # there are as many as are whole
            ends = ((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            length = 1 + sum(ends) if tensor.numel() else 0
            length -= length % max(self.dtype.itemsize // tensor.dtype.itemsize, 1)
            flat = call(_VIEW, (tensor, [length], [1], offset))
            offset, tensor = offset * tensor.dtype.itemsize // self.dtype.itemsize, call(_VIEW_DTYPE, (flat, self.dtype))
        view = call(_VIEW, (tensor, self.sizes, self.strides, offset + self.offset))
        for op in self.flips:
            view = call(_FLIPS[op], (view,))
        return view


@dataclass(frozen=True, slots=True)
class ArgumentView:
    """A result that is an argument, or a view of one.

    place: None for the argument itself, and for an alias, which has its shape.
    alias: whether the result is another tensor object than the argument, as x.detach() is.
    requires_grad, parameter: of an alias.
    """

    argument: int
    place: ViewPlace | None = None
    alias: bool = False
    requires_grad: bool = False
    parameter: bool = False

    def of(self, leaves: list) -> Any:
        """The result, of the caller's arguments."""
        tensor = leaves[self.argument]
        if self.place is not None:
            tensor = self.place.of(tensor)
        elif self.alias:
            tensor = tensor.detach()
        return as_leaf(tensor, self.requires_grad, self.parameter)


def as_leaf(tensor: RemoteTensor, requires_grad: bool, parameter: bool) -> RemoteTensor:
    """A tensor of a replay as the function returned its own: a leaf that requires grad, or a Parameter."""
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)  # type: ignore[return-value]
    return tensor.requires_grad_() if requires_grad else tensor


def argument_view(result: Any, leaves: list, inputs: dict[int, RemoteTensor], memory: CallMemory) -> ArgumentView | None:
    """The argument that a result is a view of, where the program fills a copy of it; None for any other result."""
    if not isinstance(result, RemoteTensor):
        return None
    number, owner = result._ref.id, memory.owner(result)
    for argument, copy in inputs.items():
        if copy._ref.id != owner or not isinstance(leaves[argument], RemoteTensor):
            continue
        if result is copy:
            return ArgumentView(argument)
        kind = (result.requires_grad, isinstance(result, torch.nn.Parameter))
        if number == owner:
            return ArgumentView(argument, None, True, *kind)
        place = _place(result, copy, leaves[argument].stride(), memory.flips.get(number, frozenset()))
        return None if place is None else ArgumentView(argument, place, True, *kind)
    return None


def in_arguments(
    results: Any, leaves: list, inputs: dict[int, RemoteTensor], memory: CallMemory, whole: Mapping[int, Any]
) -> Any:
    """The results of a call that is no program. A returned copy, or view of one, becomes the caller's argument or its view.

    whole: containers that stay the same objects, by identity.
    """
    if not inputs:
        return results

    def original(result: Any) -> Any:
        view = argument_view(result, leaves, inputs, memory)
        return view.of(leaves) if view else result

    return tree_map(original, results, is_leaf=one_of(whole))


def _place(view: torch.Tensor, copy: torch.Tensor, strides: tuple[int, ...], flips: frozenset[str]) -> ViewPlace | None:
    """The place of a view of a dense copy in a tensor with these strides; None if it has none there.

    A step in the copy is one number of elements in each of its dims. No dim of the view may go beyond the end of one of these.
    """
    # Example: the caller's tensor is the first 3 columns of a matrix [4, 5], with strides (5, 1). Its copy has
    # strides (3, 1). The column copy[:, 2] has offset 2 and step 3 in the copy: that is 0 rows and 2 columns, then
    # 1 row and 0 columns. In the caller's tensor these are offset 0 * 5 + 2 * 1 = 2 and step 1 * 5 + 0 * 1 = 5.
    # Elements of two sizes are counted in the smaller ones: a larger one is a last dim of these, with step 1
    unit = min(view.dtype.itemsize, copy.dtype.itemsize)
    own, theirs = copy.dtype.itemsize // unit, view.dtype.itemsize // unit
    near, there = ([*(step * own for step in each), 1] for each in (copy.stride(), strides))
    dims = _merged(sorted(zip(near, there, (*copy.shape, own), strict=True), reverse=True))

    def steps(distance: int) -> list[int]:
        counts = []
        for step, _, _ in dims:
            count, distance = divmod(distance, step)
            counts.append(count)
        return counts

    start = steps(view.storage_offset() * theirs - copy.storage_offset() * own)
    sizes, moved = (*view.shape, theirs), (*(step * theirs for step in view.stride()), 1)
    moves = [steps(step) if size > 1 else [0] * len(dims) for size, step in zip(sizes, moved, strict=True)]
    for position, (_, _, length) in enumerate(dims):
        # The last element of the view along this dim. A view that goes beyond the dim's end,
        # as of view(-1), runs on in the next row, where the caller's tensor may have a gap
        last = start[position] + sum(move[position] * (size - 1) for move, size in zip(moves, sizes, strict=True))
        if view.numel() and last >= length:
            return None
    # The same counts of elements, in the caller's strides
    *out, inner, offset = (sum(n * step for n, (_, step, _) in zip(move, dims, strict=True)) for move in (*moves, start))
    if (theirs > 1 and inner != 1) or any(step % theirs for step in (*out, offset)):
        return None
    return ViewPlace(list(view.shape), [step // theirs for step in out], offset // theirs, view.dtype, flips)


def _merged(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Dims, outer ones first, where one runs on into the next in both tensors. Each has a step in both, and a size."""
    merged: list[tuple[int, int, int]] = []
    for near, there, size in (dim for dim in dims if dim[2] > 1):
        if merged and merged[-1][:2] == (near * size, there * size):
            size *= merged.pop()[2]
        merged.append((near, there, size))
    return merged
