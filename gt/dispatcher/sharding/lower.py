"""Ops that have no rule of their own on split inputs, but are two or three ops that do: templates made here.

A mean over split rows is a sum over a sum; everything else in the planner stays one op in, one op out.
"""

from __future__ import annotations

from collections.abc import Sequence

from gt.dispatcher.sharding.base import alike, even
from gt.dispatcher.sharding.losses import PART
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.ir.layout import Layout, Mesh, Placement, Shard
from gt.ir.template import Out, T, Template

MEAN, SUM = 1, 2  # torch's reduction codes


def mean_of_rows(known: OpSchema, layouts: list[Layout | None]) -> bool:
    """Whether this is the mean loss of rows that are split: its terms and their weights have to be added up first."""
    if known.name not in ("nll_loss_forward", "nll_loss2d_forward") or known.arg(3) != MEAN:
        return False
    first = layouts[0] if len(known.template.ins[0].shape) > 1 else None
    return first is not None and any(isinstance(p, Shard) and p.dim == 0 for p in first.placements)


def sums(known: OpSchema) -> OpSchema:
    """The same loss with reduction sum: loss and total weight are terms."""
    if "sums" not in known.plans:
        t = known.template
        args = (*t.args[:3], SUM, *t.args[4:])
        known.plans["sums"] = OpSchema(Template(t.op, args, t.kwargs, t.ins, t.values, t.outs, t.writes))
    return known.plans["sums"]


def quotient(known: OpSchema) -> OpSchema:
    """loss / total weight."""
    if "quotient" not in known.plans:
        spec = known.template.outs[0].spec
        assert spec is not None
        made = Template("aten.div.Tensor", (T(0), T(1)), (), (spec, spec), 0, (Out("new", spec),), (), False, True)
        known.plans["quotient"] = OpSchema(made)
    return known.plans["quotient"]


def parts_of(known: OpSchema, mesh: Mesh, start: Sequence[Placement | None]) -> int:
    """Of how many equal parts this is the gradient of a mean loss, its elements lying so; 1 where they are not equal."""
    ins, parts = known.template.ins, 1
    for place, (_, size) in zip(start, mesh.axes, strict=True):
        if isinstance(place, Shard):
            parts *= size if even(ins[1].shape[place.dim], place, parts * size) else 0
    return parts if parts and alike(ins[1:]) else 1


def share(known: OpSchema, parts: int) -> tuple[OpSchema, OpSchema]:
    """The loss's own gradient divided by so many parts, and the gradient of a part by that."""
    if ("share", parts) not in known.plans:
        t, spec = known.template, known.template.ins[0]
        divide = Template("aten.div.Scalar", (T(0), float(parts)), (), (spec,), 0, (Out("new", spec),), (), False, True)
        part = OpSchema(Template(t.op, t.args, t.kwargs, t.ins, t.values, t.outs, t.writes))
        part.name = PART
        known.plans["share", parts] = OpSchema(divide), part
    return known.plans["share", parts]
