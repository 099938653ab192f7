"""Views of ordinary tensors under inference_mode: ordinary tensors themselves, as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("plain_threads", "one")
VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "index": lambda x: x[0],
    "slice": lambda x: x[:, 1:3],
    "transpose": lambda x: x.t(),
    "view": lambda x: x.view(4, 3),
    "reshape": lambda x: x.reshape(2, 6),
    "chunk": lambda x: x.chunk(2),
    "split": lambda x: x.split([1, 2]),
    "unbind": lambda x: list(x),
    "expand": lambda x: x[None].expand(2, -1, -1),
    "diagonal": lambda x: x.diagonal(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "unfold": lambda x: x.unfold(1, 2, 1),
    "in place": lambda x: x.clone().t_(),
    "nested": lambda x: x.t()[1:].unsqueeze(0).squeeze(0),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x)),
    "to itself": lambda x: x.to(x.device),
}


def flat(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_ordinary_tensors(name: str) -> None:
    host = torch.arange(12.0).view(3, 4)
    for x, want in ((host.to("remote"), host), (nn.Parameter(host.to("remote")), nn.Parameter(host))):
        with torch.inference_mode():
            got, wanted = flat(VIEWS[name](x)), flat(VIEWS[name](want))
        for a, b in zip(got, wanted, strict=True):
            assert b.is_inference() or not a.is_inference()
            assert a.stride() == b.stride()
            torch.testing.assert_close(a.cpu(), b.detach().clone(), rtol=0, atol=0)


def test_a_view_shares_memory_and_versions() -> None:
    x = torch.arange(12.0, device="remote").view(3, 4)
    with torch.inference_mode():
        row = x[1]
        row.add_(10)
        made = x * 2
        made[0] = 0
    assert row._version == x._version == 1
    assert x[1].tolist() == [14, 15, 16, 17] and made.sum().item() == 200
    row.mul_(0)
    assert x.sum().item() == 44 and x._version == 2


def test_a_view_may_be_trained_afterwards() -> None:
    weight = torch.ones(2, 3, device="remote", requires_grad=True)
    with torch.inference_mode():
        assert weight.t().sum().item() == 6
        data = torch.ones(3, device="remote") + 0
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        (weight * data).sum()
    weight[0].sum().backward()
    assert weight.grad.cpu().tolist() == [[1, 1, 1], [0, 0, 0]]


COMPOSITES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reshape": lambda x: x.reshape(2, 6),
    "flatten": lambda x: x.flatten(),
    "mT": lambda x: x.mT,
    "tensor_split": lambda x: x.tensor_split(2)[1],
    "movedim": lambda x: x.movedim(0, 1),
    "expand_as": lambda x: x.expand_as(x),
    "narrow": lambda x: x.narrow(0, 0, 1),
    "chunk": lambda x: x.chunk(2)[1],
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_a_composite_ops_view_is_one_of_its_base(name: str) -> None:
    """A write through it is a write to the base, which autograd then knows."""
    for device in ("cpu", "remote"):
        x = torch.zeros(3, 4, device=device)
        with torch.inference_mode():
            view = COMPOSITES[name](x)
            view.add_(1)
        assert view._is_view() and not view.is_inference()
        assert x._version == view._version == 1


def test_a_view_of_an_inference_tensor_is_one_in_either_mode() -> None:
    with torch.inference_mode():
        x = torch.zeros(3, 4, device="remote")
    for view in (x[0], x.detach(), x.reshape(-1), x.unbind(0)[1], nn.functional.relu(x)[1:]):
        assert view.is_inference() == (view.shape != (2, 4))
    for update in (lambda: x[0].add_(1), lambda: x.t_(), lambda: torch._foreach_add_([x], 1), lambda: x.detach().zero_()):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode is not allowed"):
            update()
    assert x.shape == (3, 4) and x.sum().item() == 0
    x.data.add_(1)
    with torch.inference_mode():
        x[0].add_(1)
    assert x.sum().item() == 16
