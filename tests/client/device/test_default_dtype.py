"""torch.set_default_dtype: remote results have the dtypes and values that the CPU gives them, also after it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import gt

pytestmark = pytest.mark.usefixtures("one")
Make = Callable[[str], torch.Tensor]
MADE: dict[str, Make] = {
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "full": lambda d: torch.full((2,), 1.5, device=d),
    "eye": lambda d: torch.eye(3, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "arange": lambda d: torch.arange(0.0, 2.0, 0.5, device=d),
    "of numbers": lambda d: torch.tensor([1.5, 2.5], device=d),
    "division": lambda d: torch.arange(1, 5, device=d) / torch.arange(2, 6, device=d),
    "division in list": lambda d: torch._foreach_div([torch.arange(1, 5, device=d)], 3)[0],
    "product": lambda d: torch.arange(4, device=d) * 0.5,
    "root": lambda d: torch.arange(4, device=d).sqrt(),
    "root of bools": lambda d: torch.tensor([True, False], device=d).exp(),
    "where": lambda d: torch.where(torch.tensor([True, False], device=d), 1.0, 0.25),
    "choice": lambda d: (torch.arange(4, device=d) > 1).to(torch.get_default_dtype()),
    "integers": lambda d: torch.arange(4, device=d) // 3,
    "linear": lambda d: nn.init.ones_(nn.Linear(3, 2, bias=False, device=d).weight) @ torch.ones(3, device=d),
    "spectrum": lambda d: torch.fft.rfft(torch.arange(8, device=d)).abs() if torch.get_default_dtype().itemsize > 2 else None,
}


@pytest.fixture(params=[torch.float64, torch.bfloat16, torch.float32], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", MADE)
def test_a_result_has_the_dtype_and_bits_of_the_cpu(default: torch.dtype, name: str) -> None:
    want = MADE[name]("cpu")
    if want is not None:
        made = MADE[name]("remote")
        assert made.dtype == want.dtype and torch.equal(made.cpu(), want)


def test_what_is_known_of_calls_changes_with_it() -> None:
    x = torch.arange(1, 4).to("remote")
    for dtype in (torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            for made in (x / 3, x * 0.5, torch.ones(2, device="remote"), torch.rand(2, device="remote")):
                assert made.dtype == dtype and made.cpu().dtype == dtype
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_captured_step_trains_in_it(default: torch.dtype) -> None:
    def losses(device: str, compiled: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (model(x / 7) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        call = gt.compile(step) if compiled else step
        return [call(torch.arange(12).reshape(3, 4).to(device)).item() for _ in range(4)]

    want = losses("cpu", False)
    assert losses("remote", False) == want and losses("remote", True) == want
