"""Remote tensors beside NumPy's values, and their text, of which large ones fetch only the part that is shown."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gt.client import current_session

SHAPES = [(), (3,), (2000,), (100, 100), (7, 7, 7, 7), (6, 1, 300), (2, 3, 5, 100), (1001,), (50, 0, 50), (5, 400)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
def test_the_text_is_that_of_the_same_tensor_on_the_cpu(shape: tuple[int, ...], dtype: torch.dtype, one: None) -> None:
    host = (torch.randn(shape) * 1000).to(dtype)
    text = repr(host.to("remote"))
    assert text == f"{repr(host)[:-1]}, device='remote:0')"


def test_print_options_hold(one: None) -> None:
    host = torch.arange(30.0).reshape(5, 6)
    with torch._tensor_str.printoptions(edgeitems=1, threshold=10):
        assert repr(host.to("remote")).startswith(repr(host)[:-1])


def test_the_text_of_a_large_tensor_takes_few_bytes(one: None) -> None:
    x = torch.zeros(1000, 1000, device="remote")
    x.sum().item()
    shapes: list[tuple[int, ...]] = []
    session = current_session.current().session
    fetch = session.fetch

    def noted(tensor: int) -> Any:
        answer = fetch(tensor)
        shapes.append(answer[0])
        return answer

    session.fetch = noted
    try:
        assert "..." in str(x)
    finally:
        del session.fetch
    assert shapes == [(7, 7)]


ARRAY_OPERATIONS: list[Callable[[Any, Any], Any]] = [
    lambda x, a: x + a, lambda x, a: a + x, lambda x, a: a * x, lambda x, a: x - a, lambda x, a: np.add(a, x),
    lambda x, a: a @ x, lambda x, a: a < x, operator.iadd,
]  # fmt: skip


@pytest.mark.parametrize("operation", ARRAY_OPERATIONS)
def test_an_array_as_the_other_operand_is_refused(operation: Callable[[Any, Any], Any], one: None) -> None:
    x, array = torch.arange(4.0).to("remote"), np.arange(4.0)
    with pytest.raises((TypeError, RuntimeError), match=r"numpy.ndarray|Expected all tensors to be on the same device"):
        operation(x, array)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


NUMBER_OPERATIONS: list[Callable[[Any], Any]] = [
    lambda x: np.float64(2) * x, lambda x: x * np.float64(2), lambda x: np.int64(3) - x, lambda x: np.float32(2) ** x,
    lambda x: np.float64(2) > x, lambda x: x / np.float64(3), lambda x: np.int64(7) // (x + 1), lambda x: np.float64(1) == x,
]  # fmt: skip


@pytest.mark.parametrize("operation", NUMBER_OPERATIONS)
def test_numbers_of_numpy_are_numbers(operation: Callable[[Any], Any], one: None) -> None:
    host = torch.arange(4.0)
    got, want = operation(host.to("remote")), operation(host)
    assert got.device.type == "remote"
    assert got.dtype == want.dtype
    assert torch.equal(got.cpu(), want)
