"""Memory of models and optimizers whose first use of a weight is a copy of it, or that read gradients whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gt
from tests.helpers.serving import settled

WIDTH, LAYERS = 128, 6


class Experts(nn.Module):
    """Weights of all experts in two tensors, which einsum permutes and copies before it multiplies them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) * 0.1) for shape in ((WIDTH, 72), (72, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = torch.einsum("bd,edf->bef", x, self.up).relu()
        return x + torch.einsum("bef,efd,be->bd", each, self.down, self.gate(x).softmax(-1))


class Lion(torch.optim.Optimizer):
    """Its state begins as zeros like the weight, which no gradient shows to be a weight's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            p.sub_(torch.tanh(state["momentum"] * 0.9 + p.grad * 0.1), alpha=0.01)
            state["momentum"].mul_(0.99).add_(p.grad, alpha=0.01)


OPTIMIZERS: dict[str, Callable] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "lion": Lion,
}


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, device: str = "remote") -> list[float]:
    losses = []
    for step in range(3):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def held(workers: int) -> list[int]:
    return [row["live_bytes"] for row in settled()["workers"][:workers]]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_weight_that_is_copied_before_its_use_has_the_memory_of_theory(session: Callable, kind: str, zero: int) -> None:
    torch.manual_seed(0)
    model = Experts()
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    want = trained(model, OPTIMIZERS[kind](model.parameters()), "cpu")
    session(f"gt: {{data_parallel: [0, 1], zero: {zero}}}")
    model.load_state_dict(initial)
    model.zero_grad()
    model.to("remote")
    optimizer = OPTIMIZERS[kind](model.parameters())
    assert trained(model, optimizer) == pytest.approx(want, rel=1e-5, abs=1e-5)
    numbers = sum(p.numel() for p in model.parameters()) * (4 if kind == "adamw" else 3)
    for nbytes in held(2):
        assert nbytes == pytest.approx(4 * numbers / (2 if zero else 1), rel=0.05)
    for p in (model.up, model.down):
        state = [value for value in optimizer.state[p].values() if value.dim()]
        assert len({str(gt.inspect(t)["layout"]) for t in (p, p.grad, *state)}) == 1


@pytest.mark.parametrize("zero", [1, 2])
def test_gradients_that_an_optimizer_reads_whole_are_whole_two_at_a_time(session: Callable, zero: int) -> None:
    """Adafactor multiplies each by a matrix of rows and columns that is whole."""
    session(f"gt: {{data_parallel: [0, 1], zero: {zero}}}")
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to("remote")
    trained(model, torch.optim.Adafactor(model.parameters()))
    weight = 4 * WIDTH * WIDTH
    for nbytes in held(2):
        assert nbytes <= 1.05 * (2 * LAYERS * weight / 2 + 2 * weight)
