"""The `remote` device: its name, its kernels, and torch's lists of what devices can do.

Registering the name breaks local CUDA autograd in the process, so where there is CUDA it waits for the first connect, and
`name=False` leaves it out: then the device is `torch.device("lazy")`, and the rest is the same.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import backend_registration

from gt.client.current_session import Current
from gt.client.device import lazy_modules, torch_remote
from gt.client.device.autocast import register as register_autocast
from gt.client.device.remote_tensor import LAZY, RemoteTensor, Shown
from gt.client.device.serialization import extend_load
from gt.client.trace import long_lists, overrides, refusals
from gt.client.trace.attention import attention
from gt.client.trace.dispatch import dispatch, fallback
from gt.client.trace.host_ops import tensor_split

NAME = "remote"
_libraries: list[torch.library.Library] = []  # kernels live as long as these


def _capturing() -> None:
    """Libraries ask this of CUDA before they read a value to choose a way. Where the value is no constant of the recording they
    are told, from the next recording on, to choose the one that reads none.
    """
    given = torch.cuda.is_current_stream_capturing

    @functools.wraps(given)
    def capturing() -> bool:
        tape = None if Current.recorder is None else Current.recorder.tape
        if tape is None or sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            return given()
        return tape.forbids_reads()

    torch.cuda.is_current_stream_capturing = capturing


def _kernels(key: str) -> None:
    """Everything that reaches a backend key goes to the recorder."""
    anything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    anything.fallback(fallback, key, with_keyset=False)
    copy = torch.ops.aten.copy_.default
    aten.impl("copy_", lambda to, source, non_blocking=False: dispatch(RemoteTensor, copy, (), (to, source)), key)
    for whole in overrides.WHOLE:  # or autograd decomposes them
        aten.impl(whole.name(), functools.partial(fallback, whole), key)
    _libraries.extend((anything, aten))


def _pinning() -> None:
    """Once a device is registered torch pins memory for it: here pinned is plain memory."""
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")
    aten.impl("is_pinned", lambda tensor, device=None: False, "CPU")
    _libraries.append(aten)


def _lists() -> None:
    """torch asks lists whether a device or tensor type has foreach, fused and capturable optimizers."""
    for name in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
        importlib.import_module(name)._foreach_supported_types.append(RemoteTensor)
    getters = (
        "_get_foreach_kernels_supported_devices",
        "_get_fused_kernels_supported_devices",
        "_get_capturable_supported_devices",
    )
    import torch.nn.utils.clip_grad
    import torch.optim.swa_utils

    holders = [importlib.import_module(f"torch.optim.{m}") for m in _OPTIMIZERS]
    holders += [torch.utils._foreach_utils, torch.nn.utils.clip_grad, torch.optim.swa_utils]
    for getter in getters:
        wrapped: dict[int, Callable] = {}
        for holder in holders:
            given = getattr(holder, getter, None)
            if given is not None:
                setattr(holder, getter, wrapped.setdefault(id(given), _extended(given)))


_OPTIMIZERS = [
    "optimizer",
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "asgd",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
    "sgd",
]


def _extended(given: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def supported(*args: Any, **kwargs: Any) -> list[str]:
        found = given(*args, **kwargs)
        return found if Shown.device.type in found else [*found, Shown.device.type]

    return supported


def prepare() -> None:
    """Everything but the name; harmless to local CUDA. Runs once, on import."""
    if _libraries:
        return
    overrides.register()
    long_lists.register()
    torch.__future__.set_swap_module_params_on_conversion(True)  # or Module.to("remote") unties tied weights
    _kernels("Lazy")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("scaled_dot_product_attention", attention, "AutogradLazy")
    aten.impl("tensor_split.tensor_indices_or_sections", tensor_split, "AutogradLazy")
    _libraries.append(aten)
    _lists()
    _capturing()
    extend_load()
    lazy_modules.prepare()
    refusals.prepare()
    if not _cuda():
        register()


def register() -> None:
    """Make the name `remote` parse. Local CUDA autograd no longer works in this process afterwards."""
    if Shown.device is not LAZY:
        return
    torch.utils.rename_privateuse1_backend(NAME)
    remote = torch_remote.make()
    torch._register_device_module(NAME, remote)
    torch_remote.serve_accelerator(remote)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)  # x.remote(), model.remote(), x.is_remote
    torch._C._acc.register_python_privateuseone_device_guard(backend_registration._DummyDeviceGuard())
    _kernels("PrivateUse1")
    if not _cuda():
        _pinning()
    libraries = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    register_autocast(*libraries)
    _libraries.extend(libraries)
    Shown.device, Shown.types = torch.device(NAME, 0), frozenset({"lazy", NAME})


def _cuda() -> bool:
    return torch.backends.cuda.is_built() and torch.cuda.is_available()
