"""One op as several that have rules: the templates, and which is made of which.

An operand is the whole op's own, by its number from 0, one of its outputs, -1 and below, or a name of what is between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gt.dispatcher.sharding.localize import dense
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.ir.layout import Placement
from gt.ir.spec import Spec
from gt.ir.template import Const, Out, T, Template

Placements = tuple[Placement, ...]
Name = int | str


class ChainValue(NamedTuple):
    """What an op of the chain reads or has made."""

    name: Name
    spec: Spec


class ChainOp(NamedTuple):
    """One op. Of one whose placements are not said, the rule is asked."""

    known: tuple[OpSchema, ...]  # one, or one for each worker of the mesh where their constants differ
    ins: tuple[Name, ...]
    outs: tuple[Name, ...]
    wants: tuple[Placements, ...] = ()
    makes: tuple[Placements, ...] = ()


class Chain:
    """Parts, one after the other."""

    def __init__(self, known: OpSchema) -> None:
        self.known = known
        self.parts: list[ChainOp] = []

    def operand(self, index: int, dtype: str = "") -> ChainValue:
        """An operand of the whole op, made another dtype if it is not that."""
        spec = self.known.template.ins[index]
        return self.cast(ChainValue(index, spec), dtype or spec.dtype)

    def cast(self, value: ChainValue, dtype: str) -> ChainValue:
        if dtype == value.spec.dtype:
            return value
        out = dense(value.spec.shape, retyped(value.spec, dtype))
        return self.op("_to_copy.default", value, out=out, dtype=Const("dtype", dtype))

    def op(self, name: str, *args: Any, out: Spec, pointwise: bool = True, known_as: str = "", **kwargs: Any) -> ChainValue:
        """The next op, whose rule is that of its name, or of the one it is known as."""
        made = template(name, args, out, pointwise, kwargs)
        known = OpSchema(made)
        known.name = known_as or known.name
        return self._add((known,), args, out)

    def lying(
        self, name: str, *args: Any, out: Spec, where: Placements, makes: Placements | None = None, pointwise: bool = True
    ) -> ChainValue:
        """The next op, whose operands lie so, and what it makes as well if not otherwise said."""
        return self.each(name, [args], out, where, where if makes is None else makes, pointwise)

    def each(
        self,
        name: str,
        each: Sequence[tuple],
        out: Spec,
        where: Placements,
        makes: Placements,
        pointwise: bool = True,
        **kwargs: Any,
    ) -> ChainValue:
        """The next op, with arguments for each worker of the mesh."""
        knowns = tuple(OpSchema(template(name, args, out, pointwise, kwargs)) for args in each)
        return self._add(knowns, each[0], out, (where,) * knowns[0].tensors, (makes,))

    def _add(self, known: tuple[OpSchema, ...], args: tuple, out: Spec, wants: tuple = (), makes: tuple = ()) -> ChainValue:
        value = ChainValue(f"part{len(self.parts)}", out)
        ins = tuple(arg.name for arg in args if isinstance(arg, ChainValue))
        self.parts.append(ChainOp(known, ins, (value.name,), wants, makes))
        return value

    def end(self, last: ChainValue) -> list[ChainOp]:
        """All parts; the last, cast if need be, makes the whole op's output."""
        made = self.known.template.outs[0].spec
        assert made is not None
        self.cast(last, made.dtype)
        part = self.parts[-1]
        old = part.known[0]
        t = old.template
        known = OpSchema(Template(t.op, t.args, t.kwargs, t.ins, 0, (Out("new", made),), (), False, t.pointwise))
        known.name = old.name
        self.parts[-1] = part._replace(known=(known,), outs=(-1,))
        return self.parts


def template(name: str, args: Sequence[Any], out: Spec, pointwise: bool, kwargs: dict[str, Any]) -> Template:
    """Of an ATen op with one new output, whose tensors are the Values among its arguments."""
    ins = [arg for arg in args if isinstance(arg, ChainValue)]
    holes = iter(range(len(ins)))
    filled = tuple(T(next(holes)) if isinstance(arg, ChainValue) else arg for arg in args)
    specs = tuple(value.spec for value in ins)
    return Template(f"aten.{name}", filled, tuple(kwargs.items()), specs, 0, (Out("new", out),), (), False, pointwise)


def retyped(spec: Spec, dtype: str) -> Spec:
    return Spec(spec.shape, spec.stride, spec.offset, dtype)
