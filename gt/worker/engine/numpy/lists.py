"""Ops on lists of tensors: `_foreach_*` as the op on one tensor, repeated, and the optimizers that are one op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from math import sqrt
from typing import Any

import numpy as np

from gt.worker.engine.numpy.arrays import Array, wide, write
from gt.worker.engine.numpy.reductions import vector_norm

Tensors = Sequence[Array]


def each(run: Callable[..., Any]) -> Callable[..., list]:
    """run for each place of the lists among the arguments; what is no list goes to all."""

    def over(*args: Any, **kwargs: Any) -> list:
        columns = zip(*(a if isinstance(a, list) else repeat(a) for a in args))
        return [run(*row, **kwargs) for row in columns]

    return over


def _scaled(grad: Array, scale: Array | None, found: Array | None, maximize: bool) -> Array | None:
    """The gradient as the step takes it; it keeps what it was divided by. None: a gradient was infinite, no step."""
    if found is not None and found:
        return None
    if scale is not None:
        write(grad, grad / scale.astype(wide(grad.dtype)))
    return -grad if maximize else grad


def _adam(decoupled: bool) -> Callable[..., None]:
    """Kingma and Ba (2015); weight decay decoupled as by Loshchilov and Hutter (2019)."""

    def run(  # noqa: PLR0913 - the op's arguments
        self: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, max_exp_avg_sqs: Tensors,
        state_steps: Tensors, *, lr: Any, beta1: float, beta2: float, weight_decay: float, eps: float, amsgrad: bool,
        maximize: bool, grad_scale: Array | None = None, found_inf: Array | None = None,
    ) -> None:  # fmt: skip
        rate = float(lr)
        tops = max_exp_avg_sqs if amsgrad else repeat(None)
        for param, grad, mean, square, top, step in zip(self, grads, exp_avgs, exp_avg_sqs, tops, state_steps):
            g = _scaled(grad, grad_scale, found_inf, maximize)
            if g is None:
                continue
            number = param.dtype.type
            if weight_decay and decoupled:
                param *= number(1 - rate * weight_decay)
            elif weight_decay:
                g = g + param * number(weight_decay)
            mean += (g - mean) * number(1 - beta1)
            square *= number(beta2)
            square += number(1 - beta2) * g * g
            largest = square if top is None else np.maximum(top, square, out=top)
            root = np.sqrt(largest)
            root /= number(sqrt(1 - beta2 ** float(step)))
            root += number(eps)
            param -= number(rate / (1 - beta1 ** float(step))) * mean / root

    return run


def _sgd(  # noqa: PLR0913 - the op's arguments
    self: Tensors, grads: Tensors, momentum_buffer_list: Tensors, *, weight_decay: float, momentum: float, lr: Any,
    dampening: float, nesterov: bool, maximize: bool, is_first_step: bool, grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> None:  # fmt: skip
    rate = float(lr)
    for param, grad, buffer in zip(self, grads, momentum_buffer_list or repeat(None)):
        g = _scaled(grad, grad_scale, found_inf, maximize)
        if g is None:
            continue
        number = param.dtype.type
        if weight_decay:
            g = g + param * number(weight_decay)
        if momentum and buffer is not None:
            write(buffer, g if is_first_step else buffer * number(momentum) + g * number(1 - dampening))
            g = g + buffer * number(momentum) if nesterov else buffer
        param -= g * number(rate)


def _adagrad(  # noqa: PLR0913 - the op's arguments
    self: Tensors, grads: Tensors, state_sums: Tensors, state_steps: Tensors, *, lr: Any, lr_decay: float,
    weight_decay: float, eps: float, maximize: bool, grad_scale: Array | None = None, found_inf: Array | None = None,
) -> None:  # fmt: skip
    rate = float(lr)
    for param, grad, whole, step in zip(self, grads, state_sums, state_steps):
        g = _scaled(grad, grad_scale, found_inf, maximize)
        if g is None:
            continue
        number = param.dtype.type
        if weight_decay:
            g = g + param * number(weight_decay)
        whole += g * g
        param -= number(rate / (1 + (float(step) - 1) * lr_decay)) * g / (np.sqrt(whole) + number(eps))


def _norm(x: Array, ord: Any = 2, dtype: np.dtype | None = None) -> Array:
    return vector_norm(x, ord, dtype=dtype)


# Overloads of `_foreach_*` have names of their own; what they repeat is found by the op's name. Not so repeated:
FOREACH = "aten._foreach_"
OTHERS = ("addcmul.Tensor", "addcdiv.Tensor", "addcmul_.Tensor", "addcdiv_.Tensor")  # numbers in one tensor
TABLE: dict[str, Callable[..., Any]] = {
    "_foreach_norm.Scalar": each(_norm),
    "_fused_adamw_.default": _adam(True),
    "_fused_adamw_.tensor_lr": _adam(True),
    "_fused_adam_.default": _adam(False),
    "_fused_adam_.tensor_lr": _adam(False),
    "_fused_sgd_.default": _sgd,
    "_fused_sgd_.tensor_lr": _sgd,
    "_fused_adagrad_.default": _adagrad,
}
