"""Kinds of calls that alternate: each gets its program, with the bits of the step without gt.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gt

pytestmark = pytest.mark.usefixtures("one", "plain_threads")
CALLS = 24


class Training:
    """A model with a batch norm, and steps that differ by their arguments or by flags."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
        self.model = torch.nn.Sequential(*layers).to("remote")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.average = torch.zeros((), device="remote")

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.model(x), x[:, :4])

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def accumulate(self, n: int, x: torch.Tensor, called: Callable[..., Any]) -> Any:
        return called(x, n % 3 == 2)

    def accumulating(self, x: torch.Tensor, last: bool) -> torch.Tensor:
        loss = self.loss(x) / 3
        loss.backward()
        if last:
            self.update()
        return loss

    def toggle(self, n: int, x: torch.Tensor, called: Callable[..., Any]) -> Any:
        self.model.train(n % 2 == 0)
        return called(x)

    def toggling(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.loss(x)
        if self.model.training:
            loss.backward()
            self.update()
        return loss.detach()

    def log(self, n: int, x: torch.Tensor, called: Callable[..., Any]) -> Any:
        return called(x, n % 8 == 0)

    def logging(self, x: torch.Tensor, log: bool) -> torch.Tensor:
        loss = self.loss(x)
        loss.backward()
        self.update()
        if log:
            NOTED.append(loss.item())
        return loss

    def average_sometimes(self, n: int, x: torch.Tensor, called: Callable[..., Any]) -> Any:
        return called(x, n % 2 == 0)

    def averaging(self, x: torch.Tensor, much: bool) -> torch.Tensor:
        loss = self.loss(x)
        loss.backward()
        self.update()
        self.average = 0.5 * self.average + loss.detach() if much else 0.9 * self.average
        return loss * self.average


NOTED: list[float] = []
PAIRS = {
    "accumulate": Training.accumulating,
    "toggle": Training.toggling,
    "log": Training.logging,
    "average_sometimes": Training.averaging,
}


@pytest.mark.parametrize("name", PAIRS)
def test_kinds_that_alternate_have_their_programs_and_the_bits_of_eager_calls(name: str) -> None:
    outcomes, called = [], None
    for captured in (False, True):
        NOTED.clear()
        training = Training()
        step = getattr(training, PAIRS[name].__name__)
        called = gt.compile(step) if captured else step
        generator = torch.Generator().manual_seed(1)
        losses = []
        for n in range(CALLS):
            losses.append(getattr(training, name)(n, torch.randn(8, 8, generator=generator).to("remote"), called).item())
        weights = [value.detach().cpu() for value in training.model.state_dict().values()]
        outcomes.append((losses, weights, training.average.item(), [*NOTED]))
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=0, atol=0)
    replays = sum(program.replays for program in called._programs)  # type: ignore[union-attr]
    assert replays >= {"accumulate": 10, "toggle": 14, "log": 8, "average_sometimes": 0}[name], called.explain()  # type: ignore[union-attr]


def test_kinds_whose_programs_are_never_replayed_are_recorded_no_more() -> None:
    training = Training()
    called = gt.compile(training.averaging)
    for n in range(CALLS):
        called(torch.full((8, 8), float(n)), n % 2 == 0)
    text = called.explain()
    assert "programs were recorded that no call could replay" in text and "in parts" in text, text


def test_a_number_that_alternates_makes_no_program() -> None:
    weight, factors = torch.ones(4, device="remote"), [1.0]

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return weight * x * next_factor()

    def next_factor() -> float:
        return factors[-1]

    for n in range(12):
        factors[-1] = float(n % 3)
        assert step(torch.ones(4)).tolist() == [float(n % 3)] * 4


def test_calls_that_read_values_have_no_say_on_the_others() -> None:
    weight = torch.ones(4, device="remote")

    @gt.compile
    def step(x: torch.Tensor, read: bool) -> Any:
        weight.add_(x)
        return weight.sum().item() if read else weight * 2

    read = [step(torch.ones(4), n % 6 == 0) for n in range(18)][::6]
    assert read == [8.0, 32.0, 56.0]
    assert step._programs[0].replays == 18 - 3 - 2 and "in parts" in step.explain(), step.explain()  # two were recorded


def test_calls_that_wait_hold_no_copies_of_their_arguments() -> None:
    weight = torch.ones(4, device="remote")
    called = gt.compile(lambda x, flag: (weight * x).sum() if flag == "none" else weight * x + len(flag))
    for n, flag in enumerate(("a", "bb", "ccc", "dddd", "eeeee")):
        called(torch.full((4,), float(n)), flag)
    waiting = called._waiting._calls
    assert waiting and not any(call.inputs or call.whole for call in waiting)
