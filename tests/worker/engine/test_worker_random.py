"""Random ops: the right distributions, and a piece draws exactly what the whole tensor has at its place."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gt.ir.layout import Layout, Mesh, Replicate, Shard, boxes
from gt.ir.ops import RANDOM
from gt.worker.engine.numpy import random as numpy_random
from gt.worker.engine.torch import random
from gt.worker.engine.torch.layers import attention
from gt.worker.engine.torch.random import Words, bind

N = 200_000
# op -> (arguments after the tensor, mean, standard deviation, cumulative distribution or None)
IN_PLACE = {
    "aten.uniform_.default": ((-1.0, 3.0), 1.0, 4 / math.sqrt(12), lambda x: (x + 1) / 4),
    "aten.normal_.default": ((0.5, 2.0), 0.5, 2.0, lambda x: 0.5 * (1 + np.vectorize(math.erf)((x - 0.5) / 2 / math.sqrt(2)))),
    "aten.bernoulli_.float": ((0.3,), 0.3, math.sqrt(0.21), None),
    "aten.random_.to": ((10,), 4.5, math.sqrt(99 / 12), None),
    "aten.random_.from": ((-5, 6), 0.5 - 0.5, math.sqrt(120 / 12), None),
    "aten.exponential_.default": ((2.0,), 0.5, 0.5, lambda x: 1 - np.exp(-2 * x)),
    "aten.log_normal_.default": ((0.0, 0.25), math.exp(1 / 32), math.sqrt((math.exp(1 / 16) - 1) * math.exp(1 / 16)), None),
    "aten.cauchy_.default": ((1.0, 2.0), None, None, lambda x: 0.5 + np.arctan((x - 1) / 2) / math.pi),
    "aten.geometric_.default": ((0.25,), 4.0, math.sqrt(12), None),
}
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# how a mesh of 4 holds a tensor of this shape
LAYOUTS = [
    ((37,), (Shard(0), Replicate())),
    ((64, 48), (Shard(0), Replicate())),
    ((64, 48), (Shard(1), Replicate())),
    ((5, 6, 7), (Shard(2), Shard(0))),
    ((8, 24), (Shard(1, 3), Replicate())),
    ((2000, 3), (Shard(0), Shard(1))),
    ((3, 5000), (Shard(1), Shard(1))),
]


def place(shape: tuple, placements: tuple, rank: int) -> tuple[list, list]:
    layout = Layout(Mesh((("a", 2), ("b", 2)), (0, 1, 2, 3)), placements)
    held = boxes(layout, shape, rank)
    return [list(shape), [[list(span) for span in box] for box in held]], held


def part(whole: torch.Tensor, held: list) -> torch.Tensor:
    """The boxes of the whole, in the order a local tensor has them."""
    spans = [list(dict.fromkeys(box[dim] for box in held)) for dim in range(whole.dim())]
    for dim, found in enumerate(spans):
        whole = whole.index_select(dim, torch.cat([torch.arange(a, b) for a, b in found]))
    return whole


def test_every_random_op_is_drawn_here():
    assert set(random.DRAW) | set(attention.OPS) == RANDOM


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_distributions(name):
    args, mean, deviation, distribution = IN_PLACE[name]
    x = torch.empty(N, dtype=torch.float64)
    assert bind(name, None)(x, *args, seed=3, counter=8) is x
    if mean is not None:
        assert abs(x.mean().item() - mean) < 5 * deviation / math.sqrt(N)
        assert abs(x.std().item() / deviation - 1) < 0.03
    if distribution is not None:
        found = np.sort(x.numpy())
        assert np.abs(distribution(found) - (np.arange(N) + 0.5) / N).max() < 2 / math.sqrt(N)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool])
def test_random_covers_the_dtype(dtype):
    x = torch.empty(N, dtype=dtype)
    bind("aten.random_.default", None)(x, seed=1, counter=1)
    top = {torch.float64: 2**53, torch.float32: 2**24, torch.bfloat16: 2**8, torch.float16: 2**11, torch.bool: 1}
    limit = top.get(dtype) or torch.iinfo(dtype).max
    assert x.min() >= 0 and x.double().max() <= limit
    assert abs(x.double().mean().item() / limit - 0.5) < 0.01


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_never_reaches_its_upper_end(dtype):
    x = torch.empty(N, dtype=dtype)
    bind("aten.uniform_.default", None)(x, seed=1, counter=1)
    assert x.min() >= 0 and x.max() < 1
    assert abs(x.double().mean().item() - 0.5) < 0.01


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_piece_is_its_part_of_the_whole(name, dtype):
    args = IN_PLACE[name][0]
    for shape, placements in LAYOUTS:
        whole = bind(name, None)(torch.empty(shape, dtype=dtype), *args, seed=-7, counter=5)
        for rank in range(4):
            where, held = place(shape, placements, rank)
            want = part(whole, held)
            got = bind(name, where)(torch.empty(want.shape, dtype=dtype), *args, seed=-7, counter=5)
            assert torch.equal(got, want), (shape, placements, rank)


@pytest.mark.parametrize("shape, placements", LAYOUTS)
def test_pieces_of_what_is_not_in_place(shape, placements):
    rates = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 0.9 + 0.05
    ops = {
        "aten.native_dropout.default": lambda run, p: run(p, 0.25, True, seed=1, counter=2)[0],
        "aten.bernoulli.default": lambda run, p: run(p, seed=1, counter=2),
        "aten.bernoulli_.Tensor": lambda run, p: run(torch.empty_like(p), p, seed=1, counter=2),
        "aten.poisson.default": lambda run, p: run(p * 5, seed=1, counter=2),
        "aten.normal.Tensor_float": lambda run, p: run(p, 2.0, seed=1, counter=2),
        "aten.normal.float_Tensor": lambda run, p: run(1.0, p, seed=1, counter=2),
        "aten.normal.Tensor_Tensor": lambda run, p: run(p, p, seed=1, counter=2),
    }
    for name, call in ops.items():
        whole = call(bind(name, None), rates)
        for rank in range(4):
            where, held = place(shape, placements, rank)
            assert torch.equal(call(bind(name, where), part(rates, held)), part(whole, held)), name


def test_another_counter_or_seed_is_another_draw():
    draws = [bind("aten.normal_.default", None)(torch.empty(N), seed=s, counter=c) for s, c in ((1, 1), (1, 2), (2, 1), (1, 1))]
    assert torch.equal(draws[0], draws[3])
    for other in draws[1:3]:
        assert abs(torch.corrcoef(torch.stack([draws[0], other]))[0, 1]) < 5 / math.sqrt(N)
    assert abs(torch.corrcoef(torch.stack([draws[0][1:], draws[0][:-1]]))[0, 1]) < 5 / math.sqrt(N)


def test_dropout_keeps_scales_and_masks_as_torch_does():
    x, run = torch.randn(400, 500).t(), bind("aten.native_dropout.default", None)
    out, mask = run(x, 0.2, True, seed=1, counter=1)
    assert mask.dtype == torch.bool and out.stride() == x.stride() == mask.stride()
    assert abs(mask.float().mean().item() - 0.8) < 0.005
    assert torch.equal(out, x * mask * (1 / 0.8))
    assert torch.equal(run(x, 0.2, False, seed=1, counter=1)[0], x)
    assert not run(x, 1.0, True, seed=1, counter=1)[0].any()
    assert torch.equal(run(x, 0.0, True, seed=1, counter=1)[0], x)


@pytest.mark.parametrize("rate", [0.0, 0.1, 4.0, 60.0, 255.0, 1000.0, 1e6])
def test_poisson(rate):
    x = bind("aten.poisson.default", None)(torch.full((N,), rate, dtype=torch.float64), seed=2, counter=3)
    deviation = math.sqrt(rate)
    assert abs(x.mean().item() - rate) <= 5 * deviation / math.sqrt(N) + 1e-3
    assert abs(x.std().item() - deviation) <= 0.03 * deviation
    assert (x == x.floor()).all() and (x >= 0).all()


def test_randperm_and_its_pieces():
    whole = bind("aten.randperm.default", None)(1000, seed=1, counter=1, dtype=torch.int32)
    assert whole.dtype == torch.int32 and torch.equal(whole.sort()[0], torch.arange(1000, dtype=torch.int32))
    got = bind("aten.randperm.default", [[1000], [[[250, 500]]]])(1000, seed=1, counter=1)
    assert torch.equal(got, whole[250:500].long())


@pytest.mark.parametrize("replacement", [False, True])
def test_multinomial(replacement):
    run, p = bind("aten.multinomial.default", None), torch.tensor([[0.0, 1.0, 3.0], [2.0, 2.0, 0.0]]).repeat(N // 20, 1)
    x = run(p, 2, replacement, seed=1, counter=1)
    assert x.shape == (len(p), 2) and x.dtype == torch.int64
    assert not (x[0::2] == 0).any() and not (x[1::2] == 2).any()
    assert abs((x[0::2, 0] == 2).double().mean().item() - 0.75) < 0.02
    if not replacement:
        assert (x[:, 0] != x[:, 1]).all()
        with pytest.raises(ValueError, match="without replacement"):
            run(p, 3, False, seed=1, counter=1)
    assert run(p[0], 1, replacement, seed=1, counter=1).shape == (1,)


@pytest.mark.parametrize(
    "name, args",
    [
        ("aten.normal_.default", (0.0, -1.0)),
        ("aten.bernoulli_.float", (1.5,)),
        ("aten.geometric_.default", (0.0,)),
        ("aten.random_.from", (3, 3)),
    ],
)
def test_arguments_that_make_no_sense_are_refused(name, args):
    with pytest.raises(ValueError, match="expects"):
        bind(name, None)(torch.empty(3), *args, seed=1, counter=1)


def test_a_piece_of_another_shape_than_planned_is_refused():
    with pytest.raises(ValueError, match="planned as"):
        Words(1, 1, [[8], [[[0, 4]]]]).of((5,))


def test_a_negative_rate_is_refused():
    with pytest.raises(ValueError, match="invalid Poisson rate"):
        bind("aten.poisson.default", None)(torch.tensor([1.0, -1.0]), seed=2, counter=3)


@pytest.mark.parametrize("bind", [bind, numpy_random.bind])
@pytest.mark.parametrize("std", [[1.0, -1.0], -1.0])
def test_a_negative_deviation_is_refused(bind, std):
    array = torch.tensor if bind is not numpy_random.bind else np.array
    mean, std = array([1.0, 2.0]), array(std) if isinstance(std, list) else std
    name = "aten.normal.Tensor_float" if isinstance(std, float) else "aten.normal.Tensor_Tensor"
    with pytest.raises(ValueError, match="std >= 0"):
        bind(name, None)(mean, std, seed=2, counter=3)
