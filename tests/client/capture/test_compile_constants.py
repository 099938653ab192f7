"""Values that a recorded call reads: constants of the call are answered, others are refused or end that recording."""

from __future__ import annotations

import pytest
import torch

import gt

REMOTE = "remote"
pytestmark = pytest.mark.usefixtures("one")


def positions(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0], device=REMOTE)


def test_a_value_that_is_the_same_at_each_call_may_be_read() -> None:
    """As transformers reads whether positions are packed; masks that say nothing are then never made."""

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        places = positions(x)
        packed = (places.diff(prepend=places[:1] - 1) != 1).cumsum(-1)
        mask = torch.zeros(4, 4, dtype=torch.bool, device=REMOTE)
        mask[:, :2] = True
        mask.logical_not_()
        if bool((packed == 0).all()) and mask.sum().item() == 8 and mask[0].tolist() == [False, False, True, True]:
            return x * 2
        return x * 3

    data = torch.randn(6, 4)
    for row in data:
        torch.testing.assert_close(step(row).cpu(), row * 2)
    assert step._programs and step._programs[0].replays == 4, step.explain()


@pytest.mark.parametrize("how", ["argument", "random", "written", "written through a view", "float"])
def test_a_value_that_may_be_another_next_time_is_read_at_each_call(how: str) -> None:
    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        places = positions(x)
        if how == "argument":
            places = x
        elif how == "random":
            places = torch.randint(9, (4,), device=REMOTE)
        elif how == "written":
            places.copy_(x)
        elif how == "written through a view":
            places[1:].copy_(x[1:])
        elif how == "float":
            places = places / 3
        return x + places.sum().item()

    step(torch.zeros(4, dtype=torch.int64, device=REMOTE) + 1)  # only the workers know its values
    assert "of shape [] is read" in step.explain() and not step._programs


def test_a_list_that_is_uploaded_in_the_call_may_be_read() -> None:
    """The bytes are a part of the program: a call that uploads others agrees with none."""
    first = [1]

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        places = torch.tensor([*first, 2, 3], device=REMOTE)
        places[1] += 1
        return x + places.sum().item()

    assert [step(torch.ones(2)).tolist() for _ in range(5)] == [[8.0, 8.0]] * 5
    assert step._programs[0].replays == 3, step.explain()
    first[0] = 5
    assert [step(torch.ones(2)).tolist() for _ in range(4)] == [[12.0, 12.0]] * 4


def test_constants_are_those_of_the_ops_before_the_read() -> None:
    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        places = positions(x)
        first = places.sum().item()
        places.add_(1)
        row = places.view(2, 2)[1]
        row.mul_(10)
        second = places.tolist()
        return x * first + torch.zeros(4, device=REMOTE) + sum(second)

    for _ in range(4):
        assert step(torch.ones(4)).tolist() == [6.0 + 1 + 2 + 30 + 40] * 4
    assert step._programs and step._programs[0].replays == 2, step.explain()


def test_a_library_that_asks_may_read_once_and_is_told_no_afterwards() -> None:
    """A mask that is computed on workers, and all true: the first call reads it, later ones take the way that reads nothing."""

    @gt.compile
    def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing() and bool(mask.all()):
            return x * 2
        return torch.where(mask, x * 2, 0)

    for n in range(6):
        x = torch.full((4,), float(n))
        mask = torch.ones(4, dtype=torch.bool) if n < 4 else torch.tensor([True, False, True, False])
        assert step(x, mask.to(REMOTE).logical_not().logical_not()).tolist() == torch.where(mask, x * 2, 0.0).tolist()
    assert step._programs and step._programs[0].replays == 3, step.explain()
