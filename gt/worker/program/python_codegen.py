"""Code generation: runs of a program's ops as straight-line Python, where ids are local variables and an op is a line or two.

A failed op is found by its line. Results until then are put where instructions look for them, and the rest of the run is
executed as instructions. Knows no engine.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Container, Sequence
from itertools import count
from typing import Any

from gt.ir.dataflow import Definition, aliases, bytes_alive, instruction, makes, reads
from gt.ir.instr import Define
from gt.worker.engine.codegen import bind
from gt.worker.instructions.numbers import copies, numbers, writes_unseen
from gt.worker.instructions.step import Row, StepOfRows
from gt.worker.process.memory_budget import PLANNED_BYTES, result_bytes
from gt.worker.program.overlap import group_collectives
from gt.worker.program.partition import runs
from gt.worker.program.program import Actions
from gt.worker.program.runner import ProgramRunner

log = logging.getLogger("gt.worker")

# Rows of one function: fewer gain nothing; a failed or stuck row is looked for in all of them
MIN_ROWS, MAX_ROWS = 4, 256
FILE = "<program>"  # file name of generated code in frames


# Example of a generated function, with short names for ops. %7 is read from the table, %9 ends here, and %8 outlives it:
# def run_3(code):
#  x0 = held[7]
#  x1 = aten_mm(x0, x0)
#  x2 = aten_mul(x1, code[41])
#  held[8] = x2
#  del x1
#  forget(9, None)
#  if host_copies or away: drop((9,))
class CodeGenerator:
    """Generates the functions of one program, which share a scope.

    randoms, values: places in the program's code of a seed and a counter, and of scalars, which each replay sets.
    """

    def __init__(self, randoms: Sequence[int], runner: ProgramRunner, values: Sequence[int] = ()) -> None:
        self.runner, self.definition = runner, runner.definition
        self.drawn = frozenset({*values, *(place for first in randoms for place in (first, first + 1))})
        # Globals of the functions: the objects that ops need, and by function the place in the program of each line.
        tensors = runner.tensors
        self.scope: dict[str, Any] = {"held": tensors, "forget": tensors.pop, "places": {}}
        self.scope |= {"host_copies": tensors.host_copies, "away": tensors.away}
        self.scope |= {"drop": tensors.drop, "renamed": tensors.renamed}
        self.early = runner.context.engine.early
        if self.early is not None:
            self.scope |= {"made": self.early.made, "changed_unseen": self.early.forget}
        self._source = runner.context.engine.source
        self._forms: dict[int, str] = {}
        self._numbers = count()

    def group_rows(self, rows: list[Row], code: list) -> list[Row]:
        """Rows in which each run of ops is one row."""
        rows = group_collectives(rows, code, self.runner)[0]
        grouped: list[Row] = []
        for fits, run in runs(rows, code, lambda at: bool(self.form(code[at]))):
            for first in range(0, len(run), MAX_ROWS):
                part = run[first : first + MAX_ROWS]
                grouped += [(part[0][0], GeneratedFunction(self, part, code))] if fits and len(part) >= MIN_ROWS else part
        return grouped

    def after_replay(self, actions: Actions, code: list, randoms: Sequence[int]) -> None:
        """Nothing to do: the functions are the same in each replay."""

    def form(self, number: int) -> str:
        """Statements of a definition, with holes for names of its tensors t, values v and outputs o; "" if it has none."""
        if number not in self._forms:
            define = self.definition(number)
            self._forms[number] = "" if define is None else self._form(define)
        return self._forms[number]

    def _form(self, define: Define) -> str:
        if define.kind == "alias":
            return "{o0} = {t0}"
        if define.kind != "op":
            return ""
        tensors, values = define.payload["tensors"], define.payload["values"]
        outs = define.operands - tensors - values
        t, v, o = ([f"{{{kind}{n}}}" for n in range(number)] for kind, number in (("t", tensors), ("v", values), ("o", outs)))
        try:
            return "\n".join(self._source(define.payload).statements(t, v, o, self.scope))
        except Exception:  # the step of the definition raises the error, if it is the program's
            log.debug("no code is generated for %s", define.payload["op"], exc_info=True)
            return ""

    def function(self, lines: list[str], places: list[int]) -> Callable[[list], None]:
        """A function of these lines. places: the place in the program of each line."""
        name = f"run_{next(self._numbers)}"
        # Line 1 is the `def`; the statements begin at line 2.
        self.scope["places"][name] = [places[0], *places]
        exec(compile(f"def {name}(code):\n " + "\n ".join(lines), FILE, "exec"), self.scope)
        return self.scope.pop(name)


class GeneratedFunction(StepOfRows):
    """A run of rows as one step."""

    separable = True

    def __init__(self, generator: CodeGenerator, rows: list[Row], code: list) -> None:
        self._runner, self.rows = generator.runner, rows
        writer = SourceWriter(generator, code)
        for row, lasting in zip(rows, _lasting(rows, code, generator.definition), strict=True):
            writer.add(row[0], lasting)
        self._ids = {name: i for i, name in writer.names.items()}
        self._run = generator.function(writer.lines, writer.places)
        self._peak_bytes = _peak(rows, code, generator.definition)

    def __call__(self, code: list, at: int) -> None:
        runner = self._runner
        # Too little room for all results at once: as instructions each result is checked by itself, and one fails alone.
        if self._peak_bytes >= PLANNED_BYTES and not runner.fits(self._peak_bytes):
            runner.run_rows(self.rows)
            runner.executed -= 1
            return
        failure: Exception | None = None
        try:
            self._run(code)
        except Exception as error:
            place, failure = self._stopped(error), error
        if failure is None:
            runner.executed += len(self.rows) - 1  # the caller counts one
        else:
            self._fail(place, failure)

    def _stopped(self, error: Exception) -> int:
        """The place of the failed op. Results of the ops before it are put where instructions look for them."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not self._run.__code__:
            trace = trace.tb_next
        assert trace is not None, "it was raised in there"
        # Locals of the stopped frame are the results so far, which later rows look up in the table.
        for name, tensor in trace.tb_frame.f_locals.items():
            if name in self._ids:
                self._runner.tensors[self._ids[name]] = tensor
        error.__traceback__ = trace.tb_next  # the frame would keep these tensors alive
        return _place(trace.tb_frame, trace.tb_lineno)

    def _fail(self, place: int, error: Exception) -> None:
        """The failed op fails as an instruction, and the rows after it are executed as instructions."""

        def fails(code: list, at: int) -> None:
            raise error

        failed = next(n for n, (at, _) in enumerate(self.rows) if at == place)
        self._runner.executed += failed - 1
        self._runner.run_rows([(place, fails), *self.rows[failed + 1 :]])


