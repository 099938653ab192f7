"""The pass that moves gathers of sharded parameters up, so that compute hides them.

A step gathers a parameter right before its use. A worker overlaps transfers with compute (gt.worker.program.overlap), so each
gather moves up to an earlier gather. The copies that are gathered ahead have no more bytes than the largest of them, or than
LEAST_AHEAD. This is the prefetch of ZeRO-3 and FSDP (Zhao et al., VLDB 2023) as an order of instructions.

Example, all weights of one size:

    before:  a = all_gather w1; h = mm x a; b = all_gather w2; y = mm h b; ...
    after:   a = all_gather w1; b = all_gather w2; h = mm x a; y = mm h b; ...
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from gt.dispatcher.programs.passes.context import PassContext
from gt.dispatcher.programs.recording import Code, Instruction, Recording
from gt.ir.dataflow import accesses
from gt.ir.spec import DTYPES

# A batch of small weights costs about as much as one of them. So LEAST_AHEAD bytes may be gathered ahead in any case, but no
# more than 1 / AHEAD_SHARE of all gathers.
LEAST_AHEAD, AHEAD_SHARE = 1 << 20, 16


def prefetch_gathers(recording: Recording, context: PassContext) -> Recording:
    """The recording with gathers of parameters moved up, unless a schedule has placed them."""
    if not context.sharded or context.scheduled:
        return recording
    code: Code = {worker: _gathered_early(rows) for worker, rows in recording.code.items()}
    return replace(recording, code=code)


def _gathered_early(rows: Sequence[Instruction]) -> list[Instruction]:
    """Rows with each gather of memory from before them behind an earlier gather."""
    gathers = [n for n, row in enumerate(rows) if row.kind == "all_gather"]
    nbytes = [prod(rows[n].define.payload["shape"]) * DTYPES[rows[n].define.payload["dtype"]][0] for n in gathers]
    room, changed = max([min(LEAST_AHEAD, sum(nbytes) // AHEAD_SHARE), *nbytes]), _last_changes(rows)
    behind: dict[int, list[Instruction]] = defaultdict(list)  # row -> gathers that follow it
    moved: set[int] = set()
    for k, n in enumerate(gathers):
        j, ahead = k, nbytes[k]
        while j > 0 and ahead <= room and gathers[j - 1] > changed[n]:
            j -= 1
            ahead += nbytes[j]
        if j < k:
            behind[gathers[j]].append(rows[n])
            moved.add(n)
    order: list[Instruction] = []
    for n, row in enumerate(rows):
        order += [*([] if n in moved else [row]), *behind.get(n, ())]
    return order


def _last_changes(rows: Sequence[Instruction]) -> dict[int, int]:
    """By gather, the last row before it that writes its source, or defines its name; -1 for none."""
    written: dict[int, int] = {}  # by memory
    defined: dict[int, int] = {}  # by name
    last: dict[int, int] = {}
    for n, (row, access) in enumerate(zip(rows, accesses(rows))):
        if row.kind == "all_gather":
            last[n] = max(written.get(access.reads[0], -1), defined.get(row.reads[0], -1))
        written.update(dict.fromkeys([access.reads[k] for k in row.define.effects.writes], n))
        defined.update(dict.fromkeys(row.makes, n))
    return last
