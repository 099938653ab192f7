"""Boxes of a global tensor and their places in a worker's local tensor: arithmetic on intervals, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from gt.ir.layout import Box, Interval, overlap


def as_boxes(rows: Iterable[Iterable[Sequence[int]]]) -> list[Box]:
    """Boxes from their wire form, [[start, stop], ...] each."""
    return [tuple((start, stop) for start, stop in row) for row in rows]


def local(boxes: list[Box]) -> tuple[tuple[int, ...], list[Box]]:
    """Shape of the local tensor that holds these global boxes, and the place of each box in it.

    The boxes are the product of a list of intervals for each dim, in order, as ir.layout.boxes makes them.
    """
    if not boxes:
        return (0,), []
    # Example: boxes [(0, 2)] and [(4, 6)] of a vector become places [(0, 2)] and [(2, 4)] in a local vector of 4. `where` has,
    # for each dim, the global interval -> the local one.
    shape, where = [], []
    for dim in range(len(boxes[0])):
        at: dict[Interval, Interval] = {}
        end = 0
        for box in boxes:
            start, stop = box[dim]
            if box[dim] not in at:
                at[box[dim]] = (end, end + stop - start)
                end += stop - start
        shape.append(end)
        where.append(at)
    return tuple(shape), [tuple(at[span] for at, span in zip(where, box, strict=True)) for box in boxes]


def shared(have: list[Box], want: list[Box]) -> list[tuple[Box, Box]]:
    """Overlaps of two sets of boxes, as pairs of local indices: in the tensor of `have`, in the tensor of `want`."""
    _, sources = local(have)
    _, targets = local(want)
    pairs = []
    # The order (of `have`, then of `want`) is part of the wire format: sender and receiver compute it each for itself.
    for (held, src), (wanted, dst) in product(zip(have, sources, strict=True), zip(want, targets, strict=True)):
        both = overlap(held, wanted)
        if both is not None:
            pairs.append((_moved(both, held, src), _moved(both, wanted, dst)))
    return pairs


def _moved(inner: Box, outer: Box, place: Box) -> Box:
    """`inner`, a part of the global box `outer`, in the indices of a tensor that has `outer` at `place`."""
    return tuple(
        (start - base + at, stop - base + at) for (start, stop), (base, _), (at, _) in zip(inner, outer, place, strict=True)
    )


def index(box: Box) -> tuple:
    """The box as an index of a tensor; the ellipsis has NumPy give a view even where there are no dims."""
    return (*(slice(start, stop) for start, stop in box), ...)


def part_of(tensor: Any, box: Box) -> Any:
    """The box of a tensor; ValueError if the tensor does not have all of it."""
    part = tensor[index(box)]
    if tuple(part.shape) != extent(box):
        raise ValueError(f"the tensor has shape {list(tensor.shape)}, planned is one with {[list(span) for span in box]}")
    return part


def extent(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def leading(box: Box, shape: tuple[int, ...]) -> bool:
    """True if the box is one run of memory of a contiguous tensor of this shape: whole in every dim but the first."""
    return all(span == (0, n) for span, n in zip(box[1:], shape[1:], strict=True))
