"""Where the last stage goes from a micro-batch's forward pass into its backward pass, transfers between make way.

Compiled as one (gt.dispatcher.programs.codegen) the two never write what only they share. A transfer for another micro-batch
often lies between them, since that is when its data is expected. It is done beside what is computed, so it may begin a little
earlier: at the last place where what is compiled as one ends anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from gt.dispatcher.programs.passes.rematerialize import FAR, border
from gt.dispatcher.programs.recording import Instruction, Recording
from gt.dispatcher.programs.reorder_check import Unfit, check
from gt.dispatcher.state.failures import Planned


def turned(action: str) -> tuple[str, ...]:
    """Names of what is the backward pass of a forward action's micro-batch in the same stage."""
    return (action.replace("F", "I"), action.replace("F", "B")) if "F" in action else ()


def make_way(tape: Recording) -> None:
    """Change the order of a tape's rows, of each worker for which that gives the same values."""
    ops: dict[int, Planned] = {row.seq: row for row in tape.journal}
    for worker, rows in tape.code.items():
        new = _moved(rows, tape.names)
        try:
            check(worker, rows, new, ops)
        except Unfit:
            continue
        tape.code[worker] = new


def _moved(rows: Sequence[Instruction], names: dict[int, str]) -> list[Instruction]:
    found: list[Instruction] = []
    between: list[Instruction] = []  # what is in no action, since the forward action that is the last so far
    forward, start = "", 0  # that action, and where what may be compiled with its end begins
    for row in rows:
        name = names.get(id(row), "")
        if not name and forward:
            between.append(row)
            continue
        if name != forward:
            if between and name in turned(forward):
                found[start:start] = between
            else:
                found += between
            between, forward, start = [], name if "F" in name else "", len(found)
        else:
            found += between
            between, start = [], len(found) if between else start
        found.append(row)
        if border(row) >= FAR:
            start = len(found)
    return found + between
