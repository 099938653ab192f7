"""GPT-2 as a plain nn.Module, and how it is cut into stages; signal groups around its pieces are all that GT needs.

The model runs anywhere: with no groups it is a plain torch program. It knows nothing about files and training.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gt

PAD = 128  # the vocabulary is padded to a multiple of this, which matmuls like
# depth -> (width, heads) of the published sizes; between them, heads of 64 as in those
PUBLISHED = {12: (768, 12), 24: (1024, 16), 36: (1280, 20), 48: (1600, 25)}


@dataclass(frozen=True)
class Config:
    """Sizes of a GPT-2. Tokens are below `vocab`; the embedding has `padded` rows."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 1024
    vocab: int = 50257
    padded: int = 50304

    @property
    def parameters(self) -> int:
        """The number of parameters, without the padding of the vocabulary."""
        c = self.width
        return (self.vocab + self.context) * c + self.layers * (12 * c * c + 13 * c) + 2 * c

    def __post_init__(self) -> None:
        least = min(self.layers, self.heads, self.width, self.context, self.vocab)
        if least < 1 or self.width % self.heads or self.vocab > self.padded:
            raise ValueError(f"no GPT-2 has these sizes: {self}")


def fresh(name: str, vocab: int = 50257) -> Config:
    """The sizes of a name such as `d12`, a model of 12 layers; d2 to d48."""
    depth = int(name[1:]) if re.fullmatch(r"d\d{1,3}", name) else 0
    if not 2 <= depth <= 48:
        raise ValueError(f"-e {name}: want a checkpoint file, or d2 to d48 for a fresh model of so many layers")
    known = [(0, 0), *((d, h) for d, (_, h) in PUBLISHED.items())]
    (d0, h0), (d1, h1) = next((a, b) for a, b in itertools.pairwise(known) if a[0] < depth <= b[0])
    heads = h0 + round((depth - d0) * (h1 - h0) / (d1 - d0))
    return Config(depth, heads, 64 * heads, 1024, vocab, math.ceil(vocab / PAD) * PAD)


def within(group: str) -> contextlib.AbstractContextManager:
    """The signal group as a context; without one, ops run where their inputs are."""
    return gt.signal.context(group) if group else contextlib.nullcontext()


# ---- the pieces


class Embed(nn.Module):
    """Tokens and their positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.padded, config.width)
        self.wpe = nn.Embedding(config.context, config.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.ln1, self.qkv, self.attproj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ln2, self.fc, self.fcproj = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.ln1(x)).split(width, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attproj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class Head(nn.Module):
    """The last norm, and logits by the weight that the head shares with the token embedding."""

    def __init__(self, config: Config, wte: nn.Embedding) -> None:
        super().__init__()
        self.lnf, self.unembed = nn.LayerNorm(config.width), nn.Linear(config.width, config.padded, bias=False)
        self.unembed.weight = wte.weight
        # tokens that are none must not have a share in the softmax; as a bias, that is part of the matmul
        self.register_buffer("nothing", torch.zeros(config.padded) if config.vocab < config.padded else None, persistent=False)

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(self.lnf(x), self.unembed.weight if weight is None else weight, self.nothing)


class GPT2(nn.Module):
    """Made on the meta device: `materialize` and then `initialize`, or load weights into it.

    groups: the signal group of each piece (embedding, every layer, head), or none.
    """

    def __init__(self, config: Config, groups: Sequence[str] = (), device: str = "meta") -> None:
        super().__init__()
        self.config = config
        with torch.device(device):
            self.embed = Embed(config)
            self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.head = Head(config, self.embed.wte)
        self.groups = list(groups) or [""] * (config.layers + 2)

    def pieces(self) -> list[nn.Module]:
        """The pieces in order; each takes the output of the one before it."""
        return [self.embed, *self.h, self.head]

    def logits(self, tokens: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """[batch, length] int64 to [batch, length, padded]. weight: the head's, if not the embedding's."""
        x = tokens
        for piece, group in zip([self.embed, *self.h], self.groups):
            with within(group):
                x = piece(x)
        with within(self.groups[-1]):
            return self.head(x, weight)

    def twin(self) -> torch.Tensor:
        """The embedding's weight as another leaf: the last stage adds up its gradient there, and it is moved once a step."""
        return self.embed.wte.weight.detach().requires_grad_()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """The mean cross-entropy, in fp32: bf16 has too few digits for a mean, but enough for its terms."""
        logits = self.logits(tokens, weight)
        with within(self.groups[-1]):
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            return losses.float().mean()

    def next_token(self, tokens: torch.Tensor, place: torch.Tensor, coin: torch.Tensor) -> torch.Tensor:
        """The token drawn for [place + 1] of tokens [1, length], as [1]: coin in [0, 1) picks it by inverse distribution."""
        logits = self.logits(tokens)
        with within(self.groups[-1]):
            odds = logits[0].index_select(0, place)[0, : self.config.vocab].float().softmax(0).cumsum(0)
            return (odds < coin * odds[-1:]).sum(0, keepdim=True).clamp(max=self.config.vocab - 1)

    def materialize(self, dtype: torch.dtype = torch.float32) -> GPT2:
        """Allocate every parameter on the CPU, and fill in the buffers."""
        self.to(dtype).to_empty(device="cpu")
        if self.head.nothing is not None:
            self.head.nothing.zero_()[self.config.vocab :] = float("-inf")
        return self

    @torch.no_grad()
    def initialize(self, seed: int) -> GPT2:
        """Initial weights as GPT-2's: normal with std 0.02, and 0.02 / sqrt(n) for the n projections into the residual."""
        generator = torch.Generator().manual_seed(seed)
        residual = 0.02 / math.sqrt(2 * self.config.layers)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                p.normal_(0, residual if "proj." in name else 0.02, generator=generator)
            else:
                p.fill_(1 if ".ln" in name and name.endswith("weight") else 0)
        self.embed.wte.weight[self.config.vocab :] = 0
        return self


