"""Networks with trees, memories, volumes, complex weights and tensor trains, and one that is trained without gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from tests.programs.program import Program, batches, labelled, mlp, train


class _TreeCells(nn.Module):
    """An LSTM along trees: pairs of pairs, whose leaves are places in a row of tokens."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words, self.gates, self.out = nn.Embedding(20, width), nn.Linear(2 * width, 3 * width), nn.Linear(width, 3)
        self.forget = nn.Linear(width, width)

    def node(self, tree: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(tree, int):
            leaf = self.words(tokens[tree])
            return leaf, torch.zeros_like(leaf)
        (left, left_cell), (right, right_cell) = (self.node(branch, tokens) for branch in tree)
        into, out, update = self.gates(torch.cat([left, right])).chunk(3)
        kept = self.forget(left).sigmoid() * left_cell + self.forget(right).sigmoid() * right_cell
        cell = into.sigmoid() * update.tanh() + kept
        return out.sigmoid() * cell.tanh(), cell


def parse_trees(device: str) -> Program:
    model = _TreeCells().to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    trees = (((0, 1), (2, 3)), (0, (1, (2, 3))), (((0, 1), 2), 3), (0, 1))

    def step(tokens, label):
        roots = [model.node(tree, row)[0] for tree, row in zip(trees, tokens, strict=True)]
        return train(F.cross_entropy(model.out(torch.stack(roots)), label), optimizer)

    return Program(
        step, batches(3, lambda g: (torch.randint(20, (4, 4), generator=g), torch.randint(3, (4,), generator=g))), [model]
    )


class _MemoryMachine(nn.Module):
    """A neural Turing machine: its controller addresses rows of a memory by content and by shifts, writes and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(4 + 6, 16), nn.Linear(16 + 6, 4)
        self.key, self.erase, self.add = (nn.Linear(16, 6) for _ in range(3))
        self.sharpness, self.gate, self.shift = nn.Linear(16, 1), nn.Linear(16, 1), nn.Linear(16, 3)
        self.register_buffer("start", torch.full((5, 6), 0.01))

    def address(self, state: torch.Tensor, memory: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        likeness = F.cosine_similarity(memory, self.key(state)[:, None], dim=-1)
        gate = self.gate(state).sigmoid()
        weight = gate * F.softmax(F.softplus(self.sharpness(state)) * likeness, -1) + (1 - gate) * before
        shift = self.shift(state).softmax(-1)
        weight = sum(shift[:, i : i + 1] * torch.roll(weight, i - 1, 1) for i in range(3)) ** 2
        return weight / (weight.sum(1, keepdim=True) + 1e-8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.start.expand(x.shape[1], -1, -1).clone()
        weight = torch.zeros(x.shape[1], 5, device=x.device)
        weight[:, 0] = 1
        read, state, outputs = torch.zeros(x.shape[1], 6, device=x.device), None, []
        for part in x:
            state = self.cell(torch.cat([part, read], 1), state)
            weight = self.address(state[0], memory, weight)
            memory = memory * (1 - weight[..., None] * self.erase(state[0]).sigmoid()[:, None])
            memory = memory + weight[..., None] * self.add(state[0])[:, None]
            read = torch.einsum("bn,bnd->bd", weight, memory)
            outputs.append(self.out(torch.cat([state[0], read], 1)))
        return torch.stack(outputs)


def memory_machine(device: str) -> Program:
    model = _MemoryMachine().to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, centered=True)

    def step(x):
        return train(F.binary_cross_entropy_with_logits(model(x), x.roll(1, 0)), optimizer)

    return Program(step, batches(3, lambda g: ((torch.rand(3, 4, 4, generator=g) < 0.5).float(),)), [model])


def volumes(device: str) -> Program:
    """Convolutions of three dims down and transposed up, grouped and normalised, with a loss of overlaps."""
    model = nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1, bias=False), nn.BatchNorm3d(4), nn.ReLU(inplace=True), nn.MaxPool3d((1, 2, 2)),
        nn.Conv3d(4, 8, (3, 1, 1), padding=(1, 0, 0), groups=2), nn.GroupNorm(2, 8), nn.SiLU(),
        nn.ConvTranspose3d(8, 2, (1, 2, 2), stride=(1, 2, 2)),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def step(x, label):
        scores = model(x)
        wanted = F.one_hot(label, 2).movedim(-1, 1).float()
        shared = (scores.softmax(1) * wanted).sum((2, 3, 4))
        overlap = (2 * shared + 1) / (scores.softmax(1).sum((2, 3, 4)) + wanted.sum((2, 3, 4)) + 1)
        return train(F.cross_entropy(scores, label) + 1 - overlap.mean(), optimizer)

    shape = (4, 3, 6, 6)
    return Program(
        step, batches(3, lambda g: (torch.randn(4, 2, *shape[1:], generator=g), torch.randint(2, shape, generator=g))), [model]
    )


class _ComplexLayer(nn.Module):
    """Complex weights, and an activation that leaves phases as they are."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, dtype=torch.complex64) * 0.2)
        self.threshold = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = x @ self.weight.T
        return z * F.relu(z.abs() + self.threshold) / (z.abs() + 1e-6)


def complex_layers(device: str) -> Program:
    model = nn.Sequential(_ComplexLayer(12, 8), _ComplexLayer(8, 5)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x, label):
        return train(F.cross_entropy(model(torch.fft.fft(x, norm="ortho")).abs(), label), optimizer)

    return Program(step, labelled(3), [model])


def tensor_train(device: str) -> Program:
    """A classifier whose weights are a train of tensors, contracted from the left for each row, and as a whole."""
    cores = nn.ParameterList(torch.randn(*sizes) * 0.5 for sizes in ((1, 2, 3), (3, 2, 3), (3, 2, 3), (3, 2, 5))).to(device)
    optimizer = torch.optim.Adam(cores.parameters(), lr=1e-2)

    def step(x, label):
        angles = x[:, : len(cores)] * math.pi / 2
        features = torch.stack([angles.cos(), angles.sin()], -1)
        row = torch.einsum("bi,aic->bc", features[:, 0], cores[0])
        for n, core in enumerate(cores[1:], 1):
            row = torch.einsum("bc,bi,cid->bd", row, features[:, n], core)
        size = torch.einsum("aib,bjc,ckd,dle->ijkle", *cores).square().sum()
        return train(F.cross_entropy(row, label) + 1e-3 * size, optimizer)

    return Program(step, labelled(3), [cores])


def evolution(device: str) -> Program:
    """Weights move along random directions by the ranks of their losses, all of which one vmap computes."""
    model = mlp(12, 8, 5).to(device).requires_grad_(False)
    sizes = {name: p.shape for name, p in model.named_parameters()}
    total = sum(shape.numel() for shape in sizes.values())

    def step(x, label, noise):
        def fitness(flat):
            parts = flat.split([shape.numel() for shape in sizes.values()])
            weights = {name: part.view(shape) for (name, shape), part in zip(sizes.items(), parts, strict=True)}
            return F.cross_entropy(functional_call(model, weights, (x,)), label)

        flat = nn.utils.parameters_to_vector(model.parameters())
        losses = vmap(fitness)(flat + 0.1 * noise)
        ranks = losses.argsort().argsort().float()
        gains = 0.5 - ranks / (len(losses) - 1)
        nn.utils.vector_to_parameters(flat + 5 * (gains[:, None] * noise).mean(0), model.parameters())
        return losses.mean()

    noises = batches(3, lambda g: (torch.randn(6, total, generator=g),))
    return Program(step, [(*batch, *noise) for batch, noise in zip(labelled(3), noises, strict=True)], [model])


PROGRAMS = (parse_trees, memory_machine, volumes, complex_layers, tensor_train, evolution)
