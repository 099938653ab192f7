"""Routines around a captured step, which change between its calls what it depends on: each call is that of an eager step."""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gt
from tests.programs.program import Program, labelled, mlp
from tests.programs.test_programs import CONFIG, TOLERANCE, data_parallel

Capture = Callable[[Callable[..., Any]], Callable[..., Any]]
Routine = Callable[[str, Capture], Iterator[Any]]  # yields values to compare

pytestmark = pytest.mark.usefixtures("plain_threads")


def classifier(device: str, **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer, Callable[..., torch.Tensor]]:
    """A model, its optimizer and a step."""
    model = mlp(12, 8, 5).to(device)
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})

    def step(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x.to(device)), label.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


def weights_that_are_swapped(device: str, capture: Capture) -> Iterator[Any]:
    """Evaluation with averaged weights, which change places with the model's."""
    model, _, step = classifier(device)
    slow = copy.deepcopy(model).requires_grad_(False)
    called = capture(step)
    for n, batch in enumerate(labelled(14)):
        yield called(*batch)
        for a, b in zip(slow.parameters(), model.parameters(), strict=True):
            a.lerp_(b.detach(), 0.1)
            if n in (6, 9):
                a.data, b.data = b.data, a.data
    yield from model.parameters()


def best_weights(device: str, capture: Capture) -> Iterator[Any]:
    """Early stopping: the best weights and the optimizer's state then are loaded again."""
    model, optimizer, step = classifier(device, lr=0.5)
    called, held = capture(step), labelled(1)[0]
    validate = capture(lambda x, label: F.cross_entropy(model(x.to(device)), label.to(device)).detach())
    best, kept, worse = float("inf"), (copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())), 0
    for batch in labelled(14):
        yield called(*batch)
        with torch.no_grad():
            value = float(validate(*held))
        yield value
        if value < best:
            best, kept, worse = value, (copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())), 0
        else:
            worse += 1
        if worse == 2:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            worse = 0


def frozen_and_grown(device: str, capture: Capture) -> Iterator[Any]:
    """Layers are frozen, freed again, and one is replaced, with a group of its own."""
    model, optimizer, step = classifier(device, weight_decay=0.01)
    called = capture(step)
    for n, batch in enumerate(labelled(16)):
        if n in (4, 8):
            model[0].requires_grad_(n == 8)
        if n == 12:
            model[2] = nn.Linear(8, 5).to(device)
            nn.init.ones_(model[2].weight)
            nn.init.zeros_(model[2].bias)
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.02})
        yield called(*batch)
    yield from model.parameters()


def hooks_that_come_and_go(device: str, capture: Capture) -> Iterator[Any]:
    model, _, step = classifier(device)
    called, seen = capture(step), []
    handle: Any = None
    for n, batch in enumerate(labelled(16)):
        if n == 5:
            handle = model[0].register_forward_hook(lambda module, given, result: seen.append(result.detach().sum()))
        if n in (8, 13):
            handle.remove()
        if n == 10:
            handle = model[2].weight.register_hook(lambda gradient: gradient * 0.5)
        if n == 13:
            model[0].register_forward_pre_hook(lambda module, given: (given[0] * 2,))
        yield called(*batch)
    yield from seen


def folds(device: str, capture: Capture) -> Iterator[Any]:
    """One captured function, which gets another model and optimizer for each fold."""
    called = capture(lambda step, x, label: step(x, label))
    for fold in range(3):
        torch.manual_seed(fold)
        model, _, step = classifier(device)
        for batch in labelled(5):
            yield called(step, *batch)
        yield from model.parameters()


def memory_of_results(device: str, capture: Capture) -> Iterator[Any]:
    """The last three results, which the step uses, and results that the caller keeps and changes."""
    model, kept, total = mlp(12, 8, 5).to(device), collections.deque(maxlen=3), torch.zeros((), device=device)  # type: ignore[var-annotated]

    def step(x: torch.Tensor) -> torch.Tensor:
        h = model(x.to(device))
        loss = h.square().mean() + sum((h - old).square().mean() for old in kept)
        kept.append(h.detach())
        return loss.detach()

    called = capture(step)
    losses = [called(x) for x, _ in labelled(12)]
    for loss in losses:
        total += loss
        loss.mul_(2)
    yield from (total, *losses, *kept)


def truncated_backpropagation(device: str, capture: Capture) -> Iterator[Any]:
    """The state of a cell is carried from call to call, and dropped at the start of each sequence."""
    cell, head = nn.GRUCell(12, 6).to(device), nn.Linear(6, 5).to(device)
    optimizer, carried = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1), {}

    def step(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        h = carried.get("h")
        carried["h"] = cell(x.to(device), torch.zeros(8, 6, device=device) if h is None else h.detach())
        loss = F.cross_entropy(head(carried["h"]), label.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    called = capture(step)
    for n, batch in enumerate(labelled(16)):
        if n % 6 == 0:
            carried["h"] = None
        yield called(*batch)
    yield carried["h"].detach()


def batches_of_the_step(device: str, capture: Capture) -> Iterator[Any]:
    """The step takes its batch from an endless iterator, and its rate from a generator."""
    batches = itertools.cycle([(x.to(device), label.to(device)) for x, label in labelled(3)])
    rates = (0.1 / (1 + n // 4) for n in itertools.count())
    model = mlp(12, 8, 5).to(device)

    def step() -> torch.Tensor:
        x, label = next(batches)
        loss = F.cross_entropy(model(x), label)
        rate = next(rates)
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                p -= rate * gradient
        return loss.detach()

    called = capture(step)
    for _ in range(12):
        yield called()


ROUTINES: tuple[Routine, ...] = (
    weights_that_are_swapped, best_weights, frozen_and_grown, hooks_that_come_and_go, folds, memory_of_results,
    truncated_backpropagation, batches_of_the_step,
)  # fmt: skip


def outcome(routine: Routine, device: str, capture: Capture, parallel: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with data_parallel(Program(lambda: None, ())) if parallel else contextlib.nullcontext():
        return [torch.as_tensor(value).detach().cpu().clone() for value in routine(device, capture)]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("routine", ROUTINES, ids=lambda routine: routine.__name__)
def test_each_call_is_that_of_plain_torch(routine: Routine, workers: int, session: Callable[..., None]) -> None:
    session(CONFIG if workers == 2 else "")
    wanted = outcome(routine, "cpu", lambda step: step)
    torch.testing.assert_close(outcome(routine, "remote", gt.compile, workers == 2), wanted, **TOLERANCE)
