"""What the steps of a worker work with: its engine, plane, tensors and uploads. A step is one bound instruction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gt.worker.downloads import Outgoing
from gt.worker.engine.base import Engine, Moves
from gt.worker.plane.base import Plane, Turns
from gt.worker.process.memory_budget import Budget
from gt.worker.uploads import UploadBuffers

Step = Callable[[list, int], None]  # (stream, place of the first operand)
Binder = Callable[["ExecutionContext", dict[str, Any]], Step]  # (worker, payload of the definition)


class Anew:
    """A step that may be bound anew."""

    __slots__ = ("step",)

    def __init__(self, step: Step) -> None:
        self.step = step

    def __call__(self, code: list, at: int) -> None:
        self.step(code, at)


class Firsts:
    """What a GPU is given for the first time may take long, by what is loaded for it: whether a worker is at such a step.

    steps: those of the definitions, in which each stands by itself from its second time on.
    """

    def __init__(self, steps: dict[int, tuple[Step, int]]) -> None:
        self.under_way = False
        self._steps = steps

    def watched(self, number: int, step: Step) -> Step:
        def first(code: list, at: int) -> None:
            self.under_way = True
            try:
                step(code, at)
            finally:
                self.under_way = False
            once.step = step
            bound, size = self._steps.get(number, (None, 0))
            if bound is once:
                self._steps[number] = step, size

        once = Anew(first)
        return once


@dataclass
class ExecutionContext:
    engine: Engine
    plane: Plane
    send: Callable[..., None]
    tensors: dict[int, Any]
    uploads: UploadBuffers
    outgoing: Outgoing
    budget: Budget = field(default_factory=Budget)
    epoch: int = 0  # of the Run under way, see store.Uploads
    collectives: Counter[str] = field(default_factory=Counter)

    def tally(self) -> Tally:
        return Tally(self.collectives.copy(), self.plane.counters(), self.plane.turns())

    def since(self, before: Tally) -> Counted:
        now = self.tally()
        sent, received = ((before.moved[way], now.moved[way]) for way in ("bytes_sent", "bytes_received"))
        moved = [
            (name, sent[1].get(name, 0) - sent[0].get(name, 0), received[1].get(name, 0) - received[0].get(name, 0))
            for name in dict.fromkeys((*sent[1], *received[1]))
        ]
        after = {key: turn for key, turn in now.turns.items() if before.turns.get(key, 0) != turn}
        old = {key: before.turns.get(key, 0) for key in after}
        return Counted(self, now.collectives - before.collectives, moved, old, after)

    def reach(self, workers: Sequence[int]) -> tuple[Moves, Any]:
        """The engine and the plane that serve between these workers: on the device, else through host memory. What comes from
        none of them stays on the device.
        """
        direct = self.plane.reach(workers) if workers else self.plane
        if direct is None or self.engine.direct is None:
            return self.engine, self.plane
        return self.engine.direct, direct


@dataclass(frozen=True, slots=True)
class Tally:
    """What was counted so far, and how far channels have got."""

    collectives: Counter[str]
    moved: dict[str, dict[str, int]]
    turns: Turns


@dataclass(frozen=True, slots=True)
class Counted:
    """What carrying out some rows counted, and how far it took channels."""

    worker: ExecutionContext
    collectives: Counter[str]
    moved: list[tuple[str, int, int]]  # peer, bytes to and from it
    before: Turns
    after: Turns

    def again(self) -> None:
        """They were carried out again, by a device that tells nobody."""
        self._count(1)
        self.worker.plane.resume(self.after)

    def undo(self) -> None:
        """They were not carried out."""
        self._count(-1)
        self.worker.plane.resume(self.before)

    def _count(self, times: int) -> None:
        for name, count in self.collectives.items():
            self.worker.collectives[name] += times * count
        for name, sent, received in self.moved:
            self.worker.plane.tally(name, times * sent, times * received)
