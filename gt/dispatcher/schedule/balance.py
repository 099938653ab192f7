"""How evenly stages share the work, and the best cut into stages that their ops allow, if that gains something. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

from gt.dispatcher import schedule
from gt.dispatcher.schedule.costs import Costs
from gt.dispatcher.schedule.placement import Members, checked
from gt.errors import ConfigError

WORTH = 0.02  # of a step: a cut that gains less is not proposed
Unit = tuple[float, str]  # what an op of the forward takes, and what to call it


def balance(
    costs: Costs,
    units: Sequence[Sequence[Unit]],
    workers: Sequence[int | Members],
    micro: int,
    name: str,
    limit: float | None = None,
    backward: bool = True,
) -> dict[str, Any]:
    """Seconds and share of each stage, and under "better" a cut between two ops that is worth it, by simulation.

    units: ops of one forward of each stage; a stage's backward is taken to be shared out as its forward is.
    """
    totals = [f + i + w for f, i, w in zip(costs.forward, costs.input, costs.weight)]
    where = checked(workers)
    work = [total * len(some) for total, some in zip(totals, where)]
    found: dict[str, Any] = {"seconds": totals, "share": [part / sum(work) if sum(work) else 0.0 for part in work]}
    if not all(sum(unit[0] for unit in stage) for stage in units) or any(len(some) > 1 for some in where):
        return found
    flat = [unit[0] / sum(u[0] for u in own) * total for own, total in zip(units, totals) for unit in own]
    ends = cut(flat, len(totals))
    better = [sum(flat[a:b]) for a, b in zip([0, *ends], [*ends, len(flat)])]
    if max(better) > (1 - WORTH) * max(totals):
        return found
    scale = [new / old if old else 1.0 for new, old in zip(better, totals)]
    moved = replace(
        costs, forward=_by(costs.forward, scale), input=_by(costs.input, scale), weight=_by(costs.weight, scale)
    )  # fmt: skip
    with suppress(ConfigError):
        spans = []
        for one in (costs, moved):
            made = schedule.make(
                name, stages=len(totals), workers=workers, micro_batches=micro, costs=one, limit=limit, backward=backward
            )
            spans.append(schedule.simulate(made.rows, one).makespan)
        gain = 1 - spans[1] / spans[0] if spans[0] else 0.0
        if gain >= WORTH:
            labels = [unit[1] for own in units for unit in own]
            begins = [next((label for label in labels[at:] if label), "") for at in ends]
            share = [t / sum(better) for t in better]
            moves = moved_ops(units, ends)
            found["better"] = {"gain": gain, "schedule": name, "share": share, "begins": begins, "moves": moves}
    return found


def moved_ops(units: Sequence[Sequence[Unit]], ends: Sequence[int]) -> list[dict[str, Any]]:
    """What of which stage goes over each border: ops, of how many; from where on, and which time of how many that comes."""
    labels = [unit[1] for own in units for unit in own]
    found = []
    for n, (old, new) in enumerate(zip(accumulate(map(len, units)), ends)):
        if old == new:
            continue
        source, target = (n, n + 1) if new < old else (n + 1, n)
        start = sum(map(len, units[:source]))
        own, label = labels[start : start + len(units[source])], labels[min(new, len(labels) - 1)]
        seen = 1 + own[: max(0, new - start)].count(label)
        row = {"from": source, "to": target, "ops": min(abs(old - new), len(own)), "of": len(own), "at": label}
        found.append({**row, "time": seen, "times": own.count(label)})
    return found


def said(moves: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """In words."""
    return "; ".join(
        f"move the {'last' if row['from'] < row['to'] else 'first'} {row['ops']} of {names[row['from']]}'s {row['of']} ops to "
        f"{names[row['to']]}{_border(row)}"
        for row in moves
    )


def _border(row: dict[str, Any]) -> str:
    """Where the cut is then."""
    if not row["at"]:
        return ""
    time = f", time {row['time']} of {row['times']}" if row["times"] > 1 else ""
    return f" ({'from' if row['from'] < row['to'] else 'up to'} {row['at']}{time})"


def _by(times: Sequence[float], scale: Sequence[float]) -> tuple[float, ...]:
    return tuple(time * factor for time, factor in zip(times, scale))


def cut(costs: Sequence[float], parts: int) -> list[int]:
    """Where to end all but the last of so many runs, so that the dearest is as cheap as can be."""
    low, high = max(costs, default=0.0), sum(costs)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(costs, middle)) < parts else (middle, high)
    ends = _filled(costs, high)
    return [*ends, *[len(costs)] * (parts - 1 - len(ends))]


def _filled(costs: Sequence[float], most: float) -> list[int]:
    ends, now = [], 0.0
    for n, one in enumerate(costs):
        if now + one > most * (1 + 1e-12) and n:
            ends.append(n)
            now = 0.0
        now += one
    return ends
