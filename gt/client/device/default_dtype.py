"""torch.set_default_dtype: results that torch gives the program's default dtype, which workers do not know.

Where that is not float32, a factory names its dtype. Integers are then cast before an op that makes floats of them, as torch's
type promotion does within the op. What is known of calls is kept by default dtype, so that nothing looks at it at each op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace import op_info
from gt.client.trace.dispatch import SEVERAL_OPS, call, tensors
from gt.client.trace.op_info import DEFAULTED, Entry, OpInfo


def call_explicitly(info: OpInfo, entry: Entry, args: tuple, kwargs: dict) -> Any:
    """Record a call with nothing left to the default dtype."""
    default = torch.get_default_dtype()

    def cast(leaf: Any) -> Any:
        integers = isinstance(leaf, RemoteTensor) and not (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
        return torch.ops.aten._to_copy.default(leaf, dtype=default) if integers else leaf

    # With operands, such as true division of integers: these are cast. A factory gets dtype=
    if tensors((args, kwargs)):
        return call(info, *tree_map(cast, (args, kwargs)))
    return call(info, args, {**kwargs, "dtype": default})


def prepare() -> None:
    """Watch the functions of torch that set the default dtype."""
    SEVERAL_OPS[DEFAULTED] = call_explicitly
    op_info.use_default(torch.get_default_dtype())
    torch.set_default_dtype = _watched(torch.set_default_dtype)
    torch.set_default_tensor_type = _watched(torch.set_default_tensor_type)


def _watched(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def set_default(value: Any) -> None:
        original(value)
        op_info.use_default(torch.get_default_dtype())

    return set_default
