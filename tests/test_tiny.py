"""The one to run first, under ten seconds: a worker, a tiny network, and torch's own numbers to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def train(device: str, steps: int = 5) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and final weights of a small network trained on `device`, from a fixed start."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    model, x, y = model.to(device), x.to(device), y.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in model.parameters()]


@pytest.mark.usefixtures("plain_threads", "one")
def test_training_is_torchs_to_the_bit() -> None:
    losses, weights = train("remote")
    wanted_losses, wanted = train("cpu")
    assert losses == wanted_losses and losses[-1] < losses[0]
    for got, want in zip(weights, wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.usefixtures("one")
def test_a_shape_error_is_torchs_own_and_at_once() -> None:
    a = torch.zeros(2, 3, device="remote")
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|same reduction dim"):
        a @ a
    assert (a + 1).sum().item() == 6.0
