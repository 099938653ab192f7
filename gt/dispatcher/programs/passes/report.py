"""The report of a schedule in the answer to FinishCapture: rows, costs, bubble, and the gain of a better cut into stages."""

from __future__ import annotations

from collections.abc import Sequence

from gt.dispatcher.programs.passes.stage_costs import MICRO, StageCosts
from gt.dispatcher.schedule import Schedule, ScheduleRequest, Timeline
from gt.dispatcher.schedule.balance import balance, said
from gt.ir.text import size


def schedule_report(
    made: Schedule, timeline: Timeline, stage_costs: StageCosts, names: Sequence[str], request: ScheduleRequest
) -> dict:
    """costs: in microseconds and bytes; said: lines for a reader. names: of the stages."""
    costs, backward = stage_costs.costs, request.backward
    weigh = balance(costs, stage_costs.units, request)
    source = f"{stage_costs.measured:.0%} measured" if stage_costs.measured else "nominal"
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
        "makespan": timeline.makespan / MICRO, "costs": costs.wire(), "measured": stage_costs.measured, "balance": weigh,
        "said": lines,
    }  # fmt: skip
