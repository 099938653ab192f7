"""Layout of a tensor on workers, in torch's words: a mesh with named axes, and one placement for each axis.

`dim` is of a tensor, `axis` of a mesh. Local sizes follow torch.chunk's rule. A worker's piece is a list of boxes of the whole
tensor: their arithmetic is here, and copies of them between NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

Interval = tuple[int, int]
Spans = tuple[tuple[Interval, ...], ...]  # for each dim, the intervals of a global tensor that a worker holds
Box = tuple[Interval, ...]  # one [start, stop) for each dim of the global tensor
Boxes = Sequence[Sequence[Sequence[int]]]  # boxes of one piece, as `boxes` makes them or in their wire form


@dataclass(frozen=True, slots=True)
class Shard:
    """Split along tensor dim `dim`. With parts > 1 each of `parts` equal parts of the dim is split (fused QKV)."""

    dim: int
    parts: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.parts == 1 else f"S({self.dim},{self.parts})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Each worker of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each worker holds a term, and the value is the reduction `op` of the terms (sum, avg, max, min, product, norm2)."""

    op: str = "sum"

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


Placement = Shard | Replicate | Partial
R, P = Replicate(), Partial()


@dataclass(frozen=True, slots=True)
class Mesh:
    """Workers in row-major order over named axes: Mesh((("dp", 2), ("tp", 2)), (0, 1, 2, 3))."""

    axes: tuple[tuple[str, int], ...]
    workers: tuple[int, ...]

    def __post_init__(self) -> None:
        if prod(size for _, size in self.axes) != len(self.workers):
            raise ValueError(f"axes {self.axes} do not hold {len(self.workers)} workers")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position on each axis of the rank-th worker."""
        where = []
        for size in reversed(self.sizes):
            rank, place = divmod(rank, size)  # row-major: the last axis varies fastest
            where.append(place)
        return tuple(reversed(where))

    def teams(self, axis: int) -> list[tuple[int, ...]]:
        """Ranks that differ only along `axis`, each team in order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(len(self.workers)):
            place = self.coordinates(rank)
            groups.setdefault(place[:axis] + place[axis + 1 :], []).append(rank)
        return [tuple(ranks) for ranks in groups.values()]

    def text(self) -> str:
        axes = "".join(f" {name}={size}" for name, size in self.axes)
        return f"mesh{axes} on workers {','.join(map(str, self.workers))}"


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh and one placement for each of its axes."""

    mesh: Mesh
    placements: tuple[Placement, ...]

    def __str__(self) -> str:
        return f"[{','.join(map(str, self.placements))}]"

    @property
    def replicated(self) -> bool:
        return all(isinstance(p, Replicate) for p in self.placements)

    @property
    def partial(self) -> bool:
        return any(isinstance(p, Partial) for p in self.placements)

    def with_placement(self, axis: int, placement: Placement) -> Layout:
        """The same layout but for the placement on one axis."""
        return Layout(self.mesh, (*self.placements[:axis], placement, *self.placements[axis + 1 :]))


def replicated(mesh: Mesh) -> Layout:
    return Layout(mesh, (R,) * len(mesh.axes))


def chunk(start: int, stop: int, size: int, place: int) -> Interval:
    """The place-th of `size` chunks of [start, stop), by torch.chunk's rule (the last may be short or empty)."""
    # 5 elements in 4 chunks are 2, 2, 1, 0: every chunk but the last ones has ceil(5 / 4).
    step = -(-(stop - start) // size)
    begin = min(start + place * step, stop)
    return begin, min(begin + step, stop)


def intervals(extent: int, splits: list[tuple[int, int, int]]) -> list[Interval]:
    """Intervals of a dim of `extent` that remain after the splits (size, place, parts) of mesh axes in order."""
    # Each split cuts all intervals that remain. With parts the dim is first cut into equal parts, each of which is then split.
    # Example: 12 with (2, 0, 3), as q, k and v fused in one weight, gives [(0, 2), (4, 6), (8, 10)].
    spans: list[Interval] = [(0, extent)]
    for size, place, parts in splits:
        if parts > 1 and len(spans) == 1:
            start, stop = spans[0]
            step = (stop - start) // parts
            spans = [(start + i * step, start + (i + 1) * step) for i in range(parts)]
        spans = [chunk(start, stop, size, place) for start, stop in spans]
    return spans


def spans(layout: Layout, shape: Sequence[int], rank: int) -> Spans:
    """Intervals that the rank-th worker of the mesh holds, one list for each dim."""
    # Two axes may split one dim: the second splits what the first leaves, in the order of the mesh's axes.
    splits: dict[int, list[tuple[int, int, int]]] = {}
    for (_, size), place, placement in zip(layout.mesh.axes, layout.mesh.coordinates(rank), layout.placements, strict=True):
        if isinstance(placement, Shard):
            splits.setdefault(placement.dim, []).append((size, place, placement.parts))
    return tuple(tuple(intervals(extent, splits.get(dim, []))) for dim, extent in enumerate(shape))


def boxes(layout: Layout, shape: tuple[int, ...], rank: int) -> list[Box]:
    """The boxes of a global tensor that the rank-th worker of the mesh holds, in the order of its piece.

    The piece is the concatenation of the boxes along the one dim that has parts. Without parts there is one box.
    """
    return [tuple(box) for box in product(*spans(layout, shape, rank))]


def local_shape(layout: Layout, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Shape of the rank-th worker's piece."""
    return piece_shape(boxes(layout, shape, rank))


def piece_shape(parts: Boxes) -> tuple[int, ...]:
    """Shape of the piece that has these boxes; (0,) without boxes."""
    if len(parts) == 1:
        return tuple(stop - start for start, stop in parts[0])
    return tuple(sum(stop - start for start, stop in spans) for spans in _spans(parts)) if parts else (0,)


def _spans(parts: Boxes) -> list[list[Interval]]:
    """The intervals of each dim whose product the boxes are."""
    return [list(dict.fromkeys((box[dim][0], box[dim][1]) for box in parts)) for dim in range(len(parts[0]))]


def _index(parts: Boxes) -> tuple:
    # Slices give a view. Several boxes need index arrays, whose product (np.ix_) is the product of their intervals.
    if len(parts) == 1:
        return tuple(slice(start, stop) for start, stop in parts[0])
    return np.ix_(*(np.concatenate([np.arange(start, stop) for start, stop in spans]) for spans in _spans(parts)))


def read_boxes(whole: np.ndarray, parts: Boxes) -> np.ndarray:
    """The row-major piece with these boxes of `whole`."""
    return np.ascontiguousarray(whole[_index(parts)]).reshape(piece_shape(parts))


def write_boxes(whole: np.ndarray, parts: Boxes, piece: np.ndarray) -> None:
    """Inverse of read_boxes: write a piece into the boxes of `whole`."""
    whole[_index(parts)] = piece.reshape(piece_shape(parts))


def runs(parts: Boxes, shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int]]:
    """Offset and size in bytes of each contiguous run of a piece in the whole row-major tensor, in the order of the piece."""
    # Trailing dims that the piece has whole are contiguous in memory: `inner` is the number of dims before them.
    spans, inner = _spans(parts), len(shape)
    while inner and spans[inner - 1] == [(0, shape[inner - 1])]:
        inner -= 1
    strides = [prod(shape[dim + 1 :]) * itemsize for dim in range(inner)]

    def walk(dim: int, base: int) -> Iterator[tuple[int, int]]:
        for start, stop in spans[dim]:
            # The last of these dims: each of its intervals is one run.
            if dim < inner - 1:
                for index in range(start, stop):
                    yield from walk(dim + 1, base + index * strides[dim])
            elif stop > start:
                yield base + start * strides[dim], (stop - start) * strides[dim]

    if prod(piece_shape(parts)):
        yield from walk(0, 0) if inner else [(0, prod(shape) * itemsize)]


def overlap(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes, or None where they are disjoint."""
    both = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def volume(box: Box) -> int:
    return prod(stop - start for start, stop in box)
