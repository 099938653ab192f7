"""Records that a session's parts pass to one another: origins of ops, causes of failures, plans of ops."""

from __future__ import annotations

from dataclasses import dataclass, field

from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.sharding.groups import Meaning
from gt.errors import GTError
from gt.ir.instr import Define
from gt.ir.layout import Layout

Bound = tuple[Worker, Define]


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Line of the user's program that issued an op. group: nested contexts, `outer/inner`; target: where a transfer leads."""

    file: str
    line: int
    group: str
    backward: bool
    micro: int = -1  # micro-batch
    meaning: Meaning | None = None
    target: Meaning | None = None

    def note(self, extra: str = "") -> str:
        """Its line and group, for plan lines."""
        where = f"{self.file.rpartition('/')[2]}:{self.line}" if self.file else ""
        return " ".join(filter(None, (extra, where, self.group.rpartition("/")[2], "backward" if self.backward else "")))


NO_ORIGIN = Origin("", 0, "", False)


@dataclass(slots=True)
class Cause:
    """The reason why values are worthless. lost: the index of a lost worker, else -1. seq: of the op that failed, else -1.

    full: a worker had no room, as it may have none for the ops after it: of such ones the first is told.
    """

    error: GTError
    lost: int = -1
    seq: int = -1
    full: bool = False


@dataclass(frozen=True, slots=True)
class Logged:
    """Numbers that a program logs. steps: calls of gt.log, -1 if it has not told any."""

    steps: int = -1
    values: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class OpPlan:
    """Layouts that an op wants of its inputs and gives its outputs; `direct` if the inputs had them when it was planned."""

    wants: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    bound: list[Bound]
    direct: bool
    forms: dict[Origin, str] = field(default_factory=dict)  # its lines in the instruction log
