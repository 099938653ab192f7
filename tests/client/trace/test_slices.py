"""Slices as operands: one kind of call wherever they are in their storages, and the right results where an op makes a view."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gt.client.current_session import Current

pytestmark = pytest.mark.usefixtures("one")


def first_two(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((2,), (1,), x.storage_offset())


OPS: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda x, y: x @ y.T,
    lambda x, y: x + y,
    lambda x, y: x.add_(y, alpha=2),
    lambda x, y: x.copy_(y),
    lambda x, y: (x.clone(), x.clone()[0]),
    lambda x, y: torch.cat([x, y]),
    lambda x, y: x.T.reshape(-1),
    lambda x, y: torch.ops.aten._unsafe_view(x, list(x.shape)).mul_(2),
    lambda x, y: first_two(torch.ops.aten._unsafe_view(x, list(x.shape))),
    lambda x, y: first_two(torch.unsafe_chunk(x, 2)[1]),
    lambda x, y: x.as_strided((2,), (1,)) + y.as_strided((2,), (1,), y.storage_offset() + 1),
    lambda x, y: torch.as_strided_scatter(x, y[0, :2], (2,), (1,)),
    lambda x, y: x.contiguous().unsqueeze_(0),
    lambda x, y: x.view(-1) if x.is_contiguous() else x.unsqueeze(0),
    lambda x, y: F.layer_norm(x, x.shape[1:]).softmax(-1),
    lambda x, y: torch.where(x > y, x, y).sort(-1),
    lambda x, y: torch._foreach_add([x, y], [y, x]),
    lambda x, y: torch.split(x, 1)[1].zero_(),
    lambda x, y: x.index_add_(0, torch.zeros(y.shape[0], dtype=torch.long, device=y.device), y),
    lambda x, y: torch.add(x, y, out=y[:, :]),
    lambda x, y: x.detach().t_(),
    lambda x, y: y.fill_(x.sum()).cumsum(0),
]  # fmt: skip


def chain(device: str, seed: int) -> list[torch.Tensor]:
    """Results of random ops on random slices of two tensors that they write, and these tensors."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    held = [torch.randn(9, 14, generator=generator).to(device) for _ in range(2)]
    results: list[torch.Tensor] = []
    for _ in range(60):
        op, (rows, columns) = draw.choice(OPS), (draw.choice([2, 4]), draw.choice([3, 5, 14]))
        x, y = (
            tensor[row : row + rows, column : column + columns]
            for tensor in held
            for row, column in [(draw.randint(0, 9 - rows), draw.randint(0, 14 - columns))]
        )
        made = op(x, y)
        for tensor in held:
            tensor.tanh_()
        results += [each.cpu().clone() for each in (made if isinstance(made, (list, tuple)) else [made])]
    return [*results, *[tensor.cpu() for tensor in held]]


@pytest.mark.parametrize("seed", range(6))
def test_ops_on_slices_have_the_cpus_results(seed: int, plain_threads: None) -> None:
    torch.testing.assert_close(chain("remote", seed), chain("cpu", seed))


def test_a_slice_at_another_place_is_no_other_kind_of_call() -> None:
    data, weight = torch.randn(64, 8), torch.randn(8, 8)
    there, held = data.to("remote"), weight.to("remote")

    def step(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.relu(rows @ weight + rows).mul_(rows).sum()

    step(there[2:4], held)
    templates = Current.recorder.templates
    for start in range(4, 60, 2):
        before = len(templates)
        got = step(there[start : start + 2], held)
        assert len(templates) - before == 1, "the slice alone"
        torch.testing.assert_close(got.cpu(), step(data[start : start + 2], weight))
