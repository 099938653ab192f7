"""Optimizer state and parameters that rest in host memory or in files of their workers, by the config's `offload`.

The client declares state as an optimizer fills it like a parameter, and other state after the step. A list op on much state is
done in parts. Before one part is computed, the state of the next begins to come back. After a part its own state is evicted.
Others are evicted after each use. Workers bring back every tensor that is used; this module decides when.

Where the host computes the step, an op on state in host memory becomes a `host_op`. State and results stay in host memory.
Other operands take part by copies (host_copies.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gt.dispatcher.planning.host_copies import SessionHostCopies
from gt.dispatcher.planning.host_step import HostRates, StepChoice, choose
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.sharding.redistribution_steps import Order
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.records import Bound, OpPlan
from gt.dispatcher.state.tensors import Storage, Tensor
from gt.ir.instr import Define
from gt.ir.layout import local_shape
from gt.ir.template import T

PART_BYTES = 64 << 20  # bytes of offloaded tensors in one part; a worker has two parts at once
MIN_BYTES = 4 << 10  # on a worker: of smaller tensors nothing is gained


class Offload:
    """Tensors that one session's config offloads."""

    def __init__(self, context: SessionContext) -> None:
        self._context, self._emitter = context, context.emitter
        self._optimizer, self._params = context.config.offload.optimizer, context.config.offload.params
        self._path = context.config.offload.path
        self.active = bool(self._optimizer or self._params)
        self.host_copies = SessionHostCopies(context)
        self._choice: StepChoice | None = None
        self._op_on_host = False  # the op that was written last
        self._evicts: dict[str, Define] = {}  # by space

    @property
    def choice(self) -> StepChoice:
        """The place where the optimizer's step is computed, with its reason."""
        if self._choice is None:
            rates = [_rates(worker.info) for worker in self._emitter.cluster.workers if not worker.lost]
            self._choice = choose(self._context.config.offload.step, self._params is not None, rates)
        return self._choice

    # ---- ops in host memory

    def bound(self, known: OpSchema, plan: OpPlan, ins: Sequence[Tensor], brought: Sequence[int]) -> list[Bound]:
        """The definitions of an op: those of its plan, or of the same op in host memory if it works on state there."""
        # away: operands in host memory. A host op has the same operands as the device's. Its definition says which it writes
        # and which need a fresh copy, so it is kept for each set of these.
        away = [n for n, t in enumerate(ins) if brought[n] == t.id and self._rests(t)] if self._optimizer else []
        self._op_on_host = bool(away) and self.choice.on_host and _fits_host(known, ins, away)
        if not self._op_on_host:
            for n in known.template.writes:
                self.host_copies.written(ins[n])
            return plan.bound
        fresh = self.host_copies.fresh(ins, away, brought)
        key = ("host", fresh, *map(id, plan.wants))
        bound = known.plans.get(key)
        if bound is None:
            own = {"writes": _written(known), "fresh": [*fresh]}
            orders = [Order(worker.index, "host_op", {**define.payload, **own}) for worker, define in plan.bound]
            bound = known.plans[key] = self._emitter.bind(orders)
        return bound

    def note_results(self, storages: Iterable[Storage]) -> None:
        """Results of an op in host memory rest there."""
        for storage in storages:
            storage.space, storage.evicted = "cpu", True

    def note_versions(self) -> None:
        """The op that was written is planned."""
        self.host_copies.note_versions()

    @staticmethod
    def _rests(tensor: Tensor) -> bool:
        """True if a tensor was evicted. A use since may have brought it back, which the dispatcher does not know."""
        storage = tensor.storage
        return storage.space is not None and storage.evicted and tensor.base is None and len(storage.tensors) == 1

    # ---- when state is evicted, and comes back

    def parts(self, indices: Sequence[int], columns: Iterable[Sequence[Tensor]]) -> list[list[int]]:
        """Indices of a list op's columns in parts of about PART_BYTES of tensors that rest elsewhere."""
        # PART_BYTES of the tensors that move, not of all operands. A single index with more is a part by itself.
        listed, parts, total = list(columns), [[]], 0  # type: ignore[var-annotated]
        for index in indices:
            nbytes = sum(_bytes(row[index]) for row in listed if index < len(row) and self.space(row[index]))
            if parts[-1] and total + nbytes > PART_BYTES:
                parts.append([])
                total = 0
            parts[-1].append(index)
            total += nbytes
        return parts

    def space(self, tensor: Tensor) -> str | None:
        """The space in which a tensor rests, or will after its first step."""
        storage = tensor.storage
        if storage.gradient or tensor.base is not None or storage.cast_of is not None:
            return None
        return self._params if storage.param else self._optimizer

    def restore(self, ins: Iterable[Tensor]) -> None:
        """Begin to bring back tensors that are used soon. For a step on the host only files are read: it needs no transfer."""
        storages = [t.storage for t in ins if t.storage.evicted]
        if self.choice.on_host:
            storages = [storage for storage in storages if storage.space == "nvme"]
        self._write(storages, self._emitter.common("restore"))

    def declare(self, tensor: Tensor) -> None:
        """The client says that a tensor is state of an optimizer: from now on it rests elsewhere."""
        storage = tensor.storage
        if storage.space is None and tensor.layout is not None and _bytes(tensor) >= self._least(storage):
            storage.space = self.space(tensor)
            self._emitter.begin_op()
            self.evict((storage,))

    def after(self, known: OpSchema, ins: Sequence[Tensor]) -> None:
        """Evict what an op has used: state, and parameters."""
        # What a fused op writes beside parameters (and gradients, which have no space) is state. The client declares the state
        # of other optimizers.
        fused = known.name.startswith("_fused_")
        for index, tensor in enumerate(ins):
            storage = tensor.storage
            state = fused and index in known.written and not storage.param
            if storage.space is None and (state or storage.sharded) and _bytes(tensor) >= self._least(storage):
                storage.space = self.space(tensor)
            if not (self._op_on_host and self._rests(tensor)):
                self.evict((storage,))

    def _least(self, storage: Storage) -> int:
        """Bytes of the smallest tensor that is offloaded. The host's step wants all state."""
        return 1 if self.choice.on_host and not storage.param else MIN_BYTES

    def viewed(self, ids: Iterable[int]) -> list[Storage]:
        """Offloaded storages of which the client frees views: workers do not evict a storage while views share its memory."""
        rows = self._context.table.rows
        ending = (rows[i] for i in ids if i in rows) if self.active else ()
        return [t.storage for t in ending if t.base is not None and t.storage.space is not None]

    def evict(self, storages: Iterable[Storage]) -> None:
        """Have workers evict those of the storages that have a space. A worker leaves one with live views where it is."""
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


