"""Gradients that a captured step does not make: of layers that it leaves out, and of parameters that are frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gt

pytestmark = pytest.mark.usefixtures("one", "plain_threads")
CALLS = 14


def batches(device: str) -> Iterator[torch.Tensor]:
    for n in range(CALLS):
        yield torch.linspace(-1, 1 + n, 12).reshape(4, 3).to(device)


def pair(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)


def layers_in_turns(device: str, wrap: Callable) -> Any:
    """Each call makes gradients of one layer; the other's stay those of its last call."""
    layers = pair(device)

    def step(x: torch.Tensor, layer: int) -> None:
        layers[layer].zero_grad()
        layers[layer](x).square().mean().backward()

    compiled = wrap(step)
    for n, x in enumerate(batches(device)):
        compiled(x, n // 2 % 2)
        yield compiled, [p.grad for p in layers.parameters()]


def adversaries(device: str, wrap: Callable) -> Any:
    """The generator's gradients are added up over steps of the discriminator, which freezes it."""
    generator, critic = pair(device)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)

    def of_critic(x: torch.Tensor) -> None:
        generator.requires_grad_(False)
        optimizer.zero_grad()
        critic(generator(x)).square().mean().backward()
        optimizer.step()
        generator.requires_grad_(True)

    def of_generator(x: torch.Tensor) -> None:
        critic(generator(x)).mean().backward(inputs=list(generator.parameters()))

    steps = wrap(of_critic), wrap(of_generator)
    for n, x in enumerate(batches(device)):
        steps[1](x)
        steps[0](x)
        if n % 4 == 3:
            generator.zero_grad()
        yield steps[0], [p.grad for p in (*generator.parameters(), *critic.parameters()) if p.grad is not None]


def frozen_by_turns(device: str, wrap: Callable) -> Any:
    """zero_grad() drops the gradient of a layer that is frozen by now; a step outside must not find an old one."""
    layers = pair(device)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        layers[1](layers[0](x)).square().mean().backward()

    compiled = wrap(step)
    for n, x in enumerate(batches(device)):
        layers[0].requires_grad_(n % 4 < 2)
        compiled(x)
        optimizer.step()
        yield compiled, [layers[0].weight.grad is None, *(p.detach() for p in layers.parameters())]


def frozen_with_a_gradient(device: str, wrap: Callable) -> Any:
    """Torch's optimizers step a frozen parameter while it has a gradient."""
    layers = pair(device)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        layers[1](layers[0](x)).square().mean().backward()
        optimizer.step()
        layers[1].zero_grad()

    compiled = wrap(step)
    for n, x in enumerate(batches(device)):
        if n == 4:
            layers[0].requires_grad_(False)
        if n == 9:
            layers[0].zero_grad()
        compiled(x / 20)
        yield compiled, [p.detach() for p in layers.parameters()]


PROGRAMS = (layers_in_turns, adversaries, frozen_by_turns, frozen_with_a_gradient)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_they_are_those_of_plain_torch(program: Callable) -> None:
    wanted = [values for _, values in copied(program("cpu", lambda step: step))]
    got = list(copied(program("remote", gt.compile)))
    torch.testing.assert_close([values for _, values in got], wanted, rtol=1e-5, atol=1e-6)
    assert got[0][0]._programs or "in parts" in got[0][0].explain(), got[0][0].explain()


def copied(rows: Iterator[tuple[Any, list]]) -> Iterator[tuple[Any, list]]:
    for step, values in rows:
        yield step, [value.cpu().clone() if isinstance(value, torch.Tensor) else value for value in values]
