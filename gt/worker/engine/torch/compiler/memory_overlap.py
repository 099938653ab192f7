"""Elements that tensors of one memory share: rows that a loop writes into one buffer share none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

Place = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides and offset in elements of one dtype
_MAX_TENSORS = 128  # of which each two are compared
_MAX_TRIES = 4  # of places in one dim


@lru_cache(maxsize=1024)
def disjoint(places: tuple[Place, ...]) -> bool:
    """True if no two of these tensors share an element. False also where that takes long to find out."""
    return len(places) <= _MAX_TENSORS and not any(_overlap(a, b) for a, b in combinations(places, 2))


def _overlap(a: Place, b: Place) -> bool:
    (shape_a, stride_a, offset_a), (shape_b, stride_b, offset_b) = a, b
    if not (all(shape_a) and all(shape_b)):
        return False
    if offset_a + _span(a) <= offset_b or offset_b + _span(b) <= offset_a:
        return False
    if len(shape_a) != len(shape_b):
        return True
    # Of the same strides the difference of two places counts alone. A dim of one element has any stride.
    dims = []
    for count_a, step_a, count_b, step_b in zip(shape_a, stride_a, shape_b, stride_b, strict=True):
        if count_a > 1 and count_b > 1 and step_a != step_b:
            return True
        step = step_a if count_a > 1 else step_b
        if step and (count_a > 1 or count_b > 1):
            dims.append((step, count_b - 1, count_a - 1))
    return _reaches(offset_b - offset_a, sorted(dims, reverse=True))


def _span(place: Place) -> int:
    shape, stride, _ = place
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _reaches(distance: int, dims: Sequence[tuple[int, int, int]]) -> bool:
    """True if steps sum up to the distance. dims: size of a step, and how many may be taken back and forward."""
    if not dims:
        return distance == 0
    (step, back, forward), rest = dims[0], dims[1:]
    most, least = sum(size * count for size, _, count in rest), sum(size * count for size, count, _ in rest)
    first = max(-back, -((most - distance) // step))
    last = min(forward, (distance + least) // step)
    if last - first >= _MAX_TRIES:
        return True
    return any(_reaches(distance - step * count, rest) for count in range(first, last + 1))
