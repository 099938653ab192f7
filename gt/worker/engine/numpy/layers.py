"""Normalisation, softmax, embedding and losses, each beside its backward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gt.worker.engine.numpy.arrays import DOUBLE, Array, axis_of, fractions, rows, together, wide
from gt.worker.engine.numpy.reductions import total

# ---- softmax


def _shifted(x: Array, axis: int) -> Array:
    """x less its maximum, so that no exponential overflows; rows of -inf alone become NaN, as torch's do."""
    return x - np.maximum.reduce(x, axis, keepdims=True, initial=-np.inf)


def softmax(x: Array, axis: int) -> Array:
    e = np.exp(_shifted(x, axis))
    e /= np.add.reduce(e, axis, keepdims=True)
    return e


def _softmax(self: Array, dim: int, half_to_float: bool) -> Array:
    (x,) = fractions(self)
    return softmax(x, axis_of(dim, x)) if x.ndim else np.ones_like(x)


def _safe_softmax(self: Array, dim: int, dtype: np.dtype | None = None) -> Array:
    found = _softmax(self if dtype is None else self.astype(dtype), dim, False)
    return np.where((self == -np.inf).all(axis_of(dim, self), keepdims=True), 0, found)


def _log_softmax(self: Array, dim: int, half_to_float: bool) -> Array:
    (x,) = fractions(self)
    if not x.ndim:
        return np.zeros_like(x)
    x = _shifted(x, axis_of(dim, x))
    return x - np.log(np.add.reduce(np.exp(x), axis_of(dim, x), keepdims=True, dtype=DOUBLE)).astype(x.dtype)


def _softmax_backward(grad_output: Array, output: Array, dim: int, input_dtype: np.dtype) -> Array:
    g, y = fractions(grad_output, output)
    return y * (g - np.add.reduce(g * y, axis_of(dim, y), keepdims=True)) if y.ndim else np.zeros_like(y)


def _log_softmax_backward(grad_output: Array, output: Array, dim: int, input_dtype: np.dtype) -> Array:
    g, y = fractions(grad_output, output)
    return g - np.exp(y) * np.add.reduce(g, axis_of(dim, y), keepdims=True) if y.ndim else np.zeros_like(y)


# ---- normalisation


def _last(x: Array, shape: Sequence[int]) -> tuple[int, ...]:
    """The axes that are normalised."""
    return tuple(range(x.ndim - len(shape), x.ndim))


