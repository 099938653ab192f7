"""Execution of an op as several: a mean over split rows, and ops along a dim that is split.

The several ops are templates of `sharding/op_chain.py` and `sharding/vocab_parallel.py`.
"""

from __future__ import annotations

from typing import Protocol

from gt.dispatcher.planning.redistributor import Redistributor
from gt.dispatcher.sharding.localize import payload
from gt.dispatcher.sharding.losses import mean_backward
from gt.dispatcher.sharding.op_chain import ChainOp, Name, parts_of, quotient, share, sums
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.sharding.redistribution_steps import Order
from gt.dispatcher.sharding.vocab_parallel import LOWERINGS, SUMS, Starts, embedding_backward
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.records import OpPlan, Origin
from gt.dispatcher.state.tensors import Tensor
from gt.ir.layout import Layout, Mesh, R

LOOK_UPS = ("embedding", "embedding_dense_backward")
MAX_KEPT_TABLES = 4096  # shapes of tables whose layout is remembered


class OpPlanner(Protocol):
    """The planner, as far as decompositions need it."""

    def starts(self, known: OpSchema, origin: Origin, ins: list[Tensor], mesh: Mesh) -> Starts: ...
    def bound(self, wants: tuple[Layout, ...], makes: tuple[Layout, ...], orders: list[Order]) -> OpPlan: ...
    def bring_and_emit(self, known: OpSchema, plan: OpPlan, ins: list[Tensor], values: tuple, outs: list[int]) -> None: ...
    def plan_part(self, known: OpSchema, origin: Origin, ins: list[Tensor], values: tuple, outs: list[int]) -> None: ...


