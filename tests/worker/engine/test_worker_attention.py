"""Attention on the CPU has the bits of F.scaled_dot_product_attention, and its dropout mask that of the whole tensor."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from gt.worker.engine.philox import Words, hits
from gt.worker.engine.torch.layers.attention import bind

SHAPES = [(1, 1, 4, 4, 8), (2, 4, 16, 16, 32), (2, 3, 65, 65, 64), (1, 2, 7, 13, 5), (2, 2, 130, 200, 16)]
forward, backward = bind("gt.sdpa.default", None), bind("gt.sdpa_backward.default", None)
DRAW = {"seed": 1, "counter": 2}


def same_bits(q, k, v, mask=None, causal=False, scale=None, gqa=False):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    want = F.scaled_dot_product_attention(*leaves, mask, 0.0, causal, scale=scale, enable_gqa=gqa)
    grad = torch.randn_like(want)
    grads = torch.autograd.grad(want, leaves, grad)
    with torch.no_grad():
        out, lse = forward(q, k, v, mask, 0.0, causal, scale, gqa, **DRAW)
        # logsumexp travels contiguous, the output with the strides it has or contiguous ones
        found = [
            backward(grad, q, k, v, mask, kept, lse.contiguous(), 0.0, causal, scale, gqa, **DRAW)
            for kept in (out, out.contiguous())
        ]
    assert lse.shape == q.shape[:-1] and lse.dtype == torch.float32 and not out.requires_grad
    torch.testing.assert_close(out, want.detach(), rtol=0, atol=0, equal_nan=True)
    for got in found:
        for ours, theirs in zip(got, grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def made(shape, strided, dtype):
    batch, heads, length, keys, width = shape
    torch.manual_seed(0)
    if strided:  # as a GPT cuts them out of one projection
        x = torch.randn(batch, length, 3 * heads * width, dtype=dtype)
        return [t.view(batch, length, heads, width).transpose(1, 2) for t in x.split(heads * width, 2)]
    return [torch.randn(batch, heads, n, width, dtype=dtype) for n in (length, keys, keys)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strided", [False, True])
def test_bits_of_plain_torch(shape, strided, dtype):
    q, k, v = made(shape, strided, dtype)
    scores = (q.shape[-2], k.shape[-2])
    masks = [None, torch.rand(scores) > 0.3, torch.randn(shape[0], 1, *scores, dtype=dtype)]
    for mask, causal, scale in itertools.product(masks, (False, True), (None, 0.3)):
        if mask is None or not causal:
            same_bits(q, k, v, mask, causal, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_where_torch_takes_other_kernels(dtype):
    same_bits(*(torch.randn(2, h, 6, 16, dtype=dtype) for h in (8, 2, 2)), causal=True, gqa=True)
    same_bits(*(torch.randn(5, 6, e, dtype=dtype) for e in (16, 16, 24)), causal=True)
    same_bits(*(torch.randn(2, 5, 6, e, dtype=dtype) for e in (16, 16, 24)))
    same_bits(*(torch.randn(2, 1, 1, n, 16, dtype=dtype) for n in (3, 5, 5)))


def composite(q, k, v, mask, p, causal, kept):
    """Softmax attention written out, with a given dropout mask."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return (scores.softmax(-1) * kept / (1 - p)) @ v


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_is_one_mask_forward_and_backward(causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 9, 8, dtype=torch.float64) for _ in range(3))
    mask = None if causal else torch.randn(9, 9, dtype=torch.float64)
    kept = torch.from_numpy(hits(Words(1, 2, None).of((2, 4, 9, 9)), 0.75))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    want = composite(*leaves, mask, 0.25, causal, kept)
    grad = torch.randn_like(want)
    out, lse = forward(q, k, v, mask, 0.25, causal, None, False, **DRAW)
    torch.testing.assert_close(out, want.detach())
    got = backward(grad, q, k, v, mask, out, lse, 0.25, causal, None, False, **DRAW)
    torch.testing.assert_close(got, torch.autograd.grad(want, leaves, grad))


@pytest.mark.parametrize("dim, cut", [(0, (1, 2)), (1, (2, 4))])
def test_dropout_of_a_piece_is_that_of_its_heads(dim, cut):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    args = (None, 0.3, True, None, False)
    out, _ = forward(q, k, v, *args, **DRAW)
    box = [[0, 2], [0, 4], [0, 9], [0, 9]]
    box[dim] = list(cut)
    piece = bind("gt.sdpa.default", [[2, 4, 9, 9], [box]])
    got, _ = piece(*(t.narrow(dim, cut[0], cut[1] - cut[0]) for t in (q, k, v)), *args, **DRAW)
    torch.testing.assert_close(got, out.narrow(dim, cut[0], cut[1] - cut[0]))


def test_backward_reads_nothing_beyond_an_expanded_output():
    q = torch.randn(2, 4, 64, 16)
    out, lse = forward(q, q, q, None, 0.0, False, None, False, **DRAW)
    one = out[:1, :1, :1, :1].clone().expand(out.shape)
    few = lse[:1, :1, :1].clone().expand(lse.shape)
    found, want = (
        backward(torch.ones(()).expand(out.shape), q, q, q, None, *kept, 0.0, False, None, False, **DRAW)
        for kept in ((one, few), (one.contiguous(), few.contiguous()))
    )
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs)
