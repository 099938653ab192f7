"""Rates, momenta and betas that change between calls of a captured step: one program serves them, and numbers stay numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import gt

CALLS = 12
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "steps": lambda o: lr_scheduler.StepLR(o, 5),
    "warm-up": lambda o: lr_scheduler.LambdaLR(o, lambda n: min(1.0, (n + 1) / 6)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
}
SPLIT = """
gt: {zero: %d}
data: {workers: [0, 1]}
"""


def train(device: str, compiled: bool, make: Callable[[Any], torch.optim.Optimizer], schedule: str = "cosine") -> tuple:
    """Losses, rates after each step, and the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    optimizer = make(model)
    scheduler = SCHEDULES[schedule](optimizer)

    def step(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    called = gt.compile(step) if compiled else step
    generator = torch.Generator().manual_seed(1)
    losses, rates = [], []
    for _ in range(CALLS):
        x, label = torch.randn(8, 8, generator=generator), torch.randint(4, (8,), generator=generator)
        losses.append(called(x.to(device), label.to(device)))
        scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
        assert all(group.get("fused") is None or group["fused"] for group in optimizer.param_groups)
    return torch.stack(losses).cpu(), rates, called


def of_two_groups(kind: type, **more: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda model: kind(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}], lr=0.05, **more
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["SGD", "SGD momentum", "AdamW", "Adam fused", "RMSprop", "NAdam"])
def test_one_program_serves_all_rates(name: str, schedule: str, one: None, plain_threads: None) -> None:
    kind = getattr(torch.optim, name.split()[0])
    make = of_two_groups(kind, **{"fused": {"fused": True}, "momentum": {"momentum": 0.9}}.get(name.partition(" ")[2], {}))
    losses, rates, step = train("remote", True, make, schedule)
    wanted, numbers, _ = train("cpu", False, make, schedule)
    torch.testing.assert_close(losses, wanted, rtol=2e-5, atol=2e-5)
    assert rates == numbers
    assert ": 1 program" in step.explain() and "parts" not in step.explain(), step.explain()
    assert step._programs[0].replays >= (4 if schedule == "steps" else 8), step.explain()


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_split_over_workers(zero: int, session: Callable[..., None], plain_threads: None) -> None:
    session(SPLIT % zero)
    make = of_two_groups(torch.optim.AdamW)
    with gt.signal.context("data"):
        losses, _, step = train("remote", True, make)
    torch.testing.assert_close(losses, train("cpu", False, make)[0], rtol=2e-5, atol=2e-5)
    assert ": 1 program" in step.explain() and "parts" not in step.explain(), step.explain()


def test_momentum_of_a_layer_that_is_used_later(one: None, plain_threads: None) -> None:
    def run(device: str, compiled: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).to(device)
        optimizer, used = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, nesterov=True), [1]

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            for layer in model[: used[0]]:
                x = layer(x)
            x.square().mean().backward()
            optimizer.step()

        called = gt.compile(step) if compiled else step
        for n in range(2 * CALLS):
            optimizer.param_groups[0]["lr"] *= 0.9
            used[0] = 1 + (n >= 6)
            called(torch.full((2, 4), 0.1 * n).to(device))
        return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])

    torch.testing.assert_close(run("remote", True), run("cpu", False))


def test_rates_that_the_step_reads_stay_numbers(one: None) -> None:
    weight = torch.ones(4, device="remote", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)

    @gt.compile
    def step() -> tuple:
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
        return weight.detach().sum(), optimizer.param_groups[0]["lr"]

    for n in range(CALLS):
        optimizer.param_groups[0]["lr"] = 0.5 / (n + 1)
        rate = step()[1]
        assert type(rate) is float and rate == 0.5 / (n + 1)


def test_an_optimizer_of_the_user_or_with_sparse_gradients_takes_numbers(one: None) -> None:
    class Scaled(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for group in self.param_groups:
                    assert type(group["lr"]) is float
                    for parameter in group["params"]:
                        parameter -= group["lr"] * parameter.grad

    def run(device: str, compiled: bool, sparse: bool) -> torch.Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(6, 3, sparse=sparse).to(device)
        optimizer = (torch.optim.SGD if sparse else Scaled)(table.parameters(), lr=0.5)

        def step(rows: torch.Tensor) -> None:
            optimizer.zero_grad()
            table(rows).square().sum().backward()
            optimizer.step()

        called = gt.compile(step) if compiled else step
        for n in range(CALLS):
            called(torch.tensor([n % 6, 1, 3]).to(device))
            optimizer.param_groups[0]["lr"] *= 0.9
        return table.weight.detach().cpu()

    for sparse in (False, True):
        torch.testing.assert_close(run("remote", True, sparse), run("cpu", False, sparse))


@pytest.mark.parametrize("how", ["scheduler", "by hand", "in place"])
def test_a_rate_that_the_step_changes_itself(how: str, one: None, plain_threads: None) -> None:
    def run(device: str, compiled: bool) -> torch.Tensor:
        weight = torch.ones(4, device=device, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.5)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9) if how == "scheduler" else None
        held = vars(optimizer)["param_groups"][0]

        def step() -> None:
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            elif how == "by hand" or not isinstance(held["lr"], torch.Tensor):
                held["lr"] = held["lr"] * 0.9
            else:
                held["lr"].mul_(0.9)

        called = gt.compile(step) if compiled else step
        for _ in range(CALLS):
            called()
        return torch.cat([weight.detach().cpu(), torch.tensor([float(held["lr"])])])

    torch.testing.assert_close(run("remote", True), run("cpu", False))


