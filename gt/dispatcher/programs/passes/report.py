"""What the answer to FinishCapture says of a schedule: rows, costs, bubble, and what a better cut into stages would gain."""

from __future__ import annotations

from collections.abc import Sequence

from gt.dispatcher.programs.passes.stage_costs import MICRO, Found
from gt.dispatcher.schedule import Schedule, ScheduleRequest, Timeline
from gt.dispatcher.schedule.balance import balance, said
from gt.ir.schedules import size


def account(made: Schedule, timeline: Timeline, found: Found, names: Sequence[str], request: ScheduleRequest) -> dict:
    """costs: in microseconds and bytes; said: lines for a reader."""
    costs, backward = found.costs, request.backward
    weigh = balance(costs, found.units, request)
    source = f"{found.measured:.0%} measured" if found.measured else "nominal"
    lines = [f"a micro-batch's forward{', and gradients of inputs and of weights' if backward else ''} ({source}):"]
    for n, stage in enumerate(names):
        times = f"{costs.forward[n] / 1e3:.3g} ms"
        if backward:
            times = f"{costs.forward[n] / 1e3:.3g}, {costs.input[n] / 1e3:.3g} and {costs.weight[n] / 1e3:.3g} ms"
        lines.append(f"  {stage}: {times}, {weigh['share'][n]:.1%} of the work, {size(costs.activation[n])} of activations")
    if "better" in weigh:
        better = weigh["better"]
        lines.append(f"a better cut gains {better['gain']:.1%} by simulation: {said(better['moves'], names)}")
    return {
        "name": made.name, "why": "", "stages": len(names), "micro_batches": request.micro_batches, "rows": str(made),
        "bubble": [round(b / timeline.makespan, 4) for b in timeline.bubble], "peak": list(timeline.peak),
        "makespan": timeline.makespan / MICRO, "costs": costs.wire(), "measured": found.measured, "balance": weigh,
        "said": lines,
    }  # fmt: skip
