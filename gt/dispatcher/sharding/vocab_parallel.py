"""Vocabulary parallelism: softmax, losses and embeddings over a split dim, decomposed into ops on pieces.

Each worker computes the classes (or rows of a table) in its own piece. Workers exchange only maxima and sums of rows, which are
reduced where the next op reads them. A decomposition is used where the cost model finds it faster than gathering the dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from gt.dispatcher.sharding.base import OF_PIECES, Place, settled
from gt.dispatcher.sharding.cost import BYTES, added_up, gathered
from gt.dispatcher.sharding.localize import dense
from gt.dispatcher.sharding.op_chain import MEAN, SUM, Chain, ChainOp, ChainValue, Placements, quotient, retyped
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.ir.layout import Layout, Mesh, P, R, Shard, boxes, local_shape
from gt.ir.spec import Spec, contiguous
from gt.ir.template import Const, Out, Template

HALF = ("float16", "bfloat16")
NO_LABEL = -(1 << 31) + 2  # replaces a label in another worker's piece
BEYOND_LABELS = (1 << 31) - 1  # larger than every label
SUMS = "sums of rows"  # name of nll_loss_backward's second output: a gradient's row sums save the softmax backward a reduction
Starts = Sequence[Sequence[Place]]


class Split:
    """An operand along `dim`: the mesh axes that split it, and the costs of gathering it or leaving it split."""

    def __init__(self, spec: Spec, dim: int, start: Sequence[Place], mesh: Mesh) -> None:
        self.spec, self.dim, self.mesh = spec, dim, mesh
        self.layout = Layout(mesh, tuple(map(settled, start)))  # partial operands are reduced first: nothing here is linear
        self.axes = [n for n, p in enumerate(start) if isinstance(p, Shard) and p.dim == dim]
        self.size = prod(mesh.sizes[n] for n in self.axes)
        others = prod(size for n, size in enumerate(mesh.sizes) if n not in self.axes and isinstance(start[n], Shard))
        self.nbytes = spec.nbytes / others  # on one worker, if the dim were gathered
        self.rows = 4 * self.nbytes / spec.itemsize / max(spec.shape[dim], 1)  # bytes of one fp32 value for each of its rows

    @property
    def plain(self) -> bool:
        """True where every worker has exactly one run of the dim, and no run is empty."""
        if not self.axes or any(isinstance(p, Shard) and p.parts > 1 for p in self.layout.placements):
            return False
        return all(local_shape(self.layout, self.spec.shape, rank)[self.dim] for rank in range(len(self.mesh.workers)))

    def spans(self) -> list[tuple[int, int]]:
        """[start, stop) of the dim on each worker."""
        return [boxes(self.layout, self.spec.shape, rank)[0][self.dim] for rank in range(len(self.mesh.workers))]

    def gathering(self, passes: float) -> float:
        """Seconds to gather the dim and to read or write all of it `passes` times."""
        return gathered(self.nbytes, self.size) + passes * self.nbytes / BYTES

    def staying(self, sums: int, passes: float) -> float:
        """Seconds to all-reduce `sums` values a row and to read or write a piece `passes` times (in compiled code)."""
        return sums * added_up(self.rows, self.size) + passes * self.nbytes / self.size / BYTES


# ---- softmax


def _reduced(spec: Spec, dims: Sequence[int], dtype: str, keep: bool = True) -> Spec:
    sizes = [1 if d in dims else n for d, n in enumerate(spec.shape) if keep or d not in dims]
    return contiguous(tuple(sizes), dtype)


def _like(spec: Spec, dtype: str) -> Spec:
    return dense(spec.shape, retyped(spec, dtype))


def _wide(*specs: Spec) -> str:
    return "float32" if any(spec.dtype in HALF for spec in specs) else specs[0].dtype


def _powers(chain: Chain, split: Split, dims: Sequence[int], wide: str, finite: bool) -> tuple[ChainValue, ChainValue]:
    """Maximum of each row, and sum of exp(x - maximum). finite: an infinite maximum is replaced by 0, as logsumexp wants it.

    Each worker reduces its own piece to [rows, workers] first. So x is read once, and no wider copy of it is stored.
    """
    # With own maxima m_w and sums s_w of each worker w: m = max(m_w), and sum(exp(x - m)) = sum over w of s_w * exp(m_w - m).
    # `each` has one column for each worker, [rows, workers] split by columns, so `amax` and `sum` along it are all-reduces.
    spec, where = split.spec, split.layout.placements
    rows = _reduced(spec, dims, wide)
    sizes = [split.size if d == split.dim else n for d, n in enumerate(rows.shape)]
    each, full = contiguous(tuple(sizes), wide), _like(spec, wide)
    x = chain.operand(0)
    own = chain.placed("amax.default", x, dims, True, out=retyped(each, spec.dtype), where=where, pointwise=False)
    own = chain.cast(own, wide)
    level = _no_end(chain, own)
    less = chain.placed("sub.Tensor", x, level, out=full, where=where)  # computed in the wide dtype of `level`
    powers = chain.placed("exp.default", less, out=full, where=where)
    part = chain.placed("sum.dim_IntList", powers, dims, True, out=each, where=where, pointwise=False)
    most = chain.op("amax.default", own, [split.dim], True, out=rows, known_as=OF_PIECES["amax"])
    if finite:
        most = _no_end(chain, most)
    scale = chain.op("exp.default", chain.op("sub.Tensor", own, most, out=each), out=each)
    part = chain.op("mul.Tensor", part, scale, out=each)
    return most, chain.op("sum.dim_IntList", part, [split.dim], True, out=rows, pointwise=False)


def _no_end(chain: Chain, value: ChainValue) -> ChainValue:
    """`value` with 0 in place of infinite elements."""
    size = chain.op("abs.default", value, out=value.spec)
    endless = chain.op("eq.Scalar", size, float("inf"), out=retyped(value.spec, "bool"))
    return chain.op("masked_fill.Scalar", value, endless, 0, out=value.spec)


def softmax(known: OpSchema, starts: Starts, mesh: Mesh) -> list[ChainOp] | None:
    """exp(x - max) / sum, or x - max - log(sum). Two tensors of [rows] are all-reduced."""
    spec = known.template.ins[0]
    dims = [known.arg(1) % len(spec.shape)] if spec.shape else []
    split = Split(spec, dims[0], starts[0], mesh) if dims else None
    if split is None or not split.plain or split.staying(2, 3) >= split.gathering(2):
        return None
    chain, wide = Chain(known), _wide(spec)
    full, rows = _like(spec, wide), _reduced(spec, dims, wide)
    most, total = _powers(chain, split, dims, wide, finite=False)
    logs = known.name == "_log_softmax"
    total = chain.op("log.default" if logs else "reciprocal.default", total, out=rows)  # first: it needs the all-reduce
    less = chain.op("sub.Tensor", chain.operand(0), most, out=full)
    if logs:
        return chain.end(chain.op("sub.Tensor", less, total, out=full))
    return chain.end(chain.op("mul.Tensor", chain.op("exp.default", less, out=full), total, out=full))


def softmax_backward(known: OpSchema, starts: Starts, mesh: Mesh) -> list[ChainOp] | None:
    """Operands: gradient, result. grad - exp(result) * sum(grad); of softmax g - result * sum(g), g being grad * result.

    A third start is for log_softmax: the placements of the gradient's sums of rows (SUMS), where these are known already.
    """
    ins = known.template.ins
    if not ins[0].shape or ins[0].shape != ins[1].shape:
        return None
    dims = [known.arg(2) % len(ins[0].shape)]
    splits = [s for s in (Split(spec, dims[0], start, mesh) for spec, start in zip(ins, starts)) if s.axes]
    if (
        not splits
        or not all(s.plain for s in splits)
        or splits[0].staying(len(starts) < 3, 4) >= sum(s.gathering(1.5) for s in splits)
    ):
        return None
    # Where the loss has left the gradient's sums of rows (third start), no collective is needed at all.
    chain, wide = Chain(known), _wide(*ins)
    full, rows = _like(ins[1], wide), _reduced(ins[1], dims, wide)
    grad, result = chain.operand(0), chain.operand(1, wide)
    if known.name == "_softmax_backward_data":
        grad = chain.op("mul.Tensor", grad, result, out=full)
    else:
        result = chain.op("exp.default", result, out=full)
    if len(starts) > 2:
        total = chain.cast(ChainValue(2, retyped(rows, ins[0].dtype)), wide)
    else:
        total = chain.op("sum.dim_IntList", grad, dims, True, out=rows, pointwise=False, dtype=Const("dtype", wide))
    return chain.end(chain.op("addcmul.default", grad, result, total, out=full, value=-1))


def logsumexp(known: OpSchema, starts: Starts, mesh: Mesh) -> list[ChainOp] | None:
    """max + log(sum(exp(x - max))), an infinite maximum taken as 0 as torch does."""
    spec, keep = known.template.ins[0], bool(known.named(2, "keepdim", False))
    named = known.named(1, "dim")
    dims = sorted({d % len(spec.shape) for d in ([named] if isinstance(named, int) else named)}) if spec.shape else []
    splits = [s for s in (Split(spec, d, starts[0], mesh) for d in dims) if s.axes]
    if len(splits) != 1 or "float" not in spec.dtype or not splits[0].plain:
        return None
    if splits[0].staying(2, 2) >= splits[0].gathering(1):
        return None
    chain, wide = Chain(known), _wide(spec)
    rows, result = _reduced(spec, dims, wide), _reduced(spec, dims, wide, keep)
    most, total = _powers(chain, splits[0], dims, wide, finite=True)
    value = chain.op("add.Tensor", chain.op("log.default", total, out=rows), most, out=rows)
    if not keep:
        value = chain.op("amax.default", value, dims, False, out=result, pointwise=False)
    return chain.end(value)


def extreme(known: OpSchema, starts: Starts, mesh: Mesh) -> list[ChainOp] | None:
    """amax, amin over pieces of unequal length, none of them empty."""
    # The op stays one op. It gets the name whose rule knows that no piece is empty; equal pieces need no such name.
    spec, dims = known.template.ins[0], known.named(1, "dim")
    if not spec.shape or isinstance(dims, int):
        return None
    splits = [Split(spec, d, starts[0], mesh) for d in {d % len(spec.shape) for d in dims or range(len(spec.shape))}]
    splits = [s for s in splits if s.axes]
    if not all(s.plain for s in splits) or all(spec.shape[s.dim] % s.size == 0 for s in splits):
        return None
    t = known.template
    same = OpSchema(Template(t.op, t.args, t.kwargs, t.ins, t.values, t.outs, t.writes))
    same.name = OF_PIECES[known.name]
    return [ChainOp((same,), (0,), (-1,))]


# ---- labels


def _own(chain: Chain, labels: int, split: Split, where: Placements, skipped: int | None, mark: int) -> ChainValue:
    """Labels relative to the start of each worker's piece; `mark` for labels of other pieces and for the label `skipped`.

    An invalid label stays invalid on the first or the last worker, and fails there as it does on one worker.
    """
    # Example, 10 classes on 2 workers, labels 3, 7 and 12 (which is invalid), and mark -100:
    #
    #     worker 0 (0..5):   3, -100, -100
    #     worker 1 (5..10):  -100, 2, 7         7 is beyond its 5 classes, so the last worker's loss raises torch's error
    value = chain.operand(labels)
    spec, flags = _like(value.spec, value.spec.dtype), _like(value.spec, "bool")
    if skipped is not None:
        skip = chain.placed("eq.Scalar", value, skipped, out=flags, where=where)
        value = chain.placed("masked_fill.Scalar", value, skip, mark, out=spec, where=where)
    last, spans = split.spec.shape[split.dim], split.spans()
    starts = [(value, start if start else -BEYOND_LABELS) for start, _ in spans]
    stops = [(value, stop if stop < last else BEYOND_LABELS) for _, stop in spans]
    below = chain.placed_by_rank("lt.Scalar", starts, flags, where)
    above = chain.placed_by_rank("ge.Scalar", stops, flags, where)
    moved = chain.placed_by_rank("sub.Scalar", [(value, start) for start, _ in spans], spec, where)
    other = chain.placed("bitwise_or.Tensor", below, above, out=flags, where=where)
    return chain.placed("masked_fill.Scalar", moved, other, mark, out=spec, where=where)


def _marked(ignored: int) -> tuple[int | None, int]:
    """(label to replace, its replacement). An ignored label below 0 is no class and needs no replacement."""
    return (None, ignored) if -BEYOND_LABELS < ignored < 0 else (ignored, NO_LABEL)


def _axis_kinds(split: Split, labels: Sequence[Place]) -> list[str]:
    """The dim that each mesh axis splits: "classes", "rows" or "" for none."""
    rows = len(split.spec.shape) > 1
    kinds = []
    for axis, (mine, others) in enumerate(zip(split.layout.placements, labels, strict=True)):
        row = rows and Shard(0) in (mine, others)
        kinds.append("classes" if axis in split.axes else "rows" if row else "")
    return kinds


def _axes(kinds: Sequence[str], **by_kind: Any) -> Placements:
    return tuple(by_kind.get(kind, R) for kind in kinds)


def nll_loss(known: OpSchema, starts: Starts, mesh: Mesh) -> list[ChainOp] | None:
    """Each worker ignores labels of other pieces, so loss and weight are partial. A mean is the sum over the total weight."""
    template, (ignored, reduction) = known.template, (known.arg(4), known.arg(3))
    dim = min(len(template.ins[0].shape), 2) - 1
    split = Split(template.ins[0], dim, starts[0], mesh)
    if template.ins[1].dtype != "int64" or not split.plain:
        return None
    # 1. Is it faster than a gather? Two all-reduces (of the loss and of the weights), of a value for each row or of one.
    kinds = _axis_kinds(split, starts[1])
    each = split.rows if reduction == 0 else 4
    if 2 * added_up(each, split.size) >= split.gathering(0):
        return None
    # 2. The loss of each worker's own labels, as a sum.
    chain, (skipped, mark) = Chain(known), _marked(ignored)
    rows = _axes(kinds, rows=Shard(0))
    own = _own(chain, 1, split, rows, skipped, mark)
    args = (*template.args[:3], SUM if reduction == MEAN else reduction, mark)
    local = OpSchema(
        Template(template.op, args, template.kwargs, (template.ins[0], own.spec, *template.ins[2:]), 0, template.outs, ())
    )
    wants = (_axes(kinds, rows=Shard(0), classes=Shard(dim)), rows, *[_axes(kinds, classes=Shard(0))] * (known.tensors - 2))
    # 3. Layouts of its results, and the total weight; a mean divides by that.
    terms = _axes(kinds, rows=P, classes=P)
    each_row = reduction == 0 and bool(template.ins[1].shape)
    loss = _axes(kinds, rows=Shard(0), classes=P) if each_row else terms
    given = (0, own.name, *range(2, known.tensors))
    counted = reduction == MEAN and known.tensors == 2  # from the labels, which all workers have: no communication
    made = ("total" if reduction == MEAN else -1, "own weight" if counted else -2)
    weight = _axes(kinds) if each_row else terms  # 0 for each row where rows are kept; a single row has its own
    chain.parts.append(ChainOp((local,), given, made, wants, (loss, weight)))
    if counted:
        number = _counted(chain, rows, _axes(kinds, rows=P), ignored)
        chain.parts[-1] = chain.parts[-1]._replace(outs=(-2,))
        assert number.spec == template.outs[1].spec
    if reduction == MEAN:
        chain.parts.append(ChainOp((quotient(known),), ("total", -2), (-1,)))
    return chain.parts


def _counted(chain: Chain, where: Placements, makes: Placements, ignored: int) -> ChainValue:
    """Number of labels that are not ignored."""
    labels, weight = chain.operand(1), chain.known.template.outs[1].spec
    assert weight is not None
    flags = chain.placed("ne.Scalar", labels, ignored, out=_like(labels.spec, "bool"), where=where)
    dtype = Const("dtype", weight.dtype)
    return chain.placed("sum.dim_IntList", flags, [], False, out=weight, where=where, makes=makes, pointwise=False, dtype=dtype)


def nll_loss_backward(known: OpSchema, starts: Starts, mesh: Mesh) -> list[ChainOp] | None:
    """Operands: grad, rows, labels, weight or none, total weight. No communication."""
    template = known.template
    # The gradient of a row is nonzero at its label alone, so each worker has all that its own classes need.
    dim = min(len(template.ins[1].shape), 2) - 1
    split = Split(template.ins[1], dim, starts[1], mesh)
    if template.ins[2].dtype != "int64" or not split.plain:
        return None
    kinds = _axis_kinds(split, starts[2])
    chain, (skipped, mark) = Chain(known), _marked(known.arg(5))
    rows = _axes(kinds, rows=Shard(0))
    own = _own(chain, 2, split, rows, skipped, mark)
    rows_and_classes = _axes(kinds, rows=Shard(0), classes=Shard(dim))
    grad = rows if template.ins[0].shape else _axes(kinds)
    wants = (grad, rows_and_classes, rows, *[_axes(kinds, classes=Shard(0))] * (known.tensors - 4), _axes(kinds))

    def gradient(scores: ChainValue, labels: ChainValue, out: Spec, name: int | str, result: Placements) -> ChainOp:
        ins = (template.ins[0], scores.spec, labels.spec, *template.ins[3:])
        local = OpSchema(
            Template(
                template.op, (*template.args[:5], mark, *template.args[6:]), template.kwargs, ins, 0, (Out("new", out),), ()
            )
        )
        names = (0, scores.name, labels.name, *range(3, known.tensors))
        return ChainOp((local,), names, (name,), (wants[0], result, *wants[2:]), (result,))

    out = template.outs[0].spec
    assert out is not None
    if known.tensors == 4:  # no class weights: the sum of a gradient's row is the gradient of a row with one class
        labels, one = chain.operand(2), _reduced(out, [dim], out.dtype)
        zeros = chain.placed("mul.Scalar", labels, 0, out=own.spec, where=rows)
        skip = chain.placed("eq.Scalar", labels, known.arg(5), out=_like(own.spec, "bool"), where=rows)
        first = chain.placed("masked_fill.Scalar", zeros, skip, mark, out=own.spec, where=rows)
        dtype = Const("dtype", out.dtype)
        flat = chain.placed("_to_copy.default", labels, out=_like(own.spec, out.dtype), where=rows, dtype=dtype)
        scores = chain.placed("_unsafe_view.default", flat, list(one.shape), out=one, where=rows)
        chain.parts.append(gradient(scores, first, one, SUMS, rows))
    chain.parts.append(gradient(ChainValue(1, template.ins[1]), own, out, -1, rows_and_classes))
    return chain.parts


# ---- look-ups


def embedding(known: OpSchema, starts: Starts, mesh: Mesh) -> list[ChainOp] | None:
    """Rows of a table that is split by rows: each worker's own, and zeros for rows of other workers. The result is partial."""
    table = known.template.ins[0]
    split = Split(table, 0, starts[0], mesh)
    out = known.template.outs[0].spec
    assert out is not None
    where = _spread(split, starts[1])
    here = out.nbytes / prod(size for size, p in zip(mesh.sizes, where, strict=True) if isinstance(p, Shard))
    if not split.plain or added_up(here, split.size) + 3 * here / BYTES >= split.gathering(0):
        return None
    # Each worker looks up its own rows: row 0 stands in for those of others, and is replaced by zeros then. The sum over the
    # workers is the result, since one of them has each row.
    chain = Chain(known)
    own = _own(chain, 1, split, where, None, NO_LABEL)
    tall = (*own.spec.shape, 1)
    away = chain.placed("eq.Scalar", own, NO_LABEL, out=_like(own.spec, "bool"), where=where)
    safe = chain.placed("masked_fill.Scalar", own, away, 0, out=own.spec, where=where)
    away = chain.placed("_unsafe_view.default", away, list(tall), out=contiguous(tall, "bool"), where=where)
    t, by_rows = known.template, tuple(Shard(0) if n in split.axes else R for n in range(len(mesh.axes)))
    local = OpSchema(Template(t.op, t.args, t.kwargs, (table, safe.spec), 0, t.outs))
    chain.parts.append(ChainOp((local,), (0, safe.name), ("rows",), (by_rows, where), (where,)))
    terms = tuple(P if n in split.axes else p for n, p in enumerate(where))
    return chain.end(chain.placed("masked_fill.Scalar", ChainValue("rows", out), away, 0.0, out=out, where=where, makes=terms))


