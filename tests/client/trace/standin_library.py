"""A library of ops as another package has them, registered with torch on import. A worker imports it if its owner says so."""

from __future__ import annotations

import os

import torch
from torch import Tensor


@torch.library.custom_op("standin::scaled", mutates_args=())
def scaled(x: Tensor, by: float) -> Tensor:
    """An op with a formula for autograd."""
    return x * by


scaled.register_fake(lambda x, by: torch.empty_like(x))
scaled.register_autograd(
    lambda ctx, grad: (scaled(grad, ctx.by), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
)


@torch.library.custom_op("standin::process", mutates_args=())
def process(x: Tensor) -> Tensor:
    """The process that executes the op."""
    return torch.full_like(x, os.getpid(), dtype=torch.int64)


process.register_fake(lambda x: torch.empty_like(x, dtype=torch.int64))


@torch.library.custom_op("standin::keep", mutates_args=())
def keep(boxes: Tensor, scores: Tensor, limit: float) -> Tensor:
    """An op whose result's shape depends on values, as that of nms."""
    return boxes[scores > limit]


@keep.register_fake
def _(boxes: Tensor, scores: Tensor, limit: float) -> Tensor:
    return boxes.new_empty(torch.library.get_ctx().new_dynamic_size(), *boxes.shape[1:])


@torch.library.custom_op("standin::halves", mutates_args=())
def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """An op without a rule for shapes."""
    return x[: len(x) // 2].clone(), x[len(x) // 2 :].clone()


@torch.library.custom_op("standin::bump_", mutates_args=("x",))
def bump_(x: Tensor, by: list[Tensor]) -> None:
    """An op that writes its argument and returns nothing."""
    for step in by:
        x += step


@torch.library.custom_op("standin::largest", mutates_args=())
def largest(x: Tensor) -> float:
    """An op that returns a number, which no worker can."""
    return float(x.max())


largest.register_fake(lambda x: 0.0)
_more = torch.library.Library("standin", "FRAGMENT")
_more.define("nowhere(Tensor x) -> Tensor")
_more.define("shifted(Tensor x, Device device) -> Tensor")
_more.impl("shifted", lambda x, device: (x + 1).to(device), "CompositeExplicitAutograd")
