"""Executing a plan on pieces equals the op on the whole: every rule, over random layouts, on the torch engine."""

from __future__ import annotations

import random
from itertools import product
from math import prod
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from gt.dispatcher.sharding.localize import payload
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.sharding.rules import decide, decide_along
from gt.ir.layout import Layout, Mesh, P, Partial, R, Shard, boxes, read_boxes
from gt.worker.engine.registry import open_engine
from tests.dispatcher.sharding.pieces import joined, scattered
from tests.helpers.planned import planned

SIZES = (2, 3, 5)  # 3 and 5 leave short and empty pieces


def mesh(size):
    return Mesh((("tp", size),), tuple(range(size)))


def f(*shape):
    return torch.randn(shape)


def n(dtype, *shape):
    return torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, shape, dtype=dtype)


# what is called, and its inputs; dims are split evenly by 2, and by 3 and 5 not
CASES = {
    "add": (lambda a, b: a + b, f(4, 6), f(4, 6)),
    "add broadcast": (lambda a, b: a + b, f(4, 6), f(6)),
    "mul scalar": (lambda a: a * 3.0, f(4, 6)),
    "add numbers": (lambda a, b: a + b, f(), f()),
    "sub numbers": (lambda a, b: torch.sub(a, b, alpha=2), f(), f()),
    "add numbers, in place": (lambda a, b: a.add_(b), f(), f()),
    "mul by one": (lambda a, b: a * b, f(4, 6), f()),
    "div by one": (lambda a, b: a / b, f(4, 6), f()),
    "div by one, in place": (lambda a, b: a.div_(b), f(4, 6), f()),
    "number by one": (lambda a, b: a * b, f(), f()),
    "number over one": (lambda a, b: a / b, f(), f()),
    "one div": (lambda a, b: a / b, f(), f(4, 6)),
    "div down": (lambda a: torch.div(a, 0.3, rounding_mode="floor"), f(4, 6)),
    "div down by one": (lambda a, b: torch.div(a, b, rounding_mode="trunc"), f(4, 6), f()),
    "add_": (lambda a, b: a.add_(b), f(4, 6), f(4, 6)),
    "add of bytes": (lambda a, b: a + b, n(torch.uint8, 4, 6), n(torch.uint8, 4, 6)),
    "add of bytes and wider": (lambda a, b: a + b, n(torch.uint8, 4, 6), n(torch.int32, 4, 6)),
    "mul of bytes": (lambda a: a * 0.5, n(torch.uint8, 4, 6)),
    "div of integers by one": (lambda a, b: a / b, n(torch.int32, 4, 6), f()),
    "relu": (torch.relu, f(4, 6)),
    "where": (torch.where, f(4, 6) > 0, f(4, 6), f(4, 6)),
    "gelu backward": (torch.ops.aten.gelu_backward, f(4, 6), f(4, 6)),
    "softmax backward": (lambda g, o: torch.ops.aten._softmax_backward_data(g, o, -1, torch.float32), f(4, 6), f(4, 6)),
    "layer norm backward": (
        lambda g, a, m, r, w, b: torch.ops.aten.native_layer_norm_backward(g, a, [8], m, r, w, b, [True, True, True]),
        f(4, 6, 8),
        f(4, 6, 8),
        f(4, 6, 1),
        f(4, 6, 1).abs() + 1,
        f(8),
        f(8),
    ),
    "rms norm backward": (
        lambda g, a, r, w: torch.ops.aten._fused_rms_norm_backward(g, a, [8], r, w, [True, True]),
        f(4, 6, 8),
        f(4, 6, 8),
        f(4, 6, 1).abs() + 1,
        f(8),
    ),
    "slice backward": (lambda g: torch.ops.aten.slice_backward(g, [4, 6, 8], 1, 2, 6, 1), f(4, 4, 8)),
    "select backward": (lambda g: torch.ops.aten.select_backward(g, [4, 6, 8], 1, 2), f(4, 8)),
    "nll loss, sum": (lambda a, t: F.nll_loss(a, t, reduction="sum"), f(4, 6), torch.randint(0, 6, (4,))),
    "nll loss, rows": (lambda a, t: F.nll_loss(a, t, reduction="none"), f(4, 6), torch.randint(0, 6, (4,))),
    "nll loss backward": (
        lambda g, a, t, w: torch.ops.aten.nll_loss_backward(g, a, t, None, 1, -100, w),
        torch.tensor(2.0),
        f(4, 6),
        torch.randint(0, 6, (4,)),
        torch.tensor(4.0),
    ),
    "mse loss": (F.mse_loss, f(4, 6), f(4, 6)),
    "mse loss, sum": (lambda a, t: F.mse_loss(a, t, reduction="sum"), f(4, 6), f(4, 6)),
    "huber loss, each": (lambda a, t: F.huber_loss(a, t, reduction="none"), f(4, 6), f(4, 6)),
    "binary cross entropy": (F.binary_cross_entropy, f(4, 6).sigmoid(), f(4, 6).sigmoid()),
    "mse loss backward, sum": (
        lambda g, a, t: torch.ops.aten.mse_loss_backward(g, a, t, 2),
        torch.tensor(2.0),
        f(4, 6),
        f(4, 6),
    ),
    "huber loss backward, each": (
        lambda g, a, t: torch.ops.aten.huber_loss_backward(g, a, t, 0, 1.0),
        f(4, 6),
        f(4, 6),
        f(4, 6),
    ),
    "embedding backward": (
        lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, 10, -1, False),
        f(4, 6, 8),
        torch.randint(0, 10, (4, 6)),
    ),
    "cat fused": (lambda a, b, c: torch.cat([a, b, c], -1), f(4, 6), f(4, 6), f(4, 6)),
    "sum dim": (lambda a: a.sum(0), f(4, 6)),
    "sum keep": (lambda a: a.sum((0, 2), keepdim=True), f(4, 6, 8)),
    "sum all": (lambda a: a.sum(), f(4, 6)),
    "sum to integers": (lambda a: a.sum(0, dtype=torch.int64), 9 * f(4, 6)),
    "sum of integers": (lambda a: a.sum(0), n(torch.int32, 4, 6)),
    "mean dim": (lambda a: a.mean(1), f(4, 6)),
    "amax": (lambda a: a.amax(0), f(4, 6)),
    "max dim": (lambda a: a.max(1).values, f(4, 6)),
    "softmax": (lambda a: a.softmax(-1), f(4, 6)),
    "cumsum": (lambda a: a.cumsum(0), f(4, 6)),
    "mm": (torch.mm, f(4, 6), f(6, 8)),
    "addmm": (torch.addmm, f(8), f(4, 6), f(6, 8)),
    "addmm 2d": (torch.addmm, f(4, 8), f(4, 6), f(6, 8)),
    "bmm": (torch.bmm, f(2, 4, 6), f(2, 6, 8)),
    "mv": (torch.mv, f(4, 6), f(6)),
    "baddbmm": (torch.baddbmm, f(2, 4, 8), f(2, 4, 6), f(2, 6, 8)),
    "layer norm": (lambda a, w, b: F.layer_norm(a, (8,), w, b), f(4, 6, 8), f(8), f(8)),
    "embedding": (lambda w, i: F.embedding(i, w), f(10, 4), torch.randint(0, 10, (4, 6))),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), f(2, 4, 6, 8), f(2, 4, 6, 8), f(2, 4, 6, 8)),
    "attention, mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        f(2, 4, 6, 8),
        f(2, 4, 6, 8),
        f(2, 4, 6, 8),
        f(1, 4, 6, 6),
    ),
    "attention, grouped heads": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        f(2, 4, 6, 8),
        f(2, 2, 6, 8),
        f(2, 2, 6, 8),
    ),
    "view split": (lambda a: a.view(4, 2, 3), f(4, 6)),
    "view merge": (lambda a: a.view(24, 8), f(4, 6, 8)),
    "view heads": (lambda a: a.view(2, 6, 4, 2), f(2, 6, 8)),
    "view merge heads": (lambda a: a.view(2, 6, 8), f(2, 6, 4, 2)),
    "transpose": (lambda a: a.transpose(0, 2), f(4, 6, 8)),
    "permute": (lambda a: a.permute(2, 0, 1), f(4, 6, 8)),
    "t": (lambda a: a.t(), f(4, 6)),
    "unsqueeze": (lambda a: a.unsqueeze(1), f(4, 6)),
    "squeeze": (lambda a: a.squeeze(1), f(4, 1, 6)),
    "view as integers": (lambda a: a.view(torch.int32), f(4, 6)),
    "expand": (lambda a: a.expand(4, 6, 8), f(4, 1, 8)),
    "select": (lambda a: a.select(1, 3), f(4, 6, 8)),
    "slice": (lambda a: a[:, 1:3], f(4, 6, 8)),
    "split": (lambda a: a.split(2, 1)[1], f(4, 6)),
    "unbind": (lambda a: a.unbind(0)[1], f(4, 6)),
    "cat": (lambda a, b: torch.cat([a, b], 1), f(4, 6), f(4, 6)),
    "stack": (lambda a, b: torch.stack([a, b], 1), f(4, 6), f(4, 6)),
    "zeros_like": (torch.zeros_like, f(4, 6)),
    "to": (lambda a: a.to(torch.float64), f(4, 6)),
}


