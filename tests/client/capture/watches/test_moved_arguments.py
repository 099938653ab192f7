"""CPU tensors that a captured step writes to, or to their copies on the device: the caller's are as in plain torch."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gt

CALLS = 8
PROGRAMS: dict[str, Callable[[Callable], Callable[..., Any]]] = {}

pytestmark = pytest.mark.usefixtures("plain_threads", "one")


def program(make: Callable) -> Callable:
    PROGRAMS[make.__name__] = make
    return make


@program
def noise_on_a_copy(capture: Callable) -> Callable:
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        noisy = x.to("remote")
        noisy.add_(1)
        return (noisy - x.to("remote")).sum()

    return step


@program
def view_of_a_copy(capture: Callable) -> Callable:
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        moved = x.to(device=torch.device("remote"), dtype=torch.float32)
        moved[1:].zero_()
        return moved.sum() + x.to(moved).sum()

    return step


@program
def copy_of_a_view(capture: Callable) -> Callable:
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        part = copy.deepcopy(x[1:]).to("remote") + x[:2].to("remote").add_(1)
        return part.sum() + x.to("remote").sum()

    return step


@program
def argument_and_its_copies(capture: Callable) -> Callable:
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        first = x.to("remote")
        x.mul_(3)
        second = x.to("remote", non_blocking=True)
        second.sub_(1)
        return (first + 2 * second).sum()

    return step


@program
def read_in_the_middle(capture: Callable) -> Callable:
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        x.add_(1)
        moved = x.to("remote")
        moved.mul_(2)
        return moved * float(x.sum())

    return step


@program
def some_calls_write(capture: Callable) -> Callable:
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        moved = x.to("remote")
        if n % 3 == 2:
            moved.relu_()
            x.zero_()
        return moved.sum() + x.to("remote").sum()

    return step


@program
def a_call_that_fails(capture: Callable) -> Callable:
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        x.add_(1)
        if n in (1, 5):
            raise ValueError(n)
        return x.to("remote").sum()

    return step


@program
def captured_within_another(capture: Callable) -> Callable:
    def add(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x.to("remote") * 2

    inner = capture(add)
    return lambda x, n: inner(torch.ones(3)) + inner(x)


def outcome(name: str, capture: Callable = lambda step: step) -> tuple[list, Any]:
    called, found = capture(PROGRAMS[name](capture)), []
    for n in range(CALLS):
        x = torch.arange(4.0)[1:] - n
        try:
            result = called(x, n if name in ("some_calls_write", "a_call_that_fails") else 0).tolist()
        except ValueError:
            result = None
        found.append((result, x.tolist()))
    return found, called


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", PROGRAMS)
def test_arguments_and_their_copies_are_those_of_plain_torch(name: str, mode: Callable) -> None:
    with mode():
        assert outcome(name, gt.compile)[0] == outcome(name)[0]


@pytest.mark.parametrize("name", ["noise_on_a_copy", "view_of_a_copy", "argument_and_its_copies"])
def test_such_steps_are_programs(name: str) -> None:
    _, step = outcome(name, gt.compile)
    assert step._programs[0].replays == CALLS - 2, step.explain()


def test_a_step_that_writes_to_neither_makes_no_copy(caplog: pytest.LogCaptureFixture) -> None:
    step = gt.compile(lambda x: x.to("remote").sum() + x.to("remote").mean())
    with caplog.at_level(logging.WARNING, "gt"):
        assert [step(torch.ones(3) * n).item() for n in range(4)] == [4.0 * n for n in range(4)]
    same = gt.compile(lambda x: x.sum() + x.mean())
    assert [same(torch.ones(3)).item() for n in range(4)] == [4.0] * 4
    assert step._programs[0].replays == 2 and not caplog.records
    assert re.findall(r"\d+ ops", step.explain()) == re.findall(r"\d+ ops", same.explain())


def test_the_cost_of_a_changed_argument_is_told(caplog: pytest.LogCaptureFixture) -> None:
    step = gt.compile(lambda x: x.add_(1).sum())
    with caplog.at_level(logging.WARNING, "gt"):
        step(torch.ones(3))
    assert "argument 0 is a CPU tensor that the function changes" in caplog.text
