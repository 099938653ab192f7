"""Python-level behaviour of torch, views, in-place ops, indices and out=: a remote tensor is as a CPU tensor.

Each row is a small program of a device; its result must be the CPU's, to the bit.
"""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gt
from tests.helpers.inline_session import InlineSession, inline  # noqa: F401

Device = Any
ROWS: dict[str, Callable[[Device], Any]] = {}


def row(f: Callable[[Device], Any]) -> Callable[[Device], Any]:
    ROWS[f.__name__] = f
    return f


def base(d: Device, *shape: int) -> torch.Tensor:
    n = int(np.prod(shape or (3, 4)))
    return (torch.arange(n, dtype=torch.float32).reshape(shape or (3, 4)) * 0.5 - 1).to(d)


# ---- making


class Passing(TorchDispatchMode):
    """Executes every op as it is."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@row
def tensor_of_list_under_a_dispatch_mode(d):
    with Passing():
        made = torch.tensor([[1, 2], [3, 4]], device=d), torch.tensor(2.5, device=d), torch.tensor([], device=d)
        return *made, torch.as_tensor([1.0], device=d), made[0].new_tensor([1.5]), torch.tensor([True], device=d)


@row
def clipping_by_lists(d):
    weights = [base(d, 3).requires_grad_(), base(d, 2, 2).requires_grad_()]
    sum(w.square().sum() for w in weights).backward()
    norm = nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
    clipped = [w.grad.clone() for w in weights]
    nn.utils.clip_grad_value_(weights, 0.2, foreach=True)
    return norm, *clipped, *[w.grad for w in weights]


@row
def tensor_of_list(d):
    return torch.tensor([[1, 2], [3, 4]], device=d), torch.tensor(2.5, device=d), torch.tensor([], device=d)


@row
def as_tensor_and_new_tensor(d):
    x = base(d)
    return torch.as_tensor([1.0, 2.0], device=d), x.new_tensor([1, 2]), torch.asarray([3, 4], device=d)


@row
def factories(d):
    return (
        torch.zeros(2, 3, device=d), torch.ones(2, dtype=torch.int32, device=d), torch.full((2, 2), 7, device=d),
        torch.arange(5, device=d), torch.arange(1, 2, 0.25, device=d), torch.linspace(0, 1, 5, device=d),
        torch.eye(3, device=d), torch.eye(2, 4, device=d), torch.tril(torch.ones(3, 3, device=d)),
        torch.full((2,), True, device=d), torch.scalar_tensor(3.0, device=d), torch.logspace(0, 2, 3, device=d),
    )  # fmt: skip


@row
def like_and_new(d):
    x = base(d)
    return (
        torch.zeros_like(x), torch.ones_like(x, dtype=torch.int64), torch.full_like(x, 3), x.new_zeros(2), x.new_ones(3),
        x.new_full((2,), 4.0), torch.empty_like(x).shape, x.new_empty(2).shape, torch.zeros_like(x, device="cpu"),
        x.new_zeros(2, device="cpu"), torch.arange(3, device=x.device), torch.zeros(2, device=x.device, dtype=x.dtype),
    )  # fmt: skip


@row
def arange_out(d):
    out = torch.empty(0, dtype=torch.int64, device=d)
    torch.arange(5, out=out)
    return out, out.shape, out + 1


@row
def out_that_resizes(d):
    x, out = base(d), torch.empty(0, device=d)
    torch.add(x, x, out=out)
    same = torch.empty(3, 4, device=d)
    torch.mul(x, 2, out=same)
    return out, out.shape, same


@row
def out_of_two(d):
    x = base(d)
    values, indices = torch.empty(0, device=d), torch.empty(0, dtype=torch.int64, device=d)
    torch.max(x, 1, out=(values, indices))
    return values, indices


# ---- reading


@row
def python_numbers(d):
    x = base(d)
    return x.sum().item(), x.tolist(), bool(x[0, 0] < 0), int(x[2, 3]), float(x[1, 1]), len(x), x[0, 3].tolist()


@row
def numpy_views(d):
    x = base(d)
    return x.numpy(), np.asarray(x), x.data.numpy(), np.asarray(x, dtype=np.float64)


@row
def shown(d):
    x = base(d)
    return f"{x.sum():.2f}", format(x[0, 0], "5.1f"), f"{x.shape}"


@row
def cpu_keeps_strides(d):
    y = base(d).t().cpu()
    return y, y.stride()


@row
def iteration(d):
    return [r.sum().item() for r in base(d)], (0.5 in base(d)), [int(i) for i in torch.arange(3, device=d)]


@row
def to_and_back(d):
    x = base(d)
    return x.to(torch.float64), x.double(), x.half().float(), x.to("cpu"), x.cpu(), x.to(x), x.type(torch.int32), x.long()


@row
def to_other(d):
    return base(d).to(torch.zeros(1, dtype=torch.float64, device=d)), base(d).to(torch.zeros(1, dtype=torch.int32))


@row
def bytes_of_other_dtypes(d):
    kinds = (torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.complex64, torch.int8)
    return [base("cpu").abs().to(k).to(d).cpu() for k in kinds]


@row
def empty_tensors(d):
    x = torch.zeros(0, 3, device=d)
    return x, x.sum(), torch.cat([x, x]), x.cpu().shape


# ---- copying


@row
def copy_both_ways(d):
    x, host = base(d), torch.full((3, 4), 9.0)
    x[1].copy_(torch.ones(4))
    host.copy_(x)
    y = torch.empty(3, 4, dtype=torch.float64, device=d)
    y.copy_(base("cpu"))
    z = torch.empty(2, 4, device=d)
    z.copy_(torch.arange(4))
    return x, host, y, z


@row
def copy_into_a_view_of_new_memory(d):
    x = torch.zeros(3, 4, device=d)
    y = torch.empty_strided((2, 2), (1, 2), device=d)
    y.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    p = torch.empty(2, device=d)
    p.data.copy_(torch.tensor([5.0, 6.0]))
    v = torch.empty(4, device=d)
    w = v[:2]
    v.copy_(torch.arange(4.0))
    x[0].copy_(torch.arange(4.0))
    return x, y, p, v, w


@row
def large_upload(d):
    x = torch.arange(200_000, dtype=torch.float32)
    y = x.to(d, copy=True)
    x.zero_()
    return y.sum(), y[-1]


@row
def upload_is_a_copy(d):
    x = torch.ones(3)
    y = x.to(d, copy=True)
    x.zero_()
    return y


@row
def deepcopy(d):
    x = base(d).requires_grad_()
    (x * 2).sum().backward()
    y = copy.deepcopy(x)
    p = copy.deepcopy(nn.Parameter(base(d)))
    x.data.zero_()
    return y, y.grad, y.requires_grad, p, isinstance(p, nn.Parameter), str(y.device).split(":")[0] == d


@row
def save_and_load(d):
    layer = nn.Linear(2, 2)
    nn.init.ones_(layer.weight), nn.init.zeros_(layer.bias)
    layer = layer.to(d)
    file = io.BytesIO()
    torch.save({"model": layer.state_dict(), "x": base(d)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True, map_location="cpu")
    other = nn.Linear(2, 2).to(d)
    other.load_state_dict(loaded["model"])
    return loaded["x"], loaded["model"], other.weight, other.weight.requires_grad


# ---- views and in place


@row
def view_shares_memory(d):
    x = base(d)
    a, b, c = x[1], x.t(), x.view(12)
    a.add_(10)
    c[0] = -5
    b[3].mul_(2)
    return x, a, b, c


@row
def in_place_view_ops(d):
    x = base(d)
    x.t_()
    y = base(d, 1, 3, 1)
    y.squeeze_()
    z = base(d)
    z.unsqueeze_(0)
    w = base(d)
    w.transpose_(0, 1)
    v = base(d, 2, 2)
    v.swapaxes_(0, 1)
    s = base(d)
    s.as_strided_((2, 2), (1, 2))
    q = base(d, 1, 2)
    q.squeeze_(0)
    return [(t, t.shape, t.stride(), t + 1) for t in (x, y, z, w, v, s, q)]


@row
def in_place_view_op_shares(d):
    x = base(d)
    y = x.view(12)
    x.t_()
    x.add_(1)
    return x, y


@row
def resize(d):
    x = base(d)
    x.resize_(2, 3)
    y = base(d)
    y.resize_(14)
    z = torch.empty(0, device=d)
    z.resize_(2, 2).fill_(1)
    return x, x.shape, y[:12], y.shape, z


@row
def resize_within_memory(d):
    x = base(d)
    front, empty = x[0, 1:3], x.view(-1)[6:6]
    front.resize_(4).fill_(9)
    empty.resize_(2, 2).fill_(7)
    return x, front, empty


@row
def factories_into_views(d):
    x = torch.zeros(4, 6, device=d)
    torch.arange(6, out=x[0])
    torch.linspace(0, 1, 3, out=x[1, :3])
    torch.logspace(0, 2, 3, out=x[1, 3:])
    torch.eye(2, out=x[2:, :2])
    torch.zeros(2, out=x[0, :2])
    whole = torch.ones(3, device=d)
    same = whole.view(3)
    torch.arange(3, out=whole)
    order = torch.zeros(5, dtype=torch.long, device=d)
    part = torch.randperm(3, out=order[1:4])
    return x, whole, same + 0, torch.equal(part, order[1:4]), order.sort().values


@row
def windows_and_frequencies(d):
    made = [torch.fft.fftfreq(n, 0.5, device=d) for n in (1, 4, 5)] + [torch.fft.rfftfreq(5, device=d)]
    made += [torch.kaiser_window(6, *options, device=d) for options in ((), (False,), (True, 3.0))]
    for window in (torch.hann_window, torch.hamming_window, torch.blackman_window, torch.bartlett_window):
        made += [window(n, periodic=periodic, device=d) for n in (1, 6, 7) for periodic in (True, False)]
    with pytest.warns(UserWarning, match="torch.range is deprecated"):
        return made, torch.range(1, 3, device=d), torch.range(1, 2, 0.5, dtype=torch.float64, device=d)


@row
def tangents_of_other_strides(d):
    x, v = base(d, 3, 4), base(d, 4, 3)
    both = torch.func.vmap(lambda a, b: torch.func.jvp(torch.sin, (a,), (b.T,)))(
        torch.stack([x, x + 1]), torch.stack([v, v - 1])
    )
    return torch.func.jvp(torch.sin, (x,), (v.T,)), torch.func.jvp(torch.exp, (x.T,), (v,)), both


@row
def set_data(d):
    p = nn.Parameter(base(d))
    y = base(d, 2, 2)
    p.data = y
    y.add_(1)
    p.data.mul_(2)
    return p, y, p.shape, p.requires_grad


@row
def set_memory(d):
    x, y = torch.zeros(2, device=d), base(d)
    x.set_(y)
    return x, x.shape


@row
def chained_in_place(d):
    x = base(d)
    x.add_(1).mul_(2).clamp_(0, 3).sqrt_()
    x[x > 1] = 0.5
    x.masked_fill_(x == 0, -1).zero_().fill_(2.5).sub_(1, alpha=0.5)
    return x


@row
def splits(d):
    x = base(d)
    a, b = x.split(2, 1)
    c, e = x.chunk(2, 0)
    a.zero_()
    u = x.unbind(0)
    u[2].fill_(7)
    return x, a, b, c, e, x.tensor_split(3, 1)


@row
def shapes(d):
    x = base(d, 2, 3, 4)
    return (
        x.permute(2, 0, 1), x.reshape(6, 4), x.flatten(1), x.expand(2, 2, 3, 4), x.movedim(0, 2), x.narrow(1, 1, 2),
        x.unfold(2, 2, 1), x.diagonal(0, 1, 2), x.transpose(0, 1).contiguous(), x.permute(2, 0, 1).reshape(-1),
        x.repeat(1, 2, 1), x.roll(1, 0), x.flip(0), torch.stack([x, x]), torch.cat([x, x], 1), x.select(1, 2), x.mT,
        x.as_strided((2, 2), (4, 1), 3), x.unsqueeze(-1), x.squeeze(), x.tile(2), x.ravel(), x.view(torch.int32),
    )  # fmt: skip


@row
def contiguous_and_formats(d):
    x = base(d, 1, 2, 2, 2)
    y = x.contiguous(memory_format=torch.channels_last)
    return y, y.stride(), y.is_contiguous(), x.to(memory_format=torch.channels_last).stride(), x.contiguous() is x


# ---- indexing


@row
def indexing(d):
    x = base(d)
    i = torch.tensor([2, 0], device=d)
    return (
        x[1], x[1, 2], x[-1], x[..., 0], x[:, 1:3], x[::2], x[None], x[[0, 1]], x[i], x[i, i], x[:, [1, 1]],
        x[torch.tensor([0, 2])], x[1:, i], x[0][1:], x[i[0]], x[i.tolist()], x.take(i), x.gather(1, i.view(2, 1)),
        x.index_select(0, i),
    )  # fmt: skip


@row
def masks(d):
    x = base(d)
    m = x > 1
    return x[m], x[m.cpu()], x[x > 99], torch.where(m, x, 0.0), x.masked_select(m), x[m[:, 0]], torch.where(m)


@row
def index_assignment(d):
    x = base(d)
    x[0] = 1
    x[1, 2] = torch.tensor(5.0)
    x[:, 3] = torch.arange(3.0, device=d)
    x[[0, 2], [1, 1]] = 9
    x[x < 0] = 0
    x[torch.tensor([True, False, True])] *= 2
    x[1:, :2] += 1
    x[2] = base(d)[0]
    x.index_add_(0, torch.tensor([0, 0], device=d), torch.ones(2, 4, device=d))
    x.scatter_(1, torch.tensor([[0], [1], [2]], device=d), 3.0)
    x.index_fill_(1, torch.tensor([3], device=d), 8.0)
    x.index_copy_(0, torch.tensor([1], device=d), torch.ones(1, 4, device=d))
    x.index_put_((torch.tensor([0], device=d),), torch.tensor(2.0, device=d), accumulate=True)
    return x


@row
def index_gradients(d):
    x = base(d).requires_grad_()
    (x[[0, 0, 2]] * 2).sum().backward()
    y = base(d).requires_grad_()
    (y[y > 0] * 3).sum().backward()
    z = base(d).requires_grad_()
    w = z * 1
    w[0] = 0
    w[:, 1] *= 4
    w.sum().backward()
    return x.grad, y.grad, z.grad


# ---- shapes that depend on values


@row
def dynamic_shapes(d):
    x = torch.tensor([3, 1, 3, 2, 0], device=d)
    return (
        x.nonzero(), torch.unique(x), torch.unique(x, return_inverse=True, return_counts=True), x.argwhere(),
        torch.unique_consecutive(x), x.repeat_interleave(torch.tensor([1, 2, 0, 1, 1], device=d)), x.bincount(),
        torch.nonzero(x, as_tuple=True), torch.equal(x, x.clone()), torch.equal(x, x + 1), torch.allclose(x, x),
        torch.isin(x, torch.tensor([1, 2], device=d)), torch.combinations(x[:3]), torch.bucketize(x, x.sort()[0]),
    )  # fmt: skip


# ---- mixing host and remote


@row
def host_scalars(d):
    x = base(d)
    x.mul_(torch.tensor(2.0)).add_(torch.tensor(1, dtype=torch.int64))
    i = torch.arange(3, device=d)
    return x, x + torch.tensor(2.0), torch.tensor(3.0) * x, i + torch.tensor(0.5, dtype=torch.float64), (
        i * torch.tensor(2)).dtype, torch.where(x > 1, x, torch.tensor(0.0)), x.clamp(min=torch.tensor(1.0)), x.lerp(
        x, torch.tensor(0.5))  # fmt: skip


@row
def promotion(d):
    x, i, h = base(d), torch.arange(4, device=d), base(d).half()
    return [
        t.dtype for t in (x + 1, i + 1, i + 1.5, i / 2, h * 2.0, h + x, i * True, x > 0, i // 2, x**2, i**2, 2 - i, ~(x > 0))
    ]


# ---- autograd


@row
def gradients(d):
    x, w = base(d).requires_grad_(), base(d, 4, 2).requires_grad_()
    y = torch.tanh(x @ w)
    (y.exp().mean() + (x**3).sum()).backward()
    g = torch.autograd.grad((x * x).sum(), x, create_graph=True)[0]
    (g**2).sum().backward()
    return x.grad, w.grad


@row
def accumulation(d):
    x = base(d).requires_grad_()
    for _ in range(3):
        (x * 2).sum().backward()
    seen = x.grad.clone()
    x.grad.zero_()
    x.grad = None
    return seen, x.grad is None


@row
def gradient_across_devices(d):
    x = base("cpu").requires_grad_()
    (x.to(d) * 3).sum().cpu().backward()
    y = base(d).requires_grad_()
    (y.cpu() * 2).sum().backward()
    return x.grad, y.grad


@row
def hooks(d):
    x, seen = base(d).requires_grad_(), []
    x.register_hook(lambda g: g * 2)
    x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.sum().item()))
    y = x * 3
    y.retain_grad()
    y.sum().backward()
    return x.grad, y.grad, seen


@row
def custom_function(d):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2 + ctx.saved_tensors[0] * 0

    x = base(d).requires_grad_()
    Double.apply(x).sum().backward()
    return x.grad


@row
def inference_mode(d):
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(16.0).view(4, 4) / 10), layer.bias.zero_()
    layer = layer.to(d)
    with torch.inference_mode():
        x = base(d)
        y = layer(x).softmax(-1).reshape(2, 6).t()
        x.add_(1)
        q = x.view(1, 1, 3, 4)
        return y, x, nn.functional.scaled_dot_product_attention(q, q, q), x.matmul(x.t()), nn.functional.layer_norm(x, (4,))


@row
def no_grad_and_detach(d):
    x = base(d).requires_grad_()
    with torch.no_grad():
        y = x * 2
        x.add_(1)
    z = x.detach()
    z.zero_()
    return y, y.requires_grad, x, z.requires_grad, x.is_leaf


# ---- more ops


@row
def reductions(d):
    x = base(d)
    return (
        x.sum(0), x.mean(), x.max(), x.max(1), x.argmax(), x.std(), x.var(0, keepdim=True), x.norm(), x.prod(), x.amax(1),
        x.cumsum(1), x.logsumexp(1), x.any(), x.all(), x.median(), x.topk(2), x.sort(1, descending=True), x.argsort(),
        x.softmax(-1), x.kthvalue(2), x.count_nonzero(), torch.linalg.vector_norm(x), torch.var_mean(x), x.quantile(0.5),
    )  # fmt: skip


@row
def linear_algebra(d):
    x = base(d)
    s = x.t() @ x + torch.eye(4, device=d) * 5
    return x @ x.t(), torch.linalg.cholesky(s), torch.linalg.inv(s), torch.einsum("ij,kj->ik", x, x), torch.baddbmm(
        x[None, :, :3], x[None], x.t()[None]), torch.outer(x[0], x[1]), torch.linalg.solve(s, x[0]), s.det()  # fmt: skip


@row
def layers(d):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8).to(d)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 4), nn.Upsample(scale_factor=2),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4), nn.LogSoftmax(-1),
    ).to(d)  # fmt: skip
    y = net(x)
    y.sum().backward()
    return y, [p.grad for p in net.parameters()], net[1].running_mean, net[1].num_batches_tracked


@row
def lstm_and_gru(d):
    torch.manual_seed(0)
    a, b = nn.LSTM(4, 5, 2, batch_first=True).to(d), nn.GRU(4, 3).to(d)
    x = torch.randn(2, 3, 4).to(d)
    y, (h, c) = a(x)
    z, _ = b(x)
    (y.sum() + z.sum()).backward()
    return y, h, c, z, a.weight_ih_l0.grad, b.weight_hh_l0.grad


@row
def complex_numbers(d):
    x = torch.view_as_complex(base(d, 3, 2))
    return x, x.conj(), x.abs(), (x * 1j).real, x.conj().imag, torch.view_as_real(x), x * (1 + 2j)


@row
def gradient_clipping(d):
    torch.manual_seed(0)
    net = nn.Linear(4, 4).to(d)
    net(base(d)).pow(2).sum().backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    nn.utils.clip_grad_value_(net.parameters(), 0.05)
    return norm, net.weight.grad


@row
def list_ops(d):
    xs, ys = [base(d), base(d, 5)], [base(d) + 1, base(d, 5) + 1]
    torch._foreach_add_(xs, ys, alpha=2)
    torch._foreach_mul_(xs, [2.0, 3.0])
    torch._foreach_addcdiv_(xs, ys, ys, [0.5, 0.25])
    return torch._foreach_norm(xs), xs, torch._foreach_sqrt(torch._foreach_abs(xs)), torch._foreach_mul(xs, 2)


@row
def backward_of_silu_and_mish(d):
    found = []
    for activation in (nn.functional.silu, nn.functional.mish):
        x = torch.linspace(-3, 3, 401).to(d).requires_grad_()
        activation(x).backward(torch.linspace(-1, 2, 401).to(d))
        found.append(x.grad)
    return found


@row
def strides_of_gradients(d):
    x, g = base(d, 2, 12, 3), base(d, 2, 3, 12).transpose(1, 2)
    more = {"softplus": (1, 20), "hardtanh": (-1, 1), "threshold": (0,), "leaky_relu": (0.1, False), "logit": (None,)}
    names = ("silu", "gelu", "mish", "sigmoid", "tanh", "hardswish", "hardsigmoid", *more)
    found = [getattr(torch.ops.aten, f"{name}_backward")(g, x / 40, *more.get(name, ())) for name in names]
    return found, [t.stride() for t in found]


@row
def matmuls_of_groups(d):
    found = []
    ends = torch.tensor([2, 2, 6], dtype=torch.int32, device=d)
    for dtype in (torch.float32, torch.bfloat16):
        x, w = base(d, 6, 8).to(dtype).requires_grad_(), base(d, 3, 16, 8).to(dtype).requires_grad_()
        y = nn.functional.grouped_mm(x, w.transpose(1, 2), offs=ends)
        y.backward(base(d, 6, 16).to(dtype))
        found += [y, x.grad, w.grad, y.stride()]
    return found


@row
def memory_in_common(d):
    x, y = base(d), base(d)
    linear = nn.Linear(2, 2).to(d)
    views = [x, x[1:], x.t(), x.detach(), x.view(-1)[3:], x[1:].detach(), x.detach()[1:], x.t().detach()[1:].detach()]
    shared = [*views, y, linear.state_dict()["weight"], linear.weight, torch.empty(0, device=d)]
    at = [t.untyped_storage().data_ptr() for t in shared]
    where = [t.data_ptr() - t.untyped_storage().data_ptr() for t in shared]
    return [at.index(a) for a in at], where, [t.untyped_storage().nbytes() for t in (x, x.t(), y)]


def plain(value: Any) -> Any:
    """The result with remote tensors brought to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().resolve_conj()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [plain(v) for v in value]
    return value