class Recorded:
    """The last op of a program, as the dispatcher got it, and its inputs' global values."""

    def __init__(self, name: str, cases: dict = CASES) -> None:
        function, *inputs = cases[name]
        with planned("", 1) as plan:
            remote = [t.to("remote") for t in inputs]
            ids = [t._ref.id for t in remote]
            rows = []

            def seen(known, origin, ins):
                if known.name not in ("gt.upload", "detach"):
                    rows.append((known, list(ins), self._scalars(plan.core.sessions[b"client"], known)))

            emitter = plan.core.sessions[b"client"].emitter
            emitter.scribe = SimpleNamespace(received=seen, planned=lambda *_, **__: None, step=lambda *_: None)
            function(*remote)
            plan.text()
        self.known, self.ins, self.scalars = next(row for row in reversed(rows) if set(row[1]) & set(ids))
        self.values = [inputs[ids.index(i)] for i in self.ins]

    @staticmethod
    def _scalars(session, known):
        end = session.context.queue.position - known.results
        return session.op_stream.coming[0].code[end - known.values : end]


def places(shape):
    return [R, *[Shard(d) for d in range(len(shape))], P]


def pieces(value, place, size):
    layout = Layout(mesh(size), (place,))
    if isinstance(place, Partial):
        noise = torch.randn_like(value) if value.is_floating_point() else n(value.dtype, *value.shape)  # that may wrap
        return [noise.clone(), value - noise, *[torch.zeros_like(value)] * (size - 2)]
    return scattered(value, layout)


