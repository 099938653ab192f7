"""ZeRO as layouts (Rajbhandari et al., 2020): a parameter rests split along the data-parallel axis, and is used whole there.

`rest` is its layout between uses, `used` that of a use. Gradients and optimizer state rest as their parameter does. The dim is
one of the tensor, as in FSDP2, and a piece has whole rows; there is no flat buffer. So a piece is a box, for which views,
recipes and collectives exist. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from gt.config.schema import DATA_AXIS
from gt.dispatcher.sharding.list_rules import NORMS
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.sharding.rules import ELEMENTWISE, REDUCTIONS, VALUELESS
from gt.dispatcher.sharding.views import VIEWS
from gt.ir.layout import Layout, Partial, Placement, R, Shard
from gt.ir.spec import Spec


def axis_of(layout: Layout) -> int | None:
    """The data-parallel axis of a mesh, if it has one."""
    return next((n for n, (name, size) in enumerate(layout.mesh.axes) if name == DATA_AXIS and size > 1), None)


def dims(layout: Layout, shape: Sequence[int]) -> list[int]:
    """The dims by which a tensor may rest, best first: those whose longest piece is the smallest part of the tensor.

    A dim that another axis splits is none of them. The data-parallel axis would be the outer of two splits, and a gather over
    it would not give a tensor-parallel piece.
    """
    # Example, [10, 8] on 4 workers: by dim 0 the longest piece is 3/10 of the tensor, by dim 1 it is 2/8, so dim 1 is first.
    axis = axis_of(layout)
    if axis is None:
        return []
    size = layout.mesh.axes[axis][1]
    taken = {p.dim for n, p in enumerate(layout.placements) if isinstance(p, Shard) and n != axis}
    free = [d for d, extent in enumerate(shape) if d not in taken and extent > 1]
    return sorted(free, key=lambda d: -(-shape[d] // size) / shape[d])


def rest(layout: Layout, shape: Sequence[int], dim: int | None = None) -> Layout:
    """A layout, split along the data-parallel axis too: by `dim`, or by the best. A tensor without such a dim is not split."""
    axis, free = axis_of(layout), dims(layout, shape)
    if axis is None or not free:
        return used(layout)
    return layout.with_placement(axis, Shard(free[0] if dim is None else dim))


def used(layout: Layout) -> Layout:
    """A layout with the tensor whole along the data-parallel axis."""
    axis = axis_of(layout)
    return layout if axis is None or not isinstance(layout.placements[axis], Shard) else layout.with_placement(axis, R)


def at_rest(known: OpSchema) -> bool:
    """True if an op on tensors that all rest is computed on their pieces: then it takes no communication."""
    return known.template.pointwise or known.name in ELEMENTWISE or known.name in REDUCTIONS or bool(known.columns)


def uses(known: OpSchema) -> bool:
    """True if an op reads values of its operands, and gives no other view of them."""
    return known.name not in VIEWS and known.name not in VALUELESS and not known.name.startswith("new_")


def norm(known: OpSchema, places: Sequence[Placement | None]) -> tuple[Placement, ...] | None:
    """Placements of the norm of a whole tensor whose pieces are at these placements: a term each; None for another op."""
    if known.name != "linalg_vector_norm" or known.named(2, "dim") is not None:
        return None
    order = known.named(1, "ord", 2)
    term = NORMS.get(order, "") if isinstance(order, (int, float)) else ""
    if term not in ("sum", "norm2") or any(isinstance(p, Partial) for p in places):  # an empty piece has no maximum
        return None
    return tuple(Partial(term) if isinstance(p, Shard) else R for p in places)


def root_of_view(root: Spec, view: Spec, want: Layout) -> Layout | None:
    """Layout of memory in which a view of all of it has the layout `want`, if there is one. Dims of extent 1 correspond to
    none.
    """
    if root.numel != view.numel:
        return None
    # A dim of the view is the dim of the root with its extent and stride, as in a transpose.
    where = {(n, step): d for d, (n, step) in enumerate(zip(root.shape, root.stride, strict=True)) if n > 1}
    dims = [where.get((n, step)) if n > 1 else -1 for n, step in zip(view.shape, view.stride, strict=True)]
    placements: list[Placement] = []
    for p in want.placements:
        dim = dims[p.dim] if isinstance(p, Shard) else -1
        if dim is None or (isinstance(p, Shard) and dim < 0):
            return None
        placements.append(Shard(dim, p.parts) if isinstance(p, Shard) else p)
    return Layout(want.mesh, tuple(placements))


def scattered_axis(have: Layout, want: Layout) -> int | None:
    """The one axis along which terms become pieces, where nothing else differs; None for any other pair of layouts."""
    if have.mesh != want.mesh:
        return None
    differ = [axis for axis, (held, wanted) in enumerate(zip(have.placements, want.placements, strict=True)) if held != wanted]
    if len(differ) != 1:
        return None
    held, wanted = have.placements[differ[0]], want.placements[differ[0]]
    terms = isinstance(held, Partial) and held.op == "sum"
    alone = isinstance(wanted, Shard) and not any(
        isinstance(p, Shard) and p.dim == wanted.dim for n, p in enumerate(want.placements) if n != differ[0]
    )
    return differ[0] if terms and alone else None
