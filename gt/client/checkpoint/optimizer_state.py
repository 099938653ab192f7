"""Loaded optimizer state gets the layout of its parameter, at the optimizer's first step.

A loaded tensor has no layout until an op uses it. The first op of a step on a moment names no parameter (exp_avg_sq.mul_), so
the moment would be placed whole. Before that step, when parameters are placed, it is copied into a tensor like its parameter.
State of another shape is made whole, as the optimizer makes it. So sums over it have the order that they had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gt.client.device.remote_tensor import RemoteTensor

_AS_GRADIENT = frozenset({"variance"})  # Adafactor's of a bias, whose norm a step takes


class _Loaded:
    """Tensors of checkpoints whose layout is open, by id, and the count of loads that each optimizer has taken account of."""

    tensors: WeakValueDictionary[int, torch.Tensor]
    loads = 0
    taken: WeakKeyDictionary[torch.optim.Optimizer, int]
    hook: Any = None


_Loaded.tensors, _Loaded.taken = WeakValueDictionary(), WeakKeyDictionary()


def note(tensors: Sequence[RemoteTensor]) -> None:
    """These tensors were loaded; some may be an optimizer's state."""
    _Loaded.loads += 1
    _Loaded.tensors.update({tensor._ref.id: tensor for tensor in tensors})
    if _Loaded.hook is None:
        _Loaded.hook = register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _Loaded.tensors or _Loaded.taken.get(optimizer) == _Loaded.loads:
        return
    _Loaded.taken[optimizer] = _Loaded.loads
    with torch.no_grad():
        for parameter, state in optimizer.state.items():
            if not isinstance(parameter, RemoteTensor):
                continue
            for name, value in state.items():
                if isinstance(value, RemoteTensor) and _Loaded.tensors.pop(value._ref.id, None) is not None:
                    # The copy has each worker read its part of the file alone
                    state[name] = torch.empty_like(_model(name, value, parameter), dtype=value.dtype).copy_(value)


def _model(name: str, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor that has the layout in which the optimizer's first step makes this state."""
    if value.shape != parameter.shape:  # else it would be split as data are
        return parameter.new_empty(value.shape)
    return parameter.grad if name in _AS_GRADIENT and parameter.grad is not None else parameter
