"""Texts that GT prints and parses: lines of a plan, sizes (16.2 KiB) and counts (2 workers), and text in a terminal's columns.

`%2: f32[8,32] [S(1)] = aten.mm %0 %1  # model.py:12 pp_stage0_colpar`. Golden tests, the instruction log and
errors share this notation.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from dataclasses import dataclass

from gt.logs import plain

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


# ---- columns of a terminal: a character of East Asia takes two, a mark that is drawn on another takes none

_FILLER = "\0"  # stands for the second column of a character; `plain` leaves none in a text


def _columns(sign: str) -> int:
    if sign.isascii():
        return 1
    return 0 if unicodedata.category(sign) in ("Mn", "Me", "Cf") else 1 + (unicodedata.east_asian_width(sign) in "WF")


def columns(text: str) -> int:
    """Columns that a text takes in a terminal."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def cut(text: str, width: int) -> str:
    """The beginning of a text that takes at most so many columns."""
    if text.isascii():
        return text[:width]
    end = taken = 0
    while end < len(text) and taken + _columns(text[end]) <= width:
        taken, end = taken + _columns(text[end]), end + 1
    return text[:end]


def column(text: str, width: int) -> str:
    """A text in a table's column of so many columns of the terminal: with a blank after it at least."""
    shown = cut(plain(text), width - 1)
    return shown + " " * (width - columns(shown))


def wrapped(text: str, width: int, first: int = 0, rest: int = 0, most: int | None = None) -> list[str]:
    """Lines of at most so many columns. first, rest: blanks before the first line and the others; most: number of lines."""
    text = plain(text)
    if not text.isascii():
        # textwrap counts characters, so a wide one becomes two.
        text = "".join(sign + _FILLER * (_columns(sign) > 1) for sign in text)
        width -= _FILLER in text  # a line may end between a character and its filler
    lines = textwrap.wrap(
        text, width, initial_indent=" " * first, subsequent_indent=" " * rest, max_lines=most, placeholder=" ..."
    )
    return [line.replace(_FILLER, "") for line in lines]
