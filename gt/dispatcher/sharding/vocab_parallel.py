"""Softmax, losses and look-ups over a dim that is split, such as a vocabulary: made of ops that are done on pieces.

Each worker deals with the classes (a table's rows) that are its own. What passes between workers are maxima and sums of rows,
added up where the next op reads them. Whether that or gathering takes longer is asked of the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from gt.dispatcher.sharding.base import OF_PIECES, Place, settled
from gt.dispatcher.sharding.chain import Chain, ChainOp, ChainValue, Placements, retyped
from gt.dispatcher.sharding.cost import BYTES, added_up, gathered
from gt.dispatcher.sharding.localize import dense
from gt.dispatcher.sharding.lower import MEAN, SUM, quotient
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.ir.layout import Layout, Mesh, P, R, Shard, boxes, local_shape
from gt.ir.spec import Spec, contiguous
from gt.ir.template import Const, Out, Template

HALF = ("float16", "bfloat16")
NOBODY = -(1 << 31) + 2  # stands for a label that is another worker's
FAR = (1 << 31) - 1  # beyond every label
SUMS = "sums of rows"  # of a gradient, which a chain makes besides: the softmax behind need not add it up
Starts = Sequence[Sequence[Place]]


class Split:
    """An operand that may be split along `dim`: over which axes of the mesh, and what passing it on costs."""

    def __init__(self, spec: Spec, dim: int, start: Sequence[Place], mesh: Mesh) -> None:
        self.spec, self.dim, self.mesh = spec, dim, mesh
        self.layout = Layout(mesh, tuple(map(settled, start)))  # terms are added up first: nothing here is linear
        self.axes = [n for n, p in enumerate(start) if isinstance(p, Shard) and p.dim == dim]
        self.size = prod(mesh.sizes[n] for n in self.axes)
        others = prod(size for n, size in enumerate(mesh.sizes) if n not in self.axes and isinstance(start[n], Shard))
        self.nbytes = spec.nbytes / others  # of the whole dim, on one worker
        self.rows = 4 * self.nbytes / spec.itemsize / max(spec.shape[dim], 1)

    @property
    def plain(self) -> bool:
        """Whether every worker has one run of the dim, and none has nothing."""
        if not self.axes or any(isinstance(p, Shard) and p.parts > 1 for p in self.layout.placements):
            return False
        return all(local_shape(self.layout, self.spec.shape, rank)[self.dim] for rank in range(len(self.mesh.workers)))

    def spans(self) -> list[tuple[int, int]]:
        """[start, stop) of the dim on each worker."""
        return [boxes(self.layout, self.spec.shape, rank)[0][self.dim] for rank in range(len(self.mesh.workers))]

    def gathering(self, passes: float) -> float:
        """Seconds to bring it together and read or write it so often."""
        return gathered(self.nbytes, self.size) + passes * self.nbytes / BYTES

    def staying(self, sums: int, passes: float) -> float:
        """Seconds to pass so many sums of rows between the workers, and read or write a part so often (in compiled code)."""
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
    """Of rows: the maximum, and the sum of exp(x - maximum). finite: with 0 for a maximum that is not, as logsumexp wants it.

    Each worker's own maximum and sum come first, so x is read in one go and never kept wider than it is: [rows, workers]
    then, of which each has its own.
    """
    spec, where = split.spec, split.layout.placements
    rows = _reduced(spec, dims, wide)
    sizes = [split.size if d == split.dim else n for d, n in enumerate(rows.shape)]
    each, full = contiguous(tuple(sizes), wide), _like(spec, wide)
    x = chain.operand(0)
    own = chain.lying("amax.default", x, dims, True, out=retyped(each, spec.dtype), where=where, pointwise=False)
    own = chain.cast(own, wide)
    level = _no_end(chain, own)
    less = chain.lying("sub.Tensor", x, level, out=full, where=where)  # one operand is wide: so it is done
    powers = chain.lying("exp.default", less, out=full, where=where)
    part = chain.lying("sum.dim_IntList", powers, dims, True, out=each, where=where, pointwise=False)
    most = chain.op("amax.default", own, [split.dim], True, out=rows, known_as=OF_PIECES["amax"])
    if finite:
        most = _no_end(chain, most)
    scale = chain.op("exp.default", chain.op("sub.Tensor", own, most, out=each), out=each)
    part = chain.op("mul.Tensor", part, scale, out=each)
    return most, chain.op("sum.dim_IntList", part, [split.dim], True, out=rows, pointwise=False)


def _no_end(chain: Chain, value: ChainValue) -> ChainValue:
    """With 0 for what is infinite."""
    size = chain.op("abs.default", value, out=value.spec)
    endless = chain.op("eq.Scalar", size, float("inf"), out=retyped(value.spec, "bool"))
    return chain.op("masked_fill.Scalar", value, endless, 0, out=value.spec)


def softmax(known: OpSchema, starts: Starts, mesh: Mesh) -> list[ChainOp] | None:
    """exp(x - max) / sum, or x - max - log(sum): two of [rows] are added up."""
    spec = known.template.ins[0]
    dims = [known.arg(1) % len(spec.shape)] if spec.shape else []
    split = Split(spec, dims[0], starts[0], mesh) if dims else None
    if split is None or not split.plain or split.staying(2, 3) >= split.gathering(2):
        return None
    chain, wide = Chain(known), _wide(spec)
    full, rows = _like(spec, wide), _reduced(spec, dims, wide)
    most, total = _powers(chain, split, dims, wide, finite=False)
    logs = known.name == "_log_softmax"
    total = chain.op("log.default" if logs else "reciprocal.default", total, out=rows)  # first: it waits for the others
    less = chain.op("sub.Tensor", chain.operand(0), most, out=full)
    if logs:
        return chain.end(chain.op("sub.Tensor", less, total, out=full))
    return chain.end(chain.op("mul.Tensor", chain.op("exp.default", less, out=full), total, out=full))


def softmax_backward(known: OpSchema, starts: Starts, mesh: Mesh) -> list[ChainOp] | None:
    """Operands: gradient, result. grad - exp(result) * sum(grad); of softmax g - result * sum(g), g being grad * result.

    With a third start, of log_softmax: where the sums of the gradient's rows lie, which are known.
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
    chain, wide = Chain(known), _wide(*ins)
    full, rows = _like(ins[1], wide), _reduced(ins[1], dims, wide)
    grad, made = chain.operand(0), chain.operand(1, wide)
    if known.name == "_softmax_backward_data":
        grad = chain.op("mul.Tensor", grad, made, out=full)
    else:
        made = chain.op("exp.default", made, out=full)
    if len(starts) > 2:
        total = chain.cast(ChainValue(2, retyped(rows, ins[0].dtype)), wide)
    else:
        total = chain.op("sum.dim_IntList", grad, dims, True, out=rows, pointwise=False, dtype=Const("dtype", wide))
    return chain.end(chain.op("addcmul.default", grad, made, total, out=full, value=-1))


