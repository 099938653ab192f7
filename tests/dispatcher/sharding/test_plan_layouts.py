"""The effect of each kind of group on each kind of op: the meaning of the YAML, as layouts."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import gt
from tests.helpers.planned import planned

STAGE = """
stage: {shard: {axis: 0, workers: [0, 1]}}
stage_colpar: {shard: {axis: 1, workers: [0, 1]}}
stage_rowpar: {shard: {axis: 0, workers: [0, 1]}}
"""
ALONE = "stage: {shard: {axis: 0, workers: [0, 1]}}\n"
B, C, H = 4, 8, 4


def remote(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to("remote")


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape).to("remote"))


def product(group):
    w = weight(C, C)
    with gt.signal.context(group):
        return remote(B, C) @ w, w


def linear(group):
    m = nn.Linear(C, 2 * C, bias=False).to("remote")
    with gt.signal.context(group):
        return m(remote(B, C)), m.weight


def bias(group):
    m = nn.Linear(C, 2 * C).to("remote")
    with gt.signal.context(group):
        return m(remote(B, C)), m.bias


def embedding(group):
    m = nn.Embedding(256, C).to("remote")
    with gt.signal.context(group):
        return m(torch.randint(0, 256, (B, 6)).to("remote")), m.weight


def layer_norm(group):
    m = nn.LayerNorm(C).to("remote")
    with gt.signal.context(group):
        return m(remote(B, C)), m.weight


def attention(group):
    q = remote(B, H, 6, 2)
    with gt.signal.context(group):
        return F.scaled_dot_product_attention(q, q, q, is_causal=True), q


# (op, config, group) -> layout of the result, layout of the parameter (or of the input that entered)
TABLE = [
    (product, ALONE, "stage", "[S(0)]", "[R]"),
    (product, STAGE, "stage", "[R]", "[R]"),
    (product, STAGE, "stage_colpar", "[S(1)]", "[S(1)]"),
    (product, STAGE, "stage_rowpar", "[P]", "[S(0)]"),
    (linear, ALONE, "stage", "[S(0)]", "[R]"),
    (linear, STAGE, "stage", "[R]", "[R]"),
    (linear, STAGE, "stage_colpar", "[S(1)]", "[S(0)]"),
    (linear, STAGE, "stage_rowpar", "[P]", "[S(1)]"),
    (bias, ALONE, "stage", "[S(0)]", "[R]"),
    (bias, STAGE, "stage", "[R]", "[R]"),
    (bias, STAGE, "stage_colpar", "[S(1)]", "[S(0)]"),
    (bias, STAGE, "stage_rowpar", "[P]", "[R]"),
    (embedding, ALONE, "stage", "[S(0)]", "[R]"),
    (embedding, STAGE, "stage", "[R]", "[R]"),
    (embedding, STAGE, "stage_colpar", "[S(2)]", "[S(1)]"),
    (embedding, STAGE, "stage_rowpar", "[P]", "[S(0)]"),
    (layer_norm, ALONE, "stage", "[S(0)]", "[R]"),
    (layer_norm, STAGE, "stage", "[R]", "[R]"),
    (layer_norm, STAGE, "stage_colpar", "[R]", "[R]"),
    (layer_norm, STAGE, "stage_rowpar", "[R]", "[R]"),
    (attention, ALONE, "stage", "[S(0)]", "[S(0)]"),
    (attention, STAGE, "stage", "[R]", "[R]"),
    (attention, STAGE, "stage_colpar", "[R]", "[R]"),
    (attention, STAGE, "stage_rowpar", "[R]", "[R]"),
]


@pytest.mark.parametrize(("run", "config", "group", "result", "parameter"), TABLE)
def test_the_layout_that_a_group_gives(run, config, group, result, parameter):
    with planned(config, 2) as plan:
        made, held = run(group)
        assert plan.layout(made) == f"{result} on 0,1", plan.text()
        assert plan.layout(held) == f"{parameter} on 0,1", plan.text()


def test_without_a_config_everything_is_on_one_worker():
    with planned("", 4) as plan:
        y = remote(B, C) @ weight(C, C)
        assert plan.layout(y) == "[] on 0"


def test_a_group_that_the_config_lacks_is_the_enclosing_one():
    with planned(STAGE, 2) as plan:
        with gt.signal.context("stage_colpar"), gt.signal.context("nobody_knows_it"):
            y = remote(B, C) @ weight(C, C)
        assert plan.layout(y) == "[S(1)] on 0,1", plan.text()


def test_an_unused_tensor_is_placed_nowhere():
    with planned(STAGE, 2) as plan:
        m = nn.Linear(C, C).to("remote")
        nn.init.zeros_(m.bias)
        made = torch.zeros(3, device="remote").uniform_(-1, 1)
        assert plan.layout(m.weight) == plan.layout(m.bias) == plan.layout(made) == "unplaced"
        assert not plan.text()


def test_an_initialiser_that_is_not_elementwise_runs_whole():
    with planned(STAGE, 2) as plan:
        w = nn.Parameter(torch.empty(C, C, device="remote"))
        nn.init.orthogonal_(w)
        with gt.signal.context("stage_colpar"):
            y = remote(B, C) @ w
        assert plan.layout(y) == "[S(1)] on 0,1", plan.text()


def test_no_worker_is_sent_the_whole_of_a_tensor_that_is_split():
    with planned(STAGE, 2) as plan:
        w = weight(512, 512)  # 1 MiB: the client keeps it, and is asked for the parts
        with gt.signal.context("stage_colpar"):
            plan.layout(remote(4, 512) @ w)
        asked = [need.boxes for need in plan.needs]
        assert asked == [[[[0, 512], [0, 256]]], [[[0, 512], [256, 512]]]], plan.text()


def test_keys_are_put_after_an_empty_cache_where_they_are():
    """An operand of the shape [0] is left out by torch whatever the rank of the others."""
    with planned(STAGE, 2) as plan:
        with gt.signal.context("stage_colpar"):
            keys = (remote(B, C) @ weight(C, C)).view(B, 1, H, 2).transpose(1, 2)
            cache = torch.cat([torch.tensor([], device="remote"), keys], -2)
            along = torch.cat([torch.tensor([], device="remote"), keys], 1)
        assert plan.layout(cache) == "[S(1)] on 0,1", plan.text()
        assert plan.layout(along) == "[R] on 0,1", plan.text()


def test_a_pad_along_another_dim_keeps_the_split():
    with planned(ALONE, 2) as plan:
        with gt.signal.context("stage"):
            x = remote(B, C)
            made = F.pad(x, (0, 1)), F.pad(x, (0, 0, 1, 0)), F.pad(x, (1, 2, 0, 0))
        assert [plan.layout(t) for t in made] == ["[S(0)] on 0,1", "[R] on 0,1", "[S(0)] on 0,1"], plan.text()


def test_what_is_counted_or_is_one_row_is_whole_and_data_is_split():
    """Positions and a mask that is broadcast are read by every worker; rows of a batch are not."""
    with planned(ALONE, 2) as plan:
        with gt.signal.context("stage"):
            counted = torch.arange(C, device="remote") + 1
            mask, rows = remote(1, C) + 1, remote(B, C) + 1
            y = rows + mask + counted
        assert [plan.layout(t) for t in (counted, mask, rows, y)] == ["[R] on 0,1"] * 2 + ["[S(0)] on 0,1"] * 2, plan.text()
        assert not plan.count("all_gather"), plan.text()


def test_a_placed_models_buffers_are_whole_as_its_parameters_are():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(C))

        def forward(self, x):
            return x * self.scale

    with planned(ALONE, 2) as plan:
        m = nn.Sequential(Scaled(), Scaled()).to("remote")
        gt.signal.apply(m, {"0": "stage"})
        for made in (m[0], copy.deepcopy(m[0]), m[0]):
            y = made(remote(B, C))
            assert plan.layout(made.scale) == "[R] on 0,1" and plan.layout(y) == "[S(0)] on 0,1", plan.text()
            m[0].scale = torch.ones(C).to("remote")  # another one
        assert not plan.count("all_gather"), plan.text()