def _fits_host(known: OpSchema, ins: Sequence[Tensor], away: Sequence[int]) -> bool:
    """True for an elementwise op or a list op that changes one of these, or reads state. Others compute on the device."""
    template = known.template
    if known.random or not (known.columns or template.pointwise) or any(out.kind == "view" for out in template.outs):
        return False
    return any(n in known.written or not ins[n].storage.param for n in away)


def _written(known: OpSchema) -> list[int]:
    """Operands that an op writes. By its schema a fused optimizer writes gradients, but it does so with a loss scale alone."""
    writes = known.template.writes
    if known.name.startswith("_fused_") and not isinstance(dict(known.template.kwargs).get("grad_scale"), T):
        gradients = set(known.columns[1].tensors)
        return [n for n in writes if n not in gradients]
    return [*writes]


def _rates(info: dict) -> HostRates | None:
    """Rates of a worker by its Hello; None if it computes in host memory."""
    if info.get("device") == "cpu":
        return None
    measured = info.get("rates")
    return HostRates(measured[0], measured[1], True) if measured else HostRates()


def _bytes(tensor: Tensor) -> int:
    """Bytes of a tensor on its first worker."""
    if tensor.layout is None:
        return tensor.spec.nbytes
    elements = 1
    for extent in local_shape(tensor.layout, tensor.spec.shape, 0):
        elements *= extent
    return elements * tensor.spec.nbytes // max(tensor.spec.numel, 1)
