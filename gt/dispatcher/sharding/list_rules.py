"""Sharding rules for list ops: those that work on pieces, and the op that combines the pieces' results.

A list op without a row here runs on whole tensors, on one mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gt.dispatcher.sharding.op_schema import OpSchema
from gt.ir.layout import Layout, Partial, Shard, local_shape
from gt.ir.template import V

# Elementwise ops; in-place forms have one more `_`
_UNARY = (
    "abs acos asin atan ceil clone cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round "
    "rsqrt sigmoid sign sin sinh sqrt tan tanh trunc zero"
)
_SEVERAL = "add addcdiv addcmul clamp_max clamp_min copy div lerp maximum minimum mul pow sub"
ELEMENTWISE = frozenset(
    {
        *(f"_foreach_{name}{form}" for name in f"{_UNARY} {_SEVERAL}".split() for form in ("", "_")),
        *(f"_fused_{name}_" for name in ("adagrad", "adam", "adamw", "sgd")),
        "_amp_foreach_non_finite_check_and_unscale_",
    }
)

# op -> reduction of the numbers that workers compute for their pieces
WRITTEN = {"_amp_foreach_non_finite_check_and_unscale_": "max"}

# order of a norm -> the reduction of the norms of pieces
NORMS = {0.0: "sum", 1.0: "sum", 2.0: "norm2", math.inf: "max", -math.inf: "min"}


def _norm(order: Any) -> str:
    return NORMS.get(order, "") if isinstance(order, (int, float)) else ""


def _powers(order: Any) -> str:
    return "sum" if isinstance(order, (int, float)) and 0 <= order < math.inf else ""


# op -> reduction of the results over pieces, by the order of the norm
REDUCTIONS: dict[str, Callable[[Any], str]] = {
    "_foreach_norm": _norm,
    "_foreach_powsum": _powers,
    "_foreach_max": lambda order: "max",
}


def combination(known: OpSchema, values: tuple) -> str | None:
    """The op that combines a reduction's results over pieces, "" if there is none; None for an op that is no reduction."""
    rule = REDUCTIONS.get(known.name)
    if rule is None:
        return None
    order = known.named(1, "ord", 2)
    return rule(values[order.index] if isinstance(order, V) else order)


def runs_in_parts(known: OpSchema) -> bool:
    """True if the op may run on a part of its lists: no operand beside the lists can have a row for each index."""
    beside = [spec.shape for index, spec in enumerate(known.template.ins) if index not in known.listed]
    return (known.name in ELEMENTWISE or known.name in REDUCTIONS) and not any(beside)


def on_pieces(known: OpSchema, place: int, layout: Layout, combined: str | None) -> bool:
    """True if the tensors at one index of the lists can be computed in the split of the first of them."""
    # A reduction needs one that combines its results. Any other op needs tensors of one shape at the index: then the leader's
    # split is one of all of them.
    if not any(isinstance(p, Shard) for p in layout.placements):
        return True
    ins, outs = known.template.ins, known.template.outs
    shape = ins[known.columns[0].tensors[place]].shape
    if combined is not None:
        if combined not in ("max", "min"):
            return combined != ""
        # An empty piece has no maximum, so no worker may have one.
        return all(all(local_shape(layout, shape, rank)) for rank in range(len(layout.mesh.workers)))
    beside = [ins[items[place]].shape for column in known.columns if place < len(items := column.tensors)]
    out = outs[place].spec if len(outs) == len(known.columns[0].items) else None
    return {*beside, *([out.shape] if out else [])} <= {shape, ()}


def made(layout: Layout, combined: str | None) -> Layout:
    """Layout of a result: that of the first list's tensor, or partial for a reduction."""
    if combined is None:
        return layout
    terms = (Partial(combined) if isinstance(p, Shard) else p for p in layout.placements)
    return Layout(layout.mesh, tuple(terms))
