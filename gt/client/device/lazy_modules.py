"""torch's lazy modules, whose weights come to be at the first call: on the CPU, as ever, and then they go where they were sent.

An uninitialised parameter cannot be a remote tensor, and torch cannot exchange one for another (which `.to` does here).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin as Lazy
from torch.nn.parameter import is_lazy

from gt.client.device.remote_tensor import RemoteTensor

_SENT = "_gt_sent"  # what is to be done to a module's weights once there are any
_first_call = Lazy._infer_parameters


def prepare() -> None:
    """Once, on import."""
    Lazy._apply, Lazy._infer_parameters = _apply, _infer  # type: ignore[attr-defined,method-assign]


def _apply(self: Any, fn: Callable, recurse: bool = True) -> Any:
    """Module._apply, for what of the module is not lazy; the rest changes its dtype and local device only."""
    waiting = [(kept, name, t) for kept in (self._parameters, self._buffers) for name, t in kept.items() if is_lazy(t)]
    for kept, name, _ in waiting:
        kept[name] = None
    try:
        super(Lazy, self)._apply(fn, recurse)
    finally:
        for kept, name, t in waiting:
            kept[name] = t
    for _, _, t in waiting:
        with torch.no_grad():
            made = fn(t.data)
        if isinstance(made, RemoteTensor):
            self.__dict__.setdefault(_SENT, []).append(fn)
            break
        t.data = made
    return self


def _infer(self: Any, module: Any, args: Any, kwargs: Any = None) -> None:
    """The hook before the first call."""
    _first_call(self, module, args, kwargs)
    for fn in module.__dict__.pop(_SENT, ()):
        module._apply(fn)
