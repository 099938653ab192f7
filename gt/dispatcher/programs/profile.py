"""Measured times of instructions, as workers report them while a step is recorded. Reports are not trusted but checked."""

from __future__ import annotations

from collections.abc import Iterable

from gt.dispatcher.session import ClientSession
from gt.errors import ProtocolError
from gt.wire.messages import MAX_TIMES

MAX_SECONDS = 1e6  # longest time of an instruction that is believed


def record_times(sessions: Iterable[ClientSession], times: list) -> None:
    """Keep Done.times with the sessions whose definitions they are of; ProtocolError for what is no time."""
    rows = list(zip(times[::2], times[1::2]))
    if len(times) % 2 or len(rows) > MAX_TIMES:
        raise ProtocolError(
            f"Done.times has {len(times)} numbers, want [number, seconds, ...] of {MAX_TIMES} definitions at most"
        )
    for number, seconds in rows:
        if type(number) is not int or type(seconds) is not float or not 0 <= seconds <= MAX_SECONDS:
            raise ProtocolError(f"Done.times has {number!r:.40}, {seconds!r:.40}, want a definition and its seconds")
    # Numbers of definitions are unique over all sessions, and each session takes its own. The fewest seconds are kept: slower
    # executions have waited for something.
    for session in sessions:
        least, known = session.programs.times, session.emitter.defined
        for number, seconds in rows:
            if number in known:
                least[number] = min(seconds, least.get(number, seconds))
