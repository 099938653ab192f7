"""Results of a captured step that are CPU tensors or arrays: new ones at each call, so that the caller may change them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gt

REMOTE = "remote"
pytestmark = pytest.mark.usefixtures("one")
FLAGS, TABLE, ARRAY = torch.ones(2, dtype=torch.int64), torch.arange(3.0), np.arange(3.0)


def of_an_argument(x: torch.Tensor, flags: torch.Tensor) -> Any:
    return flags.cpu()


def array_of_an_argument(x: torch.Tensor, flags: torch.Tensor) -> Any:
    return flags.cpu().numpy()


def of_a_constant(x: torch.Tensor, flags: torch.Tensor) -> Any:
    return torch.arange(2, device=x.device).cpu()


def made_on_the_cpu(x: torch.Tensor, flags: torch.Tensor) -> Any:
    return torch.ones(2)


def array(x: torch.Tensor, flags: torch.Tensor) -> Any:
    return np.ones(2)


@pytest.mark.parametrize("function", [of_an_argument, array_of_an_argument, of_a_constant, made_on_the_cpu, array])
def test_a_result_that_the_caller_changes_is_new_at_each_call(function: Any) -> None:
    def step(x: torch.Tensor, flags: torch.Tensor) -> Any:
        made = function(x, flags)
        return x + 1, made, [made]

    compiled = gt.compile(step)
    kept = []
    for _ in range(6):
        _, made, (same,) = compiled(torch.ones(2), FLAGS.to(REMOTE))
        assert made is same and made.tolist() == function(torch.ones(2), FLAGS).tolist()
        made += 1
        kept.append(made)
    assert len(set(map(id, kept))) == 6 and compiled._programs[0].replays, compiled.explain()


def test_results_that_share_memory_with_state_are_that_memory() -> None:
    @gt.compile
    def step(x: torch.Tensor) -> Any:
        return x + 1, TABLE, TABLE[1:], ARRAY[:2]

    for _ in range(5):
        _, table, part, row = step(torch.ones(2))
        assert table is TABLE and part.data_ptr() == TABLE[1:].data_ptr() and np.shares_memory(row, ARRAY)
    assert step._programs, step.explain()
