"""torch.remote: the device's module, as checkpointing, autocast, manual_seed and users' programs expect one."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from gt.client.current_session import Current
from gt.client.device import random
from gt.client.device.remote_tensor import Shown
from gt.client.device.streams import Event, Stream
from gt.errors import UnsupportedOp
from gt.ir.spec import DTYPES


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
    tape = None if Current.recorder is None else Current.recorder.own_tape()
    return tape is not None and tape.records


def synchronize(device: Any = None) -> None:
    """Wait until all workers and their GPUs have executed all ops; raise the first error. Does nothing in a recording."""
    if Current.recorder is not None and not recording():
        recorder = Current.recorder
        recorder.flush_ops(asks=True)
        recorder.note_wait()
        recorder.session.synchronize()


def _bytes(key: str) -> int:
    if Current.recorder is None:
        return 0
    if not recording():
        Current.recorder.flush()  # with what has ended, which synchronize() leaves for the next batch
    synchronize()
    # After all frees: bytes of tensors that Python has dropped do not count
    return sum(worker[key] for worker in Current.recorder.session.stats()["workers"])


def memory_allocated(device: Any = None) -> int:
    """Bytes of tensors on all workers. Waits."""
    return _bytes("live_bytes")


def max_memory_allocated(device: Any = None) -> int:
    """Peak bytes of tensors on all workers' GPUs; bytes that are in use now on CPU workers. Waits."""
    return _bytes("peak_bytes") or memory_allocated()


def memory_stats(device: Any = None) -> OrderedDict[str, int]:
    """Bytes of tensors on all workers, by torch's names. Waits. Workers' allocators keep more, which is not counted."""
    now, peak = memory_allocated(), max_memory_allocated()
    kinds = ("allocated_bytes", "reserved_bytes")
    return OrderedDict((f"{kind}.all.{when}", n) for kind in kinds for when, n in (("current", now), ("peak", peak)))


def get_memory_info(device: Any = None) -> tuple[int, int]:
    """Free bytes and limit of all workers' memory. Waits. UnsupportedOp for a worker without a limit."""
    limit, used = _bytes("memory_limit"), _bytes("memory_used")
    if not limit:
        raise UnsupportedOp("the workers have no memory limit: start them with GT_MEMORY_LIMIT, or see gt.stats()")
    return max(limit - used, 0), limit


def make() -> types.ModuleType:
    """The module, which torch registers under the device's name."""
    module = types.ModuleType("torch.remote", "The remote device.")
    entries: dict[str, Any] = {
        "_initialized": True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
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
        "set_stream": lambda stream: None,
        "set_rng_state": random.set_rng_state,
        "set_rng_state_all": lambda states: random.set_rng_state(states[0]),
        "stream": lambda stream: Stream() if stream is None else stream,
        "synchronize": synchronize,
    }
    Stream.synchronize_device = staticmethod(synchronize)  # type: ignore[assignment]
    for name, value in entries.items():
        setattr(module, name, value)
    return module


# Functions of torch.accelerator that would ask a backend in C++. Peaks are those since the workers began.
_ACCELERATOR: dict[str, Callable[..., Any]] = {
    "empty_cache": lambda: None,
    "empty_host_cache": lambda: None,
    "get_device_capability": lambda device=None: {"supported_dtypes": {getattr(torch, name) for name in DTYPES}},
    "get_memory_info": get_memory_info,
    "max_memory_allocated": max_memory_allocated,
    "max_memory_reserved": max_memory_allocated,
    "memory_allocated": memory_allocated,
    "memory_reserved": memory_allocated,
    "memory_stats": memory_stats,
    "reset_accumulated_memory_stats": lambda device=None: None,
    "reset_peak_memory_stats": lambda device=None: None,
    "synchronize": synchronize,
}


def serve_accelerator() -> None:
    """Make functions of torch.accelerator, which ask a C++ backend, serve the remote device."""
    for name, ours in _ACCELERATOR.items():
        original = getattr(torch.accelerator, name, None)
        if original is not None:
            setattr(torch.accelerator, name, _either(original, ours))


def _either(original: Any, ours: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = torch.accelerator.current_accelerator()
        return ours(*args, **kwargs) if device is not None and device.type in Shown.types else original(*args, **kwargs)

    return call
