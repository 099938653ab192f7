"""Recipes: tensors that nothing has used yet are only described, and made where their first use wants them.

An upload (the client keeps the bytes), a factory, initialisers in place and views are not uses. Placing runs the recipe on
each worker for its part only; steps that are not elementwise run whole, and the result is split afterwards.
"""

from __future__ import annotations

from typing import Any

from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.planning.op_binder import OpBinder
from gt.dispatcher.sharding.base import Place
from gt.dispatcher.sharding.localize import SIZES, dense, duplicate
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.sharding.rules import decide_along
from gt.dispatcher.sharding.views import VIEWS
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.tensors import RecipeStep, Storage, Tensor
from gt.dispatcher.state.uploads import Uploads
from gt.ir.layout import Layout, R, Shard, boxes, local_shape, replicated, spans
from gt.ir.spec import Spec

ELEMENTWISE = ("clone", "_to_copy", "zeros_like", "empty_like")  # and whatever torch tags as pointwise
MAX_RECIPE_STEPS = 64  # steps of a recipe; a longer one is placed
MAX_VIEW_STEPS = 256  # steps up to which a view is one more: each of them is written anew


class Materializer:
    """Unplaced tensors of one session are described here, and made."""

    def __init__(self, context: SessionContext, uploads: Uploads, binder: OpBinder) -> None:
        self._context, self._uploads, self._binder = context, uploads, binder
        self._emitter, self._table = context.emitter, context.table
        self.host_uses: dict[int, int] = {}  # upload whose bytes the client keeps -> recipes that need it

    # ---- writing recipes

    def can_defer(self, known: OpSchema, ins: list[Tensor], grouped: bool) -> bool:
        """True if an op is no use of its inputs, but one more step of a recipe."""
        if known.name == "gt.upload":
            return True
        # Uploads and views always, for their memory is a recipe's. Other ops only where a config has groups: without groups
        # there is nothing to wait for.
        template = known.template
        if template.dynamic or known.columns or any(t.placed for t in ins):
            return False
        if known.name in VIEWS and ins:
            return len(ins[0].storage.recipe or ()) < MAX_VIEW_STEPS
        if not self._context.groups or sum(len(t.storage.recipe or ()) for t in ins) >= MAX_RECIPE_STEPS:
            return False
        if not ins:
            return known.results == len(template.outs)
        if not (known.overwrites or template.pointwise or known.name in ELEMENTWISE):
            return False
        if grouped and not _initialises(known, ins):
            return False
        return self._context.tape is None or self._context.tape.defers(ins)

    def defer(self, known: OpSchema, ins: list[Tensor], values: tuple, out_ids: list[int], data: Any) -> None:
        """Add the op to the recipe of its target or base, or begin one with those of its inputs."""
        # A recipe is a small program. Its values are slots, numbered as they are made:
        #
        #     step       ins     outs
        #     empty      ()      (0,)
        #     normal_    (0,)    ()        in place: it makes no slot
        #     view       (0,)    (1,)      slots of the storage: {id of the weight: 0, id of the view: 1}
        template = known.template
        steps, slots, count = _joined(ins)
        new_slots = tuple(range(count, count + known.results))
        steps.append(RecipeStep(known, tuple(slots[t.id] for t in ins), values, new_slots, data, self._emitter.seq))
        views = known.name in VIEWS and bool(ins)
        target = ins[template.writes[0]] if template.writes else ins[0] if views else None
        if target is not None:
            self._assign(target.storage, steps, slots)
        for slot, tensor_id, index in zip(new_slots, out_ids, known.news, strict=True):
            out = template.outs[index]
            assert out.spec is not None
            if views:
                self._table.view(tensor_id, out.spec, ins[0], None, (known, values, index)).storage.slots[tensor_id] = slot
            else:
                storage = self._table.new(tensor_id, out.spec, None, self._context.origin).storage
                storage.home = self._context.origin.meaning or next((t.storage.home for t in ins if t.storage.home), None)
                self._assign(storage, steps, {tensor_id: slot})

    def _assign(self, storage: Storage, steps: list[RecipeStep], slots: dict[int, int]) -> None:
        """Give a storage its (longer) recipe, counting who needs which host copy."""
        for host in self._hosts(steps):
            self.host_uses[host] = self.host_uses.get(host, 0) + 1
        for host in self._hosts(storage.recipe or []):
            self.host_uses[host] -= 1
        storage.recipe = steps
        storage.slots = {i: slot for i, slot in slots.items() if i in storage.tensors}

    def take_back(self, since: int) -> None:
        """Ops from this number on were not executed: no tensor that is older is changed by them."""
        # A tensor that was made by the ops that are taken back keeps its recipe: it is worthless, but it can be placed.
        for storage in {id(tensor.storage): tensor.storage for tensor in self._table.rows.values()}.values():
            root = next((slot for i, slot in storage.slots.items() if storage.tensors[i].base is None), None)
            created = next((step.seq for step in storage.recipe or () if root in step.outs), since)
            if storage.recipe is not None and created < since:
                storage.recipe = [s for s in storage.recipe if s.seq < since or not s.known.template.writes]

    @staticmethod
    def _hosts(steps: list[RecipeStep]) -> list[int]:
        return [step.data[1] for step in steps if step.data and step.data[0] == "host"]

    def drop_recipe(self, storage: Storage) -> None:
        """End a recipe: the client may drop host copies that no other needs."""
        for host in self._hosts(storage.recipe or []):
            self.host_uses[host] -= 1
            if not self.host_uses[host]:
                del self.host_uses[host]
                self._uploads.release(host)

    # ---- carrying them out

    def continues(self, storage: Storage, parameter: Storage) -> bool:
        """True if the recipe of a cast is that of its parameter, which is not placed either, and what follows."""
        mine, first = storage.recipe or [], parameter.recipe or []
        return len(mine) > len(first) > 0 and [step.seq for step in mine[: len(first)]] == [step.seq for step in first]

    def place(self, storage: Storage, want: Layout, source: tuple[int, Tensor] | None = None) -> Layout:
        """Make a storage on workers, its live views too, and its root in layout `want` if its recipe can; the root's layout.

        source: so many steps have made this tensor, the operand of the next one.
        """
        root = next(t for t in storage.tensors.values() if t.base is None)
        # 1. A layout for every value of the recipe. If the wanted one cannot be made in parts, all is made whole on each
        #    worker, and the caller splits it.
        recipe = storage.recipe
        assert recipe is not None
        names = {slot: i for i, slot in storage.slots.items()}
        layouts = self._layouts(recipe, root, want)
        if layouts is None:
            layouts = self._layouts(recipe, root, replicated(want.mesh))
            assert layouts is not None
        # 2. Its steps. The bytes of an upload may not be there yet, so a storage with one is in the journal as a planned op is.
        steps, given = recipe, -1
        if source is not None and layouts[recipe[source[0]].ins[0]] == source[1].layout:
            steps, given = recipe[source[0] :], recipe[source[0]].ins[0]
            names[given] = source[1].id
        self._run(steps, layouts, names, given)
        if self._hosts(recipe):
            self._context.note_planned(recipe[-1].known, (), (storage,))
        else:
            self._context.note_placed(recipe[-1].known, storage)

        # 3. The storage is placed: tensors have layouts instead of slots.
        self.drop_recipe(storage)
        for tensor in storage.tensors.values():
            tensor.layout = self._context.intern(layouts[storage.slots[tensor.id]])
        storage.undecided = recipe[0].data is not None and not storage.param
        storage.recipe, storage.slots = None, {}
        spec, layout = root.spec, root.layout
        assert layout is not None
        self._emitter.line(root.id, spec.text(), layout, f"place {steps[0].known.name}", (), self._context.note())
        return layout

    def read(self, tensor: Tensor) -> Tensor:
        """A temporary, not in the table, with an unplaced tensor's value on the default mesh; the recipe stays."""
        storage = tensor.storage
        layout = replicated(self._context.default_mesh())
        root = next(t for t in storage.tensors.values() if t.base is None)
        layouts = self._layouts(storage.recipe or [], root, layout)
        assert layouts is not None
        copy = Tensor(self._emitter.temporary(), tensor.spec, Storage(), layout)
        self._run(storage.recipe or [], layouts, {storage.slots[tensor.id]: copy.id})
        self._context.note_planned((storage.recipe or [])[-1].known, (), (copy.storage,))
        return copy

    def can_split(self, storage: Storage, want: Layout) -> bool:
        """True if the recipe can be run in parts, with the root in layout `want`."""
        root = next(t for t in storage.tensors.values() if t.base is None)
        return storage.recipe is not None and self._layouts(storage.recipe, root, want) is not None

    def unsplittable(self, storage: Storage) -> bool:
        """True if its recipe cannot be run in parts: counted positions are cheaper whole than gathered."""
        return any(runs_whole(step) for step in storage.recipe or ())

    def _layouts(self, recipe: list[RecipeStep], root: Tensor, want: Layout) -> dict[int, Layout] | None:
        """Layout of every value of the recipe if all can be made in parts; None if something has to run whole."""
        layouts: dict[int, Layout] = {}
        shape = root.spec.shape
        # Forward through the recipe. A source may have any layout: the wanted one if it has the root's shape. A later value has
        # the layout that the op's sharding rule makes without an exchange. If a rule wants other inputs, there is none.
        for step in recipe:
            template = step.known.template
            specs = [template.outs[i].spec for i in step.known.news]
            if not step.ins:
                if runs_whole(step) and not want.replicated:
                    return None
                for slot, spec in zip(step.outs, specs, strict=True):
                    layouts[slot] = want if spec and spec.shape == shape else replicated(want.mesh)
                continue
            held = [layouts[i] for i in step.ins]
            columns = []
            places: list[list[Place]] = [[h.placements[axis] for h in held] for axis in range(len(want.mesh.axes))]
            for have, decision in zip(places, decide_along(step.known, places, want.mesh.sizes), strict=True):
                if decision is None or list(decision.wants) != have:
                    return None
                columns.append(decision.outs)
            for slot, index in zip(step.outs, step.known.news, strict=True):
                layouts[slot] = Layout(want.mesh, tuple(column[index] for column in columns))
        if step_partial(layouts):
            return None
        return layouts

    def _run(self, recipe: list[RecipeStep], made: dict[int, Layout], names: dict[int, int], given: int = -1) -> None:
        """Emit the steps; values that no tensor names are freed at the end. given: a slot whose value is there."""
        emitter = self._emitter
        ids: dict[int, int] = {given: names[given]} if given >= 0 else {}
        for step in recipe:
            for slot in step.outs:
                ids[slot] = names.get(slot) or emitter.temporary()
            if step.data is not None:
                self._upload(step, made[step.outs[0]], ids[step.outs[0]])
                continue
            outs = iter(step.outs)
            layouts = [
                made[next(outs)] if out.kind in ("new", "view") else made[step.ins[max(out.of, 0)]]
                for out in step.known.template.outs
            ]
            ins = [made[i] for i in step.ins]
            out_ids = [ids[o] for o in step.outs]
            self._binder.compute(step.known, ins, layouts, [ids[i] for i in step.ins], step.values, out_ids)
        loose = [ids[slot] for slot in ids if slot not in names]
        if loose:
            emitter.free(next(iter(made.values())).mesh.workers, loose)

    def _upload(self, step: RecipeStep, layout: Layout, tensor: int) -> None:
        """Tell each worker to expect its part, and send the part or ask the client for it. Equal parts are sent once."""
        # Ranks with the same part (replicas) share one upload and one definition.
        emitter, spec = self._emitter, step.known.template.outs[0].spec
        assert spec is not None
        parts: dict[tuple, list[int]] = {}
        for rank in range(len(layout.mesh.workers)):
            parts.setdefault(spans(layout, spec.shape, rank), []).append(rank)
        for ranks in parts.values():
            workers = [emitter.cluster.workers[layout.mesh.workers[r]] for r in ranks]
            local = dense(local_shape(layout, spec.shape, ranks[0]), spec)
            payload = {"shape": list(local.shape), "stride": list(local.stride), "dtype": spec.dtype}
            key = self._uploads.begin(step.data, spec, boxes(layout, spec.shape, ranks[0]), workers)
            define = self._define(step.known, payload)
            tape = self._context.tape
            if tape is not None:
                tape.note_upload(step.data, layout)
            name = tensor if tape is None else emitter.temporary()  # in a program a copy of what is kept for it
            for worker in workers:
                emitter.write(worker, define, [emitter.offset + name, key])
            if tape is not None:
                tape.keep([w.index for w in workers], name)
                self._copy(step.known, local, workers, name, tensor)

    def _copy(self, known: OpSchema, local: Spec, workers: list[Worker], source: int, target: int) -> None:
        """Have workers copy source to target. local: the spec of both."""
        key, emitter = ("copy", local), self._emitter
        if key not in known.plans:
            known.plans[key] = emitter.define("op", duplicate(local))
        for worker in workers:
            emitter.write(worker, known.plans[key], emitter.ids([source, target]))

    def _define(self, known: OpSchema, payload: dict) -> Any:
        key = ("upload", tuple(payload["shape"]), payload["dtype"])
        if key not in known.plans:
            known.plans[key] = self._emitter.define("upload", payload)
        return known.plans[key]


