"""State of modules in a session whose config says `data_parallel` or `zero`: buffers and frozen parameters are declared.

No gradient shows that they are state, and they are not to be split as data of a batch is.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from gt.client.current_session import Current
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace.dispatch import declare_buffer, declare_frozen

if TYPE_CHECKING:
    from gt.client.trace.recorder import Recorder


class ModuleState:
    """The hook on the forward of every module, for one session."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._declared: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._hook = register_module_forward_pre_hook(self._declare)

    def close(self) -> None:
        self._hook.remove()

    def _declare(self, module: torch.nn.Module, args: Any) -> None:
        """At a module's first call, declare its own buffers and frozen parameters."""
        if Current.recorder is not self._recorder or module in self._declared:
            return
        self._declared.add(module)
        for buffer in module._buffers.values():
            if isinstance(buffer, RemoteTensor):
                declare_buffer(buffer)
        for parameter in module._parameters.values():
            if isinstance(parameter, RemoteTensor) and not parameter.requires_grad:
                declare_frozen(parameter)
