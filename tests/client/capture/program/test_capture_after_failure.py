"""A failed tensor that somebody still holds prevents only the programs that would use it."""

from __future__ import annotations

import pytest
import torch

import gt
from gt.errors import OpFailed

pytestmark = pytest.mark.usefixtures("one")


def failed() -> torch.Tensor:
    """A tensor whose op has failed on the worker, as the program has heard."""
    bad = torch.nn.functional.embedding(torch.tensor([9], device="remote"), torch.ones(3, 2, device="remote"))
    with pytest.raises(OpFailed):
        bad.sum().item()
    return bad


@pytest.mark.parametrize("backend", ["eager", "cudagraphs"])
def test_other_steps_are_captured(backend: str) -> None:
    bad = failed()
    w = torch.ones(4, device="remote", requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)

    @gt.compile(backend=backend)
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (w * x).sum()
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(torch.ones(4)).item() for _ in range(5)]
    assert ": 1 program" in step.explain(), step.explain()
    assert losses == pytest.approx([4 - 0.4 * n for n in range(5)])
    with pytest.raises(OpFailed):
        bad.sum().item()
    assert step(torch.ones(4)).item() == pytest.approx(2.0)


def test_a_step_that_uses_it_says_which() -> None:
    bad = failed()

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + bad

    x = torch.ones(2)
    for _ in range(3):
        result = step(x)
    assert "it uses a value that failed: " in step.explain() and "test_capture_after_failure.py" in step.explain()
    assert "aten.embedding.default" in step.explain() and ": 0 programs" in step.explain()
    with pytest.raises(OpFailed):
        result.sum().item()


def test_a_program_goes_on_after_a_failure() -> None:
    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for _ in range(3):
        step(torch.ones(2))
    bad = failed()
    assert step(torch.ones(2)).sum().item() == 4 and step.explain().splitlines()[0].endswith("1 program")
    del bad
