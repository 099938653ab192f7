"""Shape checks before sharding rules: shapes of operands, sizes and results have to agree as in torch.

A client's template may claim any shapes. If they do not agree, the op is planned under a name that has no rule. Its inputs are
then gathered, and it fails on its worker with torch's error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from gt.dispatcher.sharding import list_rules
from gt.dispatcher.sharding.losses import LOSSES
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.sharding.rules import DIMWISE, ELEMENTWISE, NORMS, REDUCTIONS
from gt.dispatcher.sharding.views import OTHER_VIEW, VIEWS
from gt.ir.schema import OWN, TABLE
from gt.ir.template import Template, V

OTHER = "an op of another form"
Shape = tuple[int, ...]
Form = Callable[["Shapes"], bool]


class Shapes:
    """Shapes of an op's operands and results. A result of kind `same` has its operand's shape, one of kind `none` has None."""

    def __init__(self, known: OpSchema) -> None:
        template = known.template
        self.known, self.name, self.arg, self.named = known, known.name, known.arg, known.named
        self.ins = [spec.shape for spec in template.ins]
        looks = [out.spec or (template.ins[out.of] if out.kind == "same" else None) for out in template.outs]
        self.outs = [look.shape if look is not None else None for look in looks]

    def makes(self, *shapes: Shape) -> bool:
        return self.outs == [*shapes]


def known(template: Template) -> OpSchema:
    """The OpSchema of a client's template, with a rule only if the template has the shapes that the rule expects."""
    if template.op.split(".")[0] not in OWN:  # of another library: whether it works on each element is the client's word
        return OpSchema(replace(template, pointwise=False))
    # Irregular: the op is renamed, and every table of rules is by name. A view still is one: its results share memory.
    met = OpSchema(template)
    if regular(met):
        return met
    views = met.name in VIEWS and all(out.kind == "view" for out in template.outs) and bool(template.ins)
    other = OpSchema(replace(template, pointwise=False))
    other.name, other.columns, other.overwrites = OTHER_VIEW if views else OTHER, (), False
    return other


def regular(known: OpSchema) -> bool:
    """True if the shapes are those that the op's rule expects."""
    template = known.template
    if known.name == "gt.upload":
        return True
    if known.columns:
        return _lists(known)
    # Rules read arguments by position. A client that gives one of these by name would have the rule read another.
    form = FORMS.get(known.name) or (pointwise if template.pointwise else None)
    if form is None:
        return True
    by_position = {argument.name for schema in TABLE.find(template.op) for argument in schema.positional}
    if template.dynamic or not by_position.isdisjoint(name for name, _ in template.kwargs):
        return False
    try:
        return form(Shapes(known))
    except (IndexError, TypeError, ValueError):  # fewer operands or dims than the check reads
        return False


def _lists(known: OpSchema) -> bool:
    """True if all lists are as long as the first, and an op that is divided gives a result for each tensor, or none."""
    lengths = {len(column.items) for column in known.columns}
    if len(lengths) != 1 or any(isinstance(item, V) for item in known.columns[0].items):
        return False
    return not list_rules.runs_in_parts(known) or len(known.template.outs) in (0, *lengths)


# ---- dims


def _dims(given: Any, rank: int) -> list[int]:
    """Dims from 0 up; IndexError for one out of range or given twice."""
    dims = [given] if isinstance(given, int) else list(given)
    least, most = -max(rank, 1), max(rank, 1)
    normalized = [d % rank for d in dims if rank]
    if any(not least <= d < most for d in dims) or len(set(normalized)) != len(normalized):
        raise IndexError(f"dims {given} of {rank}")
    return normalized


def _without(shape: Shape, dims: Iterable[int]) -> Shape:
    return tuple(n for d, n in enumerate(shape) if d not in dims)


def _same_but(a: Shape, b: Shape | None, dims: Iterable[int]) -> bool:
    """True if two shapes are equal outside of these dims."""
    return b is not None and len(a) == len(b) and all(x == y or d in dims for d, (x, y) in enumerate(zip(a, b, strict=True)))


