"""Module.to while a graph or a weak reference holds the module's old parameters."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("plain_threads", "one")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))


def test_a_module_moves_while_its_graph_is_alive() -> None:
    x = torch.randn(2, 2, 4, 4)
    model, plain = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = weakref.ref(model[0].weight)
    dry, weights = model(x), list(model.parameters())
    model.to("remote")
    assert all(a is b for a, b in zip(weights, model.parameters(), strict=True)) and reference() is model[0].weight
    assert {p.device.type for p in model.parameters()} == {"remote"}
    plain(x)
    for one, data in ((model, x.to("remote")), (plain, x)):
        one(data).square().sum().backward()
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.cpu(), b)
    with pytest.raises(RuntimeError, match="moved to another device since the forward pass"):
        dry.sum().backward()
    assert dry.shape == (2, 2)


@pytest.mark.parametrize("device", ["cpu", "remote"])
def test_a_dtype_changes_while_a_graph_is_alive(device: str) -> None:
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    model, plain = network().to(device), network()
    kept = model(x.float().to(device))
    for one, data in ((model.double(), x.to(device)), (plain.double(), x)):
        one(data).square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert a.dtype == torch.float64 and torch.equal(a.grad.cpu(), b.grad)
    assert kept.shape == (2, 2)


def test_gradients_and_ties_move_too_and_back() -> None:
    model = nn.ModuleList([nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)])
    model[1].weight = model[0].weight
    kept = model[1](model[0](torch.arange(5)))
    kept.sum().backward(retain_graph=True)
    want = model[0].weight.grad.clone()
    model.to("remote")
    assert model[0].weight is model[1].weight and torch.equal(model[0].weight.grad.cpu(), want)
    out = model[1](model[0](torch.arange(5, device="remote")))
    model.to("cpu")
    assert model[0].weight.device.type == "cpu" and torch.equal(model[0].weight.grad, want)
    assert out.device.type == "remote" and torch.equal(out.cpu(), model[1](model[0](torch.arange(5))))
