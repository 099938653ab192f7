"""RemoteSparse: a sparse tensor of this process whose indices and values are remote tensors.

Workers know dense tensors alone: an op on a sparse one is recorded as ops on its parts (gt.client.trace.sparse_ops). So
sharding, capture and failures need no second kind of tensor. A gradient keeps the rows that it has, which SparseAdam needs.
"""

from __future__ import annotations

from typing import Any

import torch

from gt.client.current_session import Current
from gt.client.device.remote_tensor import LAZY, Alias, Ref, RemoteTensor


class RemoteSparse(RemoteTensor):
    """parts: indices [sparse dims, entries] and values [entries, dense dims...]; of CSR crow and column indices and values.

    merged: entries have different indices, in ascending order (torch calls it coalesced).
    """

    parts: tuple[torch.Tensor, ...]
    merged: bool

    @property
    def compressed(self) -> bool:
        """True for CSR."""
        return len(self.parts) == 3

    @property
    def _ref(self) -> Ref | Alias:  # type: ignore[override]
        """The reference of the values, for checks of the session that the tensor belongs to."""
        return self.parts[-1]._ref  # type: ignore[attr-defined]

    def new(self, *args: Any) -> torch.Tensor:
        """torch's old constructor, which SparseAdam calls with indices, values and size."""
        if len(args) != 3:
            raise TypeError(f"new of a sparse remote tensor takes indices, values and size, got {len(args)} arguments")
        return coo(*args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().cpu().__reduce_ex__(protocol)

    def untyped_storage(self) -> Any:
        raise NotImplementedError("Cannot access storage of a sparse tensor")


def coo(indices: torch.Tensor, values: torch.Tensor, size: Any, merged: bool = False) -> RemoteSparse:
    """A COO tensor of these parts, which are not copied."""
    return _wrap(size, values.dtype, torch.sparse_coo, (indices, values), merged)


def csr(crow: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, size: Any) -> RemoteSparse:
    """A CSR tensor of these parts, which are not copied."""
    return _wrap(size, values.dtype, torch.sparse_csr, (crow, columns, values), True)


def _wrap(size: Any, dtype: torch.dtype, layout: torch.layout, parts: tuple[torch.Tensor, ...], merged: bool) -> RemoteSparse:
    ask = layout is torch.sparse_csr  # torch asks each CSR tensor that it did not make for its layout
    tensor = torch.Tensor._make_wrapper_subclass(
        RemoteSparse, tuple(size), dtype=dtype, layout=layout, device=LAZY, dispatch_layout=ask
    )
    tensor.parts, tensor.merged = parts, merged
    if Current.recorder is not None:
        Current.recorder.made_sparse = True
    return tensor