def logsumexp(known: OpSchema, starts: Starts, mesh: Mesh) -> list[ChainOp] | None:
    """max + log(sum(exp(x - max))), an infinite maximum taken as 0 as torch does."""
    spec, keep = known.template.ins[0], bool(known.named(2, "keepdim", False))
    given = known.named(1, "dim")
    dims = sorted({d % len(spec.shape) for d in ([given] if isinstance(given, int) else given)}) if spec.shape else []
    found = [s for s in (Split(spec, d, starts[0], mesh) for d in dims) if s.axes]
    if len(found) != 1 or "float" not in spec.dtype or not found[0].plain or found[0].staying(2, 2) >= found[0].gathering(1):
        return None
    chain, wide = Chain(known), _wide(spec)
    rows, result = _reduced(spec, dims, wide), _reduced(spec, dims, wide, keep)
    most, total = _powers(chain, found[0], dims, wide, finite=True)
    value = chain.op("add.Tensor", chain.op("log.default", total, out=rows), most, out=rows)
    if not keep:
        value = chain.op("amax.default", value, dims, False, out=result, pointwise=False)
    return chain.end(value)


def extreme(known: OpSchema, starts: Starts, mesh: Mesh) -> list[ChainOp] | None:
    """amax, amin of pieces that need not be equally long: each is known to have something."""
    spec, dims = known.template.ins[0], known.named(1, "dim")
    if not spec.shape or isinstance(dims, int):
        return None
    found = [Split(spec, d, starts[0], mesh) for d in {d % len(spec.shape) for d in dims or range(len(spec.shape))}]
    found = [s for s in found if s.axes]
    if not all(s.plain for s in found) or all(spec.shape[s.dim] % s.size == 0 for s in found):
        return None
    t = known.template
    same = OpSchema(Template(t.op, t.args, t.kwargs, t.ins, t.values, t.outs, t.writes))
    same.name = OF_PIECES[known.name]
    return [ChainOp((same,), (0,), (-1,))]


# ---- labels


