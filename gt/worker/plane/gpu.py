"""A plane whose members move memory of their devices once the dispatcher has named them (World.members); under it plane shm.

Plane shm serves whatever is in host memory, and members that are not in the world. What the members do on a stream cannot be
taken back: when one dies, the others' processes have to end.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gt.errors import SystemFailure
from gt.worker.plane.base import Turns
from gt.worker.plane.shm import ShmPlane

log = logging.getLogger("gt.worker")


class DevicePlane(ShmPlane):
    """engine: of a GPU worker."""

    name = ""  # as GT_TRANSPORT has it; a unique id says which plane's it is

    def __init__(self, engine: Any, heap_bytes: int) -> None:
        super().__init__(heap_bytes)
        self._engine = engine
        self._reached: Any = None  # what moves memory of the device
        self._members: tuple[int, ...] = ()  # of the world that this process is in

    @abstractmethod
    def unique_id(self) -> str:
        """What the others need to join this process."""

    @abstractmethod
    def join(self, members: Sequence[int], own: int, unique_id: str) -> Any:
        """Meet them; what has the methods of a plane for memory of the device, and its `name`. None for host memory."""

    def open(self, index: int = -1) -> dict[str, Any]:
        return {**super().open(index), "unique_id": f"{self.name}:{self.unique_id()}"}

    def form(self, members: Sequence[int], own: int, unique_id: str) -> None:
        """Meet the other members; waits for them."""
        name, _, rest = unique_id.partition(":")
        if name != self.name:
            raise SystemFailure(f"this worker moves data by {self.name}, others by {name}: set GT_TRANSPORT for all of them")
        self._members = tuple(members)
        self._reached = self.join(members, own, rest)
        if self._reached is not None:
            self.transport = self._reached.name
        log.info("in one %s world with workers %s", self.transport, list(members))

    def reach(self, workers: Sequence[int]) -> Any:
        """What moves memory of the device between these workers (this one among them or not)."""
        return self._reached if all(index in self._members for index in workers) else None

    def batch(self) -> AbstractContextManager:
        return nullcontext() if self._reached is None else self._reached.batch()

    def rewind(self, channels: Iterable[Sequence[int]]) -> None:
        if self._reached is not None:
            self._reached.rewind(channels)

    def turns(self) -> Turns:
        return {} if self._reached is None else self._reached.turns()

    def resume(self, turns: Turns) -> None:
        if self._reached is not None:
            self._reached.resume(turns)

    def count_bytes(self, index: int, sent: int, received: int) -> None:
        self.count(self._peer(index), sent, received)
