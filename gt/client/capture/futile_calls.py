"""Recorded calls that gave no program.

Their reasons are kept for `explain()` and warned of. After some in a row, calls run for a while without being recorded.
"""

from __future__ import annotations

import logging
import re

from gt.client.capture.boundary import OUTSIDE
from gt.client.capture.recording import SAME

log = logging.getLogger("gt")
MAX_FUTILE_CALLS = 4  # recorded calls in a row without a program; the function then runs eagerly for some calls
MAX_EAGER_CALLS = 64  # calls that run eagerly before the next recording; the number doubles up to this
MAX_REASONS = 20  # that explain() shows of one function
MAX_WARNINGS_PER_FUNCTION = 100
_CHANGE = re.compile(r" from \S+ to \S+|; the last differed in .*")
_NUMBER = re.compile(r"-?\d[\d.e+-]*")


class Reasons:
    """The reasons why calls of one function were not replayed. A reason of one kind is kept, and warned of, once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._reasons: list[str] = []  # newest last
        self._warned: set[str] = set()

    @property
    def last(self) -> str:
        return self._reasons[-1] if self._reasons else "no two calls agreed"

    def add(self, reason: str) -> None:
        """Keep a reason, the newest last. Changes of one value are one reason, not one a step."""
        kind = _CHANGE.sub("", reason)
        others = [text for text in self._reasons if _CHANGE.sub("", text) != kind]
        self._reasons = [*others[1 - MAX_REASONS :], reason]

    def warn(self, text: str) -> None:
        kind = _NUMBER.sub("#", text)  # a learning rate that changes is one reason, not one a step
        if kind not in self._warned and len(self._warned) < MAX_WARNINGS_PER_FUNCTION:
            self._warned.add(kind)
            log.warning("%s: %s", self._name, text)

    def lines(self, with_programs: bool) -> list[str]:
        """The reasons as lines for `explain()`, shorter if the function has programs all the same."""
        label = "an earlier call was not kept" if with_programs else "a call was not kept"
        texts = [text.replace(OUTSIDE, "").replace(SAME, "") if with_programs else text for text in self._reasons]
        return [f"  {label}: {text}" for text in texts]


class RecordingPauses:
    """Counts recorded calls without a program. After some in a row, a number of calls run without being recorded."""

    def __init__(self) -> None:
        self.calls_left = 0  # calls that are not recorded before the next that is
        self._futile_calls = 0  # recorded calls in a row without a program
        self._next_pause = MAX_FUTILE_CALLS

    def take(self) -> None:
        """One call runs without being recorded."""
        self.calls_left -= bool(self.calls_left)

    def count(self, kept: bool, cut: bool) -> bool:
        """Count a recorded call: True if a pause begins. kept: it gave a program.

        cut: it reads a value or prints, and so will the next ones.
        """
        if kept:
            self._futile_calls, self._next_pause = 0, MAX_FUTILE_CALLS
            return False
        self._futile_calls += 1
        if cut:
            self._futile_calls, self._next_pause = MAX_FUTILE_CALLS, MAX_EAGER_CALLS
        if self._futile_calls < MAX_FUTILE_CALLS:
            return False
        # After the pause two more calls are recorded, enough to agree, before the next pause, twice as long
        self._futile_calls, self.calls_left = MAX_FUTILE_CALLS - 2, self._next_pause
        self._next_pause = min(2 * self._next_pause, MAX_EAGER_CALLS)
        return True
