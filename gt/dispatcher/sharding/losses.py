"""Sharding rules of losses: split as their elements are. The mean over split elements is decomposed, see op_chain.py."""

from __future__ import annotations

from gt.dispatcher.sharding.base import Decision, Place, alike, even, shape, whole
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.ir.layout import P, Partial, R, Shard

# losses of elements with others of the same shape -> where the code of their reduction is; torch leaves out a mean's
LOSSES = {"mse_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "soft_margin_loss": 2, "binary_cross_entropy": 3}
PART = "loss_backward_of_part"  # the gradient of a mean loss whose own gradient has been divided by the number of parts


def nll_loss(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    """Rows may be split if the loss is a sum or kept per row. A mean is decomposed into two sums."""
    row = _rows(known, 0, places[:2])
    reduction = known.arg(3)
    weights = (R,) * (known.tensors - 2)
    if row is None or reduction == 1:
        return Decision((R,) * known.tensors, (R, R))
    return Decision((row, row, *weights), (P, P) if reduction == 2 else (row, R))


def _rows(known: OpSchema, at: int, places: list[Place]) -> Shard | None:
    """The split of rows. An operand with one dim is a row itself."""
    split = (p for p in places if isinstance(p, Shard) and p.dim == 0 and p.parts == 1)
    return next(split, None) if len(shape(known, at)) > 1 else None


def nll_loss_backward(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    """Operands: grad, rows, targets, weight or none, total weight. The gradient has the placement of the rows."""
    row = _rows(known, 1, places[1:3])
    if row is None:
        return Decision((R,) * known.tensors, (R,))
    grad = row if len(shape(known, 0)) > 0 else R
    return Decision((grad, row, row, *(R,) * (known.tensors - 3)), (row,))


def loss(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    """Split as the first operand: one loss an element, a partial sum, or a partial mean where the pieces are equal."""
    # Codes of torch: 0 none, 1 mean, 2 sum. A mean of means is the mean only of equal pieces.
    place, ins = places[0], known.template.ins
    if not isinstance(place, Shard) or not alike(ins):
        return whole(known)
    code = known.named(LOSSES[known.name], "reduction", 1)
    if code == 1 and not even(ins[0].shape[place.dim], place, size):
        return None
    return Decision((place,) * known.tensors, ((place, Partial("avg"), P)[code],))


def loss_backward(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    """Operands: grad, elements and others. A mean is decomposed: a worker would divide by its own number of elements."""
    place, ins = places[1], known.template.ins
    if not isinstance(place, Shard) or not alike(ins[1:]):
        return whole(known)
    if known.name != PART and mean_backward(known):
        return None
    grad = place if ins[0].shape == ins[1].shape else R
    return Decision((grad, *(place,) * (known.tensors - 1)), (place,))


def mean_backward(known: OpSchema) -> bool:
    """True for the backward of the mean of a loss in LOSSES."""
    at = LOSSES.get(known.name.removesuffix("_backward"))
    return at is not None and known.name.endswith("_backward") and known.named(at + 1, "reduction", 1) == 1
