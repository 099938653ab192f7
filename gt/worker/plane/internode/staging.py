"""Tensors of GPUs to and from other hosts through pinned memory: copies of the device, and the host's plane between them.

The bytes on the wire are those of host memory, so the other end may be a worker of any kind. A message is copied and sent slot
by slot, as the host's plane divides it: while one is sent, the device copies the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gt.worker.engine.base import Direct, PinnedBuffer
from gt.worker.plane.base import Buffer, Channel, Combine, OnIssued, TeamForm, nothing
from gt.worker.plane.collectives import parts


class StagedTransport:
    """The transfers and collectives of plane.base.Plane on flat uint8 tensors of `engine` (Engine.direct).

    host: a NetPlane. host_combine(op, dtype): a reduction of host memory. A memoryview as data is the part of a member that
    has none (gt.worker.instructions.communicate): it goes to the host's plane as it is.
    """

    def __init__(self, host: Any, engine: Direct, host_combine: Callable[[str, str], Combine]) -> None:
        self._host, self._engine, self._host_combine = host, engine, host_combine

    def send(self, channel: Channel, data: Buffer) -> None:
        if isinstance(data, memoryview):
            self._host.send(channel, data)
            return
        buffer = self._engine.bounce(len(data))
        # All copies are issued first, in order; each chunk is sent as soon as its own copy is done.
        copies = [(start, stop, buffer.fetch(data[start:stop], start)) for start, stop in parts(len(data), channel["bytes"])]

        def chunks() -> Iterator[memoryview]:
            for start, stop, wait in copies:
                wait()
                yield buffer.memory[start:stop]

        self._host.send_chunks(channel, len(data), chunks())

    def recv(self, channel: Channel, into: Buffer) -> None:
        if isinstance(into, memoryview):
            self._host.recv(channel, into)
            return
        buffer = self._engine.bounce(len(into))
        for start, stop in self._host.recv_chunks(channel, buffer.memory):
            buffer.put(into[start:stop], start)

    def all_reduce(self, form: TeamForm, data: Buffer, combine: Any, on_issued: OnIssued = nothing) -> None:
        if isinstance(data, memoryview):
            self._host.all_reduce(form, data, combine, on_issued)
            return
        (buffer,) = self._fetched([data])
        self._host.all_reduce(form, buffer.memory, self._host_combine(combine.op, combine.kind))
        buffer.put(data, 0)
        on_issued()

    def all_gather(self, form: TeamForm, data: Buffer, outs: Sequence[Buffer], on_issued: OnIssued = nothing) -> None:
        if isinstance(data, memoryview):
            self._host.all_gather(form, data, outs, on_issued)
            return
        (buffer,), rooms = self._fetched([data]), self._rooms(outs)
        self._host.all_gather(form, buffer.memory, [room.memory for room in rooms])
        self._put(rooms, outs)
        on_issued()

    def reduce_scatter(
        self, form: TeamForm, sections: Sequence[Buffer], out: Buffer, combine: Any, on_issued: OnIssued = nothing
    ) -> None:
        if isinstance(out, memoryview):
            self._host.reduce_scatter(form, sections, out, combine, on_issued)
            return
        buffers, (room,) = self._fetched(sections), self._rooms([out])
        add = self._host_combine(combine.op, combine.kind)
        self._host.reduce_scatter(form, [buffer.memory for buffer in buffers], room.memory, add)
        self._put([room], [out])
        on_issued()

    def all_to_all(self, form: TeamForm, sends: Sequence[Buffer], recvs: Sequence[Buffer], longest: int = 0) -> None:
        if isinstance(sends[0], memoryview):
            self._host.all_to_all(form, sends, recvs, longest)
            return
        buffers, rooms = self._fetched(sends), self._rooms(recvs)
        self._host.all_to_all(form, [buffer.memory for buffer in buffers], [room.memory for room in rooms], longest)
        self._put(rooms, recvs)

    # ----

    def _fetched(self, views: Sequence[Buffer]) -> list[PinnedBuffer]:
        """The bytes of views, in host memory. All copies are issued before the first is awaited."""
        # One stream carries the copies, so awaiting them in order costs no time.
        buffers = self._rooms(views)
        waits = [buffer.fetch(view, 0) for buffer, view in zip(buffers, views, strict=True) if len(view)]
        for wait in waits:
            wait()
        return buffers

    def _rooms(self, views: Sequence[Buffer]) -> list[PinnedBuffer]:
        return [self._engine.bounce(len(view)) for view in views]

    def _put(self, rooms: Sequence[PinnedBuffer], views: Sequence[Buffer]) -> None:
        for room, view in zip(rooms, views, strict=True):
            if len(view):
                room.put(view, 0)
