"""The pass that moves casts of gradients up, behind the instructions that make the gradients.

With `precision: bf16` parameters are cast when their module is called, ahead of its layers. The backward pass mirrors this, so
it casts all gradients to fp32 at its end. What waits for a gradient in fp32 could begin no earlier: a reduction over the
data-parallel workers, or an offloaded optimizer's step. So such casts, and factors of a loss scale, move up first. This is
busy code motion: as early as definitions permit (Knoop et al., Lazy code motion, PLDI 1992). `bucket_reductions` and
`advance_host_steps` then hide behind the backward pass.

Example:

    before:  g2 = mm ...; h = mm ...; g1 = mm h ...; f2 = _to_copy g2; f1 = _to_copy g1; all_reduce f2; all_reduce f1
    after:   g2 = mm ...; f2 = _to_copy g2; h = mm ...; g1 = mm h ...; f1 = _to_copy g1; all_reduce f2; all_reduce f1
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from gt.dispatcher.programs.passes.bucket_reductions import REDUCTIONS, is_fused_step, names_only
from gt.dispatcher.programs.passes.context import PassContext
from gt.dispatcher.programs.recording import Code, Instruction, Recording
from gt.ir.dataflow import MemoryAccess, accesses
from gt.ir.instr import OFFLOAD

CASTS = frozenset({"aten._to_copy.default", "aten.mul.Tensor"})


def advance_casts(recording: Recording, context: PassContext) -> Recording:
    """The recording with casts moved up, where something can begin earlier then."""
    waits = {*REDUCTIONS, *OFFLOAD}
    if context.scheduled or not any(row.kind in waits for rows in recording.code.values() for row in rows):
        return recording
    code: Code = {worker: _advanced(rows, accesses(rows, shared=context.shared)) for worker, rows in recording.code.items()}
    return replace(recording, code=code) if any(code[worker] is not recording.code[worker] for worker in code) else recording


def _advanced(rows: list[Instruction], memory: Sequence[MemoryAccess]) -> list[Instruction]:
    casts = _awaited_casts(rows, memory)
    made: dict[int, int] = {}  # name -> the row behind which it is there
    changed: dict[int, int] = {}  # memory -> the same of its newest value
    behind: dict[int, list[Instruction]] = defaultdict(list)  # row -> casts that follow it
    moved: set[int] = set()
    for n, (row, access) in enumerate(zip(rows, memory)):
        place = n
        if n in casts:
            earliest = max(max(made.get(i, -1), changed.get(where, -1)) for i, where in zip(row.reads, access.reads))
            if -1 < earliest < n - 1:
                place = earliest
                behind[place].append(row)
                moved.add(n)
        made.update(dict.fromkeys(row.makes, place))
        changed.update(dict.fromkeys([*(access.reads[k] for k in row.define.effects.writes), *access.makes], place))
    if not moved:
        return rows
    return [moved_or_row for n, row in enumerate(rows) for moved_or_row in ([] if n in moved else [row]) + behind[n]]


def _awaited_casts(rows: Sequence[Instruction], memory: Sequence[MemoryAccess]) -> set[int]:
    """Casts, by number, of which only reductions, optimizers' steps and other such casts use the result.

    A step waits for them where its state is offloaded. Any other step follows the backward pass.
    """
    offloads = any(row.kind in OFFLOAD for row in rows)
    awaited: set[int] = set()  # memory that a later one of these reads
    others: set[int] = set()  # memory that other rows read
    casts: set[int] = set()
    for n in range(len(rows) - 1, -1, -1):
        row, access = rows[n], memory[n]
        cast = _is_cast(row, access) and access.makes[0] in awaited and access.makes[0] not in others
        if cast:
            casts.add(n)
        step = is_fused_step(row)
        if cast or row.kind in REDUCTIONS or (step and offloads):
            awaited.update(access.reads)
        elif not (step or names_only(row)):
            others.update(access.reads)
    return casts


def _is_cast(row: Instruction, access: MemoryAccess) -> bool:
    """True for an op that makes a tensor of another one, element by element. Further operands are from before the rows."""
    if row.kind != "op" or row.define.payload["op"] not in CASTS or row.define.effects.views:
        return False
    return len(row.makes) == 1 and sum(where < 0 for where in access.reads) == 1
