"""A small ResNet learns to tell random pictures of three textures apart: python examples/vision.py

Convolutions, batch norm and a scheduler are torch's own. A config with one data-parallel group splits each batch:
GT_CONFIG=configs/dp2.yaml python examples/vision.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

import gt


class Residual(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        same = stride == 1 and inner == outer
        self.short = nn.Identity() if same else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(h)) + self.short(x))


def resnet(classes: int, width: int = 16) -> nn.Sequential:
    stages = [Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)]
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


def pictures(count: int, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with stripes across, stripes down, or none. Returns f32 [count, 3, size, size] and classes i64 [count]."""
    labels = torch.randint(3, (count,))
    waves = torch.sin(torch.arange(size) * 1.5 + 6 * torch.rand(count, 1))
    across, down = waves[:, None, None, :], waves[:, None, :, None]
    mask = labels[:, None, None, None]
    return torch.randn(count, 3, size, size) + torch.where(mask == 0, across, down) * (mask < 2), labels


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and return the share of new pictures that are told right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="default: 60")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="pictures of a step; default: 64")
    parser.add_argument("--device", default="remote", help="remote (the default), cpu or cuda")
    args = parser.parse_args(argv)
    if min(args.steps, args.batch) < 1:
        parser.error("--steps and --batch want at least 1")
    torch.manual_seed(0)
    model = resnet(3).to(args.device)
    group = gt.signal.groups()[:1] if args.device == "remote" else []
    if group:
        gt.signal.apply(model, {"": group[0]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=args.steps)
    for step in range(args.steps):
        x, y = (t.to(args.device) for t in pictures(args.batch))
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step:3d}: loss {loss.item():.3f}", flush=True)
    model.eval()
    with torch.no_grad():
        x, y = pictures(4 * args.batch)
        right = (model(x.to(args.device)).argmax(1).cpu() == y).float().mean().item()
    print(f"right: {right:.0%}")
    return right


if __name__ == "__main__":
    main()
