"""torch.remote: the device's module, as checkpointing, autocast, manual_seed and users' programs expect one."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from gt.client.current_session import Current
from gt.client.device import random
from gt.client.device.remote_tensor import Shown


class _Here:
    """Context of the only device: `with torch.remote.device(0):`."""

    def __init__(self, index: Any = 0) -> None:
        self.index = index

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


def recording() -> bool:
    """True while a call of a compiled function is recorded: as in a CUDA graph's capture, values cannot be read."""
    tape = None if Current.recorder is None else Current.recorder.tape
    return tape is not None and tape.records


def synchronize(device: Any = None) -> None:
    """Wait until all workers and their GPUs have executed all ops; raise the first error. Does nothing in a recording."""
    if Current.recorder is not None and not recording():
        recorder = Current.recorder
        recorder.flush_ops()
        recorder.note_wait()
        recorder.session.synchronize()


def _bytes(key: str) -> int:
    if Current.recorder is None:
        return 0
    synchronize()
    return sum(worker[key] for worker in Current.recorder.session.stats()["workers"])


def memory_allocated(device: Any = None) -> int:
    """Bytes of tensors on all workers. Waits."""
    return _bytes("live_bytes")


def max_memory_allocated(device: Any = None) -> int:
    """Peak bytes of tensors on all workers' GPUs; bytes that are in use now on CPU workers. Waits."""
    return _bytes("peak_bytes") or memory_allocated()


def make() -> types.ModuleType:
    """The module, which torch registers under the device's name."""
    module = types.ModuleType("torch.remote", "The remote device.")
    entries: dict[str, Any] = {
        "_initialized": True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: None,
        "device": _Here,
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_device_name": lambda device=None: "remote",
        "get_rng_state": random.get_rng_state,
        "get_rng_state_all": lambda: [random.get_rng_state()],
        "initial_seed": random.initial_seed,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": recording,
        "is_initialized": lambda: True,
        "manual_seed": random.manual_seed,
        "manual_seed_all": random.manual_seed,
        "max_memory_allocated": max_memory_allocated,
        "memory_allocated": memory_allocated,
        "seed": random.seed_all,
        "set_device": lambda device: None,
        "set_rng_state": random.set_rng_state,
        "set_rng_state_all": lambda states: random.set_rng_state(states[0]),
        "synchronize": synchronize,
    }
    for name, value in entries.items():
        setattr(module, name, value)
    return module


def serve_accelerator(module: types.ModuleType) -> None:
    """Make functions of torch.accelerator, which ask a C++ backend, use this module for the remote device."""
    for name in ("synchronize", "empty_cache", "memory_allocated", "max_memory_allocated"):
        original = getattr(torch.accelerator, name, None)
        if original is not None:
            setattr(torch.accelerator, name, _either(original, getattr(module, name)))


def _either(original: Any, ours: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = torch.accelerator.current_accelerator()
        return ours(*args, **kwargs) if device is not None and device.type in Shown.types else original(*args, **kwargs)

    return call
