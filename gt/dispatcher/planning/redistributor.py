"""Redistribution of tensors to the layouts that an op wants. Copies are kept until either side changes; partial sums are
reduced in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from gt.dispatcher.planning.materializer import Materializer, root_layout
from gt.dispatcher.planning.op_binder import OpBinder
from gt.dispatcher.sharding import redistribution_steps, zero
from gt.dispatcher.sharding.localize import copied, dense, row_major, strided
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.sharding.redistribution_steps import Order, RedistributionStep
from gt.dispatcher.sharding.rules import decide_along
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.failures import Moved
from gt.dispatcher.state.records import Bound, Cause
from gt.dispatcher.state.tensors import Storage, Tensor
from gt.ir.layout import Layout, Mesh, Partial, R, Shard, local_shape

MAX_KEPT_CONVERSIONS = 4096  # conversions whose steps are kept


class Redistributor:
    """Tensors of one session are placed here first, and moved here from layout to layout."""

    def __init__(self, context: SessionContext, binder: OpBinder, materializer: Materializer) -> None:
        self._context, self._binder, self._materializer = context, binder, materializer
        self._emitter, self._cluster, self._table = context.emitter, context.cluster, context.table
        self._steps: dict[tuple, list[tuple[RedistributionStep, list[Bound]]]] = {}
        self._reduces: dict[tuple[Layout, int], list[Bound]] = {}
        self._scatters: dict[tuple, tuple[RedistributionStep, list[Bound]]] = {}
        self._shards = context.config.zero > 0

    def redistribute(self, tensor: Tensor, want: Layout) -> int:
        """Id that names `tensor` in layout `want`: the tensor itself, a kept copy, or a new one."""
        if tensor.layout is None:
            # An op on a piece of a parameter is no reason to split it for good over workers that share a batch
            home = root_layout(tensor, want)
            self.place(tensor.storage, zero.used(home) if tensor.storage.param else home, decided=False)
            tensor.storage.note_placed(self._context.origin.meaning is not None)
        assert tensor.layout is not None
        if tensor.layout == want:
            return tensor.id
        # A copy is valid for one version of its storage. A write makes it stale, and the next use in that layout replaces it.
        kept = (tensor.copies or {}).get(want)
        if kept and kept[0] == tensor.storage.version:
            return kept[1]
        if tensor.layout.partial and not same_terms(tensor.layout, want):
            self.reduce_partial(tensor.storage, tensor, want)
            if tensor.layout == want:
                return tensor.id
        copy = self._view_of_copy(tensor, want) or self.convert(tensor.id, tensor, tensor.layout, want)
        if tensor.copies is None:
            tensor.copies = {}
        elif kept:
            self._emitter.free(want.mesh.workers, [kept[1]])
        tensor.copies[want] = (tensor.storage.version, copy)
        return copy

    def _view_of_copy(self, tensor: Tensor, want: Layout) -> int | None:
        """Copy a view to another mesh: its base is copied once, split as the view is wanted, and the copy is viewed. A view of
        a view goes the same way, and a view of a sharded parameter on its own mesh.
        """
        # 1. The chain of views up to a base that can be copied: views[0] is the tensor, the last one is a view of the base.
        if tensor.base is None or tensor.base.layout is None:
            return None
        if tensor.base.layout.mesh == want.mesh and (tensor.storage.rest is None or tensor.base.layout.partial):
            return None
        views = [tensor]
        while (base := views[-1].base) is not None and not row_major(base.spec):
            views.append(base)  # a copy of this would not have its strides
        if base is None or any(t.via is None or not _of_its_base(t.via[0]) or t.spec.numel != base.spec.numel for t in views):
            return None
        # 2. The base's copy in a layout from which the views lead to `want`, then the views on it. Those between are freed.
        layouts = self._of_copies(base, views, want)
        if layouts is None:
            return None
        current = first = self.redistribute(base, layouts[0])
        for view, have, result in zip(reversed(views), layouts, layouts[1:]):
            assert view.via is not None
            known, values, _ = view.via
            view_id = self._emitter.temporary()
            self._binder.compute(known, [have] * known.tensors, [result], [current], values, [view_id])
            if current != first:
                self._emitter.free(want.mesh.workers, [current])
            current = view_id
        return current

    def _of_copies(self, base: Tensor, views: Sequence[Tensor], want: Layout) -> list[Layout] | None:
        """Layouts of a copy of the base, and of each view of that in turn, the last as it is wanted."""
        if want.replicated:
            whole = self._context.intern(Layout(want.mesh, (R,) * len(want.mesh.axes)))
            return [whole] * len(views) + [want]
        if base.layout is None or base.layout.partial or want.partial:
            return None
        # Rules lead from a base to its view, not back. So every split of the base is tried as a start, the likely ones first,
        # and followed through the views until one ends in `want`.
        split = [[p] if not isinstance(p, Shard) else self._splits(base, p.parts, p.dim) for p in want.placements]
        starts = [*product(*split)]
        if base.layout.mesh.axes == want.mesh.axes:
            starts.insert(0, base.layout.placements)
        for start in starts:
            chain = [self._context.intern(Layout(want.mesh, start))]
            for view in reversed(views):
                outputs = self.view_layouts(view.via[0], chain[-1]) if view.via is not None else None
                if outputs is None or view.via is None:
                    break
                chain.append(outputs[view.via[2]])
            if chain[-1] == want and len(chain) > len(views):
                return chain
        return None

    @staticmethod
    def _splits(base: Tensor, parts: int, dim: int) -> list[Shard]:
        """Splits of a base whose view is split along a dim: the same dim first, if it has that."""
        return sorted((Shard(d, parts) for d in range(len(base.spec.shape))), key=lambda p: p.dim != dim)

    def convert(self, source: int, tensor: Tensor, have: Layout, want: Layout) -> int:
        """A new tensor that holds `source` in another layout. Terms must have been added up."""
        emitter, spec = self._emitter, tensor.spec
        steps = self._plan(spec.shape, spec.dtype, have, want)
        current = source
        for step, bound in steps:
            result = emitter.temporary()
            emitter.step(step, bound, current, result)
            emitter.line(result, spec.text(), step.layout, step.text, (current,), self._context.note(f"{step.nbytes} B"))
            if current != source:
                emitter.free(dict.fromkeys(w.index for w, _ in bound), [current])
            current = result
        return current

    def _plan(self, shape: tuple, dtype: str, have: Layout, want: Layout) -> list[tuple[RedistributionStep, list[Bound]]]:
        key = (shape, dtype, have, want)
        if key not in self._steps:
            if len(self._steps) >= MAX_KEPT_CONVERSIONS:
                self._steps.clear()
            cluster, steps = self._cluster, []
            now = have
            # A transfer lands on the other mesh without partial placements, which `on_mesh` then makes there.
            if have.mesh != want.mesh:
                landing = Layout(want.mesh, tuple(R if isinstance(p, Partial) else p for p in want.placements))
                name = self._context.groups.transfer(have.mesh, want.mesh)
                steps.append(redistribution_steps.between(cluster, shape, dtype, have, landing, name))
                now = landing
            steps += redistribution_steps.on_mesh(cluster, shape, dtype, now, want)
            self._steps[key] = [(step, self._emitter.bind(step.orders)) for step in steps]
        return self._steps[key]

    def reduce_partial(self, storage: Storage, tensor: Tensor | None = None, want: Layout | None = None) -> None:
        """Add up the terms of a storage, in place, for all its views at once.

        The sums stay in pieces where the storage rests so, or where `tensor`, a view of all of it, is wanted in pieces.
        """
        # With ZeRO a reduce_scatter may do: half the bytes of an all_reduce, and each worker keeps its piece alone.
        root = next(t for t in storage.tensors.values() if t.base is None)
        emitter = self._emitter
        assert root.layout is not None
        if self._shards:
            pieces = storage.rest
            if pieces is None and tensor is not None and want is not None:
                pieces = zero.root_of_view(root.spec, tensor.spec, want)
            if pieces is not None and self._scatter(storage, root, pieces):
                return
        self._note_move(storage)
        for axis, place in enumerate(root.layout.placements):
            if not isinstance(place, Partial):
                continue
            key = (root.layout, axis)
            if key not in self._reduces:
                self._reduces[key] = emitter.bind(redistribution_steps.reduce(self._cluster, root.layout, axis))
            ids = emitter.ids([root.id])
            for worker, define in self._reduces[key]:
                if not worker.lost:
                    emitter.write(worker, define, ids)
            name = root.layout.mesh.axes[axis][0]
            # The root is reduced in place, so every view of it has the sum too: only their layouts change.
            for tensor in storage.tensors.values():
                assert tensor.layout is not None
                self._context.set_layout(tensor, tensor.layout.with_placement(axis, R))
            op = "" if place.op == "sum" else f" ({place.op})"
            text = f"all_reduce{op} over {name}"
            emitter.line(root.id, root.spec.text(), root.layout, text, [root.id], self._context.note(f"{root.spec.nbytes} B"))
            emitter.joined = True

    def _scatter(self, storage: Storage, root: Tensor, want: Layout) -> bool:
        """Add up terms along the data-parallel axis, each piece on the worker that keeps it; False if that is not all."""
        # Terms along other axes too need an all_reduce. So does a piece that another axis splits as well.
        have = root.layout
        axis = zero.scattered_axis(have, want) if have is not None else None
        if have is None or axis is None or axis != zero.axis_of(have):
            return False
        key = (root.spec.shape, root.spec.dtype, have, want)
        if key not in self._scatters:
            if len(self._scatters) >= MAX_KEPT_CONVERSIONS:
                self._scatters.clear()
            step = redistribution_steps.scatter(
                self._cluster, root.spec.shape, root.spec.dtype, have, axis, want.placements[axis]
            )
            self._scatters[key] = step, self._emitter.bind(step.orders)
        step, bound = self._scatters[key]
        emitter, result = self._emitter, self._emitter.temporary()
        self._note_move(storage)
        emitter.step(step, bound, root.id, result)
        emitter.line(result, root.spec.text(), step.layout, step.text, (root.id,), self._context.note(f"{step.nbytes} B"))
        self._replace_root(storage, root, result, want)
        return True

    def move_home(self, storage: Storage, want: Layout) -> None:
        """Move a parameter to where a use wants it, or to how it rests for such a use."""
        if storage.sharded:
            want = storage.rest = self._context.intern(self.rest(storage, want))
        self.relayout(storage, want)

    def rest(self, storage: Storage, want: Layout) -> Layout:
        """The layout of a storage's root between uses, where a use wants it in layout `want`."""
        # A parameter that is still a recipe with views is best split along a dim that the recipe can be run in parts of.
        shape = next(t for t in storage.tensors.values() if t.base is None).spec.shape
        for dim in zero.dims(want, shape) if storage.recipe is not None and len(storage.tensors) > 1 else ():
            layout = zero.rest(want, shape, dim)
            if self._materializer.can_split(storage, layout):  # its views have a local form then
                return layout
        return zero.rest(want, shape)

    def place(self, storage: Storage, want: Layout, decided: bool = True) -> None:
        """Make an unplaced storage on workers, its root in layout `want`, or as it rests.

        decided: false if a later use may choose its layout on other axes, after which it rests.
        """
        self._context.breathe()
        if storage.sharded and (decided or len(want.mesh.axes) == 1):
            want = storage.rest = self._context.intern(self.rest(storage, want))
        # Else a cast's recipe would make its parameter a second time, and an upload would be sent twice
        parameter, source = storage.cast_of, None
        if parameter is not None and self._materializer.continues(storage, parameter):
            source = len(parameter.recipe or ()), next(t for t in parameter.tensors.values() if t.base is None)
            self.place(parameter, want, decided)
            parameter.note_placed(decided)
        if self._materializer.place(storage, want, source) != want:
            self.relayout(storage, want)

    def relayout(self, storage: Storage, want: Layout) -> None:
        """Move a storage for good: its root gets the new layout, every live view is made again."""
        root = next(t for t in storage.tensors.values() if t.base is None)
        if root.layout is None:
            self.place(storage, want)
            return
        self._context.breathe()
        if root.layout.partial:
            self.reduce_partial(storage)
        if root.layout == want:
            return
        # The root keeps its id: it is converted under a new one, and the old id then names the result. Workers that are on the
        # old mesh alone forget all ids.
        old = root.layout
        self._note_move(storage, stays=set(old.mesh.workers) <= set(want.mesh.workers))
        result = self.convert(root.id, root, old, want)
        for view in storage.tensors.values():
            self.drop_copies(view)
        self._emitter.free(set(old.mesh.workers) - set(want.mesh.workers), list(storage.tensors))
        if storage.rest is not None:
            storage.rest = self._context.intern(want)
        self._replace_root(storage, root, result, want)

    def _replace_root(self, storage: Storage, root: Tensor, made: int, want: Layout) -> None:
        """A storage's root is `made` from now on, in layout `want`; every live view is made again."""
        if row_major(root.spec):
            self._alias(made, root.id, want)
        else:
            self._restride(made, root, want)
        self._context.set_layout(root, want)
        for view in storage.views():
            self._remake(view)

    def _note_move(self, storage: Storage, stays: bool = True) -> None:
        """The storage is about to move. stays: no worker that has a piece of it frees that."""
        self._context.journal.moves.append(Moved.before(self._emitter.seq, storage, stays))
        storage.moved = self._emitter.seq

    def _alias(self, source: int, target: int, layout: Layout) -> None:
        emitter = self._emitter
        define = emitter.common("alias")
        for index in layout.mesh.workers:
            worker = emitter.cluster.workers[index]
            if not worker.lost:
                emitter.write(worker, define, emitter.ids([source, target]))
        emitter.free(layout.mesh.workers, [source])

    def write_back(self, copy: int, tensor: Tensor, have: Layout) -> None:
        """Write a copy that an op has changed back to the tensor that it is a copy of."""
        assert tensor.layout is not None
        layout, emitter = tensor.layout, self._emitter
        back = self.convert(copy, tensor, have, layout)
        orders = []
        for rank, index in enumerate(layout.mesh.workers):
            spec = dense(local_shape(layout, tensor.spec.shape, rank), tensor.spec)
            orders.append(Order(index, "op", copied(spec)))
        for worker, define in emitter.bind(orders):
            if not worker.lost:
                emitter.write(worker, define, emitter.ids([tensor.id, back]))
        emitter.free(layout.mesh.workers, [back])

    def _restride(self, source: int, root: Tensor, layout: Layout) -> None:
        """Give a row-major tensor the strides that its views were made for."""
        # Collectives make row-major tensors. A root with other strides (a transposed weight) has views that count on these.
        emitter = self._emitter
        fresh, copy = [], []
        for rank, index in enumerate(layout.mesh.workers):
            spec = dense(local_shape(layout, root.spec.shape, rank), root.spec)
            fresh.append(Order(index, "op", strided(spec)))
            copy.append(Order(index, "op", copied(spec)))
        for bound, ids in ((emitter.bind(fresh), [root.id]), (emitter.bind(copy), [root.id, source])):
            for worker, define in bound:
                if not worker.lost:
                    emitter.write(worker, define, emitter.ids(ids))
        emitter.free(layout.mesh.workers, [source])

    def renew(self, known: OpSchema, storage: Storage) -> bool:
        """Allocate a storage of which a lost worker had a piece, and make its views again, for an op that overwrites it.

        False if it has terms, or rests in a host's memory, and stays lost.
        """
        root = next(t for t in storage.tensors.values() if t.base is None)
        layout = root.layout
        if layout is None or layout.partial or storage.space is not None:
            return False
        for tensor in storage.tensors.values():
            self.drop_copies(tensor)
        fresh = [
            Order(index, "op", strided(dense(local_shape(layout, root.spec.shape, rank), root.spec)))
            for rank, index in enumerate(layout.mesh.workers)
        ]
        for worker, define in self._emitter.bind(fresh):
            self._emitter.write(worker, define, self._emitter.ids([root.id]))
        for view in storage.views():
            self._remake(view)
        # Its value has failed still, as one that a later op may overwrite: this op may be dropped, and not what came before it.
        storage.unallocated = False
        assert storage.failed is not None
        self._context.journal.set_cause(self._emitter.seq, storage, Cause(storage.failed.error))
        self._context.note_planned(known, (), (storage,))
        if self._context.tape is not None:
            self._context.tape.renewed = True
        return True

    def make_views(self, storage: Storage) -> None:
        """Make all views of a storage again, if it is there. Its value may be worthless: an overwrite heals views too."""
        lost = storage.failed is not None and storage.failed.lost >= 0
        if lost or storage.unallocated or storage.recipe is not None:
            return
        self._emitter.begin_op()
        views = storage.views()
        for view in views:
            self._remake(view)
        if views:  # the next interrupt may drop them again
            self._context.note_planned(views[0].via[0], (storage,), (storage,))  # type: ignore[index]

    def _remake(self, view: Tensor) -> None:
        """Run a view's op again on its base, which has moved."""
        # A view without a local form on the new layout: the whole storage is gathered, which makes all of its views again.
        assert view.base is not None and view.base.layout is not None and view.via is not None
        known, values, index = view.via
        emitter = self._emitter
        layout = view.base.layout
        outs = self.view_layouts(known, layout)
        if outs is None:
            self.relayout(view.storage, unsplit(layout))
            return
        new_ids = [view.id if i == index else emitter.temporary() for i in known.news]
        self._binder.compute(known, [layout] * known.tensors, outs, [view.base.id], values, new_ids)
        emitter.free(layout.mesh.workers, [i for i in new_ids if i != view.id])
        self._context.set_layout(view, outs[index])

    def view_layouts(self, known: OpSchema, base: Layout) -> list[Layout] | None:
        """Layouts of a view's outputs on a base, or None where it has no local form."""
        columns = []
        for place, decision in zip(base.placements, decide_along(known, [[p] for p in base.placements], base.mesh.sizes)):
            if decision is None or decision.wants[0] != place:
                return None
            columns.append(decision.outs)
        return [Layout(base.mesh, tuple(column[i] for column in columns)) for i in range(len(known.template.outs))]

    def drop_copies(self, tensor: Tensor) -> None:
        for layout, (_, copy) in (tensor.copies or {}).items():
            self._emitter.free(layout.mesh.workers, [copy])
        tensor.copies = None
        if tensor.sums is not None:
            sums, tensor.sums = tensor.sums[1], None
            self.drop_copies(sums)
            self._emitter.free(sums.layout.mesh.workers, [sums.id])  # type: ignore[union-attr]

    def free(self, ids: list[int]) -> None:
        """The client has freed these: copies go at once, a base only with its last view."""
        # Ids are a client's: one that it does not have, or has freed before, is passed over.
        gone: dict[Mesh, list[int]] = {}
        rows = self._table.rows
        for i in ids:
            tensor = rows.get(i)
            if tensor is None or tensor.released:
                continue
            if tensor.copies or tensor.sums:
                self.drop_copies(tensor)
            tensor.released = True
            # A released base lives as long as a view of it, which may have to be made again on it. Then it is freed, and
            # perhaps its own base.
            while tensor is not None and tensor.released and not tensor.children:
                if tensor.layout is not None:
                    gone.setdefault(tensor.layout.mesh, []).append(tensor.id)
                tensor = self._remove(tensor)
        for mesh, freed in gone.items():
            self._emitter.free(mesh.workers, freed)

    def _remove(self, tensor: Tensor) -> Tensor | None:
        """Take a tensor off the table; its base, which may go next."""
        storage = tensor.storage
        del storage.tensors[tensor.id]
        del self._table.rows[tensor.id]
        if not storage.tensors and storage.recipe is not None:
            self._materializer.drop_recipe(storage)
        if tensor.base is not None:
            tensor.base.children -= 1
        return tensor.base


def _of_its_base(known: OpSchema) -> bool:
    """True if an op makes one view of its operand's elements: as_strided counts from where the memory begins."""
    return len(known.news) == 1 and known.name != "as_strided"


def same_terms(have: Layout, want: Layout) -> bool:
    """True if every partial placement is wanted as it is."""
    return have.mesh == want.mesh and all(
        h == w for h, w in zip(have.placements, want.placements, strict=True) if isinstance(h, Partial)
    )


def unsplit(layout: Layout) -> Layout:
    """Every split undone."""
    return Layout(layout.mesh, tuple(R if isinstance(p, Shard) else p for p in layout.placements))
