"""State of modules and optimizers that a session's config makes the dispatcher's business; it is declared here.

With `data_parallel` or `zero` buffers and frozen parameters are. No gradient shows that they are state, and they must not be
split as the data of a batch. With `offload` the optimizers' state is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from gt.client.current_session import Current, on_connect
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace.dispatch import declare_buffer, declare_frozen
from gt.ir.instr import STATE

if TYPE_CHECKING:
    from gt.client.trace.recorder import Recorder


class ModuleState:
    """The hook on the forward of every module, for one session whose config wants it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._hooks: list[Any] = []
        self._state: weakref.WeakSet[Any] = weakref.WeakSet()  # references to tensors that were declared
        if Current.declares_modules:
            self._hooks.append(register_module_forward_pre_hook(self._declare))
        if Current.offloads:
            self._hooks.append(register_optimizer_step_post_hook(self._declare_state))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _declare_state(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """After a step, declare the tensors that it has added to the optimizer's state."""
        for row in optimizer.state.values() if Current.recorder is self._recorder else ():
            for value in row.values():
                # Step counts have no dims, and are too small to offload
                if isinstance(value, RemoteTensor) and value.dim() and value._ref not in self._state:
                    self._state.add(value._ref)
                    self._recorder.code.extend((STATE, value._ref.id))

    def _declare(self, module: torch.nn.Module, args: Any) -> None:
        """At a module's call, declare its own buffers and frozen parameters that have not been: they may be new.

        So they are after `.to("remote")` of a module that was called on the CPU, or after a stay there between two calls.
        """
        if Current.recorder is not self._recorder:
            return
        for buffer in module._buffers.values():
            if isinstance(buffer, RemoteTensor):
                declare_buffer(buffer)
        for parameter in module._parameters.values():
            if isinstance(parameter, RemoteTensor) and not parameter.requires_grad:
                declare_frozen(parameter)


def begin(recorder: Recorder) -> Callable[[], None]:
    """Begin with a session; the function that ends it."""
    return ModuleState(recorder).close


def prepare() -> None:
    """Have sessions begin with their module state. Runs once, on import."""
    on_connect.append(begin)
