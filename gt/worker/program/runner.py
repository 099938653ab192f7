"""Execution of bound instructions, for streams and for the programs among them.

The runner holds the table of definitions, knows which instruction is under way, reports a failure and leaves placeholders.
Generated code, compiled segments and recorders call it; it knows none of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

from gt.ir.instr import Define
from gt.ir.spec import Spec
from gt.worker.context import CountedWork, ExecutionContext, Rebindable
from gt.worker.instructions.step import Row, Step, StepTable
from gt.worker.placeholders import Placeholder
from gt.worker.plane.base import NotIssued, Unrecoverable
from gt.worker.process import op_errors
from gt.worker.process.memory_budget import NUMBERS_PER_INSTRUCTION, CheckedSteps
from gt.worker.process.tracer import Tracer
from gt.worker.program.graph_outputs import PendingOutputs

log = logging.getLogger("gt.worker")
ANSWERS = ("fetch", "describe")  # kinds whose failure answers a request


class Poisoned(BaseException):
    """No later op of this process can succeed: it has to end."""


class Unrecorded(Exception):
    """An instruction failed while it was recorded, before anything was done."""


class BoundDefinition(NamedTuple):
    """A definition as failures and programs need it."""

    kind: str
    outputs: list[Placeholder]
    define: Define | None  # None for a program


@dataclass(slots=True)
class DefinitionTable:
    """A worker's definitions by number."""

    steps: StepTable = field(default_factory=dict)
    definitions: dict[int, BoundDefinition] = field(default_factory=dict)
    small_results: dict[int, int] = field(default_factory=dict)  # bytes of results below PLANNED_BYTES, where memory is bounded
    rebindable: dict[int, Rebindable] = field(default_factory=dict)  # transfers that may go by the device alone later
    device_only: set[int] = field(default_factory=set)  # transfers that go by the device alone
    programs: WeakSet[Any] = field(default_factory=WeakSet)  # those with a compiler or a recorder

    def forget(self, numbers: Sequence[int]) -> None:
        tables: tuple[dict[int, Any], ...] = self.steps, self.definitions, self.small_results, self.rebindable
        for table in tables:
            for number in numbers:
                table.pop(number, None)
        self.device_only.difference_update(numbers)


