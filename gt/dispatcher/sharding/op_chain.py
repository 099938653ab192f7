"""Decomposition of one op into a chain of ops that have sharding rules of their own.

First the means of losses: over split rows, a mean is the quotient of two sums. Then `Chain`, with which the decompositions of
`vocab_parallel.py` are written. Templates only: `planning/decompose.py` plans and executes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gt.dispatcher.sharding.base import alike, even
from gt.dispatcher.sharding.localize import dense
from gt.dispatcher.sharding.losses import PART
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.ir.layout import Layout, Mesh, Placement, Shard
from gt.ir.spec import Spec
from gt.ir.template import Const, Out, T, Template

MEAN, SUM = 1, 2  # torch's reduction codes

# ---- the mean of a loss


def mean_of_rows(known: OpSchema, layouts: list[Layout | None]) -> bool:
    """True for the mean loss of split rows: `sums` of the rows and their weights come first, then the `quotient`."""
    if known.name not in ("nll_loss_forward", "nll_loss2d_forward") or known.arg(3) != MEAN:
        return False
    first = layouts[0] if len(known.template.ins[0].shape) > 1 else None
    return first is not None and any(isinstance(p, Shard) and p.dim == 0 for p in first.placements)


def sums(known: OpSchema) -> OpSchema:
    """The same loss with reduction sum: loss and total weight are partial."""
    # With class weights w the mean is sum(w * l) / sum(w), so means of parts of the rows do not give it: sums do.
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
        division = Template("aten.div.Tensor", (T(0), T(1)), (), (spec, spec), 0, (Out("new", spec),), (), False, True)
        known.plans["quotient"] = OpSchema(division)
    return known.plans["quotient"]


def parts_of(known: OpSchema, mesh: Mesh, start: Sequence[Placement | None]) -> int:
    """Number of equal parts into which `start` splits the elements of a mean loss; 1 where the parts are not equal."""
    ins, parts = known.template.ins, 1
    for place, (_, size) in zip(start, mesh.axes, strict=True):
        if isinstance(place, Shard):
            parts *= size if even(ins[1].shape[place.dim], place, parts * size) else 0
    return parts if parts and alike(ins[1:]) else 1


def share(known: OpSchema, parts: int) -> tuple[OpSchema, OpSchema]:
    """Backward of a mean loss over equal parts: its gradient divided by `parts`, then the backward of each part's mean."""
    # The mean of n elements in k equal parts is 1/k of the sum of the parts' means. A worker divides by n/k, the elements that
    # it has, so the gradient is divided by k before.
    if ("share", parts) not in known.plans:
        t, spec = known.template, known.template.ins[0]
        divide = Template("aten.div.Scalar", (T(0), float(parts)), (), (spec,), 0, (Out("new", spec),), (), False, True)
        part = OpSchema(Template(t.op, t.args, t.kwargs, t.ins, t.values, t.outs, t.writes))
        part.name = PART
        known.plans["share", parts] = OpSchema(divide), part
    return known.plans["share", parts]


# ---- chains of ops

Placements = tuple[Placement, ...]
Name = int | str  # operand of the decomposed op, from 0; its output, -1 and below; or the name of a value between two ops


class ChainValue(NamedTuple):
    """A value that ops of the chain read."""

    name: Name
    spec: Spec


class ChainOp(NamedTuple):
    """One op of a chain. Where `wants` is empty, the op's own sharding rule decides the placements."""

    known: tuple[OpSchema, ...]  # one, or one for each worker of the mesh where their constants differ
    ins: tuple[Name, ...]
    outs: tuple[Name, ...]
    wants: tuple[Placements, ...] = ()
    makes: tuple[Placements, ...] = ()


# Values between two ops are named part0, part1, ... by the ops that make them. The last op makes the output, -1.
class Chain:
    """Writes the chain of ops that one op is decomposed into."""

    def __init__(self, known: OpSchema) -> None:
        self.known = known
        self.parts: list[ChainOp] = []

    def operand(self, index: int, dtype: str = "") -> ChainValue:
        """An operand of the decomposed op, cast to `dtype`."""
        spec = self.known.template.ins[index]
        return self.cast(ChainValue(index, spec), dtype or spec.dtype)

    def cast(self, value: ChainValue, dtype: str) -> ChainValue:
        if dtype == value.spec.dtype:
            return value
        out = dense(value.spec.shape, retyped(value.spec, dtype))
        return self.op("_to_copy.default", value, out=out, dtype=Const("dtype", dtype))

    def op(self, name: str, *args: Any, out: Spec, pointwise: bool = True, known_as: str = "", **kwargs: Any) -> ChainValue:
        """Append an op whose placements are decided by the sharding rule of `known_as`, by default the op's own."""
        schema = OpSchema(template(name, args, out, pointwise, kwargs))
        schema.name = known_as or schema.name
        return self._add((schema,), args, out)

    def placed(
        self,
        name: str,
        *args: Any,
        out: Spec,
        where: Placements,
        makes: Placements | None = None,
        pointwise: bool = True,
        **kwargs: Any,
    ) -> ChainValue:
        """Append an op that wants its operands in placements `where` and makes its output in `makes`, by default the same."""
        schema = OpSchema(template(name, args, out, pointwise, kwargs))
        return self._add((schema,), args, out, (where,) * schema.tensors, (where if makes is None else makes,))

    def placed_by_rank(self, name: str, ranks: Sequence[tuple[ChainValue, Any]], out: Spec, where: Placements) -> ChainValue:
        """Append a pointwise op in placements `where` whose arguments are those of each worker of the mesh."""
        schemas = tuple(OpSchema(template(name, args, out, True, {})) for args in ranks)
        return self._add(schemas, ranks[0], out, (where,) * schemas[0].tensors, (where,))

    def _add(self, known: tuple[OpSchema, ...], args: tuple, out: Spec, wants: tuple = (), makes: tuple = ()) -> ChainValue:
        value = ChainValue(f"part{len(self.parts)}", out)
        ins = tuple(arg.name for arg in args if isinstance(arg, ChainValue))
        self.parts.append(ChainOp(known, ins, (value.name,), wants, makes))
        return value

    def end(self, last: ChainValue) -> list[ChainOp]:
        """All ops; the last makes the decomposed op's output, after a cast where `last` has another dtype."""
        # The output gets the strides that the client knows, whatever the last op would give it.
        result = self.known.template.outs[0].spec
        assert result is not None
        self.cast(last, result.dtype)
        part = self.parts[-1]
        old = part.known[0]
        t = old.template
        schema = OpSchema(Template(t.op, t.args, t.kwargs, t.ins, 0, (Out("new", result),), (), False, t.pointwise))
        schema.name = old.name
        self.parts[-1] = part._replace(known=(schema,), outs=(-1,))
        return self.parts


def template(name: str, args: Sequence[Any], out: Spec, pointwise: bool, kwargs: dict[str, Any]) -> Template:
    """Template of an ATen op with one new output. The ChainValues among its arguments are its tensors."""
    ins = [arg for arg in args if isinstance(arg, ChainValue)]
    holes = iter(range(len(ins)))
    filled = tuple(T(next(holes)) if isinstance(arg, ChainValue) else arg for arg in args)
    specs = tuple(value.spec for value in ins)
    return Template(f"aten.{name}", filled, tuple(kwargs.items()), specs, 0, (Out("new", out),), (), False, pointwise)


def retyped(spec: Spec, dtype: str) -> Spec:
    return Spec(spec.shape, spec.stride, spec.offset, dtype)
