"""Cost model of an op on one worker: floating-point operations by local shapes, bytes read and written, seconds.

Seconds are those of a nominal GPU. Only their ratios matter: for the balance of stages and for schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

FLOPS, BYTES, LINK = 4e14, 3e12, 3.9e11  # per second: half-precision operations, bytes of memory, bytes between two GPUs
HOST_FLOPS, HOST_BYTES = 2e11, 2e10  # per second of a worker on several CPU cores: operations, bytes of memory
LATENCY_SECONDS = 2e-5  # seconds of the smallest collective
Shape = tuple[int, ...]
_FACTORS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
# Indices of q, k, v; operations a score and channel
_ATTENTION = {
    **dict.fromkeys(("gt.sdpa", "gt.sdpa_biased"), (0, 1, 2, 4)),
    **dict.fromkeys(("gt.sdpa_backward", "gt.sdpa_biased_backward"), (1, 2, 3, 10)),
}

_RECURRENT = {"gt.rnn": 2, "gt.rnn_backward": 6}  # operations a row and weight; backward runs forward again at worst


def heavy(op: str) -> bool:
    """True for ops that take more than a few operations an element."""
    name = op.removeprefix("aten.").rpartition(".")[0]
    return name in _FACTORS or name in _ATTENTION or name in _RECURRENT or name in ("convolution", "convolution_backward")


def flops(op: str, ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    """Operations of matmuls, convolutions and attention by formula; of every other op one an element."""
    name = op.removeprefix("aten.").rpartition(".")[0]
    if name in _FACTORS:  # [.., m, k] x [.., k, n]: a multiplication and an addition for each of m * k * n
        left, right = (ins[i] for i in _FACTORS[name])
        return 2.0 * prod(left) * right[-1]
    if name in _ATTENTION:
        q, k, _, each = _ATTENTION[name]
        return float(each * prod(ins[q]) * ins[k][-2])
    if name in _RECURRENT:
        rows = prod(outs[0][:-1])  # of the output, or of the input's gradient
        return float(_RECURRENT[name] * rows * sum(prod(shape) for shape in ins if len(shape) == 2))
    if name in ("convolution", "convolution_backward"):
        backward = name != "convolution"
        weight, made = (ins[2], ins[0]) if backward else (ins[1], outs[0])
        return (4.0 if backward else 2.0) * prod(made) * prod(weight[1:])
    return float(max([*map(prod, ins), *map(prod, outs)], default=0))


def at_least(operations: float, nbytes: float, gpu: bool) -> float:
    """Lower bound in seconds on a fast worker of its kind."""
    return seconds(operations, nbytes) if gpu else max(operations / HOST_FLOPS, nbytes / HOST_BYTES)


def seconds(operations: float, nbytes: float) -> float:
    """Seconds of arithmetic or of memory traffic, whichever is longer (the roofline model)."""
    return max(operations / FLOPS, nbytes / BYTES)


def gathered(nbytes: float, size: int) -> float:
    """Seconds of an all-gather to `nbytes` on each of `size` workers."""
    # In a ring each worker receives all pieces but its own. An all-reduce is a reduce-scatter and an all-gather.
    return LATENCY_SECONDS + nbytes * (size - 1) / size / LINK


def added_up(nbytes: float, size: int) -> float:
    """Seconds of an all-reduce of `nbytes` over `size` workers."""
    return LATENCY_SECONDS + 2 * nbytes * (size - 1) / size / LINK
