"""Balance of the stages: each one's share of the work, and a better cut into stages where one gains enough. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

from gt.dispatcher import schedule
from gt.dispatcher.schedule.costs import Costs
from gt.dispatcher.schedule.placement import checked
from gt.errors import ConfigError

MIN_GAIN_SHARE = 0.02  # least gain of a cut that is proposed, as a part of the step
Unit = tuple[float, str]  # an op of the forward: its time and its label


def balance(costs: Costs, units: Sequence[Sequence[Unit]], request: schedule.ScheduleRequest) -> dict[str, Any]:
    """Seconds and share of each stage, and under "better" a cut between two ops that gains MIN_GAIN_SHARE by simulation.

    units: ops of one forward of each stage. A stage's backward is divided as its forward is.
    """
    # 1. Shares. A stage on several workers is as much work as its time on each of them.
    totals = [f + i + w for f, i, w in zip(costs.forward, costs.input, costs.weight)]
    where = checked(request.workers)
    work = [total * len(members) for total, members in zip(totals, where)]
    report: dict[str, Any] = {"seconds": totals, "share": [part / sum(work) if sum(work) else 0.0 for part in work]}
    if not all(sum(unit[0] for unit in stage) for stage in units) or any(len(members) > 1 for members in where):
        return report

    # 2. The best cut of all ops into as many stages. An op takes its part of its stage's whole time, backward included.
    sums = [sum(unit[0] for unit in own) for own in units]
    flat = [unit[0] / whole * total for own, whole, total in zip(units, sums, totals) for unit in own]
    ends = cut(flat, len(totals))
    better = [sum(flat[start:end]) for start, end in zip([0, *ends], [*ends, len(flat)])]
    if max(better) > (1 - MIN_GAIN_SHARE) * max(totals):
        return report

    # 3. Its gain by simulation: a smaller largest stage need not make the step shorter. ConfigError: it does not fit in memory.
    scale = [new / old if old else 1.0 for new, old in zip(better, totals)]
    moved = replace(
        costs, forward=_by(costs.forward, scale), input=_by(costs.input, scale), weight=_by(costs.weight, scale)
    )  # fmt: skip
    with suppress(ConfigError):
        spans = [schedule.simulate(schedule.make(request, each).rows, each).makespan for each in (costs, moved)]
        gain = 1 - spans[1] / spans[0] if spans[0] else 0.0
        if gain >= MIN_GAIN_SHARE:
            labels = [unit[1] for own in units for unit in own]
            begins = [next((label for label in labels[end:] if label), "") for end in ends]
            share = [t / sum(better) for t in better]
            moves = moved_ops(units, ends)
            report["better"] = {"gain": gain, "schedule": request.name, "share": share, "begins": begins, "moves": moves}
    return report


def moved_ops(units: Sequence[Sequence[Unit]], ends: Sequence[int]) -> list[dict[str, Any]]:
    """For each border that moves: stages from and to, number of ops of all, label of the first op, and its occurrence."""
    labels = [unit[1] for own in units for unit in own]
    moves = []
    for n, (old, new) in enumerate(zip(accumulate(map(len, units)), ends)):
        if old == new:
            continue
        source, target = (n, n + 1) if new < old else (n + 1, n)
        start = sum(map(len, units[:source]))
        own, label = labels[start : start + len(units[source])], labels[min(new, len(labels) - 1)]
        # A file and line may come up several times, as in a loop over layers: so the label has its occurrence with it.
        seen = 1 + own[: max(0, new - start)].count(label)
        row = {"from": source, "to": target, "ops": min(abs(old - new), len(own)), "of": len(own), "at": label}
        moves.append({**row, "time": seen, "times": own.count(label)})
    return moves


def said(moves: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """The moves in words."""
    return "; ".join(
        f"move the {'last' if row['from'] < row['to'] else 'first'} {row['ops']} of {names[row['from']]}'s {row['of']} ops to "
        f"{names[row['to']]}{_border(row)}"
        for row in moves
    )


def _border(row: dict[str, Any]) -> str:
    """The place of the new border, in words."""
    if not row["at"]:
        return ""
    time = f", time {row['time']} of {row['times']}" if row["times"] > 1 else ""
    return f" ({'from' if row['from'] < row['to'] else 'up to'} {row['at']}{time})"


def _by(times: Sequence[float], scale: Sequence[float]) -> tuple[float, ...]:
    return tuple(time * factor for time, factor in zip(times, scale))


def cut(costs: Sequence[float], parts: int) -> list[int]:
    """Ends of all runs but the last, of `parts` runs, with the costliest run as cheap as possible."""
    # Bisection of the limit of a run: a greedy filling with that limit has `parts` runs at most, or more. 60 halvings reach the
    # precision of a float.
    low, high = max(costs, default=0.0), sum(costs)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(costs, middle)) < parts else (middle, high)
    ends = _filled(costs, high)
    return [*ends, *[len(costs)] * (parts - 1 - len(ends))]


def _filled(costs: Sequence[float], limit: float) -> list[int]:
    """Ends of runs that cost up to `limit` each, all but the last."""
    ends, total = [], 0.0
    for n, each in enumerate(costs):
        if total + each > limit * (1 + 1e-12) and n:
            ends.append(n)
            total = 0.0
        total += each
    return ends
