"""Parameters that rest in pieces of the data-parallel axis (ZeRO), and their gradients and optimizer state.

An op on tensors that all rest (an optimizer's step, a norm, a cast) works on the pieces. Any other op uses a parameter whole:
its copy is gathered before the first use. The stages of ZeRO differ in how long copies and terms live:

    stage   a gathered copy lives                    terms of a gradient are added up into pieces
    1       until its parameter is written           when an op on tensors at rest reads the gradient: once a step
    2       until its parameter is written           as soon as autograd has accumulated them
    3       until more bytes are gathered than fit   as soon as autograd has accumulated them

Copies of small parameters live as in stage 2, while they are together no larger than the largest parameter. Otherwise values
computed from them could not be recomputed in backward. With a schedule all do: one micro-batch would end another one's copy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from gt.dispatcher.planning.redistributor import Redistributor
from gt.dispatcher.sharding import zero
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.sharding.views import VIEWS
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.tensors import Storage, Tensor
from gt.ir.template import Template, V

log = logging.getLogger("gt.dispatcher")
KEPT_PARAMETERS = 2  # in stage 3: as many of the largest parameters may have a copy at a time
SMALL_SHARE = 128  # parameters of at most this part of the largest (norms, biases) keep their copies beside these

# The reduction of a gradient, as an op in errors and in the journal
_REDUCTION = OpSchema(Template("gt.reduce_gradient.default", (), (), (), 0, (), (), False, False))


class GatheredCopies:
    """Storages with copies, the longest unused first, and the bytes of each and of all. A session has 100,000 of them."""

    def __init__(self) -> None:
        self.by_storage: dict[Storage, int] = {}
        self.nbytes = 0

    def note(self, storage: Storage, nbytes: int) -> None:
        """A storage's copy is used."""
        self.drop(storage)  # to the end of the order
        self.by_storage[storage] = nbytes
        self.nbytes += nbytes

    def drop(self, storage: Storage) -> None:
        self.nbytes -= self.by_storage.pop(storage, 0)