class ProgramRunner:
    """Executes rows of a stream or program. One thread calls it; any thread may read `code`, `base` and `place`."""

    def __init__(self, context: ExecutionContext) -> None:
        self.context, self.tensors = context, context.tensors
        self.table = DefinitionTable()
        self.errors = op_errors.ErrorReports(context.send, context.tensors, context.budget, context.engine.storage)
        self.pending_outputs = PendingOutputs(lambda seq, error: self.report_error(seq, error, op_errors.text(error)))
        self.executed = 0  # instructions so far
        self.code: list = []  # the stream or program under way
        self.base = self.place = 0  # its first seq, and the place of the instruction under way
        self.is_compiling = False  # the step under way compiles, or waits for the device to record
        self.recording = False  # rows are recorded: a failure is raised, not reported
        self.tracer: Tracer | None = None  # set while a stream of a traced session is executed
        self.checks_small_results = False  # room is short: small results are compared with it one by one

    # ---- streams

    def begin(self, code: list, base: int) -> None:
        """A stream is next, whose seqs count from `base`."""
        self.checks_small_results = self.context.budget.begin(len(code))
        self.code, self.base, self.place = code, base, 0

    def definition(self, number: int) -> Define | None:
        return self.table.definitions[number].define

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Around work that may take long."""
        self.is_compiling = True
        try:
            yield
        finally:
            self.is_compiling = False

    def may_wait(self, step: Step) -> Step:
        """A step that may wait for the device, which counts as compiling."""

        def waiting(code: list, at: int) -> None:
            with self.compiling():
                step(code, at)

        return waiting

    def fits(self, nbytes: int) -> bool:
        """True if there is room for the results of several instructions; if not they are executed one by one."""
        return not self.checks_small_results and self.context.budget.fits(nbytes)

    # ---- programs

    def run_program(self, rows: list[Row], code: list, offset: int) -> None:
        """Carry out rows of a program, whose seqs count from that of the instruction that asked for the program."""
        # A program is called by a stream's instruction: the stream's position is restored for the failures of what follows in
        # it.
        outer = self.code, self.base, self.place
        self.code, self.base = code, self.base + offset
        # A failed copy of graph outputs is reported under the program's own seq.
        self.pending_outputs.seq = self.base
        self.checks_small_results = self.context.budget.begin(NUMBERS_PER_INSTRUCTION * len(rows))
        try:
            self.run_rows(rows)
        finally:
            self.code, self.base, self.place = outer

    def run_rows(self, rows: Sequence[Row]) -> bool:
        """Carry out rows of the program under way; a failed row is reported. True if none failed."""
        code, base, succeeded = self.code, self.base, True

        # Wrap the steps only if somebody asked: the common loop below has no checks and no clock.
        if self.checks_small_results:
            checked = CheckedSteps(self.table.steps, self.table.small_results, self.context.budget.need)
            rows = [(at, checked.step(code[at], step)) for at, step in rows]
        if self.tracer is not None and not self.recording:
            rows = self.tracer.rows(code, rows)
        for at, step in rows:
            self.place = at
            try:
                # A step gets the place of its operands: number and seq stand before them.
                step(code, at + 2)
            except Exception as error:
                # The rows after it still run, on placeholders: a peer would wait for a skipped collective without end.
                self.fail(code[at], code, at, base, error)
                succeeded = False
        self.executed += len(rows)
        return succeeded

    def run_all_or_none(self, rows: Sequence[Row]) -> CountedWork:
        """Carry out rows that are recorded. If one fails nothing is reported or counted, and Unrecorded is raised."""
        # The rows are recorded, not executed: what they counted (bytes sent, draws) is taken back, and added at each replay.
        before = self.context.counters()
        self.recording = True
        try:
            with self.compiling():
                self.run_rows(rows)
        except Unrecoverable as error:  # nobody waits for work that was not issued
            self.context.since(before).undo()
            raise Unrecorded(str(error.__context__)) from error
        except Exception:
            self.context.since(before).undo()
            raise
        finally:
            self.recording = False
        return self.context.since(before)

    # ---- failures

    def fail(self, number: int, code: list, at: int, base: int, error: Exception) -> None:
        """An instruction failed: report it, and leave placeholders so that the instructions that follow can run."""
        definition = self.table.definitions[number]
        seq, kind = base + code[at + 1], definition.kind
        log.debug("%s of op %d failed", kind, seq, exc_info=error)
        text = op_errors.text(error)
        self.report_error(seq, error, text, kind in ANSWERS)
        # The peers' kernels are in their devices' queues already and spin there. Placeholders do not help them: the world must
        # end.
        if isinstance(error, NotIssued):
            raise Unrecoverable(f"others wait on their GPUs for a {kind} that failed: {text}") from error

        # Placeholders have the shapes of the results. The dispatcher marks those ids as invalid by the report above.
        for output in definition.outputs:
            try:
                output.make(self.context, code, at + 2)
            except Exception as why:  # no room for a placeholder either: its readers fail in their turn
                log.debug("no placeholder for op %d", seq, exc_info=why)

    def fail_segment(self, code: list, at: int, error: Exception, outputs: Sequence[tuple[int, Spec]]) -> None:
        """Compiled code failed after it may have written: report its first op for all of them."""
        seq = self.base + code[at - 1]
        self.report_error(seq, error, f"{op_errors.text(error)} (in compiled code that begins with this op)")
        # Which of its ops failed is not known, so all outputs get zeros, even those that were already written.
        for tensor, spec in outputs:
            try:
                self.context.budget.need(spec.nbytes)
                self.tensors[tensor] = self.context.engine.zeros(spec)
            except Exception as why:
                log.debug("no placeholder for tensor %d", tensor, exc_info=why)

    def report_error(self, seq: int, error: Exception, text: str, answers: bool = False) -> None:
        """Report the failure of op `seq`. answers: it answers a request."""
        if self.recording:
            raise Unrecorded(text) from error
        self.errors.report(seq, error, text, answers)
        if self.context.engine.poisoned(error):
            # A device that has faulted (an illegal address, say) fails every later call: a new process is the only cure.
            raise Poisoned(text) from error
