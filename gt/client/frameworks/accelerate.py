"""Accelerate, and so the Trainer of transformers: `remote` is their device in a program that has it and asks for no other."""

from __future__ import annotations

from typing import Any

import torch

from gt.client.device.remote_tensor import LAZY, Shown


def prefer_remote(module: Any) -> None:
    """accelerate.state: an explicit CPU and ACCELERATE_TORCH_DEVICE come before the default device, which is ours."""
    original = module.PartialState.default_device.fget

    def default_device(self: Any) -> torch.device:
        return original(self) if Shown.device is LAZY else Shown.device

    module.PartialState.default_device = property(default_device, doc="The device of this program: remote, if it is named.")