def _broadcasts(shape: Shape, to: Shape) -> bool:
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(to)))


# ---- rules


def pointwise(op: Shapes) -> bool:
    """Operands are broadcast to the result. An in-place result is the written operand."""
    writes = op.known.template.writes
    result = op.ins[writes[0]] if writes else op.outs[0]
    return result is not None and set(op.outs) == {result} and all(_broadcasts(shape, result) for shape in op.ins)


def dimwise(op: Shapes) -> bool:
    dims = _dims(op.named(DIMWISE[op.name], "dim", -1), len(op.ins[0]))
    change = dims if op.name == "topk" else ()
    return bool(op.outs) and len(set(op.ins)) == 1 and all(_same_but(op.ins[0], out, change) for out in op.outs)


def reduction(op: Shapes) -> bool:
    if len(op.ins) != 1:
        return bool(op.ins)  # the maximum of two tensors: the rule has no answer for it
    # The result has either form, with the reduced dims or without: the rule finds out by its rank.
    (x,) = op.ins
    given = op.named(2 if op.name == "linalg_vector_norm" else 1, "dim")
    gone = (_dims(given, len(x)) if isinstance(given, (int, list)) else []) or range(len(x))
    kept = tuple(1 if d in gone else n for d, n in enumerate(x))
    return set(op.outs) in ({kept}, {_without(x, gone)})


def matmul(op: Shapes) -> bool:
    first, batched, vector = int(op.name.startswith(("add", "badd"))), "bmm" in op.name, op.name.endswith("mv")
    left, right = op.ins[first:]
    result = left[:-1] if vector else (*left[:-1], right[-1])
    fits = right == left[-1:] if vector else len(right) == len(left) and right[:-1] == (*left[:-2], left[-1])
    return (
        fits and len(left) == 2 + batched and op.makes(result) and all(_broadcasts(added, result) for added in op.ins[:first])
    )


def layer_norm(op: Shapes) -> bool:
    """A layer or RMS norm. Operands: input and weights, or gradient, input, statistics and weights."""
    backward = op.name.endswith("_backward")
    x, normalized = op.ins[int(backward)], tuple(op.arg(1 + backward))
    lead = len(x) - len(normalized)
    rows = x[:lead] + (1,) * len(normalized)
    statistics = [rows] * (1 if "rms" in op.name else 2)
    if not normalized or lead < 0 or x[lead:] != normalized:
        return False

    # Forward makes the result and the statistics of each row. Backward reads these, and makes the gradients that are wanted.
    if not backward:
        return set(op.ins[1:]) <= {normalized} and op.makes(x, *statistics)
    behind = 2 + len(statistics)
    weights = [normalized] * len(statistics)  # a layer norm has a bias, too
    grads = all(made in (None, shape) for made, shape in zip(op.outs, (x, *weights), strict=True))
    return op.ins[0] == x and op.ins[2:behind] == statistics and set(op.ins[behind:]) <= {normalized} and grads


def attention(op: Shapes) -> bool:
    """Operands: query, key, value, and a mask or none. Backward has the gradient before them, result and logsumexp behind."""
    # The rule reads dims of all operands by those of the query. So no operand may have more dims than it.
    backward = op.name.endswith("_backward")
    q, k, v = op.ins[int(backward) : 3 + backward]
    rank = len(q)
    ranks = [len(shape) for shape in op.ins if len(shape) > rank] or [rank]
    if ranks != [rank] or (backward and (len(op.ins[-1]) != rank - 1 or op.ins[0] != op.ins[-2])):
        return False
    if not backward:
        return [len(shape or ()) for shape in op.outs] == [rank, rank - 1]
    return op.makes(q, k, v, op.ins[4]) if "biased" in op.name else op.makes(q, k, v)


