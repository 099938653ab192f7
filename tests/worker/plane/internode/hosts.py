"""Hosts of GPU workers as threads of one process: planes over loopback, a device that only copies reach, NCCL played."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from gt import env
from gt.wire.liveness import home
from gt.worker.engine.torch import COMBINE, TorchEngine
from gt.worker.engine.torch.gpu.direct import DirectEngine
from gt.worker.plane.internode.planes import InternodePlane
from tests.helpers.limits import limit
from tests.worker.plane import planes
from tests.worker.plane.test_plane_symmetric import Ring

KEY = "00ff" * 16
CPU = TorchEngine("cpu")


class Buffer:
    """An engine.base.BounceBuffer whose copies are late: to the host once they are awaited, to the device by `settle`."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self._host = device, torch.full((nbytes,), 0xEE, dtype=torch.uint8)
        self.memory = memoryview(self._host.numpy()) if nbytes else memoryview(bytearray())

    def fetch(self, source: torch.Tensor, at: int) -> Callable[[], None]:
        self._device.settle()
        value = source.clone()  # in the order of the stream
        return lambda: self._host[at : at + len(value)].copy_(value)  # type: ignore[return-value]

    def put(self, target: torch.Tensor, at: int) -> None:
        self._device.late.append(lambda: target.copy_(self._host[at : at + len(target)]))


class Device(DirectEngine):
    """The direct engine of a played GPU."""

    def __init__(self) -> None:
        super().__init__(CPU, COMBINE)
        self.late: list[Callable[[], Any]] = []
        self.full = False  # out of memory

    def bounce(self, nbytes: int) -> Buffer:
        return Buffer(self, nbytes)

    def staging(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        if self.full:
            raise MemoryError("the device is full")
        return super().staging(shape, dtype)

    def settle(self) -> None:
        """Carry out what has been issued."""
        for copy in self.late:
            copy()
        self.late.clear()


class AbortableRing(Ring):
    """NCCL that buffers nothing. A call ends once its own member aborts it, as NCCL's: without an error, with any result."""

    version = "2.28.9"

    def __init__(self) -> None:
        super().__init__()
        self.aborted: set[tuple[int, int]] = set()  # communicators, each member's own
        self.failures: dict[tuple[int, int], str] = {}
        self.changed, self.closed = threading.Condition(), False

    def join(self, unique_id: bytes, rank: int, count: int) -> Any:
        with self.lock:
            comm = self.made.setdefault(unique_id, (threading.Barrier(count), [b""] * count))
            if self.closed:
                comm[0].abort()
        with contextlib.suppress(threading.BrokenBarrierError):
            comm[0].wait(limit(20))
        return (*comm, rank)

    def _ended(self, comm: Any) -> bool:
        return (id(comm[0]), comm[2]) in self.aborted

    def close(self) -> None:
        """End what waits for members that are gone, as NCCL does once their connections end."""
        with self.lock:
            self.closed = True
            for meeting, _ in self.made.values():
                meeting.abort()

    def failure(self, comm: Any) -> str:
        others = any((id(comm[0]), rank) in self.aborted for rank in range(len(comm[1])))
        return self.failures.get((id(comm[0]), comm[2]), "NCCL: remote process exited" if others else "")

    def abort(self, comm: Any) -> None:
        with self.changed:
            self.aborted.add((id(comm[0]), comm[2]))
            self.changed.notify_all()
        comm[0].abort()

    def send(self, comm: Any, data: int, nbytes: int, rank: int, stream: int) -> None:
        taken: list[bool] = []
        self._wire(comm, comm[2], rank).put((ctypes.string_at(data, nbytes), taken))
        if not vars(self.grouping):
            with self.changed:
                assert self.changed.wait_for(lambda: taken or self._ended(comm), limit(20)), "nobody takes it"

    def recv(self, comm: Any, into: int, nbytes: int, rank: int, stream: int) -> None:
        wire = self._wire(comm, rank, comm[2])
        while not self._ended(comm):
            with contextlib.suppress(queue.Empty):
                data, taken = wire.get(timeout=0.02)
                assert len(data) == nbytes
                ctypes.memmove(into, data, nbytes)
                with self.changed:
                    taken.append(True)
                    self.changed.notify_all()
                return

    def _all(self, comm: Any, data: int, nbytes: int) -> list[torch.Tensor]:
        try:
            return super()._all(comm, data, nbytes)
        except threading.BrokenBarrierError:
            with self.changed:  # the work of a member waits for ever, until the member itself aborts it
                assert self.changed.wait_for(lambda: self._ended(comm), limit(20)), "nobody aborts it"
            return [torch.zeros(nbytes // 4)] * len(comm[1])


class World:
    """Planes of `homes[n]` each. without: pairs of hosts with no connection, which hosts between relay."""

    def __init__(self, homes: str, ring: Any, without: Sequence[str] = ()) -> None:
        self.homes, self.ring, self.without, self.epochs = homes, ring, without, 1
        self.planes: list[Any] = []
        self.devices = [Device() for _ in homes]
        for device in self.devices:
            plane = InternodePlane.__new__(type("Plane", (InternodePlane,), {"join": None, "unique_id": lambda self: ""}))
            plane._ring = ring
            plane.__init__(types.SimpleNamespace(direct=device, combine=CPU.combine), planes.HEAP)
            self.planes.append(plane)
        self.infos = [plane.open() for plane in self.planes]
        self.tell(range(len(homes)))

    def tell(self, living: Sequence[int]) -> None:
        """Another World, of these workers."""
        ways, nccl = [], []
        for a in living:
            for b in living:
                if a < b:
                    near = self.homes[a] == self.homes[b]
                    direct = self.homes[a] + self.homes[b] not in self.without
                    relays = [] if near or direct else [n for n in living if self.homes[a] < self.homes[n] < self.homes[b]][:1]
                    kind = "shm" if near else "tcp" if direct else "via"
                    ways.append([a, b, self.epochs, kind, "127.0.0.1", "127.0.0.1", relays])
                    nccl += [[a, b]] if direct and self.ring is not None else []
        for own in living:
            rows = []
            for n in living:
                row = planes.row(n, self.infos[n])
                rows.append(
                    [*row[:7], home() if self.homes[n] == self.homes[own] else f"home {self.homes[n]}", self.infos[n]["port"]]
                )
            plane = self.planes[own]
            plane.introduce(rows, ways, KEY, own)
            plane.join_by_nccl(nccl)
            plane.world(rows, ways)

    def run(self, work: Callable[[int, Any], Any]) -> list[Any]:
        """work(index, transport between all workers) of each, all at the same time, and all issued work."""

        def member(index: int, plane: Any) -> Any:
            result = work(index, plane.device_transport(range(len(self.homes))))
            self.devices[index].settle()
            return result

        return planes.together(self.planes, member)


@contextlib.contextmanager
def hosts(homes: str, ring: Any = None, without: Sequence[str] = ()) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.environ", {**env.child(), "GT_IFNAME": "lo"})
        world = World(homes, ring, without)
        try:
            yield world
        finally:
            if ring is not None:
                ring.close()
            for plane in world.planes:
                plane.close()
