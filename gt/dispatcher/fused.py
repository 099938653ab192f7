"""Fused projections: one matmul whose result is split into parts, each of which is split over the workers by itself.

Whether a projection is one is known when its result is split: mostly later in the same batch, else what was laid out plainly
is laid out again, once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gt.dispatcher.plan.known import Known
from gt.dispatcher.plan.views import VIEWS, wanted_parts
from gt.dispatcher.tensors import Tensor
from gt.ir.instr import FREE, PARAM
from gt.ir.layout import Layout, Shard

if TYPE_CHECKING:
    from gt.dispatcher.sessions import Session

log = logging.getLogger("gt.dispatcher")
WEIGHTS = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    "embedding": (0, -1),
}  # op -> its two factors
LOOK_AHEAD = 24  # ops of the batch that are searched for the split of a fused projection


def note_maker(s: Session, known: Known, ins: list[Tensor], outs: list[int]) -> None:
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
        s.table.rows[outs[0]].storage.made_by = maker


def lay_out_again(s: Session, base: Tensor, parts: int) -> bool:
    """Lay a fused projection out by its parts, once and for good: weight, bias and the result at hand."""
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
    log.info("a projection into %d parts was split plainly: it is laid out again, once", parts)
    for t in (weight, bias, root):
        if t is not None and t.layout is not None:
            again = tuple(Shard(p.dim, parts) if isinstance(p, Shard) else p for p in t.layout.placements)
            s.mover.relayout(t.storage, s.placer.root_layout(t, Layout(layout.mesh, again)))
    base.storage.made_by = None
    return True


def parts_ahead(s: Session, outs: list[int]) -> int:
    """How many equal pieces the result of a fused projection is split into, later in this batch."""
    found = {outs[0]}
    code, at, templates = s.ahead()
    for _ in range(LOOK_AHEAD):
        if at + 1 >= len(code) or type(code[at]) is not int:
            return 1
        number = code[at]
        if number in (FREE, PARAM) and type(code[at + 1]) is int:
            at += 2 + (code[at + 1] if number == FREE else 0)
            continue
        known = templates.get(number)
        if known is None:  # something else, or a lie, which will be met in its turn
            return 1
        ids = code[at + 2 : at + 2 + known.length]
        if known.name in VIEWS and known.tensors == 1 and ids[0] in found:
            wanted = wanted_parts(known)
            last = len(known.template.ins[0].shape) - 1
            if wanted and wanted[0] == last:
                return wanted[1] if known.name.startswith("split") or wanted[1] == 3 else 1
            found.update(ids[1 + known.values :])
        elif known.name == "add" and ids[0] in found:  # its bias
            found.update(ids[known.tensors + known.values :])
        at += 2 + known.length
    return 1
