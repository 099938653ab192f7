"""Captured steps with ops outside of signal groups, on tensors that lie on no worker yet: replays do them, as eager calls do.

Such ops are put off until a grouped op says where; a replay knows only what was executed.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from contextlib import nullcontext
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
    # Where a step makes no backward pass itself, its results would keep their graph, and wait for one
    trains = "grad" in inspect.getsource(ROWS[name])
    with torch.set_grad_enabled(trains):
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
        with torch.no_grad():
            assert torch.equal(run(x).cpu(), step(x.to("remote")).cpu()), n
    assert run._programs[0].replays >= 3


# ---- at random


def drawn(r: random.Random) -> list[tuple[str, str, float, float, int]]:
    """Ops of a step: kind, group, which values it takes, which weight or buffer."""
    return [
        (r.choice(sorted(KINDS)), r.choice(["", "", "stage0", "stage1"]), r.random(), r.random(), r.randrange(3))
        for _ in range(r.randint(3, 10))
    ]


KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "matmul": lambda a, b, w: torch.tanh(a @ w),
    "add": lambda a, b, w: a + b * 0.5,
    "scale": lambda a, b, w: torch.tanh(a * 1.5),
    "transpose": lambda a, b, w: a.t().reshape(2, 8).reshape(4, 4),
    "noise": lambda a, b, w: torch.rand(4, 4, device=a.device),
    "dropout": lambda a, b, w: torch.nn.functional.dropout(a, 0.5),
    "rows": lambda a, b, w: torch.cat([a[:2], b[2:]]),
    "constant": lambda a, b, w: torch.ones(4, 4, device=a.device).tril() * 3,
    "halves": lambda a, b, w: a.chunk(2)[1].repeat(2, 1),
    "count": lambda a, b, w: b,
    "keep": lambda a, b, w: a,
    "row": lambda a, b, w: a,
    "train": lambda a, b, w: a,
}


def stepped(ops: list, weights: list[torch.nn.Parameter], buffers: list[torch.Tensor]) -> Callable:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        values = [x, buffers[0]]
        for kind, group, first, second, place in ops:
            with gt.signal.context(group) if group else nullcontext():
                a, b = values[int(first * len(values))], values[int(second * len(values))]
                weight, buffer = weights[place % 2], buffers[place]
                values.append(KINDS[kind](a, b, weight))
                if kind == "count":
                    buffer.mul_(0.5).add_(1)
                elif kind == "keep":
                    buffer.copy_(torch.tanh(a.detach()))
                elif kind == "row":
                    buffer[1].add_(1)
                elif kind == "train":
                    (a @ weight).square().mean().backward()
                    for leaf in (leaf for leaf in weights if leaf.grad is not None):
                        leaf.detach().sub_(leaf.grad, alpha=0.1)
                        leaf.grad = None
        return [value.detach().clone() for value in values[-2:]]

    return step


@pytest.mark.parametrize("config", [PAIR, DATA], ids=["one worker a stage", "two"])
@pytest.mark.usefixtures("plain_threads")
def test_random_steps_in_and_out_of_groups_have_the_bits_of_eager_calls(config: str, session: Callable) -> None:
    """With eager ops on what they use between the calls."""
    session(config)
    replays = 0
    for seed in range(8):
        ops = drawn(random.Random(seed))

        def run(compiled: bool, ops: list = ops, seed: int = seed) -> tuple[list[torch.Tensor], Any]:
            gt.manual_seed(seed)
            weights, buffers = [square(), square()], [torch.full((4, 4), n / 2, device="remote") for n in range(3)]
            step = stepped(ops, weights, buffers)
            called, found = gt.compile(step) if compiled else step, []
            for n in range(6):
                x = torch.arange(16.0).view(4, 4) / 16 + n
                if n == 4:
                    buffers[1].mul_(1.5)
                    with gt.signal.context("stage1"):
                        found.append((weights[0].detach() @ weights[1].detach()).sum())
                found += called(x if compiled else x.to("remote"))
            return [t.detach().cpu() for t in (*found, *weights, *buffers)], called

        want, _ = run(False)
        got, called = run(True)
        replays += sum(program.replays for program in called._programs)
        for n, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a, b), f"seed {seed}, value {n}: {ops}\n{called.explain()}"
    assert replays >= 20
