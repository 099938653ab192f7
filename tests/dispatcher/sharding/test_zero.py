"""Layouts of sharded parameters, as pure functions and as plans of a step in each stage of ZeRO."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gt
from gt.dispatcher.sharding import zero
from gt.ir.instr import COLLECTIVES
from gt.ir.layout import Layout, Mesh, R, Shard, local_shape, replicated
from gt.ir.spec import contiguous
from tests.helpers.planned import planned

SIZES = [(("dp", 2),), (("dp", 3),), (("dp", 8),), (("dp", 2), ("tp", 2)), (("dp", 4), ("tp", 3))]


@pytest.mark.parametrize("axes", SIZES)
def test_pieces_at_rest_cover_a_tensor_once(axes):
    draw = random.Random(0)
    workers = 1
    for _, size in axes:
        workers *= size
    mesh = Mesh(axes, tuple(range(workers)))
    for _ in range(50):
        shape = tuple(draw.choice([1, 2, 5, 7, 16, 33]) for _ in range(draw.randint(0, 3)))
        split = draw.randrange(len(shape)) if shape and len(axes) > 1 else None
        use = Layout(mesh, (R, *[R if split is None else Shard(split)] * (len(axes) - 1)))
        lies = zero.rest(use, shape)
        assert zero.used(lies) == use
        pieces = [contiguous(local_shape(lies, shape, rank), "float32").numel for rank in range(workers)]
        copies = 1 if split is not None else workers // axes[0][1]
        whole = contiguous(shape, "float32").numel
        assert sum(pieces) == whole * copies * (1 if lies != use else axes[0][1])
        if lies != use:
            dim, size = lies.placements[0].dim, axes[0][1]
            extents = {local_shape(lies, shape, rank)[dim] for rank in range(workers)}
            assert dim != split and max(extents) == -(-shape[dim] // size)


def test_the_dim_at_rest_is_the_one_of_the_smallest_pieces():
    mesh = Mesh((("dp", 8),), tuple(range(8)))
    assert [zero.rest(replicated(mesh), shape).placements[0] for shape in ((10, 4096), (50257, 768), (5, 3), (1,), ())] == [
        Shard(1), Shard(1), Shard(0), R, R
    ]  # fmt: skip
    assert zero.rest(replicated(mesh), (16, 16)).placements == (Shard(0),)


def test_the_layout_of_memory_follows_from_that_of_its_view():
    mesh = Mesh((("dp", 2),), (0, 1))
    root, turned = contiguous((4, 6), "float32"), contiguous((6, 4), "float32")
    view = type(turned)((6, 4), (1, 6), 0, "float32")
    assert zero.root_of_view(root, view, Layout(mesh, (Shard(0),))).placements == (Shard(1),)
    assert zero.root_of_view(
        contiguous((1, 6), "float32"), contiguous((6,), "float32"), Layout(mesh, (Shard(0),))
    ).placements == (Shard(1),)
    assert zero.root_of_view(contiguous((8, 6), "float32"), root, Layout(mesh, (Shard(0),))) is None


# ---- plans


def step(plan, model, optimizer, micro=1):
    """The plan's lines of a second step."""
    for _ in range(2):
        plan.ask()
        before = len(plan.lines)
        for _ in range(micro):
            model(torch.ones(8, 16).to("remote")).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    plan.ask()
    return plan.lines[before:]


def moves(lines):
    """Collectives of tensors with dims, by kind, with the bytes of each."""
    found: dict[str, list[int]] = {}
    for line in lines:
        kind, _, _ = line.op.partition(" over ")
        if kind in COLLECTIVES and "[]" not in line.spec:
            found.setdefault(kind, []).append(int(line.note.partition(" B")[0]))
    return {kind: sorted(sizes) for kind, sizes in found.items()}


def mlp():
    return nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 16, bias=False)).to("remote")


WEIGHT = 16 * 32 * 4
# stage, micro-batches -> gathers, reductions into pieces, and all-reduces of a gradient: each is one weight's
TRAFFIC = {
    (0, 1): (0, 0, 2), (0, 4): (0, 0, 2),
    (1, 1): (2, 2, 0), (1, 4): (2, 2, 0),
    (2, 1): (2, 2, 0), (2, 4): (2, 8, 0),
    (3, 1): (2, 2, 0),
}  # fmt: skip


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("stage", "micro"), TRAFFIC)
def test_a_step_moves_what_its_stage_says(stage, micro, fused):
    gathers, scatters, reduces = TRAFFIC[stage, micro]
    with planned(f"gt: {{data_parallel: [0, 1], zero: {stage}}}\n", workers=2) as plan:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        counted = moves(step(plan, model, optimizer, micro))
        want = {"all_gather": [WEIGHT] * gathers, "reduce_scatter": [WEIGHT] * scatters, "all_reduce": [WEIGHT] * reduces}
        assert counted == {kind: sizes for kind, sizes in want.items() if sizes}
        rest = "[S(0)] on 0,1" if stage else "[R] on 0,1"
        for p in model.parameters():
            state = [v for v in optimizer.state[p].values() if torch.is_tensor(v) and v.shape == p.shape]
            assert [plan.layout(t) for t in (p, *state)] == [rest] * 3


def test_stage_3_gathers_again_in_backward_what_it_has_freed():
    with planned("gt: {data_parallel: [0, 1], zero: 3}\n", workers=2) as plan:
        model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(6)]).to("remote")
        counted = moves(step(plan, model, torch.optim.SGD(model.parameters(), lr=0.1)))
        # two of six copies are kept from forward to backward, and the first layer's weight has no use in backward
        assert counted == {"all_gather": [1024] * (6 + 3), "reduce_scatter": [1024] * 6}


