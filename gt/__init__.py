"""GT: one ordinary PyTorch program on many GPUs, through a device called `remote`.

Importing it makes the device known to torch; it starts no process, thread or socket. Public names are the list below.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from typing import Any

__version__ = "0.1.0"

# public name -> (module, attribute; None for the module itself)
_PUBLIC: dict[str, tuple[str, str | None]] = {
    **{
        name: ("gt.api", name)
        for name in (
            "arange", "cat", "connect", "cpu_workers", "device", "empty", "empty_like", "eye", "from_numpy", "full",
            "full_like", "gpu_workers", "inspect", "manual_seed", "ones", "ones_like", "plan", "rand", "rand_like", "randint",
            "randint_like", "randn", "randn_like", "shutdown", "stack", "stats", "tensor", "trace", "zeros", "zeros_like",
        )
    },
    "compile": ("gt.client.program", "compile"),
    "microbatches": ("gt.client.signal", "microbatches"),
    "nn": ("torch.nn", None),
    "no_grad": ("torch", "no_grad"),
    "optim": ("torch.optim", None),
    "signal": ("gt.client.signal", None),
    **{name: ("gt.errors", name) for name in (
        "CaptureError", "ConfigError", "DispatcherLost", "GTError", "OpFailed", "Refused", "SessionExpired", "UnsupportedOp",
        "WorkerLost", "WorkerStuck",
    )},
}  # fmt: skip
__all__ = [*_PUBLIC, "__version__"]
_PROCESSES = ("gt.server", "gt.worker", "gt.launch")  # run with -m: ours, which need no device and load torch themselves


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gt' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    found = importlib.import_module(module)
    return found if attribute is None else getattr(found, attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


def _start() -> None:
    """The first remote tensor of a program that has not connected."""
    importlib.import_module("gt.api").start()


def _in_users_program() -> bool:
    given = sys.orig_argv
    return not any(a == "-m" and b.startswith(_PROCESSES) for a, b in itertools.pairwise(given))


if _in_users_program():
    from gt.client import device as _device
    from gt.client import runtime as _runtime

    _runtime.auto_start = _start
    _device.prepare()
