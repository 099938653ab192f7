"""A recorded call as one program: what it would have workers do is held back until it is over, and is then carried out whole.

Instruction by instruction a worker holds all that the backward pass will read. In a program values end at their last use, cheap
ones are made again, and what is compiled never makes most of them. Where anything needs a result before the call is over, or
the call cannot be a program, what was held back is sent as it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from gt.dispatcher.cluster.workers import MOST as LONGEST
from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.programs.recording import Instruction, Recording
from gt.dispatcher.programs.reorder_check import viewed
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.outbox import BufferedInstructions, Outbox
from gt.dispatcher.state.validate import CREDIT
from gt.errors import ProtocolError
from gt.ir.instr import FORGET, FREE, Define

MOST = CREDIT * 3 // 4  # batches: its client waits when it has no credit left
APART = frozenset({"send", "recv", "merge", "fetch", "describe", "program"})  # what is not in such a program


@dataclass(slots=True)
class Ends:
    """What becomes of a worker's tensors and definitions in a stream: those that are freed, those that are there then."""

    freed: dict[int, None] = field(default_factory=dict)
    made: dict[int, None] = field(default_factory=dict)
    forgotten: list[int] = field(default_factory=list)

    def pass_on(self, code: Sequence, defines: dict[int, Define]) -> list:
        """Of a stream only the uploads: constants, which are there before a program."""
        at = 0
        left: list = []
        while at < len(code):
            if code[at] in (FREE, FORGET):
                end = at + 3 + code[at + 2]
                if code[at] == FORGET:
                    self.forgotten += code[at + 3 : end]
                for i in code[at + 3 : end] if code[at] == FREE else ():
                    self.made.pop(i, None)
                    self.freed[i] = None
                at = end
                continue
            define = defines[code[at]]
            end = at + 2 + define.operands
            if define.kind == "upload":
                left += code[at:end]
            for i in Instruction(0, define, list(code[at + 2 : end])).ids()[1] if define.kind != "upload" else ():
                self.freed.pop(i, None)
                self.made[i] = None
            at = end
        return left


class Lowering(Protocol):
    """What makes programs of instructions."""

    def again(self, tape: Recording, lasting: set[int], compiled: bool, much: int) -> dict[str, list[int]]: ...
    def once(self, rows: Sequence[Instruction], base: int, lasting: set[int]) -> list[dict]: ...


