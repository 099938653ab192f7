"""batch_norm as its one op, and its backward pass without tensors that it does not read.

torch's own function also makes an empty tensor, which only cuDNN's kernel uses. That would be an op more for each layer of a
network of convolutions, in the program, the server and the worker. Its backward pass gets the running statistics, which it
reads in evaluation only. In training the next micro-batch may have updated them, and a schedule would have to keep that order.
"""

from __future__ import annotations

from typing import Any

import torch

from gt.client.trace.dispatch import call
from gt.client.trace.op_info import OpInfo

OVERLOAD = torch.ops.aten.batch_norm.default
_native = torch.ops.aten.native_batch_norm.default
_RUNNING, _TRAIN = slice(3, 5), 7  # among the arguments of native_batch_norm_backward: mean and variance; the flag


def handler(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """The handler of the op, which inference mode dispatches whole."""
    return batch_norm(*args, **kwargs)


def batch_norm(  # noqa: PLR0913 - the op's arguments
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float, cudnn: bool
) -> Any:
    """x: [N, C, ...]; weight, bias and the running mean and variance: [C] or None. Errors are those of torch's function."""
    channels = (x.shape[1],) if x.dim() > 1 and x.numel() else None
    known = channels is not None and (training or (mean is not None and variance is not None))
    # Torch's own function raises the errors for operands of other shapes
    for parameter in (weight, bias, mean, variance):
        if not known or (parameter is not None and parameter.shape != channels):
            return OVERLOAD.decompose(x, weight, bias, mean, variance, training, momentum, eps, cudnn)
    return _native(x, weight, bias, mean, variance, training, momentum, eps)[0]


def backward(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """The handler of native_batch_norm_backward: in training without the running statistics."""
    if len(args) > _TRAIN and args[_TRAIN]:
        args = (*args[: _RUNNING.start], None, None, *args[_RUNNING.stop :])
    return call(info, args, kwargs)
