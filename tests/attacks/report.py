"""The findings of a run, as a table for the documents and as JSON."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.attacks.case import Case
from tests.attacks.ground import Sign

CRASH = "worker crash by op"  # torch's own fault: said apart, with the op's name
LISTED = 20  # findings that the table names; the JSON has all


@dataclass
class Finding:
    kind: str
    cause: str
    text: str
    part: str
    after: float  # seconds since the run began
    file: str = ""
    count: int = 1
    again: str = "not tried"
    steps: int = 0


@dataclass
class Findings:
    """One entry a kind and cause; a case's file for the first of each."""

    folder: Path
    entries: dict[tuple[str, str], Finding] = field(default_factory=dict)

    def add(self, sign: Sign, case: Case, after: float) -> Finding:
        key = (sign.kind, sign.cause)
        if key in self.entries:
            self.entries[key].count += 1
            return self.entries[key]
        name = re.sub(r"\W+", "-", f"{sign.kind} {sign.cause}")[:80].strip("-")
        path = self.folder / f"{name}.json"
        case.save(path)
        steps = len(case.steps)
        self.entries[key] = Finding(sign.kind, sign.cause, sign.text, case.part, round(after, 1), str(path), steps=steps)
        return self.entries[key]

    def __iter__(self) -> Any:
        return iter(self.entries.values())


@dataclass
class Counts:
    """Counts of cases, mutations and ops."""

    cases: Counter = field(default_factory=Counter)  # by part
    mutations: Counter = field(default_factory=Counter)  # by message and field
    ops: set[str] = field(default_factory=set)
    carried_out: set[str] = field(default_factory=set)  # ops that gave a result at least once
    costs: dict[str, float] = field(default_factory=dict)  # what was said -> seconds of the dispatcher's CPU at most


def at(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


def table(rows: dict[str, Any]) -> str:
    """A Markdown table of the figures, then one of the findings."""
    findings = rows.pop("findings")
    lines = ["| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items()), ""]
    if findings:
        lines += ["| finding | cause | times | first after (s) | reproduces | text |", "|---|---|---|---|---|---|"]
        for one in findings[:LISTED]:
            text = re.sub(r"[^\x20-\x7e]", "?", one["text"])[:140].replace("|", "/")
            parts = (one["kind"], one["cause"].replace("|", "/")[:60], one["count"], one["after"], one["again"], text)
            lines.append("| " + " | ".join(map(str, parts)) + " |")
        if len(findings) > LISTED:
            lines.append(f"| {len(findings) - LISTED} more | | | | | |")
    return "\n".join(lines)
