"""The results of a run: counts, and unequal variants by reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from .compare import EQUAL, UNSUPPORTED, WRONG

Row = dict[str, Any]


def counts(rows: Sequence[Row]) -> dict[str, Any]:
    """Variants by number of workers, and database entries that run split with no gather."""
    found: dict[str, Any] = {}
    for workers in sorted({row["workers"] for row in rows}):
        mine = Counter(row["outcome"] for row in rows if row["workers"] == workers)
        total = sum(mine.values())
        found[str(workers)] = {
            "variants": total, **{kind: mine[kind] for kind in (EQUAL, UNSUPPORTED, WRONG)},
            "runs": sum(row["runs"] for row in rows if row["workers"] == workers),
            "share": round(mine[EQUAL] / total, 4),
        }  # fmt: skip
    forms = ("function", "train forward")
    split = [row for row in rows if row["samples_split"] and row["form"] in forms and row["outcome"] == EQUAL]
    found["entries"] = len({row["op"] for row in rows})
    found["entries_split"] = len({row["op"] for row in split})
    found["entries_without_gather"] = len({row["op"] for row in split if row["samples_without_gather"]})
    found["entries_every_sample"] = len(
        {row["op"] for row in split} - {row["op"] for row in split if row["samples_without_gather"] < row["samples_split"]}
    )
    return found


def general(reason: str) -> str:
    """A reason without the numbers and names of one op."""
    reason = re.sub(r"(aten|gt|prims)[.:]+\w+(\.\w+)?", "the op", reason)
    reason = re.sub(r"\b(b8|[fiuc]+8?\w*|complex\d+|bfloat16|float\w+|u?int\d+)\[[\d, x]*\]", "a tensor", reason)
    reason = re.sub(r"\[[\d, -]*\]", "[..]", reason)
    reason = re.sub(r"\S+\.py:\d+", "a line", reason)
    return re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "N", reason)[:160]


def by_reason(rows: Iterable[Row]) -> list[tuple[str, str, list[Row]]]:
    """(outcome, reason, rows) of what is not equal, most rows first."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["outcome"] != EQUAL:
            found.setdefault((row["outcome"], general(row["reason"])), []).append(row)
    return [(*key, found[key]) for key in sorted(found, key=lambda k: (k[0] != WRONG, -len(found[k])))]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The data of docs/ops.md: counts, and for each reason of inequality its ops, dtypes, forms and workers."""
    rest = [
        {
            "outcome": kind, "reason": reason, "variants": len(mine), "example": mine[0]["example"],
            **{f"{key}s": sorted({row[key] for row in mine}) for key in ("op", "dtype", "form")},
            "workers": sorted({row["workers"] for row in mine}),
        }
        for kind, reason, mine in by_reason(rows)
    ]  # fmt: skip
    return {"counts": counts(rows), "dtypes": sorted({row["dtype"] for row in rows}), "rest": rest}


def text(rows: Sequence[Row], most: int = 40) -> str:
    """For a terminal."""
    lines = []
    for workers, found in counts(rows).items():
        lines.append(f"{workers}: {found}")
    for kind, reason, mine in by_reason(rows)[:most]:
        ops = sorted({row["op"] for row in mine})
        lines.append(f"{kind:11} {len(mine):5} of {len(ops):3} ops: {reason}")
        lines.append(f"{'':18}{', '.join(ops[:8])}{' ..' if len(ops) > 8 else ''}")
    return "\n".join(lines)
