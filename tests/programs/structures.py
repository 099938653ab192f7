"""Programs whose structure is unusual: routing, hashed grids, sorted splats, a world model, preferences, forward gradients."""

from __future__ import annotations

import copy
import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jvp

from tests.programs.language import Decoder
from tests.programs.program import Program, batches, labelled, mlp, pictures, tokens, train


class Capsules(nn.Module):
    """Convolution, and capsules for five classes that are routed by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3, 2)
        self.votes = nn.Parameter(0.1 * torch.randn(1, 36, 5, 6, 4))

    def forward(self, x):
        inputs = self.convolution(x).view(x.size(0), -1, 4)
        inputs = inputs / (1 + inputs.norm(dim=-1, keepdim=True))
        votes = (self.votes @ inputs[:, :, None, :, None]).squeeze(-1)
        logits = torch.zeros(votes.shape[:3], device=x.device)
        for turn in range(3):
            summed = (logits.softmax(-1).unsqueeze(-1) * votes).sum(1)
            squared = summed.square().sum(-1, keepdim=True)
            out = squared / (1 + squared) * summed / (squared + 1e-8).sqrt()
            if turn < 2:
                logits = logits + (votes.detach() * out.unsqueeze(1)).sum(-1)
        return out.norm(dim=-1)


def capsules(device: str) -> Program:
    """Dynamic routing between capsules, with the margin loss of their lengths."""
    model = Capsules().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x, label):
        length = model(x)
        target = F.one_hot(label, 5).to(length.dtype)
        loss = target * F.relu(0.9 - length) ** 2 + 0.5 * (1 - target) * F.relu(length - 0.1) ** 2
        return train(loss.sum(1).mean(), optimizer)

    return Program(step, pictures(), [model])


def hashed_grid(device: str) -> Program:
    """Instant NGP: corners of cells are hashed into tables by integer ops, and interpolated."""
    tables = nn.ParameterList(nn.Parameter(torch.rand(32, 2)) for _ in range(3)).to(device)
    network = mlp(6, 16, 3, activation=nn.ReLU).to(device)
    optimizer = torch.optim.Adam([*tables.parameters(), *network.parameters()], lr=1e-2, eps=1e-15)
    primes = torch.tensor([1, 2654435761], device=device)

    def features(x, level, table):
        scaled = x * 2 ** (level + 1)
        weight, total = scaled - scaled.floor(), 0
        for corner in itertools.product((0, 1), repeat=2):
            place = ((scaled.floor() + torch.tensor(corner, device=x.device)).long() * primes).unbind(-1)
            parts = [weight[:, k] if side else 1 - weight[:, k] for k, side in enumerate(corner)]
            total = total + table[(place[0] ^ place[1]) % 32] * (parts[0] * parts[1])[:, None]
        return total

    def step(x, colour):
        found = torch.cat([features(x, level, table) for level, table in enumerate(tables)], -1)
        return train(F.huber_loss(network(found), colour), optimizer)

    return Program(
        step, batches(3, lambda g: (torch.rand(16, 2, generator=g), torch.rand(16, 3, generator=g))), [tables, network]
    )


def splats(device: str) -> Program:
    """Gaussian splatting: blobs in order of depth, blended by what those in front of them let through."""
    blobs = nn.ParameterDict({"centre": torch.rand(6, 2), "shape": torch.randn(6, 7)}).to(device)
    optimizer = torch.optim.Adam(blobs.parameters(), lr=1e-2)

    def step(picture):
        order = blobs["shape"][:, 6].detach().argsort()
        centre, shape = blobs["centre"][order], blobs["shape"][order]
        side = torch.linspace(0, 1, 8, device=picture.device)
        pixels = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1).view(-1, 1, 2)
        distance = ((pixels - centre) * shape[:, :2].exp()).square().sum(-1)
        opacity = shape[:, 2].sigmoid() * torch.exp(-10 * distance)
        clear = torch.cumprod(torch.cat([torch.ones_like(opacity[:, :1]), 1 - opacity[:, :-1] + 1e-6], 1), 1)
        return train(F.l1_loss((clear * opacity) @ shape[:, 3:6].sigmoid(), picture.view(-1, 3)), optimizer)

    return Program(step, batches(3, lambda g: (torch.rand(8, 8, 3, generator=g),)), [blobs])


def world_model(device: str) -> Program:
    """A recurrent state space model: prior and posterior states, free bits, and gradients clipped as lists."""
    cell, posterior, prior, decoder = nn.GRUCell(8, 16), nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(24, 4)
    model = nn.ModuleList([cell, posterior, prior, decoder]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def moments(raw):
        mean, spread = raw.chunk(2, -1)
        return mean, F.softplus(spread) + 0.1

    def step(x, noise):
        memory, state, loss = x.new_zeros(4, 16), x.new_zeros(4, 8), 0.0
        for seen, drawn in zip(x.unbind(1), noise.unbind(1)):
            memory = cell(state, memory)
            (mean, spread), (expected, width) = moments(posterior(torch.cat([memory, seen], -1))), moments(prior(memory))
            state = mean + spread * drawn
            divergence = (width / spread).log() + (spread**2 + (mean - expected) ** 2) / (2 * width**2) - 0.5
            loss = loss + F.mse_loss(decoder(torch.cat([memory, state], -1)), seen)
            loss = loss + 0.1 * divergence.sum(-1).clamp(min=0.1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
        optimizer.step()
        return loss.detach()

    draw = batches(3, lambda g: (torch.randn(4, 5, 4, generator=g), torch.randn(4, 5, 8, generator=g)))
    return Program(step, draw, [model])


def preferences(device: str) -> Program:
    """DPO and GRPO: log-probabilities of tokens beside those of a frozen model, and advantages within a group."""
    model = Decoder().to(device)
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def scores(network, ids):
        return network(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    def step(ids):
        score = scores(model, ids)
        with torch.no_grad():
            before = scores(reference, ids)
        better, worse = (score - before).sum(-1).chunk(2)
        reward = (ids[:, 1:] % 7 == 0).float().sum(-1)
        advantage = ((reward - reward.mean()) / (reward.std() + 1e-4))[:, None]
        ratio = (score - score.detach()).exp()
        policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        penalty = ((before - score).exp() - (before - score) - 1).mean()
        return train(policy + 0.04 * penalty - F.logsigmoid(0.1 * (better - worse)).mean(), optimizer)

    return Program(step, tokens(), [model])


def forward_gradients(device: str) -> Program:
    """Weights move along a direction by the derivative in it, which forward differentiation gives."""
    model = mlp(12, 8, 5).to(device)
    directions = {name: torch.full_like(p, 0.1) for name, p in model.named_parameters()}

    def step(x, label):
        weights = {name: p.detach() for name, p in model.named_parameters()}
        loss, slope = jvp(lambda w: F.cross_entropy(functional_call(model, w, (x,)), label), (weights,), (directions,))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.sub_(0.05 * slope * directions[name])
        return loss

    return Program(step, labelled(), [model])


class ObservedRange(nn.Module):
    """Fake quantisation by the range of all that has passed, which buffers hold. Counts its calls and rows for a log."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(float("inf")))
        self.register_buffer("high", torch.tensor(float("-inf")))
        self.calls, self.rows = 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.rows += x.shape[0]
        if self.training:
            self.low.copy_(torch.minimum(self.low, x.detach().min()))
            self.high.copy_(torch.maximum(self.high, x.detach().max()))
        scale = ((self.high - self.low) / 255).clamp(min=1e-8)
        zero_point = (-128 - self.low / scale).round().clamp(-128, 127).int()
        return torch.fake_quantize_per_tensor_affine(x, scale.reshape(1), zero_point.reshape(1), -128, 127)


def observed_ranges(device: str) -> Program:
    """Quantisation-aware training with observers of the program's own, and an optimizer that counts its steps."""
    model = nn.Sequential(ObservedRange(), nn.Linear(12, 16), nn.ReLU6(), ObservedRange(), nn.Linear(16, 5)).to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, lr_decay=0.01)
    return Program(lambda x, y: train(F.cross_entropy(model(x), y), optimizer), labelled(), [model])


PROGRAMS = (capsules, hashed_grid, splats, world_model, preferences, forward_gradients, observed_ranges)
