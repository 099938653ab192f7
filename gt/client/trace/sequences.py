"""Ops that take the lengths of sequences on the CPU, as on every device: packed sequences and CTC loss.

The lengths decide shapes, so they become constants of the ops that are recorded. Nothing waits.
"""

from __future__ import annotations

from typing import Any

import torch

from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace.dispatch import call
from gt.client.trace.op_info import OpInfo, info_of

aten = torch.ops.aten


def pack(info: OpInfo, args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """_pack_padded_sequence: the steps of all sequences, time by time; the batch size of each time stays on the CPU.

    RuntimeError in torch's words for lengths that are not on the CPU, not sorted or not those of the batch.
    """
    padded, lengths, batch_first = args
    if isinstance(lengths, RemoteTensor):
        raise RuntimeError(
            f"'lengths' argument should be a 1D CPU int64 tensor, but got {lengths.dim()}D {lengths.device} "
            f"{str(lengths.dtype)[6:]} tensor; try lengths.cpu(), or a list"
        )
    steps = padded.transpose(0, 1) if batch_first else padded
    like = torch.empty((*steps.shape[:2], 0 if not padded.numel() else 1), dtype=torch.int8)
    sizes = aten._pack_padded_sequence.default(like, lengths, False)[1]
    parts, start, counts = [], 0, sizes.tolist()
    for time in range(1, len(counts) + 1):
        if time == len(counts) or counts[time] != counts[start]:
            parts.append(steps[start:time, : counts[start]].flatten(0, 1))
            start = time
    return torch.cat(parts), sizes


def ctc_loss(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """_ctc_loss and its backward with lengths on the CPU: the overload with lists. Lengths on workers stay there."""
    named = dict(zip(info.names, args), **kwargs)
    lengths = [named["input_lengths"], named["target_lengths"]]
    if all(isinstance(length, RemoteTensor) for length in lengths):
        return call(info, args, kwargs)
    for name, length in zip(("input_lengths", "target_lengths"), lengths):
        named[name] = length.tolist()
    listed = info_of(getattr(aten, info.name.split(".")[1]).default)
    return call(listed, tuple(named[name] for name in listed.names if name in named))