def _own(chain: Chain, labels: int, split: Split, where: Placements, skipped: int | None, mark: int) -> ChainValue:
    """Labels as each worker counts them, from its first on; `mark` for another's, and for the label that is `skipped`.

    What is nobody's label stays so on the first worker or the last, and fails there as it does on one worker.
    """
    value = chain.operand(labels)
    spec, flags = _like(value.spec, value.spec.dtype), _like(value.spec, "bool")
    if skipped is not None:
        skip = chain.lying("eq.Scalar", value, skipped, out=flags, where=where)
        value = chain.lying("masked_fill.Scalar", value, skip, mark, out=spec, where=where)
    last, spans = split.spec.shape[split.dim], split.spans()
    starts = [(value, start if start else -FAR) for start, _ in spans]
    stops = [(value, stop if stop < last else FAR) for _, stop in spans]
    below = chain.each("lt.Scalar", starts, flags, where, where)
    above = chain.each("ge.Scalar", stops, flags, where, where)
    moved = chain.each("sub.Scalar", [(value, start) for start, _ in spans], spec, where, where)
    other = chain.lying("bitwise_or.Tensor", below, above, out=flags, where=where)
    return chain.lying("masked_fill.Scalar", moved, other, mark, out=spec, where=where)


def _marked(ignored: int) -> tuple[int | None, int]:
    """(label to be replaced first, what stands for it): a label that is ignored and none of the classes stands for itself."""
    return (None, ignored) if -FAR < ignored < 0 else (ignored, NOBODY)


def _laid(split: Split, labels: Sequence[Place]) -> list[str]:
    """What each axis of the mesh splits: classes, rows or nothing."""
    rows = len(split.spec.shape) > 1
    found = []
    for axis, (mine, others) in enumerate(zip(split.layout.placements, labels, strict=True)):
        row = rows and Shard(0) in (mine, others)
        found.append("classes" if axis in split.axes else "rows" if row else "")
    return found


def _as(laid: Sequence[str], **meant: Any) -> Placements:
    return tuple(meant.get(kind, R) for kind in laid)


def nll_loss(known: OpSchema, starts: Starts, mesh: Mesh) -> list[ChainOp] | None:
    """Each worker's own labels, the others' ignored: loss and weight are of terms. A mean is a sum over the weight of all."""
    t, (ignored, reduction) = known.template, (known.arg(4), known.arg(3))
    dim = min(len(t.ins[0].shape), 2) - 1
    split = Split(t.ins[0], dim, starts[0], mesh)
    if t.ins[1].dtype != "int64" or not split.plain:
        return None
    laid = _laid(split, starts[1])
    each = split.rows if reduction == 0 else 4
    if 2 * added_up(each, split.size) >= split.gathering(0):
        return None
    chain, (skipped, mark) = Chain(known), _marked(ignored)
    rows = _as(laid, rows=Shard(0))
    own = _own(chain, 1, split, rows, skipped, mark)
    args = (*t.args[:3], SUM if reduction == MEAN else reduction, mark)
    local = OpSchema(Template(t.op, args, t.kwargs, (t.ins[0], own.spec, *t.ins[2:]), 0, t.outs, ()))
    wants = (_as(laid, rows=Shard(0), classes=Shard(dim)), rows, *[_as(laid, classes=Shard(0))] * (known.tensors - 2))
    terms = _as(laid, rows=P, classes=P)
    each_row = reduction == 0 and bool(t.ins[1].shape)
    loss = _as(laid, rows=Shard(0), classes=P) if each_row else terms
    given = (0, own.name, *range(2, known.tensors))
    counted = reduction == MEAN and known.tensors == 2  # of labels, which all have: nothing passes between the workers
    made = ("total" if reduction == MEAN else -1, "own weight" if counted else -2)
    weight = _as(laid) if each_row else terms  # 0 where rows are kept; one row alone has its own
    chain.parts.append(ChainOp((local,), given, made, wants, (loss, weight)))
    if counted:
        number = _counted(chain, rows, _as(laid, rows=P), ignored)
        chain.parts[-1] = chain.parts[-1]._replace(outs=(-2,))
        assert number.spec == t.outs[1].spec
    if reduction == MEAN:
        chain.parts.append(ChainOp((quotient(known),), ("total", -2), (-1,)))
    return chain.parts


def _counted(chain: Chain, where: Placements, makes: Placements, ignored: int) -> ChainValue:
    """How many labels are not ignored."""
    labels, weight = chain.operand(1), chain.known.template.outs[1].spec
    assert weight is not None
    flags = chain.lying("ne.Scalar", labels, ignored, out=_like(labels.spec, "bool"), where=where)
    dtype = Const("dtype", weight.dtype)
    return chain.each("sum.dim_IntList", [(flags, [], False)], weight, where, makes, pointwise=False, dtype=dtype)


