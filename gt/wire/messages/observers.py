"""Messages between the dispatcher and an observer. The rows of Records are in gt.wire.records."""

from __future__ import annotations

from dataclasses import dataclass

from gt.wire.messages.base import Message

# ---- observers


@dataclass(frozen=True, slots=True)
class Observe(Message):
    """Observer -> dispatcher: asks for Records, and acknowledges those up to number `seen`; 0 at first.

    interval: milliseconds between two Records, at least; the dispatcher may send fewer. log: lines of the instruction log are
    wanted, which the dispatcher writes for nobody else. An observer that acknowledges too little is dropped.
    """

    seen: int
    interval: int = 0
    log: bool = False


@dataclass(frozen=True, slots=True)
class Records(Message):
    """Dispatcher -> observer: the state of server, workers and sessions at one moment.

    number: from 1. rows: see gt.wire.records.
    """

    number: int
    rows: list
