"""Fake quantisation: every kind of torch's has the CPU's bits, its buffers too, and no op is taken for an optimizer's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization as quantization
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

import gt
from tests.helpers import longer

pytestmark = [
    pytest.mark.usefixtures("plain_threads", "one"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning"),
]
Fake = quantization.FakeQuantize
Fused = quantization.FusedMovingAvgObsFakeQuantize
KINDS: dict[str, Callable[[], nn.Module]] = {
    "fused by tensor": Fused,
    "fused, symmetric": lambda: Fused(
        quantization.MovingAverageMinMaxObserver, -127, 127, dtype=torch.qint8, qscheme=torch.per_tensor_symmetric
    ),
    "fused by channel": lambda: quantization.default_fused_per_channel_wt_fake_quant(),
    "by tensor": Fake,
    "by channel": lambda: quantization.default_per_channel_weight_fake_quant(),
    "histogram": lambda: quantization.default_histogram_fake_quant(),
    "fixed": lambda: quantization.default_fixed_qparams_range_0to1_fake_quant(),
    "learned": lambda: _LearnableFakeQuantize(quantization.MovingAverageMinMaxObserver, 0, 255, use_grad_scaling=True),
}


@pytest.mark.parametrize("name", longer(KINDS, [kind for kind in KINDS if kind != "histogram"]))
def test_fake_quantisation_has_the_bits_of_the_cpu(name: str) -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        fake, seen = KINDS[name]().to(device), []
        for scale in (1.0, 3.0, 0.5):
            x = (torch.randn(3, 4, 2, 2) * scale).to(device).requires_grad_()
            out = fake(x)
            out.square().sum().backward()
            seen += [out, x.grad, *(b.clone() for _, b in fake.named_buffers(remove_duplicate=False))]
        fake.apply(quantization.disable_observer)
        fake.apply(quantization.disable_fake_quant)
        x = torch.randn(3, 4, 2, 2).to(device)
        return [t.detach().cpu() for t in (*seen, fake(x), *(b for _, b in fake.named_buffers(remove_duplicate=False)))]

    for got, want in zip(run("remote"), run("cpu"), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_wrong_buffers_are_refused() -> None:
    one = torch.ones(1, device="remote")
    on, zero = one.long(), one.int()
    x = torch.randn(2, 3, device="remote")
    with pytest.raises(RuntimeError, match="running_min has 1 elements, want 2"):
        torch.fused_moving_avg_obs_fake_quant(x, on, on, one, one, one, zero, 0.1, 0, 255, 0, True, False)
    with pytest.raises(RuntimeError, match="ch_axis is 2, want 0 to 1"):
        torch.fused_moving_avg_obs_fake_quant(x, on, on, one, one, one, zero, 0.1, 0, 255, 2, True, False)
    assert x.sum().item() == x.cpu().sum().item()


def test_a_fused_norm_gives_its_result() -> None:
    x, weight = torch.randn(2, 4), torch.randn(4)
    got = torch.ops.aten._fused_rms_norm(x.to("remote"), [4], weight.to("remote"), 1e-5)[0]
    assert torch.equal(got.cpu(), torch.ops.aten._fused_rms_norm(x, [4], weight, 1e-5)[0])


def on(device: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(device) for tensor in tensors]


WITHOUT_META: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "by a scale that is a tensor": lambda x: torch.fake_quantize_per_tensor_affine(
        x, *on(x.device.type, torch.tensor([0.1]), torch.tensor([2], dtype=torch.int32)), 0, 15
    ),
    "by a number": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 2, 0, 15),
    "by channel": lambda x: torch.fake_quantize_per_channel_affine(
        x, *on(x.device.type, torch.full((6,), 0.1), torch.zeros(6, dtype=torch.int32)), 1, 0, 15
    ),
    "gamma's gradient": lambda x: torch.ops.aten._standard_gamma_grad(x, x),
    "Dirichlet's gradient": lambda x: torch.ops.aten._dirichlet_grad(x, x, x),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 1),
    "multi margin": lambda x: F.multi_margin_loss(x, torch.arange(4).to(x.device)).expand(4, 6),
    "multilabel margin": lambda x: F.multilabel_margin_loss(x, torch.zeros(4, 6).long().to(x.device)).expand(4, 6),
}


@pytest.mark.parametrize("name", WITHOUT_META)
@pytest.mark.parametrize("transposed", [False, True])
def test_an_op_without_a_meta_kernel_has_the_cpus_strides(name: str, transposed: bool) -> None:
    def run(device: str) -> list[torch.Tensor]:
        x = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) + 0.1
        x = x.mT.contiguous().mT if transposed else x
        leaf = x.to(device).requires_grad_(not name.endswith("gradient"))
        y = WITHOUT_META[name](leaf)
        return [y, *(torch.autograd.grad(y.sum(), leaf) if leaf.requires_grad else ())]

    got = run("remote")
    for a, b in zip(got, run("cpu"), strict=True):
        assert a.stride() == b.stride() and torch.equal(a.detach().cpu(), b.detach())


@pytest.mark.parametrize("name", WITHOUT_META)
def test_no_value_decides_the_shape_of_an_op_without_a_meta_kernel(name: str) -> None:
    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_(not name.endswith("gradient"))
        y = WITHOUT_META[name](x).sum()
        return torch.autograd.grad(y, x)[0] if x.requires_grad else y

    for _ in range(4):
        step(torch.rand(4, 6))
    assert "depends on values" not in step.explain()


def test_a_step_with_ranges_in_buffers_is_one_program() -> None:
    low, high = torch.zeros(1, device="remote"), torch.ones(1, device="remote")
    w = torch.randn(4, 6, device="remote", requires_grad=True)

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        low.copy_(torch.minimum(low, x.min().reshape(1)))
        high.copy_(torch.maximum(high, x.max().reshape(1)))
        scale = (high - low) / 255
        y = torch.fake_quantize_per_tensor_affine(x * w, scale, (-low / scale).round().int(), 0, 255)
        loss = y.square().mean()
        loss.backward()
        w.grad = None
        return loss

    for _ in range(5):
        step(torch.randn(4, 6))
    assert step.explain().splitlines()[0].endswith(": 1 program") and "in parts" not in step.explain()


def test_wrong_scales_are_refused_at_once() -> None:
    x = torch.rand(4, 6, device="remote")
    with pytest.raises(RuntimeError, match="same dimensions"):
        torch.fake_quantize_per_channel_affine(
            x, torch.ones(3, device="remote"), torch.zeros(6, device="remote").int(), 1, 0, 255
        )