def embedding_backward(known: OpSchema, starts: Starts, mesh: Mesh, table: Placements) -> list[ChainOp] | None:
    """Gradient of a table with placements `table`: each worker computes its own rows. No communication."""
    template, padding = known.template, known.arg(3)
    made = template.outs[0].spec
    assert made is not None
    split = Split(made, 0, table, mesh)
    if not split.plain or known.arg(4):
        return None
    where = _spread(split, starts[1])
    chain = Chain(known)
    # The op has a label of its own to leave out, the padding row. Here that label is -1, which stands for rows of others too.
    own = _own(chain, 1, split, where, padding if padding >= 0 else None, -1)
    local = OpSchema(
        Template(template.op, (*template.args[:3], -1, False), template.kwargs, (template.ins[0], own.spec), 0, template.outs)
    )
    result = tuple(Shard(0) if n in split.axes else P if isinstance(p, Shard) else R for n, p in enumerate(where))
    chain.parts.append(ChainOp((local,), (0, own.name), (-1,), (where, where), (result,)))
    return chain.parts


def _spread(split: Split, index: Sequence[Place]) -> Placements:
    """Placements of the indices: replicated on axes that split the table, unchanged splits on the others."""
    kept = (p if isinstance(p, Shard) and p.parts == 1 and n not in split.axes else R for n, p in enumerate(index))
    return tuple(kept)


LOWERINGS: dict[str, Callable[[OpSchema, Starts, Mesh], list[ChainOp] | None]] = {
    **dict.fromkeys(("_softmax", "_log_softmax"), softmax),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), softmax_backward),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), nll_loss),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), nll_loss_backward),
    **dict.fromkeys(("amax", "amin"), extreme),
    "logsumexp": logsumexp,
    "embedding": embedding,
}