def test_copies_kept_in_stage_3_are_as_large_as_those_of_the_last_step():
    """The first step of such a model uses fp32 copies, and later ones only bf16 casts."""
    with planned("gt: {data_parallel: [0, 1], zero: 3, precision: bf16}\n", workers=2) as plan:
        model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(6)]).to("remote")
        for layer in model:
            with torch.no_grad():
                layer.weight @ layer.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(plan, model, optimizer)
        assert moves(step(plan, model, optimizer))["all_gather"] == [512] * (6 + 3)


class Normed(nn.Module):
    """Layers whose input is used again in backward, scaled by a small weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(64) for _ in range(4)])
        self.layers = nn.ModuleList([nn.Linear(64, 128, bias=False) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale, layer in zip(self.scales, self.layers, strict=True):
            x = x + layer(x * scale)[:, :64]
        return x


def test_stage_3_gathers_small_weights_once_a_step():
    with planned("gt: {data_parallel: [0, 1], zero: 3}\n", workers=2) as plan:
        model = Normed().to("remote")
        for _ in range(2):
            plan.ask()
            before = len(plan.lines)
            model(torch.ones(8, 64).to("remote")).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        plan.ask()
        gathers = moves(plan.lines[before:])["all_gather"]
        assert gathers == [64 * 4] * 4 + [64 * 128 * 4] * (4 + 2)


def test_a_sharded_weight_beside_tensor_parallel_axes():
    config = "".join(f"s{suffix}: {{workers: [[0, 1], [2, 3]]}}\n" for suffix in ("", "_colpar", "_rowpar")) + "gt: {zero: 3}\n"
    with planned(config, workers=4) as plan:
        up, down = nn.Linear(16, 32).to("remote"), nn.Linear(32, 16).to("remote")
        with gt.signal.context("s_colpar"):
            h = F.gelu(up(torch.ones(8, 16).to("remote")))
        with gt.signal.context("s_rowpar"):
            down(h).sum().backward()
        lies = [plan.layout(t).split()[0] for t in (up.weight, up.bias, down.weight, down.bias)]
        assert lies == ["[S(1),S(0)]", "[R,S(0)]", "[S(0),S(1)]", "[S(0),R]"]
        assert plan.layout(up.weight.grad) == plan.layout(up.weight)


def test_views_of_parameters_split_them_along_a_dim_that_the_view_keeps():
    with planned("gt: {data_parallel: [0, 1], zero: 2}\n", workers=2) as plan:
        table = nn.Parameter(torch.zeros(8, 16).to("remote"))
        (torch.randn(5, 16).to("remote") @ table[:5].t()).sum().backward()
        assert plan.layout(table) == "[S(1)] on 0,1" and plan.layout(table.grad) == "[S(1)] on 0,1"


def test_an_average_of_weights_rests_as_they_do():
    with planned("gt: {data_parallel: [0, 1], zero: 2}\n", workers=2) as plan:
        model = mlp()
        step(plan, model, torch.optim.SGD(model.parameters(), lr=0.1))
        average = copy.deepcopy(model)
        plan.ask()
        before = len(plan.lines)
        with torch.no_grad():
            torch._foreach_lerp_([*average.parameters()], [*model.parameters()], 0.1)
        for a, b in zip(average.parameters(), model.parameters(), strict=True):
            assert plan.layout(a) == plan.layout(b) == "[S(0)] on 0,1"
        assert not moves(plan.lines[before:])


def test_buffers_and_frozen_parameters_are_no_data():
    with planned("gt: {data_parallel: [0, 1], zero: 2}\n", workers=2) as plan:
        model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).to("remote")
        model[0].requires_grad_(False)
        model(torch.ones(8, 16).to("remote")).sum().backward()
        lies = [plan.layout(t).split()[0] for t in (model[0].weight, model[1].weight, model[1].running_mean)]
        assert lies == ["[S(0)]", "[S(0)]", "[R]"]


@pytest.mark.parametrize("made", ["before", "in the group"])
def test_weights_made_in_a_group_are_sharded_as_others(made):
    config = "".join(f"s{suffix}: {{workers: [[0, 1], [2, 3]]}}\n" for suffix in ("", "_colpar", "_rowpar")) + "gt: {zero: 2}\n"
    with planned(config, workers=4) as plan:
        with gt.signal.context("s" if made == "in the group" else "none"):
            up, norm = nn.Linear(16, 32, bias=False, device="remote"), nn.LayerNorm(16, device="remote")
            nn.init.orthogonal_(up.weight)
        for _ in range(2):
            with gt.signal.context("s"):
                h = norm(torch.randn(8, 16).to("remote"))
            with gt.signal.context("s_colpar"):
                up(h).sum().backward()
        assert [plan.layout(t).split()[0] for t in (up.weight, norm.weight)] == ["[S(1),S(0)]", "[S(0),R]"]
        assert plan.layout(up.weight.grad) == plan.layout(up.weight)


def test_weights_computed_where_data_is_parallel_rest_in_pieces():
    with planned("gt: {data_parallel: [0, 1], zero: 1}\n", workers=2) as plan:
        layer = nn.Linear(16, 16, device="remote")
        nn.init.orthogonal_(layer.weight)
        layer(torch.randn(8, 16).to("remote")).sum().backward()
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
        assert [plan.layout(t) for t in layer.parameters()] == ["[S(0)] on 0,1"] * 2
