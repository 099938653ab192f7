"""Ops in host memory: on tensors that rest there, and on host copies of others. Results rest there too.

What an op writes on the device goes back to it. A lane carries such ops out in order; that of a GPU does so beside this thread,
which waits where it looks up a tensor. Knows neither devices nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gt.worker.engine.base import HostCopy, HostLane, LaneOperand
from gt.worker.offload.tensors import Kept, OffloadedTensors


class OpsInHostMemory:
    """The steps of a worker's host ops, and the host copies of tensors on its device."""

    def __init__(self, tensors: OffloadedTensors, lane: HostLane) -> None:
        self._tensors, self._lane = tensors, lane
        self._copies = tensors.host_copies

    def drop(self, i: int) -> None:
        """A tensor was changed: its copy is of another value."""
        self._copies.pop(i, None)

    def run(self, call: Callable, ids: Sequence[int], values: Sequence, outs: Sequence[int], facts: tuple) -> None:
        """Carry out an op. facts: operands whose copies are made anew, and those that the op writes, by number."""
        fresh, writes = facts
        operands: list[LaneOperand] = []
        try:
            # The copies of the operands begin together; the lane waits for each only when the op runs.
            for place, tensor_id in enumerate(ids):
                operands.append(self._operand(tensor_id, place in fresh))
            results = self._lane.run(call, operands, values, len(outs))
            for place, operand in enumerate(operands):
                self._note_used(ids[place], operand, place in writes)
        except Exception:
            for operand in operands:
                operand.used(False)
            # A failed op may have written half of a host copy: forget all of them. The next op copies from the device again.
            for tensor_id in ids:
                self.drop(tensor_id)
            raise
        for tensor_id, result in zip(outs, results, strict=True):
            self._tensors.put_away(tensor_id, result)

    def _operand(self, tensor_id: int, fresh: bool) -> LaneOperand:
        away = self._tensors.resting(tensor_id)
        if away is not None:
            return away
        tensor = self._tensors[tensor_id]
        known = self._copies.get(tensor_id)
        # The id may name another tensor by now: a copy counts only for the very tensor that it was made of.
        copy = known[1] if known is not None and known[0] is tensor else None
        if copy is None:
            copy, fresh = self._lane.copy(tensor), True
            self._copies[tensor_id] = tensor, copy
        if fresh:
            copy.begin(tensor)
            self._tensors.count_to_host(copy.nbytes)
        return copy

    def _note_used(self, tensor_id: int, operand: LaneOperand, changed: bool) -> None:
        operand.used(changed)
        tensor, copy = self._copies.get(tensor_id, (None, None))
        if changed and copy is operand:
            back = copy.send(tensor)
            self._tensors.count_to_device(copy.nbytes)
            # Until the value is back on the device, a look-up of the tensor waits for it.
            if back is not None:
                self._tensors.put_away(tensor_id, back)


class HostEngineLane:
    """The lane of an engine whose device is the host: ops are executed at once, on the tensors themselves."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.bind, self.in_memory = engine.bind, engine.in_memory

    def copy(self, tensor: Any) -> HostCopy:
        return self._kept(tensor)

    def run(self, call: Callable, operands: Sequence[LaneOperand], values: Sequence, outs: int) -> list[Any]:
        results = call(*[operand.host() for operand in operands], *values)
        return [self._kept(result) for result in (results if outs > 1 else [results] * outs)]

    def _kept(self, tensor: Any) -> Kept:
        return Kept(tensor, self._engine.spec(tensor).nbytes)
