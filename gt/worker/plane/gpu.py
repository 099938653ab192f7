"""A plane for memory of devices, over plane shm. Its members form a world once the dispatcher has named them (World.members).

Plane shm serves host memory, and workers outside of the world. Members wait for one another on their streams, and such a wait
cannot be cancelled: when one member dies, the others' processes have to end.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from gt.errors import SystemFailure
from gt.worker.plane.base import SlotCursors
from gt.worker.plane.shm import ShmPlane

log = logging.getLogger("gt.worker")


class DevicePlane(ShmPlane):
    """engine: of a GPU worker."""

    name = ""  # a value of GT_TRANSPORT; a unique id begins with it
    _ring: Any = None  # NCCL's library, None without it

    def __init__(self, engine: Any, heap_bytes: int) -> None:
        super().__init__(heap_bytes)
        self._engine = engine
        self._transport: Any = None  # moves memory of the device, once the world is formed
        self._members: tuple[int, ...] = ()  # workers of the world that this process is in

    @abstractmethod
    def unique_id(self) -> str:
        """The id by which the other members join this process."""

    @abstractmethod
    def join(self, members: Sequence[int], own: int, unique_id: str) -> Any:
        """Meet the members. The result has a plane's methods for memory of the device, and a `name`; None for host memory."""

    def open(self, index: int = -1) -> dict[str, Any]:
        return {**super().open(index), "unique_id": f"{self.name}:{self.unique_id()}"}

    def form(self, members: Sequence[int], own: int, unique_id: str) -> None:
        """Meet the other members; waits for them."""
        # The first member's id names its plane: members with another GT_TRANSPORT would wait for ever.
        name, _, rest = unique_id.partition(":")
        if name != self.name:
            raise SystemFailure(f"this worker moves data by {self.name}, others by {name}: set GT_TRANSPORT for all of them")
        self._members = tuple(members)
        self._transport = self.join(members, own, rest)
        if self._transport is not None:
            self.transport = self._transport.name
        log.info("in one %s world with workers %s", self.transport, list(members))

    def device_transport(self, workers: Sequence[int]) -> Any:
        """The transport for memory of the device between these workers, whether or not this one is among them."""
        return self._transport if all(index in self._members for index in workers) else None

    def batch(self) -> AbstractContextManager:
        return super().batch() if self._transport is None else self._transport.batch()

    def reset_cursors(self, channels: Iterable[Sequence[int]]) -> None:
        if self._transport is not None:
            self._transport.reset_cursors(channels)

    def cursors(self) -> SlotCursors:
        return {} if self._transport is None else self._transport.cursors()

    def restore_cursors(self, cursors: SlotCursors) -> None:
        if self._transport is not None:
            self._transport.restore_cursors(cursors)

    def count_bytes(self, index: int, sent: int, received: int) -> None:
        self.count(self._peer(index), sent, received)
