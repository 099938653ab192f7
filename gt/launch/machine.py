"""GPUs and torch of this machine, found without CUDA: a process that has initialised CUDA cannot fork workers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from gt import env

_SIGNS = ((Path("/proc/driver/nvidia/gpus"), "*"), (Path("/dev"), "nvidia[0-9]*"))  # a container may lack either

TESTED_TORCH = (2, 11), (2, 13)  # the oldest and the newest; pyproject.toml has the oldest too


def version_of(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"; (0, 0) of a text that begins otherwise."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def untested(torch: str) -> str:
    """A warning about a version of torch that GT is not tested with, "" for tested ones."""
    oldest, newest = TESTED_TORCH
    if oldest <= version_of(torch) <= newest:
        return ""
    tested = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    return f"torch is {torch}, and GT was tested with {tested}: other versions may fail or compute other values"


def unsupported(platform: str = sys.platform) -> str:
    """The reason why this system cannot run programs of GT, "" for Linux."""
    if platform == "linux":
        return ""
    name = {"darwin": "macOS", "win32": "Windows"}.get(platform, platform)
    todo = "run it in a Linux container or virtual machine here, or by ssh on the server's host"
    return f"this is {name}, and GT needs Linux (eventfd, memfd): {todo}"


def gpus() -> list[str]:
    """Values for CUDA_VISIBLE_DEVICES, one for each GPU that this process may use."""
    devices = max(len(list(folder.glob(pattern))) for folder, pattern in _SIGNS)
    visible = env.visible_gpus()
    return [str(i) for i in range(devices)] if visible is None else visible[:devices]
