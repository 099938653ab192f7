"""State of modules in a session whose config says `data_parallel` or `zero`: buffers and frozen parameters are declared.

No gradient shows that they are state, and they are not to be split as data of a batch is.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from gt.client import current_session
from gt.client.current_session import Current
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace.dispatch import declare_buffer, declare_frozen


class _Seen:
    """Modules that one session has called, and the hook, if any session has needed it."""

    modules: ClassVar[weakref.WeakSet[torch.nn.Module]] = weakref.WeakSet()
    handle: Any = None


def begin() -> None:
    """A session has begun: have modules declared in it if its config wants that."""
    _Seen.modules = weakref.WeakSet()
    if _Seen.handle is not None and not Current.declares_modules:
        _Seen.handle.remove()
        _Seen.handle = None
    elif _Seen.handle is None and Current.declares_modules:
        _Seen.handle = register_module_forward_pre_hook(_declare)


def _declare(module: torch.nn.Module, args: Any) -> None:
    """At a module's first call, declare its own buffers and frozen parameters."""
    if not Current.declares_modules or Current.recorder is None or module in _Seen.modules:
        return
    _Seen.modules.add(module)
    for buffer in module._buffers.values():
        if isinstance(buffer, RemoteTensor):
            declare_buffer(buffer)
    for parameter in module._parameters.values():
        if isinstance(parameter, RemoteTensor) and not parameter.requires_grad:
            declare_frozen(parameter)


current_session.on_connect.append(begin)