class Later:
    """What is held back of one session's recording; nothing unless `begin` was called."""

    able = True  # where nothing is carried out there is nothing to hold back

    def __init__(self, context: SessionContext, outbox: Outbox, lowering: Lowering) -> None:
        self._context, self._outbox, self._lowering = context, outbox, lowering
        self._emitter, self._cluster, self._queue, self._failures = (
            context.emitter, context.cluster, context.queue, context.failures,
        )  # fmt: skip
        self.again = 0  # which cheap values are made again: as FinishCapture.recompute
        self._held: list[BufferedInstructions] | None = None

    @property
    def holds(self) -> bool:
        return self._held is not None

    def begin(self, how: int) -> None:
        """how: 0 for not at all, 1 to hold back what follows, more to have cheap values made again too."""
        if how not in (0, 1, 2, 3):
            raise ProtocolError(f"Ops.code records in way {how!r:.40}, want 0, 1, 2 or 3")
        self._held = [] if how and self.able and not self._failures.troubled else None
        self.again = max(0, how - 1)

    def takes(self, held: BufferedInstructions) -> bool:
        """Whether what would be sent is kept here."""
        if self._held is None or not held.timed:  # written before the recording, and sent now that its uploads are here
            return False
        self._held.append(held)
        tape = self._context.tape
        unfit = tape is None or any(define.kind in APART for define in tape.defines.values())
        if unfit or self._failures.troubled or len(self._queue.pending) >= MOST:
            self.let_go()
        return True

    def let_go(self) -> None:
        """Send what is held back as it was written."""
        held, self._held = self._held or [], None
        for one in held:
            self._outbox.dispatch(one)

    def drop(self) -> list[BufferedInstructions]:
        """The session is over; what was held back."""
        held, self._held = self._held or [], None
        return held

    def end(self, tape: Recording) -> None:
        """The recording is over, and all that was written is on its tape."""
        held = self._held or []
        if (
            not held
            or not tape.code
            or self._failures.troubled
            or self._outbox.held
            or not all(map(_plain, tape.code.values()))
        ):
            self.let_go()
            return
        found = {worker.index: Ends() for worker in self._cluster.workers}
        with self._context.apart():
            sent = [self._passed_on(one, tape, found) for one in held]
            parts = self._parts(tape, held[0].base, found)
        if self._held is not held:  # a worker was lost meanwhile, and what was held back is sent
            return
        self._held = None
        for one in sent:
            self._outbox.dispatch(one)
        last = self._program(tape, held[0].base, found, parts)
        last.also = [one.runs for one in held]
        self._outbox.dispatch(last)

    @staticmethod
    def _passed_on(one: BufferedInstructions, tape: Recording, found: dict[int, Ends]) -> BufferedInstructions:
        rows = [(w, life, defines, found[w.index].pass_on(code, tape.defines)) for w, life, defines, code in one.rows]
        return replace(one, rows=[row for row in rows if row[2] or row[3]], runs={})

    def _parts(self, tape: Recording, base: int, found: dict[int, Ends]) -> dict[int, tuple[list[dict], list[int]]]:
        """Each worker's part: programs that are carried out once, what the call places first; and what is freed after it."""
        lasting = {i for ends in found.values() for i in ends.made}
        ahead: dict[int, list[Instruction]] = {}
        copy = replace(tape, code={}, names={})
        for index, rows in tape.code.items():
            ahead[index], copy.code[index] = _parted(rows, lasting) if tape.first else ([], _but_uploads(rows))
        if self.again:
            self._lowering.again(copy, lasting, True, self.again)
        made_parts: dict[int, tuple[list[dict], list[int]]] = {}
        for index, ends in found.items():
            rows = copy.code.get(index, [])
            taken = {i for row in rows for i in row.ids()[0]}
            between = [i for row in ahead.get(index, ()) for i in row.ids()[1] if i in taken and i not in ends.made]
            made = {i for row in tape.code.get(index, ()) for i in row.ids()[1]}
            parts = self._lowering.once(ahead.get(index, []), base, {*ends.made, *between})
            freed = [*between, *(i for i in ends.freed if i not in made)]
            made_parts[index] = parts + self._lowering.once(rows, base, {*ends.made}), freed
        return made_parts

    def _program(
        self, tape: Recording, base: int, found: dict[int, Ends], parts: dict[int, tuple[list[dict], list[int]]]
    ) -> BufferedInstructions:
        """The rest, as programs that are carried out once."""
        emitter = self._emitter
        emitter.resume_run(base)
        for index, ends in found.items():
            worker, (programs, freed) = self._cluster.workers[index], parts[index]
            for part in programs if not worker.lost else ():
                emitter.write(worker, emitter.define("program", part), (-1, 0))
            _write(worker, FREE, freed)
            _write(worker, FORGET, ends.forgotten)
        return self._outbox.written(base)


def _but_uploads(rows: Sequence[Instruction]) -> list[Instruction]:
    return [row for row in rows if row.define.kind != "upload"]


def _parted(rows: Sequence[Instruction], lasting: set[int]) -> tuple[list[Instruction], list[Instruction]]:
    """What only makes values that last out of nothing, weights that are placed where they are first used, and the rest: without
    it the first call compiles as later ones do.
    """
    ready = {i for row in rows if row.define.kind == "upload" for i in row.ids()[1]}
    ahead, rest = [], []
    touched: set[int] = set()
    roots: dict[int, int] = {}
    for row in _but_uploads(rows):
        reads, makes = row.ids()
        views = viewed(row)
        memory = [roots.get(i, i) for i in reads]
        roots.update((i, memory[views[k]] if k in views else i) for k, i in enumerate(makes))
        alone = row.define.kind == "op" and ready.issuperset(memory) and touched.isdisjoint(memory)
        if alone and lasting.issuperset(makes):
            ready.update(makes)
            ahead.append(row)
        else:
            touched.update(memory, makes)
            rest.append(row)
    return ahead, rest


def _write(worker: Worker, what: int, numbers: Sequence[int]) -> None:
    for first in range(0, 0 if worker.lost else len(numbers), LONGEST):
        some = numbers[first : first + LONGEST]
        worker.code += (what, 0, len(some), *some)
        worker.cut()


def _plain(rows: Sequence[Instruction]) -> bool:
    """Whether every name stands for one tensor."""
    seen: set[int] = set()
    for row in rows:
        reads, makes = row.ids()
        seen.update(reads)
        if not seen.isdisjoint(makes):
            return False
        seen.update(makes)
    return True
