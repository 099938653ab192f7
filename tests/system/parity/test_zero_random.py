"""Random models, meshes, optimizers and stages of ZeRO: the losses and first gradients of one process."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gt

STEPS, ROWS, CLOSE = 6, 16, 1e-5


class Block(nn.Module):
    """One of several kinds of layer, around a residual; `up` and `down` may be tensor parallel."""

    def __init__(self, kind: str, width: int, inner: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "mlp":
            self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=inner % 2 == 0)
        elif kind == "conv":
            self.conv = nn.Conv1d(1, 3, 3, padding=1)
        elif kind == "norm":
            self.norm = nn.LayerNorm(width)
        elif kind == "batch norm":
            self.norm = nn.BatchNorm1d(width)
        elif kind == "lora":
            self.base = nn.Linear(width, width).requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, width) * 0.1), nn.Parameter(torch.randn(width, 2) * 0.1)
        elif kind == "weight norm":
            self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        else:
            self.scale, self.unused = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.zeros(3))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.kind == "mlp":
            return h + self.down(F.gelu(self.up(h)))
        if self.kind == "conv":
            return h + self.conv(h[:, None]).mean(1)
        if self.kind in ("norm", "batch norm"):
            return self.norm(h)
        if self.kind == "lora":
            return h + self.base(h) + F.linear(h, self.b @ self.a)
        if self.kind == "weight norm":
            return h + self.linear(h)
        return h * self.scale


class Model(nn.Module):
    """A table, random blocks, and a head that may be tied to the table."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width, words = draw.choice([8, 12, 15]), draw.choice([11, 16, 40])
        kinds = ["mlp", "conv", "norm", "batch norm", "lora", "weight norm", "scale"]
        self.table = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*[Block(draw.choice(kinds), width, draw.choice([9, 16, 24])) for _ in range(4)])
        self.head = nn.Linear(width, words, bias=False)
        if draw.random() < 0.5:
            self.head.weight = self.table.weight
        self.words = words

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks(self.table(words))), (words * 7 + 3) % self.words)


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, eps=1e-3),
    lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, eps=1e-3),
    lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, eps=1e-3),
    lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-3),
    lambda p: torch.optim.Adagrad(p, lr=1e-2),
]  # with an eps that keeps gradients of rounding errors small

TENSOR = {"blocks.*.up": "s_colpar", "blocks.*.down": "s_rowpar", "": "s"}


def config(draw: random.Random) -> tuple[str, bool]:
    """A config, and true if modules are placed by its groups."""
    stage = draw.choice([1, 2, 3])
    if draw.random() < 0.6:
        return f"gt: {{data_parallel: {[*range(draw.choice([2, 3, 4, 8]))]}, zero: {stage}}}", False
    rows = draw.choice(["[[0, 1], [2, 3]]", "[[0, 1, 2], [5, 4, 3]]", "[[0, 1], [2, 3], [4, 5], [6, 7]]"])
    return "\n".join(
        f"s{suffix}: {{workers: {rows}}}" for suffix in ("", "_colpar", "_rowpar")
    ) + f"\ngt: {{zero: {stage}}}", True


def train(draw: random.Random, device: str, grouped: bool) -> tuple[list[float], list]:
    torch.manual_seed(0)
    model = Model(draw).to(device)
    if grouped and device != "cpu":
        names = [name for name, _ in model.named_modules()]
        used = {k: g for k, g in TENSOR.items() if not k or any(name.endswith(k.rpartition(".")[2]) for name in names)}
        gt.signal.apply(model, used)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = draw.choice(OPTIMIZERS)(trained)
    micro, clip, keep = draw.choice([1, 2]), draw.random() < 0.5, draw.random() < 0.5
    batches = torch.randint(0, model.words, (STEPS, ROWS))
    losses, first = [], []
    for batch in batches:
        total = 0.0
        for part in batch.to(device).chunk(micro):
            loss = model(part) / micro
            loss.backward()
            total += float(loss.detach())
        if clip:
            torch.nn.utils.clip_grad_norm_(trained, 0.5)
        first = first or [None if p.grad is None else p.grad.cpu().clone() for p in trained]
        optimizer.step()
        optimizer.zero_grad(set_to_none=keep)
        losses.append(total)
    return losses, first


@pytest.mark.parametrize("seed", range(8))
def test_a_random_program_has_the_numbers_of_one_process(session, seed):
    text, grouped = config(random.Random(seed))
    session(text)
    got, want = (train(random.Random(seed), device, grouped) for device in ("remote", "cpu"))
    assert got[0] == pytest.approx(want[0], abs=CLOSE), text
    norm = sum(float(b.square().sum()) for b in want[1] if b is not None) ** 0.5
    for a, b in zip(got[1], want[1], strict=True):
        assert (a is None) == (b is None)
        # some are zero but for rounding (of a bias before a norm): all gradients together are the measure of those
        assert a is None or float((a - b).norm()) <= CLOSE * max(float(b.norm()), norm / 10), text
