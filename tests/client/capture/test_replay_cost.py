"""The user's thread in a replay: how many functions of Python its checks call, which is no matter of the machine's load."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import gt
from gt.client.capture.aliasing import flatten_call
from tests.helpers.limits import calls_of


def checks(layers: int, clears_inside: bool) -> int:
    """Calls of one replay's checks, for a training step of so many layers."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)]).to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        if clears_inside:
            optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.ones(2, 2).to("remote")
    for _ in range(5):
        if not clears_inside:
            optimizer.zero_grad()
        step(x).item()
    (program,) = step._programs
    assert program.replays > 1, step.explain()
    if not clears_inside:
        optimizer.zero_grad()

    def check() -> None:
        assert program.mismatch([x]) == ""
        program.grads.fill()
        program.grads.set()

    return calls_of(check)


@pytest.mark.parametrize("clears_inside", [True, False], ids=["gradients are left", "no gradient is left"])
def test_checks_call_as_many_functions_for_any_number_of_parameters(session: Callable, clears_inside: bool) -> None:
    session()
    assert checks(3, clears_inside) == checks(12, clears_inside)


REPLAY_CALLS = 420  # of a replay whose argument is uploaded, and that is handed over at once: a tenth more than on CPython 3.11


def test_a_replay_calls_few_functions(session: Callable) -> None:
    session()
    w = torch.ones(4, 4, device="remote")
    run = gt.compile(lambda x: (x + w) * 0.5)
    x = torch.ones(4, 4)
    for _ in range(4):
        run(x).sum().item()
    (program,) = run._programs
    assert program.replays == 2, run.explain()
    assert calls_of(lambda: run(x)) <= REPLAY_CALLS


def test_keyword_arguments_are_flattened_as_fast_as_others(session: Callable) -> None:
    """A model's forward gets nothing else from a library: tensors, numbers, and an object such as a cache."""
    session()
    x, y, cache = torch.ones(2, device="remote"), torch.ones(2), object()
    flat, tree = flatten_call((), {"x": x, "y": y, "n": 1, "cache": cache, "mask": None})
    assert all(map(lambda a, b: a is b, flat, (x, y, 1, cache, None))) and tree.num_leaves == 5
    named = {"x": x, "y": y, "n": 1, "cache": cache, "mask": None}
    flatten_call((), named)  # the first one makes the tree
    assert calls_of(lambda: flatten_call((), named)) <= 30  # torch's walk: 75
