"""Views of tensors on their memory, and slots: fixed memory for inputs of a replay that are elsewhere each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Tensors = dict[int, torch.Tensor]
ViewMetadata = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]  # dtype, shape, strides, offset


class InputsMoved(Exception):
    """Inputs of a recording are elsewhere in memory."""

    def __init__(self, ids: set[int]) -> None:
        self.ids = ids


@dataclass(slots=True)
class Slot:
    """Fixed memory of a recording. It is filled from its source before a replay, and copied back after it."""

    memory: torch.Tensor
    views: dict[int, ViewMetadata]
    source: torch.Tensor | None = None  # all bytes of the input's memory, during a replay

    def find(self, tensors: Tensors) -> None:
        """Find the source of this replay. InputsMoved if its tensors have other views, or no longer share one memory."""
        storages = {}
        for i, known in self.views.items():
            tensor = tensors.get(i)
            if tensor is None or metadata(tensor) != known:
                raise InputsMoved(set(self.views))
            storages[address(tensor)] = tensor.untyped_storage()
        # Inputs of one slot shared a storage when recorded. If they are apart now, one copy cannot stand for all.
        if len(storages) != 1 or next(iter(storages.values())).nbytes() != self.memory.numel():
            raise InputsMoved(set(self.views))
        self.source = raw_bytes(next(iter(storages.values())), self.memory.device)

    def fill(self) -> None:
        assert self.source is not None
        self.memory.copy_(self.source)

    def copy_back(self) -> None:
        assert self.source is not None
        self.source.copy_(self.memory)


def address(tensor: torch.Tensor) -> int:
    """Address of a tensor's memory, 0 for none."""
    return tensor.untyped_storage().data_ptr()


def metadata(tensor: torch.Tensor) -> ViewMetadata:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def raw_bytes(storage: Any, device: torch.device) -> torch.Tensor:
    """A storage as one flat uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


def view_of(memory: torch.Tensor, view: ViewMetadata) -> torch.Tensor:
    """A view of the memory that a tensor has."""
    return view_of_storage(memory.untyped_storage(), view)


def view_of_storage(storage: Any, view: ViewMetadata) -> torch.Tensor:
    dtype, shape, stride, offset = view
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


def is_same_view(tensor: torch.Tensor | None, known: torch.Tensor) -> bool:
    """True if two tensors are the same view of the same memory."""
    return tensor is not None and address(tensor) == address(known) and metadata(tensor) == metadata(known)
