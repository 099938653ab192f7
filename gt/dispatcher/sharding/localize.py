"""Localization: one worker's version of an op, with local sizes among its constants and local specs of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gt.dispatcher.sharding.op_schema import OpSchema
from gt.ir.layout import Layout, Shard, boxes, local_shape
from gt.ir.spec import Spec
from gt.ir.template import DEVICE, Const, Out, T, to_wire

# op -> index of the argument with the shape of its first output
SIZES = {
    "view": 1, "_unsafe_view": 1, "reshape": 1, "expand": 1, "new_zeros": 1, "new_ones": 1,
    "new_empty": 1, "new_full": 1, "zeros": 0, "ones": 0, "empty": 0, "full": 0, "rand": 0, "randn": 0, "empty_strided": 0,
    "new_empty_strided": 1, "select_backward": 1, "slice_backward": 1, "diagonal_backward": 1, "unfold_backward": 1,
}  # fmt: skip
STRIDES = {"empty_strided": 1, "new_empty_strided": 2}
ATTENTION = {  # index of the query
    "gt.sdpa.default": 0,
    "gt.sdpa_backward.default": 1,
    "gt.sdpa_biased.default": 0,
    "gt.sdpa_biased_backward.default": 1,
}

# The move itself is the redistribution of its input. What is lent is copied where it is a term of a sum: see OpBinder
WORKER_OPS = {"gt.move.default": "aten.clone.default", "gt.lend.default": "aten.clone.default"}


def dense(shape: Sequence[int], like: Spec) -> Spec:
    """A dense spec of this shape with the dim order of `like`'s strides. Expanded dims stay expanded."""
    # From the dim with the smallest stride outwards. Example: [4, 6] with strides (1, 4) and shape [2, 6] gives strides (1, 2).
    order = sorted(range(len(shape)), key=lambda d: (like.stride[d], -d), reverse=False)
    stride, step = [0] * len(shape), 1
    for dim in order:
        if like.stride[dim] == 0 and like.shape[dim] > 1:
            continue
        stride[dim] = step
        step *= max(shape[dim], 1)
    return Spec(tuple(shape), tuple(stride), 0, like.dtype)


def row_major(spec: Spec) -> bool:
    """True if a dense spec is row-major. Dims of size 1 do not count."""
    step = 1
    for n, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if n > 1 and stride != step:
            return False
        step *= n
    return True


def strided(spec: Spec) -> dict[str, Any]:
    """The `op` definition that makes a tensor of these strides."""
    kwargs = {"dtype": to_wire(Const("dtype", spec.dtype)), "device": to_wire(DEVICE)}
    args = [list(spec.shape), list(spec.stride)]
    outs = [["new", spec.wire(), -1]]
    return {"op": "aten.empty_strided.default", "args": args, "kwargs": kwargs, "tensors": 0, "values": 0, "outs": outs,
            "writes": [], "random": None}  # fmt: skip


def copied(spec: Spec) -> dict[str, Any]:
    """The `op` definition of copy_ into a tensor of this spec."""
    args, outs = to_wire([T(0), T(1)]), [["same", None, 0]]
    return {"op": "aten.copy_.default", "args": args, "kwargs": {}, "tensors": 2, "values": 0, "outs": outs,
            "writes": [0], "random": None}  # fmt: skip


def duplicate(spec: Spec) -> dict[str, Any]:
    """The `op` definition of a clone of a tensor of this spec."""
    args, outs = to_wire([T(0)]), [["new", spec.wire(), -1]]
    return {"op": "aten.clone.default", "args": args, "kwargs": {}, "tensors": 1, "values": 0, "outs": outs,
            "writes": [], "random": None}  # fmt: skip


def out_specs(known: OpSchema, layouts: Sequence[Layout], rank: int) -> list[Spec | None]:
    """Local spec of each flat output."""
    specs: list[Spec | None] = []
    for out, layout in zip(known.template.outs, layouts, strict=True):
        spec = out.spec
        if spec is None:
            specs.append(None)
        elif all(not isinstance(p, Shard) for p in layout.placements):
            specs.append(spec)
        else:
            specs.append(dense(local_shape(layout, spec.shape, rank), spec))
    return specs


