"""Programs whose ATen calls cover the rows of the numpy engine, as functions of a maker of operands.

`x(*shape)` gives values in about [-2, 2] of the dtype and memory layout that is being tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

aten = torch.ops.aten
Make = Callable[..., torch.Tensor]
IDS = torch.tensor([[0, 2], [1, 1]])
MASK = torch.tensor([[True, False, True, True, False, False]] * 4)


def arithmetic(x: Make) -> None:
    a, b, c = x(4, 6), x(4, 6), x(6)
    for f in (torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, torch.fmax, torch.fmin):
        f(a, b), f(a, c), f(c, x())
    for f in (torch.remainder, torch.fmod):
        f(a, 1.5), f(a, 2)
    torch.add(a, b, alpha=2), torch.sub(a, 2, alpha=3), torch.rsub(a, 2), torch.rsub(a, b, alpha=2), a + 2, a * 1.5
    1.5 - a
    a / b, a / 2, 2 / (a.abs() + 1), torch.div(a, 1.5, rounding_mode="floor"), torch.div(a, 1.5, rounding_mode="trunc")
    a**2, a.abs() ** 0.5, a**3, a**1, 2**a, a.abs() ** b, torch.addcmul(a, b, c, value=2)
    torch.addcdiv(a, b, c.abs() + 1)
    torch.lerp(a, b, 0.3), torch.lerp(a, b, 0.7), torch.lerp(a, b, c.abs()), torch.atan2(a, b), torch.hypot(a, b)
    torch.xlogy(b, a.abs()), torch.logaddexp(a, b), torch.logaddexp2(a, b), torch.copysign(a, b), torch.frac(a)
    a.clone().add_(b), a.clone().mul_(2), a.clone().div_(b), a.clone().addcmul_(b, c, value=0.5), a.clone().lerp_(b, 0.1)
    a.t().add_(1), a[1:3, ::2].mul_(b[1:3, ::2]), a[0].copy_(c), a.clone().clamp_(-1, 1), a.clone().zero_(), a[1].fill_(3)
    (
        aten.add.Scalar(a, 2, 3),
        aten.sub.Scalar(a, 2),
        aten.div.Scalar_mode(a, 1.5, rounding_mode="floor"),
        aten.copysign.Scalar(a, -1),
    )
    (
        aten.floor_divide.Scalar(a, 2),
        aten.xlogy.Scalar_Other(a, 2),
        aten.xlogy.Scalar_Self(2, a.abs()),
        aten.fill_.Tensor(a[0], x()),
    )
    aten.native_dropout_backward(a, MASK, 2.0), aten.clamp_max.default(a, 1), aten.clamp_min.Tensor(a, b)


def comparisons(x: Make) -> None:
    a, b = x(4, 6), x(4, 6)
    for f in (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge):
        f(a, b), f(a, 0), f(a, 0.5), f(a, x())
    p, q = a > 0, b > 0
    p & q, p | q, p ^ q, ~p, torch.logical_and(a, b), torch.logical_or(a, b), torch.logical_xor(a, b)
    torch.logical_not(a)
    torch.where(p, a, b), torch.where(p, a, 0.0), a.clamp(-1, 1), a.clamp(min=0), a.clamp(max=b), a.clamp_min(0)
    a.clamp_max(b)
    a.isnan(), a.isinf(), a.isposinf(), a.isneginf(), torch.signbit(a), torch.nan_to_num(a / (a > 0))


def functions(x: Make) -> None:
    a, s = x(4, 6), x(6, 4).t().abs() / 3 + 0.1
    for f in (
        *(torch.neg, torch.abs, torch.ceil, torch.floor, torch.trunc, torch.round, torch.sign, torch.sgn, torch.exp),
        *(torch.expm1, torch.sin, torch.cos, torch.tan, torch.sinh, torch.cosh, torch.tanh, torch.asinh, torch.sigmoid),
        *(torch.atan, torch.exp2, torch.erf, torch.erfc, torch.sinc, torch.angle, torch.deg2rad, torch.rad2deg),
    ):
        f(a), f(a[1:, ::2])
    for f in (
        *(torch.log, torch.log2, torch.log10, torch.log1p, torch.sqrt, torch.rsqrt, torch.reciprocal, torch.asin, torch.acos),
        *(torch.atanh, torch.lgamma, torch.logit),
    ):
        f(s)
    torch.acosh(s + 1), torch.round(a, decimals=1), a.clone().exp_(), s.clone().sqrt_(), torch.logit(s, 0.1)


ACTIVATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    F.gelu, lambda a: F.gelu(a, approximate="tanh"), F.silu, F.mish, F.softplus, F.elu, F.selu, F.hardtanh, F.hardsigmoid,
    F.hardswish, F.logsigmoid, F.relu, F.relu6, F.glu, lambda a: F.leaky_relu(a, 0.1), lambda a: F.threshold(a, 0.5, 2.0),
    torch.sigmoid, torch.tanh, lambda a: F.prelu(a, a.new_full((1,), 0.2)), lambda a: F.softmax(a, 0),
    lambda a: F.log_softmax(a, -1), lambda a: F.layer_norm(a, (6,)), lambda a: F.layer_norm(a, (4, 6), a * 2, a + 1),
    lambda a: F.rms_norm(a, (6,), a[0] + 2), lambda a: a.std(1), lambda a: a.norm(), lambda a: a.cumsum(1), lambda a: a.prod(1),
    lambda a: a.logsumexp(1), lambda a: a.logcumsumexp(1), lambda a: a.amax(1), lambda a: a.max(1)[0], lambda a: a.sort(1)[0],
    lambda a: torch.diagonal(a), lambda a: a.unfold(1, 3, 2), lambda a: a[:, 1:4], lambda a: a[1], lambda a: a[IDS],
    lambda a: a.gather(1, IDS), lambda a: a.index_select(1, IDS[0]), lambda a: a.expand(3, 4, 6), lambda a: a.topk(2)[0],
    lambda a: F.pad(a, (1, -1, 0, 2)), lambda a: a.repeat(2, 1), lambda a: a.masked_fill(MASK, 0.5), lambda a: a @ a.t(),
    lambda a: torch.bmm(a[None], a.t()[None]), lambda a: torch.addmm(a[:, :4], a, a.t(), beta=0.5, alpha=2),
    lambda a: F.embedding(IDS, a), lambda a: F.embedding(IDS, a, padding_idx=1), lambda a: torch.where(a > 0, a, a * 2),
    lambda a: F.embedding(IDS, a, scale_grad_by_freq=True),
)  # fmt: skip


def derivatives(x: Make) -> None:
    """Forward and backward."""
    for f in ACTIVATIONS:
        a = x(4, 6).requires_grad_()
        out = f(a)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()


def losses(x: Make) -> None:
    label = torch.tensor([1, 5, -100, 2])
    some = torch.linspace(0.5, 2, 6)
    for reduction in ("none", "mean", "sum"):
        for f in (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss):
            a = x(4, 6).requires_grad_()
            f(a, x(4, 6), reduction=reduction).sum().backward()
        for weight in (None, some.to(x().dtype)):
            a = x(4, 6).requires_grad_()
            F.cross_entropy(a, label, weight, reduction=reduction).sum().backward()
        a = x(2, 6, 3, 2).requires_grad_()
        F.cross_entropy(a, torch.arange(12).view(2, 3, 2) % 6, reduction=reduction).sum().backward()
        p, t = (x(4, 6).sigmoid().requires_grad_(), (x(4, 6) > 0).to(x().dtype))
        F.binary_cross_entropy(p, t, reduction=reduction).sum().backward()
        F.binary_cross_entropy_with_logits(x(4, 6), t, pos_weight=p.detach()[0], reduction=reduction)


def reductions(x: Make) -> None:
    a = x(4, 6, 3)
    for dim in (0, 1, -1, (0, 2)):
        for keep in (False, True):
            a.sum(dim, keep), a.mean(dim, keep), a.var(dim, keepdim=keep), a.std(dim, keepdim=keep), a.amax(dim, keep)
            a.amin(dim, keep), torch.linalg.vector_norm(a, 2, dim, keep), torch.linalg.vector_norm(a, 3, dim, keep)
            a.logsumexp(dim, keep), torch.nansum(a, dim, keep), torch.var_mean(a, dim, keepdim=keep), a.any(dim, keep)
            torch.std_mean(a, dim, keepdim=keep), (a > 0).all(dim, keep)
    for ord in (0, 1, math.inf, -math.inf):
        torch.linalg.vector_norm(a, ord, 1)
    for dim in (0, -1):
        a.max(dim), a.min(dim, True), a.argmax(dim), a.argmin(dim, True), a.prod(dim), a.cumsum(dim), a.cumprod(dim)
        (a > 0).any(dim), (a > 0).all(dim), torch.aminmax(a, dim=dim), torch.count_nonzero(a, dim)
    a.sum(), a.mean(), a.prod(), a.max(), a.min(), a.argmax(), a.any(), a.all(), torch.count_nonzero(a), a.var()
    a.norm(3)
    a.sum(1, dtype=torch.float64), (a > 0).sum(), (a > 0).sum(1), x().sum(0), a.norm(), a.norm(2, 1), torch.aminmax(a)
    aten.norm.Scalar(a, 2), aten.norm.ScalarOpt_dim(a, 2, [1]), torch.bincount(IDS.view(-1)), a.clone().cumsum_(1)
    torch.bincount(IDS.view(-1), torch.rand(4), 6)
    aten.count_nonzero.dim_IntList(a, [0, 1])


def views(x: Make) -> None:
    a = x(4, 6)
    a.t(), a.t()[1:, 2], a[1], a[:, 1:4], a[::2, 1::2], a[..., None], a.expand(3, 4, 6), a.unflatten(1, (2, 3))
    a.diagonal()
    a.diagonal(1), a.diagonal(-2), a.unbind(1), a.chunk(2, 1), a.split([1, 2, 3], 1), a[:, None].squeeze(1)
    a[None].squeeze()
    a[None, :, None].squeeze((0, 2)), a.unfold(1, 3, 2), a.permute(1, 0), a.transpose(0, 1), a[1].view(2, 3)
    a[0].view(-1)
    a[0, 0].view(1, 1), a.as_strided((2, 2), (1, 2), 1), a.detach(), a.view(a.dtype), a[1:1], a[1:1].view(3, 0)
    torch.view_as_complex(a[0].clone().view(3, 2)), aten._unsafe_view(a.contiguous(), [24]), aten.alias(a)
    aten._reshape_alias(a.contiguous(), [2, 12], [12, 1]), torch.view_as_real(torch.complex(a, a)[1:])


def joining(x: Make) -> None:
    a, b = x(4, 6), x(4, 6)
    torch.cat([a, b], 1), torch.cat([a, x(0)]), torch.stack([a, b], -1), a.repeat(2, 1, 2), a.flip(0), a.flip(0, 1)
    a.roll(1, 1)
    a.roll(2), F.pad(a, (1, 2)), F.pad(a, (-1, 0, 1, 1), value=3.0), a.tril(), a.triu(1), a.clone(), a.contiguous()
    a.t().clone()
    a.double(), a.long(), a.bool(), a.to(torch.float16), a.to(torch.complex64), aten.copy(a, b[0]), a.t().contiguous()
    torch.cat([a, a.long()]), a.clone(memory_format=torch.contiguous_format), a.clone().tril_(), aten._conj_physical(a)
    aten._conj_physical(a.to(torch.complex64))


def indexing(x: Make) -> None:
    a, b, one = x(4, 6), x(4, 6), IDS[0]
    a[IDS], a[:, IDS], a[IDS, one], a[MASK], a[:, MASK[0]], a[torch.tensor(1), :], a[one, :, None], a.gather(1, IDS)
    a.take(IDS)
    a.gather(0, IDS), a.index_select(0, one), a.index_select(1, one), a.masked_fill(MASK, 2.0), a.masked_select(MASK)
    a.masked_fill(MASK, x()), a.masked_scatter(MASK, b), a.index_add(0, IDS[1], b[:2], alpha=2)
    a.index_add(1, one, b[:, :2])
    a.index_copy(1, one, b[:, :2]), a.index_fill(0, one, 3.0), a.index_fill(0, one, x()), a.scatter(1, IDS, b)
    a.scatter(1, IDS, 2.0), a.scatter_add(1, IDS, b), a.scatter_reduce(1, IDS, b, "amax")
    a.scatter(0, IDS, b, reduce="add")
    a.scatter(0, IDS, 2.0, reduce="multiply"), a.index_put((one,), b[:2])
    a.index_put((one, one), b[0, 0], accumulate=True)
    c = a.clone()
    c[IDS[1]] = b[0]
    c[MASK] = 1.0
    c[:, one] += 1
    c.index_put_((IDS[1],), b[:2], accumulate=True), c.masked_fill_(MASK, 0.0), c.scatter_(1, IDS, b)
    c.t().index_add_(1, one, b.t()[:, :2])
    a.sort(1), a.sort(0, descending=True), a.sort(dim=1, stable=True), a.topk(2), a.topk(3, 0, largest=False)
    a.argsort(1)
    torch.unique(IDS, return_inverse=True, return_counts=True), a.nonzero(), torch.nonzero_static(a, size=9),
    torch.nonzero_static(a, size=400), torch.repeat_interleave(IDS[1])
    edges = a[0].sort()[0]
    (
        torch.searchsorted(edges, b.contiguous()),
        torch.searchsorted(edges, 0.5),
        torch.bucketize(b.contiguous(), edges, right=True),
    )
    torch.bucketize(0.5, edges)
    aten._unsafe_index(a, [one])
    c = a.clone()
    c.index_copy_(1, one, b[:, :2]), c.index_fill_(0, one, 3.0), c.index_fill_(0, one, x()), c.masked_fill_(MASK, x())
    c.masked_scatter_(MASK, b), c.scatter_(1, IDS, 2.0), c.scatter_(0, IDS, b, reduce="add"), c.scatter_add_(1, IDS, b)
    c.scatter_(0, IDS, 2.0, reduce="multiply"), c.t().scatter_reduce_(1, IDS, b.t(), "amin")


def products(x: Make) -> None:
    a, b, v = x(4, 6), x(6, 5), x(6)
    a @ b, a.t() @ a, a @ v, v @ v, torch.vdot(v, v), torch.bmm(x(3, 4, 6), x(3, 6, 2)), torch.outer(v, v)
    F.linear(a, b.t()), aten._safe_softmax(a, 1)
    torch.addmm(x(5), a, b, beta=0.5, alpha=2), torch.addmm(x(4, 5), a, b, beta=0), torch.addmv(x(4), a, v, alpha=2)
    torch.baddbmm(x(3, 4, 2), x(3, 4, 6), x(3, 6, 2), beta=2), torch.addbmm(x(4, 2), x(3, 4, 6), x(3, 6, 2))
    a.t()[1:] @ a[:, ::2]
    torch.addr(x(6, 4), v, x(4), alpha=0.5), torch.einsum("ij,kj->ik", a, a), aten._addmm_activation(x(5), a, b)
    aten._addmm_activation(x(5), a, b, use_gelu=True), x(4, 5).addmm_(a, b), torch.mm(a, b, out=x(4, 5))


def lists(x: Make) -> None:
    a, b, c = ([x(4, 6), x(3), x()] for _ in range(3))
    positive = [t.abs() + 1 for t in c]
    for f in (torch._foreach_add, torch._foreach_sub):
        f(a, b), f(a, 2.0), f(a, [1.0, 2.0, 3.0]), f(a, b, alpha=2)
    for f in (torch._foreach_mul, torch._foreach_div, torch._foreach_maximum, torch._foreach_minimum, torch._foreach_clamp_min):
        f(a, positive), f(a, 2.0), f(a, [1.0, 2.0, 3.0])
    for g in (torch._foreach_sqrt, torch._foreach_exp, torch._foreach_norm, torch._foreach_reciprocal, torch._foreach_max):
        g(positive)
    torch._foreach_neg(a), torch._foreach_abs(a), torch._foreach_sign(a), torch._foreach_norm(a, 1)
    torch._foreach_mul(a, x())
    torch._foreach_lerp(a, b, 0.3), torch._foreach_lerp(a, b, positive), torch._foreach_pow(positive, 2.0)
    torch._foreach_pow(2.0, a), torch._foreach_addcmul(a, b, c, 2.0)
    torch._foreach_addcdiv(a, b, positive, [1.0, 2.0, 3.0])
    torch._foreach_add_(a, b, alpha=0.5), torch._foreach_mul_(a, 0.5), torch._foreach_div_(a, [1.0, 2.0, 3.0])
    torch._foreach_addcmul_(a, b, c, 0.5), torch._foreach_addcdiv_(a, b, positive, [1.0, 2.0, 3.0])
    torch._foreach_sqrt_(positive)
    torch._foreach_lerp_(a, b, 0.2), torch._foreach_copy_(a, b), torch._foreach_zero_(b), torch._foreach_neg_(a)
    torch._foreach_addcdiv_(a, c, positive, 2.0), torch._foreach_maximum_(a, c), torch._foreach_add_(a, 1.0)


def optimizers(x: Make) -> None:
    for make in (
        *(lambda p, k=k: torch.optim.AdamW(p, fused=True, **k) for k in ({}, {"amsgrad": True}, {"maximize": True})),
        lambda p: torch.optim.Adam(p, fused=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, 0.1, fused=True),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, fused=True, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, fused=True, weight_decay=0.1),
        *(
            lambda p, f=f: f(p, lr=torch.tensor(0.01), fused=True)
            for f in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
        ),
    ):
        parameters = [x(4, 6).clone().requires_grad_(), x(3).clone().requires_grad_()]
        optimizer = make(parameters)
        for _ in range(3):
            for p in parameters:
                p.grad = x(*p.shape).clone()
            optimizer.step()


def factories(x: Make) -> None:
    a = x(4, 6)
    torch.zeros(2, 3), torch.ones(2, dtype=torch.bool), torch.full((2,), 1.5), torch.full((2,), 3), torch.arange(5)
    torch.arange(1, 2, 0.25), torch.arange(7, 1, -2), torch.arange(5.0), torch.arange(3, dtype=torch.float64)
    torch.eye(3)
    torch.eye(3, 4), torch.linspace(0, 1, 5), torch.zeros_like(a), torch.ones_like(a, dtype=torch.int64)
    torch.full_like(a, 2)
    a.new_zeros(2), a.new_ones(2, 2), a.new_full((2,), 3.0), torch.tril_indices(3, 4, 1), torch.triu_indices(3, 4)
    torch.scalar_tensor(2.5), torch.scalar_tensor(2, dtype=torch.int64), torch.zeros_like(a.t()), torch.empty(2).fill_(1)
    aten.arange.start(1, 4)


def integers(x: Make) -> None:
    a, b = (x(4, 6) * 3).long(), (x(4, 6) * 3).long().abs() + 1
    small, flags = a.to(torch.uint8), a > 0
    a + b, a * 2, a + 0.5, a / b, a // b, a % b, torch.fmod(a, b), a & b, a | 1, a ^ b, 1 & b, 1 | b, 1 ^ b, a << 1
    b >> 1
    1 << b, 64 >> b, a << b, b >> b, torch.gcd(a, b), torch.lcm(a, b), ~a, small + 300, small * small, small > 3
    -flags.long()
    flags + flags, flags * 2, flags * 0.5, a.sum(), a.sum(1), a.prod(1), a.cumsum(0), flags.sum(1), a.max(1)
    a.to(torch.int32) + a
    a.float() + a, a.half() + a, b**2, 2**b, torch.div(a, b, rounding_mode="floor")
    torch.div(a, b, rounding_mode="trunc")
    a.sqrt(), a.abs(), a.sign(), a @ b.t(), torch.where(flags, a, 0.5), a.clamp(-1, 2), a.clamp(-1, 0.5)
    torch.remainder(5, b)
    a + torch.tensor(2.5), torch.tensor(2) + a.to(torch.int8), flags & True, a.any(1), a.clone().mul_(2)
    flags.clone().logical_not_()
    for f in (aten.bitwise_left_shift, aten.bitwise_right_shift):
        f.Tensor(a, b), f.Tensor_Scalar(a, 2), f.Scalar_Tensor(64, b)
    for g in (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor):
        g.Scalar_Tensor(5, b)


PROGRAMS: dict[str, Callable[[Make], Any]] = {
    f.__name__: f
    for f in (
        *(arithmetic, comparisons, functions, derivatives, losses, reductions, views, joining, indexing, products, lists),
        *(optimizers, factories, integers),
    )
}