# ---- stages


TURNING = ("zb-v", "interleaved")  # schedules with two stages on each worker
HEAD = "head_colpar"  # the group of a head that lies over all stages' workers, each with a part of the vocabulary


def cut(model: GPT2, stages: int, batch: int, length: int, split_head: bool = False) -> list[int]:
    """The number of pieces of each stage, by cost: a head on one stage costs more than four layers of GPT-2 124M."""
    example = torch.empty(batch, length, dtype=torch.int64, device="meta")
    pieces = model.pieces()[:-1] if split_head else model.pieces()
    return [stop - start for start, stop in gt.signal.balance(pieces, stages, example)]


def layers_cut(counts: Sequence[int], split_head: bool = False) -> list[int]:
    """The number of pieces of each stage: its layers, the embedding on the first, and on the last a head that is not split."""
    return [n + (k == 0) + (k == len(counts) - 1 and not split_head) for k, n in enumerate(counts)]


def placed(pieces: Sequence[int], split_head: bool = False) -> list[str]:
    """The signal group of each piece."""
    return [f"stage{stage}" for stage, n in enumerate(pieces) for _ in range(n)] + [HEAD] * split_head


def workers_of(stages: int, schedule: str, split_head: bool = False) -> list[int]:
    """The worker of each stage. zb-v places stages in a V, interleaved schedules in turn."""
    name = schedule.partition(":")[0]
    if name not in TURNING or stages == 1:
        return list(range(stages))
    if split_head:
        raise ValueError(f"--split-head: not with --schedule {name}; want auto, zb-h1, 1f1b or gpipe")
    if stages % 2:
        raise ValueError(f"--schedule {name} has two stages on each worker: want an even number of --stages, got {stages}")
    half = stages // 2
    return [*range(half), *(reversed(range(half)) if name == "zb-v" else range(half))]


def yaml(workers: Sequence[int], split_head: bool = False) -> str:
    """The signal groups of stages on these workers, and of a head over all of them."""
    stages = "".join(f"stage{n}: {{shard: {{axis: 0, workers: [{w}]}}}}\n" for n, w in enumerate(workers))
    return stages + f"{HEAD}: {{shard: {{axis: 1, workers: {[*workers]}}}}}\n" * split_head


# ---- memory


def activation_bytes(model: GPT2, batch: int, length: int) -> list[int]:
    """Bytes that autograd keeps of each piece for the backward pass of [batch, length] tokens; nothing is computed."""
    found: list[int] = []
    held: dict[int, torch.Tensor] = {}  # kept, so that no storage's address comes twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            held[storage._cdata] = tensor
            found[-1] += storage.nbytes() // (tensor.itemsize // size if tensor.is_floating_point() else 1)
        return tensor

    size = model.embed.wte.weight.itemsize  # fake modules cannot be converted: what is counted is fp32
    with FakeTensorMode():  # meta tensors would have attention keep all its scores
        twin = GPT2(model.config, device="cpu")
        held.update((p.untyped_storage()._cdata, p) for p in twin.parameters())
        x = torch.empty(batch, length, dtype=torch.int64)
        targets = x.flatten()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            for piece in twin.pieces():
                found.append(0)
                x = piece(x)
            F.cross_entropy(x.flatten(0, 1), targets, reduction="none")
    return found