def test_a_failing_step_leaves_the_number(one: None) -> None:
    weight = torch.ones(4, device="remote", requires_grad=True)
    optimizer, fails = torch.optim.SGD([weight], lr=0.5), [False]

    @gt.compile
    def step() -> None:
        weight.square().sum().backward()
        optimizer.step()
        if fails[0]:
            raise ValueError("as asked")

    for n in range(6):
        optimizer.param_groups[0]["lr"] = 0.5 / (n + 1)
        step()
    fails[0] = True
    with pytest.raises(ValueError, match="as asked"):
        step()
    assert optimizer.param_groups[0]["lr"] == 0.5 / 6 and optimizer.param_groups[0]["fused"] is None


def test_a_session_that_follows_has_tensors_of_its_own(session: Callable[..., None]) -> None:
    step, held = gt.compile(lambda: (held["loss"]().backward(), held["optimizer"].step())[0]), {}
    for _ in range(2):
        session()
        weight = torch.ones(4, device="remote", requires_grad=True)
        held["optimizer"], held["loss"] = torch.optim.SGD([weight], lr=0.5), lambda weight=weight: weight.square().sum()
        for n in range(6):
            held["optimizer"].param_groups[0]["lr"] = 0.5 / (n + 2)
            step()
        assert torch.isfinite(weight.detach().cpu()).all()


CYCLED: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "SGD nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD dampened": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, dampening=0.3, maximize=True),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.1),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.05, weight_decay=0.1, amsgrad=True, maximize=True),
    "two groups": lambda m: torch.optim.AdamW(
        [{"params": m[0].parameters(), "betas": (0.8, 0.99)}, {"params": m[2].parameters()}]
    ),
}
Between = Callable[[torch.optim.Optimizer, int], Any]


def cycle(optimizer: torch.optim.Optimizer, n: int) -> None:
    """Other momentum and betas for the next call, set by hand."""
    for group in optimizer.param_groups:
        if "momentum" in group:
            group["momentum"] = 0.95 - 0.01 * n
        else:
            group["betas"] = (0.95 - 0.01 * n, 0.999 - 0.001 * n)


def cycled(device: str, name: str, inside: bool, between: Between | None = None, calls: int = CALLS) -> tuple:
    """Losses, settings after each step, and the step. inside: the step steps the scheduler; between: in place of one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    optimizer = CYCLED[name](model)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * calls) if between is None else None

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if inside and scheduler is not None:
            scheduler.step()
        return loss.detach()

    called, losses, settings = step if device == "cpu" else gt.compile(step), [], []
    generator = torch.Generator().manual_seed(1)
    for n in range(calls):
        losses.append(called(torch.randn(8, 8, generator=generator).to(device)).cpu())
        settings.append([(g["lr"], g.get("momentum"), g.get("betas"), g["fused"], len(g)) for g in optimizer.param_groups])
        if between is not None:
            between(optimizer, n)
        elif not inside and scheduler is not None:
            scheduler.step()
    return torch.stack(losses), settings, called


@pytest.mark.parametrize("how", ["by hand", "scheduler", "scheduler in the step"])
@pytest.mark.parametrize("name", CYCLED)
def test_one_program_serves_all_momenta_and_betas(name: str, how: str, one: None, plain_threads: None) -> None:
    more = cycle if how == "by hand" else None
    losses, settings, step = cycled("remote", name, how.endswith("step"), more)
    wanted, numbers, _ = cycled("cpu", name, how.endswith("step"), more)
    torch.testing.assert_close(losses, wanted, rtol=2e-5, atol=2e-5)
    assert settings == numbers
    assert ": 1 program" in step.explain() and "parts" not in step.explain(), step.explain()
    assert step._programs[0].replays >= 8, step.explain()


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("name", ["SGD nesterov", "AdamW"])
def test_momenta_and_betas_split_over_workers(name: str, zero: int, session: Callable[..., None], plain_threads: None) -> None:
    session(SPLIT % zero)
    with gt.signal.context("data"):
        losses, _, step = cycled("remote", name, True)
    torch.testing.assert_close(losses, cycled("cpu", name, True)[0], rtol=2e-5, atol=2e-5)
    assert ": 1 program" in step.explain() and "parts" not in step.explain(), step.explain()


def test_state_that_is_dropped_and_momentum_that_ends(one: None, plain_threads: None) -> None:
    def between(optimizer: torch.optim.Optimizer, n: int) -> None:
        cycle(optimizer, n)
        if n == 8:
            optimizer.state.clear()
        if n >= 12:
            optimizer.param_groups[0]["momentum"] = 0.0

    losses, settings, _ = cycled("remote", "SGD", False, between, 18)
    wanted, numbers, _ = cycled("cpu", "SGD", False, between, 18)
    torch.testing.assert_close(losses, wanted, rtol=2e-5, atol=2e-5)
    assert settings == numbers


def test_betas_of_a_group_that_the_step_reaches_stay_numbers(one: None) -> None:
    weight = torch.ones(4, device="remote", requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    held = optimizer.param_groups[0]

    @gt.compile
    def step() -> float:
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
        return held["betas"][0]

    for n in range(CALLS):
        cycle(optimizer, n)
        assert step() == held["betas"][0] == 0.95 - 0.01 * n
