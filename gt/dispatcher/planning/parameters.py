"""Parameters of matmuls and look-ups in column and row parallel groups: which operand is one, and where its home is."""

from __future__ import annotations

from collections.abc import Sequence

from gt.dispatcher.planning.fused_projections import WEIGHTS, count_split_parts
from gt.dispatcher.planning.materializer import root_layout, runs_whole
from gt.dispatcher.planning.redistributor import Redistributor
from gt.dispatcher.sharding.groups import COLUMN, ROW, Meaning
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.sharding.views import VIEWS
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.records import Origin
from gt.dispatcher.state.tensors import Tensor
from gt.ir.layout import Layout, Placement, R, Shard
from gt.wire.messages import Notice

FACTORS = ("mm", "addmm")  # ops with a weight, and no others, in a program that splits only weights' matmuls
MAX_REPLICATION_WARNINGS = 8  # lines of a program


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
        _bring_home(redistributor, known, meaning, ins)
        return
    operand = weight(known, meaning, ins)
    if operand is None:
        return

    # parts: of a fused projection that is placed only now, or may still move. Later uses find it in the split that it has.
    index, dim = operand
    parameter, parts = ins[index], 1
    if meaning.kind == COLUMN and known.name != "embedding" and (not parameter.placed or parameter.movable):
        parts = meaning.parts or count_split_parts(context, outs)
    _move_home(redistributor, parameter, split(meaning, len(parameter.spec.shape), dim, parts, parameter))
    # Columns are output features, and a bias has one element for each. In a row parallel group it stays whole.
    if known.name == "addmm" and meaning.kind == COLUMN and ins[0].storage.param:
        bias = ins[0]
        tall = len(bias.spec.shape)
        _move_home(redistributor, bias, split(meaning, tall, tall - 1, parts, bias))


def weight(known: OpSchema, meaning: Meaning, ins: list[Tensor]) -> tuple[int, int] | None:
    """The operand of a matmul or look-up that is the weight, and which of its dims a column or row parallel group splits."""
    # The right factor is looked at first: x @ w is the usual form. The right factor of a linear layer is w.t(), a view of the
    # parameter in the same storage.
    left, right = WEIGHTS[known.name]
    index = next((i for i in (right, left) if i >= 0 and ins[i].storage.param), None)
    if index is None:
        return None
    rank = len(ins[index].spec.shape)
    stored = index == right or right < 0  # [in, out], an embedding's table likewise; else w @ x: [out, in]
    return index, rank - 1 if stored == (meaning.kind == COLUMN) else rank - 2


def declare_frozen(known: OpSchema, meaning: Meaning, ins: list[Tensor]) -> None:
    """Take a new right factor for a weight, and a new table, although it requires no grad: such as a frozen one.

    A factor of counted positions is none: they are computed from arange, as angles of rotary embeddings are.
    """
    if known.name not in WEIGHTS or meaning.kind not in (COLUMN, ROW):
        return
    # A frozen weight looks like any tensor. It is taken for one while it is not placed: an activation would be.
    left, right = WEIGHTS[known.name]
    if any(ins[i].storage.param for i in (left, right) if i >= 0):
        return
    factor = ins[max(right, 0)]
    if not factor.placed and not any(runs_whole(step) for i in ins for step in i.storage.recipe or ()):
        factor.storage.declare_parameter()
        if known.name == "addmm" and not ins[0].placed:
            ins[0].storage.declare_parameter()


def split(meaning: Meaning, rank: int, dim: int, parts: int, parameter: Tensor) -> Layout:
    """Layout of a parameter whose dim is split over its group, each of so many equal parts by itself; dim -1: of none."""
    layout = meaning.parameter(rank, dim if dim >= 0 else None)
    if dim < 0 or parts == 1 or parameter.spec.shape[dim] % parts:
        return layout
    return Layout(layout.mesh, tuple(Shard(p.dim, parts) if isinstance(p, Shard) else p for p in layout.placements))


def _bring_home(redistributor: Redistributor, known: OpSchema, meaning: Meaning, ins: list[Tensor]) -> None:
    """Bring the parameters that were placed for want of a group to this one. A view is no use, nor is writing in place."""
    for index, parameter in enumerate(ins):
        if (
            parameter.storage.param
            and parameter.storage.default
            and known.name not in VIEWS
            and index not in known.written
        ):
            want = root_layout(parameter, meaning.parameter(len(parameter.spec.shape), None))
            redistributor.move_home(parameter.storage, want)
            parameter.storage.default = False
            parameter.storage.declare_parameter()  # now it is whole here, and this use may cut it


def _move_home(redistributor: Redistributor, parameter: Tensor, want: Layout) -> None:
    """Place a parameter, or move one that was only placed for want of a group or of a use in one."""
    storage = parameter.storage
    if parameter.layout is None:
        redistributor.place(storage, root_layout(parameter, want))
    elif storage.default or parameter.may_choose(want.mesh):
        redistributor.move_home(storage, root_layout(parameter, want))
    storage.default = storage.undecided = False


class ReplicationWarnings:
    """Tells the client of matmuls that each worker of a column or row parallel group computes whole."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._lines: set[tuple[str, int]] = set()

    def check(self, known: OpSchema, origin: Origin, ins: list[Tensor], wants: Sequence[tuple[Placement, ...]]) -> None:
        """Warn, once for a line, if a matmul's factors are both whole along the tensor-parallel axis of its group."""
        meaning, line = origin.meaning, (origin.file, origin.line)
        if meaning is None or meaning.kind not in (COLUMN, ROW) or known.name not in FACTORS or origin.backward:
            return
        axis = next((n for n, (name, _) in enumerate(meaning.mesh.axes) if name == "tp"), None)
        left, right = WEIGHTS[known.name]
        if axis is None or not wants[left][axis] == wants[right][axis] == R:
            return
        if line in self._lines or len(self._lines) >= MAX_REPLICATION_WARNINGS:
            return
        self._lines.add(line)
        index, _ = weight(known, meaning, ins) or (-1, 0)
        if index < 0:
            why = "neither factor is a parameter; give its weight requires_grad=True, or do it in the stage's own group"
        else:
            why = f"its weight {ins[index].spec.text()} was placed whole by its first use; let that be an op of this group"
        size, where = meaning.mesh.sizes[axis], f"{origin.file}:{origin.line}: "
        text = f"group {meaning.name!r:.80} splits weights over {size} workers, but each does all of this {known.name}: {why}"
        self._context.send(Notice(f"{where if origin.file else ''}{text}"))
