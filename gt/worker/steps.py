"""What the steps of a worker work with: its engine, plane, tensors and uploads. A step is one bound instruction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gt.ir.spec import Spec, contiguous
from gt.worker.engine.base import Engine, Moves
from gt.worker.outgoing import Outgoing
from gt.worker.plane.base import Plane
from gt.worker.store import Uploads

Step = Callable[[list, int], None]  # (stream, place of the first operand)
Binder = Callable[["Worker", dict[str, Any]], Step]  # (worker, payload of the definition)


@dataclass
class Worker:
    engine: Engine
    plane: Plane
    send: Callable[..., None]
    tensors: dict[int, Any]
    uploads: Uploads
    outgoing: Outgoing
    epoch: int = 0  # of the Run under way, see store.Uploads
    collectives: Counter[str] = field(default_factory=Counter)

    def tally(self) -> tuple[Counter[str], dict[str, dict[str, int]]]:
        """What was counted so far."""
        return self.collectives.copy(), self.plane.counters()

    def again(self, before: tuple[Counter[str], dict[str, dict[str, int]]]) -> Callable[[], None]:
        """What counts again what was counted since."""
        collectives, (old, now) = self.collectives - before[0], (before[1], self.plane.counters())
        moved = [
            (name, now["bytes_sent"].get(name, 0) - old["bytes_sent"].get(name, 0), count - old["bytes_received"].get(name, 0))
            for name, count in now["bytes_received"].items()
        ]

        def count() -> None:
            self.collectives.update(collectives)
            for name, sent, received in moved:
                self.plane.tally(name, sent, received)

        return count

    def reach(self, workers: Sequence[int]) -> tuple[Moves, Any]:
        """The engine and the plane that serve between these workers: on the device, else through host memory."""
        direct = self.plane.reach(workers)
        if direct is None or self.engine.direct is None:
            return self.engine, self.plane
        return self.engine.direct, direct


@dataclass(frozen=True)
class Blank:
    """An output to be made up when its instruction failed: by its spec, or shape and dtype of operand `like`."""

    place: int
    spec: Spec | None = None
    like: int | None = None
    shape: tuple[int, ...] | None = None

    def make(self, worker: Worker, code: list, at: int) -> None:
        worker.tensors[code[at + self.place]] = worker.engine.zeros(self._spec(worker, code, at))

    def _spec(self, worker: Worker, code: list, at: int) -> Spec:
        source = None if self.like is None else worker.tensors.get(code[at + self.like])
        if self.spec is not None or source is None:
            return self.spec or contiguous(self.shape or (0,), "float32")
        spec = worker.engine.spec(source)
        return spec if self.shape is None else contiguous(self.shape, spec.dtype)
