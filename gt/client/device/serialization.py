"""torch.save and torch.load: a file says which tensors were remote, and loading makes them remote again.

A remote tensor has no storage. The file has its values as a CPU storage with the location `remote:0`. torch.load reads
that storage on the CPU. Its tensors move once the whole object is read. Shared memory in the file stays shared. Tensors share
it there if the first of them has all of it, as tied weights have; a part that is saved before has a storage of its own.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from gt.client.device.remote_tensor import RemoteTensor, Shown, saved

LOCATION = "remote:0"  # in a file, whatever the device's name in this process
_PLACES = frozenset({"remote", "lazy"})
_PRIORITY = 9  # before torch's functions for CPU storages


class _Loading(threading.local):
    """Storages of remote tensors that the innermost torch.load has read, by identity; None outside of one."""

    storages: dict[int, torch.UntypedStorage] | None = None


_loading = _Loading()


def extend_save_and_load() -> None:
    """Patch torch.save and torch.load; once."""
    save, load = torch.save, torch.load
    torch.serialization.register_package(_PRIORITY, _location, _restore)

    @functools.wraps(save)
    def save_remote(*args: Any, **kwargs: Any) -> None:
        before, saved.hosts, saved.memories = (saved.hosts, saved.memories), {}, {}
        try:
            save(*args, **kwargs)
        finally:
            saved.hosts, saved.memories = before

    @functools.wraps(load)
    def load_remote(*args: Any, **kwargs: Any) -> Any:
        before, _loading.storages = _loading.storages, {}
        try:
            result, storages = load(*args, **kwargs), _loading.storages
        finally:
            _loading.storages = before
        return _RemoteCopy(result, storages).result if storages else result

    torch.save, torch.load = save_remote, load_remote


def _location(storage: Any) -> str | None:
    """The location that torch.save writes for a storage: ours for the values of a remote tensor."""
    return LOCATION if saved.hosts and storage._cdata in saved.hosts else None


def _restore(storage: Any, location: str) -> Any:
    """The storage that torch.load uses for a location, the file's or that of map_location; None for other devices."""
    place, _, index = location.partition(":")
    if place not in _PLACES:
        return None
    if index not in ("", "0"):
        raise RuntimeError(f"there is no {location}: all workers are one device; try map_location={Shown.device.type!r}")
    if _loading.storages is not None:
        untyped = storage._untyped_storage if isinstance(storage, torch.storage.TypedStorage) else storage
        _loading.storages[untyped._cdata] = untyped
    return storage


class _RemoteCopy:
    """A loaded object whose tensors in these storages are replaced by remote ones. Containers stay the same objects."""

    def __init__(self, loaded: Any, storages: dict[int, torch.UntypedStorage]) -> None:
        self._storages = storages
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
            # A named tuple takes its fields one by one; its _make takes a list
            make = getattr(thing, "_make", type(thing))
            result = thing if all(a is b for a, b in zip(parts, thing, strict=True)) else make(parts)
        self._seen[id(thing)] = thing, result  # the thing too, so that identities stay unique
        # Keys that are tensors are replaced too, and the order of the items is kept
        if isinstance(thing, dict) and any(isinstance(key, torch.Tensor) for key in thing):  # an optimizer's state
            items = [(self._move(key), value) for key, value in thing.items()]
            thing.clear()
            thing.update(items)
        for holder, key, value in _parts(thing):
            moved = self._move(value)
            if moved is not value:
                holder[key] = moved
        return result

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, RemoteTensor) or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            return tensor
        # A storage of one tensor is uploaded as that tensor; of several, once as a whole, and they become views of it
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
