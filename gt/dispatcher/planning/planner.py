"""Planning of one op: its mesh, the layouts of its inputs and outputs, and the copies that the inputs need.

The common case, an op met before whose inputs have the same layouts, is one dictionary look-up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gt.config.schema import DATA_AXIS
from gt.dispatcher.planning.decompose import Decompose
from gt.dispatcher.planning.fused_projections import WEIGHTS, needs_lookahead, record_producer, split_by_parts
from gt.dispatcher.planning.list_ops import ListOps
from gt.dispatcher.planning.materializer import Materializer, root_layout
from gt.dispatcher.planning.offload import Offload
from gt.dispatcher.planning.op_binder import OpBinder
from gt.dispatcher.planning.parameter_casts import ParameterCasts
from gt.dispatcher.planning.parameters import (
    ReplicationWarnings,
    declare_frozen,
    place_weights,
    split,
    weight,
)
from gt.dispatcher.planning.redistributor import Redistributor, same_terms
from gt.dispatcher.planning.sharded_parameters import ShardedParameters
from gt.dispatcher.sharding import zero
from gt.dispatcher.sharding.groups import COLUMN, ROW, Meaning
from gt.dispatcher.sharding.op_chain import mean_of_rows
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.sharding.partial import casts_gradient
from gt.dispatcher.sharding.redistribution_steps import Order
from gt.dispatcher.sharding.rules import VALUELESS, Decision, decide_along, whole
from gt.dispatcher.sharding.views import VIEWS, wanted_parts
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.emitter import lost_in
from gt.dispatcher.state.failures import Planned, PlannedInPart
from gt.dispatcher.state.op_queue import NeedsLookahead, NeedsPauses
from gt.dispatcher.state.records import OpPlan, Origin
from gt.dispatcher.state.tensors import Tensor
from gt.dispatcher.state.uploads import Uploads
from gt.ir.layout import Layout, Mesh, Partial, Placement, R, replicated

log = logging.getLogger("gt.dispatcher")
# Ops that read an operand's shape and none of its values: no use of a weight
SHAPE_ONLY = VALUELESS | {"new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"}


class Planner:
    """Plans the ops of one session."""

    def __init__(
        self,
        context: SessionContext,
        uploads: Uploads,
        binder: OpBinder,
        materializer: Materializer,
        redistributor: Redistributor,
    ) -> None:
        self._context, self._uploads, self._binder = context, uploads, binder
        self._materializer, self._redistributor = materializer, redistributor
        self._emitter, self._cluster, self._table, self._queue = context.emitter, context.cluster, context.table, context.queue
        self._failures, self._journal = context.failures, context.journal
        self._warned: set[str] = set()
        self._decompose = Decompose(context, redistributor, self)
        self._replicated = ReplicationWarnings(context)
        self.sharded, self.offload = ShardedParameters(context, redistributor), Offload(context)
        self._lists = ListOps(context, binder, redistributor, self)
        self._casts = ParameterCasts(context, redistributor)
        self._shards, self._offloads = self.sharded.stage > 0, self.offload.active
        self._key = _key_of_sharded if self._shards else _key
        self.hits = 0

    def op(self, known: OpSchema, origin: Origin, ins: list[Tensor], values: tuple, outs: list[int]) -> None:
        """Plan and emit one op; NeedsLookahead or NeedsPauses, and nothing is done, if it waits for later ops or takes long."""
        if self._casts.active:
            origin = self._casts.origin(known, origin, ins)
        if self._shards:
            known, values = self.sharded.before(known, ins, values)
        # The hot path: the op was planned for inputs in these layouts before, none has to be brought, and nothing has failed.
        plan = known.plans.get(self._key(origin, ins))
        if plan is not None and plan.direct and not self._failures.troubled:
            self.hits += 1
            ids = [t.id for t in ins]
            scribe = self._emitter.scribe
            if scribe is not None:
                if outs:
                    scribe.planned(known, plan, origin, ids, outs)
                else:
                    scribe.received(known, origin, ids)
            self._write(known, plan, ins, ids, values, outs)
            self._after(known, origin, ins, outs)
            return
        self._queue.due = 0  # a new plan takes long, so the clock is looked at behind it
        if origin.meaning is not None:
            declare_frozen(known, origin.meaning, ins)
        # Raised before anything is changed: the op is given here again once more of the stream has come.
        if needs_lookahead(self._context, known, origin, ins, outs):
            raise NeedsLookahead
        grouped = origin.meaning not in (None, self._context.groups.everywhere)
        defers = not self._uses_parameter(known, origin, ins) and self._materializer.can_defer(known, ins, grouped)
        cuts = self._lists.planned(known, ins, values) if known.columns else None
        leaves = not defers and self._context.pause is None
        if leaves and self._context.needs_pauses(0 if plan or cuts else len(ins), ins):
            raise NeedsPauses
        if self._emitter.scribe is not None:
            self._emitter.scribe.received(known, origin, [t.id for t in ins])
        if defers:
            self._materializer.defer(known, ins, values, outs, self._uploads.source(known, values, outs))
            if self._casts.active and self._casts.casts(known, ins):
                self._table.rows[outs[0]].storage.note_cast(ins[0].storage)
            return
        elif known.columns:
            self._lists.op(known, origin, ins, values, outs, cuts)
        else:
            self._planned(known, origin, ins, values, outs, plan)
        self._after(known, origin, ins, outs)

    def _uses_parameter(self, known: OpSchema, origin: Origin, ins: list[Tensor]) -> bool:
        """True for an op that places a parameter: a copy of its values, where the op's group is the parameter's own.

        A parameter without a place would get its gradient, and an optimizer's state, in other layouts than its own. Ops of
        `data_parallel` beside other groups may come before the parameter's group, as a copy of the model does.
        """
        meaning, groups = origin.meaning, self._context.groups
        if meaning is None or known.name in VIEWS:
            return False
        if known.name == "_to_copy" and self._context.config.precision.compute != "fp32":
            return ins[0].storage.param  # by the config: the pieces are cast
        if meaning is groups.everywhere and groups.partial:
            return False
        return any(t.storage.param for index, t in enumerate(ins) if index not in known.written)

    # Stages of `_planned`:
    # 1. Before a plan can be looked up or made: places of targets, and ops that are executed as several.
    # 2. A new plan, where none is known for these layouts or a parameter may still move; it is kept under both of its keys.
    # 3. The inputs are brought to where the plan wants them, and the op is written for the workers.
    def _planned(
        self, known: OpSchema, origin: Origin, ins: list[Tensor], values: tuple, outs: list[int], plan: OpPlan | None
    ) -> None:
        # A tensor that is written needs a place of its own first, and its layout is a part of the plan's key.
        if any(ins[i].layout is None for i in known.template.writes):
            self._place_targets(known, origin, ins)
            plan = known.plans.get(self._key(origin, ins))
        if mean_of_rows(known, [t.layout for t in ins]):
            self._decompose.mean_of_rows(known, origin, ins, values, outs)
            return
        if plan is not None and plan.wants + plan.outs and lost_in(self._cluster, (plan.wants + plan.outs)[0].mesh):
            plan = None  # a plan for unplaced tensors is void: they may be placed elsewhere now
        if plan is None or (origin.meaning is not None and any(t.movable for t in ins)):
            mesh = self._mesh(known, origin, ins)
            if lost_in(self._cluster, mesh):
                self.abandon(known, mesh, ins, outs)
                return
            if self._decompose.op(known, origin, ins, outs, values, mesh):
                return
            # Planning may place or move inputs, so the key of the layouts that the plan is for is known only behind it.
            before = self._key(origin, ins)
            plan = self._plan(known, origin, ins, outs, mesh)
            key = self._key(origin, ins)
            plan.direct = all(t.layout is w for t, w in zip(ins, plan.wants, strict=True))
            known.plans[key] = plan
            if before != key and not (known.name in VIEWS or known.template.writes):
                # The plan also serves inputs in the layouts from before they were moved. Views and writes are excepted: their
                # base or target has to move itself, while a plan would bring a copy of it.
                known.plans[before] = replace(plan, direct=False)
        if self._failures.troubled and not self._renewed(known, ins):
            self.abandon(known, (plan.wants + plan.outs)[0].mesh, ins, outs)
            return
        # An op that reads only a weight's shape places it, but does not decide its layout: a later use still may.
        unplaced = [t.storage for t in ins if t.layout is None and t.storage.param]
        self.bring_and_emit(known, plan, ins, values, outs)
        for storage in unplaced:
            storage.undecided = storage.undecided or known.name in SHAPE_ONLY
        if origin.meaning is not None and origin.meaning.kind == COLUMN:
            record_producer(self._table, known, ins, outs)

    def _renewed(self, known: OpSchema, ins: list[Tensor]) -> bool:
        """True if no lost worker had a piece of the operands. One that the op overwrites whole gets new memory for that."""
        lost = [n for n, tensor in enumerate(ins) if tensor.storage.failed is not None and tensor.storage.failed.lost >= 0]
        if not known.overwrites or lost != [*known.template.writes] or not ins[lost[0]].whole:
            return not lost
        return self._redistributor.renew(known, ins[lost[0]].storage)

    def bring_and_emit(self, known: OpSchema, plan: OpPlan, ins: list[Tensor], values: tuple, outs: list[int]) -> None:
        """Bring the inputs to where the plan wants them, and emit the op."""
        for tensor, want in zip(ins, plan.wants, strict=True):
            if tensor.layout is not None and tensor.layout.partial and not same_terms(tensor.layout, want):
                # before any is brought: another operand may view the same terms
                self._redistributor.reduce_partial(tensor.storage, tensor, want)
        brought = [self._redistributor.redistribute(tensor, want) for tensor, want in zip(ins, plan.wants, strict=True)]
        self.emit(known, plan, ins, brought, values, outs)
        for index in known.template.writes:
            if brought[index] != ins[index].id:  # the second of two targets, which is at home on another mesh
                self._redistributor.write_back(brought[index], ins[index], plan.wants[index])

    def plan_part(self, known: OpSchema, origin: Origin, ins: list[Tensor], values: tuple, outs: list[int]) -> None:
        """Plan and emit one of the ops that another is executed as."""
        self._planned(known, origin, ins, values, outs, known.plans.get(self._key(origin, ins)))

    def bound(self, wants: tuple[Layout, ...], makes: tuple[Layout, ...], orders: list[Order]) -> OpPlan:
        """The plan of an op that is decided."""
        return OpPlan(wants, makes, self._emitter.bind(orders), False)

    def emit(
        self, known: OpSchema, plan: OpPlan, ins: list[Tensor], brought: list[int], values: tuple, outs: list[int]
    ) -> None:
        """Write the instruction, and say so; enter the outputs."""
        if self._emitter.scribe is not None and outs:
            self._emitter.scribe.planned(known, plan, self._context.origin, brought, outs)
        self._write(known, plan, ins, brought, values, outs)

    def _write(
        self, known: OpSchema, plan: OpPlan, ins: list[Tensor], brought: list[int], values: tuple, outs: list[int]
    ) -> None:
        # Ids of sessions are apart by the session's offset. The first session has 0, and its hot path adds nothing.
        emitter = self._emitter
        offset = emitter.offset
        if offset:
            operands = [*[offset + i for i in brought], *values, *[offset + i for i in outs]]
        else:
            operands = [*brought, *values, *outs]
        bound = self.offload.bound(known, plan, ins, brought) if self._offloads else plan.bound
        emitter.write_all(bound, operands)
        table, news = self._table, iter(outs)
        for index, (out, layout) in enumerate(zip(known.template.outs, plan.outs, strict=True)):
            if out.kind == "new":
                table.new(next(news), out.spec, layout, emitter.origin)
            elif out.kind == "view":
                table.view(next(news), out.spec, ins[out.of], layout, (known, values, index))
        if bound is not plan.bound:
            self.offload.note_results([table.rows[i].storage for i in outs])

    def _after(self, known: OpSchema, origin: Origin, ins: list[Tensor], outs: list[int]) -> None:
        """Versions, the journal, and the consequences of a failed input."""
        rows = self._table.rows
        if self._casts.active:
            self._casts.follow(ins)
        reads = tuple([t.storage for t in ins])
        writes = tuple([reads[i] for i in known.template.writes])
        for storage in writes:
            storage.writes += 1
            storage.undecided = storage.undecided and (known.overwrites or storage.param)
        makes = tuple([rows[i].storage for i in outs])
        if origin.meaning is None:
            for storage in makes:
                storage.default = True
        if self._casts.active and self._casts.casts(known, ins):
            makes[0].note_cast(reads[0])
        kind = PlannedInPart if known.overwrites and not ins[known.template.writes[0]].whole else Planned
        row = kind(self._emitter.seq, known, origin, reads, writes, makes)
        self._journal.add(row)
        if self._shards:
            self.sharded.after(known, ins, outs)
        if self._offloads:
            self.offload.note_versions()
            if not known.columns:
                self.offload.after(known, ins)
        if self._failures.troubled:
            self._failures.spread(row)

    def abandon(self, known: OpSchema, mesh: Mesh, ins: list[Tensor], outs: list[int]) -> None:
        """An op that would need a lost worker is not sent: its outputs exist, failed."""
        cause = next((t.storage.failed for t in ins if t.storage.failed and t.storage.failed.lost >= 0), None)
        cause = cause or self._failures.cause_of_loss(lost_in(self._cluster, mesh))
        layout = self._context.intern(replicated(mesh))
        for tensor_id, index in zip(outs, known.news, strict=True):
            out = known.template.outs[index]
            if out.kind == "view" and ins[out.of].placed:
                output = self._table.view(tensor_id, out.spec, ins[out.of], ins[out.of].layout, (known, (), index))
            else:
                output = self._table.new(tensor_id, out.spec, layout)
            output.storage.failed = cause
        for index in known.template.writes:
            ins[index].storage.failed = cause

    def take_back(self, since: int) -> None:
        """An interrupt has dropped the ops from this number on."""
        self._materializer.take_back(since)

    # ---- which mesh

    def _mesh(self, known: OpSchema, origin: Origin, ins: list[Tensor]) -> Mesh:
        """An in-place op and a view run where their target is, a grouped op on its group's mesh, others with most bytes."""
        # The cases in the order of their claims. A write and a view have no choice, a group has a mesh for its ops, and other
        # ops run where least has to be moved.
        placed = [t for t in ins if t.layout is not None]
        writes = known.template.writes
        if writes and ins[writes[0]].layout is not None:
            return ins[writes[0]].layout.mesh  # type: ignore[union-attr]
        if known.name == "gt.move":
            return self._destination(origin, ins)
        if known.name in VIEWS and placed:
            return ins[0].layout.mesh if ins[0].layout else placed[0].layout.mesh  # type: ignore[union-attr]
        if origin.meaning is not None:
            return origin.meaning.mesh
        if not placed:
            return next((t.storage.home.mesh for t in ins if t.storage.home is not None), self._context.default_mesh())
        weight: dict[Mesh, int] = {}  # bytes of operands on each mesh
        for t in placed:
            assert t.layout is not None
            weight[t.layout.mesh] = weight.get(t.layout.mesh, 0) + t.spec.nbytes
        return max(weight, key=lambda m: weight[m])

    def _destination(self, origin: Origin, ins: list[Tensor]) -> Mesh:
        group = origin.target or origin.meaning
        if group is not None:
            return group.mesh
        return ins[0].layout.mesh if ins[0].layout else self._context.default_mesh()

    def _place_targets(self, known: OpSchema, origin: Origin, ins: list[Tensor]) -> None:
        """Place the targets of an in-place op before it is planned: a copy would take the write."""
        mesh = self._mesh(known, origin, ins)
        meaning = _own(origin, mesh)
        for index in known.template.writes:
            target = ins[index]
            if target.layout is None and not lost_in(self._cluster, mesh):
                start = tuple(p or R for p in self._start(target, mesh, meaning, True))
                self._redistributor.place(target.storage, root_layout(target, Layout(mesh, start)), decided=False)
                target.storage.note_placed(origin.meaning is not None)
                target.storage.undecided = target.storage.undecided or target.storage.param  # its use is yet to come

    # ---- which layouts

    def starts(self, known: OpSchema, origin: Origin, ins: list[Tensor], mesh: Mesh) -> list[list[Placement | None]]:
        """Placements of the inputs before planning, for an op that is no view and writes none of them."""
        meaning = _own(origin, mesh)
        if meaning is not None and known.name == "embedding":
            place_weights(self._context, self._redistributor, known, meaning, ins, [])
        return self._starts(known, ins, mesh, meaning, False)

    def _plan(self, known: OpSchema, origin: Origin, ins: list[Tensor], outs: list[int], mesh: Mesh) -> OpPlan:
        # 1. Operands that the op's group or the op itself moves for good. Weights move to their group's mesh. Terms that are
        #    written are added up, unless the same terms are added to them.
        meaning = _own(origin, mesh)
        if meaning is not None:
            place_weights(self._context, self._redistributor, known, meaning, ins, outs)
        for index in known.template.writes:
            target = ins[index]
            if target.layout is not None and target.layout.partial and not self._terms_stay(known, ins):
                self._redistributor.reduce_partial(target.storage)
        # 2. The rule's answer for the layouts that the inputs start from. A view's base and a written operand cannot be copies.
        #    So where the rule wants another layout of them, they move there, and the op is planned again.
        stays = bool(known.template.writes) or known.name in VIEWS
        starts = self._starts(known, ins, mesh, meaning, stays)
        wants, makes = self._at_rest(known, ins, starts) or self._decide(known, ins, starts, mesh)
        views = known.name in VIEWS and ins and ins[0].layout is not None
        if views and wants[0] != ins[0].layout.placements:  # type: ignore[union-attr]
            self._move_base(known, ins[0], mesh)
            wants, makes = self._decide(known, ins, [list(ins[0].layout.placements)], mesh)  # type: ignore[union-attr]
        targets = [ins[i] for i in known.template.writes]
        here = [t.layout is not None and t.layout.mesh == mesh for t in targets]
        if any(h and wants[i] != t.layout.placements for h, i, t in zip(here, known.template.writes, targets)):  # type: ignore
            for there, target in zip(here, targets, strict=True):  # all of them: by one alone the rule might not change
                if there:
                    self._redistributor.relayout(target.storage, replicated(mesh))
            return self._plan(known, origin, ins, outs, mesh)

        # 3. The first use of a parameter in a group is settled, and the definitions for the workers are made.
        if meaning is not None and known.name not in VIEWS:
            self._settle_parameters(known, ins, wants, mesh)
            self._replicated.check(known, origin, ins, wants)
        want_layouts = tuple(self._context.intern(Layout(mesh, w)) for w in wants)
        out_layouts = tuple(self._context.intern(Layout(mesh, m)) for m in makes)
        return OpPlan(want_layouts, out_layouts, self._binder.bind(known, want_layouts, out_layouts), False)

    def _settle_parameters(
        self, known: OpSchema, ins: list[Tensor], wants: Sequence[tuple[Placement, ...]], mesh: Mesh
    ) -> None:
        """The first use in a group decides a parameter's layout; a vector that is whole on these workers may be split by tp.

        Anything larger, but the weight of a matmul, might be an activation that was declared a leaf, as checkpoints do.
        """
        for index, (t, want) in enumerate(zip(ins, wants, strict=True)):
            if t.storage.param and t.storage.undecided and index not in known.written:
                if t.may_choose(mesh) and len(t.spec.shape) == 1:
                    self._redistributor.relayout(t.storage, zero.used(root_layout(t, Layout(mesh, want))))
                t.storage.undecided = False

    def _terms_stay(self, known: OpSchema, ins: list[Tensor]) -> bool:
        """Accumulating terms into terms needs no addition over the mesh."""
        layouts = {t.layout for t in ins}
        return known.name == "add_" and len(layouts) == 1 and len({t.spec.shape for t in ins}) == 1

    def _starts(self, known: OpSchema, ins: list[Tensor], mesh: Mesh, meaning: Meaning | None, stays: bool) -> list[list]:
        """The start of each input. A weight with its home on other workers arrives split by the group: each gets its part."""
        at_rest = self._shards and zero.at_rest(known) and self.sharded.all_rest(ins)
        starts = [self._start(t, mesh, meaning, stays or at_rest) for t in ins]
        if meaning is not None and meaning.kind in (COLUMN, ROW) and known.name in WEIGHTS:
            index, dim = weight(known, meaning, ins) or (-1, 0)
            t = ins[index]
            if index >= 0 and t.layout is not None and t.layout.mesh != mesh:
                starts[index] = list(split(meaning, len(t.spec.shape), dim, meaning.parts or 1, t).placements)
        return starts

    def _start(self, tensor: Tensor, mesh: Mesh, meaning: Meaning | None, stays: bool) -> list[Placement | None]:
        """Placements of an input on this mesh before planning, axis by axis; None: the rule may choose.

        Replicated data is split as it enters a group, at every use, unless it `stays` to be written or viewed. A sharded
        parameter is used whole, unless it stays.
        """
        if tensor.storage.rest is not None and not stays and tensor.layout is not None and tensor.layout.mesh == mesh:
            return list(zero.used(tensor.layout).placements)

        # As it is, if it is here already. Two kinds of tensors may get another split: whole user data that enters the group,
        # and a parameter whose first use is to come.
        enters = tensor.storage.undecided and not tensor.storage.param and meaning is not None and not stays
        chooses = tensor.storage.param and (
            tensor.layout is None or (not stays and tensor.may_choose(mesh) and len(tensor.spec.shape) == 1)
        )
        if (
            tensor.layout is not None
            and tensor.layout.mesh == mesh
            and not chooses
            and not (enters and tensor.layout.replicated)
        ):
            return list(tensor.layout.placements)
        if chooses:
            free = meaning is not None and meaning.kind in (COLUMN, ROW)
            return [None if free and name == "tp" else R for name, _ in mesh.axes]

        # From another mesh, or not placed yet: as the group splits its inputs, parameters whole.
        if meaning is None and tensor.layout is None and tensor.storage.home is not None and tensor.storage.home.mesh == mesh:
            meaning = tensor.storage.home
        if meaning is None or tensor.storage.param:
            return [R] * len(mesh.axes)
        if tensor.layout is not None and tensor.layout.mesh.axes == mesh.axes and not tensor.storage.undecided:
            current = tensor.layout if tensor.storage.rest is None else zero.used(tensor.layout)
            return [R if isinstance(p, Partial) else p for p in current.placements]  # as on its own mesh, which is alike
        return list(self._entering(tensor, mesh, meaning))

    def _entering(self, tensor: Tensor, mesh: Mesh, meaning: Meaning) -> Sequence[Placement]:
        """The group's split of entering data. A view follows its base, if that has a split here or the same on a like mesh."""
        # A view is split where its base's copy is split here, so that the copy can be viewed and nothing moves twice.
        if self._materializer.unsplittable(tensor.storage):
            return [R] * len(mesh.axes)
        base, root = tensor.base, tensor
        while root.base is not None:
            root = root.base
        if base is None or tensor.via is None or tensor.layout is None or root.layout is None:
            return meaning.entering(tensor.spec.shape).placements
        for layout in base.copies or {}:
            local = layout.mesh == mesh and not layout.replicated
            layouts = self._redistributor.view_layouts(tensor.via[0], layout) if local else None
            if layouts is not None:
                return layouts[tensor.via[2]].placements
        enters = meaning.entering(root.spec.shape).placements
        if root.layout.mesh.axes == mesh.axes and root.layout.placements == enters and not tensor.layout.replicated:
            return tensor.layout.placements
        return meaning.entering(tensor.spec.shape).placements

    def _at_rest(self, known: OpSchema, ins: list[Tensor], starts: list[list]) -> tuple[list, list] | None:
        """As `_decide`, for an op that has a rule of its own where its operand rests."""
        if not self._shards or not self.sharded.all_rest(ins):
            return None
        result = zero.norm(known, starts[0])
        return None if result is None else ([tuple(starts[0])], [result])

    def _decide(
        self, known: OpSchema, ins: list[Tensor], starts: list[list], mesh: Mesh
    ) -> tuple[list[tuple[Placement, ...]], list[tuple[Placement, ...]]]:
        """Placements wanted of inputs and of outputs, from the rule's answer for each axis."""
        # A rule sees one mesh axis at a time. columns: the placements of all inputs on each axis, [[x_dp, w_dp], [x_tp, w_tp]].
        columns = [[start[axis] for start in starts] for axis in range(len(mesh.axes))]
        by_axis = zip(
            self._keep_terms(known, decide_along(known, columns, mesh.sizes), columns, mesh), columns, mesh.sizes, strict=True
        )
        decisions = [
            whole(known) if size == 1 else decision or self._gathered(known, places) for decision, places, size in by_axis
        ]
        wants = [tuple(decision.wants[i] for decision in decisions) for i in range(len(ins))]
        outs = [tuple(decision.outs[i] for decision in decisions) for i in range(len(known.template.outs))]
        return wants, outs

    def _keep_terms(
        self, known: OpSchema, decisions: Sequence[Decision | None], columns: list[list], mesh: Mesh
    ) -> Sequence[Decision | None]:
        """Decisions, but of a gradient's cast to fp32 and its loss scale: terms are added up after them, in fp32."""
        precision = self._context.config.precision
        if precision.compute == precision.reduce or not casts_gradient(known):
            return decisions
        terms = [
            name == DATA_AXIS and isinstance(column[0], Partial) and column[0].op == "sum"
            for (name, _), column in zip(mesh.axes, columns)
        ]
        kept = [Decision((column[0], *[R] * (len(column) - 1)), (column[0],)) for column in columns]
        return [k if term else d for d, k, term in zip(decisions, kept, terms, strict=True)]

    def _gathered(self, known: OpSchema, places: list) -> Decision:
        """The last resort, logged once an op: inputs whole, everywhere."""
        if known.template.op not in self._warned:
            self._warned.add(known.template.op)
            log.info("no rule splits %s with %s: its inputs are gathered", known.template.op, [str(p) for p in places])
        return whole(known)

    def _move_base(self, known: OpSchema, base: Tensor, mesh: Mesh) -> None:
        """A view that has no local form: the storage it views gets a layout in which it has one."""
        assert base.layout is not None
        parts = wanted_parts(known) if known.name in VIEWS else None
        made_by = base.storage.made_by
        if parts and made_by and split_by_parts(self._redistributor, base, parts[1]):
            return
        if self._shards and self.sharded.view_base(known, base):
            return
        self._gathered(known, list(base.layout.placements))
        self._redistributor.relayout(base.storage, replicated(mesh))


def _key(origin: Origin, ins: list[Tensor]) -> tuple:
    """Key of a plan besides the op: the groups, and the layout of each input (layouts are interned)."""
    # Identities instead of layouts: a hash of an int costs far less. Interned layouts live as long as the session, so that no
    # identity comes to stand for another layout.
    layouts: list[Any] = []
    for t in ins:
        layout = t.layout
        if layout is None:
            layouts.append((t.storage.param, t.storage.home))
        else:
            layouts.append(-id(layout) if t.storage.undecided else id(layout))  # a group may choose another layout for it
    return (origin.meaning, origin.target, *layouts)


def _key_of_sharded(origin: Origin, ins: list[Tensor]) -> tuple:
    """As _key, and the operands that rest: they are used in other layouts than those they have."""
    return (*_key(origin, ins), *[t.storage.rest is not None for t in ins])


def _own(origin: Origin, mesh: Mesh) -> Meaning | None:
    """Meaning of the op's group, if the op is done on the group's mesh."""
    return origin.meaning if origin.meaning is not None and origin.meaning.mesh == mesh else None
