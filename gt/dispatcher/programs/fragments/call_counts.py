"""Counts of a function's ops that fragments executed, and the reasons why others were planned one by one."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

from gt.dispatcher.fairness.time_slices import Leavings

MAX_SLOTS = 1024  # functions with counters
MAX_REASONS = 16  # reasons kept for one function


@dataclass(slots=True)
class CallCounts:
    """Ops of a function's calls, and how many of them programs executed."""

    call: int = -1
    ops: int = 0
    carried: int = 0
    last_ops: int = 0
    last_carried: int = 0
    fragments: set[int] = field(default_factory=set)
    why: Counter[str] = field(default_factory=Counter)

    def add(self, call: int, ops: int, why: str) -> None:
        if call != self.call:
            self.call, self.last_ops, self.last_carried = call, 0, 0
        carried = 0 if why else ops
        self.ops += ops
        self.last_ops += ops
        self.carried += carried
        self.last_carried += carried
        if why and (why in self.why or len(self.why) < MAX_REASONS):
            self.why[why] += ops

    def report(self, with_programs: set[int]) -> dict[str, Any]:
        """The body of the answer to InspectFragments. with_programs: numbers of the fragments that have one."""
        return {
            "programs": len(with_programs & self.fragments), "ops": self.ops, "carried": self.carried,
            "last_ops": self.last_ops, "last_carried": self.last_carried,
            "why": [[count, why] for why, count in self.why.most_common()],
        }  # fmt: skip


class SlotCounts:
    """Counts of a session's functions, by the client's slot of each. Beyond a limit the oldest are forgotten."""

    def __init__(self) -> None:
        self._slots: OrderedDict[int, CallCounts] = OrderedDict()

    def at(self, slot: int) -> CallCounts:
        counts = self._slots.setdefault(slot, CallCounts())
        if len(self._slots) > MAX_SLOTS:
            self._slots.popitem(last=False)
        return counts

    def report(self, slot: int, with_programs: set[int]) -> dict[str, Any]:
        return self._slots.get(slot, CallCounts()).report(with_programs)

    def leave(self, leavings: Leavings) -> None:
        leavings.add(self._slots)