def run(known, decision, values, scalars, size):
    """The op on each worker's pieces; its outputs joined again."""
    engine = open_engine("torch", "cpu")
    held = [pieces(v.clone(), want, size) for v, want in zip(values, decision.wants, strict=True)]
    ins = [Layout(mesh(size), (w,)) for w in decision.wants]
    outs = [Layout(mesh(size), (o,)) for o in decision.outs]
    results = []
    for rank in range(size):
        made = engine_call(engine, payload(known, ins, outs, rank), [h[rank] for h in held], scalars)
        results.append(made)
    joined_outs = []
    for index, (out, layout) in enumerate(zip(known.template.outs, outs, strict=True)):
        shape = out.spec.shape if out.spec else values[out.of].shape
        joined_outs.append(joined([r[index] for r in results], layout, tuple(shape)))
    return joined_outs


BOUND: dict = {}  # text of a definition -> its function by a CPU engine: to compile it takes most of a call's time


def bound(engine, definition):
    key = type(engine), repr(definition)
    if key not in BOUND:
        BOUND[key] = engine.bind(definition)
    return BOUND[key]


def engine_call(engine, definition, tensors, scalars=()):
    """Every flat output of one `op` definition, those of kind `same` being operands; scalars are the recorded ones."""
    with engine.guard():
        made = bound(engine, definition)(*tensors, *scalars)
    made = iter(() if made is None else made if isinstance(made, (tuple, list)) else (made,))
    return [tensors[of] if kind == "same" else next(made) for kind, _, of in definition["outs"]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_pieces_give_what_the_whole_gives(name, size):
    torch.manual_seed(0)
    case = Recorded(name)
    known: OpSchema = case.known
    engine = open_engine("torch", "cpu")
    alone = Layout(Mesh((), (0,)), ())
    ins, outs = [alone] * known.tensors, [alone] * len(known.template.outs)
    whole = engine_call(engine, payload(known, ins, outs, 0), [v.clone() for v in case.values], case.scalars)
    choices = [places(v.shape) for v in case.values]
    rng, seen, split = random.Random(0), set(), 0
    for _ in range(60):
        held = tuple(rng.choice(c) for c in choices)
        decision = decide(known, list(held), size)
        if decision is None or (decision.wants, decision.outs) in seen:
            continue
        seen.add((decision.wants, decision.outs))
        split += any(isinstance(w, Shard) for w in decision.wants)
        for got, want in zip(run(known, decision, case.values, case.scalars, size), whole, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda m, d=decision: f"{name} {d}: {m}")
    assert split or size > 2 or not any(v.shape for v in case.values), f"{name}: nothing was ever split"


RESHAPED = {
    (4, 6): [(24,), (8, 3), (2, 2, 6), (4, 2, 3)],
    (2, 4, 6): [(48,), (8, 6), (2, 24), (8, 2, 3)],
    (8, 12): [(2, 4, 12), (32, 3), (4, 24), (8, 4, 3)],
}


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (3, 2)], ids=str)
@pytest.mark.parametrize("shape", RESHAPED, ids=str)
def test_pieces_that_two_axes_split_are_reshaped_as_the_whole_is(shape, sizes):
    """An axis splits what an earlier one has left of a dim that a view makes of two, or two of."""
    value, both = (
        torch.arange(float(prod(shape))).view(shape),
        Mesh((("dp", sizes[0]), ("tp", sizes[1])), tuple(range(prod(sizes)))),
    )
    splits = [Shard(dim, parts) for dim, extent in enumerate(shape) for parts in (1, 2, 4) if extent % parts == 0]
    engine, done = open_engine("torch", "cpu"), 0

    def piece(whole, layout, rank):
        return torch.from_numpy(read_boxes(whole.numpy(), boxes(layout, tuple(whole.shape), rank)).copy())

    for into in RESHAPED[shape]:
        known = Recorded("view", {"view": (lambda a, into=into: a.view(into), value)}).known
        for places in product(splits, repeat=2):
            found = decide_along(known, [[p] for p in places], sizes)
            if None in found:
                continue
            done += 1
            have, made = Layout(both, places), Layout(both, tuple(d.outs[0] for d in found))
            for rank in range(prod(sizes)):
                got = engine_call(engine, payload(known, [have], [made], rank), [piece(value, have, rank)])
                assert torch.equal(got[0], piece(value.view(into), made, rank)), f"{have} to {made} of {into}"
    assert done


def test_a_batch_and_its_heads_that_two_axes_split_become_one_dim_and_stay_split():
    known = Recorded("view", {"view": (lambda a: a.view(16, 6), f(4, 4, 6))}).known
    found = decide_along(known, [[Shard(0)], [Shard(1)]], (2, 2))
    assert [d.outs[0] for d in found] == [Shard(0), Shard(0, 2)]
    assert decide_along(known, [[Shard(1)], [Shard(0)]], (2, 2)) == [None, None]
