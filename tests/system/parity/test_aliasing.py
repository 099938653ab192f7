"""Views, writes through them and in-place ops on split tensors behave as torch's: each case once went wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import gt

CONFIG = """
rows: {shard: {axis: 0, workers: [0, 1, 2]}}
columns: {shard: {axis: 1, workers: [2, 3]}}
both: {shard: {axis: 0, workers: [[0, 1], [2, 3]]}}
both_colpar: {shard: {axis: 1, workers: [[0, 1], [2, 3]]}}
single: {workers: [3]}
"""


def on(group: str, x: torch.Tensor, function: Callable) -> torch.Tensor:
    with gt.signal.context(group):
        return function(x)


def strides_survive_a_move(x):
    y = on("rows", x.t().contiguous().t(), lambda t: t * 2)  # column-major
    first = y.select(0, 1)  # has no local form: the base is gathered
    y.t().view(-1).add_(1)
    return y, first


def strides_of_a_moved_copy(x):
    y = on("single", x.t().contiguous().t(), gt.signal.move if x.device.type == "remote" else torch.clone)
    y.t().view(-1).mul_(3)
    return (y,)


def terms_seen_twice(x):
    t = on("columns", x, lambda t: t.sum(1, keepdim=True))
    return (on("columns", t, lambda t: t @ t.t() * 0.5),)


def a_number_is_added_once(x):
    t = on("columns", x, torch.sum)
    t.add_(1)
    return t, t - 1, on("columns", x, torch.sum).mul_(2)


def the_second_base_moves_too(x):
    made = []
    for _ in range(2):
        y = on("both", x, lambda t: t[:1] * 1)
        flat = y.reshape(-1)
        flat[1] = 5
        made += [y, flat]
    return tuple(made)


def squeeze_looks_at_the_whole(x):
    y = on("rows", x[:3], lambda t: t * 1)  # one row a worker
    return y.squeeze(), y.squeeze(0), y.unsqueeze(1).squeeze()


def what_lies_nowhere_is_written_in_place(x):
    on("both_colpar", x, lambda t: t.t()[0].add_(1))
    return (x,)


def writes_through_views_of_split_tensors(x):
    y = on("rows", x, lambda t: t * 1)
    on("rows", y, lambda t: t[:, 2:4].mul_(10))
    on("columns", y, lambda t: t.view(-1).add_(1))
    on("single", y, lambda t: t.t()[0].zero_())
    y[3] = 7
    y[y > 5] = 0
    return y, y[:, 1:], y.view(-1)


def offsets_count_from_where_memory_begins(x):
    y = on("columns", x, lambda t: t * 1)
    before = y[2:].as_strided((5, 6), (6, 1), 6)  # starts before what it is a view of
    return before, on("single", before, torch.sin)


def rows_and_columns_become_one_dim(x):
    w = torch.nn.Parameter(x[:6, :4].clone())
    y = on("both_colpar", on("both", x[:4], lambda t: t * 1), lambda t: t @ w)
    return on("both", y, lambda t: t.view(-1) * 2), y.view(8, 2) + 1


@pytest.mark.parametrize(
    "program",
    [
        strides_survive_a_move,
        strides_of_a_moved_copy,
        terms_seen_twice,
        a_number_is_added_once,
        the_second_base_moves_too,
        squeeze_looks_at_the_whole,
        what_lies_nowhere_is_written_in_place,
        writes_through_views_of_split_tensors,
        offsets_count_from_where_memory_begins,
        rows_and_columns_become_one_dim,
    ],
)
def test_split_or_not_it_is_torch(program, session):
    session(CONFIG)
    torch.manual_seed(0)
    x = torch.randn(7, 6)
    for got, want in zip(program(x.to("remote")), program(x.clone()), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-6)