class SourceWriter:
    """A function's source while it is written. names: of the ids that are local variables."""

    def __init__(self, generator: CodeGenerator, code: list) -> None:
        self.names: dict[int, str] = {}
        self.lines: list[str] = []
        self.places: list[int] = []
        self._generator, self._code = generator, code
        self._local: set[int] = set()  # ids whose variable is set

    def add(self, at: int, lasting: Container[int]) -> None:
        """Write the instruction at a place. lasting: ids that it makes and that outlive the function."""
        code, before = self._code, len(self.lines)
        define, operands = instruction(code, at, self._generator.definition)
        if define is None:
            self._free(operands)
        else:
            ins, outs = reads(define, operands), makes(define, operands)
            for i in ins:
                if i not in self._local:
                    self.lines.append(f"{self._name(i)} = held[{i:d}]")
            # Holes of the form: tensors and outputs are local variables; values are constants, or read from the code if
            # replays set them.
            values = range(at + 2 + len(ins), at + 2 + define.operands - len(outs))
            holes = {f"t{n}": self.names[i] for n, i in enumerate(ins)} | {f"o{n}": self._name(i) for n, i in enumerate(outs)}
            holes |= {f"v{n}": self._value(place) for n, place in enumerate(values)}
            self.lines += self._generator.form(define.number).format_map(holes).split("\n")
            self.lines += [f"held[{i:d}] = {self.names[i]}" for i in outs if i in lasting]
            if self._generator.early is not None:
                self._announce(define, operands, lasting)
            if define.kind == "alias":
                self.lines += [f"if away: renamed({i:d})" for i in outs if i in lasting]
        self.places += [at] * (len(self.lines) - before)

    def _announce(self, define: Define, operands: Sequence, lasting: Container[int]) -> None:
        """Tell of numbers that outlive the function, as gt.worker.instructions.numbers does for instructions."""
        if writes_unseen(define):
            self.lines.append("changed_unseen()")
        copied = [operands[0]] if copies(define) else []
        for i in (operands[place] for place in numbers(define)):
            if i in lasting:
                self.lines.append(f"made({', '.join([str(i), *(self.names[k] for k in (i, *copied))])})")

    def _free(self, ids: Sequence[int]) -> None:
        local = [self.names[i] for i in dict.fromkeys(ids) if i in self._local]
        self.lines += [f"del {', '.join(local)}"] if local else []
        self.lines += [f"forget({i:d}, None)" for i in ids]
        self.lines.append(f"if host_copies or away: drop({tuple(ids)})")
        self._local.difference_update(ids)

    def _name(self, i: int) -> str:
        self._local.add(i)
        return self.names.setdefault(i, f"x{len(self.names)}")

    def _value(self, place: int) -> str:
        return f"code[{place}]" if place in self._generator.drawn else bind(self._generator.scope, self._code[place])


