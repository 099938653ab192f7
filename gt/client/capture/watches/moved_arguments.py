"""CPU tensors among a call's arguments: the function gets remote ones for them, of which `.to("remote")` makes a copy.

In `noisy = x.to("remote"); noisy.add_(noise)` the caller's x stays as it is. Where a call writes neither to x nor to such a
copy, nobody can tell them apart, and later calls make none.
"""

from __future__ import annotations

from typing import Any

from gt.client.capture.aliasing import CallMemory
from gt.client.capture.recording import CallRecording, Difference
from gt.client.device.remote_tensor import RemoteTensor, memory_id, moves

WRITES_NOW = "the function writes to an argument or to its copy on the device, which it did not do in earlier calls"


class MovedArguments:
    """The moves of one call's uploaded arguments, while it is entered. copies: whether each move makes a copy."""

    def __init__(self, leaves: list, prepared: list, copies: bool) -> None:
        self._copies = copies
        self._moved: set[int] = set()  # memory of arguments that were moved
        self._sources: dict[int, int] = {}  # id of a copy -> id of the tensor that was moved
        self._uploaded = [
            memory_id(got)
            for leaf, got in zip(leaves, prepared, strict=True)
            if isinstance(got, RemoteTensor) and not isinstance(leaf, RemoteTensor)
        ]

    def __enter__(self) -> MovedArguments:
        moves.update(dict.fromkeys(self._uploaded, self._move))
        return self

    def __exit__(self, *error: Any) -> None:
        for number in self._uploaded:
            moves.pop(number, None)

    def _move(self, tensor: RemoteTensor) -> RemoteTensor:
        """The result of `.to("remote")` of an argument or a view of it."""
        self._moved.add(memory_id(tensor))
        if not self._copies:
            return tensor
        copy = tensor.clone()
        self._sources[copy._ref.id] = tensor._ref.id
        return copy

    def settle(self, tape: CallRecording, memory: CallMemory, first: bool) -> bool:
        """The recorded call is over. Returns whether the next one has to make copies too.

        first: whether it can be no program. Then its copies leave the tape, so that it agrees with a call without copies.
        """
        if memory.written.intersection(memory.of.get(number, number) for number in (*self._moved, *self._sources)):
            if not self._copies:
                tape.prevents.append(Difference("", WRITES_NOW))
            return True
        if not first:
            return self._copies
        made = self._sources
        tape.ops = [op for op in tape.ops if made.keys().isdisjoint(op.outs)]
        for op in tape.ops:
            op.ins = [made.get(number, number) for number in op.ins]
        return False
