"""Attention: the kernel that plain torch would take for the same inputs, forward and backward; GT's own dropout mask.

On the CPU the results have the bits of F.scaled_dot_product_attention; a GPU's kernels are called in gpu/fused_attention.py.
On the CPU dropout is the composite maths, whose mask does not depend on the worker that has a head. On a GPU the fused kernels
draw it, and masks depend on how the scores are split; GT_EXACT_ATTENTION_DROPOUT=1 has the composite there too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import inf, sqrt
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from gt.worker.engine.philox import Words, hits
from gt.worker.engine.torch.gpu import fused_attention
from gt.worker.engine.torch.gpu.fused_attention import FUSED, MATH, Choice
from gt.worker.engine.torch.layers.attention_call import AttentionCall
from gt.worker.engine.torch.row_major import within

if TYPE_CHECKING:
    from gt.worker.engine.torch.gpu.attention_seeds import AttentionSeeds

aten = torch.ops.aten
Tensor: TypeAlias = torch.Tensor


def choice(call: AttentionCall, seeds: AttentionSeeds | None = None) -> Choice:
    """The kernel that torch picks, MATH where dropout is drawn here. seeds: of a GPU whose kernels can draw."""
    if call.dropout and (seeds is None or seeds.exact or call.dropout >= 1 or not call.q.is_cuda):
        return Choice(MATH)
    if call.q.is_cuda:
        return fused_attention.choice(call)
    if call.learns:  # the CPU has no kernel that gives the gradient of a mask
        return Choice(MATH)
    pick = torch._fused_sdp_choice(*call.inputs, call.mask, 0.0, call.causal, scale=call.scale, enable_gqa=call.gqa)
    return Choice(pick if pick in FUSED else MATH)


def _kept(call: AttentionCall, words: Words, seeds: AttentionSeeds | None) -> Tensor | None:
    """The scores [..., heads, L, S] that dropout keeps."""
    if not call.dropout:
        return None
    shape = (*call.q.shape[:-1], call.k.shape[-2])
    if seeds is not None:
        from gt.worker.engine.torch.gpu import philox_kernel

        return philox_kernel.hits(seeds.key, words, shape, 1.0 - call.dropout)
    return torch.from_numpy(hits(words.of(shape), 1.0 - call.dropout)).to(call.q.device)


def _maths(call: AttentionCall, kept: Tensor | None) -> Tensor:
    if kept is not None:
        return _dropped(call, kept)
    return aten._scaled_dot_product_attention_math(
        *call.inputs, call.bias(), 0.0, call.causal, None, scale=call.scale, enable_gqa=call.gqa
    )[0]


def _dropped(call: AttentionCall, kept: Tensor) -> Tensor:
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


def _flash_on_host(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out, logsumexp [..., heads, L])"""
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    return flash(*call.inputs, 0.0, call.causal, attn_mask=call.bias(), scale=call.scale)


def _forward(words: Words, seeds: AttentionSeeds | None, *args: Any, learns: bool = False) -> tuple[Tensor, Tensor]:
    call = replace(AttentionCall(*args), learns=learns)
    chosen = choice(call, seeds)
    if chosen.kernel == MATH:
        out = _maths(call, _kept(call, words, seeds))  # batch dims broadcast: of q they need not be all
        return out, torch.zeros(out.shape[:-1], dtype=torch.float32, device=call.q.device)
    with seeds.drawing(words) if seeds is not None and call.dropout else nullcontext():
        out, lse = fused_attention.forward(call, chosen) if call.q.is_cuda else _flash_on_host(call)
    return out, lse[..., : call.q.shape[-2]].to(torch.float32)


def _backward(words: Words, seeds: AttentionSeeds | None, grad: Tensor, *args: Any, learns: bool = False) -> tuple[Tensor, ...]:
    q, k, v, mask, out, lse, *rest = args
    grad, out, lse = map(within, (grad, out, lse))
    call = replace(AttentionCall(q, k, v, mask, *rest), learns=learns)
    chosen = choice(call, seeds)
    if chosen.kernel == MATH:
        kept = _kept(call, words, seeds)
        # The same mask as in forward: it follows from the op's words, so it is drawn again and not kept.
        return _again(call, grad, lambda live: _maths(live, kept))
    if q.is_cuda:
        return fused_attention.backward(call, chosen, grad, out, lse, None if seeds is None else (seeds, words))
    if q.dtype == torch.float64:  # logsumexp travels as float32: not enough here
        out, lse = _flash_on_host(call)
    flash = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return flash(grad, q, k, v, out, lse, 0.0, call.causal, attn_mask=call.bias(), scale=call.scale)


def _again(call: AttentionCall, grad: Tensor, forward: Callable[[AttentionCall], Tensor]) -> tuple[Tensor, ...]:
    """torch's own backward of the forward, which is run once more under autograd."""
    with torch.enable_grad():
        q, k, v = (tensor.detach().requires_grad_() for tensor in call.inputs)
        mask = call.mask.detach().requires_grad_() if call.mask is not None and call.learns else call.mask
        leaves = (q, k, v) if mask is None or not call.learns else (q, k, v, mask)
        return torch.autograd.grad(forward(replace(call, q=q, k=k, v=v, mask=mask)), leaves, grad)


OPS: dict[str, Callable[..., Any]] = {
    "gt.sdpa.default": _forward,
    "gt.sdpa_backward.default": _backward,
    "gt.sdpa_biased.default": partial(_forward, learns=True),
    "gt.sdpa_biased_backward.default": partial(_backward, learns=True),
}


def bind(name: str, place: list | None, seeds: AttentionSeeds | None = None) -> Callable:
    """The op as a callable of its arguments (ir.ops.GT_OPS) and `seed` and `counter`; place is that of the scores.

    seeds: of a GPU that draws by itself.
    """
    run = OPS[name]

    def draw(*args: Any, seed: int, counter: int) -> Any:
        return run(Words(seed, counter, place), seeds, *args)

    draw.draws = True  # type: ignore[attr-defined]
    return draw
