"""A small one-stage detector learns to find squares and discs in noise, in torch's own ops: python examples/detection.py

Each cell of the last feature map says what is there and how far the box's sides are (FCOS: Tian et al., 2019). Matching of
cells with boxes and non-maximum suppression are below. With torchvision, Faster R-CNN trains as it is: docs/libraries.md.
A config with one data-parallel group splits each batch: GT_CONFIG=configs/dp2.yaml python examples/detection.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

import gt

CLASSES, SIZE, STRIDE, MOST = 2, 64, 8, 3  # kinds of things; pixels a side; pixels a cell; things in a picture


class Detector(nn.Module):
    """Three halvings of the picture, then scores of the classes, and distances to the four sides in cells."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inner, outer in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            layers += [nn.Conv2d(inner, outer, 3, 2, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.Conv2d(4 * width, 4 * width, 3, 1, 1), nn.ReLU())
        self.scores, self.sides = nn.Conv2d(4 * width, CLASSES, 3, 1, 1), nn.Conv2d(4 * width, 4, 3, 1, 1)
        nn.init.constant_(self.scores.bias, -3.0)  # most cells are empty
        rows = torch.arange(SIZE // STRIDE) * STRIDE + STRIDE // 2
        self.register_buffer("centres", torch.stack(torch.meshgrid(rows, rows, indexing="xy"), -1).reshape(-1, 2).float())

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores f32 [batch, cells, classes] and boxes f32 [batch, cells, 4] in pixels: left, top, right, bottom."""
        features = self.body(pictures)
        scores, sides = (head(features).flatten(2).transpose(1, 2) for head in (self.scores, self.sides))
        near, far = (STRIDE * F.softplus(sides)).chunk(2, -1)
        return scores, torch.cat([self.centres - near, self.centres + far], -1)


def overlap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Intersection over union of boxes [..., 4], elementwise."""
    sides = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0)
    areas = [(box[..., 2:] - box[..., :2]).clamp(min=0).prod(-1) for box in (a, b)]
    shared = sides.prod(-1)
    return shared / (areas[0] + areas[1] - shared).clamp(min=1e-6)


def match(centres: torch.Tensor, boxes: torch.Tensor, classes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The class i64 [batch, cells] of the smallest box around each cell's centre, -1 for none; and those boxes."""
    inside = (centres[:, None] > boxes[:, None, :, :2]) & (centres[:, None] < boxes[:, None, :, 2:])
    inside = inside.all(-1) & (classes >= 0)[:, None]
    areas = (boxes[..., 2:] - boxes[..., :2]).prod(-1)[:, None].expand(inside.shape)
    least, which = torch.where(inside, areas, torch.inf).min(-1)
    wanted = boxes.gather(1, which[..., None].expand(*which.shape, 4))
    return torch.where(least.isinf(), -1, classes.gather(1, which)), wanted


def loss_of(model: Detector, pictures: torch.Tensor, boxes: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Focal loss of the scores and overlap of the boxes, for each cell in a box. Nothing waits for a value."""
    scores, found = model(pictures)
    target, wanted = match(model.centres, boxes, classes)
    positive = target >= 0
    hot = F.one_hot(target.clamp(min=0), CLASSES) * positive[..., None]
    chance = torch.where(hot > 0, scores, -scores).sigmoid()
    focal = -(
        torch.where(hot > 0, 0.25, 0.75) * (1 - chance).square() * F.logsigmoid(torch.where(hot > 0, scores, -scores))
    ).sum()
    missed = ((1 - overlap(found, wanted)) * positive).sum()
    return (focal + missed) / positive.sum().clamp(min=1)


def suppress(boxes: torch.Tensor, scores: torch.Tensor, limit: float = 0.5) -> torch.Tensor:
    """Non-maximum suppression: the indices of boxes [n, 4] that overlap no better one, the best first."""
    order = scores.argsort(descending=True)
    better = torch.triu(overlap(boxes[order, None], boxes[order]) > limit, 1)
    kept = torch.ones_like(order, dtype=torch.bool)
    for n in range(len(order)):
        kept = kept & ~(better[n] & kept[n])  # a box that was removed removes none
    return order[kept]


@torch.no_grad()
def detect(model: Detector, picture: torch.Tensor, least: float = 0.3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Boxes, classes and scores of one picture [3, SIZE, SIZE]."""
    scores, boxes = (part[0] for part in model(picture[None]))
    score, kind = scores.sigmoid().max(-1)
    likely = score > least
    boxes, kind, score = boxes[likely], kind[likely], score[likely]
    kept = suppress(boxes, score)
    return boxes[kept], kind[kept], score[kept]


def pictures(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Noise f32 [count, 3, SIZE, SIZE] with up to MOST things, their boxes [count, MOST, 4] and classes, -1 for none."""
    images, boxes = torch.randn(count, 3, SIZE, SIZE) * 0.3, torch.zeros(count, MOST, 4)
    classes = torch.full((count, MOST), -1)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    for n in range(count):
        for thing in range(int(torch.randint(1, MOST + 1, ()))):
            half, kind = int(torch.randint(6, 13, ())), int(torch.randint(CLASSES, ()))
            across, down = (int(torch.randint(half, SIZE - half, ())) for _ in range(2))
            dx, dy = (x - across).abs(), (y - down).abs()
            images[n, kind, (dx * dx + dy * dy < half * half) if kind else ((dx < half) & (dy < half))] += 1.5
            boxes[n, thing] = torch.tensor([across - half, down - half, across + half, down + half])
            classes[n, thing] = kind
    return images, boxes, classes


def recall(model: Detector, count: int, device: str) -> float:
    """The share of things in new pictures that a detection of their class overlaps by half."""
    model.eval()
    hits = total = 0
    for image, boxes, classes in zip(*pictures(count), strict=True):
        found, kinds, _ = (part.cpu() for part in detect(model, image.to(device)))
        for box, kind in zip(boxes[classes >= 0], classes[classes >= 0], strict=True):
            hits += int(((overlap(found, box) > 0.5) & (kinds == kind)).any())
            total += 1
    return hits / total


def main(argv: Sequence[str] | None = None) -> tuple[list[float], float]:
    """Train, and return the losses and the share of new things that are found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="pictures of a step; default: 16")
    parser.add_argument("--width", type=int, default=16, metavar="N", help="channels of the first layer; default: 16")
    parser.add_argument("--every", type=int, default=20, metavar="N", help="steps between two lines; default: 20")
    parser.add_argument("--device", default="remote", help="remote (the default), cpu or cuda")
    args = parser.parse_args(argv)
    if min(args.steps, args.batch, args.width, args.every) < 1:
        parser.error("--steps, --batch, --width and --every want at least 1")
    torch.manual_seed(0)
    model = Detector(args.width).to(args.device)
    group = gt.signal.groups()[:1] if args.device == "remote" else []
    if group:
        gt.signal.apply(model, {"": group[0]})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(args.steps):
        loss = loss_of(model, *(part.to(args.device) for part in pictures(args.batch)))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step % args.every == 0 or step == args.steps - 1:
            losses.append(loss.item())
            print(f"step {step:3d}: loss {losses[-1]:.3f}", flush=True)
    share = recall(model, 16, args.device)
    print(f"found: {share:.0%}")
    return losses, share


if __name__ == "__main__":
    main()