def _lasting(rows: Sequence[Row], code: list, definition: Definition) -> list[set[int]]:
    """By row: ids that it makes, that no later row makes again, and that none of these rows frees."""
    lasting: list[set[int]] = []
    over: set[int] = set()
    # Backwards: `over` has the ids that a later row makes anew or frees.
    for at, _ in reversed(rows):
        define, operands = instruction(code, at, definition)
        outs = set() if define is None else set(makes(define, operands))
        lasting.append(outs - over)
        over.update(operands if define is None else outs)
    return lasting[::-1]


def _peak(rows: Sequence[Row], code: list, definition: Definition) -> int:
    """The most bytes alive at once of the results of these rows, as far as their sizes are planned."""
    born: dict[int, tuple[int, int]] = {}  # id -> its row and bytes
    lifetimes: list[tuple[int, int | None, int]] = []
    for n, (at, _) in enumerate(rows):
        define, operands = instruction(code, at, definition)
        if define is None:
            lifetimes += [(first, n - 1, nbytes) for first, nbytes in (born.pop(i) for i in operands if i in born)]
            continue
        new = [i for i, source in aliases(define, operands) if source is None]
        if new:
            if new[-1] in born:
                lifetimes.append((born[new[-1]][0], None, born[new[-1]][1]))
            born[new[-1]] = n, max(result_bytes(define), 0)
    lifetimes += [(first, None, nbytes) for first, nbytes in born.values()]
    return max(0, *bytes_alive(len(rows), lifetimes))


def _place(frame: Any, line: int | None) -> int:
    """Place in the program of a generated line."""
    places = frame.f_globals["places"][frame.f_code.co_name]
    return places[(line or 1) - 1]


def current_instruction(thread: int) -> int | None:
    """Place in its program of the instruction that a thread executes in a generated function, else None. By any thread."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        # Code that defines the functions, and functions nested in one, are in the file too but have no places.
        if frame.f_code.co_filename == FILE and frame.f_code.co_name in frame.f_globals.get("places", ()):
            return _place(frame, frame.f_lineno)
        frame = frame.f_back
    return None
