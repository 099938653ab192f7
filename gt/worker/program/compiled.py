"""Programs of a compiled backend: their segments become calls into compiled code, their replays graphs of the device.

Segments are compiled when the first replay is over: so workers compile side by side, and none waits for another's compilation.
A segment that cannot be compiled, or whose inputs do not match its code, is executed as instructions. If some of its ops are
in the way, it is divided: these are executed, and what is between them is compiled. A device that can replay work records it
once a replay finds nothing more to compile. Knows no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

from gt.ir.dataflow import AliasSets, Definition, decode, exposed, summarize, writes
from gt.ir.instr import COMMUNICATION, FREE
from gt.worker.engine.base import CompiledSegment, Compiler, DeviceRecorder, DeviceReplays, Misfit, SegmentRefusal
from gt.worker.instructions.step import Row, Step, StepOfRows
from gt.worker.program.overlap import RecordedProgram, evicted_places, group_collectives, overlap_transfers
from gt.worker.program.partition import (
    BoundSegment,
    DefinitionTraits,
    bind_segment,
    definition_traits,
    output_bytes,
    partition,
    runs,
    saves_memory,
)
from gt.worker.program.peak import segments_at_peak
from gt.worker.program.program import Actions
from gt.worker.program.runner import ProgramRunner

MAX_COMPILATIONS = 3  # times that one segment is compiled: the layout of its inputs may change from replay to replay
MAX_REASON_CHARS = 300
MAX_REASONS = 8  # in the report of one program
ISSUING = ("alias", "shard", "partial", "fill")  # kinds that only issue work to the device, beside ops


class Segment:
    """One place in a program where compiled code may replace instructions."""

    def __init__(self, rows: list[Row], bound: BoundSegment, runner: ProgramRunner) -> None:
        self.rows, self.bound = rows, bound
        self.compiled: CompiledSegment | None = None
        self.signature: Any = None  # signature of its inputs, while it waits to be compiled
        self.why = ""  # reason why it stays instructions
        self.compilations = 0
        self.at_peak = True  # True if its instructions would set the peak of memory
        self._runner, self._tensors = runner, runner.tensors

    def __call__(self, code: list, at: int) -> None:
        # `compiled` may be unset below: the instructions are always there to execute instead, with the same result.
        compiled, tensors = self.compiled, self._tensors
        if compiled is None:
            self._runner.run_rows(self.rows)
            return
        bound = self.bound
        tensors.free(bound.dropped)
        if bound.before:
            self._runner.run_rows(bound.before)
        try:
            outputs = compiled([tensors[i] for i in bound.inputs])
        # The inputs do not match the code (strides, alignment), or one is absent. `sample_inputs` notes the new signature in
        # the next replay, so the segment is compiled again, up to MAX_COMPILATIONS times.
        except (Misfit, KeyError):
            self.compiled = None
            self.why = "" if self.compilations < MAX_COMPILATIONS else "its inputs have another layout in each replay"
            self._runner.run_rows(self.rows)
            return
        except Exception as error:
            self._fail(compiled, code, at, error)
        else:
            tensors.update(zip(bound.outputs, outputs, strict=True))
        tensors.free(bound.ended)

    def _fail(self, compiled: CompiledSegment, code: list, at: int, error: Exception) -> None:
        """Compiled code failed. If it cannot have written to inputs, the instructions are executed instead."""
        # Instructions after a half-done write would apply an update twice, so such a segment fails as a whole.
        if compiled.writes:
            self._runner.fail_segment(code, at, error, list(zip(self.bound.outputs, compiled.specs, strict=True)))
        elif self._runner.run_rows(self.rows):
            self.compiled, self.why = None, f"compiled code failed: {_short(error)}"

    def sample_inputs(self, compiler: Compiler) -> None:
        """Note the signature of the inputs, before the segment is executed as instructions."""
        if self.compiled is None and not self.why and self._runner.run_rows(self.bound.before):
            inputs = [self._tensors.get(i) for i in self.bound.inputs]
            self.signature = None if any(t is None for t in inputs) else compiler.signature(inputs)


class CompiledProgram:
    """The segments of one program on this worker. `report` may be called by any thread.

    A program that is executed once compiles a segment when the segment is reached, if that lowers the peak of memory. So does
    a program for a device that records, if no other worker waits for a message meanwhile; its other segments follow together.
    """

    def __init__(self, payload: dict[str, Any], runner: ProgramRunner) -> None:
        self.why = ""  # reason why the compiler is not the one that was asked for
        self._once = payload["once"]
        # Compiling inside a replay delays this worker by seconds to minutes. That is harmless only if no peer waits for a
        # message of this program.
        alone = payload["backend"] == "cudagraphs" and not payload["channels"] and not payload["actions"]
        self._compiles_when_reached = self._once or alone
        self.segments: list[Segment] = []
        self.compiler: Compiler | None = None
        self._ready = False
        self._traits: dict[int, DefinitionTraits] = {}
        self._apart: Counter[str] = Counter()  # ops that are in no segment, with the reasons
        self._instructions: dict[int, list[Row]] = {}  # place of a row that stands for several -> these rows
        self._replays: DeviceReplays | None = None
        self.inputs, self._defined = set[int](), set[int]()  # ids that it reads from before it, and that it makes
        runner.table.programs.add(self)
        self._unrecorded: Counter[str] = Counter()  # reasons for rows between recordings
        self._runner, self._tensors = runner, runner.tensors
        engine = runner.context.engine
        open_compiler = getattr(engine, "compiler", None)
        if open_compiler is None:
            self.why = f"the {engine.name} engine has no compiler"
        else:
            self.compiler, self.why = open_compiler(payload["backend"])

    def group_rows(self, rows: list[Row], code: list) -> list[Row]:
        """Rows in which each segment, and each batch of collectives, is one row."""
        # Two groupings: collectives of a batch first, then runs of ops between communications. `_instructions` keeps the rows
        # behind each grouped row; recording looks inside it.
        uses, made = exposed([at for at, _ in rows], code, self._runner.definition)
        self.inputs.update(set(uses) - self._defined)
        self._defined |= made
        rows, groups = group_collectives(rows, code, self._runner)
        self._instructions.update(groups)
        if self.compiler is None:
            return rows
        pieces = partition(rows, code, self._traits_of)
        at_peak = [True] * len(pieces)
        if self._compiles_when_reached:
            at_peak = segments_at_peak(pieces, code, self._runner.definition)
        return self._grouped(pieces, at_peak, code)

    def _traits_of(self, number: int) -> DefinitionTraits:
        if number not in self._traits:
            assert self.compiler is not None
            self._traits[number] = definition_traits(self._runner.definition(number), self.compiler.fits)
        return self._traits[number]

    def _grouped(self, pieces: Sequence[tuple[bool, list[Row]]], at_peak: Sequence[bool], code: list) -> list[Row]:
        """The rows of pieces, with one row for each segment among them. at_peak: by piece."""
        grouped: list[Row] = []
        for (fits, run), highest in zip(pieces, at_peak, strict=True):
            if not fits:
                grouped += run
                continue
            segment = Segment(run, bind_segment(run, code, self._runner.definition, self._traits_of), self._runner)
            segment.at_peak = highest
            self.segments.append(segment)
            # The row that stands for the segment has the place of its first instruction, whose seq errors then name.
            first = next(at for at, _ in run if code[at] != FREE)
            self._instructions.setdefault(first, run)  # not those of a part of a segment that was divided
            grouped.append((first, StepOfRows(run, self._with_inputs_back(segment.bound.inputs, self._step(segment)))))
        return grouped

    def _divide(self, segment: Segment, refusal: SegmentRefusal, code: list) -> None:
        """The ops that are in the way of its compilation become instructions; what is between them becomes segments."""
        places = {segment.bound.places[number] for number in refusal.calls}
        self._apart[_short(refusal.why)] += len(places)
        pieces = partition(segment.rows, code, self._traits_of, places)
        self.segments.remove(segment)
        segment.rows, segment.why = self._grouped(pieces, [segment.at_peak] * len(pieces), code), "divided"

    def _step(self, segment: Segment) -> Step:
        nbytes = output_bytes(segment.bound)
        runner = self._runner

        def step(code: list, at: int) -> None:
            # Compiled code makes all its outputs at once; instructions free as they go, so they may still fit.
            if nbytes and not runner.fits(nbytes):
                runner.run_rows(segment.rows)
                return
            if segment.compiled is None and self.compiler is not None:
                # The signature is that of real inputs: strides of an eager result are not known before it exists.
                segment.sample_inputs(self.compiler)
                if self._compiles_when_reached and segment.signature is not None:
                    self._compile_reached(segment, code)
            segment(code, at)

        return step

    def _with_inputs_back(self, ids: Sequence[int], step: Step) -> Step:
        """A step before which its inputs are on the device.

        The host may still compute the value of a parameter. A failure of that is told once, to who waits for it.
        """
        bring = self._tensors.bring

        def after_inputs(code: list, at: int) -> None:
            failed = None
            try:
                bring(ids)
            except Exception as error:
                failed = error
            # In any case: other workers may wait for the communication in it.
            step(code, at)
            if failed is not None:
                raise failed

        return after_inputs

    def _compile_reached(self, segment: Segment, code: list) -> None:
        if self._runner.recording:  # a device that records does not compile
            return
        if not (segment.at_peak and saves_memory(segment.bound)):
            return
        with self._runner.compiling():
            self._compile([segment], code, more=True)

    @property
    def waiting(self) -> list[Segment]:
        return [s for s in self.segments if s.compiled is None and s.signature is not None and not s.why]

    def after_replay(self, actions: Actions, code: list, randoms: Sequence[int]) -> None:
        """Compile the segments that wait for it, which may take long. Once none does, have the device record."""
        if self._once:
            return
        if self.waiting:
            with self._runner.compiling():
                self._compile(self.waiting, code)
        # Not in a replay that compiled: the recording must contain the compiled code, and compiled code must have run once.
        elif self.compiler is not None and self.compiler.recorder is not None and self._replays is None:
            self.compiler.compile(())  # no more will follow
            self._record(self.compiler.recorder, actions, code, randoms)

    def _compile(self, segments: Sequence[Segment], code: list, more: bool = False) -> None:
        assert self.compiler is not None
        self._ready = True
        try:
            results = self.compiler.compile([(segment.bound, segment.signature) for segment in segments], more)
        except Exception as error:
            # A compiler that fails costs speed only: the segments stay instructions, and `report` tells the reason.
            results = [SegmentRefusal(str(error))] * len(segments)
        for segment, result in zip(segments, results, strict=True):
            segment.compilations += 1
            segment.signature = None
            if not isinstance(result, SegmentRefusal):
                segment.compiled = result
            elif result.calls:
                self._divide(segment, result, code)
            else:
                segment.why = _short(result.why)

    @property
    def recorded(self) -> bool:
        """True once its replays are recordings, as far as its rows can be recorded."""
        return self._replays is not None

    def _record(self, recorder: DeviceRecorder, actions: Actions, code: list, randoms: Sequence[int]) -> None:
        """Have runs of rows recorded in the next replay: all rows that only issue work to the device.

        randoms: places in the code that each replay sets.
        """
        runner, definition = self._runner, self._runner.definition
        summary = summarize(code, definition)
        changed = _changed(code, definition, summary.sets)
        unchanged = {i for i in summary.live_out if summary.sets.root(i) not in changed}
        self._replays = replays = recorder.program(runner, _dropped(code, definition), unchanged)
        others = [program.inputs for program in runner.table.programs if program is not self]
        replays.leave(summary.live_out.intersection(set().union(*others)))
        rows = [row for _, part in actions for row in part]
        places = sorted(at for at, _ in rows)
        # `randoms` are places of seeds, within instructions: find the instruction that each belongs to.
        drawn = {places[bisect_right(places, place) - 1] for place in randoms}
        first = next((at for at, _ in rows if code[at] != FREE), None)
        # A part of a long program may consist of frees alone.
        if first is None:
            return
        marks: set[Step] = set()
        if any(name for name, _ in actions):
            rows = _marked(actions, replays, marks)

        # The new program: begin, then runs as graphs with unrecordable rows between them, then the end.
        recorded: list[Row] = [(first, StepOfRows((), runner.may_wait(replays.begin)))]
        moving: set[int] = set()  # ids that unrecorded rows make

        def within(row: Row) -> Sequence[Row]:
            return () if row[1] in marks else self._instructions.get(row[0], [row])

        program = RecordedProgram(code, definition, summary.sets, runner.table.device_only, within)
        obstacle = partial(_obstacle, recorder, program, drawn, evicted_places(rows, program))
        # Ids that unrecorded rows make have other memory each time. A graph that reads them needs slots, so `moving` follows
        # them.
        for fits, run in runs(rows, code, lambda at: not obstacle(at)):
            reads, makes = exposed([at for row in run for at, _ in within(row)], code, definition)
            if fits:
                run = overlap_transfers(run, program, replays)
                moving -= makes
                place = next((at for at, _ in run if code[at] != FREE), first)
                replay = replays.run(run, reads, makes, moving & set(reads))
                recorded.append((place, StepOfRows(run, self._with_inputs_back(reads, replay))))
            else:
                moving |= makes
                recorded += run
                self._unrecorded.update(obstacle(row[0]) for row in run if code[row[0]] != FREE and row[1] not in marks)
        recorded.append((first, StepOfRows((), replays.ending(summary.live_out))))
        # In place: the step of `bind_program` iterates over this list. Times of actions now come from marks on the device.
        actions[:] = [("", recorded)]

    def close(self) -> None:
        """The definition is forgotten: give memory back at once, not when the garbage collector runs."""
        self._runner.table.programs.discard(self)
        if self._replays is not None:
            self._replays.close()
        self.segments.clear()
        self._instructions.clear()

    def action_times(self) -> list[tuple[str, float, float]]:
        """Actions of the last replay, where the device alone knows their times."""
        return [] if self._replays is None else self._replays.action_times()

    def transfers(self) -> list[tuple[str, float, float]]:
        """The same of transfers on the side stream."""
        return [] if self._replays is None else self._replays.transfers()

    def report(self) -> dict[str, Any]:
        """For explain(): the compiler, counts of segments and graphs, and reasons for rows that stayed instructions."""
        compiled = [s.compiled for s in self.segments if s.compiled is not None]
        # Equal layers share compiled code: its seconds count once.
        distinct = {segment.key: astuple(segment.seconds) for segment in compiled}
        reasons = self._apart + Counter(s.why for s in self.segments if s.why)
        graphs, others = (0, []) if self._replays is None else self._replays.report()
        reasons.update(f"no graph: {why}" for why in (*others, *self._unrecorded.elements()))
        return {
            "backend": "eager" if self.compiler is None else self.compiler.name,
            "why": self.why,
            "segments": len(self.segments),
            "compiled": len(compiled),
            "distinct": len(distinct),
            "seconds": [sum(column) for column in zip(*distinct.values(), strict=True)],
            "ready": self._ready,
            "graphs": graphs,
            "reasons": [[count, why] for why, count in reasons.most_common(MAX_REASONS)],
        }


def _marked(actions: Actions, replays: DeviceReplays, marks: set[Step]) -> list[Row]:
    """Rows with a mark before each action, which has the place of the row after it. marks: gets these steps."""
    rows: list[Row] = []
    for name, part in (*actions, ("", [])):
        mark = StepOfRows((), replays.mark(name))
        marks.add(mark)
        rows += [((part or rows[-1:])[0][0], mark), *part]
    return rows


def _obstacle(recorder: DeviceRecorder, program: RecordedProgram, drawn: set[int], evicted: set[int], at: int) -> str:
    """Reason why an instruction cannot be recorded: it does more than issue the same work each time. "" if there is none."""
    define = program.definition(program.code[at])
    if define is None:
        return "unknown definition"
    name = define.payload["op"] if define.kind == "op" else define.kind

    # A graph repeats the same kernels on the same addresses: moving memory, fresh random numbers and host work rule it out.
    if at in evicted:
        return f"{name} uses a tensor that comes back to other memory each time"
    if at in drawn and not (define.kind == "op" and recorder.draws(define.payload)):
        return f"{name} draws other random numbers each time"
    if define.kind in COMMUNICATION:
        return "" if define.number in program.device_only else f"{name} goes through host memory"
    return "" if define.kind in ISSUING or (define.kind == "op" and recorder.records(define.payload)) else name


def _dropped(code: Sequence, definition: Definition) -> set[int]:
    """Ids that are freed before the first instruction."""
    freed: set[int] = set()
    for _, define, operands in decode(code, definition):
        if define is not None:
            break
        freed.update(operands)
    return freed


def _changed(code: Sequence, definition: Definition, sets: AliasSets) -> set[int]:
    """Memory to which an instruction writes, by the roots of its alias sets."""
    decoded = decode(code, definition)
    return {sets.root(i) for _, define, operands in decoded if define is not None for i in writes(define, operands)}


def _short(error: Exception | str) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_REASON_CHARS else text[:MAX_REASON_CHARS] + "..."
