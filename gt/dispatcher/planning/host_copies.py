"""Copies in host memory of tensors on the device, for ops on offloaded state: a record of the values that workers have there.

An op in host memory reads a gradient and changes a parameter by such copies. A copy is of one version of its tensor. A second
op reads the gradient with no second transfer, and the parameter has to cross the link one way only. Copies of parameters that a
program uses last from one replay to the next; others are made in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gt.dispatcher.programs.recording import Recording
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.tensors import Storage, Tensor


class LaunchedCopies(NamedTuple):
    """uses: tensors whose copies from before a program reads. leaves: tensors whose copies it leaves. Both by storage."""

    uses: dict[Storage, int]
    leaves: dict[Storage, int]


class SessionHostCopies:
    """Those of one session."""

    def __init__(self, context: SessionContext) -> None:
        self._context, self._emitter = context, context.emitter
        # A storage's host_copy is (id, version, epoch, recording) of its last copy. The copy has the value of this version, and
        # was made in this recording, or in none. A new epoch makes all copies stale at once.
        self._epoch = 0
        self._used: list[Tensor] = []  # by the op that is planned

    def forget(self) -> None:
        """Count no copy as current: workers may have skipped the ops that make them."""
        self._epoch += 1

    def fresh(self, ins: Sequence[Tensor], away: Sequence[int], brought: Sequence[int]) -> tuple[int, ...]:
        """Operands that need a new copy: workers have none, or one of another value. away: operands in host memory."""
        fresh, resting = [], frozenset(away)
        for n, t in enumerate(ins):
            if n in resting:
                continue
            if brought[n] != t.id:  # a copy in another layout, which ends with the op
                fresh.append(n)
                continue
            if not self._current(t):
                fresh.append(n)
            self._used.append(t)
        return tuple(fresh)

    def written(self, t: Tensor) -> None:
        """The op that is planned writes a tensor on the device."""
        t.storage.host_copy = None
        self._used = [used for used in self._used if used.storage is not t.storage]

    def note_versions(self) -> None:
        """The op is planned: its copies are of the versions that its tensors have now."""
        for t in self._used:
            t.storage.host_copy = (t.id, t.storage.version, self._epoch, self._recording())
        self._used.clear()

    def _current(self, tensor: Tensor) -> bool:
        """True if workers have a copy of this value. In a recording, one from before counts of a parameter only."""
        storage, tape = tensor.storage, self._context.tape
        if storage.host_copy is None or storage.host_copy[:3] != (tensor.id, storage.version, self._epoch):
            return False
        if storage.host_copy[3] is self._recording():
            return True
        if not storage.param or self._context.failures.troubled:
            return False
        if tape is not None:
            tape.host_copies[storage] = tensor.id
        return True

    def _recording(self) -> object:
        """The recording under way, or None."""
        return None if self._context.tape is None else self._context.tape.mark

    # ---- programs

    def of_program(self, tape: Recording) -> LaunchedCopies:
        """Copies that a program needs and leaves, once its recording is over."""
        tensors = [t for i in tape.before if (t := self._context.table.rows.get(i)) is not None and t.storage.param]
        left = {
            t.storage: t.id
            for t in tensors
            if (copy := t.storage.host_copy) is not None
            and copy[:3] == (t.id, t.storage.version, self._epoch)
            and copy[3] is tape.mark
        }
        for storage, tensor in left.items():
            storage.host_copy = (tensor, storage.version, self._epoch, None)
        return LaunchedCopies(tape.host_copies, left)

    def before_launch(self, copies: LaunchedCopies) -> None:
        """Have workers make copies anew that the program uses, and whose tensors have been changed since."""
        emitter, rows = self._emitter, self._context.table.rows
        for storage, tensor_id in copies.uses.items():
            tensor = rows.get(tensor_id)
            if tensor is None or tensor.layout is None or storage.host_copy == (tensor_id, storage.version, self._epoch, None):
                continue
            for index in tensor.layout.mesh.workers:
                worker = emitter.cluster.workers[index]
                if not worker.lost:
                    emitter.write(worker, emitter.common("stale"), emitter.ids([tensor_id]))

    def after_launch(self, copies: LaunchedCopies) -> None:
        for storage, tensor in copies.leaves.items():
            storage.host_copy = (tensor, storage.version, self._epoch, None)
