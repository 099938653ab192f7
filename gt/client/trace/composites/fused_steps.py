"""Fused steps of optimizers whose momentum or betas are tensors within a captured call (values/learning_rates.py).

Such a step gets NaN for them. It is carried out as ops on lists, in the order of torch's own step for tensors of rates. A step
that needs more than that gets its numbers, and its call is no program.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gt.client.current_session import Current, current
from gt.client.trace.dispatch import call
from gt.client.trace.op_info import OpInfo
from gt.client.values.learning_rates import setting_of

_SETTINGS = {"momentum": ("momentum",), "betas": ("beta1", "beta2")}
InOps = Callable[[tuple, tuple, dict[str, Any]], None]
aten = torch.ops.aten


def stepped(name: str, in_ops: InOps) -> Callable[[OpInfo, tuple, dict], Any]:
    """The handler of a fused step. name: of the setting that may be tensors; in_ops: the step as ops on lists."""
    keys = _SETTINGS[name]

    def handler(info: OpInfo, args: tuple, kwargs: dict) -> Any:
        known = setting_of(args[0][0], name) if args[0] and kwargs[keys[0]] != kwargs[keys[0]] else None
        if known is None:
            return call(info, args, kwargs)
        tensors, numbers = known
        if kwargs.get("grad_scale") is None and kwargs.get("found_inf") is None and not kwargs.get("is_first_step"):
            return in_ops(args, tensors, kwargs)
        tape = current().tape
        if tape is not None:
            tape.refuse(f"a fused step whose {name} changes has scaled gradients, or makes its state", Current.origins.here())
        return call(info, args, {**kwargs, **dict(zip(keys, numbers, strict=True))})

    return handler


def _gradients(grads: list, params: list, decay: float, maximize: bool) -> list:
    """The gradients of a step, with those of a penalty on the weights."""
    if maximize:
        grads = aten._foreach_neg.default(grads)
    return aten._foreach_add.List(grads, params, alpha=decay) if decay else grads


def sgd(lists: tuple, tensors: tuple, options: dict[str, Any]) -> None:
    """SGD's step whose buffers are there. lists: parameters, gradients, buffers. options: the op's keywords."""
    (params, grads, buffers), (momentum,) = lists, tensors
    grads = _gradients(grads, params, options["weight_decay"], options["maximize"])
    aten._foreach_mul_.Tensor(buffers, momentum)
    aten._foreach_add_.List(buffers, grads, alpha=1 - options["dampening"])
    update = buffers
    if options["nesterov"]:
        update = aten._foreach_mul.Tensor(buffers, momentum)
        aten._foreach_add_.List(update, grads)
    _add_scaled(params, update, options["lr"])


def _add_scaled(params: list, update: list, lr: Any) -> None:
    if isinstance(lr, torch.Tensor):
        aten._foreach_add_.List(params, aten._foreach_mul.Tensor(update, -lr))
    else:
        aten._foreach_add_.List(params, update, alpha=-lr)


def adam(lists: tuple, tensors: tuple, options: dict[str, Any], decoupled: bool) -> None:
    """The step of Adam, or of AdamW, whose decay of weights is decoupled. options: the op's keywords."""
    params, grads, means, squares, most, steps = lists
    lr, decay = options["lr"], options["weight_decay"]
    grads = _gradients(grads, params, 0 if decoupled else decay, options["maximize"])
    if decoupled and decay:
        _multiply(params, 1 - lr * decay)
    # Running averages: x = beta x + (1 - beta) y
    for averages, beta, new in zip((means, squares), tensors, (grads, aten._foreach_mul.List(grads, grads)), strict=True):
        aten._foreach_mul_.Tensor(averages, beta)
        aten._foreach_add_.List(averages, aten._foreach_mul.Tensor(new, 1 - beta))
    if options["amsgrad"]:
        aten._foreach_maximum_.List(most, squares)
    # Corrections of both for the number of steps: 1 - beta^n
    first, second = (aten._foreach_pow.List([beta] * len(steps), steps) for beta in tensors)
    for correction in (first, second):
        aten._foreach_neg_.default(correction)
        aten._foreach_add_.Scalar(correction, 1)
    # p -= lr / first * mean / (sqrt(square) / sqrt(second) + eps)
    divisors = aten._foreach_sqrt.default(most if options["amsgrad"] else squares)
    aten._foreach_div_.List(divisors, aten._foreach_sqrt.default(second))
    aten._foreach_add_.Scalar(divisors, options["eps"])
    aten._foreach_reciprocal_.default(first)
    _multiply(first, -lr)
    aten._foreach_div_.List(divisors, first)
    aten._foreach_addcdiv_.Scalar(params, means, divisors)


def _multiply(tensors: list, factor: Any) -> None:
    if isinstance(factor, torch.Tensor):
        aten._foreach_mul_.Tensor(tensors, factor)
    else:
        aten._foreach_mul_.Scalar(tensors, factor)


_STEPS: tuple[tuple[str, str, InOps], ...] = (
    ("_fused_sgd_", "momentum", sgd),
    ("_fused_adam_", "betas", partial(adam, decoupled=False)),
    ("_fused_adamw_", "betas", partial(adam, decoupled=True)),
)  # op, setting, step
HANDLERS = {
    f"aten.{op}.{overload}": stepped(name, in_ops) for op, name, in_ops in _STEPS for overload in ("default", "tensor_lr")
}
