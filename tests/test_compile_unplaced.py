"""Captured steps with ops outside of signal groups, on tensors that lie on no worker yet: replays do them, as eager calls do.

Such ops are put off until a grouped op says where; a replay knows only what was carried out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gt

PAIR = "stage0: {workers: [0]}\nstage1: {workers: [1]}\n"
DATA = "stage0: {workers: [0, 1]}\nstage1: {workers: [2, 3]}\n"
CALLS = 7
ROWS: dict[str, Callable[[], Callable]] = {}


def row(make: Callable) -> Callable:
    ROWS[make.__name__] = make
    return make


def square() -> torch.nn.Parameter:
    return torch.nn.Parameter((torch.arange(16.0).view(4, 4) / 16).to("remote"))


@row
def an_argument_is_scaled_before_it_enters_a_stage() -> Callable:
    weight = square()

    def step(x: torch.Tensor) -> torch.Tensor:
        x = (x - 1) / 255
        with gt.signal.context("stage0"):
            return x @ weight

    return step


@row
def an_argument_is_used_in_two_stages_and_returned() -> Callable:
    first, second = square(), square()

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        with gt.signal.context("stage0"):
            a = y @ first
        with gt.signal.context("stage1"):
            b = (y + 1) @ second + a
        return [a, b, y, x * 5]

    return step


@row
def results_that_nothing_has_used() -> Callable:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        made = torch.zeros(4, device="remote") + 3
        made[1] = 2
        return [made, torch.rand(4, device="remote"), made * 2, x.to(torch.float64), torch.randn(3, device="remote") + made[:3]]

    return step


@row
def a_counter_that_nothing_else_reads() -> Callable:
    count, weight = torch.zeros(4, device="remote"), square()

    def step(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        with gt.signal.context("stage1"):
            return x @ weight

    step.left = [count]  # type: ignore[attr-defined]
    return step


@row
def a_counter_that_a_stage_reads() -> Callable:
    count, weight = torch.zeros(4, device="remote"), square()

    def step(x: torch.Tensor) -> torch.Tensor:
        count.mul_(2).add_(1)
        with gt.signal.context("stage1"):
            return x @ weight + count

    step.left = [count]  # type: ignore[attr-defined]
    return step


@row
def a_mask_and_noise() -> Callable:
    weight = square()

    def step(x: torch.Tensor) -> torch.Tensor:
        mask, noise = torch.ones(4, 4, device="remote").tril() * 2, torch.randn(4, 4, device="remote")
        with gt.signal.context("stage0"):
            y = x @ (weight * mask + noise)
        with gt.signal.context("stage1"):
            return torch.nn.functional.dropout(y * 2, 0.5) + noise.sum()

    return step


@row
def no_group_at_all() -> Callable:
    return lambda x: x * 2 + 1


@pytest.mark.parametrize("config", [PAIR, DATA], ids=["one worker a stage", "two"])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("remote", [False, True], ids=["CPU argument", "remote argument"])
@pytest.mark.usefixtures("plain_threads")
def test_every_replay_has_what_an_eager_call_has(name: str, config: str, remote: bool, session: Callable) -> None:
    def run(compiled: bool) -> tuple[list[torch.Tensor], Any]:
        step = ROWS[name]()
        called = gt.compile(step) if compiled else step
        found: list[torch.Tensor] = []
        for n in range(CALLS):
            gt.manual_seed(n)
            x = torch.arange(16.0).view(4, 4) + n
            made = called(x.to("remote") if remote or not compiled else x)
            found += made if isinstance(made, list) else [made]
        return [t.cpu() for t in (*found, *getattr(step, "left", ()))], called

    session(config)
    want, _ = run(False)
    got, called = run(True)
    assert sum(program.replays for program in called._programs) >= 2, called.explain()
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"value {n}: {a} {b}\n{called.explain()}"


@pytest.mark.usefixtures("plain_threads")
def test_eager_calls_beside_a_program_have_copies_of_their_own(session: Callable) -> None:
    """A weight of one stage that another uses is copied there in each, and a replay ends its copy."""
    session(PAIR)
    weight = square()
    with gt.signal.context("stage0"):
        weight @ weight

    def step(x: torch.Tensor) -> torch.Tensor:
        with gt.signal.context("stage1"):
            return x @ weight

    run = gt.compile(step)
    for n in range(CALLS):
        x = torch.ones(2, 4) * n
        assert torch.equal(run(x).cpu(), step(x.to("remote")).cpu()), n
    assert run._programs[0].replays >= 3
