"""Mini-GPT, written for torch: explicit weights stored [in, out], and a signal group around each part.

The model runs anywhere. With no groups it is a plain torch program; with a config's groups it is split as they say.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import gt

config = {
    "num_layers": 8,
    "hidden_size": 1024,
    "num_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 50257,
    "max_seq_len": 1024,
}

PRESETS = {
    # small enough for eight CPU workers on two cores; bytes are its tokens
    "tiny": {
        "num_layers": 8,
        "hidden_size": 64,
        "num_heads": 8,
        "intermediate_size": 256,
        "vocab_size": 256,
        "max_seq_len": 256,
    },
    "seed": config,
    "512m": {**config, "num_layers": 12, "hidden_size": 1536, "intermediate_size": 6592},
}


class Place(NamedTuple):
    """The signal groups of one layer: its stage, and the stage's column- and row-parallel groups; "" for none."""

    number: int
    stage: str
    colpar: str
    rowpar: str


def places(layers: int, groups: Sequence[str]) -> list[Place]:
    """The groups of each layer; layers are spread evenly over the config's pp_stage0, pp_stage1, ..."""
    stages = [name for name in groups if re.fullmatch(r"pp_stage\d+", name)]
    stages.sort(key=lambda name: int(name.removeprefix("pp_stage")))
    if not stages:
        return [Place(0, "", "", "")] * layers

    def group(name: str, stage: str) -> str:
        return name if name in groups else stage  # a stage on one worker has no tensor-parallel groups

    rows = [Place(n, s, group(f"{s}_colpar", s), group(f"{s}_rowpar", s)) for n, s in enumerate(stages)]
    return [rows[layer * len(stages) // layers] for layer in range(layers)]


def within(group: str) -> contextlib.AbstractContextManager:
    """The signal group as a context; without one, ops run where their inputs are."""
    return gt.signal.context(group) if group else contextlib.nullcontext()


def weight(rows: int, columns: int, std: float = 0.02) -> nn.Parameter:
    """A matrix stored [in, out]."""
    return nn.Parameter(torch.randn(rows, columns) * std)


class Block(nn.Module):
    """One transformer layer: two column-parallel matmuls, two row-parallel ones, and so two all-reduces forward."""

    def __init__(self, config: dict[str, int], place: Place) -> None:
        super().__init__()
        hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_layers"]
        self.heads, self.place = config["num_heads"], place
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        residual = 0.02 / (2 * layers) ** 0.5
        self.qkv_weight, self.qkv_bias = weight(hidden, 3 * hidden), nn.Parameter(torch.zeros(3 * hidden))
        self.out_weight, self.out_bias = weight(hidden, hidden, residual), nn.Parameter(torch.zeros(hidden))
        self.up_weight, self.up_bias = weight(hidden, inner), nn.Parameter(torch.zeros(inner))
        self.down_weight, self.down_bias = weight(inner, hidden, residual), nn.Parameter(torch.zeros(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with within(self.place.stage):
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        with within(self.place.colpar):  # splits output features: each worker has its heads of q, k and v
            qkv = x @ self.qkv_weight + self.qkv_bias
        q, k, v = (part.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2) for part in qkv.split(hidden, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, hidden)
        with within(self.place.rowpar):  # splits input features: the sum over workers is one all-reduce
            return y @ self.out_weight + self.out_bias

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        with within(self.place.colpar):
            x = x @ self.up_weight + self.up_bias
        x = F.gelu(x, approximate="tanh")
        with within(self.place.rowpar):
            return x @ self.down_weight + self.down_bias


class MiniGPT(nn.Module):
    """Token and position embeddings, blocks, a norm and an untied head; forward gives the mean cross-entropy."""

    def __init__(self, config: dict[str, int], groups: Sequence[str] = ()) -> None:
        super().__init__()
        self.config = config
        self.places = places(config["num_layers"], groups)
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        self.token_weight = weight(vocab, hidden)
        self.position_weight = weight(config["max_seq_len"], hidden)
        self.blocks = nn.ModuleList(Block(config, place) for place in self.places)
        self.norm = nn.LayerNorm(hidden)
        self.head_weight = weight(hidden, vocab)

    @property
    def stages(self) -> int:
        return self.places[-1].number + 1

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, length] to [batch, length, vocabulary]."""
        with within(self.places[0].stage):
            x = F.embedding(tokens, self.token_weight) + self.position_weight[: tokens.shape[1]]
        here = self.places[0]
        for block in self.blocks:
            if block.place.number != here.number:
                # names the transfer in plans and logs; it happens when the next stage first uses x
                with within(f"stage{here.number}_to_stage{block.place.number}"):
                    x = x
                here = block.place
            x = block(x)
        with within(here.stage):
            x = self.norm(x)
        with within(here.colpar):  # each worker has scores of its part of the vocabulary, and the loss of these
            return x @ self.head_weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.logits(tokens)
        with within(self.places[-1].stage):
            return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def count(model: nn.Module) -> int:
    """The number of parameters."""
    return sum(p.numel() for p in model.parameters())