APPROXIMATE = {"lstm_and_gru"}  # the CPU has a kernel of its own for whole layers


def same(a: Any, b: Any, exact: bool = True) -> None:
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, (a, b)
        if not exact:
            torch.testing.assert_close(a, b)
            return
        assert torch.equal(a.nan_to_num() if a.is_floating_point() else a, b.nan_to_num() if b.is_floating_point() else b), (
            a,
            b,
        )
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and np.array_equal(a, b)
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y, exact)
    elif isinstance(a, dict):
        same(list(a.values()), list(b.values()), exact)
    else:
        assert a == b


@pytest.mark.parametrize("name", ROWS)
def test_remote_is_as_local(name: str, inline: InlineSession) -> None:  # noqa: F811
    want, got = plain(ROWS[name]("cpu")), plain(ROWS[name]("remote"))
    same(got, want, name not in APPROXIMATE)


@pytest.mark.parametrize("here", [1, 2])
def test_the_sums_of_both_sides_come_in_one_order_whatever_another_test_left(inline: InlineSession, here: int) -> None:  # noqa: F811
    """A convolution's sums depend on the number of threads, and a new thread's need not be this one's."""
    before = torch.get_num_threads()
    other = threading.Thread(target=torch.set_num_threads, args=(3 - here,))
    other.start()
    other.join()
    torch.set_num_threads(here)
    try:
        same(plain(layers("remote")), plain(layers("cpu")))
    finally:
        torch.set_num_threads(before)


