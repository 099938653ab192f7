"""What a schedule took where it ran, from when each worker began and ended its actions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Stamps = Sequence[Sequence]  # of one worker: (action, start, end), in any one clock


def measured(workers: Sequence[Stamps], transfers: Sequence[Stamps] = ()) -> dict[str, Any]:
    """Makespan, and the part of it in which each worker with actions did none of them; {} where there were none.

    transfers: of the same workers, what was moved beside actions; then seconds of each worker's, and the part of them in which
    it did actions too: that is hidden.
    """
    rows = [[(start, end) for _, start, end in stamps] for stamps in workers if stamps]
    if not rows:
        return {}
    makespan = max(end for row in rows for _, end in row) - min(start for row in rows for start, _ in row)
    bubble = [1 - _busy(row) / makespan if makespan else 0.0 for row in rows]
    found = {"makespan": makespan, "bubble": [round(b, 4) for b in bubble], "idle": round(sum(bubble) / len(bubble), 4)}
    return {**found, **_hidden([pair for pair in zip(workers, transfers) if pair[0]])}


def _hidden(pairs: Sequence[tuple[Stamps, Stamps]]) -> dict[str, Any]:
    """(actions, transfers) of workers: seconds in which something moved, and the part of them beside actions."""
    seconds, parts = [], []
    for actions, moves in pairs:
        doing, moving = ([(start, end) for _, start, end in stamps] for stamps in (actions, moves))
        seconds.append(_busy(moving))
        both = seconds[-1] + _busy(doing) - _busy([*doing, *moving])
        parts.append(round(both / seconds[-1], 4) if seconds[-1] else 1.0)
    return {"transfers": seconds, "hidden": parts} if any(seconds) else {}


def _busy(spans: list[tuple[float, float]]) -> float:
    """Time that lies in one of them or more: an action that is done in two parts has another between."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
