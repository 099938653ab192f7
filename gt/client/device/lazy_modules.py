"""torch's lazy modules: their weights are made on the CPU at the first call, and then moved to the requested device.

An uninitialised parameter cannot be a remote tensor, and torch cannot exchange it for one, as `.to` otherwise does here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin as Lazy
from torch.nn.parameter import is_lazy

from gt.client.device.remote_tensor import RemoteTensor

_PENDING = "_gt_sent"  # functions to apply to a module's weights once these exist
_first_call = Lazy._infer_parameters


def prepare() -> None:
    """Patch torch's lazy modules; once, on import."""
    Lazy._apply, Lazy._infer_parameters = _apply, _infer  # type: ignore[attr-defined,method-assign]


def _apply(self: Any, fn: Callable, recurse: bool = True) -> Any:
    """Module._apply for tensors that are not lazy. Lazy ones change dtype and local device only, or wait for the first call."""
    waiting = [(kept, name, t) for kept in (self._parameters, self._buffers) for name, t in kept.items() if is_lazy(t)]
    # torch's own _apply would exchange lazy parameters: it does not see them meanwhile
    for kept, name, _ in waiting:
        kept[name] = None
    try:
        super(Lazy, self)._apply(fn, recurse)
    finally:
        for kept, name, t in waiting:
            kept[name] = t
    for _, _, t in waiting:
        with torch.no_grad():
            applied = fn(t.data)
        if isinstance(applied, RemoteTensor):
            self.__dict__.setdefault(_PENDING, []).append(fn)
            break
        t.data = applied
    return self


def _infer(self: Any, module: Any, args: Any, kwargs: Any = None) -> None:
    """The hook before the first call."""
    _first_call(self, module, args, kwargs)
    for fn in module.__dict__.pop(_PENDING, ()):
        module._apply(fn)
