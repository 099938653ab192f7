"""Makespan, bubble and hidden transfers of an executed schedule, from the measured times of its actions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Stamps = Sequence[Sequence]  # one worker's (action, start, end), all by one clock


def measured(workers: Sequence[Stamps], transfers: Sequence[Stamps] = ()) -> dict[str, Any]:
    """Makespan, and each worker's bubble as a part of it; {} without actions.

    transfers: of the same workers. The result then has each worker's seconds of transfers, and the part that actions hide.
    """
    rows = [[(start, end) for _, start, end in stamps] for stamps in workers if stamps]
    if not rows:
        return {}
    makespan = max(end for row in rows for _, end in row) - min(start for row in rows for start, _ in row)
    bubble = [1 - _busy(row) / makespan if makespan else 0.0 for row in rows]
    result = {"makespan": makespan, "bubble": [round(b, 4) for b in bubble], "idle": round(sum(bubble) / len(bubble), 4)}
    return {**result, **_hidden([pair for pair in zip(workers, transfers) if pair[0]])}


def _hidden(pairs: Sequence[tuple[Stamps, Stamps]]) -> dict[str, Any]:
    """Seconds of transfers, and the part of them during actions. pairs: (actions, transfers) of each worker."""
    seconds, parts = [], []
    for actions, moves in pairs:
        doing, moving = ([(start, end) for _, start, end in stamps] for stamps in (actions, moves))
        seconds.append(_busy(moving))
        # |transfers and actions at once| = |transfers| + |actions| - |their union|
        both = seconds[-1] + _busy(doing) - _busy([*doing, *moving])
        parts.append(round(both / seconds[-1], 4) if seconds[-1] else 1.0)
    return {"transfers": seconds, "hidden": parts} if any(seconds) else {}


def _busy(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans: an action in two parts has another action between them."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
