"""Attention by a GPU's fused kernels: torch's choice, inputs in the form that the kernel takes, and its own backward.

Keys and values of grouped heads stay as they are where the kernel reads them so. Masks are expanded by strides, not copied.
Dropout is drawn by the kernel, seeded as attention_seeds.py says.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from math import inf, sqrt
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn.functional import pad

from gt.worker.engine.philox import Words
from gt.worker.engine.torch.layers.attention_call import AttentionCall

if TYPE_CHECKING:
    from gt.worker.engine.torch.gpu.attention_seeds import AttentionSeeds

aten = torch.ops.aten
MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3  # torch.nn.attention.SDPBackend
FUSED = frozenset({FLASH, EFFICIENT, CUDNN})
MAX_CHOICES = 4096  # that are remembered
HEAD_MULTIPLE = 8  # flash takes head sizes that are multiples of it
BIAS_MULTIPLE = 16  # elements: rows of a bias begin at multiples of it
LSE_MULTIPLE = 32  # rows of the efficient kernel's logsumexp are padded to multiples of it
_choices: dict[Hashable, Choice] = {}
Draw: TypeAlias = "tuple[AttentionSeeds, Words]"


@dataclass(frozen=True)
class Choice:
    """A kernel of torch.nn.attention.SDPBackend, and the form of its inputs.

    repeat: grouped keys and values are repeated. wide: heads are padded to HEAD_MULTIPLE.
    """

    kernel: int
    repeat: bool = False
    wide: bool = False


def choice(call: AttentionCall) -> Choice:
    """torch's choice for inputs of these sizes, the same in forward and backward."""
    mask = None if call.mask is None else (call.mask.shape, call.mask.dtype, call.learns)
    sizes = call.q.shape, call.k.shape, call.v.shape, call.q.dtype, call.q.device
    # torch's choice depends on these alone, and asking it costs more than a small kernel: so it is remembered.
    key = sizes, mask, call.dropout, call.causal, call.scale, call.gqa, torch.are_deterministic_algorithms_enabled()
    chosen = _choices.get(key)
    if chosen is None:
        if len(_choices) >= MAX_CHOICES:
            _choices.clear()
        chosen = _choices[key] = _choose(plain(call))
    return chosen


def _choose(call: AttentionCall) -> Choice:
    """The first form of the inputs that torch has a fused kernel for: as they are, or repeated, padded, or both."""
    grouped = call.gqa and call.k.shape[-3] != call.q.shape[-3]
    odd = any(tensor.shape[-1] % HEAD_MULTIPLE for tensor in call.inputs)
    # Cheapest form first: repeating keys costs memory, padding costs a copy of all inputs.
    for repeat, wide in ((False, False), (True, False), (False, True), (True, True)):
        if (grouped or not repeat) and (odd or not wide):
            form = _padded(_repeated(call) if repeat else call) if wide else _repeated(call) if repeat else call
            kernel = _ask(form)
            if kernel in FUSED:
                return Choice(kernel, repeat, wide or (kernel == FLASH and odd))
    return Choice(MATH)


def _ask(call: AttentionCall) -> int:
    with torch.enable_grad():  # some kernels lack a backward for inputs of their forward
        q, k, v = (tensor.detach().requires_grad_() for tensor in call.inputs)
        mask = call.mask.detach().requires_grad_() if call.mask is not None and call.learns else call.mask
        # cuDNN draws by a generator of its own kind, and gives no gradient of a mask
        with _no_cudnn() if call.dropout or call.learns else nullcontext():
            return torch._fused_sdp_choice(q, k, v, mask, call.dropout, call.causal, scale=call.scale, enable_gqa=call.gqa)


@contextmanager
def _no_cudnn() -> Iterator[None]:
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def forward(call: AttentionCall, chosen: Choice) -> tuple[torch.Tensor, torch.Tensor]:
    """out [batch, heads, L, Ev], logsumexp f32 [batch, heads, L]. Dropout draws from torch's generator."""
    call, size = _given(call, chosen), call.v.shape[-1]
    rest = {"scale": call.scale}
    if chosen.kernel == FLASH:
        out, lse = aten._scaled_dot_product_flash_attention(*call.inputs, call.dropout, call.causal, False, **rest)[:2]
    elif chosen.kernel == CUDNN:
        cudnn = aten._scaled_dot_product_cudnn_attention
        out, lse = cudnn(*call.inputs, _bias(call), True, 0.0, call.causal, False, **rest)[:2]
        lse = lse.flatten(-2)
    else:
        efficient = aten._scaled_dot_product_efficient_attention
        out, lse = efficient(*call.inputs, _whole_bias(call), True, call.dropout, call.causal, **rest)[:2]
    return out[..., :size], lse[..., : call.q.shape[-2]]