def test_a_shape_that_the_arguments_say_is_not_asked_for(inline: InlineSession, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    asked: list[int] = []
    describe = inline.describe
    monkeypatch.setattr(inline, "describe", lambda numbers: asked.extend(numbers) or describe(numbers))
    x, index = base("remote"), torch.tensor([1, 0, 1], device="remote")
    assert x[index].shape == (3, *x.shape[1:]) and x[:, index].shape[1] == 3
    assert nn.functional.one_hot(index, 4).shape == (3, 4)
    assert torch.repeat_interleave(index, index, output_size=2).shape == (2,)
    assert not asked
    unsaid = lambda i, x: plain((nn.functional.one_hot(i), x[x > 1], torch.repeat_interleave(i)))  # noqa: E731
    same(unsaid(index, x), unsaid(index.cpu(), x.cpu()), True)
    assert len(asked) >= 2


ONE_HOT: dict[str, tuple[list, tuple[int, ...]]] = {
    "inferred": ([[0, 2], [1, 1]], ()),
    "negative": ([0, -1], ()),
    "too few classes": ([0, 1], (0,)),
    "fewer than none": ([0, 1], (-2,)),
    "empty, inferred": ([], ()),
    "empty, none": ([], (0,)),
    "empty": ([], (3,)),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", ONE_HOT)
def test_one_hot_infers_and_refuses_as_on_the_cpu(name: str, inference: bool, inline: InlineSession) -> None:  # noqa: F811
    values, classes = ONE_HOT[name]
    seen = []
    for device in ("cpu", "remote"):
        with torch.inference_mode(inference):
            try:
                result = nn.functional.one_hot(torch.tensor(values, dtype=torch.int64).to(device), *classes)
                seen.append((result.dtype, result.shape, result.cpu().tolist()))
            except RuntimeError as error:
                seen.append(str(error))
    assert seen[1] == seen[0]


@pytest.mark.parametrize("values", [[0, 3], [[-1], [2]]])
def test_one_hot_of_what_is_no_class_fails(values: list, inline: InlineSession) -> None:  # noqa: F811
    with pytest.raises(IndexError, match="out of range"):
        nn.functional.one_hot(torch.tensor(values).to("remote"), 3).cpu()


@pytest.mark.parametrize("made_inside", [False, True])
def test_a_module_moves_in_inference_mode(made_inside: bool, inline: InlineSession) -> None:  # noqa: F811
    model = nn.Linear(3, 2)
    with torch.inference_mode():
        model = nn.Linear(3, 2) if made_inside else model
        x = torch.ones(4, 3)
        wanted = model(x)
        assert torch.equal(model.to("remote")(x.to("remote")).cpu(), wanted)
    assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.device.type == "remote" for p in model.parameters())


@pytest.mark.parametrize("share", [torch.from_dlpack, np.from_dlpack])
def test_dlpack_says_what_to_do(share: Callable, inline: InlineSession) -> None:  # noqa: F811
    with pytest.raises(BufferError, match=r"use tensor\.cpu\(\)"):
        share(torch.ones(2, device="remote"))


def test_linearize_names_its_replacement(inline: InlineSession) -> None:  # noqa: F811
    with pytest.raises(gt.UnsupportedOp, match=r"use torch\.func\.jvp"):
        torch.func.linearize(torch.sin, base("remote"))


class Labelled(torch.Tensor):
    """A user's class of tensors, without kernels of its own."""


def test_a_tensor_of_a_users_class_is_a_plain_one_on_remote(inline: InlineSession) -> None:  # noqa: F811
    host = torch.arange(3.0).as_subclass(Labelled)
    with pytest.warns(UserWarning, match=r"a remote tensor is a plain one and no Labelled") as warned:
        moved = host.to("remote")
    assert warned[0].filename == __file__
    moved = moved + torch.ones(3).as_subclass(Labelled).to("remote")
    assert type(moved) is type(moved.as_subclass(torch.Tensor)) is type(torch.ones(1, device="remote"))
    assert moved.as_subclass(Labelled) is moved and moved.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(TypeError):
        moved.as_subclass(int)
