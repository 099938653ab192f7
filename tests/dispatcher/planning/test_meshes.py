"""Data parallel and mixed meshes: what is reduced when, where backward runs, and numbers that no split changes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gt
from tests.helpers.planned import planned

DATA = "d: {shard: {axis: 0, workers: [0, 1]}}\n"
BACKWARD = """
front: {workers: [0], backward: back}
back: {workers: [1]}
"""
SHARED = """
pp_stage0: {shard: {axis: 0, workers: [0, 1]}}
pp_stage0_colpar: {shard: {axis: 1, workers: [0, 1]}}
pp_stage0_rowpar: {shard: {axis: 0, workers: [0, 1]}}
pp_stage1: {shard: {axis: 0, workers: [1, 2]}}
pp_stage1_colpar: {shard: {axis: 1, workers: [1, 2]}}
pp_stage1_rowpar: {shard: {axis: 0, workers: [1, 2]}}
wide: {shard: {axis: 0, workers: [0, 1, 2, 3]}}
"""


class Net(nn.Module):
    """Two layers in a group each, `_colpar` and `_rowpar` within where the config has them."""

    def __init__(self, groups: tuple[str, str]) -> None:
        super().__init__()
        self.groups = groups
        self.first, self.second, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with gt.signal.context(self.groups[0]):
            h = F.gelu(self.first(x))
        with gt.signal.context(self.groups[1]):
            return self.norm(self.second(h))


def train(net: nn.Module, data: list[torch.Tensor], parts: int = 1) -> list[torch.Tensor]:
    """Weights after a few steps of gradient accumulation."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for batch in data:
        for part in batch.chunk(parts):
            net(part).sin().mean().backward()  # not square: its gradient through the norm is but noise
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in net.parameters()]


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_gradients_of_replicated_parameters_are_reduced_once_a_step(parts):
    with planned(DATA, 2) as plan:
        net = Net(("d", "d")).to("remote")
        optimizer = torch.optim.AdamW(net.parameters())
        data = [torch.randn(4, 8).to("remote") for _ in range(parts)]
        for part in data:
            net(part).sum().backward()
        optimizer.step()
        assert plan.count("all_reduce") == len(list(net.parameters())), plan.text()


def test_backward_runs_where_its_group_says_and_gradients_come_home():
    with planned(BACKWARD, 2) as plan:
        w = nn.Parameter(torch.randn(8, 8).to("remote"))
        with gt.signal.context("front"):
            y = torch.randn(4, 8).to("remote") @ w
        loss = y.square().sum()
        loss.backward()
        optimizer = torch.optim.SGD([w], 0.1)
        optimizer.step()
        assert plan.layout(y) == "[] on 0" and plan.layout(w) == "[] on 0"
        assert plan.layout(w.grad) == "[] on 1"
        assert "front" in next(line.op for line in reversed(plan.lines) if "_to_" in line.op).partition("_to_")[2]


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (DATA, ("d", "d")),
        (BACKWARD, ("front", "back")),
        (SHARED, ("pp_stage0_colpar", "pp_stage0_rowpar")),
        (SHARED, ("pp_stage0_colpar", "pp_stage1_rowpar")),
        (SHARED, ("wide", "pp_stage1")),
        (SHARED, ("pp_stage1", "wide")),
    ],
)
@pytest.mark.parametrize("rows", [4, 7, 1])
def test_training_over_any_meshes_is_training(config, groups, rows, session):
    session(config)
    torch.manual_seed(0)
    data = [torch.randn(rows, 8) for _ in range(4)]
    plain = Net(groups)
    remote = Net(groups)
    remote.load_state_dict(plain.state_dict())
    got = train(remote.to("remote"), [d.to("remote") for d in data], parts=min(2, rows))
    for a, b in zip(got, train(plain, data, parts=min(2, rows)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def draw(group: str) -> list[torch.Tensor]:
    """Random numbers of many kinds, drawn in a group."""
    gt.manual_seed(7)
    made = []
    ones = torch.ones(6, 4, 8, 8)
    with gt.signal.context(group):
        x = ones.to("remote") * 1
        made += [F.dropout(x, 0.5), torch.rand_like(x), torch.randn_like(x), torch.bernoulli(x * 0.3)]
        made.append(x.clone().uniform_(2, 3))
        made.append(F.scaled_dot_product_attention(x, x, x * made[1], dropout_p=0.5))
        made.append(torch.randint_like(x, 10))
    return [t.cpu() for t in made]


def test_random_numbers_do_not_depend_on_the_split(session):
    session(SHARED)
    first = draw("nowhere")
    for group in ("wide", "pp_stage0", "pp_stage1", "wide"):
        for a, b in zip(first, draw(group), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_parameter_made_in_place_has_the_same_numbers_wherever_it_is_split(session):
    session(SHARED)
    made = []
    for group in ("pp_stage0", "pp_stage0_colpar", "pp_stage1_rowpar"):
        torch.manual_seed(3)
        layer = nn.Linear(8, 8, device="remote")
        with gt.signal.context(group):
            layer(torch.ones(2, 8).to("remote"))
        made.append(layer.weight.detach().cpu())
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
    assert made[0].std() > 0.1


BOTH = """
d: {shard: {axis: 0, workers: [0, 1]}}
two: {shard: {axis: 0, workers: [[0, 1], [2, 3]]}}
last: {shard: {axis: 0, workers: [2, 3, 4]}}
"""
LOSSES = {
    "mse": F.mse_loss, "smooth l1": F.smooth_l1_loss, "huber": F.huber_loss, "l1": F.l1_loss,
    "soft margin": lambda a, t, reduction: F.soft_margin_loss(a, t.sign(), reduction=reduction),
    "binary": lambda a, t, reduction: F.binary_cross_entropy(a.sigmoid(), t.sigmoid(), reduction=reduction),
    "weighted binary": lambda a, t, reduction: F.binary_cross_entropy(a.sigmoid(), t.sigmoid(), t.abs(), reduction=reduction),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_over_split_rows_is_the_loss(name, session):
    """Its mean is over all rows, and so is its gradient; across stages too."""
    session(BOTH)
    for reduction, rows, group in itertools.product(("mean", "sum", "none"), (8, 7, 1), ("d", "two", "last")):
        torch.manual_seed(0)
        w, x, y = torch.randn(6, 6), torch.randn(rows, 6), torch.randn(rows, 6)
        found = []
        for device in ("remote", "cpu"):
            leaf = torch.nn.Parameter(w.clone().to(device))
            with gt.signal.context("d" if group != "two" else "two"):
                made = x.to(device) @ leaf
            with gt.signal.context(group):
                loss = LOSSES[name](made, y.to(device), reduction=reduction)
                total = loss if loss.dim() == 0 else (loss * 3).sum()
            total.backward()
            found.append([loss.detach().cpu(), leaf.grad.cpu()])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, c=(reduction, rows, group): f"{c}: {m}")
