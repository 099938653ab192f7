"""The pass that moves gathers of sharded parameters up, in groups, so that compute hides them and is cut at few places.

A step gathers a parameter right before its use. A worker overlaps transfers with compute (gt.worker.program.overlap), and each
place with a transfer ends what it compiles as one. So consecutive gathers form groups, as layers do in FSDP (Zhao et al., VLDB
2023). A group has at most as many bytes as the largest gather, or LEAST_AHEAD if that is more. A group is gathered where the
group before it is first used. This is the prefetch of ZeRO-3 and FSDP as an order of instructions. The copies of two groups are
alive at a time.

Example, all weights of one size:

    before:  a = all_gather w1; h = mm x a; b = all_gather w2; y = mm h b; ...
    after:   a = all_gather w1; b = all_gather w2; h = mm x a; y = mm h b; ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from gt.dispatcher.programs.passes.context import PassContext
from gt.dispatcher.programs.recording import Code, Instruction, Recording
from gt.ir.dataflow import accesses
from gt.ir.spec import DTYPES

# A batch of small weights costs about as much as one of them. So a group may have LEAST_AHEAD bytes in any case, but no more
# than 1 / AHEAD_SHARE of all gathers.
LEAST_AHEAD, AHEAD_SHARE = 1 << 20, 16


def prefetch_gathers(recording: Recording, context: PassContext) -> Recording:
    """The recording with gathers of parameters moved up, unless a schedule has placed them."""
    if not context.sharded or context.scheduled:
        return recording
    code: Code = {worker: _gathered_early(rows, context.shared) for worker, rows in recording.code.items()}
    return replace(recording, code=code)


def _gathered_early(rows: Sequence[Instruction], shared: Mapping[int, int]) -> list[Instruction]:
    """Rows with each gather of memory from before them at the first gather of the group before its own."""
    # 1. Groups: consecutive gathers of up to `room` bytes. Each gather moves behind the first gather of the group before its
    #    own, or behind the next one at which its source is final.
    gathers = [n for n, row in enumerate(rows) if row.kind == "all_gather"]
    nbytes = [prod(rows[n].define.payload["shape"]) * DTYPES[rows[n].define.payload["dtype"]][0] for n in gathers]
    changed = _last_changes(rows, shared)
    behind: dict[int, list[Instruction]] = defaultdict(list)  # row -> gathers that follow it
    moved: set[int] = set()
    before = first = 0  # of `gathers`: where the group before, and the group, begin
    size = 0
    room = max([min(LEAST_AHEAD, sum(nbytes) // AHEAD_SHARE), *nbytes])
    for k, n in enumerate(gathers):
        if size + nbytes[k] > room:
            before, first, size = first, k, 0
        size += nbytes[k]
        place = bisect_right(gathers, changed[n], before, k)
        if place < k:
            behind[gathers[place]].append(rows[n])
            moved.add(n)

    # 2. The rows in the new order. Gathers that moved to one place keep their own order.
    order: list[Instruction] = []
    for n, row in enumerate(rows):
        order += [*([] if n in moved else [row]), *behind.get(n, ())]
    return order


def _last_changes(rows: Sequence[Instruction], shared: Mapping[int, int]) -> dict[int, int]:
    """By gather, the last row before it that writes its source, or defines its name; -1 for none."""
    written: dict[int, int] = {}  # by memory
    defined: dict[int, int] = {}  # by name
    last: dict[int, int] = {}
    for n, (row, access) in enumerate(zip(rows, accesses(rows, shared=shared))):
        if row.kind == "all_gather":
            last[n] = max(written.get(access.reads[0], -1), defined.get(row.reads[0], -1))
        written.update(dict.fromkeys([access.reads[k] for k in row.define.effects.writes], n))
        defined.update(dict.fromkeys(row.makes, n))
    return last
