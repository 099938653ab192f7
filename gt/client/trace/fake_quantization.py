"""Fake quantisation with a moving average of the range: its buffers, which the CPU's kernel sizes at the first call."""

from __future__ import annotations

import math
from typing import Any

from gt.client.trace.dispatch import call
from gt.client.trace.op_info import OpInfo

_BUFFERS = ("running_min", "running_max", "scale", "zero_point")


def observe_and_quantize(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """_fused_moving_avg_obs_fq_helper: buffers of a quantisation by channel get an element for each channel.

    RuntimeError for buffers of another size.
    """
    named = dict(zip(info.names, args), **kwargs)
    x, axis, by_channel = named["self"], named["ch_axis"], named.get("per_row_fake_quant", False)
    buffers = [named[name] for name in _BUFFERS]
    if by_channel and not -1 < axis < x.dim():
        raise RuntimeError(f"fake quantisation by channel: ch_axis is {axis}, want 0 to {x.dim() - 1}")
    if by_channel and not buffers[0].numel():
        for buffer, value in zip(buffers, (math.inf, -math.inf, 1.0, 0)):
            buffer.resize_(x.shape[axis]).fill_(value)
    want = x.shape[axis] if by_channel else 1
    for name, buffer in zip(_BUFFERS, buffers):
        if buffer.numel() != want:
            raise RuntimeError(f"fake quantisation: {name} has {buffer.numel()} elements, want {want}")
    return call(info, args, kwargs)
