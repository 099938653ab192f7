"""Code of a fragment's program: a recording whose tensors are renamed to parameters, and the places of its scalars.

The names in the code are the program's own. Each launch binds the tensors from before to them, and takes the results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gt.dispatcher.programs.codegen import ProgramWriter
from gt.dispatcher.programs.fragments.fragment_pattern import FragmentCall, FragmentPattern, Getter, getter, text
from gt.dispatcher.programs.pass_manager import PASSES, run_passes
from gt.dispatcher.programs.passes.context import PassContext
from gt.dispatcher.programs.recording import Instruction, Recording
from gt.ir.dataflow import decode
from gt.ir.instr import Define
from gt.wire.messages import FinishCapture


@dataclass(slots=True)
class WorkerCode:
    """One worker's program. values: gives the scalars of a call's code, in the order of the payload's places."""

    payload: dict[str, Any]
    values: Getter


@dataclass(slots=True)
class FragmentBounds:
    """Tensors at a fragment's bounds, as workers name them: from before, and alive afterwards. moved: numbers of the former
    that the program frees."""

    ins: list[int]
    outs: list[int]
    moved: list[int]


@dataclass(slots=True)
class FragmentCode:
    """The programs of one fragment. rebound: numbers of tensors from before that get other memory, and so are results too.

    constants: places of scalars that planning has used, with the scalar as text.
    """

    workers: dict[int, WorkerCode]
    uses: list[Define]
    rebound: list[int]
    constants: dict[int, str]


class _Scalars:
    """Places of a fragment's scalars: in the client's code, and in the instructions that carry them as they are.

    An instruction has all scalars of its op in their order. An instruction of a list op that is executed in parts has some of
    them. These are recognised by identity: each number of a message, small integers apart, is a Python object of its own.
    """

    def __init__(self, pattern: FragmentPattern, call: FragmentCall, numbers: Sequence[int]) -> None:
        self._pattern, self._code = pattern, call.code
        self._op_of = {number: n for n, number in enumerate(numbers)}
        self._carried: set[int] = set()  # places of scalars that are in instructions
        self._changed: set[int] = set()  # ops with an instruction that has other scalars

    def of(self, row: Instruction) -> Sequence[int]:
        """Places in the client's code of an instruction's scalars, in their order; none if they are others."""
        n = self._op_of.get(row.seq, -1)
        if n < 0 or row.kind != "op" or not self._pattern.ops[n].values:
            return ()
        # Planning may have made another op of it, whose scalars are not the client's.
        op, payload = self._pattern.ops[n], row.define.payload
        first, count = payload["tensors"], payload["values"]
        if payload["op"] != op.known.template.op:
            self._changed.add(n)
            return ()
        places: Sequence[int] = op.values
        # The usual case: all scalars, in order. Else a part of a list op, whose scalars are found by identity; two that are one
        # object cannot be told apart, and then all of the op's scalars are constants of the program.
        own = row.operands[first : first + len(op.values)]
        if count != op.known.values or [text(value) for value in own] != [text(self._code[place]) for place in places]:
            identities = {id(self._code[place]): place for place in op.values}
            own = row.operands[first : first + count]
            places = [identities[id(value)] for value in own if id(value) in identities]
            if len(identities) != len(op.values) or len(places) != count:
                self._changed.add(n)
                return ()
        self._carried.update(places)
        return places

    def constants(self) -> dict[int, str]:
        """Places of scalars that no instruction carries, or not all: planning may have used their value."""
        ops = enumerate(self._pattern.ops)
        fixed = [op for n, op in ops if n in self._changed or not self._carried.issuperset(op.values)]
        return {place: text(self._code[place]) for op in fixed for place in op.values}


def write_fragment(
    tape: Recording, context: PassContext, call: FragmentCall, pattern: FragmentPattern, numbers: Sequence[int],
    bounds: FragmentBounds,
) -> FragmentCode | str:  # fmt: skip
    """The programs of a recorded fragment, or why there are none. numbers: of its ops, as instructions have them."""
    # 1. Names of the program's own for all tensors. A tensor from before that the code makes again (it got another layout) is
    #    an input and a result: `rebound`. It may not be freed inside, as `moved` ones are.
    tape = run_passes(tape, context, PASSES)
    names: defaultdict[int, int] = defaultdict(context.fresh)
    made = {i for rows in tape.code.values() for row in rows for i in row.makes}
    rebound = [n for n, i in enumerate(bounds.ins) if i in made]
    if not made.isdisjoint(context.homes.keys() - {*bounds.ins}):  # a launch could not give it the new memory
        return "a tensor with other memory afterwards has views that none of its ops names"
    bounds.moved = [n for n in bounds.moved if n not in rebound]
    ins = [names[i] for i in bounds.ins]
    outs = [*(names[i] for i in bounds.outs), *(ins[n] for n in rebound)]
    # 2. Each worker's code. Uploads are constants: they were kept when they were recorded, and are no instructions of a launch.
    scalars = _Scalars(pattern, call, numbers)
    backend = "inductor" if context.compiled else "eager"  # a graph would need its inputs at the same addresses
    seal = FinishCapture(0, 0, "", backend, [], call.seed, call.counter, 0)
    index = {row.seq: n for n, row in enumerate(tape.journal)}
    workers: dict[int, WorkerCode] = {}
    for worker, rows in tape.code.items():
        rows = [row for row in rows if row.kind != "upload"]
        if not _closed(rows, set(bounds.ins)):
            return "it uses a tensor that none of its ops names"
        places = [scalars.of(row) for row in rows]
        writer = ProgramWriter(index, set(outs), seal)
        writer.write([_renamed(row, names) for row in rows], [ins[n] for n in bounds.moved])
        if len(writer.parts) != 1:
            return "it is too long"
        payload = {**writer.parts[0], "ins": ins, "outs": outs, "moved": bounds.moved, "values": []}
        sources = _place_scalars(payload, rows, places)
        workers[worker] = WorkerCode(payload, getter(sources))
    if not workers:
        return "it gives no worker any work"
    uses = dict.fromkeys(row.define for rows in tape.code.values() for row in rows)
    constants = scalars.constants()
    return FragmentCode(workers, [*uses], rebound, constants)


def _closed(rows: Sequence[Instruction], known: set[int]) -> bool:
    """True if every tensor that the rows read is one of these, or made by a row before."""
    for row in rows:
        if not known.issuperset(row.reads):
            return False
        known.update(row.makes)
    return True


def _renamed(row: Instruction, names: defaultdict[int, int]) -> Instruction:
    operands, effects = list(row.operands), row.define.effects
    for part in (effects.reads, effects.makes):
        operands[part] = [names[i] for i in operands[part]]
    return Instruction(row.seq, row.define, operands, row.action)


def _place_scalars(payload: dict[str, Any], rows: Sequence[Instruction], places: Sequence[Sequence[int]]) -> list[int]:
    """Note in the payload where its code has the scalars of rows; their places in the client's code, in the same order."""
    # The code has the rows in order, with frees between (without a definition).
    defines = {row.define.number: row.define for row in rows}
    written = (at for at, define, _ in decode(payload["code"], defines.__getitem__) if define is not None)
    sources: list[int] = []
    for at, row, values in zip(written, rows, places, strict=True):
        if values:
            first = at + 2 + row.define.payload["tensors"]
            payload["values"] += range(first, first + len(values))
            sources += values
    return sources
