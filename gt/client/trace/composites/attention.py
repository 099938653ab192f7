"""Attention as one op forward and one backward, so that workers choose the kernel and heads can be split."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from gt.client.device import meta as metas
from gt.client.device.meta import Meta
from gt.client.device.random import draw
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace.custom_ops import record
from gt.client.trace.op_info import OpInfo, info_of
from gt.client.trace.uploads import mixed_devices

aten = torch.ops.aten
NO_SECOND = b"attention with dropout on remote has no second derivative: want dropout_p=0, or torch's formula in plain ops"
NO_SEED = (-1, 0)  # (seed, counter) of attention without dropout; a seed is never negative


def attention(  # noqa: PLR0913 - the op's arguments
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """torch's scaled_dot_product_attention on remote tensors [..., heads, L, E]."""
    for operand in (q, k, v):
        if not isinstance(operand, RemoteTensor):
            raise mixed_devices(info_of(aten.scaled_dot_product_attention.default), operand)
    if attn_mask is not None and not isinstance(attn_mask, RemoteTensor):
        raise mixed_devices(info_of(aten.scaled_dot_product_attention.default), attn_mask)
    if dropout_p > 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p:g}")
    if q.dim() < 3:
        return _composite(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    scaled = None if scale is None else float(scale)
    return _Attention.apply(q, k, v, attn_mask, float(dropout_p), bool(is_causal), scaled, bool(enable_gqa))


def _composite(  # noqa: PLR0913 - the op's arguments
    q: Any, k: Any, v: Any, mask: Any, p: float, causal: bool, scale: float | None, gqa: bool
) -> torch.Tensor:
    """Attention as matrix products and a softmax: without heads, and where its gradient is differentiated."""
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    return aten._scaled_dot_product_attention_math.default(q, k, v, mask, p, causal, None, scale=scale, enable_gqa=gqa)[0]


def _outs(  # noqa: PLR0913 - the op's arguments
    q: Any, k: Any, v: Any, mask: Any, p: float, causal: bool, scale: float | None, gqa: bool
) -> tuple[Meta, ...]:
    """Metas of out [..., heads, L, Ev] and logsumexp [..., heads, L].

    An out of four dims is stored as q is, since flash kernels leave it so. One whose heads have another width than q's is
    stored as [batch, L, heads, Ev], as the memory-efficient kernel leaves it.
    """
    shape = (*q.shape[:-1], v.shape[-1])
    # The mathematics on the meta device takes milliseconds: for what differs from the common case, and for torch's errors
    if not _fits(q, k, v, gqa) or (mask is not None and (causal or not _masks(mask, q, k))):
        if not q.dtype == k.dtype == v.dtype:
            found = f"query.dtype: {q.dtype} key.dtype: {k.dtype} and value.dtype: {v.dtype}"
            raise RuntimeError(f"Expected query, key, and value to have the same dtype, but got {found} instead.")
        if mask is not None and mask.dtype not in (torch.bool, torch.float32, q.dtype):
            _of_cpu(q, k, v, mask)  # raises
        stand_ins: list[Any] = [x._ref.meta.stand_in() if isinstance(x, RemoteTensor) else None for x in (q, k, v, mask)]
        with torch.no_grad():
            shape = tuple(_composite(stand_ins[0], stand_ins[1], stand_ins[2], stand_ins[3], p, causal, scale, gqa).shape)
    out = metas.contiguous(shape, q.dtype)
    if len(shape) == 4 and min(shape):
        _, heads, length, width = shape
        if shape != tuple(q.shape):
            out = metas.intern(shape, (heads * length * width, width, heads * width, 1), 0, q.dtype)
        elif all(x.stride(-1) == 1 for x in (q, k, v)):  # else the CPU's flash kernel does not take them
            out = metas.of(torch.empty_like(q._ref.meta.stand_in()))
    return out, metas.contiguous(shape[:-1], torch.float32)


def _of_cpu(*operands: torch.Tensor) -> None:
    """Raise the CPU's error for operands of these dtypes."""
    F.scaled_dot_product_attention(*(torch.zeros(1, 1, 1, 1, dtype=x.dtype, device="cpu") for x in operands))


def _fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gqa: bool) -> bool:
    """True for floats of one dtype: q [..., heads, L, E], k [..., kv_heads, S, E], v [..., kv_heads, S, Ev]."""
    if not q.dtype.is_floating_point or not q.dtype == k.dtype == v.dtype or 0 in (*q.shape, *k.shape, *v.shape):
        return False
    heads, own = q.shape[-3], k.shape[-3]
    return (
        q.shape[:-3] == k.shape[:-3]
        and k.shape[:-1] == v.shape[:-1]
        and q.shape[-1] == k.shape[-1]
        and (heads == own or (gqa and heads % own == 0))
    )


