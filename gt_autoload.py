"""The device `remote` in a program that imports torch alone: torch calls `register` at the end of its own import.

That registers the name and nothing else; the first use of the device imports gt. With a GPU the name waits for gt, because it
breaks the backward of local CUDA tensors. TORCH_DEVICE_BACKEND_AUTOLOAD=0 has torch call nothing.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import types
from collections.abc import Callable
from typing import Any

NAME = "remote"
GPUS = ("/dev/nvidiactl", "/dev/kfd")  # of CUDA and ROCm: torch would take milliseconds to look
ASKED = ("GT_SERVER", "GT_CONFIG")  # whoever sets one of these wants remote as the accelerator
_watched: list[tuple[Any, str, Any, Any]] = []  # holder, name of a function in it, what watches it, the function
_libraries: list[Any] = []  # kernels live as long as these
_kernel: Callable[..., Any] | None = None  # GT's


def register() -> None:
    """torch's entry point. No error of ours ends an import of torch."""
    try:
        _register()
    except Exception as error:
        logging.getLogger("gt").warning("torch has no device remote before `import gt`: %s: %s", type(error).__name__, error)


def _register() -> None:
    import torch

    if "gt" in sys.modules or torch._C._get_privateuse1_backend_name() != "privateuseone" or _gpu(torch):
        return
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module(f"torch.{NAME}", "The remote device, before its first use."))
    factories = torch.library.Library("aten", "IMPL")  # all others of a device call these; a fallback would cost 8 ms
    for op in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default):
        factories.impl(op.name(), functools.partial(_op, op), "PrivateUse1")
    _libraries.append(factories)
    for holder, name in ((torch.nn.Module, "to"), (torch, "load")):  # they look at the device before any op
        _watch(holder, name)


def _gpu(torch: Any) -> bool:
    return torch.backends.cuda.is_built() and any(map(os.path.exists, GPUS))


def load() -> None:
    """Import gt, which takes the device over."""
    _unwatch()  # before gt extends the same functions
    import gt  # noqa: F401


def hand_over(kernel: Callable[..., Any], module: types.ModuleType) -> None:
    """gt takes the device over, if it was registered here, with a kernel for the ops and torch.remote."""
    global _kernel
    import torch

    if not _libraries or _kernel is not None:
        return
    _kernel = kernel
    _unwatch()
    vars(getattr(torch, NAME)).update(vars(module))  # for whoever holds it, such as the cache of torch.get_device_module
    delattr(torch, NAME)
    del sys.modules[f"torch.{NAME}"]


def _op(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A factory: the first of a program imports gt."""
    if _kernel is None:
        load()
        assert _kernel is not None
    return _kernel(func, *args, **kwargs)


def _watch(holder: Any, name: str) -> None:
    """Import gt before a call of holder.name with the device among its arguments."""
    original = getattr(holder, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _kernel is None and any(map(_is_remote, (*args, *kwargs.values()))):
            load()
            return getattr(holder, name)(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(holder, name, call)
    _watched.append((holder, name, call, original))


def _unwatch() -> None:
    """Put the functions back, but for one that has been extended meanwhile."""
    for holder, name, call, original in _watched:
        if getattr(holder, name) is call:
            setattr(holder, name, original)
    _watched.clear()


def _is_remote(argument: Any) -> bool:
    text = argument if isinstance(argument, str) else getattr(argument, "type", "")
    return isinstance(text, str) and text.partition(":")[0] == NAME


class _Module(types.ModuleType):
    """torch.remote before the first use. It answers what torch itself asks any device; all else imports gt."""

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def is_initialized() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """The device begins with the seed of torch's own generator."""

    @staticmethod
    def is_available() -> bool:
        """True if the program is meant for GT: torch.accelerator's users take the device then, as after `import gt`."""
        return any(map(os.environ.get, ASKED))

    def device_count(self) -> int:
        return int(self.is_available())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module 'torch.{NAME}' has no attribute {name!r}")
        load()
        import torch

        return getattr(getattr(torch, NAME), name)
