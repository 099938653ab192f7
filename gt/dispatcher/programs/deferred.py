"""Deferred execution of a recorded call: its instructions are buffered and sent as one program when the call returns.

Instruction by instruction, a worker holds all tensors that the backward pass will read. In a program values die at their last
use, cheap ones are recomputed, and compiled code never makes most of them. A result may be needed
before the call is over, or the call may be no program: then the buffered instructions are sent as they were written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from gt.dispatcher.cluster.workers import MAX_NUMBERS_PER_RUN, Worker
from gt.dispatcher.programs.recording import Code, Instruction, Recording
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.outbox import BufferedInstructions, Outbox
from gt.errors import ProtocolError
from gt.ir.dataflow import accesses, decode
from gt.ir.instr import COMPILED_LATER, FORGET, FREE, Define


@dataclass(slots=True)
class StreamEnds:
    """A worker's tensors and definitions at the end of a stream: freed, alive, and no longer named."""

    freed: dict[int, None] = field(default_factory=dict)
    made: dict[int, None] = field(default_factory=dict)
    forgotten: list[int] = field(default_factory=list)

    def follow(self, code: Sequence, defines: dict[int, Define]) -> list:
        """Follow a stream. Returned are its uploads alone: constants, which are sent ahead of a program."""
        uploads: list = []
        for at, define, operands in decode(code, defines.__getitem__):
            if define is None:
                if code[at] == FORGET:
                    self.forgotten += operands
                for i in operands if code[at] == FREE else ():
                    self.made.pop(i, None)
                    self.freed[i] = None
            elif define.kind == "upload":
                uploads += code[at : at + 2 + define.operands]
            else:
                for i in operands[define.effects.makes]:
                    self.freed.pop(i, None)
                    self.made[i] = None
        return uploads


class Lowering(Protocol):
    """Makes programs of instructions: see Programs."""

    def rematerialized(self, tape: Recording, lasting: set[int], recompute: int) -> Recording: ...
    def once(self, rows: Sequence[Instruction], base: int, lasting: set[int]) -> list[dict]: ...


class DeferredRuns:
    """Makes one program of the instructions that `Outbox.deferred` has of a recorded call."""

    able = True  # False where no worker executes: a dry run

    def __init__(self, context: SessionContext, outbox: Outbox, lowering: Lowering) -> None:
        self._context, self._outbox, self._lowering = context, outbox, lowering
        self._emitter, self._cluster, self._failures = context.emitter, context.cluster, context.failures
        self.recompute = 0  # as FinishCapture.recompute

    def begin(self, how: int) -> None:
        """how: see ir.instr.RECORD. Of 1 to 3 the instructions that follow are buffered; else they are executed at once."""
        if type(how) is not int or not 0 <= how <= COMPILED_LATER:
            raise ProtocolError(f"Ops.code records in way {how!r:.40}, want 0 to {COMPILED_LATER}")
        buffers = 0 < how < COMPILED_LATER
        self._outbox.deferred = [] if buffers and self.able and not self._failures.troubled else None
        self._outbox.deferring = self._context.tape.mark if self._context.tape is not None else None
        self.recompute = how - 1 if buffers else 0

    def end(self, tape: Recording) -> None:
        """The recording is over, and has all that was written: send it as one program, or as it was written."""
        held = self._outbox.deferred or []
        if not held or self._failures.troubled or self._outbox.held:
            self._outbox.send_deferred()
            return

        # 1. Apart, since it may take long: the programs, and the tensors of each worker at the end. Other sessions go on, and a
        #    worker may be lost meanwhile.
        ends = {worker.index: StreamEnds() for worker in self._cluster.workers}
        with self._context.apart():
            tape = replace(tape, code=_with_unique_names(tape.code, self._fresh))
            sent = [self._only_uploads(buffered, tape, ends) for buffered in held if tape.code]
            parts = self._parts(tape, held[0].base, ends)
        if self._outbox.deferred is not held:  # a worker was lost meanwhile, and the buffered instructions are sent
            return
        if not tape.code:  # no unique names
            self._outbox.send_deferred()
            self._emitter.begin_run()
            return

        # 2. Uploads go ahead as they were written, then one run has the programs, and the frees that are left.
        self._outbox.deferred = None
        for buffered in sent:
            self._outbox.dispatch(buffered)
        last = self._program(tape, held[0].base, ends, parts)
        last.also = [buffered.runs for buffered in held]
        self._outbox.dispatch(last)

    def _fresh(self) -> int:
        return self._emitter.offset + self._emitter.temporary()

    @staticmethod
    def _only_uploads(buffered: BufferedInstructions, tape: Recording, ends: dict[int, StreamEnds]) -> BufferedInstructions:
        rows = [(w, life, defines, ends[w.index].follow(code, tape.defines)) for w, life, defines, code in buffered.rows]
        return replace(buffered, rows=[row for row in rows if row[2] or row[3]], runs={})

    def _parts(self, tape: Recording, base: int, ends: dict[int, StreamEnds]) -> dict[int, tuple[list[dict], list[int]]]:
        """Each worker's part: programs that are executed once, the one that places weights first; and ids to free then."""
        # 1. Weights that are placed by the call are made ahead, by a program of their own.
        lasting = {i for end in ends.values() for i in end.made}
        ahead: dict[int, list[Instruction]] = {}
        later: dict[int, list[Instruction]] = {}
        for index, rows in tape.code.items():
            ahead[index], later[index] = _placed_first(rows, lasting) if tape.first else ([], _without_uploads(rows))
        rest = replace(tape, code=later)
        if self.recompute:
            rest = self._lowering.rematerialized(rest, lasting, self.recompute)

        # 2. Two programs for each worker, and the ids to free behind them: what only passed from the first to the second, and
        #    tensors from before that the call freed. What the call itself made and freed dies within a program.
        parts: dict[int, tuple[list[dict], list[int]]] = {}
        for index, end in ends.items():
            rows = rest.code.get(index, [])
            taken = {i for row in rows for i in row.reads}
            between = [i for row in ahead.get(index, ()) for i in row.makes if i in taken and i not in end.made]
            made = {i for row in tape.code.get(index, ()) for i in row.makes}
            first = self._lowering.once(ahead.get(index, []), base, {*end.made, *between})
            freed = [*between, *(i for i in end.freed if i not in made)]
            parts[index] = first + self._lowering.once(rows, base, {*end.made}), freed
        return parts

    def _program(
        self, tape: Recording, base: int, ends: dict[int, StreamEnds], parts: dict[int, tuple[list[dict], list[int]]]
    ) -> BufferedInstructions:
        """The rest, as programs that are executed once."""
        emitter = self._emitter
        emitter.resume_run(base)
        for index, end in ends.items():
            worker, (programs, freed) = self._cluster.workers[index], parts[index]
            for part in programs if not worker.lost else ():
                emitter.write(worker, emitter.define("program", part), (-1, 0))
            _write(worker, FREE, freed)
            _write(worker, FORGET, end.forgotten)
        return self._outbox.written(base)


