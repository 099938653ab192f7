"""Writes that autograd has to notice: versions of remote tensors are incremented as the CPU increments its tensors'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.inline_session import inline  # noqa: F401

pytestmark = pytest.mark.usefixtures("inline")
Tensors = list[torch.Tensor]
WRITES: dict[str, Callable[[Tensors, Tensors], Any]] = {
    "a number": lambda a, b: torch._foreach_add_(a, 1),
    "two lists": lambda a, b: torch._foreach_mul_(a, b),
    "numbers": lambda a, b: torch._foreach_add_(a, [1.0, 2.0]),
    "copy": lambda a, b: torch._foreach_copy_(a, b),
    "zero": lambda a, b: torch._foreach_zero_(a),
    "three lists": lambda a, b: torch._foreach_addcdiv_(a, b, b),
    "one tensor twice": lambda a, b: torch._foreach_neg_([a[0], a[0]]),
    "no write": lambda a, b: torch._foreach_add(a, b),
    "parts": lambda a, b: torch._foreach_sub_(list(a[0].split(1)), 1),
    "a training step": lambda a, b: step(a, b),
}


def step(parameters: Tensors, gradients: Tensors) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_().grad = gradient
    torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True).step()


@pytest.mark.parametrize("name", WRITES)
def test_a_list_op_counts_its_writes(name: str) -> None:
    versions = []
    for device in ("cpu", "remote"):
        first, second = ([torch.ones(2, 3, device=device) for _ in range(2)] for _ in range(2))
        WRITES[name](first, second)
        versions.append([tensor._version for tensor in (*first, *second)])
    assert versions[0] == versions[1]


def test_backward_refuses_what_a_list_op_has_changed() -> None:
    weight = torch.ones(3, device="remote", requires_grad=True)
    hidden = weight * 2
    result = (hidden * hidden).sum()
    torch._foreach_add_([hidden.detach()], 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
