"""Tensors of one memory that have no element in common are known as such, and none of those that have one."""

from __future__ import annotations

import random

import torch

from gt.worker.engine.torch.compiler.memory_overlap import Place, disjoint


def place(tensor: torch.Tensor) -> Place:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def part(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Some slices of a tensor, of any dim."""
    for _ in range(draw.randint(0, 3)):
        if not tensor.dim():
            break
        dim = draw.randrange(tensor.dim())
        size = tensor.shape[dim]
        start = draw.randint(0, size)
        choices = [tensor.narrow(dim, start, draw.randint(0, size - start)), tensor.transpose(0, dim)]
        choices += [tensor.select(dim, start % size), tensor[(slice(None),) * dim + (slice(None, None, 2),)]] if size else []
        tensor = draw.choice(choices)
    return tensor


def test_no_pair_that_shares_an_element_is_disjoint() -> None:
    draw, needless = random.Random(0), 0
    for _ in range(2000):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
        whole = torch.arange(torch.Size(shape).numel() + 3)[draw.randint(0, 3) :][: torch.Size(shape).numel()].view(shape)
        first, second = part(draw, whole), part(draw, whole)
        shared = bool(set(first.flatten().tolist()) & set(second.flatten().tolist()))
        apart = disjoint((place(first), place(second)))
        assert not (apart and shared), (place(first), place(second))
        needless += not apart and not shared
    assert needless < 100  # such as transposed parts


def test_rows_and_columns_of_a_buffer_are_disjoint() -> None:
    buffer = torch.empty(4, 50, 8)
    for parts in (buffer.unbind(0), buffer.unbind(1), buffer.unbind(2), buffer.split([20, 30], 1), buffer.chunk(3, 2)):
        assert disjoint(tuple(map(place, parts)))
        assert not disjoint(tuple(map(place, (*parts, parts[1]))))


def test_of_many_tensors_nothing_is_said() -> None:
    assert not disjoint(tuple(map(place, torch.empty(1000, 2).unbind(0))))
