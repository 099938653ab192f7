"""The loss scale of `precision: fp16`: gradients inside of modules are scaled, those of the program are not.

An optimizer's step with a gradient that is not finite is left out, and the scale is halved, as torch.amp.GradScaler does it.
The scale is a remote tensor. Only an optimizer that takes no `found_inf` has a step wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gt.client.current_session import Current
from gt.client.device.remote_tensor import RemoteTensor

INITIAL, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000  # GradScaler's
KEYS = frozenset({"scale", "inverse", "tracker"})  # names of its tensors
AMP_KEYS = ("grad_scale", "found_inf")  # attributes of an optimizer, by which GradScaler tells a fused step


class LossScale:
    """The scale, and the hooks on optimizers that change it."""

    def __init__(self) -> None:
        self._carried: dict[str, torch.Tensor] = {}  # changed in place: backward of an older loss, and replays, have them
        Current.loss_scale = self._carried
        self._aside: dict[int, tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]] = {}  # gradients of a step left out
        self._hooks = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]

    def close(self) -> None:
        Current.loss_scale = {}
        for hook in self._hooks:
            hook.remove()

    def value(self) -> torch.Tensor:
        return self._tensors()["scale"]

    def inverse(self) -> torch.Tensor:
        return self._tensors()["inverse"]

    def _tensors(self) -> dict[str, torch.Tensor]:
        return _filled(self._carried)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Leave out a step with a gradient that is not finite; then the scale is changed."""
        owned = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if isinstance(parameter.grad, RemoteTensor)
        ]
        if not self._carried or not owned or getattr(optimizer, AMP_KEYS[1], None) is not None:
            return
        overflow = torch.zeros((), device="remote")
        with torch.no_grad():
            gradients = [parameter.grad for parameter in owned]
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, torch.ones((), device="remote"))
            # A fused step takes found_inf and leaves its parameters alone, with no wait. Any
            # other step is left out by taking the gradients away, for which the flag is read
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                for key, value in zip(AMP_KEYS, (None, overflow), strict=True):
                    setattr(optimizer, key, value)
                self._aside[id(optimizer)] = optimizer, []
            elif overflow.item():
                self._aside[id(optimizer)] = optimizer, list(zip(owned, gradients, strict=True))
                for parameter in owned:
                    parameter.grad = None

            # Halve the scale after an overflow, double it after INTERVAL steps without one. In
            # place: backward passes that are recorded already, and replays, read these tensors
            scale, inverse, tracker = self._carried.values()
            torch._amp_update_scale_(scale, tracker, overflow, GROWTH, BACKOFF, INTERVAL)
            inverse.copy_(scale.reciprocal())

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        _, aside = self._aside.pop(id(optimizer), (None, None))
        if aside is None:
            return
        for parameter, gradient in aside:
            parameter.grad = gradient
        for key in AMP_KEYS if not aside else ():
            delattr(optimizer, key)


def _filled(carried: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a scale, made at their first use."""
    if not carried:
        scale = torch.full((), INITIAL, device="remote")
        tracker = torch.zeros((), dtype=torch.int32, device="remote")
        carried.update(scale=scale, inverse=scale.reciprocal(), tracker=tracker)
    return carried


def restore(saved: Mapping[str, torch.Tensor]) -> None:
    """Go on with the scale of a checkpoint, if the config of this session has one."""
    if Current.precision.compute == "fp16":
        with torch.no_grad():  # in place, as in a step
            for name, tensor in _filled(Current.loss_scale).items():
                tensor.copy_(saved[name])


class ScaledCast(torch.autograd.Function):
    """A cast, or a copy in the same dtype, whose gradient is cast back and no longer scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.dtype, ctx.inverse = x.dtype, inverse
        return x.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].to(ctx.dtype).mul(ctx.inverse), None, None, None


class ScaledGradient(torch.autograd.Function):
    """The identity. Its gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].to(ctx.scale.dtype).mul(ctx.scale).to(gradients[0].dtype), None  # the scale is no number of fp16
