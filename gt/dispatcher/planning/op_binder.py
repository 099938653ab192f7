"""Definitions of one op for the workers of its mesh, each worker's part with an estimate of its time."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from gt.dispatcher.sharding import cost
from gt.dispatcher.sharding.cost import Shape
from gt.dispatcher.sharding.localize import payload
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.sharding.redistribution_steps import Order
from gt.dispatcher.sharding.views import VIEWS
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.records import Bound
from gt.ir.layout import Layout, local_shape


class OpBinder:
    """`bind` makes the definitions; `compute` also emits the op. Inputs must have the layouts already."""

    def __init__(self, context: SessionContext) -> None:
        self._emitter = context.emitter

    def compute(
        self, known: OpSchema, ins: list[Layout], outs: list[Layout], in_ids: list[int], values: tuple, out_ids: list[int]
    ) -> None:
        """Emit one op on the mesh of its layouts."""
        mesh = (outs or ins)[0].mesh
        key = ("compute", mesh, tuple(ins), tuple(outs))
        bound = known.plans.get(key)
        if bound is None:
            bound = known.plans[key] = self.bind(known, ins, outs)
        emitter = self._emitter
        operands = [*emitter.ids(in_ids), *values, *emitter.ids(out_ids)]
        for worker, define in bound:
            emitter.write(worker, define, operands)

    def bind(self, known: OpSchema, ins: Sequence[Layout], outs: Sequence[Layout]) -> list[Bound]:
        """One op's definitions for the workers of its mesh."""
        mesh = (outs or ins)[0].mesh
        orders = [Order(worker, "op", payload(known, ins, outs, rank)) for rank, worker in enumerate(mesh.workers)]
        bound = self._emitter.bind(orders)
        for rank, (worker, define) in enumerate(bound):
            self._emitter.estimate(define, _seconds(known, ins, outs, rank, bool(worker.info.get("unique_id"))))
        return bound


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