def backward(
    call: AttentionCall, chosen: Choice, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, draw: Draw | None
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v and a mask that learns, by the kernel that made out and lse. draw: of forward's dropout."""
    sizes = [tensor.shape[-1] for tensor in call.inputs]
    groups, given = call.k.shape[-3], _given(call, chosen)
    seed, offset = _state(call, chosen, draw)
    p, rest = call.dropout, {"scale": given.scale}
    grad = _rows(grad)
    if chosen.wide:
        grad, out = _widened(grad), _widened(out)
    if chosen.kernel == FLASH:
        lengths = given.q.shape[-2], given.k.shape[-2]
        flash = aten._scaled_dot_product_flash_attention_backward
        grads = flash(grad, *given.inputs, out, lse, None, None, *lengths, p, given.causal, seed, offset, **rest)
    elif chosen.kernel == CUDNN:
        lengths = given.q.shape[-2], given.k.shape[-2]
        cudnn = aten._scaled_dot_product_cudnn_attention_backward
        saved = out, lse.unsqueeze(-1), seed, offset
        grads = cudnn(grad, *given.inputs, *saved, _bias(given), None, None, *lengths, 0.0, given.causal, **rest)
    else:
        # The forward kernel pads its logsumexp, which `forward` cut off. inf gives weight exp(-inf) = 0 to rows that do not
        # exist.
        lse = pad(lse, (0, -lse.shape[-1] % LSE_MULTIPLE), value=inf)
        efficient = aten._scaled_dot_product_efficient_attention_backward
        inputs, saved = (*given.inputs, _whole_bias(given)), (_heads_within_rows(out), lse, seed, offset)
        wanted = [True, True, True, call.learns]
        grads = efficient(grad, *inputs, *saved, p, wanted, given.causal, **rest)
    of_q, of_k, of_v = (part[..., :size] for part, size in zip(grads, sizes, strict=False))
    if chosen.repeat:
        # Grouped keys were repeated for each query head of a group: their gradient is the sum over the group.
        of_k, of_v = (part.unflatten(-3, (groups, -1)).sum(-3) for part in (of_k, of_v))
    if call.mask is None or not call.learns:
        return of_q, of_k, of_v
    return of_q, of_k, of_v, _summed(grads[3], call.mask)


def _summed(grad: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The gradient of a mask from that of the scores [batch, heads, L, S], summed along the dims that it broadcasts."""
    return grad.sum_to_size(mask.shape).to(mask.dtype)


# ---- inputs as kernels want them


def plain(call: AttentionCall) -> AttentionCall:
    """The call with elements of a head next to one another."""
    q, k, v = map(_rows, call.inputs)
    return replace(call, q=q, k=k, v=v)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _heads_within_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[batch, heads, L, Ev] in memory of [batch, L, heads, Ev]: the efficient kernel's backward reads no other strides."""
    return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)


def _repeated(call: AttentionCall) -> AttentionCall:
    times = call.q.shape[-3] // call.k.shape[-3]
    k, v = (tensor.repeat_interleave(times, -3) for tensor in (call.k, call.v))
    return replace(call, k=k, v=v, gqa=False)


def _given(call: AttentionCall, chosen: Choice) -> AttentionCall:
    call = plain(call)
    if chosen.repeat:
        call = _repeated(call)
    return _padded(call) if chosen.wide else call


def _padded(call: AttentionCall) -> AttentionCall:
    """Zeros behind each head change no score; the scale stays that of the true size."""
    scale = 1 / sqrt(call.q.shape[-1]) if call.scale is None else call.scale
    q, k, v = map(_widened, call.inputs)
    return replace(call, q=q, k=k, v=v, scale=scale)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[-1] % HEAD_MULTIPLE
    return pad(tensor, (0, missing)) if missing else tensor


def _bias(call: AttentionCall) -> torch.Tensor | None:
    """The sum to the scores, [batch or 1, heads or 1, L, S] in q's dtype. Rows begin where kernels can read them.

    A dim that the mask broadcasts takes no memory, but for that of the keys, along which kernels read several elements at once.
    """
    bias = call.bias()
    if bias is None:
        return None
    keys = call.k.shape[-2]
    bias = bias.to(call.q.dtype)
    bias = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
    shape = (*bias.shape[:2], call.q.shape[-2], keys)
    # Kernels load 16 elements of a row at once, so each row and the tensor itself must begin at such a multiple.
    steps = [step for size, step in zip(bias.shape[:-1], bias.stride()[:-1], strict=True) if size > 1]
    rows = bias.shape[-1] == keys and bias.stride(-1) == 1
    if not rows or keys % BIAS_MULTIPLE or any(step % BIAS_MULTIPLE for step in steps) or bias.storage_offset() % BIAS_MULTIPLE:
        # Copy only what has memory: a dim with stride 0 (broadcast) is taken once and expanded again below.
        small = bias[tuple(slice(None if step else 1) for step in bias.stride()[:-1])]
        room = bias.new_zeros((*small.shape[:-1], keys + -keys % BIAS_MULTIPLE))
        room[..., :keys] = small
        bias = room[..., :keys]
    return bias.expand(shape)


def _whole_bias(call: AttentionCall) -> torch.Tensor | None:
    """The same, [batch, heads, L, S]."""
    bias = _bias(call)
    return None if bias is None else bias.expand(*call.q.shape[:-1], call.k.shape[-2])


def _state(call: AttentionCall, chosen: Choice, draw: Draw | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward's random state as the kernel's backward takes it: flash reads seed and offset from one tensor."""
    if draw is None or not call.dropout:
        none = _no_state(call.q.device)
        return (none, none) if chosen.kernel == FLASH else (none[0], none[1])
    seeds, words = draw
    if chosen.kernel == FLASH:
        state = seeds.device_state(words).view(torch.uint64)
        return state, state
    return seeds.state(words)


@cache
def _no_state(device: torch.device) -> torch.Tensor:
    """A random state for backward kernels, which they do not use without dropout."""
    return torch.zeros(2, dtype=torch.int64, device=device)
