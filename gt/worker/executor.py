"""Carries out instructions in order: definitions become bound steps, a stream of numbers names them.

A step that fails reports OpError and leaves placeholders of the right shape, so that what follows still runs and no
peer waits for a collective that never comes. Knows neither torch nor sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

from gt.errors import ProtocolError
from gt.ir.instr import COMMUNICATION, END, FIRST, FORGET, FREE, KINDS, Define
from gt.ir.spec import Spec
from gt.worker.context import Anew, Binder, Counted, ExecutionContext, Firsts, Step
from gt.worker.downloads import Outgoing
from gt.worker.engine.base import Engine
from gt.worker.instructions import communicate, compute
from gt.worker.placeholders import Blank, blanks
from gt.worker.plane.base import Doomed, Plane, Unmet
from gt.worker.process import op_errors
from gt.worker.process.memory_budget import OPERANDS, PLANNED, Budget, Careful, bounded, results
from gt.worker.process.profiler import Stamps, Timed
from gt.worker.program.compiled import ISSUES, CompiledProgram
from gt.worker.program.graph_outputs import Lent
from gt.worker.program.overlap import together
from gt.worker.program.partition import Row
from gt.worker.program.program import Bound, drawing, program
from gt.worker.program.python_codegen import Straight, whereabouts
from gt.worker.uploads import UploadBuffers

log = logging.getLogger("gt.worker")

Send = Callable[..., None]  # (message, frames=())
ANSWERS = ("fetch", "describe")
WAITING = ("compile", "load", "device")  # kinds by `where`: the thread may be waiting for the device


class Poisoned(BaseException):
    """No later op of this process can succeed: it has to end."""


class Unrecorded(Exception):
    """An instruction failed while it was recorded, before anything was done."""


class Executor:
    """One worker's tensors and definitions; `run` is called by one thread, `stats` by any."""

    def __init__(self, engine: Engine, plane: Plane, send: Send, budget: Budget | None = None) -> None:
        self.tensors: dict[int, Any] = {}
        self.budget = budget or Budget()
        self.budget.held = lambda session: sum(n for _, n in op_errors.held(self.tensors, session, engine.storage).values())
        self.uploads = UploadBuffers(admit=self.budget.admit)
        self.outgoing = Outgoing(send)
        self.instructions = 0
        self.worker = ExecutionContext(engine, plane, send, self.tensors, self.uploads, self.outgoing, self.budget)
        self._engine = engine
        self._send = send
        self.times: dict[int, float] = {}  # number -> the least that it took in timed Runs, until it is told
        self._steps: Bound = {}  # number -> what to call, numbers it takes in the stream
        # number -> its kind and outputs, for placeholders, and itself unless it is a program
        self._made: dict[int, tuple[str, list[Blank], Define | None]] = {}
        self._plans: dict[int, CompiledProgram] = {}  # by definition of a program, what of it is compiled
        self._directs: set[int] = set()  # definitions that move data by the device alone
        self._anew: dict[int, Anew] = {}  # and what may come to do so
        self._lent = Lent(lambda seq, error: self._trouble(seq, error, op_errors.text(error)))
        self._firsts = Firsts(self._steps)
        self._compiling = self._strict = self._busy = False
        self._small: dict[int, int] = {}  # bytes that definitions make which are not compared with the room by themselves
        self._careful = False  # whether they are now
        self._troubles = op_errors.Troubles(send, self.tensors, self.budget, engine.storage)
        self._stamps = Stamps()
        self._code: list = []  # of the Run under way, its base, and the place of the instruction that is carried out
        self._base = self._place = self._thread = self._peak = 0

    def define(self, rows: Sequence[list]) -> None:
        """Bind definitions from their wire form. What cannot be bound fails when it is run."""
        for row in rows:
            define = Define.from_wire(row)
            made = blanks(define)
            try:
                if define.kind == "program":
                    step = self._program(define)
                else:
                    step = self._compared(define, BIND[define.kind](self.worker, define.payload))
                    if self._engine.clock is None and (define.kind == "op" or define.kind in ISSUES):
                        step = self._firsts.watched(define.number, step)
                    elif self._direct(define):
                        self._directs.add(define.number)
                    elif define.kind in COMMUNICATION and self._engine.direct is not None:
                        step = self._anew[define.number] = Anew(step)
            except Exception as error:
                step = _failing(error)
            self._steps[define.number] = (step, 2 + define.operands)
            self._made[define.number] = (define.kind, made, define if define.kind != "program" else None)

    def _compared(self, define: Define, step: Step) -> Step:
        if not self.budget.bounded:
            return step
        made = results(define)
        if 0 < made < PLANNED:
            self._small[define.number] = made
        return bounded(step, made, self.budget)

    def _fits(self, nbytes: int) -> bool:
        """True if there is room for what several instructions make; if not they are carried out one by one."""
        return not self._careful and self.budget.fits(nbytes)

    def formed(self) -> None:
        """The plane reaches more: from here on all ends move data that way, by definitions from before and programs too."""
        for number, step in self._anew.items():
            define = self._made[number][2]
            assert define is not None, "a program moves nothing itself"
            try:
                if self._direct(define):
                    step.step = BIND[define.kind](self.worker, define.payload)
                    self._directs.add(number)
            except Exception as error:
                step.step = _failing(error)

    def _program(self, define: Define) -> Step:
        fold: Callable
        prepare: Callable = _nothing
        if define.payload["backend"] == "eager":
            source, randoms = self._engine.source, define.payload["randoms"]
            straight = Straight(randoms, self._definition, source, self.tensors, self._each, self._carried)
            straight.fits = self._fits
            fold = partial(self._unfolded, straight)
        else:
            batch = self.worker.plane.batch
            once = define.payload["once"]
            reached = self._reached if once or self._alone(define.payload) else None
            args = self._engine, self.tensors, self._each, self._fail_segment, batch, reached, once
            plan = self._plans[define.number] = CompiledProgram(define.payload["backend"], *args)
            plan.fits = self._fits
            fold = partial(plan.fold, definition=self._definition)
            prepare = _nothing if once else partial(self._prepare, plan)
        stamp = partial(self._stamps.put, define.number)
        rewind = self.worker.plane.rewind
        with self._compiles():
            step = program(define.payload, self._steps, self.tensors, self._play, stamp, fold, rewind, prepare)
        return drawing(self._engine, step) if define.payload["randoms"] else step

    @contextmanager
    def _compiles(self) -> Iterator[None]:
        """What it is at until then may take long."""
        self._compiling = True
        try:
            yield
        finally:
            self._compiling = False

    def _unfolded(self, straight: Straight, rows: list[Row], code: list) -> list[Row]:
        return straight.fold(together(rows, code, self._definition, self.worker.plane.batch, self._each)[0], code)

    def _carried(self, count: int) -> None:
        self.instructions += count

    def _definition(self, number: int) -> Define | None:
        return self._made[number][2]

    def run(self, code: list[int], base: int, epoch: int = 0, timed: bool = False) -> None:
        """Carry out a stream, seqs counting from base. ProtocolError for a number that was never defined."""
        steps: Bound | Timed | Careful = self._steps
        at, end, done = 0, len(code), 0
        self._careful = self.budget.begin(end)
        if self._careful:
            steps = Careful(self._steps, self._small, self.budget.need)
        if timed and self._engine.clock is not None:
            steps = Timed(steps, self._engine.clock, self.times)
        self.worker.epoch, self._thread = epoch, get_ident()
        self._code, self._base, self._place, lent, self._busy = code, base, 0, self._lent, True
        with self._engine.guard():
            while at < end:
                number = code[at]
                if number < FIRST:
                    at = self._drop(code, at)
                    continue
                try:
                    step, size = steps[number]
                except KeyError:
                    raise ProtocolError(f"instruction {number} was never defined") from None
                self._place = at
                if lent.there:
                    self._named(number, code[at + 2 : at + size])
                try:
                    step(code, at + 2)
                except Exception as error:
                    self._fail(number, code, at, base, error)
                at += size
                done += 1
        self._troubles.end()
        self.instructions += done
        self._busy = False
        if self._engine.progress is not None:
            self._engine.progress.note()

    def _named(self, number: int, operands: list) -> None:
        """An instruction comes while there is something in memory that replays write over."""
        if self._made[number][0] != "program":
            self._lent.named(operands)
        elif number not in self._plans or not self._plans[number].recorded:
            self._lent.settle()

    def _play(self, rows: list[Row], code: list, offset: int) -> None:
        """Carry out a program; its seqs count from that of the instruction that asked for it."""
        outer = self._code, self._base, self._place
        self._code, self._base = code, self._base + offset
        self._lent.seq = self._base
        self._careful = self.budget.begin(OPERANDS * len(rows))
        try:
            self._each(rows)
        finally:
            self._code, self._base, self._place = outer

    def _each(self, rows: Sequence[Row]) -> bool:
        """Carry out rows of the code under way; whether none failed."""
        code, base, well = self._code, self._base, True
        if self._careful:
            careful = Careful(self._steps, self._small, self.budget.need)
            rows = [(at, careful.step(code[at], step)) for at, step in rows]
        for at, step in rows:
            self._place = at
            try:
                step(code, at + 2)
            except Exception as error:
                self._fail(code[at], code, at, base, error)
                well = False
        self.instructions += len(rows)
        return well

    def _prepare(self, plan: CompiledProgram, parts: list[tuple[str, list[Row]]], code: list, randoms: Sequence[int]) -> None:
        """Compile what waits for it, which may take long; once nothing does, replay on the device what can be."""
        if plan.waiting:
            with self._compiles():
                plan.prepare()
        elif plan.records:
            plan.record(parts, code, randoms, self._definition, self._strictly, self._directs, self._lent, self._slowly)

    def _alone(self, payload: dict[str, Any]) -> bool:
        """Whether no other worker waits for a message while this one compiles: then that is done where it is first needed."""
        return payload["backend"] == "cudagraphs" and not payload["channels"] and not payload["actions"]

    def _reached(self, compile: Callable[[], None]) -> None:
        if self._strict:  # a device that records does not compile
            return
        with self._compiles():
            compile()

    def _slowly(self, step: Step) -> Step:
        def slow(code: list, at: int) -> None:
            with self._compiles():
                step(code, at)

        return slow

    def _strictly(self, rows: Sequence[Row]) -> Counted:
        """Carry out rows; where one fails, Unrecorded, and nobody is told: it is as if none had been carried out."""
        before = self.worker.tally()
        self._strict = True
        try:
            with self._compiles():
                self._each(rows)
        except Doomed as error:  # nobody waits for what was not issued
            self.worker.since(before).undo()
            raise Unrecorded(str(error.__context__)) from error
        except Exception:
            self.worker.since(before).undo()
            raise
        finally:
            self._strict = False
        return self.worker.since(before)

    def _direct(self, define: Define) -> bool:
        """Whether it was bound to move data by the device alone."""
        return define.kind in COMMUNICATION and self.worker.reach(communicate.peers(define.payload))[0] is self._engine.direct

    def where(self) -> tuple[int, int, str, int] | None:
        """(place in its Run, its op's seq, its kind, Runs that the device is through with) of the instruction that is being
        carried out; by any thread."""
        code, base, at = self._code, self._base, whereabouts(self._thread) or self._place
        made = self._made.get(code[at]) if at + 1 < len(code) else None
        if made is None or type(code[at + 1]) is not int:  # read while the other thread goes on
            return None
        progress, kind = self._engine.progress, made[0]
        if self._compiling or self._firsts.under_way:
            kind = "compile" if self._compiling else "load"
        elif kind == "fetch" and progress is not None:
            kind = "device"
        return (at, base + code[at + 1], kind, progress.come() if progress is not None else 0)

    def _waits(self) -> bool:
        """Whether the executing thread may be waiting within the device's driver: who asks it anything then waits too."""
        where = self.where() if self._busy and self._engine.progress is not None else None
        return where is not None and where[2] in WAITING

    def stats(self, programs: Sequence[int] = ()) -> dict[str, Any]:
        """The worker's part of gt.stats(), without its name; actions of the last replay of these definitions."""
        held, free = list(self.tensors.values()), not self._waits()
        if free:
            self._peak = self._engine.peak()
        memory = dict(map(self._engine.storage, held))
        return {
            "device": self._engine.kind,
            "instructions": self.instructions,
            "collectives": dict(self.worker.collectives),
            "live_tensors": len(held),
            "live_bytes": sum(memory.values()),
            "peak_bytes": self._peak,
            "memory_used": self.budget.used(),
            "memory_limit": self.budget.limit,
            "definitions": len(self._steps),
            "actions": self._stamps.actions(programs, self._plans) if free else [],
            "transfers": [t for plan in map(self._plans.get, programs if free else ()) if plan for t in plan.transfers()],
            "plans": [plan.report() for plan in map(self._plans.get, programs) if plan is not None],
            "transport": self.worker.plane.transport,
            **self.worker.plane.counters(),
        }

    def _drop(self, code: list[int], at: int) -> int:
        """FREE, FORGET or END."""
        if code[at] not in (FREE, FORGET, END):
            raise ProtocolError(f"instruction {code[at]} was never defined")
        first = at + 3
        last = first + code[at + 2]
        if code[at] == END:
            for number in [i for i in self.tensors if code[first] <= i < code[first + 1]]:
                del self.tensors[number]
            return last
        tables: tuple[dict, ...] = (self.tensors,)
        if code[at] == FORGET:
            tables = self._steps, self._made, self._plans, self._anew, self._small
            self._forget([plan for plan in map(self._plans.get, code[first:last]) if plan is not None])
            self._directs.difference_update(code[first:last])
        for table in tables:
            for number in code[first:last]:
                table.pop(number, None)
        return last

    def _forget(self, plans: Sequence[CompiledProgram]) -> None:
        if plans:
            self._lent.settle()  # the memory is its program's
        with self._compiles():
            for plan in plans:
                plan.close()

    def _fail(self, number: int, code: list[int], at: int, base: int, error: Exception) -> None:
        name, made, _ = self._made[number]
        seq = base + code[at + 1]
        log.debug("%s of op %d failed", name, seq, exc_info=error)
        text = op_errors.text(error)
        self._trouble(seq, error, text, name in ANSWERS)
        if isinstance(error, Unmet):
            raise Doomed(f"others wait on their GPUs for a {name} that failed: {text}") from error
        for blank in made:
            try:
                blank.make(self.worker, code, at + 2)
            except Exception as why:  # no room for a placeholder either: what uses it fails in its turn
                log.debug("no placeholder for op %d", seq, exc_info=why)

    def _fail_segment(self, code: list, at: int, error: Exception, outs: Sequence[tuple[int, Spec]]) -> None:
        """Compiled code failed, that may have written by then: its first op stands for all of them."""
        self._trouble(self._base + code[at - 1], error, f"{op_errors.text(error)} (in compiled code that begins with this op)")
        for tensor, spec in outs:
            try:
                self.budget.need(spec.nbytes)
                self.tensors[tensor] = self._engine.zeros(spec)
            except Exception as why:
                log.debug("no placeholder for tensor %d", tensor, exc_info=why)

    def _trouble(self, seq: int, error: Exception, text: str, asked: bool = False) -> None:
        if self._strict:
            raise Unrecorded(text) from error
        self._troubles.tell(seq, error, text, asked)
        if self._engine.poisoned(error):
            raise Poisoned(text) from error


def _nothing(parts: list, code: list, randoms: Sequence[int]) -> None:
    pass


def _failing(error: Exception) -> Step:
    def step(code: list[int], at: int) -> None:
        raise error

    return step


BIND: dict[str, Binder] = {
    **{kind: getattr(compute, kind) for kind in KINDS if hasattr(compute, kind)},
    **{kind: getattr(communicate, kind) for kind in KINDS if hasattr(communicate, kind)},
}
