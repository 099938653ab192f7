"""torch.load(..., map_location="remote"): loads to the CPU, then moves tensors. Shared memory in the file stays shared.

torch itself would make storages on the device, and a remote tensor has none.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from gt.client.device.remote_tensor import RemoteTensor, Shown


def extend_load() -> None:
    """Patch torch.load; once."""
    original = torch.load

    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(map_location, (str, torch.device)) or str(map_location).partition(":")[0] not in Shown.types:
            return original(f, map_location, *args, **kwargs)
        return _RemoteCopy(original(f, "cpu", *args, **kwargs)).result

    torch.load = load


class _RemoteCopy:
    """A loaded object whose CPU tensors are replaced by remote ones. Containers stay the same objects."""

    def __init__(self, loaded: Any) -> None:
        self._seen: dict[int, Any] = {}
        self._shared = Counter(t.untyped_storage().data_ptr() for t in {id(t): t for t in _tensors(loaded, set())}.values())
        self._bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.result = self._move(loaded)

    def _move(self, thing: Any) -> Any:
        if id(thing) in self._seen:
            return self._seen[id(thing)][1]
        result = thing
        if isinstance(thing, torch.Tensor):
            result = self._tensor(thing)
        elif isinstance(thing, tuple):
            parts = [self._move(part) for part in thing]
            make = getattr(thing, "_make", type(thing))
            result = thing if all(a is b for a, b in zip(parts, thing, strict=True)) else make(parts)
        self._seen[id(thing)] = thing, result  # the thing too, so that identities stay unique
        for holder, key, value in _parts(thing):
            moved = self._move(value)
            if moved is not value:
                holder[key] = moved
        return result

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, RemoteTensor) or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if self._shared[storage.data_ptr()] < 2:
            moved = tensor.detach().to(Shown.device)
        else:
            key = storage.data_ptr(), tensor.dtype
            if key not in self._bases:
                self._bases[key] = torch.empty(0, dtype=tensor.dtype).set_(storage).to(Shown.device)
            moved = self._bases[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
        return moved.requires_grad_(tensor.requires_grad)


def _parts(thing: Any) -> list[tuple[Any, Any, Any]]:
    """Holder, key and value of all replaceable parts of a container or an object."""
    parts: list[tuple[Any, Any, Any]] = []
    if isinstance(thing, dict):
        parts = [(thing, key, value) for key, value in thing.items()]
    elif isinstance(thing, list):
        parts = [(thing, n, value) for n, value in enumerate(thing)]
    own = None if isinstance(thing, (type, torch.Tensor)) else getattr(thing, "__dict__", None)
    return parts + ([(own, key, value) for key, value in own.items()] if isinstance(own, dict) else [])


def _tensors(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor) and thing.layout is torch.strided and thing.device.type == "cpu":
        yield thing
    for part in thing if isinstance(thing, tuple) else [value for _, _, value in _parts(thing)]:
        yield from _tensors(part, seen)
