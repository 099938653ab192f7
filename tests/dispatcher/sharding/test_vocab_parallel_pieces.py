"""Softmax, losses and look-ups over a dim that is split equal torch's on the whole, whatever else is split."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

from gt.dispatcher.sharding import vocab_parallel
from gt.dispatcher.sharding.localize import payload
from gt.dispatcher.sharding.op_chain import ChainOp
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.sharding.rules import decide, whole
from gt.dispatcher.sharding.vocab_parallel import LOWERINGS, embedding_backward
from gt.ir.layout import Layout, Mesh, P, R, Shard
from gt.ir.spec import contiguous
from gt.ir.template import Out, T, Template
from gt.worker.engine.registry import open_engine
from tests.dispatcher.sharding.pieces import joined, scattered
from tests.dispatcher.sharding.test_plan_pieces import Recorded, engine_call

MESHES = [Mesh((("tp", 2),), (0, 1)), Mesh((("tp", 5),), tuple(range(5))), Mesh((("dp", 2), ("tp", 3)), tuple(range(6)))]
G = torch.Generator().manual_seed(7)
ATEN = torch.ops.aten


def f(*shape, dtype=torch.float32, scale=3.0):
    return (scale * torch.randn(shape, generator=G)).to(dtype)


def labels(high, *shape, skipped=None):
    made = torch.randint(0, high, shape, generator=G)
    return made if skipped is None else torch.where(torch.rand(shape, generator=G) < 0.4, skipped, made)


def holes(x):
    """Some scores are -inf, in one row all but one."""
    x = x.masked_fill(torch.rand(x.shape, generator=G) < 0.3, float("-inf"))
    x[0] = float("-inf")
    x[:, 3] = 1.0
    return x


def ends(x):
    """Rows with an infinity, nothing but one, no number, and far below zero."""
    x[0, 5], x[1], x[2, 20], x[3] = float("inf"), float("inf"), float("nan"), x[3] - 1e30
    x[4, :20] = float("-inf")
    return x


def nll(reduction, ignored):
    return lambda x, t, *w: ATEN.nll_loss_forward(x, t, w[0] if w else None, reduction, ignored)


def nll_backward(reduction, ignored):
    def run(grad, x, t, total, *w):
        return ATEN.nll_loss_backward(grad, x, t, w[0] if w else None, reduction, ignored, total)

    return run


S, LS = F.softmax(f(6, 23), 1), F.log_softmax(f(6, 23), 1)
# what is called, and its inputs. The dim that is split is the operand's that is said; 23 is split evenly by nothing
CASES = {
    "log_softmax": (lambda x: F.log_softmax(x, 1), f(6, 23)),
    "log_softmax, large": (lambda x: F.log_softmax(x, -1), f(6, 23) + 1e4),
    "log_softmax, holes": (lambda x: F.log_softmax(x, -1), holes(f(6, 23))),
    "log_softmax, ends": (lambda x: F.log_softmax(x, -1), ends(f(6, 23))),
    "log_softmax, dim 0": (lambda x: F.log_softmax(x, 0), f(23, 6)),
    "log_softmax, of halves": (lambda x: F.log_softmax(x, 1), f(6, 23, dtype=torch.bfloat16)),
    "log_softmax, four dims": (lambda x: F.log_softmax(x, 1), f(2, 23, 3, 4)),
    "softmax": (lambda x: F.softmax(x, 1), f(6, 23, dtype=torch.float64)),
    "softmax, of halves": (lambda x: F.softmax(x, 1), ends(f(6, 23, dtype=torch.bfloat16))),
    "log_softmax backward": (lambda g, y: ATEN._log_softmax_backward_data(g, y, 1, torch.float32), f(6, 23), LS),
    "softmax backward": (lambda g, y: ATEN._softmax_backward_data(g, y, 1, torch.float32), f(6, 23), S),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), holes(f(6, 23))),
    "log_softmax backward, of halves": (
        lambda g, y: ATEN._log_softmax_backward_data(g, y, 1, torch.bfloat16),
        f(6, 23, dtype=torch.bfloat16),
        LS.bfloat16(),
    ),
    "softmax backward, of halves": (
        lambda g, y: ATEN._softmax_backward_data(g, y, 1, torch.bfloat16),
        f(6, 23, dtype=torch.bfloat16),
        S.bfloat16(),
    ),
    "logsumexp, ends": (lambda x: torch.logsumexp(x, 1), ends(f(6, 23))),
    "logsumexp, of halves": (lambda x: torch.logsumexp(x, 1), ends(f(6, 23, dtype=torch.bfloat16))),
    "logsumexp, kept": (lambda x: torch.logsumexp(x, [0, 1], True), f(6, 23)),
    "amax": (lambda x: torch.amax(x, 1), f(6, 23)),
    "amin": (lambda x: torch.amin(x, (0, 1)), f(6, 23)),
    "nll, mean": (nll(1, -100), f(6, 23), labels(23, 6, skipped=-100)),
    "nll, sum": (nll(2, 0), f(6, 23), labels(23, 6, skipped=0)),
    "nll, each": (nll(0, 40), f(6, 23), labels(23, 6, skipped=40)),
    "nll, weights": (nll(1, 3), f(6, 23), labels(23, 6, skipped=3), f(23).abs()),
    "nll, one row": (nll(1, -100), f(23), labels(23)),
    "nll, one row, not reduced": (nll(0, -100), f(23), labels(23)),
    "nll, all ignored": (nll(2, -1), f(6, 23), labels(23, 6).fill_(-1)),
    "nll, images": (
        lambda x, t: ATEN.nll_loss2d_forward(x, t, None, 1, -100),
        f(2, 23, 3, 4),
        labels(23, 2, 3, 4, skipped=-100),
    ),
    "nll backward, mean": (nll_backward(1, -100), f(), f(6, 23), labels(23, 6, skipped=-100), torch.tensor(4.0)),
    "nll backward, sum": (nll_backward(2, 0), f(), f(6, 23), labels(23, 6, skipped=0), torch.tensor(4.0)),
    "nll backward, each": (nll_backward(0, 40), f(6), f(6, 23), labels(23, 6, skipped=40), torch.tensor(0.0)),
    "nll backward, weights": (nll_backward(1, 3), f(), f(6, 23), labels(23, 6, skipped=3), torch.tensor(3.0), f(23).abs()),
    "nll backward, images": (
        lambda g, x, t, total: ATEN.nll_loss2d_backward(g, x, t, None, 1, -100, total),
        f(),
        f(2, 23, 3, 4),
        labels(23, 2, 3, 4),
        torch.tensor(24.0),
    ),
    "embedding": (lambda t, w: F.embedding(t, w), labels(23, 6, 5), f(23, 4)),
    "embedding, int32": (lambda t, w: F.embedding(t, w, padding_idx=2), labels(23, 6).int(), f(23, 4)),
    "embedding backward": (lambda g, t: ATEN.embedding_dense_backward(g, t, 23, -1, False), f(6, 5, 4), labels(23, 6, 5)),
    "embedding backward, padding": (
        lambda g, t: ATEN.embedding_dense_backward(g, t, 23, 9, False),
        f(6, 4),
        labels(23, 6, skipped=9),
    ),
}
TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-14, torch.bfloat16: 8e-3}
TABLE = "embedding_dense_backward"


@pytest.fixture(autouse=True)
def gathering_costs_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_parallel, "gathered", lambda nbytes, size: 1e9)


class World:
    """Carries parts out on pieces, as workers would."""

    def __init__(self, mesh: Mesh, values: list[torch.Tensor], lies: list[Layout]) -> None:
        self.mesh, self.engine = mesh, open_engine("torch", "cpu")
        rows = zip(values, lies, strict=True)
        self.held: dict = {n: (layout, scattered(v, layout), tuple(v.shape)) for n, (v, layout) in enumerate(rows)}

    def part(self, part: ChainOp, scalars: list) -> None:
        known = part.known[0]
        wants, makes = part.wants, part.makes
        if not wants:
            decisions = []
            for axis, (_, size) in enumerate(self.mesh.axes):
                decisions.append(decide(known, [self.held[i][0].placements[axis] for i in part.ins], size) or whole(known))
            wants = [tuple(d.wants[n] for d in decisions) for n in range(len(part.ins))]
            makes = [tuple(d.outs[n] for d in decisions) for n in range(len(part.outs))]
        ins, outs = ([Layout(self.mesh, p) for p in some] for some in (wants, makes))
        pieces = [self.bring(name, want) for name, want in zip(part.ins, ins, strict=True)]
        each = part.known * (1 if len(part.known) > 1 else len(self.mesh.workers))
        made = [
            engine_call(self.engine, payload(known, ins, outs, rank), [p[rank] for p in pieces], scalars)
            for rank, known in enumerate(each)
        ]
        for n, name in enumerate(part.outs):
            self.held[name] = (outs[n], [row[n] for row in made], known.template.outs[n].spec.shape)

    def bring(self, name: int | str, want: Layout) -> list[torch.Tensor]:
        layout, held, shape = self.held[name]
        return held if layout == want else scattered(joined(held, layout, shape), want)


def lowered(known: OpSchema, starts: list, mesh: Mesh, table: tuple) -> list[ChainOp] | None:
    return embedding_backward(known, starts, mesh, table) if known.name == TABLE else LOWERINGS[known.name](known, starts, mesh)


def operand(known: OpSchema) -> int:
    """The index of the operand whose dim of 23 is split."""
    return next(n for n, spec in enumerate(known.template.ins) if 23 in spec.shape and spec.dtype != "int64")


def starts_of(known: OpSchema, mesh: Mesh, rng: random.Random) -> tuple[list, tuple]:
    """Placements: 23 is split by the last axis, anything by the others; and of the table that a gradient is of."""
    found = []
    for n, spec in enumerate(known.template.ins):
        terms = [P] if "float" in spec.dtype else []
        some = [rng.choice([R, *terms, *[Shard(d) for d in range(len(spec.shape))]]) for _ in mesh.axes]
        if known.name != TABLE and n == operand(known):
            some[-1] = Shard(spec.shape.index(23))
        found.append(some)
    return found, tuple(Shard(0) if n == len(mesh.axes) - 1 else R for n in range(len(mesh.axes)))


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(len(mesh.workers)))
@pytest.mark.parametrize("name", CASES)
def test_pieces_of_a_vocabulary_give_what_the_whole_gives(name: str, mesh: Mesh) -> None:
    case = Recorded(name, CASES)
    known, engine = case.known, open_engine("torch", "cpu")
    alone = Layout(Mesh((), (0,)), ())
    outs = [alone] * len(known.template.outs)
    want = engine_call(engine, payload(known, [alone] * known.tensors, outs, 0), [v.clone() for v in case.values], case.scalars)
    rng, split = random.Random(1), 0
    for _ in range(12):
        starts, table = starts_of(known, mesh, rng)
        parts = lowered(known, starts, mesh, table)
        if parts is None:
            continue
        split += 1
        world = World(mesh, case.values, [Layout(mesh, tuple(start)) for start in starts])
        for part in parts:
            world.part(part, [])
        for n, whole_ in enumerate(want):
            layout, held, shape = world.held[-1 - n]
            got = joined(held, layout, shape)
            bound = TOLERANCE.get(got.dtype, 0)
            torch.testing.assert_close(got, whole_, rtol=bound, atol=bound, equal_nan=True, msg=lambda m, s=starts: f"{s}: {m}")
        if known.name.startswith("nll") and known.name.endswith("backward") and "weights" not in name:
            layout, held, shape = world.held[vocab_parallel.SUMS]
            sums = want[0].sum(want[0].shape.index(23), keepdim=True)
            torch.testing.assert_close(joined(held, layout, shape), sums, rtol=1e-6, atol=0)
            assert not layout.partial
    assert split, f"{name}: never split"


def test_a_label_that_is_none_fails_as_it_does_on_one_worker() -> None:
    for wrong, ignored in itertools.product((-3, 23, 1 << 20), (-100, 0)):
        x, t = f(6, 23), labels(23, 6)
        t[2] = wrong
        case = Recorded("nll", {"nll": (nll(1, ignored), x, labels(23, 6))})
        case.values[case.ins.index(case.ins[1])] = t
        mesh = MESHES[1]
        starts = [[Shard(1)], [R]]
        parts = LOWERINGS[case.known.name](case.known, starts, mesh)
        assert parts
        world = World(mesh, [x, t], [Layout(mesh, tuple(start)) for start in starts])
        with pytest.raises(IndexError, match="out of bounds"):
            for part in parts:
                world.part(part, [])


def test_a_dim_that_is_split_too_finely_is_gathered() -> None:
    """A worker that has no class has no maximum."""
    known = Recorded("x", {"x": (lambda x: F.log_softmax(x, 1), f(6, 3))}).known
    assert LOWERINGS["_log_softmax"](known, [[Shard(1)]], MESHES[1]) is None
    assert LOWERINGS["_log_softmax"](known, [[Shard(1)]], MESHES[0])
    assert LOWERINGS["_log_softmax"](known, [[Shard(0)]], MESHES[0]) is None


def test_the_cheaper_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few scores are gathered: adding up twice takes longer. From some number on they stay."""
    monkeypatch.undo()
    stays = []
    for rows in (8, 1 << 6, 1 << 9, 1 << 12):
        known = scores(rows, 50257)
        stays.append(LOWERINGS["_log_softmax"](known, [[Shard(1)]], MESHES[0]) is not None)
    assert stays == sorted(stays) and stays[0] is False and stays[-1] is True


def scores(rows: int, classes: int) -> OpSchema:
    spec = contiguous((rows, classes), "float32")
    return OpSchema(Template("aten._log_softmax.default", (T(0), 1, False), (), (spec,), 0, (Out("new", spec),)))