class Decompose:
    """Ops of one session that are executed as several."""

    def __init__(self, context: SessionContext, redistributor: Redistributor, planner: OpPlanner) -> None:
        self._context, self._redistributor, self._planner = context, redistributor, planner
        self._emitter, self._table = context.emitter, context.table
        self._tables: dict[tuple, Layout] = {}  # (mesh, shape) -> layout of a table of this shape that was looked up last

    def op(self, known: OpSchema, origin: Origin, ins: list[Tensor], outs: list[int], values: tuple, mesh: Mesh) -> bool:
        """Execute an op as several ops, if its inputs' layouts call for that; False, and nothing is done, if not."""
        # 1. The gradient of a mean loss over split elements.
        if mean_backward(known):
            parts = parts_of(known, mesh, self._planner.starts(known, origin, ins[1:2], mesh)[0])
            if parts > 1:
                self._part_of_mean(*share(known, parts), origin, ins, values, outs)
            return parts > 1
        # 2. Vocabulary parallelism. A chain is kept under the placements that the inputs start from; None is kept too, where
        #    gathering is faster.
        if known.name not in (*LOWERINGS, *LOOK_UPS) or known.values:
            return False
        starts = self._planner.starts(known, origin, ins, mesh)
        if known.name == "_log_softmax_backward_data" and (sums := self._sums(ins[0], mesh)) is not None:
            ins, starts = [*ins, sums], [*starts, list(sums.layout.placements)]  # type: ignore[union-attr]
        key = ("lowered", mesh, self._table_layout(known, starts, mesh), *map(tuple, starts))
        if key not in known.plans:
            known.plans[key] = self._parts(known, starts, mesh)
        if known.plans[key]:
            self._chain(known.plans[key], origin, ins, outs, mesh)
        return bool(known.plans[key])

    def _sums(self, grad: Tensor, mesh: Mesh) -> Tensor | None:
        """The sums of a gradient's rows, if they are known on this mesh and the gradient has not been written since."""
        version, sums = grad.sums or (-1, None)
        there = sums is not None and sums.layout is not None and sums.layout.mesh == mesh
        return sums if there and version == grad.storage.version else None

    def _table_layout(self, known: OpSchema, starts: Starts, mesh: Mesh) -> Layout | None:
        """Layout of the table that is looked up, or whose gradient this is, as far as it is known."""
        # The backward op has no operand that is the table. A table of the same shape on the same mesh was looked up before it.
        # If that was another table, the gradient is split as that one, which costs time and changes no value.
        if known.name == "embedding":
            layout = Layout(mesh, tuple(R if p is None else p for p in starts[0]))
            self._tables[mesh, known.template.ins[0].shape] = layout
            if len(self._tables) > MAX_KEPT_TABLES:
                del self._tables[next(iter(self._tables))]
            return layout
        made = known.template.outs[0].spec
        return self._tables.get((mesh, made.shape)) if known.name in LOOK_UPS and made is not None else None

    def _parts(self, known: OpSchema, starts: Starts, mesh: Mesh) -> list[ChainOp] | None:
        if known.name in LOWERINGS:
            return LOWERINGS[known.name](known, starts, mesh)
        table = self._table_layout(known, starts, mesh)
        return embedding_backward(known, starts, mesh, table.placements) if table is not None else None

    def _chain(self, parts: list[ChainOp], origin: Origin, ins: list[Tensor], outs: list[int], mesh: Mesh) -> None:
        """Execute the parts, and free each value between them behind its last use."""
        # names: the id of each value; outputs -1, -2, ... have the client's ids, values between two ops temporary ones.
        # last: the part that uses such a value last, behind which it is freed.
        names: dict[Name, int] = {-1 - n: i for n, i in enumerate(outs)}
        last: dict[Name, int] = {
            name: n for n, part in enumerate(parts) for name in (*part.ins, *part.outs) if isinstance(name, str)
        }
        rows, emitter = self._table.rows, self._emitter
        for n, part in enumerate(parts):
            operands = [ins[i] if isinstance(i, int) and i >= 0 else rows[names[i]] for i in part.ins]
            for name in part.outs:
                if name not in names:
                    names[name] = emitter.temporary()
            made = [names[name] for name in part.outs]
            if part.wants:
                plan = part.known[0].plans.get("said") or self._said(part, mesh)
                self._planner.bring_and_emit(part.known[0], plan, operands, (), made)
            else:
                self._planner.plan_part(part.known[0], origin, operands, (), made)
            over = [names[name] for name in dict.fromkeys((*part.ins, *part.outs)) if last.get(name) == n and name != SUMS]
            self._redistributor.free(over)
        if SUMS in names:
            made_by = rows[outs[0]]
            made_by.sums = made_by.storage.version, rows.pop(names[SUMS])

    def _said(self, part: ChainOp, mesh: Mesh) -> OpPlan:
        wants, makes = (tuple(self._context.intern(Layout(mesh, p)) for p in some) for some in (part.wants, part.makes))
        ranks = part.known * (1 if len(part.known) > 1 else len(mesh.workers))
        orders = [
            Order(worker, "op", payload(known, wants, makes, rank))
            for rank, (worker, known) in enumerate(zip(mesh.workers, ranks, strict=True))
        ]
        plan = part.known[0].plans["said"] = self._planner.bound(wants, makes, orders)
        return plan

    def mean_of_rows(self, known: OpSchema, origin: Origin, ins: list[Tensor], values: tuple, outs: list[int]) -> None:
        """Sum and weight of each worker's rows, added up over the mesh, and their quotient."""
        rows, total = self._table.rows, self._emitter.temporary()
        self._planner.plan_part(sums(known), origin, ins, values, [total, outs[1]])
        pair = [rows[total], rows[outs[1]]]
        for t in pair:
            if t.layout is not None and t.layout.partial:
                self._redistributor.reduce_partial(t.storage)
        self._planner.plan_part(quotient(known), origin, pair, (), [outs[0]])
        self._redistributor.free([total])

    def _part_of_mean(
        self, divide: OpSchema, part: OpSchema, origin: Origin, ins: list[Tensor], values: tuple, outs: list[int]
    ) -> None:
        """The gradient of a mean of equal parts is that of each part's mean, divided by how many there are."""
        grad = self._emitter.temporary()
        self._planner.plan_part(divide, origin, ins[:1], (), [grad])
        self._planner.plan_part(part, origin, [self._table.rows[grad], *ins[1:]], values, outs)
        self._redistributor.free([grad])
