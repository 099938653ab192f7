"""Activation functions and their backwards: one row each, forward and backward side by side."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gt.worker.engine.numpy.arrays import Array, fractions, rows, sample, together
from gt.worker.engine.numpy.pointwise import clamp, erf, sigmoid


def softplus(x: Array, beta: float = 1, threshold: float = 20) -> Array:
    y = x * x.dtype.type(beta)
    return np.where(y > threshold, x, np.log1p(np.exp(np.minimum(y, threshold))) / x.dtype.type(beta))


_C, _K = math.sqrt(2 / math.pi), 0.044715


def _gelu(self: Array, *, approximate: str = "none") -> Array:
    (x,) = fractions(self)
    k = x.dtype.type
    if approximate == "tanh":
        inner = k(_C) * (x + k(_K) * x * x * x)
        return k(0.5) * x * (1 + np.tanh(inner))
    return k(0.5) * x * (1 + erf(x * k(math.sqrt(0.5))))


def _gelu_backward(grad_output: Array, self: Array, *, approximate: str = "none") -> Array:
    g, x = fractions(grad_output, self)
    k = x.dtype.type
    if approximate == "tanh":
        t = np.tanh(k(_C) * (x + k(_K) * x * x * x))
        slope = k(0.5) * x * (1 - t * t) * k(_C) * (1 + k(3 * _K) * x * x)
        return g * (k(0.5) * (1 + t) + slope)
    density = np.exp(k(-0.5) * x * x) * k(1 / math.sqrt(2 * math.pi))
    return g * (k(0.5) * (1 + erf(x * k(math.sqrt(0.5)))) + x * density)


def _silu(self: Array) -> Array:
    (x,) = fractions(self)
    return x * sigmoid(x)


def _mish(self: Array) -> Array:
    (x,) = fractions(self)
    return x * np.tanh(softplus(x))


def _softplus(self: Array, beta: float = 1, threshold: float = 20) -> Array:
    (x,) = fractions(self)
    return softplus(x, beta, threshold)


def _softplus_backward(grad_output: Array, self: Array, beta: float, threshold: float) -> Array:
    g, x = fractions(grad_output, self)
    y = x * x.dtype.type(beta)
    return np.where(y > threshold, g, g * sigmoid(y))


def _leaky_relu(self: Array, negative_slope: float = 0.01) -> Array:
    x, slope = together(self, negative_slope)
    return np.where(x > 0, x, x * slope)


def _leaky_relu_backward(grad_output: Array, self: Array, negative_slope: float, self_is_result: bool) -> Array:
    g, x, slope = together(grad_output, self, negative_slope)
    return np.where(x > 0, g, g * slope)


def _elu(self: Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Array:
    x, a, s, i = together(self, alpha, scale, input_scale)
    return np.where(x > 0, x * s, np.expm1(np.minimum(x, 0) * i) * (a * s))


def _elu_backward(
    grad_output: Array, alpha: float, scale: float, input_scale: float, is_result: bool, self_or_result: Array
) -> Array:
    g, x, a, s, i = together(grad_output, self_or_result, alpha, scale, input_scale)
    below = g * i * (x + a * s) if is_result else g * i * a * s * np.exp(np.minimum(x, 0) * i)
    return np.where(x > 0, g * s, below)


def _hardtanh_backward(grad_output: Array, self: Array, min_val: Any, max_val: Any) -> Array:
    g, x = together(grad_output, self)
    return np.where((x <= min_val) | (x >= max_val), 0, g)


def _hardtanh(self: Array, min_val: Any = -1, max_val: Any = 1) -> Array:
    return clamp(self, min_val, max_val)


def _hardsigmoid(x: Array) -> Array:
    return np.clip(x + 3, 0, 6) / 6


def _hardsigmoid_backward(grad_output: Array, self: Array) -> Array:
    g, x = together(grad_output, self)
    return np.where((x > -3) & (x < 3), g / 6, 0)


def _hardswish(self: Array) -> Array:
    (x,) = fractions(self)
    return x * _hardsigmoid(x)


def _hardswish_backward(grad_output: Array, self: Array) -> Array:
    g, x = together(grad_output, self)
    return np.where(x <= -3, 0, np.where(x >= 3, g, g * (x / 3 + g.dtype.type(0.5))))


def _log_sigmoid(self: Array) -> tuple[Array, Array]:
    (x,) = fractions(self)
    buffer = np.exp(-np.abs(x))
    return np.minimum(x, 0) - np.log1p(buffer), buffer


def _log_sigmoid_backward(grad_output: Array, self: Array, buffer: Array) -> Array:
    g, x = fractions(grad_output, self)
    return g * sigmoid(-x)


def _threshold(self: Array, threshold: Any, value: Any) -> Array:
    x, v = together(self, value)
    return np.where(x <= threshold, v, x)


def _threshold_backward(grad_output: Array, self: Array, threshold: Any) -> Array:
    g, x = together(grad_output, self)
    return np.where(x <= threshold, g.dtype.type(0), g)


def _sigmoid_backward(grad_output: Array, output: Array) -> Array:
    g, y = together(grad_output, output)
    return g * (1 - y) * y


def _tanh_backward(grad_output: Array, output: Array) -> Array:
    g, y = together(grad_output, output)
    return g * (1 - y * y)


def _dropout_backward(grad_output: Array, mask: Array, scale: float) -> Array:
    g, m, s = together(grad_output, mask, scale)
    return g * m * s


def _prelu(self: Array, weight: Array) -> Array:
    x, w = together(self, weight)
    return np.where(x > 0, x, x * w)


def _prelu_backward(grad_output: Array, self: Array, weight: Array) -> tuple[Array, Array]:
    g, x, w = together(grad_output, self, weight)
    return np.where(x > 0, g, g * w), np.where(x > 0, 0, g * x)


def _glu(self: Array, dim: int = -1) -> Array:
    value, gate = np.split(sample(together(self)[0]), 2, dim)
    return value * sigmoid(gate)


def _glu_backward(grad_output: Array, self: Array, dim: int) -> Array:
    g, x = together(grad_output, self)
    value, gate = np.split(x, 2, dim)
    open_gate = sigmoid(gate)
    return np.concatenate([g * open_gate, g * value * open_gate * (1 - open_gate)], dim)


TABLE = rows(
    {
        "relu": lambda self: np.maximum(*together(self, 0)),
        "silu": _silu,
        "mish": _mish,
        "hardsigmoid": lambda self: _hardsigmoid(*fractions(self)),
        "hardswish": _hardswish,
        "gelu": _gelu,
        "gelu_backward": _gelu_backward,
        "softplus": _softplus,
        "softplus_backward": _softplus_backward,
        "leaky_relu": _leaky_relu,
        "leaky_relu_backward": _leaky_relu_backward,
        "elu": _elu,
        "elu_backward": _elu_backward,
        "hardtanh": _hardtanh,
        "hardtanh_backward": _hardtanh_backward,
        "hardsigmoid_backward": _hardsigmoid_backward,
        "hardswish_backward": _hardswish_backward,
        "log_sigmoid_forward": _log_sigmoid,
        "log_sigmoid_backward": _log_sigmoid_backward,
        "threshold": _threshold,
        "threshold_backward": _threshold_backward,
        "sigmoid_backward": _sigmoid_backward,
        "tanh_backward": _tanh_backward,
        "native_dropout_backward": _dropout_backward,
        "_prelu_kernel": _prelu,
        "_prelu_kernel_backward": _prelu_backward,
        "glu": _glu,
        "glu_backward": _glu_backward,
    }
)
