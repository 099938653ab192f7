"""Sharding rules by class of op: from placements of an op's inputs on one mesh axis to the placements of a Decision.

A rule sees one axis at a time; on a mesh of two axes it is applied twice. An input placement of None is open: the rule may
choose it. A rule without an answer returns None: the inputs are gathered and the op runs on whole tensors, logged once.
"""

from __future__ import annotations

from collections.abc import Sequence

from gt.dispatcher.sharding.base import (
    OF_PIECES,
    Decision,
    Place,
    Rule,
    a_piece_is_empty,
    even,
    out_shape,
    settled,
    shape,
    whole,
)
from gt.dispatcher.sharding.losses import LOSSES, PART, loss, loss_backward, nll_loss, nll_loss_backward
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.sharding.partial import adds_replicated_scalar, linear, same_dtype_kind
from gt.dispatcher.sharding.views import RESHAPES, VIEWS, reshape_along, view
from gt.ir.layout import P, Partial, Placement, R, Replicate, Shard
from gt.ir.spec import Spec
from gt.ir.template import T

ELEMENTWISE = frozenset(
    {"copy_", "_to_copy", "clone", "fill_", "zero_", "where", "zeros_like", "ones_like", "empty_like", "full_like", "fill",
     "gelu_backward", "silu_backward", "threshold_backward", "sigmoid_backward", "tanh_backward", "leaky_relu_backward",
     "elu_backward", "hardtanh_backward", "softplus_backward", "native_dropout", "native_dropout_backward", "uniform_",
     "normal_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_", "rand_like", "randn_like",
     "lift_fresh", "_conj_physical", "detach", "alias", "masked_fill", "masked_fill_",
     "gt.move", "gt.lend"}
)  # fmt: skip

# Elementwise ops that read only the shape of an operand, which may stay partial
VALUELESS = frozenset({"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"})

# op -> index of its dim argument; the op is local where another dim is split
DIMWISE = {
    "_softmax": 1, "_log_softmax": 1, "cumsum": 1, "cumprod": 1, "logcumsumexp": 1, "_softmax_backward_data": 2,
    "_log_softmax_backward_data": 2, "flip": 1, "sort": 1, "topk": 2, "argsort": 1, "cummax": 1, "cummin": 1,
}  # fmt: skip

NORMS = ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward")

# op -> the Partial of its result over a split dim (None: no reduction combines the terms)
REDUCTIONS = {
    "sum": "sum", "mean": "avg", "amax": "max", "amin": "min", "max": "max", "min": "min", "prod": None, "any": None,
    "all": None, "logsumexp": None, "argmax": None, "argmin": None, "var": None, "std": None, "var_mean": None,
    "linalg_vector_norm": None, "norm": None, "count_nonzero": "sum", OF_PIECES["amax"]: "max", OF_PIECES["amin"]: "min",
}  # fmt: skip


