"""Vocabulary of sharding rules: a rule's decision, and placements of an operand on one mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gt.dispatcher.sharding.op_schema import OpSchema
from gt.ir.layout import Partial, Placement, R, Shard
from gt.ir.spec import Spec

Place = Placement | None

# Names of reductions over pieces of unequal length, none of them empty
OF_PIECES = {"amax": "amax of pieces", "amin": "amin of pieces"}


class Decision(NamedTuple):
    """On one mesh axis: the placement that each tensor operand needs, and that of each flat output."""

    wants: tuple[Placement, ...]
    outs: tuple[Placement, ...]


Rule = Callable[[OpSchema, list[Place], int], Decision | None]


def shape(known: OpSchema, index: int) -> tuple[int, ...]:
    return known.template.ins[index].shape


def out_shape(known: OpSchema, index: int = 0) -> tuple[int, ...]:
    out = known.template.outs[index]
    return out.spec.shape if out.spec else shape(known, out.of)


def out_dtype(known: OpSchema) -> str:
    out = known.template.outs[0]
    return (out.spec or known.template.ins[out.of]).dtype


def even(extent: int, place: Shard, size: int) -> bool:
    """True if a split gives every worker the same extent."""
    return extent % (size * place.parts) == 0


def a_piece_is_empty(extent: int, size: int) -> bool:
    """True if the last worker's piece of a split dim is empty."""
    return -(-extent // size) * (size - 1) >= extent


def settled(place: Place) -> Placement:
    """Placement of an input that is not redistributed: unplaced inputs are replicated, partial inputs are reduced."""
    return R if place is None or isinstance(place, Partial) else place


def whole(known: OpSchema) -> Decision:
    return Decision((R,) * known.tensors, (R,) * len(known.template.outs))


def alike(specs: Sequence[Spec]) -> bool:
    """True if all have the same shape."""
    return len({spec.shape for spec in specs}) == 1
