"""Tensors from before a call that no argument holds: a function has cached them, or the call uploads them from the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gt

Make = Callable[[str], tuple[Any, Any]]  # device -> a function of the weights and a batch, and what comes before each call


def grid(device: str) -> tuple[Any, Any]:
    """Positions on the device, two results of one cached function."""

    @functools.lru_cache(maxsize=4)
    def positions(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(count, device=device).float(), torch.ones(count, device=device)

    def scores(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        places, ones = positions(3)
        return x * places * w + ones

    return scores, None


def unbounded(device: str) -> tuple[Any, Any]:
    """A cache without a limit is kept in another form."""

    @functools.cache
    def positions(count: int) -> torch.Tensor:
        return torch.arange(count, device=device).float()

    return lambda w, x: x * positions(3) * w, None


def table(device: str, count: int = 5) -> tuple[Any, Any]:
    """An index on the CPU, as vision models make theirs, used in part and whole."""

    @functools.lru_cache(maxsize=4)
    def index(count: int) -> torch.Tensor:
        return torch.arange(count).flip(0) % 3

    return lambda w, x: x * w[index(count)[:3]] + w[index(count).view(-1)].mean(), None


def large_table(device: str) -> tuple[Any, Any]:
    return table(device, 40_000)


def closure(device: str) -> tuple[Any, Any]:
    order, scale = torch.tensor([2, 0, 1]), torch.tensor([1.0, 2.0, 3.0])
    return lambda w, x: x * w[order] * scale.to(x.device), None


def changed_between_calls(device: str) -> tuple[Any, Any]:
    order = torch.tensor([2, 0, 1])
    return lambda w, x: x * w[order], lambda: order.copy_(order.roll(1))


def losses(make: Make, device: str) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    scores, before = make(device)
    weight = torch.nn.Parameter(torch.randn(3).to(device))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = scores(weight, x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = step if device == "cpu" else gt.compile(step)
    found = []
    for _ in range(8):
        if before is not None:
            before()
        found.append(captured(torch.randn(4, 3).to(device)).item())
    return found, captured


@pytest.mark.usefixtures("plain_threads")
@pytest.mark.parametrize("make", [grid, unbounded, table, large_table, closure, changed_between_calls])
def test_a_step_that_reads_such_tensors_is_one_program(make: Make, one: None) -> None:
    found, step = losses(make, "remote")
    torch.testing.assert_close(found, losses(make, "cpu")[0], rtol=1e-6, atol=0)
    assert step.explain().splitlines()[0].endswith(": 1 program"), step.explain()
    assert step._programs[0].replays >= 3, step.explain()


def test_a_cache_that_has_ended_leaves_the_program_its_tensor(one: None) -> None:
    """The function would make an equal one."""

    @functools.lru_cache(maxsize=1)
    def ones(count: int) -> torch.Tensor:
        return torch.ones(count, device="remote")

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + ones(3)

    for _ in range(4):
        step(torch.zeros(3))
    ones(5)  # it holds one
    assert step(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0] and step._programs[0].replays >= 2


def test_a_tensor_that_nothing_names_still_has_python_run(one: None) -> None:
    held = iter([torch.full((3,), float(n), device="remote") for n in range(6)])

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + next(held)

    assert [step(torch.zeros(3))[0].item() for _ in range(6)] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
