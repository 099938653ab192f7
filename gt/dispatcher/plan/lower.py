"""Ops that have no rule of their own on split inputs, but are two or three ops that do: templates made here.

A mean over split rows is a sum over a sum; everything else in the planner stays one op in, one op out.
"""

from __future__ import annotations

from gt.dispatcher.plan.known import Known
from gt.ir.layout import Layout, Shard
from gt.ir.template import Out, T, Template

MEAN, SUM = 1, 2  # torch's reduction codes


def mean_of_rows(known: Known, layouts: list[Layout | None]) -> bool:
    """Whether this is the mean loss of rows that are split: its terms and their weights have to be added up first."""
    if known.name not in ("nll_loss_forward", "nll_loss2d_forward") or known.arg(3) != MEAN:
        return False
    first = layouts[0]
    return first is not None and any(isinstance(p, Shard) and p.dim == 0 for p in first.placements)


def sums(known: Known) -> Known:
    """The same loss with reduction sum: loss and total weight are terms."""
    if "sums" not in known.plans:
        t = known.template
        args = (*t.args[:3], SUM, *t.args[4:])
        known.plans["sums"] = Known(Template(t.op, args, t.kwargs, t.ins, t.values, t.outs, t.writes))
    return known.plans["sums"]


def quotient(known: Known) -> Known:
    """loss / total weight."""
    if "quotient" not in known.plans:
        spec = known.template.outs[0].spec
        assert spec is not None
        made = Template("aten.div.Tensor", (T(0), T(1)), (), (spec, spec), 0, (Out("new", spec),), (), False, True)
        known.plans["quotient"] = Known(made)
    return known.plans["quotient"]
