"""Fake quantisation: every kind of torch's has the CPU's bits, its buffers too, and no op is taken for an optimizer's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization as quantization
from torch import nn
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

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
