"""A program: a training step, its batches, and the modules whose weights are compared at the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class Program:
    """step: gets a batch's tensors on the device, returns a loss. evaluate: tensors or numbers to compare after training."""

    step: Callable[..., Any]
    batches: Sequence[tuple]
    modules: Sequence[nn.Module] = ()
    evaluate: Callable[[], Any] | None = None


def batches(count: int, draw: Callable[[torch.Generator], tuple]) -> list[tuple]:
    """Batches of CPU tensors, drawn with a generator of their own."""
    generator = torch.Generator().manual_seed(7)
    return [draw(generator) for _ in range(count)]


def labelled(count: int = 4, rows: int = 8, features: int = 12, classes: int = 5) -> list[tuple]:
    """Batches of (x, label)."""
    return batches(
        count,
        lambda g: (torch.randn(rows, features, generator=g), torch.randint(classes, (rows,), generator=g)),
    )


def tokens(count: int = 4, rows: int = 4, length: int = 10, vocabulary: int = 40) -> list[tuple]:
    """Batches of (tokens,), none of which is 0."""
    return batches(count, lambda g: (torch.randint(1, vocabulary, (rows, length), generator=g),))


def pictures(count: int = 3, rows: int = 4, size: int = 8, channels: int = 3, classes: int = 5) -> list[tuple]:
    """Batches of (picture, label)."""
    return batches(
        count,
        lambda g: (torch.randn(rows, channels, size, size, generator=g), torch.randint(classes, (rows,), generator=g)),
    )


def mlp(*sizes: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers of these sizes with activations between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def train(loss: torch.Tensor, *optimizers: torch.optim.Optimizer) -> torch.Tensor:
    """One update by a loss."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()
