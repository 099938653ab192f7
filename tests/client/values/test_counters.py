"""Counters that a step changes and nothing reads: a replay counts on. Where something reads them, Python runs at each call."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gt

CALLS = 10
pytestmark = pytest.mark.usefixtures("one")
calls = 0


class Counting(nn.Module):
    """Counts its calls and rows, and never looks at the counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps, self.rows, self.table = nn.Linear(4, 2), 0, 0, [0] * CALLS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.rows += len(x)
        return self.layer(x)


class Warming(Counting):
    """Decides by a count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.layer(x) * (2 if self.steps > CALLS // 2 else 1)


class Filling(Counting):
    """Uses a count as an index, within an assignment that adds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table[self.steps] += 1
        self.steps += 1
        return self.layer(x)


class Reporting(Counting):
    """A property reads the count."""

    @property
    def half(self) -> float:
        return self.steps / 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.layer(x) * self.half


class Watched(Counting):
    """Its attributes are set by code of its own."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "steps" and "table" in self.__dict__:
            self.table.append(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.layer(x)


def in_a_global(model: Counting) -> Callable:
    def step(x: torch.Tensor) -> torch.Tensor:
        global calls
        calls += 1
        return model(x).square().mean()

    return step


def in_a_closure(model: Counting) -> Callable:
    count = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        model.layer.seen = count  # so that a caller can see it
        return model(x).square().mean()

    return step


def by_name(model: Counting) -> Callable:
    return lambda x: model(x).square().mean() * getattr(model, "".join(("st", "eps")))


def returned(model: Counting) -> Callable:
    return lambda x: (model(x).square().mean(), model.steps)[0]


def plain(model: Counting) -> Callable:
    return lambda x: model(x).square().mean()


def train(kind: type, use: Callable, compiled: bool) -> tuple[list, Counting, str]:
    torch.manual_seed(0)
    model = kind().to("remote")
    step = use(model)
    step = gt.compile(step) if compiled else step
    with torch.no_grad():
        losses = [step(torch.full((3, 4), float(n)).to("remote")).item() for n in range(CALLS)]
    return losses, model, step.explain() if compiled else ""


KINDS = {
    "attributes": (Counting, plain, True),
    "a global": (Counting, in_a_global, True),
    "read in a closure": (Counting, in_a_closure, False),
    "decides": (Warming, plain, False),
    "an index": (Filling, plain, False),
    "a property": (Reporting, plain, False),
    "a setter": (Watched, plain, False),
    "read by name": (Counting, by_name, False),
    "returned": (Counting, returned, False),
}


@pytest.mark.parametrize("name", KINDS)
def test_counts_are_those_of_eager_calls(name: str) -> None:
    global calls
    kind, use, captured = KINDS[name]
    calls = 0
    losses, model, text = train(kind, use, True)
    counted = calls
    calls = 0
    wanted, eager, _ = train(kind, use, False)
    assert losses == wanted and counted == calls
    assert (model.steps, model.rows, model.table) == (eager.steps, eager.rows, eager.table)
    assert ("in parts" not in text) is captured, text


def test_a_counter_is_counted_on_from_the_value_that_it_has() -> None:
    model = Counting().to("remote").requires_grad_(False)
    step = gt.compile(lambda x: model(x).sum())
    x = torch.ones(3, 4).to("remote")
    for _ in range(4):
        step(x)
    model.steps = 100
    step(x)
    assert (model.steps, model.rows) == (101, 15) and len(step._programs) == 1
    model.steps = "many"
    with pytest.raises(TypeError):
        step(x)


def test_a_counter_grows_by_what_each_program_adds() -> None:
    model = Counting().to("remote").requires_grad_(False)
    step = gt.compile(lambda x: model(x).sum())
    for rows in (3, 3, 3, 3, 4, 4, 4, 4, 3, 4):
        step(torch.ones(rows, 4).to("remote"))
    assert (model.steps, model.rows) == (10, 35) and len(step._programs) == 2


def test_another_function_sees_the_counts_of_replays() -> None:
    counter = SimpleNamespace(count=0)
    w = torch.ones(3, device="remote")

    @gt.compile
    def reads() -> torch.Tensor:
        return w * counter.count

    def grow() -> None:
        counter.count += 1

    @gt.compile
    def counts() -> torch.Tensor:
        grow()
        return w + 1

    for n in range(1, 8):
        counts()
        assert reads().tolist() == [float(n)] * 3