def recurrent(op: Shapes) -> bool:
    """Layers of a recurrent network, whose operands the table's shape rule has checked."""
    backward = op.name == "gt.rnn_backward"
    count, states = len(op.arg(5 if backward else 2)), op.arg(4 if backward else 1)
    if backward:
        operands = op.ins[-2 - count - len(states) : -1]
        return op.makes(*(shape for shape, needed in zip(operands, op.arg(13), strict=True) if needed))
    x, *ends = op.ins[: 1 + len(states)]
    return op.outs[0] is not None and op.outs[0][:-1] == x[:-1] and op.outs[1:] == [*ends, (0,)][:2]


def embedding(op: Shapes) -> bool:
    table, index = op.ins
    return len(table) == 2 and op.makes((*index, table[1]))


def embedding_backward(op: Shapes) -> bool:
    grad, index = op.ins
    return grad[:-1] == index and op.makes((op.arg(2), grad[-1]))


def nll_loss(op: Shapes) -> bool:
    scores, labels, *weight = op.ins
    return _labelled(op, scores, labels, weight) and op.makes(() if op.arg(3) else labels, ())


def nll_loss_backward(op: Shapes) -> bool:
    grad, scores, labels, *weight, total = op.ins
    good = _labelled(op, scores, labels, weight) and op.arg(4) in (0, 1, 2)
    return good and total == () and grad == (() if op.arg(4) else labels) and op.makes(scores)


def _labelled(op: Shapes, scores: Shape, labels: Shape, weight: Sequence[Shape]) -> bool:
    """Scores [N, C] or [C], or [N, C, H, W] of pixels, and a label for each row or pixel."""
    dim = min(len(scores), 2) - 1
    ranks = (4,) if "2d" in op.name else (1, 2)
    return len(scores) in ranks and labels == _without(scores, (dim,)) and set(weight) <= {(scores[dim],)}


def loss(op: Shapes) -> bool:
    code = op.named(LOSSES[op.name], "reduction", 1)
    return len(op.ins) > 1 and code in (0, 1, 2) and op.makes(() if code else op.ins[0])


def loss_backward(op: Shapes) -> bool:
    code = op.named(LOSSES[op.name.removesuffix("_backward")] + 1, "reduction", 1)
    return len(op.ins) > 2 and code in (0, 1, 2) and op.makes(op.ins[1]) and _broadcasts(op.ins[0], op.ins[1])


def padded(op: Shapes) -> bool:
    """slice_backward, select_backward: a gradient, and the shape of the input."""
    (grad,), made = op.ins, tuple(op.arg(1))
    dims = _dims(op.arg(2, 0), len(made))
    fits = grad == _without(made, dims) if op.name == "select_backward" else _same_but(grad, made, dims)
    return len(dims) == 1 and fits and op.makes(made)


