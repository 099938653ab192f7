"""Random pipelines: layers, data, tensor and pipeline parallel workers, an optimizer, and a way to capture the step."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gt
from gt.ir.instr import BACKENDS
from gt.ir.schedules import NAMES
from tests.system.parity.test_networks import OPTIMIZERS, C, T, within
from tools.placements import Split, groups

WORDS = 20
SPLITS = [Split(dp, tp, pp) for pp in (1, 2, 2, 3, 4) for dp in (1, 1, 2) for tp in (1, 1, 2) if dp * tp * pp <= 8]
PARTS, CALLS = (1, 2, 3, 4), 4
CAPTURED = [OPTIMIZERS[n] for n in (0, 0, 1, 3, 3, 3, 2)]  # the last counts its steps on the host, and no replay does that


def yaml(rng: random.Random, asked: str) -> str:
    """Groups of a split. Schedules of several stages a worker mostly get these, in turn or there and back."""
    if asked in ("interleaved", "zb-v") and rng.random() < 0.8:
        workers = list(range(rng.choice((2, 2, 3))))
        stages = workers + (workers if asked == "interleaved" else workers[::-1])
        return "".join(f"pp_stage{n}: {{workers: [{w}]}}\n" for n, w in enumerate(stages))
    return "".join(f"{name}: {{workers: {workers}}}\n" for name, workers in groups(rng.choice(SPLITS)))


class Block(nn.Module):
    """One of several kinds of layer, in the groups of its stage where these are."""

    def __init__(self, kind: str, stage: str) -> None:
        super().__init__()
        self.kind, self.stage = kind, stage
        self.norm = nn.LayerNorm(C)
        self.up, self.down = nn.Linear(C, 3 * C if kind == "attend" else 2 * C), nn.Linear(C if kind == "attend" else 2 * C, C)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        names = gt.signal.groups()

        def part(suffix: str) -> contextlib.AbstractContextManager:
            return within(self.stage + suffix if self.stage + suffix in names else None)

        with within(self.stage):
            h = self.norm(x)
            with part("_colpar"):
                h = self.up(h)
            if self.kind == "attend":
                q, k, v = (t.view(*x.shape[:2], 4, -1).transpose(1, 2) for t in h.split(C, -1))
                h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
            else:
                h = F.dropout(F.gelu(h), 0.1) if self.kind == "dropout" else F.gelu(h)
            with part("_rowpar"):
                h = self.down(h)
            return x + h


class Pipeline(nn.Module):
    """An embedding, blocks cut into stages at random, and a head, which may be the embedding."""

    def __init__(self, rng: random.Random, stages: int) -> None:
        super().__init__()
        names = [f"pp_stage{n}" for n in range(stages)]
        counts = [rng.choice((1, 1, 2)) for _ in names]
        self.first, self.last = names[0], names[-1]
        self.embed, self.head = nn.Embedding(WORDS, C), nn.Linear(C, WORDS, bias=False)
        kinds = ("attend", "mlp", "mlp", "dropout")
        self.blocks = nn.ModuleList(
            Block(rng.choice(kinds), name) for name, count in zip(names, counts, strict=True) for _ in range(count)
        )
        if rng.random() < 0.25:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with within(self.first):
            h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        with within(self.last):
            return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def training(seed: int, asked: str, stages: int) -> Callable[[], str]:
    """A few calls of a captured step in the schedule that is asked for ("" for none); what it says of itself."""

    def run() -> str:
        rng = random.Random(f"step {seed}")
        torch.manual_seed(seed)
        model = Pipeline(rng, stages).to("remote")
        optimizer = rng.choice(CAPTURED)(list(model.parameters()))
        parts, clip, none = rng.choice(PARTS), rng.random() < 0.2, rng.random() < 0.7
        backends = [None, None, *BACKENDS, BACKENDS[-1]]
        how: dict[str, Any] = {"backend": rng.choice(backends), "recompute": rng.choice([None, True, False])}

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=none)
            total = torch.zeros((), device=x.device)
            for a, b in gt.microbatches((x, y), parts):
                loss = model(a, b) / parts
                loss.backward()
                total = total + loss.detach()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            return total

        called = gt.compile(step, schedule=asked or None, **how)
        for _ in range(CALLS):
            x = torch.randint(WORDS, (2 * parts, T))
            called(x, x.roll(1, 1)).item()
        return called.explain()

    return run


def pipeline(seed: int) -> tuple[str, Callable[[], str]]:
    """A config and a program for it."""
    rng = random.Random(seed)
    asked = ["", *NAMES, "auto:8KiB"][seed % (len(NAMES) + 2)]
    config = yaml(rng, asked)
    stages = sum(line.partition(":")[0][8:].isdigit() for line in config.splitlines())
    return config, training(seed, asked, stages)
