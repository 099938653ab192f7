"""Ops whose kernels read an operand from its first element on, whatever its strides.

For an expanded tensor such a kernel reads beyond its storage: memory of other sessions, or none. `expand` and backward make
such tensors, and any client may send them. So those that reach too far are copied before the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gt.ir import shapes
from gt.ir.schema import Schema

# Found by comparing each op of torch's operator tests on an expanded operand with the same on a copy of it, and by random calls
# on operands that end where a page begins which nobody may read
_FOUND = frozenset(
    {
        *("_ctc_loss", "_embedding_bag", "_embedding_bag_forward_only", "embedding_renorm_", "native_layer_norm"),
        *("native_group_norm", "native_group_norm_backward"),
        *("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward", "fractional_max_pool2d_backward"),
        *("fractional_max_pool3d_backward", "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"),
        *("_embedding_bag_backward", "_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward"),
        *("embedding_dense_backward", "_pack_padded_sequence", "median", "nanmedian"),
    }
)
# Kernels that trust shapes trust strides too
OPS = frozenset(shapes.RULES) | _FOUND


def row_major(op: Callable, schema: Schema) -> Callable:
    """The op on operands that, row-major, end within their storage: others are copied. Written ones stay as they are."""
    written = frozenset(n for n, a in enumerate(schema.positional) if a.type.written or a.type.may_write)

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*[arg if n in written else within(arg) for n, arg in enumerate(args)], **kwargs)

    return call


def within(arg: Any) -> Any:
    """A tensor, or tensors of a list, copied if a kernel that trusts strides would read beyond its storage."""
    if isinstance(arg, torch.Tensor):
        return arg if arg.is_contiguous() or not _beyond(arg) else arg.contiguous()
    if isinstance(arg, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in arg):
        return [within(part) for part in arg]
    return arg


def _beyond(tensor: torch.Tensor) -> bool:
    """True if its elements, taken for neighbors, would not fit between its first one and the end of its storage."""
    if tensor.layout is not torch.strided:
        return False
    return (tensor.storage_offset() + tensor.numel()) * tensor.element_size() > tensor.untyped_storage().nbytes()
