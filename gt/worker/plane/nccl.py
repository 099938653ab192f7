"""Plane `nccl`: transfers between GPUs by NCCL, where NVSHMEM is not available.

A pair has a communicator for each direction, and each team has its own. Their ids are exchanged by plane shm at the first use,
which all members reach in the dispatcher's order. NCCL buffers no message: a sender's stream waits until the receiver takes it.
The dispatcher's orders allow for that (gt.dispatcher.programs.reorder_check), and recorded programs overlap transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gt.errors import SystemFailure
from gt.worker.plane.base import Buffer, Channel, Combine, OnIssued, SlotCursors, TeamForm, issuing, nothing
from gt.worker.plane.gpu import DevicePlane
from gt.worker.plane.nccl_bindings import ID_BYTES, Nccl, can_reduce
from gt.worker.plane.symmetric import check_present


class NcclTransport:
    """The transfers and collectives of plane.base.Plane for flat uint8 tensors of `engine` (Engine.direct).

    host: the plane that exchanges ids. count: counts bytes to and from a worker.
    """

    name = "nccl"
    recordable = True

    def __init__(self, ring: Any, engine: Any, host: Any, count: Callable[[int, int, int], None]) -> None:
        self._ring, self._engine, self._host, self._count = ring, engine, host, count
        self._pairs: dict[tuple[int, int, bool], Any] = {}
        self._teams: dict[int, Any] = {}

    # ---- transfers

    @issuing()
    def send(self, channel: Channel, data: Buffer) -> None:
        check_present(data)
        if len(data):
            comm = self._pair(channel, True)
            self._ring.send(comm, self._engine.address(data), len(data), 1, self._engine.stream())
        self._count(channel["peer"], len(data), 0)

    @issuing()
    def recv(self, channel: Channel, into: Buffer) -> None:
        check_present(into)
        if len(into):
            comm = self._pair(channel, False)
            self._ring.recv(comm, self._engine.address(into), len(into), 0, self._engine.stream())
        self._count(channel["peer"], 0, len(into))

    def reset_cursors(self, channels: Iterable[Sequence[int]]) -> None:
        """NCCL has no slots."""

    def cursors(self) -> SlotCursors:
        return {}

    def restore_cursors(self, cursors: SlotCursors) -> None:
        pass

    def batch(self) -> AbstractContextManager:
        return nullcontext(())

    # ---- collectives. Members add dtypes and reductions that NCCL lacks, in rank order.

    def all_reduce(self, form: TeamForm, data: Buffer, combine: Combine, on_issued: OnIssued = nothing) -> None:
        check_present(data)
        self._all_reduce(form, data, combine)
        on_issued()

    @issuing()
    def _all_reduce(self, form: TeamForm, data: Buffer, combine: Combine) -> None:
        size, total = len(form["workers"]), len(data)
        if size > 1 and total:
            if can_reduce(combine):
                self._ring.all_reduce(self._team(form), self._engine.address(data), total, combine, self._engine.stream())
            else:
                # NCCL lacks this dtype or reduction (norm2, say): gather all terms, and add in rank order.
                parts = [self._engine.staging((total,), "uint8") for _ in range(size)]
                self._exchange(form, [data] * size, parts)
                self._add(data, parts, combine)
            self._counted(form, [total] * size, [total] * size)

    def all_gather(self, form: TeamForm, data: Buffer, outs: Sequence[Buffer], on_issued: OnIssued = nothing) -> None:
        check_present(data)
        self._all_gather(form, data, outs)
        on_issued()

    @issuing()
    def _all_gather(self, form: TeamForm, data: Buffer, outs: Sequence[Buffer]) -> None:
        self._exchange(form, [data] * len(outs), outs)
        self._counted(form, [len(data)] * len(outs), list(map(len, outs)))

    def reduce_scatter(
        self, form: TeamForm, sections: Sequence[Buffer], out: Buffer, combine: Combine, on_issued: OnIssued = nothing
    ) -> None:
        check_present(out)
        self._reduce_scatter(form, sections, out, combine)
        on_issued()

    @issuing()
    def _reduce_scatter(self, form: TeamForm, sections: Sequence[Buffer], out: Buffer, combine: Combine) -> None:
        parts = [self._engine.staging((len(out),), "uint8") for _ in sections]
        self._exchange(form, sections, parts)
        self._add(out, parts, combine)
        self._counted(form, list(map(len, sections)), [len(out)] * len(sections))

    @issuing()
    def all_to_all(self, form: TeamForm, sends: Sequence[Buffer], recvs: Sequence[Buffer], longest: int = 0) -> None:
        check_present(sends[0])
        self._exchange(form, sends, recvs)
        self._counted(form, list(map(len, sends)), list(map(len, recvs)))

    # ----

    def _exchange(self, form: TeamForm, sends: Sequence[Buffer], recvs: Sequence[Buffer]) -> None:
        own, address, stream = form["rank"], self._engine.address, self._engine.stream()
        if len(recvs[own]):
            recvs[own][:] = sends[own]
        if len(sends) == 1:
            return
        comm = self._team(form)
        # One group: NCCL begins all of them together, so pairs that send to each other do not wait in a circle.
        with self._ring.group():
            for rank, (piece, into) in enumerate(zip(sends, recvs, strict=True)):
                if rank != own and len(piece):
                    self._ring.send(comm, address(piece), len(piece), rank, stream)
                if rank != own and len(into):
                    self._ring.recv(comm, address(into), len(into), rank, stream)

    def _add(self, out: Buffer, parts: Sequence[Buffer], combine: Combine) -> None:
        if len(out):
            out[:] = parts[0]
            for part in parts[1:]:
                combine(out, part)

    def _pair(self, channel: Channel, sends: bool) -> Any:
        """The communicator of one direction; the sender is rank 0."""
        key = channel["peer"], channel["offset"], sends
        if key not in self._pairs:
            # The id goes through the channel in host memory, in order with its other messages.
            name = bytearray(self._ring.unique_id() if sends else ID_BYTES)
            (self._host.send if sends else self._host.recv)(channel, memoryview(name))
            self._pairs[key] = self._ring.join(bytes(name), 0 if sends else 1, 2)
        return self._pairs[key]

    def _team(self, form: TeamForm) -> Any:
        """A team's communicator, by the id of its first member."""
        if form["id"] not in self._teams:
            names = [bytearray(ID_BYTES) for _ in form["workers"]]
            own = bytes(ID_BYTES) if form["rank"] else self._ring.unique_id()
            self._host.all_gather(form, memoryview(own), [memoryview(name) for name in names])
            self._teams[form["id"]] = self._ring.join(bytes(names[0]), form["rank"], len(names))
        return self._teams[form["id"]]

    def _counted(self, form: TeamForm, sent: Sequence[int], received: Sequence[int]) -> None:
        for rank, worker in enumerate(form["workers"]):
            if rank != form["rank"]:
                self._count(worker, sent[rank], received[rank])


class NcclPlane(DevicePlane):
    """heap_bytes: of the heap in host memory."""

    name = "nccl"

    def __init__(self, engine: Any, heap_bytes: int) -> None:
        super().__init__(engine, heap_bytes)
        self._ring = Nccl()

    def unique_id(self) -> str:
        return "pairs and teams have their own"

    def join(self, members: Sequence[int], own: int, unique_id: str) -> NcclTransport:
        if own not in members:
            raise SystemFailure(f"worker {own} is none of {list(members)}")
        return NcclTransport(self._ring, self._engine.direct, self, self.count_bytes)
