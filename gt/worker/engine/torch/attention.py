"""Attention: the kernel that plain torch would take for the same inputs, forward and backward; GT's own dropout mask.

On the CPU the results have the bits of F.scaled_dot_product_attention. Dropout's mask must not depend on where a head
lies, which the fused kernels' does, so with dropout the composite maths is used on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import inf, sqrt
from typing import Any, TypeAlias

import torch

from gt.worker.engine.philox import Words, hits

aten = torch.ops.aten
MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3  # torch.nn.attention.SDPBackend
Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True)
class Call:
    """q [..., heads, L, E], k [..., heads, S, E], v [..., heads, S, Ev]; mask broadcasts to the scores [..., L, S]."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    gqa: bool

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def kernel(self) -> int:
        """The kernel that torch picks, MATH where this file has no use for it."""
        if self.dropout:
            return MATH
        pick = torch._fused_sdp_choice(*self.inputs, self.mask, 0.0, self.causal, scale=self.scale, enable_gqa=self.gqa)
        odd = self.q.shape[-1] % 8 or self.v.shape[-1] != self.q.shape[-1]
        if self.q.is_cuda and (self.gqa or odd or (self.mask is not None and pick == FLASH)):
            return MATH
        if pick == CUDNN and self.mask is not None:
            return EFFICIENT
        return pick if pick in (FLASH, EFFICIENT, CUDNN) else MATH

    def bias(self) -> Tensor | None:
        """The mask as torch's composite converts it: a bool one is 0 where True, -inf where False."""
        mask = self.mask
        if mask is None or mask.dtype != torch.bool:
            return mask
        return torch.zeros_like(mask, dtype=self.q.dtype).masked_fill_(mask.logical_not(), float("-inf"))

    def kept(self, words: Words) -> Tensor | None:
        """The scores [..., heads, L, S] that dropout keeps."""
        if not self.dropout:
            return None
        shape = (*self.q.shape[:-1], self.k.shape[-2])
        return torch.from_numpy(hits(words.of(shape), 1.0 - self.dropout)).to(self.q.device)


def _maths(call: Call, kept: Tensor | None) -> Tensor:
    if kept is not None:
        return _dropped(call, kept)
    return aten._scaled_dot_product_attention_math(
        *call.inputs, call.bias(), 0.0, call.causal, None, scale=call.scale, enable_gqa=call.gqa
    )[0]


def _dropped(call: Call, kept: Tensor) -> Tensor:
    """The composite with dropout after the softmax, as torch's, which takes a mask too but warns that it is for tests."""
    q, k, v = call.inputs
    if call.gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = (q * (1 / sqrt(q.shape[-1]) if call.scale is None else call.scale)) @ k.transpose(-2, -1)
    bias = call.bias()
    if call.causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), -inf)
    elif bias is not None:
        scores = scores + bias
    return aten._safe_softmax(scores, -1).masked_fill(~kept, 0.0) @ (
        v * (1.0 / (1.0 - call.dropout) if call.dropout < 1 else 0.0)
    )


def _fused(call: Call, kernel: int) -> tuple[Tensor, Tensor]:
    """(out, logsumexp [..., heads, L])"""
    rest = {"scale": call.scale}
    if not call.q.is_cuda:
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        return flash(*call.inputs, 0.0, call.causal, attn_mask=call.bias(), **rest)
    if kernel == FLASH:
        return aten._scaled_dot_product_flash_attention(*call.inputs, 0.0, call.causal, False, **rest)[:2]
    if kernel == CUDNN:
        out, lse = aten._scaled_dot_product_cudnn_attention(*call.inputs, None, True, 0.0, call.causal, False, **rest)[:2]
        return out, lse.flatten(-2)
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(*call.inputs, _aligned(call), True, 0.0, call.causal, **rest)[:2]


def _aligned(call: Call) -> Tensor | None:
    """The mask as the efficient kernel wants it: one for every score, rows aligned to 16 elements."""
    bias = call.bias()
    if bias is None:
        return None
    keys = call.k.shape[-2]
    room = torch.empty((*call.q.shape[:-1], -(-keys // 16) * 16), dtype=bias.dtype, device=bias.device)
    room[..., :keys] = bias
    return room[..., :keys]


def _forward(words: Words, *args: Any) -> tuple[Tensor, Tensor]:
    call = Call(*args)
    kernel = call.kernel()
    if kernel == MATH:
        out = _maths(call, call.kept(words))  # batch dims broadcast: of q they need not be all
        return out, torch.zeros(out.shape[:-1], dtype=torch.float32, device=call.q.device)
    out, lse = _fused(call, kernel)
    return out, lse[..., : call.q.shape[-2]].to(torch.float32)


def _backward(words: Words, grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    q, k, v, mask, out, lse, *rest = args
    call = Call(q, k, v, mask, *rest)
    kernel = call.kernel()
    if q.is_cuda and kernel in (FLASH, CUDNN):
        return _backwards(call, kernel, grad, out, lse)
    if kernel == MATH or q.is_cuda:
        # The efficient kernel's padded sizes, which its backward wants, do not travel.
        kept = call.kept(words)
        return _again(call, grad, lambda live: _maths(live, kept) if kernel == MATH else _fused(live, kernel)[0])
    if q.dtype == torch.float64:  # logsumexp travels as float32: not enough here
        out, lse = _fused(call, kernel)
    flash = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return flash(grad, q, k, v, out, lse, 0.0, call.causal, attn_mask=call.bias(), scale=call.scale)


def _backwards(call: Call, kernel: int, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """On a GPU. The random state that the kernels want is of no use to them without dropout."""
    lengths, state, rest = (call.q.shape[-2], call.k.shape[-2]), _state(call.q.device), {"scale": call.scale}
    if kernel == FLASH:
        flash = aten._scaled_dot_product_flash_attention_backward
        return flash(grad, *call.inputs, out, lse, None, None, *lengths, 0.0, call.causal, state, state, **rest)
    cudnn = aten._scaled_dot_product_cudnn_attention_backward
    lse = lse.unsqueeze(-1)
    return cudnn(grad, *call.inputs, out, lse, state, state, None, None, None, *lengths, 0.0, call.causal, **rest)


@cache
def _state(device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


def _again(call: Call, grad: Tensor, forward: Callable[[Call], Tensor]) -> tuple[Tensor, ...]:
    """torch's own backward of the forward, which is run once more under autograd."""
    with torch.enable_grad():
        leaves = tuple(tensor.detach().requires_grad_() for tensor in call.inputs)
        live = replace(call, q=leaves[0], k=leaves[1], v=leaves[2])
        return torch.autograd.grad(forward(live), leaves, grad)


OPS: dict[str, Callable[..., Any]] = {"gt.sdpa.default": _forward, "gt.sdpa_backward.default": _backward}


def bind(name: str, place: list | None) -> Callable:
    """The op as a callable of its arguments (ir.ops.GT_OPS) and `seed` and `counter`; place is that of the scores."""
    run = OPS[name]

    def draw(*args: Any, seed: int, counter: int) -> Any:
        return run(Words(seed, counter, place), *args)

    draw.draws = True  # type: ignore[attr-defined]
    return draw
