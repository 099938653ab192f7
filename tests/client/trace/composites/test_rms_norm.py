"""nn.RMSNorm as one op forward and one backward on GPU workers; on CPU workers it has the bits of the CPU's ops.

CPU workers carry the op out too, so a session that takes them for GPU workers shows what a client records.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gt
from gt.client import current_session
from gt.client.trace.composites import rms_norm

pytestmark = pytest.mark.usefixtures("plain_threads")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CONFIG = "rows:\n  shard: {axis: 0, workers: [0, 1]}\n"


@pytest.fixture
def gpus(session: Any, request: pytest.FixtureRequest) -> Iterator[None]:
    """A session that takes its workers for GPU workers."""
    session(getattr(request, "param", ""))
    recorder = current_session.current()
    recorder.gpus = True
    end = rms_norm.begin(recorder)
    yield
    end()


def _trained(device: str, dtype: torch.dtype, dims: int, weighed: bool, eps: float | None) -> list[torch.Tensor]:
    """Result and gradients of x [3, 4, 6], which is a transposed view, and of the weight."""
    torch.manual_seed(dims)
    layer = nn.RMSNorm((3, 4, 6)[-dims:], eps, weighed).to(dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x, grad = torch.randn(3, 6, 4, dtype=dtype).transpose(1, 2), torch.randn(3, 4, 6, dtype=dtype)
    layer, x, grad = layer.to(device), x.to(device).requires_grad_(), grad.to(device)
    out = layer(x)
    out.backward(grad)
    return [out, x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", (1, 2, 3))
def test_bits_and_strides_of_the_cpu(gpus: None, dtype: torch.dtype, dims: int) -> None:
    for weighed, eps in ((True, None), (False, 1e-3)):
        want, got = (_trained(device, dtype, dims, weighed, eps) for device in ("cpu", "remote"))
        for a, b in zip(got, want, strict=True):
            assert (a.dtype, a.stride()) == (b.dtype, b.stride())
            assert torch.equal(a.cpu(), b)


def test_it_is_one_op_forward_and_one_backward(gpus: None) -> None:
    layer, x = nn.RMSNorm(8).to("remote"), torch.randn(4, 8).to("remote").requires_grad_()
    before = gt.stats()["client"]["ops"]
    out = layer(x)
    assert gt.stats()["client"]["ops"] == before + 1
    torch.autograd.grad(out, [x, layer.weight], out)
    assert gt.stats()["client"]["ops"] == before + 2


def _twice(device: str) -> list[torch.Tensor]:
    torch.manual_seed(3)
    x, weight = torch.randn(2, 3, 8).to(device).requires_grad_(), torch.randn(8).to(device).requires_grad_()
    norm = F.rms_norm(x, (8,), weight, 1e-6)
    grads = torch.autograd.grad(norm.square().sum(), (x, weight), create_graph=True)
    return [norm, *grads, *torch.autograd.grad(sum(grad.square().sum() for grad in grads), (x, weight))]


def _forward_mode(device: str) -> list[torch.Tensor]:
    torch.manual_seed(4)
    x, tangent, weight = (torch.randn(*shape).to(device) for shape in ((2, 3, 8), (2, 3, 8), (8,)))
    return [*torch.func.jvp(lambda a: F.rms_norm(a, (8,), weight, 1e-6), (x,), (tangent,))]


def _for_each_row(device: str) -> list[torch.Tensor]:
    torch.manual_seed(5)
    x, weight = torch.randn(5, 3, 8).to(device), torch.randn(8).to(device)
    by_weight = torch.func.grad(lambda w, a: F.rms_norm(a, (8,), w, 1e-6).square().sum())
    return [torch.func.vmap(by_weight, (None, 0))(weight, x)]


@pytest.mark.parametrize("program", (_twice, _forward_mode, _for_each_row))
def test_second_derivatives_and_transforms(gpus: None, program: Any) -> None:
    """torch has another formula of the second derivative where a norm is one op, as on GPUs."""
    for a, b in zip(program("remote"), program("cpu"), strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-4, atol=1e-5)


def test_a_residual_has_the_bits_of_the_cpu_on_cpu_workers(one: Any) -> None:
    """One op would add its gradient of x as one term."""

    def gradient(device: str) -> torch.Tensor:
        torch.manual_seed(10)
        x, layer = torch.randn(64, 32).to(device).requires_grad_(), nn.RMSNorm(32).to(device)
        (x + layer(x)).square().sum().backward()
        return x.grad

    assert torch.equal(gradient("remote").cpu(), gradient("cpu"))


def test_inference_mode(gpus: None) -> None:
    layer, x = nn.RMSNorm(8), torch.randn(4, 8)
    with torch.inference_mode():
        want, x = layer(x), x.to("remote")
        layer.to("remote")
        before = gt.stats()["client"]["ops"]
        got = layer(x)
        assert gt.stats()["client"]["ops"] == before + 1
        assert torch.equal(got.cpu(), want)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own
def test_weights_of_another_dtype_keep_torchs_ops(gpus: None) -> None:
    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(6)
        x = torch.randn(4, 8, dtype=torch.bfloat16).to(device).requires_grad_()
        weight = torch.randn(8).to(device).requires_grad_()
        out = F.rms_norm(x, (8,), weight, 1e-6)
        return [out, *torch.autograd.grad(out.sum(), (x, weight))]

    for a, b in zip(trained("remote"), trained("cpu"), strict=True):
        assert a.dtype == b.dtype and torch.equal(a.cpu(), b)


@pytest.mark.parametrize("gpus", [CONFIG], indirect=True)
def test_rows_on_two_workers_stay_there(gpus: None) -> None:
    torch.manual_seed(8)
    x, scale, weight = torch.randn(6, 3, 8), torch.randn(()), torch.randn(8)

    def trained(x: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        hidden = x * leaves[0]
        out = F.rms_norm(hidden, (8,), leaves[1], 0.1)
        return out, *torch.autograd.grad(out.square().sum(), [hidden, *leaves])

    far = [tensor.to("remote").requires_grad_() for tensor in (scale, weight)]
    with gt.signal.context("rows"):
        got = trained(x.to("remote"), far)
    assert [gt.inspect(tensor)["layout"] for tensor in got[:2]] == ["[S(0)]", "[S(0)]"]
    for a, b in zip(got, trained(x, [tensor.clone().requires_grad_() for tensor in (scale, weight)]), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)


def test_captured_steps(gpus: None) -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(9)
        model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = step if device == "cpu" else gt.compile(step)
        return [run(torch.randn(4, 8).to(device)).item() for _ in range(4)]

    assert losses("remote") == pytest.approx(losses("cpu"), rel=1e-6)