def pointwise(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    """Elementwise with broadcasting: `_leader` decides the split, and dims are aligned from the right."""
    outs, ins = known.template.outs, known.template.ins
    if known.name in VALUELESS and isinstance(places[0], Partial):
        return Decision((places[0],), (R,) * len(outs))
    if adds_replicated_scalar(known, places):
        return Decision((P, P), (P,))
    if linear(known, places):
        return Decision(tuple(p if isinstance(p, Partial) else R for p in places), tuple(P for _ in outs))
    writes = known.template.writes
    result = shape(known, writes[0]) if writes else out_shape(known)
    leader = _leader(known, places, result, writes)
    if leader is None:
        return Decision((R,) * len(places), (R,) * len(outs))
    # Operands are split where the result is, but for those that are broadcast there. Example, [B, T, C] + [C], split by B: the
    # first is Shard(0), and the second, which has no such dim, is R.
    back = leader.dim - len(result)  # from the right
    wants: list[Placement] = []
    for spec in ins:
        dim = len(spec.shape) + back
        wants.append(Shard(dim, leader.parts) if dim >= 0 and spec.shape[dim] == result[leader.dim] else R)
    if writes and wants[writes[0]] != settled(places[writes[0]]):
        return None  # a written operand cannot be a copy in another layout
    outputs = tuple(Shard(len(out_shape(known, i)) + back, leader.parts) for i in range(len(outs)))
    return Decision(tuple(wants), outputs)


def _leader(known: OpSchema, places: list[Place], result: tuple[int, ...], writes: tuple[int, ...]) -> Shard | None:
    """The split of the result: the written operand's for an in-place op, else that of the largest split operand."""
    if writes:
        place = places[writes[0]]
        return place if isinstance(place, Shard) else None
    best, most = None, -1
    for spec, place in zip(known.template.ins, places, strict=True):
        if isinstance(place, Shard) and spec.numel > most:
            dim = place.dim + len(result) - len(spec.shape)
            if spec.shape[place.dim] == result[dim]:
                best, most = Shard(dim, place.parts), spec.numel
    return best


def reduction(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    """Reductions: over a split dim the result is partial; other dims stay split."""
    place, spec = places[0], known.template.ins[0]
    if known.tensors != 1:
        return None
    outs = len(known.template.outs)
    if isinstance(place, Partial):
        linear = place.op == "sum" and known.name in ("sum", "mean") and same_dtype_kind(known, places)
        return Decision((place,), (place,) * outs) if linear else None
    if not isinstance(place, Shard):
        return Decision((R,), (R,) * outs)
    dims, keep = _reduced(known)
    # Over the split dim workers have terms, if the reduction of terms is that of the whole. That holds for sums of pieces of
    # any length, and means of equal ones. An empty piece has no maximum, so maxima want equal pieces, or a name of OF_PIECES.
    if place.dim in dims:
        op = REDUCTIONS[known.name]
        any_length = op == "sum" or known.name in OF_PIECES.values()
        usable = outs == 1 and (any_length or even(spec.shape[place.dim], place, size))
        return Decision((place,), (Partial(op),)) if usable and op else None
    dim = place.dim if keep else place.dim - sum(d < place.dim for d in dims)
    return Decision((place,), (Shard(dim, place.parts),) * outs)


def _reduced(known: OpSchema) -> tuple[set[int], bool]:
    """The reduced dims, and True if they stay with size 1."""
    rank = len(shape(known, 0))
    # No dims, or none named, means all of them, as in torch.
    dims = known.named(2, "dim") if known.name == "linalg_vector_norm" else known.named(1, "dim")
    if isinstance(dims, int):
        dims = [dims]
    if dims is None or not isinstance(dims, (list, tuple)) or not dims:
        return set(range(rank)), len(out_shape(known)) == rank and rank > 0
    return {d % rank for d in dims}, len(out_shape(known)) == rank


def matmul(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    """mm, addmm, bmm, baddbmm, mv: rows, columns or the contracted dim may be split. The option that moves least bytes wins."""
    first = 1 if known.name in ("addmm", "baddbmm", "addmv", "addmm_", "baddbmm_") else 0
    # An option is (a, b, result) of the product a x b: split rows, columns or contracted dim, and terms of either factor, in
    # which the product is linear. The second is column parallel (Megatron-LM), the third row parallel.
    specs = known.template.ins
    a_rank, b_rank = len(specs[first].shape), len(specs[first + 1].shape)
    row, inner, b_inner = a_rank - 2, a_rank - 1, b_rank - 2 if b_rank > 1 else 0
    options = [
        (Shard(row), R, Shard(row)),
        (R, Shard(b_rank - 1), Shard(b_rank - 1)),
        (Shard(inner), Shard(b_inner), P),
        (P, R, P),
        (R, P, P),
    ]
    if b_rank == 1:  # mv: its only dim is contracted
        options = [o for o in options if o[1] != Shard(b_rank - 1) or o[2] is P]
    if a_rank == 3:  # bmm: the batch
        options.append((Shard(0), Shard(0), Shard(0)))
    options = _with_parts(options, places[first : first + 2])
    options.append((R, R, R))
    held = places[first : first + 2]
    if all(not isinstance(p, (Shard, Partial)) for p in held):
        return _mm_decision(known, first, options[-1])
    legal = [o for o in options if _fits(o, specs[first : first + 2], size)]
    if first and _odd_where_empty(known):
        legal = [o for o in legal if not isinstance(o[2], Partial) and not _leaves_one_empty(o[2], out_shape(known), size)]
    best = min(legal, key=lambda o: _moved(held, o, specs[first : first + 2]))
    return _mm_decision(known, first, best)


def _leaves_one_empty(place: object, made: tuple[int, ...], size: int) -> bool:
    return isinstance(place, Shard) and a_piece_is_empty(made[place.dim], size)


def _odd_where_empty(known: OpSchema) -> bool:
    """True if torch treats empty pieces differently: it scales integers by a fraction, or keeps a single element."""
    return "float" not in known.template.ins[0].dtype or (known.name == "addmv" and shape(known, 0) in ((), (1,)))


def _moved(held: list[Place], option: tuple, specs: tuple[Spec, ...]) -> float:
    return sum(_cost(have, want, spec.nbytes) for have, want, spec in zip(held, option[:2], specs, strict=True))


def _with_parts(options: list, held: list[Place]) -> list:
    """The options, and each again with the `parts` of an operand that has this split."""
    # Example, the weight of a fused QKV in Shard(1, parts 3): (R, Shard(1), Shard(1)) also with 3 parts in both. They come
    # first, so that they win among options of one cost.
    more = []
    for x, y, out in options:
        for mine, place in ((x, held[0]), (y, held[1])):
            if isinstance(mine, Shard) and isinstance(place, Shard) and place.parts > 1 and place.dim == mine.dim:
                scale = [Shard(p.dim, place.parts) if isinstance(p, Shard) else p for p in (x, y, out)]
                more.append(tuple(scale))
    return more + options


def _fits(option: tuple, specs: tuple, size: int) -> bool:
    return all(
        not isinstance(p, Shard) or even(s.shape[p.dim], p, size) or p.parts == 1
        for p, s in zip(option[:2], specs, strict=False)
    )


def _cost(have: Place, want: Placement, nbytes: int) -> float:
    """Bytes moved to redistribute an operand. A reduction of a Partial moves twice its bytes."""
    if have is None or have == want:
        return 0
    if isinstance(have, Partial):
        return 2 * nbytes
    if isinstance(have, Replicate):  # nothing moves, but a split operand is better left split, and terms are a last resort
        return 0.01 * nbytes if isinstance(want, Shard) else 0.5 * nbytes
    return nbytes


def _mm_decision(known: OpSchema, first: int, option: tuple) -> Decision:
    """Decision for an option. The added operand of addmm has the result's placement, but for dims that are broadcast."""
    # Where the result is terms the added operand is terms too: one worker adds it, the others add zeros.
    left, right, out = option
    if not first:
        return Decision((left, right), (out,))
    bias = shape(known, 0)
    rank = len(out_shape(known))
    added: Placement = out
    if isinstance(out, Shard):
        dim = out.dim - (rank - len(bias))
        added = Shard(dim, out.parts) if dim >= 0 and bias[dim] != 1 else R
    if known.template.writes and isinstance(out, Partial):
        added = P
    return Decision((added, left, right), (out,))


def layer_norm(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    """Layer and RMS norms are local along leading dims, with weight and bias replicated."""
    backward = known.name.endswith("_backward")
    index = 1 if backward else 0
    normalized = known.arg(2) if backward else known.arg(1)
    # Gradients of weight and bias are sums over all rows, so with split rows each worker has a term of them.
    lead = len(shape(known, index)) - len(normalized)
    place = next((p for p in places[: index + 1] if isinstance(p, Shard) and p.dim < lead), None)
    outs = known.template.outs
    if place is None or place.parts > 1:
        return Decision((R,) * known.tensors, (R,) * len(outs))
    tall = len(shape(known, index))
    wants = tuple(place if len(spec.shape) == tall and tall > len(normalized) else R for spec in known.template.ins)
    if not backward:
        return Decision(wants, (place,) * len(outs))
    return Decision(wants, tuple(place if i == 0 else P for i in range(len(outs))))


def dimwise(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    """Ops along one dim, which are local where another dim is split."""
    rank = len(shape(known, 0))
    dims = known.named(DIMWISE[known.name], "dim", -1)
    along = {d % rank for d in (dims if isinstance(dims, list) else [dims]) if isinstance(d, int)} if rank else set()
    place = next((p for p in places if isinstance(p, Shard)), None)
    outs = len(known.template.outs)
    if place is None or place.dim in along or any(len(s.shape) != rank for s in known.template.ins):
        return Decision((R,) * known.tensors, (R,) * outs)
    return Decision((place,) * known.tensors, (place,) * outs)


def embedding(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    """Embedding: the table's columns or the indices may be split."""
    table, index = places
    last = len(out_shape(known)) - 1
    if isinstance(table, Shard) and table.dim == 1:
        return Decision((table, R), (Shard(last, table.parts),))
    if isinstance(index, Shard):
        return Decision((R, index), (index,))
    return Decision((R, R), (R,))


def embedding_backward(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    grad, index = places
    # Split columns stay split. With split rows each worker has a term of the whole table, the sum of the rows that it has.
    last = len(shape(known, 0)) - 1
    if isinstance(grad, Shard) and grad.dim == last:
        return Decision((grad, R), (Shard(1, grad.parts),))
    place = next((p for p in (grad, index) if isinstance(p, Shard)), None)
    if place is not None and place.parts == 1 and not known.arg(4):  # a gradient by frequency counts all indices
        return Decision((place, place), (P,))
    return Decision((R, R), (R,))


def attention(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    """Batch and head dims may be split, in q, k and v alike. A mask is split too, unless it is broadcast there."""
    ins, outs = known.template.ins, known.template.outs
    backward = known.name.endswith("_backward")
    ranks = [len(s.shape) for s in ins[backward : backward + 3]]
    rank = ranks[0]
    if len(set(ranks)) > 1:  # some of q, k and v lack batch dims
        return whole(known)
    place = next((p for p in places if isinstance(p, Shard) and p.dim < rank - 2 and p.parts == 1), None)
    if place is None or not _alike({s.shape[place.dim] for s in ins if len(s.shape) == rank}, size):
        return Decision((R,) * known.tensors, (R,) * len(outs))
    # A mask may have fewer dims, which are aligned from the right, or extent 1 where it is broadcast.
    wants: list[Placement] = []
    for index, spec in enumerate(ins):
        sums = backward and index == known.tensors - 1  # the log-sum-exp has q's dims without the last
        dim = place.dim if sums else place.dim + len(spec.shape) - rank
        wants.append(Shard(dim) if dim >= 0 and spec.shape[dim] > 1 else R)
    moves: list[Placement] = [place] * len(outs)
    if known.name == "gt.sdpa_biased_backward":
        # The mask's gradient: each worker has a term of a mask that is broadcast along the dim
        moves[3] = wants[4] if wants[4] != R else P
    return Decision(tuple(wants), tuple(moves))


def recurrent(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    """Layers of a recurrent network: the batch, dim 1, may be split. Gradients of parameters are sums then.

    Rows of packed sequences are of all sequences of a step, so they stay whole.
    """
    backward = known.name == "gt.rnn_backward"
    given = [hole for hole in known.template.args[:3] if isinstance(hole, T)] if backward else []
    states, params, sizes = (known.arg(index) for index in ((4, 5, 12) if backward else (1, 2, 8)))
    place = next((p for p in places if isinstance(p, Shard) and p.dim == 1 and p.parts == 1), None)
    if place is None or sizes:
        return whole(known)
    moved: list[Placement] = [place] * (1 + len(states))
    if backward:
        grads: list[Placement] = [*moved, *[P] * len(params)]
        wants = (*[place] * len(given), *moved, *[R] * len(params), place)
        return Decision(wants, tuple(grad for grad, needed in zip(grads, known.arg(13)) if needed))
    return Decision((*moved, *[R] * len(params)), (place, place, place if len(states) == 2 else R))


def _alike(extents: set[int], size: int) -> bool:
    """True if chunks of these extents correspond (of grouped-query heads: if all split evenly)."""
    extents.discard(1)
    return len(extents) == 1 or (bool(extents) and all(n % size == 0 for n in extents))


def padded(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    """slice_backward, select_backward: zeros around a gradient. Linear, and local along the other dims."""
    place = places[0]
    dim = known.arg(2, 0) % len(out_shape(known))
    if isinstance(place, Shard) and known.name == "select_backward":
        return Decision((place,), (Shard(place.dim + (place.dim >= dim), place.parts),))
    if isinstance(place, Shard) and place.dim == dim:
        return None
    kept = settled(place) if isinstance(place, Partial) and place.op != "sum" else place or R
    return Decision((kept,), (kept,))


def constant_pad(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    """Local along dims without padding. `pad` has two lengths for each dim, the last dim first."""
    place, pad = places[0], known.arg(1)
    if not isinstance(place, Shard):
        return whole(known)
    at = 2 * (len(out_shape(known)) - 1 - place.dim)
    return Decision((place,), (place,)) if not any(pad[at : at + 2]) else None


def _cat_with_nothing(known: OpSchema, places: list[Place], dim: int) -> Decision:
    """cat that ignores operands of shape [0], whatever the rank of the others (an empty key cache)."""
    rank = len(out_shape(known))
    nonempty = {p for p, s in zip(places, known.template.ins, strict=True) if s.shape != (0,)}
    place = nonempty.pop() if len(nonempty) == 1 else R
    kept = isinstance(place, Shard) and place.dim != dim % rank
    there = place if kept and isinstance(place, Shard) else R
    return Decision(tuple(R if s.shape == (0,) else there for s in known.template.ins), (there,))


def cat(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    """cat and stack: a split along another dim stays where all operands have it."""
    outs, ins = known.template.outs, known.template.ins
    # Along another dim than the split one all operands stay split. Along the split dim a worker's result has a piece of each
    # operand, one after the other. That is a split with as many `parts` as operands, if all of these are equal and even.
    dim = known.arg(1, 0)
    if known.name == "cat" and any(s.shape == (0,) for s in ins) and len(out_shape(known)) > 1:
        return _cat_with_nothing(known, places, dim)
    rank = max((len(s.shape) for s in known.template.ins), default=0)
    kinds = set(places)
    if len(kinds) == 1 and isinstance(places[0], Partial) and places[0].op in ("sum", "norm2"):
        return Decision(tuple(p for p in places if p), (places[0],) * len(outs))
    first = next((p for p in places if isinstance(p, Shard)), None)
    equal_shapes = all(s.shape == shape(known, 0) for s in known.template.ins) or known.name == "cat"
    if first is None or not equal_shapes or any(len(s.shape) != rank for s in known.template.ins):
        return Decision((R,) * known.tensors, (R,) * len(outs))
    if known.name == "stack":
        new_dim = dim % (rank + 1)
        return Decision((first,) * known.tensors, (Shard(first.dim + (first.dim >= new_dim), first.parts),))
    if first.dim == dim % rank:
        pieces = {s.shape[first.dim] for s in known.template.ins}
        if kinds == {first} and first.parts == 1 and len(pieces) == 1 and pieces.pop() % size == 0:
            return Decision((first,) * known.tensors, (Shard(first.dim, known.tensors),))
        return Decision((R,) * known.tensors, (R,) * len(outs))
    return Decision((first,) * known.tensors, (first,))


RULES: dict[str, Rule] = {
    **dict.fromkeys(VIEWS, lambda known, places, size: _view(known, places, size)),
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
    **dict.fromkeys((PART, *(f"{name}_backward" for name in LOSSES)), loss_backward),
    **dict.fromkeys(("slice_backward", "select_backward"), padded),
    "constant_pad_nd": constant_pad,
    "cat": cat,
    "stack": cat,
}


def _view(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    place = settled(places[0]) if not isinstance(places[0], Partial) else places[0]
    output = view(known, place, size)
    return None if output is None else Decision((place,), output)


def decide(known: OpSchema, places: list[Place], size: int) -> Decision | None:
    """Apply the op's rule on one mesh axis; None where the inputs have to be gathered."""
    rule = RULES.get(known.name)
    if rule is None and known.template.pointwise:
        rule = pointwise
    moved = [p for p in places if isinstance(p, (Shard, Partial))]
    if rule is None or known.template.dynamic:
        return whole(known) if not moved else None
    return rule(known, places, size)


def decide_along(known: OpSchema, columns: Sequence[list[Place]], sizes: Sequence[int]) -> list[Decision | None]:
    """Apply the op's rule on each mesh axis by itself. A reshape of dims that several axes split takes all axes together."""
    if known.name not in RESHAPES or sum(isinstance(places[0], Shard) for places in columns) < 2:
        return [decide(known, places, size) for places, size in zip(columns, sizes, strict=True)]
    starts = [places[0] if isinstance(places[0], Partial) else settled(places[0]) for places in columns]
    outputs = reshape_along(known, starts, sizes)
    return [None] * len(starts) if outputs is None else [Decision((p,), (m,)) for p, m in zip(starts, outputs, strict=True)]
