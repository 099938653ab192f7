"""The pass manager: the passes over a captured step, in order. One verifier checks the result of each.

    recording -> apply_schedule -> prefetch_gathers -> advance_casts -> bucket_reductions -> advance_host_steps
              -> rematerialize -> hoist_transfers -> batch_collectives -> program

A pass that has nothing to do returns its argument. A result that the verifier refuses is not taken: the pass before it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gt.dispatcher.programs.passes.advance_casts import advance_casts
from gt.dispatcher.programs.passes.advance_host_steps import advance_host_steps
from gt.dispatcher.programs.passes.batch_collectives import batch_collectives
from gt.dispatcher.programs.passes.bucket_reductions import bucket_reductions
from gt.dispatcher.programs.passes.context import PassContext
from gt.dispatcher.programs.passes.hoist_transfers import hoist_transfers
from gt.dispatcher.programs.passes.pipeline import apply_schedule
from gt.dispatcher.programs.passes.prefetch_gathers import prefetch_gathers
from gt.dispatcher.programs.passes.rematerialize import rematerialize
from gt.dispatcher.programs.recording import Recording
from gt.dispatcher.programs.reorder_check import CannotReorder, Verifier

Pass = Callable[[Recording, PassContext], Recording]

PASSES: tuple[Pass, ...] = (
    apply_schedule, prefetch_gathers, advance_casts, bucket_reductions, advance_host_steps, rematerialize, hoist_transfers,
    batch_collectives,
)  # fmt: skip


def run_passes(recording: Recording, context: PassContext, passes: Sequence[Pass]) -> Recording:
    """The recording that the passes make, each verified; `context` has their reports."""
    verifier = Verifier({row.seq: row for row in recording.journal}, context.shared)
    for apply in passes:
        result = apply(recording, context)
        if result is recording:
            continue
        try:
            verifier.verify(recording.code, result.code)
        except CannotReorder as error:
            context.reject(apply.__name__, str(error))
        else:
            recording = result
    return recording