def _with_unique_names(code: Code, fresh: Callable[[], int]) -> Code:
    """Code in which every name stands for one tensor, as in static single assignment; {} if it cannot have them.

    A gradient that is reduced keeps its name, and stands for the sum from then on. Here its terms get a name from `fresh`.
    Names from before the code cannot change, and neither can those of uploads, which are sent ahead.
    """
    renamed: Code = {}
    for worker, rows in code.items():
        # The last definition of a name keeps it, since later instructions use it. Earlier ones get fresh names.
        last = {i: n for n, row in enumerate(rows) for i in row.makes}
        names: dict[int, int] = {}  # by name: the one that stands for it at this row
        older: set[int] = set()  # names from before the code
        renamed[worker] = []
        for n, row in enumerate(rows):
            reads, makes = row.reads, row.makes
            older.update(i for i in reads if i not in names)
            if not older.isdisjoint(makes) or (row.kind == "upload" and any(last[i] != n for i in makes)):
                return {}
            taken = [names.get(i, i) for i in reads]
            names.update((i, i if last[i] == n else fresh()) for i in makes)
            made = [names[i] for i in makes]
            if taken != reads or made != makes:
                between = row.operands[len(reads) : len(row.operands) - len(makes)]
                row = Instruction(row.seq, row.define, [*taken, *between, *made], row.action, row)
            renamed[worker].append(row)
    return renamed


def _without_uploads(rows: Sequence[Instruction]) -> list[Instruction]:
    return [row for row in rows if row.kind != "upload"]


def _placed_first(rows: Sequence[Instruction], lasting: set[int]) -> tuple[list[Instruction], list[Instruction]]:
    """Rows that only make lasting values of uploads or nothing (weights placed where they are first used), and the rest.

    Without the former the first call compiles as later ones do. A row that makes nothing changes a value. Later calls do so
    too, as the count of a batch norm.
    """
    ready = {i for row in rows if row.kind == "upload" for i in row.makes}
    ahead, rest = [], []
    touched: set[int] = set()
    code = _without_uploads(rows)
    for row, (memory, made) in zip(code, accesses(code)):
        alone = row.kind == "op" and ready.issuperset(memory) and touched.isdisjoint(memory)
        if alone and row.makes and lasting.issuperset(row.makes):
            ready.update(made)
            ahead.append(row)
        else:
            touched.update(memory, made)
            rest.append(row)
    return ahead, rest


def _write(worker: Worker, what: int, numbers: Sequence[int]) -> None:
    for first in range(0, 0 if worker.lost else len(numbers), MAX_NUMBERS_PER_RUN):
        some = numbers[first : first + MAX_NUMBERS_PER_RUN]
        worker.code += (what, 0, len(some), *some)
        worker.cut()
