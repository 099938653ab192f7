"""The `remote` device: its name, its kernels, and its entries in torch's lists of device features.

Registering the name breaks autograd of local CUDA tensors in the process. With CUDA it therefore waits for the first connect,
and `name=False` leaves it out: the device is then `torch.device("lazy")`, and everything else is the same.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import backend_registration

from gt.client.capture.watches import node_hooks
from gt.client.current_session import Current
from gt.client.device import default_dtype, generator, lazy_modules, module_moves, torch_remote
from gt.client.device.autocast import register as register_autocast
from gt.client.device.remote_tensor import LAZY, RemoteTensor, Shown
from gt.client.device.serialization import extend_save_and_load
from gt.client.frameworks import accelerate, after_import, distributed_checkpoint, lightning, profiler
from gt.client.groups import module_calls, module_state
from gt.client.reports import telemetry
from gt.client.trace import long_lists, overrides, refusals, sparse_ops
from gt.client.trace.composites import batch_norm, linear, recurrent, rms_norm
from gt.client.trace.composites.attention import attention
from gt.client.trace.dispatch import dispatch, fallback
from gt.client.trace.host_ops import ctc_loss, one_hot, tensor_split

NAME = "remote"
_libraries: list[torch.library.Library] = []  # kernels live as long as these


def _patch_capture_query() -> None:
    """Answer torch.cuda.is_current_stream_capturing in a recording, as libraries ask before they read a value.

    A library that has read a value that is no constant of the recording hears True from the next recording on.
    """
    original = torch.cuda.is_current_stream_capturing

    @functools.wraps(original)
    def capturing() -> bool:
        tape = None if Current.recorder is None else Current.recorder.own_tape()
        # Torch asks for a real capture of the GPU: a recording is none to it
        if tape is None or sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            return original()
        return tape.forbids_reads()

    torch.cuda.is_current_stream_capturing = capturing


def _kernels(key: str) -> None:
    """Route every op that reaches a backend key to the recorder."""
    anything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    anything.fallback(fallback, key, with_keyset=False)
    copy = torch.ops.aten.copy_.default
    aten.impl("copy_", lambda to, source, non_blocking=False: dispatch(copy, (), (to, source)), key)
    # Autograd would decompose WHOLE. Under a dispatch mode torch asks for BELOW_TENSOR's own kernels, not for a fallback.
    for overload in (*overrides.WHOLE, *overrides.BELOW_TENSOR):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key):  # gt_autoload's, which call ours
            aten.impl(overload.name(), functools.partial(fallback, overload), key)
    for name, kernel in overrides.FACTORIES.items():
        aten.impl(name, kernel, key)
    _libraries.extend((anything, aten))


def _unpin() -> None:
    """Make pinned memory plain memory, on a machine with CUDA too: torch asks the registered device for it, which has none."""
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")
    aten.impl("is_pinned", lambda tensor, device=None: False, "CPU")
    _libraries.append(aten)


def _extend_feature_lists() -> None:
    """Add the device to torch's lists of devices and tensor types with foreach, fused and capturable optimizers."""
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
            original = getattr(holder, getter, None)
            if original is not None:
                setattr(holder, getter, wrapped.setdefault(id(original), _with_remote(original)))
    # Clipping asks with the device that C++ knows
    clipping: Any = torch.nn.utils.clip_grad
    clipping._device_has_foreach_support = _or_lazy(clipping._device_has_foreach_support)
    clipping._has_foreach_support = _of_remote(clipping._has_foreach_support)
    for optimizer in ("asgd", "nadam", "radam"):
        module: Any = importlib.import_module(f"torch.optim.{optimizer}")
        module._default_to_fused_or_foreach = _loop_by_default(module._default_to_fused_or_foreach)


def _or_lazy(original: Callable[[torch.device], bool]) -> Callable[[torch.device], bool]:
    """Return a test of devices that remote tensors pass too."""
    return lambda device: device.type == LAZY.type or original(device)


