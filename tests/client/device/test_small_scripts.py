"""Small scripts in the style of array libraries: factories with dtype names, leaves of arrays, GT's own layers and SGD."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gt
import gt.client.nn as layers
from tests.helpers.inline_session import inline  # noqa: F401

pytestmark = pytest.mark.usefixtures("inline")


def test_an_array_becomes_a_leaf() -> None:
    array = np.arange(6, dtype="float32").reshape(2, 3)
    x = gt.from_numpy(array, requires_grad=True)
    (x * x).sum().backward()
    assert x.is_leaf and x.device == gt.device and torch.equal(x.grad.cpu(), torch.from_numpy(2 * array))
    assert not gt.from_numpy(array).requires_grad
    with pytest.raises(RuntimeError, match="floating point"):
        gt.from_numpy(np.arange(3), requires_grad=True)


@pytest.mark.parametrize("name", ["float32", "float64", "int32", "int64", "bool", "bfloat16", "float16"])
def test_a_dtype_may_be_a_name(name: str) -> None:
    want = getattr(torch, name)
    assert getattr(gt, name) is want
    for dtype in (name, f"torch.{name}", want):
        assert gt.zeros(2, 3, dtype=dtype).dtype is gt.full((2,), 1, dtype=dtype).dtype is want
    assert gt.tensor([0, 1], dtype=name).dtype is gt.ones_like(gt.zeros(2), dtype=name).dtype is want


@pytest.mark.parametrize("name", ["float32", "int64", "bool"])
def test_a_dtype_may_be_numpys(name: str) -> None:
    for dtype in (np.dtype(name), np.dtype(name).type):
        assert gt.zeros(2, 3, dtype=dtype).dtype is getattr(torch, name)
    with pytest.raises(ValueError, match="want a torch dtype or its name"):
        gt.zeros(2, dtype=np.longdouble)


def test_arrays_that_torch_does_not_wrap_are_copied() -> None:
    array = np.arange(6, dtype="float32").reshape(2, 3)
    reversed_rows, constant = array[::-1], array.copy()
    constant.flags.writeable = False
    assert gt.from_numpy(reversed_rows).tolist() == [[3, 4, 5], [0, 1, 2]]
    assert gt.from_numpy(constant).tolist() == array.tolist()


@pytest.mark.parametrize("name", ["flaot32", "nn", "", "__name__"])
def test_an_unknown_dtype_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="want a torch dtype or its name"):
        gt.zeros(2, dtype=name)


def test_a_script_with_our_layers_learns_as_torch_does() -> None:
    class Net(layers.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = layers.Linear(4, 8), layers.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return layers.sigmoid(self.down(layers.relu(self.up(x))))

    gt.manual_seed(0)
    net = Net()
    parameters = net.parameters()
    assert len(parameters) == 4 and [list(p.shape) for p in parameters] == [[4, 8], [8], [8, 1], [1]]
    copies = [p.detach().cpu().requires_grad_() for p in parameters]
    x, y = torch.randn(16, 4), torch.rand(16, 1).round()
    ours, theirs = layers.SGD(parameters, lr=0.5), torch.optim.SGD(copies, lr=0.5)
    losses = []
    for _ in range(5):
        loss = layers.binary_cross_entropy(net(x.to("remote")), y.to("remote"))
        want = torch.nn.functional.binary_cross_entropy(
            torch.sigmoid(torch.relu(x @ copies[0] + copies[1]) @ copies[2] + copies[3]), y
        )
        for optimizer, value in ((ours, loss), (theirs, want)):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        torch.testing.assert_close(loss.detach().cpu(), want.detach())
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for got, want in zip(parameters, copies, strict=True):
        torch.testing.assert_close(got.detach().cpu(), want.detach())


def test_a_linear_without_bias_and_the_losses() -> None:
    layer = layers.Linear(3, 2, bias=False)
    x = torch.randn(4, 3)
    out = layer(x.to("remote"))
    assert layer.bias is None and torch.allclose(out.detach().cpu(), x @ layer.weight.detach().cpu())
    assert layers.mse_loss(out, torch.zeros_like(out)).item() == pytest.approx(out.detach().cpu().square().mean().item())
    assert layers.tanh(out).shape == (4, 2)
