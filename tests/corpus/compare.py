"""Two texts of a program compared, and the digests that stand for texts. Knows no program."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

DIGESTS = Path(__file__).with_name("digests.txt")
DIGITS, CONTEXT = 16, 3
MOST, SHOWN = 2000, 60  # lines of each text that are compared from the first difference on, and lines of a diff


@dataclass(frozen=True)
class Changes:
    """Differences that are meant. renames: old and new words. ignored: patterns that are deleted from both texts."""

    renames: Sequence[tuple[str, str]] = ()
    ignored: Sequence[str] = ()

    def before(self, text: str) -> str:
        """A stored text as it is to be now."""
        for old, new in self.renames:
            text = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new.replace("\\", r"\\"), text)
        return self.after(text)

    def after(self, text: str) -> str:
        for pattern in self.ignored:
            text = re.sub(pattern, "", text)
        return text


def difference(name: str, stored: str, now: str, changes: Changes | None = None) -> list[str]:
    """A unified diff from the first difference on, cut where it is long; empty if the texts are equal."""
    changes = changes or Changes()
    before, after = changes.before(stored).splitlines(), changes.after(now).splitlines()
    if before == after:
        return []
    first = _alike(before, after)
    last = min(_alike(before[::-1], after[::-1]), len(before) - first, len(after) - first)
    start = max(0, first - CONTEXT)
    old, new = (text[start : len(text) - last + CONTEXT] for text in (before, after))
    files = f"stored/{name}", f"now/{name} from line {start + 1}"
    lines = list(difflib.unified_diff(old[:MOST], new[:MOST], *files, n=CONTEXT, lineterm=""))
    cut = len(lines) > SHOWN or max(len(old), len(new)) > MOST
    more = [f"... and more: the texts differ within {len(old)} lines, now {len(new)}"] if cut else []
    return lines[:SHOWN] + more


def _alike(a: Sequence[str], b: Sequence[str]) -> int:
    """The number of equal lines at the start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


# ---- digests


def digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:DIGITS]


def write_digests(rows: Iterable[tuple[str, str]], versions: dict[str, str], path: Path = DIGESTS) -> None:
    lines = [f"# {name} {version}" for name, version in versions.items()]
    path.write_text("\n".join([*lines, *(f"{name} {value}" for name, value in rows)]) + "\n")


def read_digests(path: Path = DIGESTS) -> tuple[dict[str, str], dict[str, str]]:
    """Digests by name of program, and the versions of packages that they are of."""
    rows = [line.removeprefix("# ").split() for line in path.read_text().splitlines()]
    heads = sum(1 for _ in _heads(path))
    return {name: value for name, value in rows[heads:]}, {name: value for name, value in rows[:heads]}


def _heads(path: Path) -> Iterator[str]:
    return takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
