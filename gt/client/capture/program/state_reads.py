"""Small state whose values the Python code of one function reads, such as `if self.initted` or `if self.step % 10 == 0`.

The first recording meets such a read. Later ones know the value before the call, so that the choice becomes a guard of the
program, as one by arguments does. Knows nothing of when a value has to be fetched (gt/client/values/state_values.py).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from gt.client.capture.constants import Place, StatePlace
from gt.client.capture.recorded_op import RecordedOp
from gt.client.capture.state_walk import StateSnapshot
from gt.client.device.remote_tensor import RemoteTensor, memory_id
from gt.client.trace.recorder import Recorder
from gt.client.values.foldable_ops import FLOATS
from gt.client.values.foldable_ops import folding as folding_of
from gt.client.values.state_values import MAX_STATE_BYTES
from gt.client.values.uploaded_values import DTYPES

MAX_STATE_READS = 8  # tensors of one function: each may cost a wait
MAX_DECIDING_OPS = 64  # between them and one value that is read


class StateReads:
    """The small state that calls of one function have read, by its paths in Python."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._known: set[str] = set()  # paths before the newest recorded call

    @property
    def pending(self) -> bool:
        """True if the newest recorded call has met state that no call knew before."""
        return self._paths != self._known

    def before(
        self, entry: StateSnapshot, names: dict[int, Any], prepared: list, recorder: Recorder, values: dict[int, torch.Tensor]
    ) -> CallState:
        """The state before a call. Waits for values that are not known. values: those of arguments, by place."""
        self._known = {*self._paths}
        state = CallState(self._paths, {t._ref.id: t for _, t in reversed(list(entry.tensors()))}, names, prepared, recorder)
        state.known |= {prepared[place]._ref.id: (place, value) for place, value in values.items()}
        return state


class CallState:
    """The small state before one call. tensors: by id; names: their paths.

    known: id -> place and value of that which earlier calls have read, and of arguments.
    """

    def __init__(
        self, paths: set[str], tensors: dict[int, RemoteTensor], names: dict[int, Any], prepared: list, recorder: Recorder
    ) -> None:
        self._paths, self._tensors, self._names = paths, tensors, names
        self._earlier = frozenset(paths)  # paths that calls before this one have read
        self._arguments = {t._ref.id for t in prepared if isinstance(t, RemoteTensor)}
        self.known: dict[int, tuple[Place, torch.Tensor]] = {}
        if not paths:
            return
        given = {t._ref.id: t for t in prepared if isinstance(t, RemoteTensor)}
        owners = Counter(map(memory_id, (tensors | given).values()))
        for number, tensor in tensors.items():
            path = names.get(number)
            # What another name of the memory writes cannot be told from the ids of ops
            if path in paths and self._may_count(number) and owners[memory_id(tensor)] == 1:
                value = recorder.state_value(tensor)
                if value is not None:
                    self.known[number] = StatePlace(path, tensor, number), value.clone()

    def _may_count(self, number: int) -> bool:
        """True for a small tensor of state, without a gradient, that is no argument."""
        tensor = self._tensors.get(number)
        if tensor is None or number in self._arguments or tensor.requires_grad or tensor.dtype not in DTYPES | FLOATS:
            return False
        return tensor.numel() * tensor.itemsize <= MAX_STATE_BYTES

    def may_decide(self, tensor: torch.Tensor, makers: dict[int, tuple[int, int]], ops: list[RecordedOp]) -> str:
        """The path of small state that may decide a value, with other such state, and that was not known; "" if none does.

        The next recording knows it. makers: id -> the op that made it.
        """
        left, seen = [tensor._ref.id], set()  # type: ignore[attr-defined]
        leaves: dict[int, str] = {}
        while left:
            number = left.pop()
            if number in seen:
                continue
            seen.add(number)
            if len(seen) > MAX_DECIDING_OPS:
                return ""
            if number not in makers:
                if number in self.known:
                    continue
                if not self._may_count(number):
                    return ""
                leaves[number] = self._names[number]
                continue
            op = ops[makers[number][0]]
            way = folding_of(op.template)
            if op.template.op != "gt.upload.default" and (way is None or not way.folds):
                return ""
            left += op.ins
        paths = {*leaves.values()} - self._earlier
        if not paths or len(self._paths | paths) > MAX_STATE_READS:
            return ""
        self._paths |= paths
        return min(paths)
