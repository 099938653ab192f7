"""Sharding rules of views: from the placement of a base to that of its view, if the split is of one dim of the view.

A view moves no data. Where the view has no local form, the planner redistributes the base first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from gt.dispatcher.sharding.op_schema import OpSchema
from gt.ir.layout import Partial, Placement, Replicate, Shard

MAX_PARTS = 4096  # parts of a split dim, each a box on every worker; with more, gathering is cheaper
OTHER_VIEW = "a view of another form"  # see shape_rules.py
Split = Callable[[OpSchema, Shard, int], Shard | None]


def view(known: OpSchema, place: Placement, size: int) -> tuple[Placement, ...] | None:
    """Placements of the outputs. Replicate passes through every view, Partial unless the dtype changes."""
    outs = known.template.outs
    if isinstance(place, Partial) and known.name == "view.dtype":
        return None
    if isinstance(place, (Replicate, Partial)) or not outs:  # unbind of an empty dim has no outputs
        return (place,) * len(outs)
    made = VIEWS[known.name](known, place, size)
    return None if made is None else (made,) * len(outs)


def _shapes(known: OpSchema) -> tuple[tuple[int, ...], tuple[int, ...]]:
    out = known.template.outs[0]
    return known.template.ins[0].shape, out.spec.shape if out.spec else ()


def segments(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[range, range]]:
    """Shortest runs of dims with equal products: (8, 6, 4) -> (48, 2, 2) is [(0..2, 0..1), (2..3, 1..3)]."""
    # Both runs begin with one dim; the one with the smaller product takes the next dim, until the products are equal.
    runs, i, j = [], 0, 0
    while i < len(old) and j < len(new):
        old_end, new_end, old_size, new_size = i + 1, j + 1, old[i], new[j]
        while old_size != new_size:
            if old_size < new_size and old_end < len(old):
                old_size *= old[old_end]
                old_end += 1
            elif new_size < old_size and new_end < len(new):
                new_size *= new[new_end]
                new_end += 1
            else:
                return []
        runs.append((range(i, old_end), range(j, new_end)))
        i, j = old_end, new_end
    return runs


def reshape(known: OpSchema, place: Shard, size: int) -> Shard | None:
    """view, reshape: the split dim has to lead its run of dims, or to follow dims whose product is its `parts`."""
    old, new = _shapes(known)
    if 0 in old:
        return None
    for before, after in segments(old, new):
        if place.dim in before:
            return _in_run(place, [(d, old[d]) for d in before], [(d, new[d]) for d in after], size)
    return None


class Runs:
    """Number of equal runs into which earlier mesh axes split each dim. The `parts` of a later axis count within one run."""

    # Example: 2 x 2 workers split a dim of 8 by both axes. The first leaves 2 runs of 4; the second splits each of these, which
    # for the whole dim is a split with 2 parts. `enter` says it so, and a rule for one axis can be applied to that.

    def __init__(self) -> None:
        self._runs: dict[int, int] = {}
        self._parted: set[int] = set()  # dims that have parts already; parts of later axes have no effect, see layout.intervals

    def enter(self, place: Shard, size: int) -> Shard:
        """Add the next axis's split; the result's parts are of the whole dim."""
        parts = self._runs.get(place.dim, 1) * (1 if place.dim in self._parted else place.parts)
        self._cut(place.dim, place.parts, parts * size)
        return Shard(place.dim, parts)

    def leave(self, place: Shard, size: int) -> Shard | None:
        """The inverse of enter; None where the next axis cannot have this split."""
        parts, rest = divmod(place.parts, self._runs.get(place.dim, 1))
        if rest or not parts or (parts > 1 and place.dim in self._parted):
            return None
        self._cut(place.dim, parts, place.parts * size)
        return Shard(place.dim, parts)

    def _cut(self, dim: int, parts: int, runs: int) -> None:
        self._runs[dim] = runs
        if parts > 1:
            self._parted.add(dim)


def reshape_along(known: OpSchema, places: Sequence[Placement], sizes: Sequence[int]) -> list[Placement] | None:
    """reshape where several mesh axes split dims, which it may join into one dim or divide into several."""
    before, after = Runs(), Runs()
    placements: list[Placement] = []
    for place, size in zip(places, sizes, strict=True):
        if isinstance(place, Shard):
            found = reshape(known, before.enter(place, size), size)
            left = found and after.leave(found, size)
            if left is None:
                return None
            placements.append(left)
        else:
            placements.append(place)
    return placements


def _in_run(place: Shard, before: list[tuple[int, int]], after: list[tuple[int, int]], size: int) -> Shard | None:
    # Examples, on 2 workers:
    #
    #     [12] S(0) -> [3, 4]                 None: a piece of 6 is no whole number of rows
    #     [12] S(0), 3 parts -> [3, 4]        S(1): a worker has half of each of the 3 parts, which are rows now (fused QKV)
    #     [3, 4] S(1) -> [12]                 S(0), 3 parts: every row is a part
    #
    # parts: the equal runs of elements that are each split over the workers. In the new shape the split dim is the one behind
    # dims with that product (`passed`). A dim in which the product passes `parts` has some of these runs within itself.
    lead = prod(n for d, n in before if d < place.dim)
    extent = dict(before)[place.dim]
    if len(before) == 1 and len(after) == 1:
        return Shard(after[0][0], place.parts)
    if extent % (size * place.parts) or (lead > 1 and place.parts > 1):
        return None
    parts = lead * place.parts  # every index of the leading dims is a part
    if parts > MAX_PARTS:
        return None
    passed = 1
    for dim, n in after:
        if passed == parts and n % size == 0:
            return Shard(dim)
        if passed < parts and n > 1 and (passed * n) > parts:
            inner = parts // passed if parts % passed == 0 else 0
            return Shard(dim, inner) if inner and n % (inner * size) == 0 else None
        passed *= n
    return None


def expand(known: OpSchema, place: Shard, size: int) -> Shard | None:
    old, new = _shapes(known)
    dim = place.dim + len(new) - len(old)
    return Shard(dim, place.parts) if new[dim] == old[place.dim] else None


def permute(known: OpSchema, place: Shard, size: int) -> Shard | None:
    rank = len(_shapes(known)[0])
    dims = [d % rank for d in known.arg(1)]
    return Shard(dims.index(place.dim), place.parts)


def transpose(known: OpSchema, place: Shard, size: int) -> Shard | None:
    rank = len(_shapes(known)[0])
    if known.name == "t":
        return Shard(rank - 1 - place.dim, place.parts)
    a, b = known.arg(1) % rank, known.arg(2) % rank
    return Shard({a: b, b: a}.get(place.dim, place.dim), place.parts)


def unsqueeze(known: OpSchema, place: Shard, size: int) -> Shard | None:
    at = known.arg(1) % (len(_shapes(known)[0]) + 1)
    return Shard(place.dim + (place.dim >= at), place.parts)


def squeeze(known: OpSchema, place: Shard, size: int) -> Shard | None:
    old = _shapes(known)[0]
    dims = known.arg(1)
    if dims is None:
        gone = {d for d, n in enumerate(old) if n == 1}
    else:
        gone = {d % len(old) for d in (dims if isinstance(dims, list) else [dims]) if old[d] == 1}
    return None if place.dim in gone else Shard(place.dim - sum(d < place.dim for d in gone), place.parts)


def along(known: OpSchema, place: Shard, size: int) -> Shard | None:
    """slice, narrow: local along any other dim, or where it takes all of this dim."""
    old, new = _shapes(known)
    return place if old[place.dim] == new[place.dim] else None


def select(known: OpSchema, place: Shard, size: int) -> Shard | None:
    dim = known.arg(1) % len(_shapes(known)[0])
    return None if dim == place.dim else Shard(place.dim - (dim < place.dim), place.parts)


def unbind(known: OpSchema, place: Shard, size: int) -> Shard | None:
    dim = known.named(1, "dim", 0) % len(_shapes(known)[0])
    return None if dim == place.dim else Shard(place.dim - (dim < place.dim), place.parts)


def split(known: OpSchema, place: Shard, size: int) -> Shard | None:
    """split, chunk: local along another dim, or along this dim where its parts are the outputs (fused QKV)."""
    old = _shapes(known)[0]
    dim = known.named(2, "dim", 0) % len(old)
    if dim != place.dim:
        return place
    pieces = {out.spec.shape[dim] for out in known.template.outs if out.spec}
    if len(pieces) != 1:
        return None
    count = len(known.template.outs)
    return Shard(dim) if place.parts == count and pieces.pop() % size == 0 else None


def wanted_parts(known: OpSchema) -> tuple[int, int] | None:
    """(dim, parts) of a split into equal parts, or of a view that makes a dim of another dim's leading factor."""
    # For fused projections: the parts that a plain split of the dim would cut through.
    old, new = _shapes(known)
    if known.name in ("split", "split_with_sizes"):
        dim = known.named(2, "dim", 0) % len(old)
        same = len({out.spec.shape[dim] for out in known.template.outs if out.spec}) == 1
        return (dim, len(known.template.outs)) if same else None
    for before, after in segments(old, new) if known.name in ("view", "_unsafe_view") else ():
        if len(before) == 1 and len(after) > 1:
            return (before[0], new[after[0]]) if new[after[0]] <= MAX_PARTS else None
    return None


