"""GT: one ordinary PyTorch program on many GPUs, through a device called `remote`.

The import registers the device with torch; it starts no process, thread or socket. The public names are listed below.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gt.wire.signals import uninterrupted

if TYPE_CHECKING:  # the public names once more, since checkers and editors do not run __getattr__
    # isort: off
    # fmt: off
    from torch import (
        bfloat16 as bfloat16, bool as bool, float16 as float16, float32 as float32, float64 as float64, int32 as int32,
        int64 as int64, nn as nn, no_grad as no_grad, optim as optim,
    )
    from gt import debug as debug, ray as ray
    from gt.api import (
        arange as arange, cat as cat, connect as connect, cpu_workers as cpu_workers, device as device, empty as empty,
        empty_like as empty_like, eye as eye, from_numpy as from_numpy, full as full, full_like as full_like,
        gpu_workers as gpu_workers, inspect as inspect, manual_seed as manual_seed, ones as ones, ones_like as ones_like,
        plan as plan, rand as rand, rand_like as rand_like, randint as randint, randint_like as randint_like, randn as randn,
        randn_like as randn_like, shutdown as shutdown, stack as stack, stats as stats, tensor as tensor, trace as trace,
        trace_replay as trace_replay, zeros as zeros, zeros_like as zeros_like,
    )
    from gt.client.groups import signal as signal
    from gt.config.registry import (
        ShardConfig as ShardConfig, SignalConfig as SignalConfig, load_config as load_config,
        register_config as register_config,
    )
    from gt.client.capture.compiled_function import compile as compile
    from gt.client.checkpoint.loading import load as load
    from gt.client.checkpoint.random_state import RandomState as RandomState
    from gt.client.checkpoint.saving import save as save
    from gt.client.groups.signal import microbatches as microbatches
    from gt.client.reports.memory import memory_summary as memory_summary
    from gt.client.reports.memory_snapshot import memory_snapshot as memory_snapshot
    from gt.client.metrics import log as log
    from gt.errors import (
        CheckpointError as CheckpointError, ConfigError as ConfigError,
        DispatcherLost as DispatcherLost, GTError as GTError, OpFailed as OpFailed, Refused as Refused,
        SessionExpired as SessionExpired, UnsupportedOp as UnsupportedOp, WorkerLost as WorkerLost, WorkerStuck as WorkerStuck,
    )
    # fmt: on
    # isort: on

__version__ = "0.1.0"

# public name -> (module, attribute; None for the module itself)
_PUBLIC: dict[str, tuple[str, str | None]] = {
    **{
        name: ("gt.api", name)
        for name in (
            "arange", "cat", "connect", "cpu_workers", "device", "empty", "empty_like", "eye", "from_numpy", "full",
            "full_like", "gpu_workers", "inspect", "manual_seed", "ones", "ones_like", "plan", "rand", "rand_like", "randint",
            "randint_like", "randn", "randn_like", "shutdown", "stack", "stats", "tensor", "trace",
            "trace_replay", "zeros", "zeros_like",
        )
    },
    "RandomState": ("gt.client.checkpoint.random_state", "RandomState"),
    "compile": ("gt.client.capture.compiled_function", "compile"),
    "load": ("gt.client.checkpoint.loading", "load"),
    "save": ("gt.client.checkpoint.saving", "save"),
    "log": ("gt.client.metrics", "log"),
    "memory_snapshot": ("gt.client.reports.memory_snapshot", "memory_snapshot"),
    "memory_summary": ("gt.client.reports.memory", "memory_summary"),
    "microbatches": ("gt.client.groups.signal", "microbatches"),
    "debug": ("gt.debug", None),
    "ray": ("gt.ray", None),
    **{name: ("gt.config.registry", name) for name in ("ShardConfig", "SignalConfig", "load_config", "register_config")},
    **{name: ("torch", name) for name in ("bfloat16", "bool", "float16", "float32", "float64", "int32", "int64")},
    "nn": ("torch.nn", None),
    "no_grad": ("torch", "no_grad"),
    "optim": ("torch.optim", None),
    "signal": ("gt.client.groups.signal", None),
    **{name: ("gt.errors", name) for name in (
        "CheckpointError", "ConfigError", "DispatcherLost", "GTError", "OpFailed", "Refused",
        "SessionExpired", "UnsupportedOp", "WorkerLost", "WorkerStuck",
    )},
}  # fmt: skip
__all__ = [*_PUBLIC, "__version__"]
_PROCESSES = ("gt", "gt.server", "gt.worker", "gt.launch")  # modules run with -m, which import torch themselves if they need it


if not TYPE_CHECKING:  # a checker that saw this function would take a misspelt name for Any

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'gt' has no attribute {name!r}")
        module, attribute = _PUBLIC[name]
        imported = _import(module)
        return imported if attribute is None else getattr(imported, attribute)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def _import(module: str) -> Any:
    """A module of the package. Ctrl-C waits: half of a library that it imports would stay, and no later import mends that."""
    if module in sys.modules:
        return importlib.import_module(module)
    with uninterrupted():
        return importlib.import_module(module)


def _start() -> None:
    """Open a session for the first remote tensor of a program that has none."""
    _import("gt.api").start()


def _own_process() -> bool:
    """True in the command `gt` and in GT's processes run with -m, which are no user's program."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # while python still looks for the module, whose name is before its arguments
        return sys.orig_argv[-len(sys.argv)] in _PROCESSES
    return Path(program).name == "gt"


def make_device() -> None:
    """Register the device with torch, once; warn if GT was not tested with this version of torch."""
    global _made
    if _made:
        return
    _made = True
    import torch

    with uninterrupted():
        from gt.client import current_session
        from gt.client.device import register
        from gt.launch import machine

        current_session.auto_start = _start
        register.prepare()
    if doubt := machine.untested(torch.__version__):
        warnings.warn(doubt, stacklevel=3)


_made = False
if not _own_process():
    make_device()
