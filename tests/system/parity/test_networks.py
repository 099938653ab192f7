"""Random networks over random meshes: losses, gradients and updated weights are torch's."""

from __future__ import annotations

import contextlib
import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gt
from tests.system.parity.test_programs import CONFIG, GROUPS

C, T = 12, 5
OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-2),  # a large eps, or rounding of tiny gradients decides their sign
    lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-2, fused=True),
    lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-2),
]


class Attend(nn.Module):
    """Self-attention; heads and the way q, k and v are made vary."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.heads, self.way = rng.choice([1, 2, 3, 4]), rng.randrange(3)
        self.qkv, self.out = nn.Linear(C, 3 * C, bias=rng.random() < 0.5), nn.Linear(C, C)
        self.inner = [rng.choice(GROUPS) for _ in range(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length = x.shape[0], x.shape[1]
        with within(self.inner[0]):
            y = self.qkv(x)
        if self.way == 0:
            q, k, v = (t.view(rows, length, self.heads, -1).transpose(1, 2) for t in y.split(C, 2))
        elif self.way == 1:
            q, k, v = y.view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = y.view(rows, length, self.heads, 3, -1).transpose(1, 2).unbind(3)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, C)
        with within(self.inner[1]):
            return self.out(y)


class Mlp(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)
        self.inner = [rng.choice(GROUPS) for _ in range(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with within(self.inner[0]):
            h = F.gelu(self.up(x))
        with within(self.inner[1]):
            return self.down(h)


class Convolve(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.conv = nn.Conv1d(C, C, 3, padding=1, groups=rng.choice([1, 2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Scale(nn.Module):
    """A bare parameter, a matmul with one, and a checkpointed part."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(C, C) / 4), nn.Parameter(torch.ones(C))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(t @ self.weight) * self.gain, x, use_reentrant=False)


class Network(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.embed = nn.Embedding(20, C)
        kinds = [Attend, Mlp, Convolve, Scale, lambda r: nn.LayerNorm(C), lambda r: nn.RMSNorm(C), lambda r: nn.Linear(C, C)]
        self.layers = nn.ModuleList(rng.choice(kinds)(rng) for _ in range(rng.randint(2, 5)))
        self.groups = [rng.choice(GROUPS) for _ in range(len(self.layers) + 2)]
        self.head = nn.Linear(C, 20, bias=False)
        if rng.random() < 0.4:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with within(self.groups[0]):
            h = self.embed(x)
        for layer, group in zip(self.layers, self.groups[1:], strict=False):
            with within(group):
                h = h + layer(h)
        with within(self.groups[-1]):
            return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten(), ignore_index=3)


def within(group: str | None) -> contextlib.AbstractContextManager:
    return gt.signal.context(group) if group else contextlib.nullcontext()


def train(net: Network, seed: int, device: str) -> tuple[list[float], list[torch.Tensor]]:
    rng = random.Random(seed)
    rows, parts, clip = rng.choice([1, 2, 3, 4, 6]), rng.choice([1, 2]), rng.random() < 0.3
    optimizer = rng.choice(OPTIMIZERS)(list(net.parameters()))
    numbers = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(3):
        for _ in range(parts):
            x = torch.randint(20, (rows, T), generator=numbers)
            loss = net(x.to(device), x.roll(1, 1).to(device)) / parts
            loss.backward()
            losses.append(loss.item())
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().cpu() for p in net.parameters()]


def compare(seed: int) -> None:
    torch.manual_seed(seed)
    net = Network(seed)
    want = train(copy.deepcopy(net), seed, "cpu")
    got = train(net.to("remote"), seed, "remote")
    assert got[0] == pytest.approx(want[0], rel=1e-4, abs=1e-5), (seed, net.groups)
    for (name, _), a, b in zip(net.named_parameters(), got[1], want[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"seed {seed}, {n}, {net.groups}: {m}")


FOUND = [256, 317]  # seeds that found something once


@pytest.mark.parametrize("seeds", [range(0, 12), range(12, 24), FOUND])
def test_random_networks_train_as_in_torch(seeds, session):
    session(CONFIG)
    for seed in seeds:
        compare(seed)


NORMS = {
    "1d": ((6, 8), lambda: nn.BatchNorm1d(8)),
    "2d": ((2, 3, 4, 5), lambda: nn.BatchNorm2d(3)),
    "not affine": ((2, 3, 4, 5), lambda: nn.BatchNorm2d(3, affine=False)),
    "no running statistics": ((2, 3, 4, 5), lambda: nn.BatchNorm2d(3, track_running_stats=False)),
    "instance": ((2, 3, 4, 5), lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True)),
    "of nothing": ((0, 3, 4, 4), lambda: nn.BatchNorm2d(3)),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.usefixtures("plain_threads", "one")
def test_batch_norm_has_torchs_bits(kind: str, training: bool) -> None:
    torch.manual_seed(0)
    shape, make = NORMS[kind]
    plain = make().train(training)
    remote, data = copy.deepcopy(plain).to("remote"), torch.randn(shape)
    found = []
    for module, x in ((plain, data.clone()), (remote, data.to("remote"))):
        x.requires_grad_()
        y = module(x)
        (y * y.detach().sin()).sum().backward()
        found.append([t.detach().cpu() for t in (y, x.grad, *[p.grad for p in module.parameters()], *module.buffers())])
    assert all(map(torch.equal, *found))
