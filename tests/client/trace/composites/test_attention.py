"""Attention's results on random shapes: the CPU's values and shapes, or an error where the CPU has one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("one")


def call(draw: random.Random) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Arguments of one call; about a third have a fault."""
    lead = [draw.choice([1, 2, 3]) for _ in range(draw.choice([0, 1, 1, 2]))]
    heads, length, keys, width = draw.choice([1, 2, 4]), draw.choice([1, 3, 5]), draw.choice([1, 3, 4]), draw.choice([1, 2, 8])
    own, scores = draw.choice([heads, heads, 1, 2]), (*lead, heads, length, keys)
    q, k = torch.randn(*lead, heads, length, width), torch.randn(*lead, own, keys, width + (draw.random() < 0.1))
    v = torch.randn(*lead, own, keys, draw.choice([width, 3])).to(torch.float64 if draw.random() < 0.05 else torch.float32)
    mask = None
    if draw.random() < 0.5:
        mask = torch.randn([draw.choice([1, size, size]) for size in scores][draw.choice([0, 0, 1]) :])
        mask = mask[..., : draw.choice([2, 9, 9, 9])]
        mask = mask > 0 if draw.random() < 0.4 else mask
    causal = mask is None and draw.random() < 0.3
    return [q, k, v], {"attn_mask": mask, "is_causal": causal, "enable_gqa": draw.random() < 0.4}


def outcome(device: str, given: list[torch.Tensor], named: dict[str, Any]) -> torch.Tensor | None:
    named = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in named.items()}
    try:
        return F.scaled_dot_product_attention(*[tensor.to(device) for tensor in given], **named).cpu()
    except RuntimeError:
        return None


def test_shapes_and_errors_are_the_cpus() -> None:
    draw, refused = random.Random(3), 0
    torch.manual_seed(0)
    for _ in range(300):
        case = call(draw)
        ours, theirs = outcome("remote", *case), outcome("cpu", *case)
        refused += theirs is None
        assert (ours is None) == (theirs is None), case
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert 30 < refused < 200
