"""A model that is made inside its signal groups trains as one that is made outside, eagerly and captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gt

CONFIG = """
s: {workers: [0, 1]}
s_colpar: {workers: [0, 1]}
s_rowpar: {workers: [0, 1]}
d: {workers: [2, 3]}
"""
STEPS = 6
context = gt.signal.context


class Model(nn.Module):
    """An embedding, a block with a norm, and a data-parallel head, each made in its group or outside of all."""

    def __init__(self, inside: bool) -> None:
        super().__init__()

        def make(group: str, function: Callable[[], Any]) -> Any:
            with context(group) if inside else contextlib.nullcontext():
                return function()

        gt.manual_seed(3)
        self.table = make("s_rowpar", lambda: nn.Embedding(32, 16, device="remote"))
        self.norm = make("s", lambda: nn.LayerNorm(16, device="remote"))
        self.up = make("s_colpar", lambda: nn.Parameter(torch.randn(16, 64, device="remote") * 0.2))
        self.bias = make("s_colpar", lambda: torch.zeros(64, device="remote", requires_grad=True))
        self.down = make("s_rowpar", lambda: nn.Linear(64, 16, device="remote"))
        make("s_rowpar", lambda: nn.init.normal_(self.down.weight, std=0.1))
        self.head = make("d", lambda: nn.Linear(16, 32, device="remote"))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with context("s_rowpar"):
            x = self.table(tokens)
        with context("s"):
            h = self.norm(x)
        with context("s_colpar"):
            h = torch.relu(h @ self.up + self.bias)
        with context("s_rowpar"):
            x = x + self.down(h)
        with context("d"):
            return self.head(x)


def train(inside: bool, backend: str | None) -> tuple[list[float], list[torch.Tensor], list[str]]:
    model = Model(inside)
    weights = [*model.parameters(), model.bias]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    tokens = torch.randint(32, (STEPS, 8, 5), generator=torch.Generator().manual_seed(0))

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    call = gt.compile(step, backend=backend) if backend else step
    losses = [call(batch.to("remote")).item() for batch in tokens]
    return losses, [w.detach().cpu() for w in weights], [gt.inspect(w)["layout"] for w in weights]


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.usefixtures("plain_threads")
def test_a_model_made_inside_its_groups_trains_as_one_made_outside(session: Callable[..., None], backend: str | None) -> None:
    session(CONFIG)
    losses, weights, layouts = train(False, backend)
    again, inside, inner = train(True, backend)
    assert again == losses and losses[-1] < losses[0]
    assert inner == layouts and {"[S(0)]", "[S(1)]", "[R]"} <= set(layouts)
    for got, want in zip(inside, weights, strict=True):
        assert torch.equal(got, want)
