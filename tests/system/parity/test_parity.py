"""The answer is torch's: to the bit on one worker, within rounding of sums on eight."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import CONFIGS, longer
from tests.helpers.models import GPT, mini

STEPS = 20
STEPS_OF_EIGHT = 8  # of eight workers: from the second step on each has the same ops
Trained = tuple[list[float], list[torch.Tensor], list[torch.Tensor]]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adamw single": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=False),
}


def train(
    make: Callable[[], nn.Module],
    device: str,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    microbatches: int = 1,
    steps: int = STEPS,
) -> Trained:
    """Losses, first step's gradients, final weights."""
    torch.manual_seed(0)
    model = make()
    data = torch.randint(64, (steps, 8, 17))
    model = model.to(device)
    update = optimizer(model.parameters())
    losses, first = [], []
    for step in range(steps):
        update.zero_grad()
        total = 0.0
        parts = data[step].chunk(microbatches)
        results = [model(p[:, :-1].to(device), p[:, 1:].to(device)) / microbatches for p in parts]
        for result in results:
            result.backward()
            total = total + result.detach()
        losses.append(total.item())
        if step == 0:
            first = [p.grad.cpu().clone() for p in model.parameters()]
        update.step()
    return losses, first, [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("plain_threads", "one")
def test_one_worker_is_torch_to_the_bit(name: str) -> None:
    losses, gradients, weights = train(GPT, "remote", OPTIMIZERS[name])
    wanted = train(GPT, "cpu", OPTIMIZERS[name])
    assert losses == wanted[0]
    for got, want in zip(gradients + weights, wanted[1] + wanted[2], strict=True):
        assert torch.equal(got, want)


@pytest.fixture(scope="module")
def alone() -> Trained:
    """The same training in this process, on plain torch."""
    return train(lambda: mini(()), "cpu", OPTIMIZERS["adamw foreach"], 2, STEPS_OF_EIGHT)


# Each axis alone, teams of more than two workers, and all three at once: other configs are combinations of the same
KEPT = {"one", "dp2", "dp4", "tp2", "tp4", "pp2", "dp2tp2pp2"}


@pytest.mark.slow
@pytest.mark.parametrize("config", longer(sorted(path.stem for path in CONFIGS.glob("*.yaml")), KEPT))
def test_eight_workers_are_torch_within_rounding(config: str, session: Callable[..., None], alone: Trained) -> None:
    import gt

    session(CONFIGS / f"{config}.yaml")
    losses, gradients, _ = train(lambda: mini(gt.signal.groups()), "remote", OPTIMIZERS["adamw foreach"], 2, STEPS_OF_EIGHT)
    assert losses == pytest.approx(alone[0], rel=1e-5)
    for got, want in zip(gradients, alone[1], strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm().clamp(min=1e-6)
    stats = gt.stats()
    assert stats["dispatcher"]["tensor_bytes_relayed"] == 0
    assert any(sum(worker["bytes_sent"].values()) for worker in stats["workers"])
