"""Gradients and state that a program keeps over replays: they stay what they were, as torch's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gt
from gt.client.capture import gradients

CALLS = 10
Kept = list[torch.Tensor]


class Training:
    """A small training on a device. wrap: what makes a captured step of a function."""

    def __init__(self, device: str, wrap: Callable) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        self.data = [torch.randn(4, 6).to(device) for _ in range(CALLS)]
        self.wrap = wrap
        self.update = wrap(self._update)
        self.steps = [self.update]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()

    def captured(self, step: Callable) -> Callable:
        self.steps.append(self.wrap(step))
        return self.steps[-1]

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> Kept:
        return [p.grad for p in self.parameters if p.grad is not None]


def two_programs(train: Training) -> Any:
    """Backward is one program, the optimizer another."""
    backward = train.captured(lambda x: train.loss(x).backward())
    for x in train.data:
        backward(x)
        yield train.gradients()
        train.update()


def clipped(train: Training) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        train.loss(x).backward()
        return nn.utils.clip_grad_norm_(train.parameters, 0.1, foreach=False)

    backward = train.captured(step)
    for x in train.data:
        yield [backward(x), *train.gradients()]
        train.update()


def one_program(train: Training) -> Any:
    def step(x: torch.Tensor) -> None:
        train.optimizer.zero_grad()
        train.loss(x).backward()
        train.optimizer.step()

    step = train.captured(step)
    for x in train.data:
        step(x)
        yield train.gradients()[1:]  # and one that nobody keeps


def eager_optimizer(train: Training) -> Any:
    backward = train.captured(lambda x: train.loss(x).backward())
    for x in train.data:
        backward(x)
        yield train.gradients()
        train.optimizer.step()
        train.optimizer.zero_grad()


def accumulated(train: Training) -> Any:
    """What is added to is the object that the first of three backward passes made."""
    backward = train.captured(lambda x: train.loss(x).backward())
    for n, x in enumerate([*train.data, *train.data]):
        backward(x)
        if n % 3 == 0:
            yield train.gradients()
        if n % 3 == 2:
            train.update()


def zeroed(train: Training) -> Any:
    """Set to zero and not to None, a gradient is the same object for ever."""
    backward = train.captured(lambda x: train.loss(x).backward())
    for x in train.data:
        backward(x)
        yield train.gradients()
        train.optimizer.step()
        train.optimizer.zero_grad(set_to_none=False)


def functional(train: Training) -> Any:
    """Results of torch.autograd.grad are made gradients."""
    step = train.captured(lambda x: torch.autograd.grad(train.loss(x), train.parameters))
    for x in train.data:
        made = step(x)
        for p, grad in zip(train.parameters, made, strict=True):
            p.grad = grad
        yield list(made)
        train.update()


def as_argument(train: Training) -> Any:
    """A gradient is what a captured function gets."""
    backward, norm = train.captured(lambda x: train.loss(x).backward()), train.captured(lambda g: g.norm())
    for x in train.data:
        backward(x)
        yield [norm(train.parameters[0].grad), *train.gradients()]
        train.update()


def in_a_list_of_the_step(train: Training) -> Any:
    """The list of what is kept is what the step reads."""
    last: Kept = []

    def step(x: torch.Tensor) -> torch.Tensor:
        train.loss(x).backward()
        return sum([(p.grad * g).sum() for p, g in zip(train.parameters, last, strict=False)], torch.zeros((), device=x.device))

    step = train.captured(step)
    for x in train.data:
        yield [step(x), *train.gradients()]
        last[:] = train.gradients()
        train.update()


def views(train: Training) -> Any:
    backward = train.captured(lambda x: train.loss(x).backward())
    for x in train.data:
        backward(x)
        yield [grad.view(-1)[1:] for grad in train.gradients()]
        train.update()


def aliases(train: Training) -> Any:
    backward = train.captured(lambda x: train.loss(x).backward())
    for x in train.data:
        backward(x)
        yield [grad.detach() for grad in train.gradients()]
        train.update()


def averages(train: Training) -> Any:
    """State that the step replaces in a dictionary and in an attribute, as averages of weights do; some is returned too."""
    average = {n: p.detach().clone() for n, p in enumerate(train.parameters)}
    train.model.last = torch.zeros((), device=train.data[0].device)

    def step(x: torch.Tensor) -> torch.Tensor:
        train.optimizer.zero_grad()
        loss = train.loss(x)
        loss.backward()
        train.optimizer.step()
        train.model.last = 0.5 * train.model.last + loss.detach()
        for n, p in enumerate(train.parameters):
            average[n] = 0.9 * average[n] + 0.1 * p.detach()
        return train.model.last

    step, norm = train.captured(step), train.captured(lambda: sum([value.norm() for value in average.values()]))
    for n, x in enumerate(train.data):
        yield [step(x), train.model.last, norm(), *(average.values() if n % 2 else ())]


def returned(train: Training) -> Any:
    """The step returns the gradients themselves, and views of them."""

    def step(x: torch.Tensor) -> Any:
        train.optimizer.zero_grad()
        train.loss(x).backward()
        train.optimizer.step()
        return [*train.gradients(), train.parameters[0].grad.view(-1)[2:], train.parameters[0].grad.detach()]

    step = train.captured(step)
    for n, x in enumerate(train.data):
        yield [*step(x), *(train.gradients() if n % 2 else ())]


PROGRAMS = (
    averages, returned,
    two_programs, clipped, one_program, eager_optimizer, accumulated, zeroed, functional, as_argument, in_a_list_of_the_step,
    views, aliases,
)  # fmt: skip


def run(program: Callable, device: str, wrap: Callable, keep: bool = True) -> tuple[Training, list[Kept]]:
    train = Training(device, wrap)
    kept: list[Kept] = []
    for tensors in program(train):
        if keep:
            kept.append(tensors)
        del tensors
    return train, [[t.detach().cpu() for t in (*tensors,)] for tensors in [*kept, train.parameters]]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_what_is_kept_stays_as_it_was(program: Callable, session: Callable) -> None:
    session()
    _, wanted = run(program, "cpu", lambda f: f)
    train, got = run(program, "remote", gt.compile)
    assert sum(map(len, wanted)) > CALLS
    for n, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert all(map(torch.equal, a, b)), (program.__name__, n)
    replays = [sum(p.replays for p in step._programs) for step in train.steps]
    if program not in (in_a_list_of_the_step, views, aliases):
        assert max(replays) >= CALLS - 4, [step.explain() for step in train.steps]


@pytest.mark.parametrize(
    "program", [two_programs, clipped, one_program, eager_optimizer, zeroed, averages, returned], ids=lambda f: f.__name__
)
def test_what_nobody_keeps_is_not_copied(program: Callable, session: Callable, monkeypatch: Any) -> None:
    session()
    copied: list[int] = []
    monkeypatch.setattr(gradients.NamedMemory, "leave", lambda self: copied.append(1))
    train, _ = run(program, "remote", gt.compile, keep=False)
    assert max(sum(p.replays for p in step._programs) for step in train.steps) >= CALLS - 4
    # The program of the norm holds the averages that it was recorded with, until it is recorded again
    assert len(copied) <= (4 if program is averages else 0)
    assert not any(gradients.VIEWED in step.explain() for step in train.steps)


def test_a_view_that_is_kept_is_told_with_its_cure(session: Callable) -> None:
    session()
    train, _ = run(views, "remote", gt.compile)
    text = train.steps[1].explain()
    assert f"{gradients.VIEWED} the gradient of a parameter of shape [8, 6]" in text and "keep a clone() of it" in text
    assert "in parts" in text


@pytest.mark.parametrize("trains", ["outside", "in it", "by autograd.grad", "nothing", "a leaf"])
def test_results_keep_their_graph_exactly_where_no_backward_pass_has_used_it(trains: str, session: Callable) -> None:
    session()
    model, x = torch.nn.Linear(3, 1).to("remote"), torch.ones(2, 3, device="remote")

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        if trains == "a leaf":
            return model.weight
        loss = model(x).square().sum()
        if trains == "in it":
            loss.backward()
        if trains == "by autograd.grad":
            return torch.autograd.grad(loss, model.weight, create_graph=True)[0]
        return loss

    with torch.set_grad_enabled(trains != "nothing"):
        results = [step(x) for _ in range(4)]
    assert all(r.requires_grad is (trains in ("outside", "a leaf", "by autograd.grad")) for r in results)