def _of_remote(original: Callable[[list, torch.device], bool]) -> Callable[[list, torch.device], bool]:
    """Return a test of lists of tensors that lists of remote tensors pass too."""
    return lambda tensors, device: all(type(t) is RemoteTensor for t in tensors) or original(tensors, device)


def _loop_by_default(original: Callable[..., tuple[bool, bool]]) -> Callable[..., tuple[bool, bool]]:
    """The default of an optimizer whose form over lists has other last bits: CUDA's on GPU workers, else the CPU's, a loop."""

    def default(params: list, *args: Any, **kwargs: Any) -> tuple[bool, bool]:
        remote = any(isinstance(p, RemoteTensor) for p in params)
        loops = remote and not (Current.recorder is not None and Current.recorder.gpus)
        return (False, False) if loops else original(params, *args, **kwargs)

    return default


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


def _with_remote(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def supported(*args: Any, **kwargs: Any) -> list[str]:
        types = original(*args, **kwargs)
        return types if Shown.device.type in types else [*types, Shown.device.type]

    return supported


def prepare() -> None:
    """Register everything but the name, which is harmless to local CUDA tensors. Runs once, on import."""
    if _libraries:
        return
    overrides.register()
    long_lists.register()
    default_dtype.prepare()
    _kernels("Lazy")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("scaled_dot_product_attention", attention, "AutogradLazy")
    aten.impl("batch_norm", batch_norm.batch_norm, "AutogradLazy")
    for name, layers in recurrent.KERNELS.items():
        aten.impl(name, layers, "AutogradLazy")
    aten.impl("tensor_split.tensor_indices_or_sections", tensor_split, "AutogradLazy")
    aten.impl("ctc_loss.Tensor", ctc_loss, "AutogradLazy")
    aten.impl("one_hot", one_hot, "AutogradLazy")
    _libraries.append(aten)
    linear.prepare()
    rms_norm.prepare()
    _extend_feature_lists()
    _patch_capture_query()
    node_hooks.register()
    extend_save_and_load()
    generator.prepare()
    lazy_modules.prepare()
    module_moves.prepare()
    module_state.prepare()
    module_calls.prepare()
    refusals.prepare()
    telemetry.register()
    after_import.watch(
        {
            **lightning.calls(register),
            "accelerate.state": accelerate.prefer_remote,
            "transformers.training_args": accelerate.trainer_on_remote,
            "torch.distributed.checkpoint._state_dict_stager": distributed_checkpoint.stage_remote,
            "torch.distributed.checkpoint.filesystem": distributed_checkpoint.check_before_load,
            "torch.distributed.checkpoint.state_dict": distributed_checkpoint.keep_loss_scale,
            "torch.distributed.checkpoint.hf_storage": distributed_checkpoint.check_safetensors_before_load,
            "torch.distributed.fsdp": refusals.sharded_parallel,
            "torch.nested._internal.nested_tensor": refusals.nested_tensors,
            "torch.profiler.profiler": profiler.extend,
        }
    )
    if not _cuda():
        register()


def register() -> None:
    """Register the name `remote`. Backward of local CUDA tensors no longer works in this process afterwards."""
    if Shown.device is not LAZY:
        return
    remote = torch_remote.make()
    if (autoload := sys.modules.get("gt_autoload")) is not None:  # torch has called it, where the package is installed
        autoload.hand_over(fallback, remote)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, remote)
    torch_remote.serve_accelerator()
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)  # x.remote(), model.remote(), x.is_remote
    torch._C._acc.register_python_privateuseone_device_guard(backend_registration._DummyDeviceGuard())
    _kernels("PrivateUse1")
    _libraries.append(sparse_ops.factories("SparsePrivateUse1"))
    strided_nested = torch.library.Library("aten", "IMPL")
    strided_nested.impl("_to_copy", refusals.nested, "NestedTensorPrivateUse1")
    _libraries.append(strided_nested)
    _unpin()
    libraries = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    register_autocast(*libraries)
    _libraries.extend(libraries)
    Shown.device, Shown.types = torch.device(NAME, 0), frozenset({"lazy", NAME})


def _cuda() -> bool:
    return torch.backends.cuda.is_built() and torch.cuda.is_available()
