"""Parameters of matmuls and look-ups in column and row parallel groups: which operand is one, and where its home is."""

from __future__ import annotations

from gt.dispatcher.planning.fused_projections import WEIGHTS, count_split_parts
from gt.dispatcher.planning.materializer import root_layout
from gt.dispatcher.planning.redistributor import Redistributor
from gt.dispatcher.sharding.groups import COLUMN, ROW, Meaning
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.tensors import Tensor
from gt.ir.layout import Layout, Shard


def place_weights(
    context: SessionContext,
    redistributor: Redistributor,
    known: OpSchema,
    meaning: Meaning,
    ins: list[Tensor],
    outs: list[int],
) -> None:
    """Split the parameter of a matmul or embedding as its group says, before its first use."""
    if known.name not in WEIGHTS or meaning.kind not in (COLUMN, ROW):
        for t in ins:
            if t.storage.param and t.storage.default:
                _move_home(redistributor, t, meaning.parameter(len(t.spec.shape), None))
        return
    operand = weight(known, meaning, ins)
    if operand is None:
        return
    index, dim = operand
    t, parts = ins[index], 1
    if meaning.kind == COLUMN and known.name != "embedding" and not t.placed:
        parts = meaning.parts or count_split_parts(context, outs)
    _move_home(redistributor, t, split(meaning, len(t.spec.shape), dim, parts, t))
    if known.name == "addmm" and meaning.kind == COLUMN and ins[0].storage.param:
        bias = ins[0]
        tall = len(bias.spec.shape)
        _move_home(redistributor, bias, split(meaning, tall, tall - 1, parts, bias))


def weight(known: OpSchema, meaning: Meaning, ins: list[Tensor]) -> tuple[int, int] | None:
    """The operand of a matmul or look-up that is the weight, and which of its dims a column or row parallel group splits."""
    left, right = WEIGHTS[known.name]
    index = next((i for i in (right, left) if i >= 0 and ins[i].storage.param), None)
    if index is None:
        return None
    rank = len(ins[index].spec.shape)
    stored = index == right or right < 0  # [in, out], an embedding's table likewise; else w @ x: [out, in]
    return index, rank - 1 if stored == (meaning.kind == COLUMN) else rank - 2


def split(meaning: Meaning, rank: int, dim: int, parts: int, t: Tensor) -> Layout:
    """Layout of a parameter whose dim is split over its group, each of so many equal parts by itself; dim -1: of none."""
    layout = meaning.parameter(rank, dim if dim >= 0 else None)
    if dim < 0 or parts == 1 or t.spec.shape[dim] % parts:
        return layout
    return Layout(layout.mesh, tuple(Shard(p.dim, parts) if isinstance(p, Shard) else p for p in layout.placements))


def _move_home(redistributor: Redistributor, t: Tensor, want: Layout) -> None:
    """Place a parameter, or move one that was only placed for want of a group."""
    storage = t.storage
    if t.layout is None:
        redistributor.place(storage, root_layout(t, want))
    elif storage.default:
        redistributor.relayout(storage, redistributor.home(storage, root_layout(t, want)))
    storage.default = False
