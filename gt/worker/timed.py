"""What instructions take, measured while a step is recorded: of each definition the least, as on a machine of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gt.wire.messages import TIMES
from gt.worker.program import Bound
from gt.worker.steps import Step


class Timed:
    """Bound definitions whose steps are timed, in place of the table of them: what is not timed costs nothing."""

    def __init__(self, steps: Bound, clock: Callable[[], float], found: dict[int, float]) -> None:
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
