"""List ops (`_foreach_*`, `_fused_adamw_`): one op holds tensors of every mesh, so it is cut into one op for each layout.

The first list leads: the tensors beside its i-th tensor in the other lists get its layout. They keep it if they are written, as
optimizer state follows its parameter. No tensor of the first list moves. A number that the op writes (found_inf) is in terms
where it was written over pieces. It goes from mesh to mesh with its value so far.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from gt.dispatcher.planning.materializer import root_layout
from gt.dispatcher.planning.offload import Offload
from gt.dispatcher.planning.op_binder import OpBinder
from gt.dispatcher.planning.redistributor import Redistributor
from gt.dispatcher.sharding import list_rules
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.emitter import lost_in
from gt.dispatcher.state.records import OpPlan, Origin
from gt.dispatcher.state.tensors import Tensor
from gt.ir.layout import Layout, Mesh, Partial, R, Shard, replicated
from gt.ir.template import Chosen, Out, Template


@dataclass(slots=True)
class ListPart:
    """A list op over some of the indices: the operands and results it takes of the whole."""

    known: OpSchema
    ins: list[int]
    values: list[int]
    outs: list[int]


Cuts = list[tuple[ListPart, OpPlan]]  # the parts of a list op


class PartPlanner(Protocol):
    """The planner, as far as list ops need it."""

    hits: int
    offload: Offload

    def emit(
        self, known: OpSchema, plan: OpPlan, ins: list[Tensor], brought: list[int], values: tuple, outs: list[int]
    ) -> None: ...
    def abandon(self, known: OpSchema, mesh: Mesh, ins: list[Tensor], outs: list[int]) -> None: ...


@dataclass(slots=True)
class _ListOp:
    """One list op with its operands. combined: the term that results of pieces are, if any."""

    known: OpSchema
    ins: list[Tensor]
    values: tuple
    outs: list[int]
    combined: str | None


class ListOps:
    """Plans list ops: one op for each layout."""

    def __init__(self, context: SessionContext, binder: OpBinder, redistributor: Redistributor, planner: PartPlanner) -> None:
        self._context, self._binder, self._redistributor, self._planner = context, binder, redistributor, planner
        self._cluster, self._failures, self._offload = context.cluster, context.failures, planner.offload

    def planned(self, known: OpSchema, ins: list[Tensor], values: tuple) -> Cuts | None:
        """The plan for operands that lie as these do, if there is one and no worker is lost."""
        if self._failures.troubled:
            return None
        return known.plans.get(self._key(ins, list_rules.combination(known, values)))

    @staticmethod
    def _key(ins: list[Tensor], combined: str | None) -> tuple:
        return ("list", combined, *[id(t.layout) for t in ins])

    def op(self, known: OpSchema, origin: Origin, ins: list[Tensor], values: tuple, outs: list[int], cuts: Cuts | None) -> None:
        """Cut, bring and emit; or only emit, where all layouts are those for which nothing had to be brought."""
        # The plan of a list op is a list of parts, one for each layout of a leader. It is kept under the layouts of all
        # operands if nothing was moved for it. Then the same layouts need the same parts, and no tensor has to be brought.
        if cuts is None:
            combined = list_rules.combination(known, values)
            key = self._key(ins, combined)
            parts = self._parts(known, ins, self._buckets(known, origin, ins, combined))
            made = [self._plan_part(*part, _ListOp(known, ins, values, outs, combined)) for part in parts]
            if key == self._key(ins, combined) and all(cut and cut[1].direct for cut in made):
                known.plans[key] = made
            return
        self._planner.hits += 1
        for number, (part, plan) in enumerate(cuts):
            ids = [ins[i].id for i in part.ins]
            # State of the next part comes back while this part is computed.
            if self._offload.active and number + 1 < len(cuts):
                self._offload.restore(ins[i] for i in cuts[number + 1][0].ins)
            self._emit(part, plan, ins, ids, values, outs)

    def _emit(
        self, part: ListPart, plan: OpPlan, ins: list[Tensor], brought: list[int], values: tuple, outs: list[int]
    ) -> None:
        mine = [ins[i] for i in part.ins], brought, tuple([values[i] for i in part.values]), [outs[i] for i in part.outs]
        self._planner.emit(part.known, plan, *mine)
        if self._offload.active:
            self._offload.after(part.known, mine[0])

    def _parts(self, known: OpSchema, ins: list[Tensor], buckets: dict[Layout, list[int]]) -> list[tuple[Layout, list[int]]]:
        """Buckets; a bucket with many bytes of offloaded tensors is cut into parts."""
        if not self._offload.active:
            return list(buckets.items())
        columns = [[ins[i] for i in column.tensors] for column in known.columns]
        return [(layout, part) for layout, indices in buckets.items() for part in self._offload.parts(indices, columns)]

    def _buckets(self, known: OpSchema, origin: Origin, ins: list[Tensor], combined: str | None) -> dict[Layout, list[int]]:
        """Indices of the lists by the layout of the tensor that leads there. Those not done on pieces are wanted whole."""
        # Example, AdamW on five parameters: {[R]: [0, 3], [S(0)]: [1, 2], [R] of the second stage: [4]} are three ops.
        lead = known.columns[0].tensors
        in_parts, whole = list_rules.runs_in_parts(known), None
        buckets: dict[Layout, list[int]] = {}
        for place, index in enumerate(lead):
            leader = ins[index]
            if leader.layout is None:
                home, rests = self._home(known, origin, ins, place)
                self._redistributor.place(leader.storage, home or replicated(self._context.default_mesh()))
                leader.storage.note_placed(home is not None)
                if rests and leader.base is None:
                    leader.storage.rest = leader.layout
            assert leader.layout is not None
            if leader.layout.partial:
                self._redistributor.reduce_partial(leader.storage)
            layout = leader.layout
            if not in_parts:
                layout = whole = whole or self._context.intern(replicated(layout.mesh))
            elif not list_rules.on_pieces(known, place, layout, combined):
                layout = self._context.intern(replicated(layout.mesh))
            buckets.setdefault(layout, []).append(place)
        return buckets

    def _home(self, known: OpSchema, origin: Origin, ins: list[Tensor], place: int) -> tuple[Layout | None, bool]:
        """An unplaced leader goes where another list has a tensor beside it, else where its group says, if it has one.

        The second value is true if that tensor rests, as the leader will then.
        """
        shape = known.template.ins[known.columns[0].tensors[place]].shape
        for column in known.columns[1:]:
            items = column.tensors
            beside = ins[items[place]] if place < len(items) else None
            if beside is not None and beside.layout is not None:
                alike = beside.spec.shape == shape
                rests = alike and beside.storage.rest is not None
                return (beside.layout if alike else replicated(beside.layout.mesh)), rests
        group = origin.meaning or ins[known.columns[0].tensors[place]].storage.home
        return (replicated(group.mesh) if group else None), False

    def _plan_part(self, layout: Layout, indices: list[int], op: _ListOp) -> tuple[ListPart, OpPlan] | None:
        """Plan and emit a list op over some of its indices; None if a worker that it needs is lost."""
        part = self._part(op.known, tuple(indices))
        known, ins = part.known, [op.ins[i] for i in part.ins]
        if lost_in(self._cluster, layout.mesh):
            self._planner.abandon(known, layout.mesh, ins, [op.outs[i] for i in part.outs])
            return None
        wants = self._wants(known, layout, ins)
        unplaced = [i for i in known.listed if ins[i].layout is None]
        operand_ids = [self._redistributor.redistribute(t, want) for t, want in zip(ins, wants, strict=True)]
        if unplaced:
            self._note_rests(known, ins, unplaced)
        result = self._context.intern(list_rules.made(layout, op.combined))
        makes = (result,) * len(known.template.outs)
        key = (layout, result, *map(id, wants))
        bound = known.plans.get(key)
        if bound is None:
            bound = known.plans[key] = self._binder.bind(known, wants or list(makes), makes)
        plan = OpPlan(tuple(wants), makes, bound, all(t.layout is w for t, w in zip(ins, wants, strict=True)))
        self._emit(part, plan, op.ins, operand_ids, op.values, op.outs)
        for index in known.template.writes:
            if operand_ids[index] != ins[index].id:  # a view of something laid out otherwise: the copy was written
                self._redistributor.write_back(operand_ids[index], ins[index], wants[index])
        return part, plan

    @staticmethod
    def _note_rests(known: OpSchema, ins: list[Tensor], unplaced: Iterable[int]) -> None:
        """Tensors that were placed beside a leader at rest, rest too: state that was a recipe until its first step."""
        leads = [ins[i] for i in known.columns[0].tensors]
        of = {i: lead for column in known.columns for i, lead in zip(column.tensors, leads)}
        for i in unplaced:
            t, lead = ins[i], of.get(i)
            if (
                lead is not None
                and lead.storage.rest is not None
                and lead.layout == t.layout
                and t.base is None
                and t.spec.shape
            ):
                t.storage.rest = t.layout

    def _wants(self, known: OpSchema, layout: Layout, ins: list[Tensor]) -> list[Layout]:
        """Layout wanted of each operand: the leader's in a list, whole for numbers. Written operands move to it for good."""
        # 1. By default. 2. Written operands move for good, as state to its parameter, and are then wanted where they are.
        # 3. Step counts, which were placed whole by themselves on other workers, follow their parameter once.
        whole, lead = self._context.intern(replicated(layout.mesh)), frozenset(known.columns[0].tensors)
        wants = [layout if i in known.listed and operand.spec.shape else whole for i, operand in enumerate(ins)]
        for index in known.template.writes:
            operand = ins[index]
            if index not in known.listed and known.name in list_rules.WRITTEN:
                wants[index] = self._in_terms(operand, layout, Partial(list_rules.WRITTEN[known.name]))
            elif (
                operand.layout is not None and operand.layout != wants[index] and index not in lead
            ):  # as far as its root can be laid so
                self._redistributor.relayout(operand.storage, root_layout(operand, wants[index]))
        for index in known.listed:
            operand = ins[index]
            if (
                operand.storage.default and not operand.spec.shape and operand.layout != wants[index]
            ):  # a step count that was placed by itself
                self._redistributor.relayout(operand.storage, root_layout(operand, wants[index]))
                operand.storage.default = False
        return wants

    def _in_terms(self, number: Tensor, layout: Layout, term: Partial) -> Layout:
        """Layout of a number that each worker computes from its pieces: terms on each axis on which the leader is split."""
        # Each worker writes the number for its pieces, so all of them have terms (found_inf: their maximum is wanted).
        # A number that is whole now is the same on all of them, so it counts as equal terms, and nothing moves.
        views = number.storage.tensors.values()
        there = all(v.layout is not None and v.layout.mesh == layout.mesh for v in views)
        if not there or any(p not in (R, term) for v in views for p in v.layout.placements):  # type: ignore[union-attr]
            self._redistributor.relayout(number.storage, replicated(layout.mesh))
        for view in views:
            assert view.layout is not None
            pairs = zip(layout.placements, view.layout.placements, strict=True)
            self._context.set_layout(view, Layout(layout.mesh, tuple(term if isinstance(p, Shard) else q for p, q in pairs)))
        assert number.layout is not None
        return number.layout

    def _part(self, known: OpSchema, indices: tuple[int, ...]) -> ListPart:
        """The op over these indices only, made once."""
        key = ("part", indices)
        if key not in known.plans:
            count = len(known.columns[0].items)
            if len(indices) == count:
                template = known.template
                everything = [list(range(n)) for n in (len(template.ins), template.values, known.results)]
                known.plans[key] = ListPart(known, *everything)
            else:
                known.plans[key] = _over(known, indices, count)
        return known.plans[key]


# The op over some indices is an op of its own. `Chosen` renumbers the tensors and scalars that it takes from the lists, `where`
# and `order` renumber outputs and writes.
def _over(known: OpSchema, indices: tuple[int, ...], count: int) -> ListPart:
    template, chosen = known.template, Chosen(indices, count)
    args = tuple(map(chosen, template.args))
    kwargs = tuple((name, chosen(arg)) for name, arg in template.kwargs)
    ins, values = chosen.ins, chosen.values
    where = {old: new for new, old in enumerate(ins)}
    flat = [i for i in indices if i < len(template.outs)] if len(template.outs) == count else []
    outs = tuple(Out(o.kind, o.spec, where.get(o.of, -1)) for o in (template.outs[i] for i in flat))
    order = {index: place for place, index in enumerate(known.news)}
    taken = [order[i] for i in flat if i in order]
    writes = tuple(where[w] for w in template.writes if w in where)
    specs = tuple(template.ins[i] for i in ins)
    cut = Template(template.op, args, kwargs, specs, len(values), outs, writes, template.dynamic, template.pointwise)
    return ListPart(OpSchema(cut), ins, values, taken)