def payload(known: OpSchema, ins: Sequence[Layout], outs: Sequence[Layout], rank: int) -> dict[str, Any]:
    """The `op` definition for the rank-th worker of the mesh."""
    # A worker executes the client's op on its pieces. Of the constants only sizes differ from the client's.
    template = known.template
    specs = out_specs(known, outs, rank)
    args = list(template.args)
    if any(isinstance(p, Shard) for layout in (*ins, *outs) for p in layout.placements):
        _resize(known, args, ins, specs, rank)
    op = WORKER_OPS.get(template.op, template.op)
    if known.name == "squeeze":  # a dim of local size 1 may be longer globally
        op, args = "aten.squeeze.dims", [args[0], _squeezed(known)]
    return {
        "op": op,
        "args": to_wire(args),
        "kwargs": {k: to_wire(v) for k, v in template.kwargs},
        "tensors": known.tensors,
        "values": known.values,
        "outs": [_out(out, spec) for out, spec in zip(template.outs, specs, strict=True)],
        "writes": list(template.writes),  # as the table of ops says: ir.check has compared them
        "random": _drawn(known, ins, outs, rank) if known.random else None,
    }


def _squeezed(known: OpSchema) -> list[int]:
    """The dims that a squeeze removes."""
    shape, dims = known.template.ins[0].shape, known.arg(1)
    named = range(len(shape)) if dims is None else [d % len(shape) for d in _list(dims)] if shape else []
    return [d for d in named if shape[d] == 1]


def _list(dims: Any) -> list[int]:
    return dims if isinstance(dims, list) else [dims]


def _out(out: Out, spec: Spec | None) -> list:
    return [out.kind, spec.wire() if spec else None, out.of]


def _resize(known: OpSchema, args: list, ins: Sequence[Layout], specs: list[Spec | None], rank: int) -> None:
    """Local sizes for the constants that are sizes."""
    name = known.name
    first = specs[0] if specs else None
    if name in SIZES and first is not None and SIZES[name] < len(args):
        args[SIZES[name]] = list(first.shape)
        if name in STRIDES and STRIDES[name] < len(args):
            args[STRIDES[name]] = list(first.stride)
    elif name == "split" and first is not None:
        dim = known.named(2, "dim", 0) % len(first.shape)
        args[1] = max(first.shape[dim], 1)  # torch refuses a size of 0, which an empty piece would have
    elif name == "split_with_sizes" and first is not None:
        dim = known.named(2, "dim", 0) % len(first.shape)
        args[1] = [spec.shape[dim] for spec in specs if spec]
    elif name == "slice" and first is not None:
        _whole_slice(known, args, ins, rank)
    elif name == "embedding_dense_backward" and first is not None:
        args[2] = first.shape[0]


def _whole_slice(known: OpSchema, args: list, ins: Sequence[Layout], rank: int) -> None:
    """A slice along the split dim takes all of it (views.along), and so does its local form."""
    dim = known.arg(1, 0) % len(known.template.ins[0].shape)
    if any(isinstance(p, Shard) and p.dim == dim for p in ins[0].placements):
        args[1:4] = [dim, 0, local_shape(ins[0], known.template.ins[0].shape, rank)[dim]]


def _drawn(known: OpSchema, ins: Sequence[Layout], outs: Sequence[Layout], rank: int) -> list:
    """Global shape of the random numbers, and the boxes of them that this worker holds."""
    # A number depends on its place in the global tensor (engine/philox.py), so it is the same however the tensor is split.
    if known.template.op in ATTENTION:
        return _attention_drawn(known, ins, rank)
    if known.template.writes:
        at = known.template.writes[0]
        shape, layout = known.template.ins[at].shape, ins[at]
    else:
        out = known.template.outs[0]
        shape, layout = out.spec.shape if out.spec else (), outs[0]
    return [list(shape), [[list(span) for span in box] for box in boxes(layout, shape, rank)]]


def _attention_drawn(known: OpSchema, ins: Sequence[Layout], rank: int) -> list:
    """Dropout's mask is drawn over [..., heads, L, S]. Its batch and heads have q's placement."""
    at = ATTENTION[known.template.op]
    q, k = known.template.ins[at].shape, known.template.ins[at + 1].shape
    held = boxes(ins[at], q, rank)[0]
    box = [list(span) for span in held[:-1]] + [[0, k[-2]]]
    return [[*q[:-1], k[-2]], [box]]
