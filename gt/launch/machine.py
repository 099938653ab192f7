"""What this machine has, found without touching CUDA: a process that has initialised it cannot fork workers."""

from __future__ import annotations

from pathlib import Path

from gt import env

_SIGNS = ((Path("/proc/driver/nvidia/gpus"), "*"), (Path("/dev"), "nvidia[0-9]*"))  # a container may lack either


def gpus() -> list[str]:
    """Values for CUDA_VISIBLE_DEVICES, one for each GPU that this process may use."""
    there = max(len(list(folder.glob(pattern))) for folder, pattern in _SIGNS)
    visible = env.visible_gpus()
    return [str(i) for i in range(there)] if visible is None else visible[:there]
