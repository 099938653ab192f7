"""Module.to while a graph or a weak reference holds the module's old parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable

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


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


@pytest.mark.parametrize("change", [_load, nn.Module.float, nn.Module.half])
@pytest.mark.parametrize("device", ["cpu", "remote"])
def test_a_state_and_a_type_leave_gradients_hooks_and_graphs(device: str, change: Callable[[nn.Module], None]) -> None:
    model = nn.Linear(3, 2).to(device)
    model.weight.register_hook(lambda slope: slope * 3)
    reference, calls = weakref.ref(model.weight), list[int]()
    model.weight.register_post_accumulate_grad_hook(lambda weight: calls.append(1))
    model.bias.grad = torch.full_like(model.bias, 4)
    before = model.weight.sum()
    change(model)
    assert reference() is model.weight and (model.bias.grad == 4).all()
    if change is not nn.Module.half:
        before.backward()
        assert (model.weight.grad == 3).all() and calls == [1]
    dtype = model.weight.dtype
    model(torch.ones(1, 3, device=device, dtype=dtype)).sum().backward()
    assert model.weight.grad.dtype == dtype and (model.weight.grad == (3 if change is nn.Module.half else 6)).all()


@pytest.mark.parametrize("device", ["cpu", "remote"])
def test_a_loaded_state_is_written_in_place(device: str) -> None:
    model = nn.Linear(3, 2).to(device)
    alias, version = model.weight.detach().view(-1), model.weight._version
    model.load_state_dict({"weight": torch.full((2, 3), 7.0), "bias": torch.zeros(2)})
    assert (alias == 7).all() and model.weight._version == version + 1
    alias.zero_()
    assert not model.weight.any()


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("way", [("cpu", "remote"), ("remote", "cpu"), ("remote", "cpu", "remote")], ids="-".join)
def test_hooks_of_a_parameter_are_called_where_it_has_moved_and_not_once_they_are_removed(kind: str, way: tuple) -> None:
    model, calls = nn.Linear(2, 2).to(way[0]), list[str]()
    older = getattr(model.bias, kind)(lambda _: calls.append("older"))
    for device in way[1:]:
        model.to(device)
    newer = getattr(model.bias, kind)(lambda _: calls.append("newer"))
    for hooks in (["older", "newer"], ["newer"], []):
        model(torch.ones(1, 2, device=way[-1])).sum().backward()
        assert calls == hooks
        calls.clear()
        (older if "older" in hooks else newer).remove()


def test_attributes_of_parameters_stay() -> None:
    model = network()
    model[0].weight.tag, model[0].weight.rows = "first", [1, 2]  # as sharding and privacy libraries set them
    rows = model[0].weight.rows
    model.to("remote")
    assert model[0].weight.tag == "first" and model[0].weight.rows is rows
    model[0].weight.tag = "second"
    model(torch.randn(2, 2, 4, 4, device="remote")).sum().backward()
    model.cpu()
    assert vars(model[0].weight) == {"tag": "second", "rows": [1, 2]} and type(model[0].weight) is nn.Parameter
    assert not vars(model[0].bias)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors can be copied there")
def test_a_move_to_a_gpu_that_the_program_has_not_says_where_the_tensor_is() -> None:
    """It was "Torch not compiled with CUDA enabled", or "Invalid device" for a number."""
    model, x = nn.Linear(2, 2).to("remote"), torch.ones(2, device="remote")
    moves = [
        x.cuda, lambda: x.cuda(0, non_blocking=True), lambda: x.cuda("cuda:1"), lambda: x.to("cuda"), lambda: x.to("cuda:0"),
        model.cuda, lambda: model.cuda(0), lambda: model.to("cuda", torch.float64),
    ]  # fmt: skip
    said = r"cannot be copied to cuda.*leave \.cuda\(\) or \.to\('cuda'\) out, or name 'remote'"
    for move in moves:
        with pytest.raises(RuntimeError, match=said):
            move()
    with pytest.raises(RuntimeError, match="cannot be copied to xpu"):
        x.to("xpu")
    assert model(x).shape == (2,) and x.to("meta").device.type == "meta"
