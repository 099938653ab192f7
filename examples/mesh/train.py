"""Training with ZeRO-3 over all workers of a job: `srun gt run examples/mesh/train.py --steps 100`, or under any launcher.

The model, its gradients and AdamW's state are split over the workers of all hosts. SIGTERM saves a checkpoint, and the exit
code is 75, by which deploy/slurm/train.sbatch queues the job again; the next start goes on from the checkpoint.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import gt

AGAIN = 75  # exit code: start again, and go on from the checkpoint
SIZES = {"tiny": (2, 64, 2), "small": (12, 768, 12), "1b": (22, 2048, 16)}  # layers, width, heads
VOCABULARY, CONFIG = 256, {"gt": {"data_parallel": None, "zero": 3}}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.middle = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.before(x)).split(c, dim=2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.middle(x))


class Model(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def batch(step: int, size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that count upwards from random starts, and the same one further: something that can be learned."""
    starts = torch.randint(0, VOCABULARY, (size, 1), generator=torch.Generator().manual_seed(step))
    ids = (starts + torch.arange(length + 1)) % VOCABULARY
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def rate(step: int, args: argparse.Namespace) -> float:
    """Linear warmup, then a cosine."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - args.warmup) / max(args.steps - args.warmup, 1))))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--model", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=12, help="sequences of all workers together")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--checkpoint", type=Path, default=Path("mesh.pt"))
    return parser.parse_args()


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write beside the file and rename, so that a checkpoint is never half of one."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def main() -> int:
    args = arguments()
    gt.connect("env", config=CONFIG)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    torch.manual_seed(0)
    model = Model(*SIZES[args.model], args.length)
    first = 0
    saved = torch.load(args.checkpoint, map_location="cpu") if args.checkpoint.exists() else None
    if saved is not None:
        model.load_state_dict(saved["model"])
    model = model.to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        print(f"resumed at step {first}", flush=True)
    begin = time.perf_counter()
    for step in range(first, args.steps):
        if told:
            save(args.checkpoint, model, optimizer, step)
            print(f"saved at step {step}, to be continued", flush=True)
            return AGAIN
        for group in optimizer.param_groups:
            group["lr"] = rate(step, args)
        ids, targets = (t.to("remote") for t in batch(step, args.batch, args.length))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step + 1 == args.steps:
            took = time.perf_counter() - begin
            print(f"step {step}: loss {loss.item():.5f}, {took / (step + 1 - first) * 1e3:.1f} ms a step", flush=True)
    save(args.checkpoint, model, optimizer, args.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
