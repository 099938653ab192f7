"""Steps whose Python draws a branch, a place or a number: what calls have in common is replayed, with an eager call's bits."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import gt

pytestmark = pytest.mark.usefixtures("one", "plain_threads")
CALLS = 30
Step = Callable[[torch.Tensor], torch.Tensor]


def teacher_forcing(model: nn.Sequential, drawn: random.Random) -> Step:
    """Each next input is the truth or the model's own guess."""

    def step(x: torch.Tensor) -> torch.Tensor:
        loss, row = torch.zeros((), device="remote"), x[0]
        for n in range(1, 4):
            guess = model(row)
            loss = loss + functional.mse_loss(guess, x[n])
            row = x[n] if drawn.random() < 0.5 else guess.tanh()
        return loss

    return step


def pool(model: nn.Sequential, drawn: random.Random) -> Step:
    """An earlier result takes the place of the present one, or does not."""
    earlier: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        made, shown = model(x), []
        for row in made.detach():
            if len(earlier) < 3:
                earlier.append(row)
            elif drawn.random() < 0.5:
                n = drawn.randrange(3)
                row, earlier[n] = earlier[n].clone(), row
            shown.append(row)
        return functional.mse_loss(made, x) + (made * torch.stack(shown)).mean()

    return step


def boxes(model: nn.Sequential, drawn: random.Random) -> Step:
    """A part of drawn place and size is pasted."""

    def step(x: torch.Tensor) -> torch.Tensor:
        start, weight = drawn.randrange(6), drawn.random()
        stop = start + 1 + drawn.randrange(2)
        x = x.clone()
        x[:, start:stop] = x.flip(0)[:, start:stop]
        y = model(x).sin().exp().tanh()
        return functional.mse_loss(y, x) * weight + y.square().mean() * (1 - weight)

    return step


def run(make: Callable[[nn.Sequential, random.Random], Step], wrap: Callable) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to("remote")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss_of = make(model, random.Random(3))

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = wrap(step)
    batches = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)).to("remote")
    losses = [step(batches[n % 3]).cpu() for n in range(CALLS)]
    return [*losses, *(p.detach().cpu() for p in model.parameters())]


@pytest.mark.parametrize(("make", "least"), [(teacher_forcing, 50), (pool, 30), (boxes, 50)])
def test_what_calls_have_in_common_is_carried_by_programs(make: Callable, least: int) -> None:
    compiled = []

    def wrap(step: Callable) -> Callable:
        compiled.append(gt.compile(step))
        return compiled[-1]

    wanted, got = run(make, lambda step: step), run(make, wrap)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    found = re.search(r"of the last call, (\d+)% of the", compiled[0].explain())
    assert found and int(found[1]) >= least, compiled[0].explain()
