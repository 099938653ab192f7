"""Plan notation: one line for each step, printed and parsed.

`%2: f32[8,32] [S(1)] = aten.mm %0 %1  # model.py:12 pp_stage0_colpar`. Golden tests, the instruction log and errors share it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LINE = re.compile(
    r"^%(?P<id>-?\d+): (?P<spec>\S+) (?P<layout>\[\S*\]) = (?P<op>[^%#]*?)(?P<ins>(?: %-?\d+)*)(?: on (?P<mesh>[\d,]+))?"
    r"(?:  # (?P<note>.*))?$"
)


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One planned step: its result with spec and layout, the op, its inputs, and a note with the user's line and group."""

    id: int
    spec: str
    layout: str
    op: str
    ins: tuple[int, ...]
    workers: tuple[int, ...]
    note: str = ""

    def __str__(self) -> str:
        ins = "".join(f" %{i}" for i in self.ins)
        note = f"  # {self.note}" if self.note else ""
        return f"%{self.id}: {self.spec} {self.layout} = {self.op}{ins} on {','.join(map(str, self.workers))}{note}"


def parse(line: str) -> PlanLine:
    """Inverse of str(PlanLine); ValueError shows the line."""
    match = LINE.match(line)
    if match is None:
        raise ValueError(f"not a line of a plan: {line!r}")
    ins = tuple(int(i[1:]) for i in match["ins"].split())
    workers = tuple(int(w) for w in (match["mesh"] or "").split(",") if w)
    return PlanLine(int(match["id"]), match["spec"], match["layout"], match["op"].strip(), ins, workers, match["note"] or "")
