"""Memory of tensors: where they lie, how they look there, and slots that what moves is copied into for a replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Held = dict[int, torch.Tensor]
Look = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]  # dtype, shape, strides, offset


class Moved(Exception):
    """What a recording reads lies elsewhere."""

    def __init__(self, ids: set[int]) -> None:
        self.ids = ids


@dataclass(slots=True)
class Slot:
    """Memory that is copied in before a replay and back after it, and tensors that lie in it."""

    memory: torch.Tensor
    looks: dict[int, Look]
    source: torch.Tensor | None = None  # the bytes that it stands for, during a replay

    def find(self, held: Held) -> None:
        """Its tensors as they lie now. Moved if that is not how they lay."""
        storages = {}
        for i, known in self.looks.items():
            tensor = held.get(i)
            if tensor is None or look(tensor) != known:
                raise Moved(set(self.looks))
            storages[address(tensor)] = tensor.untyped_storage()
        if len(storages) != 1 or next(iter(storages.values())).nbytes() != self.memory.numel():
            raise Moved(set(self.looks))
        self.source = plain(next(iter(storages.values())), self.memory.device)

    def fill(self) -> None:
        assert self.source is not None
        self.memory.copy_(self.source)

    def back(self) -> None:
        assert self.source is not None
        self.source.copy_(self.memory)


def address(tensor: torch.Tensor) -> int:
    """Of the memory that it lies in, 0 for none."""
    return tensor.untyped_storage().data_ptr()


def look(tensor: torch.Tensor) -> Look:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def plain(storage: Any, device: torch.device) -> torch.Tensor:
    """All the bytes of a memory."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


def shown(memory: torch.Tensor, seen: Look) -> torch.Tensor:
    """A tensor in a memory."""
    return lying(memory.untyped_storage(), seen)


def lying(storage: Any, seen: Look) -> torch.Tensor:
    dtype, shape, stride, offset = seen
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


def stands(tensor: torch.Tensor | None, known: torch.Tensor) -> bool:
    """Whether it lies exactly where the known one does."""
    return tensor is not None and address(tensor) == address(known) and look(tensor) == look(known)