def constant_pad(op: Shapes) -> bool:
    (x,), pad = op.ins, op.arg(1)
    wide = list(x)
    for place in range(0, len(pad), 2):
        wide[-1 - place // 2] += pad[place] + pad[place + 1]
    return len(pad) <= 2 * len(x) and op.makes(tuple(wide))


def cat(op: Shapes) -> bool:
    (result,) = op.outs
    shapes = [shape for shape in op.ins if shape != (0,)] or op.ins
    (dim,) = _dims(op.arg(1, 0), len(result or ()))
    return bool(shapes) and all(_same_but(shape, result, (dim,)) for shape in shapes)


def stack(op: Shapes) -> bool:
    (shape,) = set(op.ins)
    (dim,) = _dims(op.arg(1, 0), len(shape) + 1)
    return op.makes((*shape[:dim], len(op.ins), *shape[dim:]))


# ---- views, of one operand


def reshape(op: Shapes) -> bool:
    (made,) = op.outs
    return made is not None and prod(made) == prod(op.ins[0])


def expand(op: Shapes) -> bool:
    (made,) = op.outs
    return made is not None and _broadcasts(op.ins[0], made)


def permute(op: Shapes) -> bool:
    (x,) = op.ins
    dims = _dims(op.arg(1), len(x))
    return len(dims) == len(x) and op.makes(tuple(x[d] for d in dims))


def transpose(op: Shapes) -> bool:
    (x,) = op.ins
    swapped = list(x)
    if op.name == "t":
        swapped.reverse()
    elif x:
        (a,), (b,) = _dims(op.arg(1), len(x)), _dims(op.arg(2), len(x))
        swapped[a], swapped[b] = x[b], x[a]
    return (op.name != "t" or len(x) < 3) and op.makes(tuple(swapped))


def unsqueeze(op: Shapes) -> bool:
    (x,) = op.ins
    (dim,) = _dims(op.arg(1), len(x) + 1)
    return op.makes((*x[:dim], 1, *x[dim:]))


def squeeze(op: Shapes) -> bool:
    (x,), given = op.ins, op.arg(1)
    dims = range(len(x)) if given is None else _dims(given, len(x))
    return op.makes(_without(x, [d for d in dims if x[d] == 1]))


def along(op: Shapes) -> bool:
    (x,), (made,) = op.ins, op.outs
    return _same_but(x, made, _dims(op.arg(1, 0), len(x)))


def select(op: Shapes) -> bool:
    """select, and unbind with one result for each index."""
    (x,) = op.ins
    (dim,) = _dims(op.arg(1, 0), len(x))
    return op.makes(*[_without(x, (dim,))] * (x[dim] if op.name == "unbind" else 1))


def split(op: Shapes) -> bool:
    (x,) = op.ins
    (dim,) = _dims(op.arg(2, 0), len(x))
    pieces = [made[dim] for made in op.outs if made is not None and _same_but(x, made, (dim,))]
    return 0 < len(pieces) == len(op.outs) and sum(pieces) == x[dim]


def same(op: Shapes) -> bool:
    (x,) = op.ins
    return op.makes(x)


def as_real(op: Shapes) -> bool:
    (x,) = op.ins
    return op.makes((*x, 2))


def as_complex(op: Shapes) -> bool:
    (x,) = op.ins
    return op.makes(x[:-1]) and x[-1:] == (2,)


def retyped(op: Shapes) -> bool:
    (x,), (made,) = op.ins, op.outs
    return _same_but(x, made, (len(x) - 1,))


def anything(op: Shapes) -> bool:
    return len(op.ins) == 1


FORMS: dict[str, Form] = {
    **dict.fromkeys(ELEMENTWISE, pointwise),
    **dict.fromkeys(DIMWISE, dimwise),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv"), matmul),
    **dict.fromkeys(NORMS, layer_norm),
    **dict.fromkeys(("gt.sdpa", "gt.sdpa_backward", "gt.sdpa_biased", "gt.sdpa_biased_backward"), attention),
    **dict.fromkeys(("gt.rnn", "gt.rnn_backward"), recurrent),
    "embedding": embedding,
    "embedding_dense_backward": embedding_backward,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), nll_loss),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), nll_loss_backward),
    **dict.fromkeys(LOSSES, loss),
    **dict.fromkeys((f"{name}_backward" for name in LOSSES), loss_backward),
    **dict.fromkeys(("slice_backward", "select_backward"), padded),
    "constant_pad_nd": constant_pad,
    "cat": cat,
    "stack": stack,
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), reshape),
    "expand": expand,
    "permute": permute,
    **dict.fromkeys(("t", "transpose"), transpose),
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    **dict.fromkeys(("slice", "narrow"), along),
    **dict.fromkeys(("select", "unbind"), select),
    **dict.fromkeys(("split", "split_with_sizes"), split),
    **dict.fromkeys(("alias", "detach", "_conj", "_neg_view"), same),
    **dict.fromkeys(("as_strided", "diagonal", "unfold"), anything),
    "view_as_real": as_real,
    "view_as_complex": as_complex,
    "view.dtype": retyped,
}