def same(known: OpSchema, place: Shard, size: int) -> Shard | None:
    return place


def as_complex(known: OpSchema, place: Shard, size: int) -> Shard | None:
    """Local but for the last dim, which has the real and imaginary parts of one number."""
    return place if place.dim < len(_shapes(known)[0]) - 1 else None


def retyped(known: OpSchema, place: Shard, size: int) -> Shard | None:
    """x.view(dtype): local but for the last dim, whose elements may be joined or divided."""
    old, new = _shapes(known)
    return place if old == new or place.dim < len(old) - 1 else None


def never(known: OpSchema, place: Shard, size: int) -> Shard | None:
    return None


VIEWS: dict[str, Split] = {
    "view": reshape, "_unsafe_view": reshape, "reshape": reshape, "expand": expand,
    "permute": permute, "transpose": transpose, "t": transpose, "unsqueeze": unsqueeze, "squeeze": squeeze,
    "slice": along, "narrow": along, "select": select, "unbind": unbind, "split": split, "split_with_sizes": split,
    "alias": same, "detach": same, OTHER_VIEW: never, "as_strided": never, "diagonal": never, "unfold": never,
    "view_as_real": same, "view_as_complex": as_complex, "_conj": same, "_neg_view": same, "view.dtype": retyped,
}  # fmt: skip
RESHAPES = frozenset(name for name, split_of in VIEWS.items() if split_of is reshape)
