"""The pass that moves transfers out of the way where the last stage turns from a micro-batch's forward into its backward pass.

The two passes are compiled as one (gt.dispatcher.programs.codegen), so values that only they share never reach memory. This is
operator fusion across the turn, as in torch.compile's joint graph (Ansel et al., ASPLOS 2024). A transfer for another
micro-batch is often between the two, since its data is expected then. It may begin a little earlier, where a compiled region
ends anyway, since transfers overlap with compute. This is code motion (hoisting) of communication. It is done only where
workers replay device graphs: elsewhere a worker waits for each transfer.

Example, the last stage of two, micro-batches 0 and 1:

    before:  1F0 mm, softmax | recv of 1F1 | 1I0 softmax_backward, mm
    after:   recv of 1F1 | 1F0 mm, softmax, 1I0 softmax_backward, mm
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gt.dispatcher.programs.passes.context import PassContext
from gt.dispatcher.programs.passes.rematerialize import MAX_FUSED_OPS, region_weight
from gt.dispatcher.programs.recording import Instruction, Recording


def backward_of(action: str) -> tuple[str, ...]:
    """Names of the backward pass of a forward action's micro-batch in the same stage."""
    return (action.replace("F", "I"), action.replace("F", "B")) if "F" in action else ()


def hoist_transfers(recording: Recording, context: PassContext) -> Recording:
    """The recording with the transfers between a forward action and its backward pass ahead of the former's last region."""
    if not context.graphs or not context.scheduled:
        return recording
    code = {worker: _hoisted(rows) for worker, rows in recording.code.items()}
    return replace(recording, code=code) if any(code[worker] != rows for worker, rows in recording.code.items()) else recording


def _hoisted(rows: Sequence[Instruction]) -> list[Instruction]:
    result: list[Instruction] = []
    between: list[Instruction] = []  # rows in no action, since the last forward action
    forward, start = "", 0  # that action, and the start of the region that may be compiled with its end
    for row in rows:
        if not row.action and forward:
            between.append(row)
            continue
        # An action ends. Transfers behind a forward action go ahead of its last region if its own backward pass follows.
        if row.action != forward:
            if between and row.action in backward_of(forward):
                result[start:start] = between
            else:
                result += between
            between, forward, start = [], row.action if "F" in row.action else "", len(result)
        else:
            result += between
            between, start = [], len(result) if between else start
        result.append(row)
        if region_weight(row) >= MAX_FUSED_OPS:
            start = len(result)
    return result + between
