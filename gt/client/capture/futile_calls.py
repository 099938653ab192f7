"""Recorded calls that gave no program.

Their reasons are kept for `explain()` and warned of. After some in a row, calls run for a while without being recorded. The
calls wait for others of their kind.
"""

from __future__ import annotations

import logging
import re

from gt.client.capture.boundary import OUTSIDE, RecordedCall
from gt.client.capture.recording import SAME
from gt.client.trace.recorder import Recorder

log = logging.getLogger("gt")
MAX_FUTILE_CALLS = 4  # recorded calls in a row without a program; the function then runs eagerly for some calls
MAX_EAGER_CALLS = 64  # calls that run eagerly before the next recording; the number doubles up to this
MAX_WAITING = 8  # recorded calls of other kinds that are kept
MAX_REASONS = 20  # that explain() shows of one function
MAX_WARNINGS_PER_FUNCTION = 100
_FLAGS = (bool, str, type(None))
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


class WaitingCalls:
    """The last recorded call of each kind, which the next one of that kind is compared with.

    Kinds differ in arguments and modes, in the gradients that are there, and in flags: steps that accumulate gradients
    alternate, and so do training and evaluation.
    """

    def __init__(self) -> None:
        self._calls: list[RecordedCall] = []  # newest last
        self.newest: tuple | None = None  # the newest call's key, while it waits

    def add(self, call: RecordedCall | None) -> None:
        """Keep a call, if it may be compared with others."""
        if call is not None:
            self._calls = [*self._calls[1 - MAX_WAITING :], call]
            self.newest = call.key

    def take(self, recorder: Recorder, key: tuple, kind: tuple) -> RecordedCall | None:
        """The call with this key and kind of state, which waits no longer.

        Values of state that it has read have to be those of now: a step with `if self.count % 3 == 0` has two kinds of calls.
        """
        self._calls = [call for call in self._calls if call.tape.recorder is recorder and not call.ended()]
        for n, call in enumerate(self._calls):
            if call.key == key and call.kind == kind and all(read.holds(recorder) for read in call.tape.argument_reads):
                return self._calls.pop(n)
        return None

    def clear(self) -> None:
        """Forget all of them."""
        self._calls, self.newest = [], None


class RecordingPauses:
    """Counts recorded calls without a program. After some in a row, a number of calls run without being recorded.

    Calls whose Python has to run have a pause of their own if all of them have the same flags among their arguments: a step may
    log at each tenth call.
    """

    def __init__(self) -> None:
        self._calls_left = 0  # calls that are not recorded before the next that is
        self._futile_calls = 0  # recorded calls in a row without a program
        self._next_pause = MAX_FUTILE_CALLS
        self._cut: list | None = None  # flags of calls whose Python has to run
        self._cut_calls_left = 0  # of them

    def holds(self, key: tuple) -> bool:
        """True if a call with this key is not recorded."""
        return bool(self._calls_left or (self._cut_calls_left and _flags(key) == self._cut))

    def take(self, key: tuple) -> None:
        """One call runs without being recorded."""
        if self._calls_left:
            self._calls_left -= 1
        elif self._cut_calls_left and _flags(key) == self._cut:
            self._cut_calls_left -= 1

    def count(self, key: tuple, kept: bool, cut: bool) -> bool:
        """Count a recorded call: True if a pause begins. kept: it gave a program.

        cut: it reads a value or prints, and so will the next ones.
        """
        flags = _flags(key)
        if kept:
            self._futile_calls, self._next_pause = 0, MAX_FUTILE_CALLS
            self._cut = None if flags == self._cut else self._cut
            return False
        if cut and self._cut in (None, flags):
            self._cut, self._cut_calls_left = flags, MAX_EAGER_CALLS
            return True
        self._futile_calls += 1
        if cut:
            self._futile_calls, self._next_pause = MAX_FUTILE_CALLS, MAX_EAGER_CALLS
        if self._futile_calls < MAX_FUTILE_CALLS:
            return False
        # After the pause two more calls are recorded, enough to agree, before the next pause, twice as long
        self._futile_calls, self._calls_left = MAX_FUTILE_CALLS - 2, self._next_pause
        self._next_pause = min(2 * self._next_pause, MAX_EAGER_CALLS)
        return True


def _flags(key: tuple) -> list:
    """The arguments in a call's key that are truth values, texts or None, with their places."""
    rows = (row for row in enumerate(key[1 : 1 + key[0].num_leaves]) if isinstance(row[1], tuple))
    return [(place, leaf) for place, leaf in rows if leaf[0] in _FLAGS]
