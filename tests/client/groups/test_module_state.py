"""Weights and buffers that no group places lie as `zero` says, whatever uses them first; training goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gt

WIDTH = 12
CONFIG = "gt: {{data_parallel: [0, 1], zero: {}}}"


def layouts(tensors: Any) -> set[str]:
    return {str(gt.inspect(t)["layout"]) for t in tensors}


class Latents(nn.Module):
    """A weight as large as the batch, and one as long, whose first uses are with rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gain = nn.Parameter(torch.ones(8, WIDTH)), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.sum(1) * self.gain)[:, None] * (x * self.gain[:, None] + self.table)


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Running(nn.Module):
    """A running mean, which the module's first call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.linear(x - self.mean)


def called_on_the_cpu() -> nn.Module:
    model = Running()
    model(torch.randn(4, WIDTH))
    return model


class Training:
    def __init__(self, make: Callable[[], nn.Module], seed: int, device: str = "remote") -> None:
        torch.manual_seed(seed)
        self.model, self.device = make().to(device), device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-3)

    def losses(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(self.device)
            self.optimizer.zero_grad()
            loss = (self.model(batch) - batch).square().mean()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("make", [Latents, spectral, called_on_the_cpu])
def test_without_zero_weights_and_buffers_lie_whole(session: Callable, make: Callable[[], nn.Module]) -> None:
    want = Training(make, 0, "cpu").losses(range(5))
    session(CONFIG.format(0))
    training = Training(make, 0)
    assert training.losses(range(5)) == pytest.approx(want, rel=1e-5, abs=1e-5)
    sized = [*training.model.parameters(), *[b for b in training.model.buffers() if b.dim()]]
    assert layouts(sized) == {"[R]"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("make", [Latents, spectral, called_on_the_cpu])
def test_training_goes_on_bit_for_bit(session: Callable, tmp_path: Path, make: Callable[[], nn.Module], zero: int) -> None:
    """A load uses a weight first in another way than a step does."""
    session(CONFIG.format(zero))
    first = Training(make, 0)
    first.losses(range(3))
    state = dict(zip(("model", "optimizer"), get_state_dict(first.model, first.optimizer)))
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    want = first.losses(range(3, 8))
    session(CONFIG.format(zero))
    again = Training(make, 9)
    state = dict(zip(("model", "optimizer"), get_state_dict(again.model, again.optimizer)))
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(again.model, again.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert again.losses(range(3, 8)) == want


def test_buffers_that_have_been_on_the_cpu_between_two_steps_lie_whole(session: Callable) -> None:
    session(CONFIG.format(0))
    training = Training(called_on_the_cpu, 0)
    training.losses(range(1))
    training.model.cpu()
    training.model.to("remote")
    training.losses(range(1))
    assert layouts(training.model.buffers()) == {"[R]"}


def test_a_vector_that_an_op_has_written_lies_whole_after_a_use_with_rows(session: Callable) -> None:
    session(CONFIG.format(0))
    model = Latents().to("remote")
    with torch.no_grad():
        model.gain.cumsum_(0)
    model(torch.randn(8, WIDTH).to("remote"))
    assert layouts(model.parameters()) == {"[R]"}
