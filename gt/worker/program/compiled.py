"""Compiled segments in a program: instructions at the first replay, from then on calls, and what became of each.

A program's segments are compiled when its first replay is over, so that workers compile side by side and none waits for
another's. Whatever cannot be compiled, or does not fit what was compiled, is carried out as instructions. Where the device
can replay what it was given to do, that is recorded once a replay has found nothing more to compile. Knows no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

from gt.ir.dataflow import Definition, decode, exposed, summarize
from gt.ir.instr import COMMUNICATION, FREE
from gt.worker.context import Step
from gt.worker.engine.base import CompiledSegment, Compiler, DeviceRecorder, DeviceReplays, Engine, Misfit, Strictly
from gt.worker.program.graph_outputs import Lent
from gt.worker.program.overlap import Batch, Each, beside, together
from gt.worker.program.partition import DefinitionTraits, Row, Wired, cut, known, left, lightens, runs, wire

TRIES = 3  # times that a segment is compiled, since what it is given may come to lie otherwise
SAID = 300  # characters of a reason
REASONS = 8  # told of one program
ISSUES = ("alias", "shard", "partial", "fill")  # kinds that do no more than issue work, beside ops

Parts = list[tuple[str, list[Row]]]  # rows by action
Fail = Callable[[list, int, Exception, Sequence[tuple[int, Any]]], None]  # (code, place, error, (id, spec) of each output)


class Segment:
    """One place in a program where compiled code may stand for instructions."""

    def __init__(self, rows: list[Row], wired: Wired, tensors: dict[int, Any], each: Each, fail: Fail) -> None:
        self.rows, self.wired = rows, wired
        self.compiled: CompiledSegment | None = None
        self.seen: Any = None  # of its inputs, while it waits to be compiled
        self.why = ""  # it stays as it is
        self.tries = 0
        self._held, self._each, self._fail = tensors, each, fail

    def __call__(self, code: list, at: int) -> None:
        compiled, held = self.compiled, self._held
        if compiled is None:
            self._each(self.rows)
            return
        wired = self.wired
        for tensor in wired.dropped:
            held.pop(tensor, None)
        if wired.before:
            self._each(wired.before)
        try:
            made = compiled([held[i] for i in wired.inputs])
        except (Misfit, KeyError):
            self.compiled = None
            self.why = "" if self.tries < TRIES else "what it is given lies otherwise from one replay to the next"
            self._each(self.rows)
            return
        except Exception as error:
            self._failed(compiled, code, at, error)
        else:
            held.update(zip(wired.outputs, made, strict=True))
        for tensor in wired.ended:
            held.pop(tensor, None)

    def _failed(self, compiled: CompiledSegment, code: list, at: int, error: Exception) -> None:
        """Where nothing can have been written the instructions say which of them it was, or do better."""
        if compiled.writes:
            self._fail(code, at, error, list(zip(self.wired.outputs, compiled.specs, strict=True)))
        elif self._each(self.rows):
            self.compiled, self.why = None, f"compiled code failed: {_short(error)}"

    def look(self, compiler: Compiler) -> None:
        """Before it is carried out as instructions: what it is given."""
        if self.compiled is None and not self.why and self._each(self.wired.before):
            inputs = [self._held.get(i) for i in self.wired.inputs]
            self.seen = None if any(t is None for t in inputs) else compiler.seen(inputs)


class CompiledProgram:
    """The segments of one program on this worker. `report` may be called by any thread."""

    def __init__(
        self,
        backend: str,
        engine: Engine,
        tensors: dict[int, Any],
        each: Each,
        fail: Fail,
        batch: Batch,
        reached: Callable[[Callable[[], None]], None] | None = None,
        once: bool = False,
    ) -> None:
        """reached: what compiles a segment when it is first come to, None to wait for the end of the first replay. once: there
        is one replay, for which only segments are compiled that make much which ends within them.
        """
        self.backend, self.why, self._batch = backend, "", batch
        self._reached, self._once = reached, once
        self.segments: list[Segment] = []
        self.compiler: Compiler | None = None
        self._ready = False
        self._inside: dict[int, list[Row]] = {}  # place of the first instruction of what is one row -> its instructions
        self._replays: DeviceReplays | None = None
        self._apart: Counter[str] = Counter()  # what is done between recordings
        self._held, self._each, self._fail = tensors, each, fail
        self.fits: Callable[[int], bool] = lambda nbytes: True  # whether there is room for what a segment makes
        opened = getattr(engine, "compiler", None)
        if opened is None:
            self.why = f"the {engine.name} engine has no compiler"
        else:
            self.compiler, self.why = opened(backend)

    def fold(self, rows: list[Row], code: Sequence, definition: Definition) -> list[Row]:
        """Rows with each segment as one."""
        rows, groups = together(rows, code, definition, self._batch, self._each)
        self._inside.update(groups)
        compiler = self.compiler
        if compiler is None:
            return rows
        asked: dict[int, DefinitionTraits] = {}

        def ask(number: int) -> DefinitionTraits:
            if number not in asked:
                asked[number] = known(definition(number), compiler.fits)
            return asked[number]

        found: list[Row] = []
        for fits, run in cut(rows, code, ask):
            if not fits:
                found += run
                continue
            segment = Segment(run, wire(run, code, definition, ask), self._held, self._each, self._fail)
            self.segments.append(segment)
            first = next(at for at, _ in run if code[at] != FREE)
            self._inside[first] = run
            found.append((first, self._step(segment)))
        return found

    def _step(self, segment: Segment) -> Callable[[list, int], None]:
        nbytes = left(segment.wired)

        def step(code: list, at: int) -> None:
            if nbytes and not self.fits(nbytes):
                self._each(segment.rows)
                return
            if segment.compiled is None and self.compiler is not None:
                segment.look(self.compiler)
                if self._reached is not None and segment.seen is not None and (not self._once or lightens(segment.wired)):
                    self._reached(partial(self._compile, segment))
            segment(code, at)

        return step

    @property
    def waiting(self) -> list[Segment]:
        return [s for s in self.segments if s.compiled is None and s.seen is not None and not s.why]

    def prepare(self) -> None:
        """Compile what can be, now that it is known what each segment is given."""
        for segment in self.waiting:
            self._compile(segment)
        self._ready = True

    def _compile(self, segment: Segment) -> None:
        assert self.compiler is not None
        self._ready = True
        segment.tries += 1
        try:
            segment.compiled = self.compiler.compile(segment.wired, segment.seen)
        except Exception as error:
            segment.why = _short(error)
        segment.seen = None

    @property
    def recorded(self) -> bool:
        """Whether its replays are what was recorded, as far as that goes."""
        return self._replays is not None

    @property
    def records(self) -> bool:
        """Whether what it does is still to be recorded."""
        return self.compiler is not None and self.compiler.recorder is not None and self._replays is None

    def record(
        self,
        parts: Parts,
        code: list,
        randoms: Sequence[int],
        definition: Definition,
        strictly: Strictly,
        direct: Container[int],
        lent: Lent,
        slowly: Callable[[Step], Step],
    ) -> None:
        """Have runs of rows recorded in the next replay: everything that only issues work to the device.

        randoms: places in the code that are filled anew in each replay. direct: definitions that move data by the device alone.
        slowly: makes a step of one that may wait for the device.
        """
        assert self.compiler is not None and self.compiler.recorder is not None
        recorder = self.compiler.recorder
        self._replays = whole = recorder.program(self._held, self._each, strictly, lent, _dropped(code, definition))
        rows = [row for _, part in parts for row in part]
        named = any(name for name, _ in parts)
        places = sorted(at for at, _ in rows)
        drawn = {places[bisect_right(places, place) - 1] for place in randoms}
        first = next((at for at, _ in rows if code[at] != FREE), None)
        if first is None:  # the end of a long program
            return
        found: list[Row] = [(first, slowly(whole.begin))]
        moving: set[int] = set()  # what other rows make
        marks: set[Step] = set()
        if named:  # a mark goes with the row after it
            rows = []
            for name, part in (*parts, ("", [])):
                marks.add(mark := whole.mark(name))
                rows += [((part or rows[-1:])[0][0], mark), *part]
        summary = summarize(code, definition)

        def inside(row: Row) -> Sequence[Row]:
            return () if row[1] in marks else self._inside.get(row[0], [row])

        apart = partial(_apart, recorder, direct, definition, code, drawn)
        for fits, some in runs(rows, code, lambda at: not apart(at)):
            reads, makes = exposed([at for row in some for at, _ in inside(row)], code, definition)
            if fits:
                some = beside(some, code, definition, summary.sets, direct, inside, whole)
                moving -= makes
                place = next((at for at, _ in some if code[at] != FREE), first)
                found.append((place, whole.run(some, reads, makes, moving & set(reads))))
            else:
                moving |= makes
                found += some
                self._apart.update(apart(row[0]) for row in some if code[row[0]] != FREE and row[1] not in marks)
        found.append((first, whole.ending(summary.live_out)))
        parts[:] = [("", found)]

    def close(self) -> None:
        """It is forgotten: what it holds is given back at once, and not when cycles are collected."""
        if self._replays is not None:
            self._replays.close()
        self.segments.clear()
        self._inside.clear()

    def stamps(self) -> list[tuple[str, float, float]]:
        """Actions of the last replay, where the device alone knows when they were."""
        return [] if self._replays is None else self._replays.stamps()

    def transfers(self) -> list[tuple[str, float, float]]:
        """The same of transfers beside them."""
        return [] if self._replays is None else self._replays.transfers()

    def report(self) -> dict[str, Any]:
        """For explain(): what runs, how many segments there are, how many forms, and what stayed as instructions, why."""
        compiled = [s.compiled for s in self.segments if s.compiled is not None]
        reasons = Counter(s.why for s in self.segments if s.why)
        graphs, others = (0, []) if self._replays is None else self._replays.report()
        reasons.update(f"no graph: {why}" for why in (*others, *self._apart.elements()))
        return {
            "backend": "eager" if self.compiler is None else self.compiler.name,
            "why": self.why,
            "segments": len(self.segments),
            "compiled": len(compiled),
            "distinct": len({one.key for one in compiled}),
            "ready": self._ready,
            "graphs": graphs,
            "reasons": [[count, why] for why, count in reasons.most_common(REASONS)],
        }


def _apart(
    recorder: DeviceRecorder, direct: Container[int], definition: Definition, code: Sequence, drawn: set[int], at: int
) -> str:
    """Why an instruction does not only issue work to the device, the same each time; "" if that is all it does."""
    define = definition(code[at])
    if define is None:
        return "what is not known here"
    name = define.payload["op"] if define.kind == "op" else define.kind
    if at in drawn and not (define.kind == "op" and recorder.draws(define.payload)):
        return f"{name} draws other random numbers each time"
    if define.kind in COMMUNICATION:
        return "" if define.number in direct else f"{name} goes through host memory"
    return "" if define.kind in ISSUES or (define.kind == "op" and recorder.records(define.payload)) else name


def _dropped(code: Sequence, definition: Definition) -> set[int]:
    """Ids that are freed before anything is done."""
    freed: set[int] = set()
    for _, define, operands in decode(code, definition):
        if define is not None:
            break
        freed.update(operands)
    return freed


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= SAID else text[:SAID] + "..."