class ShardedParameters:
    """The parameters of one session that ZeRO shards. `stage` is 0 where there are none."""

    def __init__(self, context: SessionContext, redistributor: Redistributor) -> None:
        self._context, self._redistributor = context, redistributor
        self._emitter = context.emitter
        self.stage = context.config.zero
        self._ends_copies = self.stage == 3 and context.config.schedule is None
        self._gathered = GatheredCopies()  # in stage 3
        self._small = GatheredCopies()  # of small parameters, beside these
        self._largest = 0  # bytes of a gathered parameter, since the step before the last one that wrote parameters
        self._largest_now = 0  # and since the last one

    # ---- what the client says

    def declare(self, parameter: Tensor) -> None:
        """A parameter is sharded: when it is placed, or after its first use if it is placed already."""
        storage = parameter.storage
        if not self.stage or storage.sharded:
            return
        storage.sharded = True  # one that is placed already rests after its first use, which may choose its layout

    def accumulated(self, parameter: Tensor, gradient: Tensor) -> None:
        """Autograd has added to a gradient: it rests as its parameter does."""
        # 1. Where it rests. If strides do not show a layout of its memory that corresponds, it does not rest at all.
        storage, layout = gradient.storage, parameter.layout
        storage.gradient = parameter.storage.trained = True
        root = _root(storage)
        if not self.stage or parameter.storage.rest is None or layout is None or root.layout is None:
            return
        same = layout.mesh == root.layout.mesh and parameter.spec.shape == gradient.spec.shape
        want = zero.root_of_view(root.spec, gradient.spec, layout) if same else None
        if want is None:
            storage.rest = None
            return
        # 2. It goes there now, unless it is in terms and stage 1 adds them up once a step. With failures around nothing moves:
        #    it is not known whose value is good.
        storage.rest = self._context.intern(want)
        if root.layout != want and (self.stage > 1 or not root.layout.partial) and not self._context.failures.troubled:
            self._begin()
            self._rest(storage)
            self._context.note_planned(_REDUCTION, (storage,), (storage,))

    def _begin(self) -> None:
        self._emitter.begin_op()

    def _rest(self, storage: Storage) -> None:
        """Bring a storage to where it rests."""
        root, want = _root(storage), storage.rest
        assert root.layout is not None and want is not None
        if root.layout.partial:
            self._redistributor.reduce_partial(storage)
        if root.layout != want:
            self._redistributor.relayout(storage, want)

    # ---- around each op

    def before(self, known: OpSchema, ins: Sequence[Tensor], values: tuple) -> tuple[OpSchema, tuple]:
        """Add up terms of gradients before an op on tensors at rest. Returns the op that is planned, and its scalars."""
        if known.name in VIEWS or not self.all_rest(ins):
            return known, values
        for t in ins:
            if t.storage.rest is not None and t.layout is not None and t.layout.partial:
                self._rest(t.storage)
        if known.name == "linalg_vector_norm" and len(values) == 1:  # the order decides how norms of pieces are combined
            key = ("of order", type(values[0]), values[0])
            if key not in known.plans:
                args = tuple(values[0] if isinstance(arg, V) else arg for arg in known.template.args)
                known.plans[key] = OpSchema(replace(known.template, args=args, values=0))
            return known.plans[key], ()
        return known, values

    @staticmethod
    def all_rest(ins: Sequence[Tensor]) -> bool:
        """True if every operand that has dims rests, and there is one."""
        sized = [t.storage.rest is not None for t in ins if t.spec.shape]
        return bool(sized) and all(sized)

    def after(self, known: OpSchema, ins: Sequence[Tensor], outs: Sequence[int]) -> None:
        """Results of an op on tensors at rest, rest too. Copies of written tensors end, and the oldest of too many copies."""
        # 1. Results: the state of an optimizer comes to rest this way, since it is computed from gradients that do.
        rows = self._context.table.rows
        if outs and zero.at_rest(known) and self.all_rest(ins):
            for i in outs:
                t = rows[i]
                if t.base is None and t.layout is not None and t.spec.shape and not t.layout.partial:
                    t.storage.rest = t.layout
        # 2. Operands. A written parameter ends its copies, and a step begins; the first use of one that is whole settles it.
        writes, uses = known.written, zero.uses(known)
        for index, t in enumerate(ins):
            storage = t.storage
            if storage.rest is not None and index in writes:
                self._drop_copies(storage)
                self._return(storage)
                if storage.sharded and self._largest_now:
                    self._largest, self._largest_now = self._largest_now, 0
            elif storage.sharded and storage.rest is None and uses and index not in writes:
                self._first_use(storage)
        self._evict(ins)

    def _first_use(self, storage: Storage) -> None:
        """A parameter that was whole when it was declared rests from now on, unless no group has used it."""
        layout = _root(storage).layout
        if layout is not None and not layout.partial and not storage.default and not storage.undecided:
            self._redistributor.move_home(storage, layout)

    def _return(self, storage: Storage) -> None:
        """An op without a rule for pieces has made a parameter whole: it is split again."""
        root = _root(storage)
        if storage.sharded and root.layout is not None and not root.layout.partial:
            want = zero.rest(root.layout, root.spec.shape)
            if zero.used(root.layout) == root.layout != want:
                self._redistributor.relayout(storage, want)

    def _drop_copies(self, storage: Storage) -> None:
        for t in storage.tensors.values():
            if t.copies or t.sums:
                self._redistributor.drop_copies(t)
        self._gathered.drop(storage)
        self._small.drop(storage)

    def _evict(self, ins: Sequence[Tensor]) -> None:
        """Note the copies that an op has used, and end the oldest while there are too many bytes.

        In stages 1 and 2 these are copies of gradients and state, as an optimizer that multiplies matrices reads them.
        """
        for t in ins:
            if t.storage.rest is not None and t.copies and (self._ends_copies or not t.storage.sharded):
                self._note_copy(t.storage, _root(t.storage).spec.nbytes)
        # The dict is in the order of last uses. One copy stays in any case: that of the op which is planned.
        room = KEPT_PARAMETERS * self._largest
        while len(self._gathered.by_storage) > 1 and self._gathered.nbytes > room:
            self._drop_copies(next(iter(self._gathered.by_storage)))

    def _note_copy(self, storage: Storage, nbytes: int) -> None:
        """An op has used the copy of a parameter."""
        self._largest_now = max(self._largest_now, nbytes)
        if storage in self._small.by_storage:
            return
        small = nbytes * SMALL_SHARE <= self._largest >= self._small.nbytes + nbytes
        if small and storage not in self._gathered.by_storage:
            self._small.note(storage, nbytes)
            return
        self._gathered.note(storage, nbytes)
        self._largest = max(self._largest, nbytes)

    # ---- views

    def view_base(self, known: OpSchema, base: Tensor) -> bool:
        """Split a sharded parameter along another dim, in which a view of it has a local form; False if there is none.

        Without one the parameter is whole from then on.
        """
        storage = base.storage
        root = _root(storage)
        if storage.rest is None or root.layout is None:
            return False
        if root is base:
            for dim in zero.dims(root.layout, root.spec.shape):
                want = self._context.intern(zero.rest(root.layout, root.spec.shape, dim))
                if want != root.layout and self._redistributor.view_layouts(known, want) is not None:
                    self._redistributor.relayout(storage, want)
                    return True
        if storage.sharded:
            log.info("no split of a parameter fits its view by %s: it is whole on each worker", known.template.op)
        storage.sharded = False
        self._redistributor.relayout(storage, zero.used(root.layout))
        return self._redistributor.view_layouts(known, base.layout) is not None if base.layout is not None else False


def _root(storage: Storage) -> Tensor:
    return next(t for t in storage.tensors.values() if t.base is None)
