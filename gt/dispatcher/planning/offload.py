"""Optimizer state and parameters that rest in host memory or in files of their workers, by the config's `offload`.

The client declares state after a step; that of a fused op is known at once. A list op on much state is done in parts: before
one part is computed, the state of the next begins to come back, and after it its own is evicted. Others are evicted after
each use. Workers bring back whatever is used, so this is only about when.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.tensors import Storage, Tensor
from gt.ir.instr import Define
from gt.ir.layout import local_shape

PART_BYTES = 64 << 20  # of offloaded tensors on a worker at a time; two parts are there at once
LEAST_BYTES = 4 << 10  # on a worker: of smaller tensors nothing is gained


class Offload:
    """Tensors that one session's config offloads."""

    def __init__(self, context: SessionContext) -> None:
        self._context, self._emitter = context, context.emitter
        self._optimizer, self._params = context.config.offload.optimizer, context.config.offload.params
        self._path = context.config.offload.path
        self.active = bool(self._optimizer or self._params)
        self._evicts: dict[str, Define] = {}  # by space

    def parts(self, indices: Sequence[int], columns: Iterable[Sequence[Tensor]]) -> list[list[int]]:
        """Indices of a list op's columns in parts of about PART_BYTES of tensors that rest elsewhere."""
        listed, parts, total = list(columns), [[]], 0  # type: ignore[var-annotated]
        for index in indices:
            nbytes = sum(_bytes(row[index]) for row in listed if index < len(row) and self.space(row[index]))
            if parts[-1] and total + nbytes > PART_BYTES:
                parts.append([])
                total = 0
            parts[-1].append(index)
            total += nbytes
        return parts

    def space(self, t: Tensor) -> str | None:
        """The space in which a tensor rests, or will after its first step."""
        storage = t.storage
        if storage.gradient or t.base is not None:
            return None
        return self._params if storage.param else self._optimizer

    def restore(self, ins: Iterable[Tensor]) -> None:
        """These are used soon."""
        self._write((t.storage for t in ins if t.storage.evicted), self._emitter.common("restore"))

    def declare(self, t: Tensor) -> None:
        """The client says that a tensor is state of an optimizer: from now on it rests elsewhere."""
        storage = t.storage
        if storage.space is None and t.layout is not None and _bytes(t) >= LEAST_BYTES:
            storage.space = self.space(t)
            self._emitter.begin_op()
            self.evict((storage,))

    def after(self, known: OpSchema, ins: Sequence[Tensor]) -> None:
        """Evict what an op has used: state, and parameters."""
        fused = known.name.startswith("_fused_")
        for index, t in enumerate(ins):
            storage = t.storage
            state = fused and index in known.template.writes and not storage.param
            if storage.space is None and (state or storage.sharded) and _bytes(t) >= LEAST_BYTES:
                storage.space = self.space(t)
            self.evict((storage,))

    def viewed(self, ids: Iterable[int]) -> list[Storage]:
        """Storages that rest elsewhere and of which such views end: until then workers leave them where they are."""
        rows = self._context.table.rows
        ending = (rows[i] for i in ids if i in rows) if self.active else ()
        return [t.storage for t in ending if t.base is not None and t.storage.space is not None]

    def evict(self, storages: Iterable[Storage]) -> None:
        """Let those rest elsewhere that do, unless views share their memory."""
        for storage in storages:
            if storage.space is None or not storage.tensors:
                continue
            if storage.space not in self._evicts:
                self._evicts[storage.space] = self._emitter.define("evict", {"space": storage.space, "path": self._path})
            self._write((storage,), self._evicts[storage.space])
            storage.evicted = True

    def _write(self, storages: Iterable[Storage], define: Define) -> None:
        emitter = self._emitter
        for storage in storages:
            t = next(t for t in storage.tensors.values() if t.base is None)
            for index in t.layout.mesh.workers if t.layout is not None else ():
                worker = emitter.cluster.workers[index]
                if not worker.lost:
                    emitter.write(worker, define, emitter.ids([t.id]))


def _bytes(t: Tensor) -> int:
    """Bytes of a tensor on its first worker."""
    if t.layout is None:
        return t.spec.nbytes
    elements = 1
    for extent in local_shape(t.layout, t.spec.shape, 0):
        elements *= extent
    return elements * t.spec.nbytes // max(t.spec.numel, 1)
