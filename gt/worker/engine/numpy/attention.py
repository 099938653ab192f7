"""Attention as the plain maths, forward and backward; dropout's mask is that of the global scores, as in every engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import numpy as np

from gt.worker.engine.numpy.arrays import FLOAT, Array, fractions
from gt.worker.engine.philox import Words, hits


def _heads(x: Array, heads: int) -> Array:
    """Each head as often as its group of queries has members."""
    return x if x.shape[-3] == heads else np.repeat(x, heads // x.shape[-3], -3)


def _grouped(grad: Array, like: Array) -> Array:
    """The gradient of _heads."""
    heads = like.shape[-3]
    if grad.shape[-3] == heads:
        return grad
    return grad.reshape(*grad.shape[:-3], heads, -1, *grad.shape[-2:]).sum(-3)


def _weights(q: Array, k: Array, mask: Array | None, causal: bool, scale: float) -> tuple[Array, Array]:
    """(softmax of the scores [..., heads, L, S], its logsumexp [..., heads, L]); rows that see nothing are 0."""
    scores = np.matmul(q, k.swapaxes(-1, -2))
    scores *= scores.dtype.type(scale)
    if causal:
        scores[..., ~np.tri(*scores.shape[-2:], dtype=bool)] = -np.inf
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask.astype(scores.dtype)
    top = np.maximum.reduce(scores, -1, keepdims=True, initial=-np.inf)
    top[top == -np.inf] = 0
    scores -= top
    np.exp(scores, out=scores)
    whole = np.add.reduce(scores, -1, keepdims=True)
    whole[whole == 0] = 1
    scores /= whole
    return scores, (np.log(whole) + top)[..., 0]


def _dropout(words: Words, weights: Array, p: float) -> Array | None:
    """Factors of the weights under dropout, None without dropout."""
    if not p:
        return None
    return hits(words.of(weights.shape), 1.0 - p) * weights.dtype.type(1.0 / (1.0 - p) if p < 1 else 0.0)


def _forward(  # noqa: PLR0913 - the op's arguments
    words: Words, query: Array, key: Array, value: Array, mask: Array | None, dropout: float, causal: bool,
    scale: float | None, gqa: bool,
) -> tuple[Array, Array]:  # fmt: skip
    q, k, v = fractions(query, key, value)
    k, v = _heads(k, q.shape[-3]), _heads(v, q.shape[-3])
    weights, logsumexp = _weights(q, k, mask, causal, 1 / sqrt(q.shape[-1]) if scale is None else scale)
    kept = _dropout(words, weights, dropout)
    return np.matmul(weights if kept is None else weights * kept, v), logsumexp.astype(FLOAT)


def _backward(  # noqa: PLR0913 - the op's arguments
    words: Words, grad: Array, query: Array, key: Array, value: Array, mask: Array | None, out: Array, logsumexp: Array,
    dropout: float, causal: bool, scale: float | None, gqa: bool, learns: bool = False,
) -> tuple[Array, ...]:  # fmt: skip
    g, q, k, v = fractions(grad, query, key, value)
    k, v = _heads(k, q.shape[-3]), _heads(v, q.shape[-3])
    factor = q.dtype.type(1 / sqrt(q.shape[-1]) if scale is None else scale)
    weights, _ = _weights(q, k, mask, causal, float(factor))
    kept = _dropout(words, weights, dropout)
    grad_v = np.matmul((weights if kept is None else weights * kept).swapaxes(-1, -2), g)
    scores = np.matmul(g, v.swapaxes(-1, -2))
    if kept is not None:
        scores *= kept
    # Backward of softmax: dS = W * (dW - sum(dW * W)). The weights are computed again from the inputs, and not kept.
    scores -= np.add.reduce(scores * weights, -1, keepdims=True)
    scores *= weights
    of_mask = (_summed(scores, mask),) if learns and mask is not None else ()
    scores *= factor
    grad_q, grad_k = np.matmul(scores, k), np.matmul(scores.swapaxes(-1, -2), q)
    return grad_q, _grouped(grad_k, key), _grouped(grad_v, value), *of_mask


def _summed(grad: Array, mask: Array) -> Array:
    """The gradient of a mask from that of the scores [..., heads, L, S], summed along the dims that it broadcasts."""
    grad = np.add.reduce(grad, tuple(range(grad.ndim - mask.ndim)))
    return np.add.reduce(grad, tuple(dim for dim, size in enumerate(mask.shape) if size == 1), keepdims=True)


OPS: dict[str, Callable[..., Any]] = {
    "gt.sdpa.default": _forward,
    "gt.sdpa_backward.default": _backward,
    "gt.sdpa_biased.default": _forward,
    "gt.sdpa_biased_backward.default": partial(_backward, learns=True),
}


def bind(name: str, place: list | None) -> Callable:
    """The op as a callable of its arguments (ir.ops.GT_OPS) and `seed` and `counter`; place is that of the scores."""
    run = OPS[name]

    def draw(*args: Any, seed: int, counter: int) -> Any:
        return run(Words(seed, counter, place), *args)

    draw.draws = True  # type: ignore[attr-defined]
    return draw
