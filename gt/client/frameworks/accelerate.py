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


def trainer_on_remote(module: Any) -> None:
    """transformers.training_args: the Trainer takes Accelerate's device, where it would take a local GPU or the CPU."""
    arguments = module.TrainingArguments
    kind, setup = type(vars(arguments)["_setup_devices"]), vars(arguments)["_setup_devices"].func  # a cached property
    has_bf16 = module.is_torch_bf16_gpu_available

    def _setup_devices(self: Any) -> torch.device:
        device, found = setup(self), getattr(self.distributed_state, "device", None)
        if found is None or found.type != Shown.device.type or Shown.device is LAZY:
            return device
        self._n_gpu = 1  # local GPUs are of no account: more than one would be used by DataParallel
        return found

    # All that may raise in another version of transformers comes before the first change to it.
    cached = kind(_setup_devices)
    cached.__set_name__(arguments, "_setup_devices")
    arguments._setup_devices = cached
    module.is_torch_bf16_gpu_available = lambda: Shown.device is not LAZY or has_bf16()
