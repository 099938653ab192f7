"""State that the steps of a worker share: its engine, plane, tensors and uploads, and counters that a replay advances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gt.worker.arenas import WorkerArenas
from gt.worker.downloads import Downloads
from gt.worker.engine.base import Engine, Moves
from gt.worker.instructions.step import Step, StepTable
from gt.worker.offload.host_ops import OpsInHostMemory
from gt.worker.offload.tensors import OffloadedTensors
from gt.worker.plane.base import Plane, SlotCursors
from gt.worker.process.memory_budget import Budget
from gt.worker.uploads import UploadBuffers

Binder = Callable[["ExecutionContext", dict[str, Any]], Step]  # (worker, payload of the definition)


class Rebindable:
    """A step that another step may replace."""

    __slots__ = ("step",)

    def __init__(self, step: Step) -> None:
        self.step = step

    def __call__(self, code: list, at: int) -> None:
        self.step(code, at)


class FirstLaunch:
    """Steps that a GPU executes for the first time, which may take long: the driver loads their kernels.

    `under_way` is True while such a step runs. From its second time on a step replaces its wrapper in the table of steps.
    """

    def __init__(self, steps: StepTable) -> None:
        self.under_way = False
        self._steps = steps

    def wrap(self, number: int, step: Step) -> Step:
        """The step of a definition, to be marked as under way when it runs for the first time."""

        def first(code: list, at: int) -> None:
            self.under_way = True
            try:
                step(code, at)
            finally:
                self.under_way = False
            # Programs that are bound already hold the wrapper: it calls the plain step from now on. The table gets the step
            # itself.
            wrapper.step = step
            bound, size = self._steps.get(number, (None, 0))
            if bound is wrapper:
                self._steps[number] = step, size

        wrapper = Rebindable(first)
        return wrapper


@dataclass
class ExecutionContext:
    """The objects that steps of instructions work with: one worker's engine, plane, tensors, buffers and memory budget."""

    engine: Engine
    plane: Plane
    send: Callable[..., None]
    tensors: OffloadedTensors
    uploads: UploadBuffers
    downloads: Downloads
    arenas: WorkerArenas
    budget: Budget = field(default_factory=Budget)
    epoch: int = 0  # epoch of the Run under way, see uploads.UploadBuffers
    base: int = 0  # op number from which the Run under way counts
    collectives: Counter[str] = field(default_factory=Counter)

    @cached_property
    def host_ops(self) -> OpsInHostMemory:
        return OpsInHostMemory(self.tensors, self.engine.lane())

    def counters(self) -> Counters:
        return Counters(self.collectives.copy(), self.plane.counters(), self.plane.cursors())

    def since(self, before: Counters) -> CountedWork:
        """The advance of the counters since `before`."""
        now = self.counters()
        sent, received = ((before.transferred[way], now.transferred[way]) for way in ("bytes_sent", "bytes_received"))
        transferred = [
            (name, sent[1].get(name, 0) - sent[0].get(name, 0), received[1].get(name, 0) - received[0].get(name, 0))
            for name in dict.fromkeys((*sent[1], *received[1]))
        ]
        # Only channels that moved: a replay must not turn back those that other work uses.
        after = {key: slot for key, slot in now.cursors.items() if before.cursors.get(key, 0) != slot}
        old = {key: before.cursors.get(key, 0) for key in after}
        return CountedWork(self, now.collectives - before.collectives, transferred, old, after)

    def route(self, workers: Sequence[int]) -> tuple[Moves, Any]:
        """Engine and plane that serve transfers between these workers: on the device where possible, else by host memory.

        Data that comes from no other worker stays on the device.
        """
        direct = self.plane.device_transport(workers) if workers else self.plane
        if direct is None or self.engine.direct is None:
            return self.engine, self.plane
        return self.engine.direct, direct


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of a worker at one moment, and the slots that its channels use next."""

    collectives: Counter[str]
    transferred: dict[str, dict[str, int]]
    cursors: SlotCursors


@dataclass(frozen=True, slots=True)
class CountedWork:
    """The advance of the counters by some rows."""

    worker: ExecutionContext
    collectives: Counter[str]
    transferred: list[tuple[str, int, int]]  # peer, bytes to it, bytes from it
    before: SlotCursors
    after: SlotCursors

    def count_again(self) -> None:
        """The device has executed the rows once more, with no code of this worker."""
        self._count(1)
        self.worker.plane.restore_cursors(self.after)

    def undo(self) -> None:
        """The rows were not executed."""
        self._count(-1)
        self.worker.plane.restore_cursors(self.before)

    def _count(self, times: int) -> None:
        for name, count in self.collectives.items():
            self.worker.collectives[name] += times * count
        for name, sent, received in self.transferred:
            self.worker.plane.tally(name, times * sent, times * received)