def nll_loss_backward(known: OpSchema, starts: Starts, mesh: Mesh) -> list[ChainOp] | None:
    """Operands: grad, rows, labels, weight or none, total weight. Nothing passes between the workers."""
    t = known.template
    dim = min(len(t.ins[1].shape), 2) - 1
    split = Split(t.ins[1], dim, starts[1], mesh)
    if t.ins[2].dtype != "int64" or not split.plain:
        return None
    laid = _laid(split, starts[2])
    chain, (skipped, mark) = Chain(known), _marked(known.arg(5))
    rows = _as(laid, rows=Shard(0))
    own = _own(chain, 2, split, rows, skipped, mark)
    made = _as(laid, rows=Shard(0), classes=Shard(dim))
    grad = rows if t.ins[0].shape else _as(laid)
    wants = (grad, made, rows, *[_as(laid, classes=Shard(0))] * (known.tensors - 4), _as(laid))

    def gradient(scores: ChainValue, labels: ChainValue, out: Spec, name: int | str, lies: Placements) -> ChainOp:
        ins = (t.ins[0], scores.spec, labels.spec, *t.ins[3:])
        local = OpSchema(Template(t.op, (*t.args[:5], mark, *t.args[6:]), t.kwargs, ins, 0, (Out("new", out),), ()))
        names = (0, scores.name, labels.name, *range(3, known.tensors))
        return ChainOp((local,), names, (name,), (wants[0], lies, *wants[2:]), (lies,))

    out = t.outs[0].spec
    assert out is not None
    if known.tensors == 4:  # all classes have one weight: a row's sum is the gradient of a row that has one class
        labels, one = chain.operand(2), _reduced(out, [dim], out.dtype)
        zeros = chain.lying("mul.Scalar", labels, 0, out=own.spec, where=rows)
        skip = chain.lying("eq.Scalar", labels, known.arg(5), out=_like(own.spec, "bool"), where=rows)
        first = chain.lying("masked_fill.Scalar", zeros, skip, mark, out=own.spec, where=rows)
        flat = chain.each(
            "_to_copy.default", [(labels,)], _like(own.spec, out.dtype), rows, rows, dtype=Const("dtype", out.dtype)
        )
        scores = chain.lying("_unsafe_view.default", flat, list(one.shape), out=one, where=rows)
        chain.parts.append(gradient(scores, first, one, SUMS, rows))
    chain.parts.append(gradient(ChainValue(1, t.ins[1]), own, out, -1, made))
    return chain.parts


# ---- look-ups


def embedding(known: OpSchema, starts: Starts, mesh: Mesh) -> list[ChainOp] | None:
    """Rows of a table whose rows are split: each worker's own, zeros for the others', to be added up."""
    table = known.template.ins[0]
    split = Split(table, 0, starts[0], mesh)
    out = known.template.outs[0].spec
    assert out is not None
    where = _spread(split, starts[1])
    here = out.nbytes / prod(size for size, p in zip(mesh.sizes, where, strict=True) if isinstance(p, Shard))
    if not split.plain or added_up(here, split.size) + 3 * here / BYTES >= split.gathering(0):
        return None
    chain = Chain(known)
    own = _own(chain, 1, split, where, None, NOBODY)
    tall = (*own.spec.shape, 1)
    away = chain.lying("eq.Scalar", own, NOBODY, out=_like(own.spec, "bool"), where=where)
    safe = chain.lying("masked_fill.Scalar", own, away, 0, out=own.spec, where=where)
    away = chain.lying("_unsafe_view.default", away, list(tall), out=contiguous(tall, "bool"), where=where)
    t, lies = known.template, tuple(Shard(0) if n in split.axes else R for n in range(len(mesh.axes)))
    local = OpSchema(Template(t.op, t.args, t.kwargs, (table, safe.spec), 0, t.outs))
    chain.parts.append(ChainOp((local,), (0, safe.name), ("rows",), (lies, where), (where,)))
    terms = tuple(P if n in split.axes else p for n, p in enumerate(where))
    return chain.end(chain.lying("masked_fill.Scalar", ChainValue("rows", out), away, 0.0, out=out, where=where, makes=terms))


def embedding_backward(known: OpSchema, starts: Starts, mesh: Mesh, table: Placements) -> list[ChainOp] | None:
    """The gradient of a table that lies so: of each worker's own rows. Nothing passes between the workers."""
    t, padding = known.template, known.arg(3)
    made = t.outs[0].spec
    assert made is not None
    split = Split(made, 0, table, mesh)
    if not split.plain or known.arg(4):
        return None
    where = _spread(split, starts[1])
    chain = Chain(known)
    own = _own(chain, 1, split, where, padding if padding >= 0 else None, -1)
    local = OpSchema(Template(t.op, (*t.args[:3], -1, False), t.kwargs, (t.ins[0], own.spec), 0, t.outs))
    lies = tuple(Shard(0) if n in split.axes else P if isinstance(p, Shard) else R for n, p in enumerate(where))
    chain.parts.append(ChainOp((local,), (0, own.name), (-1,), (where, where), (lies,)))
    return chain.parts


def _spread(split: Split, index: Sequence[Place]) -> Placements:
    """How indices lie that are whole where the table is split, and split elsewhere as they were."""
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
