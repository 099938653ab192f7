"""A value that was read is read again without a wait, until something may have changed it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import gt
from gt.client import current_session
from gt.client.values import read_values
from tests.helpers.inline_session import inline  # noqa: F401

R = "remote"


class Waits:
    def __init__(self) -> None:
        self.recorder: Any = current_session.current()
        self.before = self.recorder.fetches

    @property
    def count(self) -> int:
        return self.recorder.fetches - self.before


@pytest.fixture
def waits(inline: None) -> Iterator[Waits]:  # noqa: F811
    yield Waits()


def test_a_loss_that_is_read_twice_is_awaited_once(waits: Waits) -> None:
    loss = torch.rand(4, device=R).sum()
    first = loss.item()
    (loss * 2 + loss).detach()  # ops that write nothing
    waits.recorder.flush()
    assert (loss.item(), float(loss.detach()), waits.count) == (first, first, 1)


def test_an_index_is_awaited_once(waits: Waits) -> None:
    boxes, order = torch.rand(5, 4, device=R), torch.rand(5, device=R).argsort()
    n = order[0]
    sides = boxes[n, :2], boxes[n, 2:]
    assert waits.count == 1
    assert torch.equal(torch.cat(sides), boxes[int(n)])


# Writes to a tensor, none of which has its id but the first
WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "in place": lambda x, view: x.add_(1),
    "through a view of before": lambda x, view: view.add_(1),
    "through .data": lambda x, view: x.data.mul_(2),
    "through a view of .data": lambda x, view: x.data.view(4)[1:].zero_(),
    "by an assignment": lambda x, view: x.__setitem__(0, 5.0),
    "by a list op": lambda x, view: torch._foreach_add_([x], 1.0),
    "by out=": lambda x, view: torch.add(x.clone(), 1, out=x),
    "by another name": lambda x, view: setattr(x, "data", x + 1),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_value_that_was_changed_is_read_anew(name: str, waits: Waits) -> None:
    x = torch.rand(4, device=R)
    view = x[:2]
    before = x.cpu()
    plain = before.clone()
    WRITES[name](x, view)
    WRITES[name](plain, plain[:2])
    assert torch.equal(x.cpu(), plain) and not torch.equal(plain, before)


def test_a_value_that_was_returned_is_the_callers(waits: Waits) -> None:
    x = torch.rand(3, device=R)
    first = x.cpu()
    kept = first.clone()
    first.zero_()
    x.cpu().zero_()
    assert torch.equal(x.cpu(), kept)


def test_values_are_forgotten_after_many_ops(waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_values, "MAX_NUMBERS", 40)
    x = torch.rand(3, device=R)
    first = x.tolist()
    for _ in range(20):
        x + 1
    assert x.tolist() == first
    assert waits.count == 2


def test_after_ctrl_c_workers_are_asked(waits: Waits) -> None:
    x = torch.rand(3, device=R)
    first = x.tolist()
    waits.recorder.session.interrupts = 1
    assert x.tolist() == first
    assert waits.count == 2


def test_what_another_thread_writes_during_a_read_is_no_known_value(waits: Waits) -> None:
    """The value that comes may be that of before the write, or of after it."""
    x = torch.rand(3, device=R)
    fetch = waits.recorder.session.fetch

    def slow(*args: Any) -> Any:
        value = fetch(*args)
        x.add_(1)
        return value

    waits.recorder.session.fetch = slow
    before = x.cpu()
    waits.recorder.session.fetch = fetch
    assert torch.equal(x.cpu(), before + 1)


@pytest.mark.usefixtures("one")
def test_a_replay_ends_what_was_read() -> None:
    total = torch.zeros((), device=R)

    @gt.compile
    def step(x: torch.Tensor) -> None:
        total.add_(x.sum())

    values = []
    for _ in range(6):
        step(torch.ones(2))
        values += [total.item(), total.item()]
    assert values == [2.0 * (n // 2 + 1) for n in range(12)]
    assert "1 program" in step.explain()
