"""Ops that take the lengths of sequences on the CPU, as on every device: packed sequences and CTC loss.

The lengths decide shapes, so they become constants of the ops that are recorded. Nothing waits.
"""

from __future__ import annotations

from typing import Any

import torch

from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace.op_info import OpInfo

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


def ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor, target_lengths: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """ctc_loss with lengths in tensors. Those of the CPU become lists, as on CUDA; its mean divides by the lengths."""
    overload, lengths = aten.ctc_loss.Tensor, (input_lengths, target_lengths)
    if all(isinstance(length, RemoteTensor) for length in lengths):
        return overload.decompose(log_probs, targets, *lengths, *rest)
    return aten.ctc_loss.IntList(log_probs, targets, *(length.tolist() for length in lengths), *rest)
