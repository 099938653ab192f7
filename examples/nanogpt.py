"""A character-level GPT in one file: reads a text, trains on it, and writes more of it.

    python examples/nanogpt.py README.md --steps 500
    GT_CONFIG=configs/dp2.yaml python examples/nanogpt.py README.md      # data parallel on two workers
    python examples/nanogpt.py README.md --log runs                      # losses for TensorBoard

The model is plain torch: `--device cpu` or `cuda` runs it without GT.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import gt


@dataclass
class Sizes:
    vocab: int
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128


class Block(nn.Module):
    """Attention and an MLP, each on a normalised copy of the stream that it adds to."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class NanoGPT(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.tokens = nn.Embedding(sizes.vocab, sizes.width)
        self.places = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        self.apply(self.initialise)

    def initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))

    @torch.no_grad()
    def write(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """The tokens, and `count` more, each drawn from the model's distribution."""
        for _ in range(count):
            scores = self(tokens[:, -self.sizes.context :])[:, -1]
            tokens = torch.cat([tokens, torch.multinomial(scores.softmax(-1), 1)], dim=1)
        return tokens


class Text:
    """A text as numbers of characters, the last tenth for validation."""

    def __init__(self, text: str, sizes_context: int) -> None:
        self.alphabet, self.context = sorted(set(text)), sizes_context
        number = {char: n for n, char in enumerate(self.alphabet)}
        numbers = torch.tensor([number[char] for char in text])
        cut = len(numbers) * 9 // 10
        self.parts = {"train": numbers[:cut], "validation": numbers[cut:]}
        if min(map(len, self.parts.values())) <= sizes_context + 1:
            raise SystemExit(f"the text has {len(text)} characters, want more than {10 * (sizes_context + 2)}")

    def batch(self, part: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random stretches of the text, and the same moved by one: what comes next."""
        data = self.parts[part]
        begins = torch.randint(len(data) - self.context - 1, (rows,)).tolist()
        return tuple(torch.stack([data[b + by : b + by + self.context] for b in begins]) for by in (0, 1))  # type: ignore[return-value]

    def read(self, tokens: torch.Tensor) -> str:
        return "".join(self.alphabet[n] for n in tokens.tolist())


def rate(step: int, steps: int, most: float) -> float:
    """A short rise, then half a cosine down to a tenth."""
    rise = max(steps // 20, 1)
    if step < rise:
        return most * (step + 1) / rise
    return most * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - rise) / max(steps - rise, 1))))


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, and return the losses that were printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("text", type=Path, help="any file of text")
    for name, value in (("steps", 200), ("batch", 16), ("context", 64), ("layers", 4), ("heads", 4), ("width", 128)):
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"default: {value}")
    parser.add_argument("--every", type=int, default=20, metavar="N", help="steps between two lines; default: 20")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate; default: 0.001")
    parser.add_argument("--device", default="remote", help="remote (the default), cpu or cuda")
    parser.add_argument("--log", metavar="FOLDER", help="write losses for TensorBoard; needs `pip install tensorboard`")
    args = parser.parse_args(argv)
    if not args.text.is_file():
        parser.error(f"{args.text} is no file")
    if wrong := [name for name, value in vars(args).items() if isinstance(value, int) and value < 1]:
        parser.error(f"--{wrong[0]} is {getattr(args, wrong[0])}, want at least 1")
    if args.width % args.heads:
        parser.error(f"--width {args.width} cannot be split into {args.heads} equal --heads")

    torch.manual_seed(0)
    text = Text(args.text.read_text(), args.context)
    model = NanoGPT(Sizes(len(text.alphabet), args.context, args.layers, args.heads, args.width)).to(args.device)
    group = gt.signal.groups()[:1] if args.device == "remote" else []
    if group:  # with a config, all of the model runs in its first group
        gt.signal.apply(model, {"": group[0]})
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.1)
    writer = None
    if args.log:
        from torch.utils.tensorboard import SummaryWriter  # one line to open,

        writer = SummaryWriter(args.log)

    def loss_of(part: str) -> torch.Tensor:
        x, y = (t.to(args.device) for t in text.batch(part, args.batch))
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    losses, began = [], time.perf_counter()
    for step in range(args.steps):
        for options in optimizer.param_groups:
            options["lr"] = rate(step, args.steps, args.rate)
        loss = loss_of("train")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.every == 0 or step == args.steps - 1:
            with torch.no_grad():
                losses.append(loss_of("validation").item())  # the program waits here, and only here
            speed = (step + 1) * args.batch * args.context / (time.perf_counter() - began)
            print(f"step {step:5d}: loss {loss.item():.3f}, validation {losses[-1]:.3f}, {speed:,.0f} characters/s", flush=True)
            if writer is not None:
                writer.add_scalar("validation loss", losses[-1], step)  # one for each value,
    if writer is not None:
        writer.close()  # and one to end
    start = torch.zeros((1, 1), dtype=torch.long, device=args.device)
    print(text.read(model.write(start, 100)[0].cpu()))
    return losses


if __name__ == "__main__":
    main()
