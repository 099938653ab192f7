"""Texts that GT prints and parses: lines of a plan, sizes (16.2 KiB) and counts (2 workers).

`%2: f32[8,32] [S(1)] = aten.mm %0 %1  # model.py:12 pp_stage0_colpar`. Golden tests, the instruction log and
errors share this notation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
MAX_BYTES = 1 << 62
_SIZE = re.compile(rf"(?a:(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)}))")
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


def in_bytes(text: str) -> float | None:
    """The bytes that a size such as 2GiB or 512 B names, None for another text, or for more than a program can have."""
    match = _SIZE.fullmatch(text.strip())
    nbytes = float(match[1]) * UNITS[match[2]] if match else None
    return nbytes if nbytes is not None and nbytes < MAX_BYTES else None


def size(count: float) -> str:
    """A number of bytes for a reader: 512 B, 16.2 KiB."""
    unit, by = next(((u, b) for u, b in reversed(UNITS.items()) if count >= b and u), ("B", 1))
    return f"{count:.0f} B" if by == 1 else f"{count / by:.1f} {unit}"


def counted(count: int, noun: str) -> str:
    """1 worker, 2 workers."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
