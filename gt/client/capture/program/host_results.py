"""Results of a captured call that are CPU tensors or NumPy arrays: each replay returns new ones, as an eager call does.

One that shares memory with Python state or an argument is returned as it is. So is one of which the memory cannot be told.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from gt.client.capture.state_walk import StateSnapshot
from gt.client.device.remote_tensor import RemoteTensor


class CopiedResult:
    """A result that the recorded call has made on the CPU. of: a copy of it that nobody else has."""

    def __init__(self, made: Any) -> None:
        self._value = _copy(made)

    def new(self) -> Any:
        """A copy for the caller of one replay."""
        return _copy(self._value)


class HostMemory:
    """The memory of the CPU tensors and arrays that a call found or left, or got as arguments."""

    def __init__(self, states: Iterable[StateSnapshot], arguments: list) -> None:
        things = [thing for state in states for thing, _ in state.fingerprints.values()]
        things += [item.value for state in states for item in state.items]
        self._results: dict[int, CopiedResult] = {}  # by identity
        self._ranges = [place for thing in (*things, *arguments) if (place := _range(thing)) is not None]

    def result(self, result: Any) -> CopiedResult | None:
        """The same one for a CPU tensor or array that shares none of this memory; else None."""
        place = _range(result)
        if place is None or any(place[0] < end and start < place[1] for start, end in self._ranges):
            return None
        return self._results.setdefault(id(result), CopiedResult(result))


def _range(thing: Any) -> tuple[int, int] | None:
    """Addresses of a CPU tensor's or an array's memory; None for other things."""
    if isinstance(thing, np.ndarray):
        return np.lib.array_utils.byte_bounds(thing) if hasattr(np.lib, "array_utils") else np.byte_bounds(thing)
    if not isinstance(thing, torch.Tensor) or isinstance(thing, RemoteTensor) or not thing.is_cpu:
        return None
    if thing.layout is not torch.strided or thing.requires_grad or type(thing) is not torch.Tensor:
        return None
    storage = thing.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _copy(thing: Any) -> Any:
    if isinstance(thing, np.ndarray):
        return thing.copy(order="K")
    with torch.inference_mode(thing.is_inference()), torch.no_grad():
        return thing.clone()
