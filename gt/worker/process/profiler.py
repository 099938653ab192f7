"""What instructions take, measured while a step is recorded: of each definition the least, as on a machine of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gt.wire.messages import TIMES
from gt.worker.context import Step
from gt.worker.process.memory_budget import Careful
from gt.worker.program.compiled import CompiledProgram
from gt.worker.program.program import Bound, Stamp

STAMPED = 256  # definitions of programs whose last replay is known, forgotten ones among them


class Stamps:
    """When the actions of each program's last replay were, by its definition."""

    def __init__(self) -> None:
        self._by: dict[int, list[Stamp]] = {}

    def put(self, number: int, stamps: list[Stamp]) -> None:
        self._by.pop(number, None)
        self._by[number] = stamps
        if len(self._by) > STAMPED:
            del self._by[next(iter(self._by))]

    def actions(self, programs: Sequence[int], plans: Mapping[int, CompiledProgram]) -> list[Stamp]:
        """Each action of these definitions once, from where it first began to where it last ended."""
        found: dict[str, Stamp] = {}
        for name, start, end in (stamp for number in programs for stamp in self._of(number, plans)):
            found[name] = (name, found[name][1] if name in found else start, end)
        return sorted(found.values(), key=lambda stamp: stamp[1])

    def _of(self, number: int, plans: Mapping[int, CompiledProgram]) -> list[Stamp]:
        plan = plans.get(number)
        return self._by.get(number) or ([] if plan is None else plan.stamps())


class Timed:
    """Bound definitions whose steps are timed, in place of the table of them: what is not timed costs nothing."""

    def __init__(self, steps: Bound | Timed | Careful, clock: Callable[[], float], found: dict[int, float]) -> None:
        self._steps, self._clock, self._found = steps, clock, found

    def __getitem__(self, number: int) -> tuple[Step, int]:
        step, size = self._steps[number]
        return partial(self._call, number, step), size

    def _call(self, number: int, step: Step, code: list, at: int) -> None:
        clock, found = self._clock, self._found
        start = clock()
        step(code, at)
        took = clock() - start
        if took < found.get(number, took + 1):
            found[number] = took


def take(found: dict[int, float]) -> list:
    """What a Done tells of these, and no longer keeps."""
    if not found:
        return []
    some = list(found.items())[:TIMES]
    for number, _ in some:
        del found[number]
    return [part for row in some for part in row]
