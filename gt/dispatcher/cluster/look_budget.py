"""The rate at which an observed server looks at its workers: looks take a small share of the run's CPU time. Pure.

A look wakes every process that takes part, which costs more than its counting. So a look has about the same cost however much a
run does, and a run that does little is looked at less often.
"""

from __future__ import annotations

from gt.dispatcher.cluster.observation import Answers

PROCESS_SECONDS = 1.5e-3  # CPU time of a look for each worker: in both processes, without its counting
OBSERVER_SECONDS = 6e-3  # for each observer: its Records are packed, sent, read and shown. Measured on a loaded machine
OP_SECONDS = 1e-5  # that an op takes in a program and the dispatcher, at least: workers' time is known, theirs is not
MAX_SHARE = 0.006  # part of a run's CPU time that looks may take
IDLE_CORES = 0.05  # a server whose workers take less does nothing,
IDLE_SHARE = 0.005  # and looks may take this share of a core
MAX_PAUSE_SECONDS = 10.0  # seconds between two looks
MAX_SAVED_LOOKS, MAX_OWED_LOOKS = 4.0, 2.0  # looks


class LookBudget:
    """`pay` for each look; `pause` is the time until the next. What was not used allows a few looks in quick succession."""

    def __init__(self) -> None:
        self._saved = MAX_SAVED_LOOKS  # looks
        self._earned = 0.0  # looks a second
        self._at = self._ops = 0.0
        self._used: dict[str, float] = {}  # by worker: CPU seconds

    def pay(self, now: float, answers: Answers, ops: int, observers: int, counting: float) -> None:
        """Note a look. ops: planned since the start. observers: that are sent its Records. counting: CPU seconds of workers."""
        # A token bucket. Its tokens are looks; it fills at `_earned` looks a second, and each look takes one.
        # Example: 8 busy workers, an observer: 8 cores * 0.006 / (8 * 1.5 ms + 6 ms) = 2.7 looks a second.
        used = {name: _cpu_seconds(answer.stats) for name, answer in answers.items()}
        seconds = now - self._at
        ran = sum(max(0.0, used[name] - self._used.get(name, used[name])) for name in used)
        ran += max(0.0, ops - self._ops) * OP_SECONDS
        cores = ran / seconds if seconds > 0 else 0.0
        cost = PROCESS_SECONDS * len(used) + OBSERVER_SECONDS * observers + counting
        if cost > 0:
            self._earned = (IDLE_SHARE if cores < IDLE_CORES else MAX_SHARE * cores) / cost
            self._saved = max(-MAX_OWED_LOOKS, min(MAX_SAVED_LOOKS, self._saved + self._earned * seconds) - 1)
        self._at, self._ops, self._used = now, ops, used

    @property
    def pause(self) -> float:
        """Seconds from the last look until another is paid for."""
        if self._saved >= 0 or self._earned <= 0:
            return 0.0
        return min(MAX_PAUSE_SECONDS, -self._saved / self._earned)


def _cpu_seconds(stats: dict) -> float:
    value = stats.get("cpu_seconds")
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e12 else 0.0
