"""Fused projections: one matmul whose result is split into parts, each of which is split over the workers by itself.

A projection shows that it is fused when its result is split. That is mostly a few ops later, so planning waits for them. Else
the weight, which was split plainly, is split again, once.
"""

from __future__ import annotations

import logging

from gt.dispatcher.planning.materializer import root_layout
from gt.dispatcher.planning.redistributor import Redistributor
from gt.dispatcher.sharding.groups import COLUMN
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.sharding.views import VIEWS, wanted_parts
from gt.dispatcher.sharding.zero import axis_of, used
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.op_queue import NeedsLookahead
from gt.dispatcher.state.records import Origin
from gt.dispatcher.state.tensors import Table, Tensor
from gt.ir.instr import END_FRAGMENT, FRAGMENT, FRAGMENT_HEADER, unchecked_length
from gt.ir.layout import Layout, Shard

log = logging.getLogger("gt.dispatcher")
WEIGHTS = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    "embedding": (0, -1),
}  # op -> its two factors
MAX_LOOKAHEAD_OPS = 24  # ops that are searched for the split of a fused projection


def record_producer(table: Table, known: OpSchema, ins: list[Tensor], outs: list[int]) -> None:
    """Remember the projection that made a tensor, in case a later split shows that it is a fused one."""
    maker = None
    if known.name in WEIGHTS:
        right = WEIGHTS[known.name][1]
        if right >= 0 and ins[right].storage.param:
            maker = ins[right], ins[0] if known.name == "addmm" and ins[0].storage.param else None
    elif known.name == "_unsafe_view":
        maker = ins[0].storage.made_by
    elif known.name == "add" and len(ins) == 2 and ins[1].storage.param and ins[0].storage.made_by:
        maker = ins[0].storage.made_by[0], ins[1]
    if maker is not None:
        table.rows[outs[0]].storage.made_by = maker


def split_by_parts(redistributor: Redistributor, base: Tensor, parts: int) -> bool:
    """Split a fused projection by its parts, once and for good: weight, bias and the result at hand."""
    # 1. Only a result whose last dim is split plainly by one axis, and whose parts can be split evenly.
    weight, bias = base.storage.made_by or (None, None)
    root = next(t for t in base.storage.tensors.values() if t.base is None)
    layout = root.layout
    assert layout is not None and weight is not None
    split = [p for p in layout.placements if isinstance(p, Shard)]
    if len(split) != 1 or split[0].parts > 1 or split[0].dim != len(root.spec.shape) - 1:
        return False
    size = dict(zip(layout.placements, layout.mesh.sizes, strict=True))[split[0]]
    if root.spec.shape[-1] % (parts * size):
        return False
    # 2. All three in the new split: the next step's matmul then makes its result so, without a move.
    log.info("a projection into %d parts was split plainly: it is laid out again, once", parts)
    for t in (weight, bias, root):
        if t is not None and t.layout is not None:
            at_rest = axis_of(t.layout) if t.storage.rest is not None else None  # this axis splits another dim
            again = tuple(
                Shard(p.dim, parts) if isinstance(p, Shard) and axis != at_rest else p
                for axis, p in enumerate(t.layout.placements)
            )
            whole = root_layout(t, Layout(layout.mesh, again))
            redistributor.relayout(t.storage, whole)
            parameter = t.storage.cast_of
            if parameter is not None and parameter.tensors and parameter.recipe is None:
                redistributor.move_home(parameter, used(whole))
    base.storage.made_by = None
    return True


def needs_lookahead(context: SessionContext, known: OpSchema, origin: Origin, ins: list[Tensor], outs: list[int]) -> bool:
    """True if this is the first use of a weight that is split by its columns, and the ops behind it have not arrived."""
    meaning = origin.meaning
    if meaning is None or meaning.kind != COLUMN or meaning.parts or known.name not in WEIGHTS:
        return False
    right = WEIGHTS[known.name][1]
    if right < 0 or not ins[right].storage.param or (ins[right].placed and not ins[right].movable):
        return False
    try:
        count_split_parts(context, outs)
    except NeedsLookahead:
        return True
    return False


def count_split_parts(context: SessionContext, outs: list[int]) -> int:
    """The number of equal pieces that the result of a fused projection is split into; NeedsLookahead if ops are missing."""
    # The walk over code that is not planned yet: `followed` has the result, its views, and its sum with a bias. The numbers are
    # a client's and not checked yet, so whatever cannot be read ends the walk: the error is raised in its turn.
    followed, left = {outs[0]}, MAX_LOOKAHEAD_OPS
    for code, start in context.queue.lookahead():
        at = start
        while left and at < len(code):
            number = code[at]
            if at + 1 >= len(code) or type(number) is not int:
                return 1
            if length := unchecked_length(code, at):
                at += length
                continue
            if number == FRAGMENT:
                at += FRAGMENT_HEADER
                continue
            if number == END_FRAGMENT and type(code[at + 1]) is int:
                at += 2 + max(code[at + 1], 0)
                continue
            known = context.templates.get(number)
            if known is None:  # another code, or a wrong number, whose error is raised in its turn
                return 1
            parts = _follow(known, code[at + 2 : at + 2 + known.length], followed)
            if parts:
                return parts
            at, left = at + 2 + known.length, left - 1
        if not left:
            return 1
    return 1


def _follow(known: OpSchema, ids: list, followed: set[int]) -> int:
    """The number of parts into which an op splits a followed tensor, 0 for no split. Its view or sum is followed too."""
    if known.name in VIEWS and known.tensors == 1 and ids[:1] and ids[0] in followed:
        # A split of the last dim, or a view that makes a leading factor of it. Of views only 3 parts count as fused (QKV). Any
        # other factor is a number of heads, along which a plain split is the right one.
        wanted = wanted_parts(known)
        last = len(known.template.ins[0].shape) - 1
        if wanted and wanted[0] == last:
            return wanted[1] if known.name.startswith("split") or wanted[1] == 3 else 1
        followed.update(ids[1 + known.values :])
    elif known.name == "add" and ids[:1] and ids[0] in followed:  # its bias
        followed.update(ids[known.tensors + known.values :])
    return 0