def _layer_norm(
    input: Array, normalized_shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    (x,) = fractions(input)
    axes = _last(x, normalized_shape)
    mean = np.mean(x, axes, dtype=DOUBLE, keepdims=True)
    off = x - mean.astype(x.dtype)
    rstd = (1 / np.sqrt(np.mean(off * off, axes, dtype=DOUBLE, keepdims=True) + eps)).astype(x.dtype)
    out = off * rstd
    if weight is not None:
        out = out * weight
    return out if bias is None else out + bias, mean, rstd


def _normal_backward(g: Array, hat: Array, rstd: Array, axes: tuple[int, ...]) -> Array:
    """d/dx of a normalisation to `hat`, g being the gradient with respect to hat."""
    along = np.mean(g * hat, axes, dtype=DOUBLE, keepdims=True).astype(g.dtype)
    level = np.mean(g, axes, dtype=DOUBLE, keepdims=True).astype(g.dtype)
    return (g - level - hat * along) * rstd


def _layer_norm_backward(  # noqa: PLR0913 - the op's arguments
    grad_out: Array, input: Array, normalized_shape: Sequence[int], mean: Array, rstd: Array,
    weight: Array | None, bias: Array | None, output_mask: Sequence[bool],
) -> tuple[Array | None, ...]:  # fmt: skip
    g, x, mean, rstd = fractions(grad_out, input, mean, rstd)
    hat = (x - mean) * rstd
    outer = tuple(range(x.ndim - len(normalized_shape)))
    scaled = g if weight is None else g * weight
    return (
        _normal_backward(scaled, hat, rstd, _last(x, normalized_shape)) if output_mask[0] else None,
        _summed(g * hat, outer) if output_mask[1] else None,
        _summed(g, outer) if output_mask[2] else None,
    )


def _rms_norm(input: Array, normalized_shape: Sequence[int], weight: Array | None, eps: float | None) -> tuple[Array, Array]:
    (x,) = fractions(input)
    least = np.finfo(x.dtype).eps if eps is None else eps
    square = np.mean(x * x, _last(x, normalized_shape), dtype=DOUBLE, keepdims=True)
    rstd = (1 / np.sqrt(square + least)).astype(x.dtype)
    out = x * rstd
    return out if weight is None else out * weight, rstd


def _rms_norm_backward(
    grad_out: Array, input: Array, normalized_shape: Sequence[int], rstd: Array, weight: Array | None,
    output_mask: Sequence[bool],
) -> tuple[Array | None, ...]:  # fmt: skip
    g, x, rstd = fractions(grad_out, input, rstd)
    hat = x * rstd
    scaled = g if weight is None else g * weight
    along = np.mean(scaled * hat, _last(x, normalized_shape), dtype=DOUBLE, keepdims=True).astype(g.dtype)
    return (
        (scaled - hat * along) * rstd if output_mask[0] else None,
        _summed(g * hat, tuple(range(x.ndim - len(normalized_shape)))) if output_mask[1] else None,
    )


def _summed(x: Array, axes: tuple[int, ...]) -> Array:
    return np.add.reduce(x, axes, dtype=DOUBLE)


# ---- embedding


def within(index: Array, size: int, what: str) -> Array:
    """The index itself; IndexError if one is not in [0, size), where NumPy would count from the end."""
    if index.size and (index.min() < 0 or index.max() >= size):
        raise IndexError(f"{what}: index out of range: [{index.min()}, {index.max()}] is not within [0, {size})")
    return index


def _embedding(
    weight: Array, indices: Array, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Array:
    return weight[within(indices, len(weight), "embedding")]


def sums_by_row(target: Array, index: Array, source: Array) -> None:
    """target[index[i]] += source[i], each row's terms in order; as np.add.at, much faster for wide rows."""
    if not index.size:
        return
    order = np.argsort(index, kind="stable")
    found, starts = np.unique(index[order], return_index=True)
    target[found] += np.add.reduceat(source[order], starts, axis=0, dtype=target.dtype)


def _embedding_backward(
    grad_output: Array, indices: Array, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Array:
    index = within(indices, num_weights, "embedding_dense_backward").reshape(-1)
    source = grad_output.reshape(index.size, -1).astype(wide(grad_output.dtype), copy=False)
    if scale_grad_by_freq:
        source = source / np.bincount(index, minlength=num_weights)[index][:, None].astype(source.dtype)
    if padding_idx >= 0:
        kept = index != padding_idx
        index, source = index[kept], source[kept]
    gradient = np.zeros((num_weights, grad_output.shape[-1]), source.dtype)
    sums_by_row(gradient, index, source)
    return gradient


# ---- losses; reduction: 0 none, 1 mean, 2 sum


def reduced(values: Array, reduction: int) -> Array:
    if reduction == 0:
        return values
    return total(values) if reduction == 2 else total(values) / np.float64(values.size)


def _share(g: Array, x: Array, reduction: int) -> Array:
    """The gradient that each element of an unreduced loss gets."""
    return g / x.dtype.type(x.size) if reduction == 1 else g


def _picked(self: Array, target: Array, weight: Array | None, ignore_index: int) -> tuple[Array, tuple, Array]:
    """(scores [N, C, rest...], index of each target's score, each target's weight)"""
    x = self if self.ndim > 1 else self[None]
    label = target if target.ndim else target[None]
    kept = label != ignore_index
    safe = within(np.where(kept, label, 0), x.shape[1], "nll_loss: target")
    grid = np.ogrid[tuple(slice(size) for size in label.shape)]
    one = np.ones(x.shape[1], x.dtype) if weight is None else weight
    return x, (grid[0], safe, *grid[1:]), np.where(kept, one[safe], x.dtype.type(0))


def _nll_loss(self: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int) -> tuple[Array, Array]:
    (self,) = fractions(self)
    x, at, weights = _picked(self, target, weight, ignore_index)
    # where, and not the product alone: an ignored score may be inf or nan.
    losses = np.where(weights == 0, 0, -x[at] * weights)
    if reduction == 0:
        return losses.reshape(target.shape), np.zeros((), x.dtype)
    whole = total(weights)
    return total(losses) / (whole if reduction == 1 else 1), whole


def _nll_loss_backward(  # noqa: PLR0913 - the op's arguments
    grad_output: Array, self: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int,
    total_weight: Array,
) -> Array:  # fmt: skip
    g, x, whole = fractions(grad_output, self, total_weight)
    x, at, weights = _picked(x, target, weight, ignore_index)
    gradient = np.zeros(x.shape, x.dtype)
    gradient[at] = np.where(weights == 0, 0, -weights * (g / whole if reduction == 1 else g))
    return gradient.reshape(self.shape)


def _mse_loss(self: Array, target: Array, reduction: int = 1) -> Array:
    x, y = together(self, target)
    return reduced((x - y) * (x - y), reduction)


def _mse_loss_backward(grad_output: Array, self: Array, target: Array, reduction: int) -> Array:
    g, x, y = together(grad_output, self, target)
    return _share(g, x, reduction) * 2 * (x - y)


def _smooth_l1_loss(self: Array, target: Array, reduction: int = 1, beta: float = 1.0) -> Array:
    x, y = together(self, target)
    off = np.abs(x - y)
    k = off.dtype.type
    return reduced(np.where(off < beta, k(0.5) * off * off / k(beta or 1), off - k(0.5 * beta)), reduction)


def _smooth_l1_loss_backward(grad_output: Array, self: Array, target: Array, reduction: int, beta: float) -> Array:
    g, x, y = together(grad_output, self, target)
    off = x - y
    return _share(g, x, reduction) * np.where(np.abs(off) < beta, off / x.dtype.type(beta or 1), np.sign(off))


def _huber_loss(self: Array, target: Array, reduction: int = 1, delta: float = 1.0) -> Array:
    x, y = together(self, target)
    off, limit = np.abs(x - y), x.dtype.type(delta)
    half = x.dtype.type(0.5)
    return reduced(np.where(off <= limit, half * off * off, limit * (off - half * limit)), reduction)


def _huber_loss_backward(grad_output: Array, self: Array, target: Array, reduction: int, delta: float) -> Array:
    g, x, y = together(grad_output, self, target)
    return _share(g, x, reduction) * np.clip(x - y, -delta, delta)


def _bce(self: Array, target: Array, weight: Array | None = None, reduction: int = 1) -> Array:
    p, y = together(self, target)
    # torch bounds the logarithms by -100, so that p = 0 gives no infinite loss.
    loss = -(y * np.maximum(np.log(p), -100) + (1 - y) * np.maximum(np.log1p(-p), -100))
    return reduced(loss if weight is None else loss * weight, reduction)


def _bce_backward(grad_output: Array, self: Array, target: Array, weight: Array | None = None, reduction: int = 1) -> Array:
    g, p, y = together(grad_output, self, target)
    g = _share(g, p, reduction) * (p - y) / np.maximum((1 - p) * p, p.dtype.type(1e-12))
    return g if weight is None else g * weight


def _bce_with_logits(
    self: Array, target: Array, weight: Array | None = None, pos_weight: Array | None = None, reduction: int = 1
) -> Array:
    x, y = together(self, target)
    below = np.log1p(np.exp(-np.abs(x))) + np.maximum(-x, 0)  # -log sigmoid(x)
    scale = 1 if pos_weight is None else 1 + (pos_weight - 1) * y
    loss = (1 - y) * x + scale * below
    return reduced(loss if weight is None else loss * weight, reduction)


TABLE = rows({
    "_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_safe_softmax": _safe_softmax,
    "_log_softmax": _log_softmax,
    "_log_softmax_backward_data": _log_softmax_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "nll_loss_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "nll_loss2d_forward": _nll_loss,
    "nll_loss2d_backward": _nll_loss_backward,
    "mse_loss": _mse_loss,
    "mse_loss_backward": _mse_loss_backward,
    "smooth_l1_loss": _smooth_l1_loss,
    "smooth_l1_loss_backward": _smooth_l1_loss_backward,
    "huber_loss": _huber_loss,
    "huber_loss_backward": _huber_loss_backward,
    "binary_cross_entropy": _bce,
    "binary_cross_entropy_backward": _bce_backward,
    "binary_cross_entropy_with_logits": _bce_with_logits,
})  # fmt: skip