def _initialises(known: OpSchema, ins: list[Tensor]) -> bool:
    """True for an op in a group that makes a new weight's first value: in place, or of one random tensor, as randn(..) * std.

    Any other op computes something, which runs in its group at once. Uploads are read once.
    """
    writes = known.template.writes
    read = [step for index, t in enumerate(ins) if index not in writes for step in t.storage.recipe or ()]
    if known.overwrites:
        return True
    return not any(step.data for step in read) and (bool(writes) or (len(ins) == 1 and any(s.known.random for s in read)))


def runs_whole(step: RecipeStep) -> bool:
    """eye, arange and the like: a piece is not the same op of other sizes."""
    return not step.ins and step.data is None and not step.known.random and step.known.name not in SIZES


def _joined(ins: list[Tensor]) -> tuple[list[RecipeStep], dict[int, int], int]:
    """One list of steps for all inputs, the slots of their storages' tensors in it, and how many values it makes."""
    steps: list[RecipeStep] = []
    slots: dict[int, int] = {}
    count = 0
    for storage in dict.fromkeys(t.storage for t in ins):
        assert storage.recipe is not None
        for step in storage.recipe:
            moved = tuple(i + count for i in step.ins), tuple(o + count for o in step.outs)
            steps.append(RecipeStep(step.known, moved[0], step.values, moved[1], step.data, step.seq))
        slots.update({i: slot + count for i, slot in storage.slots.items()})
        count += sum(len(step.outs) for step in storage.recipe)
    return steps, slots, count


def step_partial(made: dict[int, Layout]) -> bool:
    return any(layout.partial for layout in made.values())


def root_layout(tensor: Tensor, want: Layout) -> Layout:
    """Layout of a storage's root that gives a view of it the layout `want`, as far as strides show it; terms come later."""
    root = next(t for t in tensor.storage.tensors.values() if t.base is None)
    root_splits = [p if tensor is root else _root_split(root, tensor, p) for p in want.placements if isinstance(p, Shard)]
    split = iter(root_splits)
    placements = [next(split) if isinstance(p, Shard) else R for p in want.placements]
    return Layout(want.mesh, tuple(placements))


def _root_split(root: Tensor, view: Tensor, place: Shard) -> Any:
    """The dim of the root that steps through memory as the view's split dim does."""
    memory, seen = root.spec, view.spec
    if memory.numel != seen.numel or len(memory.shape) != len(seen.shape):
        return R
    for dim, (extent, stride) in enumerate(zip(memory.shape, memory.stride, strict=True)):
        if stride == seen.stride[place.dim] and extent == seen.shape[place.dim]:
            return Shard(dim, place.parts)
    return R
