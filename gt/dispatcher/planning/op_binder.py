"""Definitions of one op for the workers of its mesh, each worker's part with an estimate of its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from gt.dispatcher.sharding import cost
from gt.dispatcher.sharding.cost import Shape
from gt.dispatcher.sharding.localize import payload
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.sharding.redistribution_steps import Order
from gt.dispatcher.sharding.views import VIEWS
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.records import Bound
from gt.ir.layout import Layout, Shard, local_shape


class OpBinder:
    """`bind` makes the definitions; `compute` also emits the op. Inputs must have the layouts already."""

    def __init__(self, context: SessionContext) -> None:
        self._context, self._emitter = context, context.emitter

    def compute(
        self, known: OpSchema, ins: list[Layout], outs: list[Layout], in_ids: list[int], values: tuple, out_ids: list[int]
    ) -> None:
        """Emit one op on the mesh of its layouts."""
        mesh = (outs or ins)[0].mesh
        key = ("compute", mesh, tuple(ins), tuple(outs))
        bound = known.plans.get(key)
        if bound is None:
            bound = known.plans[key] = self._bind(known, ins, outs, _go_on)  # of a recipe: not to be left half made
        emitter = self._emitter
        emitter.write_all(bound, [*emitter.ids(in_ids), *values, *emitter.ids(out_ids)])

    def bind(self, known: OpSchema, ins: Sequence[Layout], outs: Sequence[Layout]) -> list[Bound]:
        """One op's definitions for the workers of its mesh; others may have turns meanwhile."""
        return self._bind(known, ins, outs, self._context.breathe)

    def _bind(self, known: OpSchema, ins: Sequence[Layout], outs: Sequence[Layout], breathe: Callable[[], None]) -> list[Bound]:
        mesh = (outs or ins)[0].mesh
        # A term may be summed in place, which the operand must not see
        if known.name == "gt.lend" and not outs[0].partial:
            return self._emitter.bind(Order(index, "alias", {}) for index in mesh.workers)
        alike = _alike(known, ins, outs)
        orders: list[Order] = []
        for rank, index in enumerate(mesh.workers):
            breathe()
            orders.append(Order(index, "op", orders[0].payload if orders and alike else payload(known, ins, outs, rank)))
        bound = self._emitter.bind(orders)
        seconds: dict[tuple[int, bool], float] = {}
        for rank, (worker, define) in enumerate(bound):
            key = 0 if alike else rank, bool(worker.info.get("unique_id"))
            if key not in seconds:
                breathe()
                seconds[key] = _seconds(known, ins, outs, rank, key[1])
            self._emitter.estimate(define, seconds[key])
        return bound


def _go_on() -> None:
    """No pause."""


def _alike(known: OpSchema, ins: Sequence[Layout], outs: Sequence[Layout]) -> bool:
    """True if all workers' definitions of an op are surely the same: no pieces of another size, no random numbers."""
    specs = [*known.template.ins, *[out.spec for out in known.template.outs]]
    pairs = {(id(layout), spec.shape): (layout, spec.shape) for layout, spec in zip((*ins, *outs), specs) if spec is not None}
    splits = any(isinstance(place, Shard) for layout in (*ins, *outs) for place in layout.placements)
    if known.random or len(ins) != len(known.template.ins):
        return not splits and not known.random
    return not splits or all(_even(layout, shape) for layout, shape in pairs.values())


def _even(layout: Layout, shape: Shape) -> bool:
    """True if all pieces surely have one shape."""
    counts = [1] * len(shape)
    for place, size in zip(layout.placements, layout.mesh.sizes, strict=True):
        if isinstance(place, Shard):
            counts[place.dim] *= size * place.parts
    return all(extent % count == 0 for extent, count in zip(shape, counts, strict=True))


def _seconds(known: OpSchema, ins: Sequence[Layout], outs: Sequence[Layout], rank: int, gpu: bool) -> float:
    """An estimate of one worker's part of an op, from below."""
    specs, results = known.template.ins, [out.spec for out in known.template.outs]
    if len(ins) < len(specs) or len(outs) < len(results) or known.name in VIEWS:
        return 0.0
    pieces: dict[tuple, Shape] = {}  # operands of a long list lie alike

    def piece(layout: Layout, shape: Shape) -> Shape:
        key = id(layout), shape
        if key not in pieces:
            pieces[key] = local_shape(layout, shape, rank)
        return pieces[key]

    # Bytes of outputs are left out.
    shapes = [piece(layout, spec.shape) for layout, spec in zip(ins, specs, strict=False)]
    made = [piece(layout, spec.shape) for layout, spec in zip(outs, results, strict=False) if spec is not None]
    nbytes = sum(prod(shape) * spec.itemsize for shape, spec in zip(shapes, specs, strict=True))
    try:
        return cost.at_least(cost.flops(known.template.op, shapes, made), nbytes, gpu)
    except (IndexError, OverflowError):  # no such op: it fails where it is executed
        return 0.0
