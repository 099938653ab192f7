"""Models that tests train: a small GPT in plain torch, and the tuning demo's."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

import gt
from tests.helpers import ROOT


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head tied to the token embedding."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4, vocab: int = 64, context: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, parts: int, to_none: bool = True) -> Callable:
    """A step on (inputs, targets) that accumulates gradients over `parts` micro-batches and returns its loss."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=to_none)
        total = torch.zeros((), device="remote")
        for a, b in gt.microbatches((x, y), parts):
            loss = model(a, b) / parts
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    return step


def demo() -> ModuleType:
    """The tuning demo's model.py as a module."""
    spec = importlib.util.spec_from_file_location("demo_model", ROOT / "examples" / "tuning_demo" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mini(groups: Sequence[str], **sizes: int) -> nn.Module:
    """The tuning demo's model, small; `sizes` replace some of the preset's."""
    module = demo()
    return module.MiniGPT({**module.PRESETS["tiny"], "vocab_size": 64, "max_seq_len": 16, **sizes}, groups)
