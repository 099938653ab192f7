"""Profiles of instructions, measured while a step is recorded: the least time of each definition, as on an idle machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gt.wire.messages import MAX_TIMES
from gt.worker.instructions.step import Step, Steps
from gt.worker.program.compiled import CompiledProgram
from gt.worker.program.program import ActionTime

MAX_PROGRAMS = 256  # definitions whose last replay is known, forgotten ones included


class ActionTimes:
    """Times of the actions of each program's last replay, by definition."""

    def __init__(self) -> None:
        self._by: dict[int, list[ActionTime]] = {}

    def put(self, number: int, times: list[ActionTime]) -> None:
        self._by.pop(number, None)
        self._by[number] = times
        if len(self._by) > MAX_PROGRAMS:
            del self._by[next(iter(self._by))]

    def actions(self, programs: Sequence[int], compiled: Mapping[int, CompiledProgram]) -> list[ActionTime]:
        """Each action of these definitions once, from where it first began to where it last ended."""
        times: dict[str, ActionTime] = {}
        for name, start, end in (action for number in programs for action in self._of(number, compiled)):
            times[name] = (name, times[name][1] if name in times else start, end)
        return sorted(times.values(), key=lambda action: action[1])

    def _of(self, number: int, compiled: Mapping[int, CompiledProgram]) -> list[ActionTime]:
        program = compiled.get(number)
        return self._by.get(number) or ([] if program is None else program.action_times())


class TimedSteps:
    """A table of steps that times each call. A stream that is not timed uses the plain table."""

    def __init__(self, steps: Steps, clock: Callable[[], float], times: dict[int, float]) -> None:
        self._steps, self._clock, self._times = steps, clock, times

    def __getitem__(self, number: int) -> tuple[Step, int]:
        step, size = self._steps[number]
        return partial(self._call, number, step), size

    def _call(self, number: int, step: Step, code: list, at: int) -> None:
        clock, times = self._clock, self._times
        start = clock()
        step(code, at)
        seconds = clock() - start
        if seconds < times.get(number, seconds + 1):
            times[number] = seconds


def take_times(times: dict[int, float]) -> list:
    """The times that a Done carries, which are removed here."""
    if not times:
        return []
    rows = list(times.items())[:MAX_TIMES]
    for number, _ in rows:
        del times[number]
    return [part for row in rows for part in row]
