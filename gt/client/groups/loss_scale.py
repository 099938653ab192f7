"""The loss scale of `precision: fp16`: gradients inside of modules are scaled, those of the program are not.

An optimizer's step with a gradient that is not finite is left out, and the scale is halved, as torch.amp.GradScaler does it.
The scale is a remote tensor. Only an optimizer that takes no `found_inf` has a step wait for it. An optimizer's state_dict has
it in each of its param_groups, so that every way of saving that state saves the scale.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gt.client.current_session import Current
from gt.client.device.remote_tensor import RemoteTensor

log = logging.getLogger("gt.client")

INITIAL, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000  # GradScaler's
KEYS = frozenset({"scale", "inverse", "tracker"})  # names of its tensors
SAVED = {"loss_scale": "scale", "loss_scale_tracker": "tracker"}  # keys of a param_group in a state_dict
AMP_KEYS = ("grad_scale", "found_inf")  # attributes of an optimizer, by which GradScaler tells a fused step


class LossScale:
    """The scale, and the hooks on optimizers that change it, and that save and load it."""

    def __init__(self) -> None:
        self._carried: dict[str, torch.Tensor] = {}  # changed in place: backward of an older loss, and replays, have them
        Current.loss_scale = self._carried
        self._aside: dict[int, tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]] = {}  # gradients of a step left out
        self._hooks = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]
        self._patched = torch.optim.Optimizer.state_dict, torch.optim.Optimizer.load_state_dict
        self._extend_state_dict()

    def close(self) -> None:
        Current.loss_scale = {}
        for hook in self._hooks:
            hook.remove()
        optimizer: Any = torch.optim.Optimizer
        optimizer.state_dict, optimizer.load_state_dict = self._patched

    def _extend_state_dict(self) -> None:
        """Patch torch's optimizers while the session lasts: torch has hooks of one optimizer only, and none of all."""
        optimizer: Any = torch.optim.Optimizer
        own, load = self._patched

        @functools.wraps(own)
        def state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
            state = own(optimizer)
            if not _is_remote(optimizer):
                return state
            with torch.no_grad():
                scale = {key: self._tensors()[name].clone() for key, name in SAVED.items()}
            return {**state, "param_groups": [{**group, **scale} for group in state["param_groups"]]}

        @functools.wraps(load)
        def load_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            groups = state_dict.get("param_groups", ())
            rest = [{key: value for key, value in group.items() if key not in SAVED} for group in groups]
            load(optimizer, {**state_dict, "param_groups": rest})
            if not _is_remote(optimizer):
                return
            scale = next((group for group in groups if SAVED.keys() <= group.keys()), None)
            if scale is not None:
                _go_on(scale)
            elif state_dict.get("state"):
                log.warning("the loaded state of an optimizer has no loss scale of precision fp16, which begins anew")

        optimizer.state_dict, optimizer.load_state_dict = state_dict, load_state_dict

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
            checked = [torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in gradients]
            torch._amp_foreach_non_finite_check_and_unscale_(checked, overflow, torch.ones((), device="remote"))
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


def _is_remote(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(parameter, RemoteTensor) for group in optimizer.param_groups for parameter in group["params"])


def _go_on(group: Mapping[str, Any]) -> None:
    """Go on with the scale of a loaded param_group."""
    carried = _filled(Current.loss_scale)
    with torch.no_grad():  # in place, as in a step
        for key, name in SAVED.items():
            carried[name].copy_(torch.as_tensor(group[key]).reshape(()))
        carried["inverse"].copy_(carried["scale"].reciprocal())


def copied() -> dict[str, torch.Tensor]:
    """Copies of the tensors of this session's scale, {} if it has none."""
    return {name: tensor.clone() for name, tensor in Current.loss_scale.items()}


def restore(saved: Mapping[str, torch.Tensor]) -> None:
    """Go on with a scale of `copied`, or of a checkpoint of earlier versions, if the config of this session has one."""
    if saved and Current.precision.compute == "fp16":
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