def _masks(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> bool:
    """True for a mask that broadcasts to scores [..., heads, L, S]."""
    scores = (*q.shape[:-1], k.shape[-2])
    return (
        mask.dtype in (torch.bool, q.dtype)
        and mask.dim() <= len(scores)
        and all(size in (1, want) for size, want in zip(reversed(mask.shape), reversed(scores), strict=False))
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]  # noqa: PLR0913 - the op's arguments
        ctx: Any, q: Any, k: Any, v: Any, mask: Any, p: float, causal: bool, scale: Any, gqa: bool
    ) -> Any:
        # The backward op gets the same seed and counter, and so computes the same dropout mask: the mask is not stored
        seeds = draw() if p > 0 else NO_SEED
        rest = (p, causal, scale, gqa)
        ctx.name = "gt.sdpa_biased" if ctx.needs_input_grad[3] else "gt.sdpa"
        out, logsumexp = record(f"{ctx.name}.default", (q, k, v, mask, *rest), lambda: _outs(q, k, v, mask, *rest), seeds)
        ctx.save_for_backward(q, k, v, mask, out, logsumexp)
        ctx.rest, ctx.seeds = rest, seeds
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        if not torch.is_grad_enabled():
            return _backward_once(ctx, grad)
        # create_graph=True: kernels have no second derivative, and the composite would draw another dropout mask
        if not ctx.rest[0]:
            return _backward_twice(ctx, grad)
        with torch.no_grad():
            grads = _backward_once(ctx, grad)
        made = [tensor for tensor in grads if tensor is not None]
        fails = torch._C._functions.DelayedError(NO_SECOND, len(made))
        return *fails(*[tensor.requires_grad_() for tensor in made]), *[None] * (len(grads) - len(made))


def _backward_once(ctx: Any, grad: Any) -> tuple:
    """Gradients of _Attention's arguments, by the worker's kernel."""
    q, k, v, mask, out, logsumexp = ctx.saved_tensors
    likes = (q, k, v) if ctx.name == "gt.sdpa" else (q, k, v, mask)
    grads = record(
        f"{ctx.name}_backward.default",
        (grad, q, k, v, mask, out, logsumexp, *ctx.rest),
        lambda: tuple(metas.of(torch.empty_like(like._ref.meta.stand_in())) for like in likes),
        ctx.seeds,
    )
    return *grads, *[None] * (8 - len(grads))


def _backward_twice(ctx: Any, grad: Any) -> tuple:
    """The same as ops that can be differentiated."""
    q, k, v, mask, *_ = ctx.saved_tensors
    p, causal, scale, gqa = ctx.rest
    needed = [number for number in range(4) if ctx.needs_input_grad[number]]
    operands = [(q, k, v, mask)[number] for number in needed]
    # Each operand as a view of its own: the same tensor may be given as q, k and v
    views = {number: operand.view_as(operand) for number, operand in zip(needed, operands)}
    q, k, v, mask = (views.get(number, operand) for number, operand in enumerate((q, k, v, mask)))
    out = _composite(q, k, v, mask, p, causal, scale, gqa)
    grads = dict(zip(needed, torch.autograd.grad(out, list(views.values()), grad, create_graph=True)))
    return *[grads.get(number) for number in range(4)], None, None, None, None


# ---- inference's fused layers of torch.nn: the same mathematics in the ops above, which can be split


def encoder_layer(info: OpInfo, args: tuple, kwargs: dict) -> torch.Tensor:
    """nn.TransformerEncoderLayer without gradients. x [batch, L, width]."""
    named = dict(zip(info.names, args), **kwargs)
    activation = F.gelu if named["use_gelu"] else F.relu

    def norm(number: int, x: torch.Tensor) -> torch.Tensor:
        weight, bias = named[f"norm_weight_{number}"], named[f"norm_bias_{number}"]
        return F.layer_norm(x, weight.shape, weight, bias, named["eps"])

    def attended(x: torch.Tensor) -> torch.Tensor:
        q, k, v = _heads(x, x, x, named["qkv_weight"], named["qkv_bias"], named["num_heads"])
        out = attention(q, k, v, _mask(named.get("mask"), named.get("mask_type"), True))
        return _projected(out, named["proj_weight"], named["proj_bias"])

    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = activation(F.linear(x, named["ffn_weight_1"], named["ffn_bias_1"]))
        return F.linear(hidden, named["ffn_weight_2"], named["ffn_bias_2"])

    x = named["src"]
    if named["norm_first"]:
        x = x + attended(norm(1, x))
        return x + forward(norm(2, x))
    x = norm(1, x + attended(x))
    return norm(2, x + forward(x))


def multi_head(info: OpInfo, args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
    """nn.MultiheadAttention without gradients: out [batch, L, width]; weights [batch, L, S], or of each head, or None."""
    defaults = {"mask": None, "need_weights": True, "average_attn_weights": True, "mask_type": None}
    named = {**defaults, **dict(zip(info.names, args)), **kwargs}
    parts = (named[name] for name in ("query", "key", "value", "qkv_weight", "qkv_bias", "num_head"))
    q, k, v = _heads(*parts)
    weights = None
    if named["need_weights"]:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        mask = _mask(named["mask"], named["mask_type"], False)
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
        weights = scores.softmax(-1)
        out = weights @ v
        weights = weights.mean(1) if named["average_attn_weights"] else weights
    else:
        out = attention(q, k, v, _mask(named["mask"], named["mask_type"], True))
    return _projected(out, named["proj_weight"], named["proj_bias"]), weights


def _heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, heads: int
) -> list[torch.Tensor]:
    """Projections [batch, heads, L, width / heads] of q, k and v by weight [3 width, width]."""
    if q is k is v:
        projected = F.linear(q, weight, bias).chunk(3, -1)
    else:
        projected = tuple(map(F.linear, (q, k, v), weight.chunk(3), bias.chunk(3)))
    return [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in projected]


def _projected(out: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(out.transpose(1, 2).flatten(2), weight, bias)


def _mask(mask: torch.Tensor | None, kind: int | None, keeps: bool) -> torch.Tensor | None:
    """A mask that broadcasts to [batch, heads, L, S]. kind: torch's, 1 for [batch, S]. keeps: True in it means attended."""
    if mask is None:
        return None
    mask = mask[:, None, None, :] if kind == 1 else mask
    return mask.logical_not() if keeps and mask.dtype is torch.bool else mask
