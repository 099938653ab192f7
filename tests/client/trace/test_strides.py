"""Strides and slices: results have the CPU's strides, on which the order of later sums depends; offsets do no harm."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gt.client.current_session import Current

pytestmark = pytest.mark.usefixtures("plain_threads", "one")
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
Op = Callable[[torch.Tensor], Any]
WEIGHT = torch.randn(6, 4, 3, 3)
OPS: dict[str, Op] = {
    "conv2d": lambda x: F.conv2d(x, WEIGHT.to(x.device, x.dtype), padding=1),
    "conv2d of 1": lambda x: F.conv2d(x, WEIGHT[:, :, :1, :1].to(x.device, x.dtype)),
    "strided": lambda x: F.conv2d(x, WEIGHT.to(x.device, x.dtype), stride=2),
    "dilated": lambda x: F.conv2d(x, WEIGHT.to(x.device, x.dtype), dilation=2),
    "depthwise": lambda x: F.conv2d(x, WEIGHT[:4, :1].to(x.device, x.dtype), groups=4),
    "transposed": lambda x: F.conv_transpose2d(x, WEIGHT[:4].to(x.device, x.dtype)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "max_pool2d": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 2),
    "adaptive to 1": lambda x: F.adaptive_avg_pool2d(x, 1),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "instance_norm": F.instance_norm,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "adaptive_max": lambda x: F.adaptive_max_pool2d(x, 2),
    "softplus": F.softplus,
    "normalize": lambda x: F.normalize(x, dim=1),
    "upsample and add": lambda x: F.interpolate(F.avg_pool2d(x, 2), scale_factor=2) + x,
    "conv1d of rows": lambda x: F.conv1d(x.flatten(2), WEIGHT[:, :, 0].to(x.device, x.dtype)),
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "shuffle": lambda x: F.pixel_shuffle(torch.cat([x, x], 1), 2),
    "roll": lambda x: x.roll((1, 2), (2, 3)),
    "roll of all": lambda x: x.roll(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "layer_norm of channels": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2]).permute(0, 3, 1, 2),
    "gelu": F.gelu,
    "silu": F.silu,
    "softmax": lambda x: x.softmax(1),
    "sum": lambda x: x.sum(1, keepdim=True),
    "add": lambda x: x + x[:, :1],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "prelu": lambda x: F.prelu(x, torch.full((4,), 0.1, device=x.device, dtype=x.dtype)),
    "mse": lambda x: F.mse_loss(x, x.detach() * 2),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x.detach() * 2),
    "huber": lambda x: F.huber_loss(x, x.detach() * 2),
    "glu": lambda x: F.glu(x, 1),
    "logsigmoid": F.logsigmoid,
    "elu": F.elu,
    "shuffle of channels": lambda x: torch.channel_shuffle(x, 2),
    "unpool": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "sum of reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect").sum(),
    "sum of replicate": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate").sum(),
    "sum of batch_norm": lambda x: F.batch_norm(x, None, None, training=True)[..., 0].sum(),
    "reflect in 3d": lambda x: F.pad(x[..., None].contiguous(memory_format=LAST[5]), (0, 0, 1, 1, 1, 1), mode="reflect"),
    "grid_sample": lambda x: F.grid_sample(x, x.new_zeros(len(x), 3, 3, 2), align_corners=False),
}
INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "last": lambda: torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last),
    "contiguous": lambda: torch.randn(2, 4, 6, 6),
    "permuted": lambda: torch.randn(2, 6, 6, 4).permute(0, 3, 1, 2),
    "one row": lambda: torch.randn(1, 4, 6, 6).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("kind", [*INPUTS, "part"])
@pytest.mark.parametrize("name", OPS)
def test_strides_are_the_cpus(name: str, kind: str) -> None:
    host = torch.randn(2, 8, 6, 6) if kind == "part" else INPUTS[kind]()
    made: list[list[torch.Tensor]] = []
    for x in (host, host.to("remote")):
        x = x.detach()[:, :4].requires_grad_()
        result = OPS[name](x)
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        made.append([*results, *torch.autograd.grad(results[0].square().sum(), x)])
    for want, got in zip(*made, strict=True):
        assert got.stride() == want.stride(), f"{name} of {host.stride()}: {got.stride()}, want {want.stride()}"
        assert torch.equal(got.detach().cpu(), want.detach())


@pytest.mark.parametrize("kind", ["last", "contiguous"])
@pytest.mark.parametrize("name", OPS)
def test_gradients_have_the_cpus_strides_whatever_reaches_them_has(name: str, kind: str) -> None:
    """A layer norm of channels, say, hands a contiguous gradient to a convolution whose input is channels last."""
    host, made = INPUTS[kind](), []
    weight = WEIGHT.clone().requires_grad_()
    for device in ("cpu", "remote"):
        x, w = host.detach().to(device).requires_grad_(), weight.detach().to(device).requires_grad_()
        result = OPS[name](x) if "conv2d" not in name else F.conv2d(x, w if name == "conv2d" else w[:, :, :1, :1])
        result = result if isinstance(result, torch.Tensor) else result[0]
        reaching = torch.arange(float(result.numel())).view(result.shape)
        if result.dim() == 4 and kind == "contiguous":
            reaching = reaching.contiguous(memory_format=torch.channels_last)
        leaves = [x, w] if "conv2d" in name else [x]
        made.append(torch.autograd.grad(result, leaves, reaching.to(device)))
    for want, got in zip(*made, strict=True):
        assert got.stride() == want.stride() and torch.equal(got.cpu(), want), f"{got.stride()}, want {want.stride()}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "side", "kernel"), [(1, 5, 3), (2, 5, 3), (1, 5, 5), (1, 18, 3), (2, 5, 1), (17, 4, 1)])
def test_a_convolution_of_three_dims_has_the_cpus_strides(
    rows: int, side: int, kernel: int, transposed: bool, dtype: torch.dtype
) -> None:
    """Which library executes it depends on sizes and dtype, and one of them makes contiguous results of channels last."""
    call = F.conv_transpose3d if transposed else F.conv3d
    host = torch.randn(rows, 4, side, side, side).to(dtype)
    weight = torch.randn(4, 4, kernel, kernel, kernel).to(dtype)
    for of_input, of_weight in ((True, False), (False, True), (True, True), (False, False)):
        made = []
        for device in ("cpu", "remote"):
            leaves = []
            for value, last in ((host, of_input), (weight, of_weight)):
                laid_out = value.contiguous(memory_format=LAST[5]) if last else value
                leaves.append(laid_out.detach().to(device).requires_grad_())
            result = call(*leaves, padding=kernel // 2)
            made.append([result, *torch.autograd.grad(result.sum(), leaves)])
        for want, got in zip(*made, strict=True):
            assert got.stride() == want.stride(), f"{got.stride()}, want {want.stride()}"
            torch.testing.assert_close(got.detach().cpu(), want.detach())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("of_keys", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)])
@pytest.mark.parametrize("of_queries", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2)])
def test_attention_is_laid_out_as_its_queries_are(of_queries: tuple, of_keys: tuple, masked: bool) -> None:
    """So a `view` of it is possible where it is on the CPU. of_queries, of_keys: the order of dims in memory."""
    made = []
    host = [torch.randn(2, 3, length, 8) for length in (4, 6, 6)]
    for device in ("cpu", "remote"):
        leaves = []
        for value, order in zip(host, (of_queries, of_keys, of_keys), strict=True):
            place = [order.index(dim) for dim in range(4)]
            leaves.append(value.permute(order).contiguous().to(device).permute(place).requires_grad_())
        mask = torch.ones(4, 6, dtype=torch.bool).tril().to(device) if masked else None
        made.append([F.scaled_dot_product_attention(*leaves, attn_mask=mask)])
    for want, got in zip(*made, strict=True):
        assert got.stride() == want.stride() and torch.equal(got.detach().cpu(), want.detach())


@pytest.mark.parametrize("name", ["conv1d", "strided", "depthwise", "transposed", "after a norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_convolution_over_time_of_transposed_rows_has_the_cpus_strides(name: str, dtype: torch.dtype, rows: int) -> None:
    """Rows [batch, time, channels] are transposed for it, and its result is transposed back and viewed."""
    weight = torch.randn(4, 1 if name == "depthwise" else 4, 3).to(dtype)
    host, made = torch.randn(rows, 7, 4).to(dtype), []
    for device in ("cpu", "remote"):
        x, w = host.to(device).requires_grad_(), weight.to(device).requires_grad_()
        turned = (F.layer_norm(x, (4,)) if name == "after a norm" else x).transpose(1, 2)
        if name == "transposed":
            result = F.conv_transpose1d(turned, w)
        else:
            result = F.conv1d(turned, w, stride=2 if name == "strided" else 1, groups=4 if name == "depthwise" else 1)
        made.append([result, *torch.autograd.grad(result.square().sum(), (x, w))])
    for want, got in zip(*made, strict=True):
        assert got.stride() == want.stride() and torch.equal(got.detach().cpu(), want.detach())


def test_factors_and_elementwise_results_have_the_cpus_strides() -> None:
    made, a, b = [], torch.randn(10, 10, 5).mT, torch.randn(10, 5).t().contiguous().t()
    for device in ("cpu", "remote"):
        x, y = a.mT.contiguous().to(device).mT, b.t().to(device).t()
        outs = [f(x.mT, y) for f in (torch.copysign, torch.logaddexp, torch.logical_and, torch.floor_divide, torch.heaviside)]
        made.append([*torch.linalg.svd(x), *torch.linalg.svd(x, full_matrices=False), *outs])
    assert [t.stride() for t in made[1]] == [t.stride() for t in made[0]]


# ---- operands at other places of their storages


def first_two(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((2,), (1,), x.storage_offset())


SLICED: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda x, y: x @ y.T,
    lambda x, y: x + y,
    lambda x, y: x.add_(y, alpha=2),
    lambda x, y: x.copy_(y),
    lambda x, y: (x.clone(), x.clone()[0]),
    lambda x, y: torch.cat([x, y]),
    lambda x, y: x.T.reshape(-1),
    lambda x, y: torch.ops.aten._unsafe_view(x, list(x.shape)).mul_(2),
    lambda x, y: first_two(torch.ops.aten._unsafe_view(x, list(x.shape))),
    lambda x, y: first_two(torch.unsafe_chunk(x, 2)[1]),
    lambda x, y: x.as_strided((2,), (1,)) + y.as_strided((2,), (1,), y.storage_offset() + 1),
    lambda x, y: torch.as_strided_scatter(x, y[0, :2], (2,), (1,)),
    lambda x, y: x.contiguous().unsqueeze_(0),
    lambda x, y: x.view(-1) if x.is_contiguous() else x.unsqueeze(0),
    lambda x, y: F.layer_norm(x, x.shape[1:]).softmax(-1),
    lambda x, y: torch.where(x > y, x, y).sort(-1),
    lambda x, y: torch._foreach_add([x, y], [y, x]),
    lambda x, y: torch.split(x, 1)[1].zero_(),
    lambda x, y: x.index_add_(0, torch.zeros(y.shape[0], dtype=torch.long, device=y.device), y),
    lambda x, y: torch.add(x, y, out=y[:, :]),
    lambda x, y: x.detach().t_(),
    lambda x, y: y.fill_(x.sum()).cumsum(0),
]  # fmt: skip


def chain(device: str, seed: int) -> list[torch.Tensor]:
    """Results of random ops on random slices of two tensors that they write, and these tensors."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    held = [torch.randn(9, 14, generator=generator).to(device) for _ in range(2)]
    results: list[torch.Tensor] = []
    for _ in range(60):
        op, (rows, columns) = draw.choice(SLICED), (draw.choice([2, 4]), draw.choice([3, 5, 14]))
        x, y = (
            tensor[row : row + rows, column : column + columns]
            for tensor in held
            for row, column in [(draw.randint(0, 9 - rows), draw.randint(0, 14 - columns))]
        )
        made = op(x, y)
        for tensor in held:
            tensor.tanh_()
        results += [each.cpu().clone() for each in (made if isinstance(made, (list, tuple)) else [made])]
    return [*results, *[tensor.cpu() for tensor in held]]


@pytest.mark.parametrize("seed", range(6))
def test_ops_on_slices_have_the_cpus_results(seed: int) -> None:
    torch.testing.assert_close(chain("remote", seed), chain("cpu", seed))


def test_a_slice_at_another_place_is_no_other_kind_of_call() -> None:
    data, weight = torch.randn(64, 8), torch.randn(8, 8)
    there, held = data.to("remote"), weight.to("remote")

    def step(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.relu(rows @ weight + rows).mul_(rows).sum()

    step(there[2:4], held)
    templates = Current.recorder.templates
    for start in range(4, 60, 2):
        before = len(templates)
        got = step(there[start : start + 2], held)
        assert len(templates) - before == 1, "the slice alone"
        torch.testing.assert_close(got.cpu(), step(data[start : start + 2], weight))
