"""Runs of a program's ops as straight-line Python: ids are local variables, an op is a line or two, and nothing is looked up.

What fails is found by its line: what was made until then is put where instructions look for it, and the rest is carried out
as instructions. Knows no engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence
from itertools import count
from typing import Any

from gt.ir.dataflow import Definition, aliases, bytes_alive, instruction, makes, reads
from gt.ir.instr import Define
from gt.worker.engine.codegen import Source, bind
from gt.worker.process.memory_budget import PLANNED, results
from gt.worker.program.overlap import Each
from gt.worker.program.partition import Row, runs

FEWEST, MOST = 4, 256  # rows of one function: fewer gain nothing, and what fails or is stuck is looked for in all of them
FILE = "<program>"  # what tells frames of these functions from others


class Straight:
    """What the functions of one program share. randoms: places in its code of a seed and a counter, filled anew each time."""

    def __init__(
        self,
        randoms: Sequence[int],
        definition: Definition,
        source: Callable[[dict[str, Any]], Source],
        tensors: dict[int, Any],
        each: Each,
        carried: Callable[[int], None],
    ) -> None:
        """each: carries rows out, and tells of those that fail. carried: is told how many others were."""
        self.tensors, self.each, self.carried, self.definition = tensors, each, carried, definition
        self.drawn = frozenset(place for first in randoms for place in (first, first + 1))
        # Globals of the functions: what ops need, and by function the place in the program that each line is of.
        self.scope: dict[str, Any] = {"held": tensors, "forget": tensors.pop, "places": {}}
        self._source = source
        self._forms: dict[int, str] = {}
        self._numbers = count()
        self.fits: Callable[[int], bool] = lambda nbytes: True  # whether there is room for what a function makes

    def fold(self, rows: Sequence[Row], code: list) -> list[Row]:
        """Rows with runs of ops as one."""
        found: list[Row] = []
        for fits, run in runs(rows, code, lambda at: bool(self.form(code[at]))):
            for first in range(0, len(run), MOST):
                part = run[first : first + MOST]
                found += [(part[0][0], GeneratedFunction(self, part, code))] if fits and len(part) >= FEWEST else part
        return found

    def form(self, number: int) -> str:
        """Statements of a definition, to be filled with names of its tensors t, values v and outputs o; "" if it has none."""
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
        t, v, o = ([f"{{{kind}{n}}}" for n in range(many)] for kind, many in (("t", tensors), ("v", values), ("o", outs)))
        try:
            return "\n".join(self._source(define.payload).statements(t, v, o, self.scope))
        except Exception:  # its own step raises that each time
            return ""

    def function(self, lines: list[str], places: list[int]) -> Callable[[list], None]:
        """places: of each line."""
        name = f"stretch{next(self._numbers)}"
        self.scope["places"][name] = [places[0], *places]
        exec(compile(f"def {name}(code):\n " + "\n ".join(lines), FILE, "exec"), self.scope)
        return self.scope.pop(name)


class GeneratedFunction:
    """Rows as one step."""

    def __init__(self, whole: Straight, rows: list[Row], code: list) -> None:
        self._whole, self._rows = whole, rows
        text = Text(whole, code)
        for row, lasting in zip(rows, _lasting(rows, code, whole.definition), strict=True):
            text.add(row[0], lasting)
        self._ids = {name: i for i, name in text.names.items()}
        self._run = whole.function(text.lines, text.places)
        self._makes = _peak(rows, code, whole.definition)

    def __call__(self, code: list, at: int) -> None:
        error = None
        if self._makes >= PLANNED and not self._whole.fits(self._makes):
            self._whole.each(self._rows)
            self._whole.carried(-1)
            return
        try:
            self._run(code)
        except Exception as found:
            place, error = self._stopped(found), found
        if error is None:
            self._whole.carried(len(self._rows) - 1)  # who calls counts one
        else:
            self._fail(place, error)

    def _stopped(self, error: Exception) -> int:
        """The place of what failed; what was made before is where instructions look for it."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not self._run.__code__:
            trace = trace.tb_next
        assert trace is not None, "it was raised in there"
        for name, tensor in trace.tb_frame.f_locals.items():
            if name in self._ids:
                self._whole.tensors[self._ids[name]] = tensor
        error.__traceback__ = trace.tb_next  # or it would keep all of these
        return _place(trace.tb_frame, trace.tb_lineno)

    def _fail(self, place: int, error: Exception) -> None:
        """What failed fails as an instruction, and what is behind it is carried out as such."""

        def fails(code: list, at: int) -> None:
            raise error

        failed = next(n for n, (at, _) in enumerate(self._rows) if at == place)
        self._whole.carried(failed - 1)
        self._whole.each([(place, fails), *self._rows[failed + 1 :]])


class Text:
    """A function's source while it is written. names: of the ids that are local variables."""

    def __init__(self, whole: Straight, code: list) -> None:
        self.names: dict[int, str] = {}
        self.lines: list[str] = []
        self.places: list[int] = []
        self._whole, self._code = whole, code
        self._local: set[int] = set()  # ids whose variable is there

    def add(self, at: int, lasting: Container[int]) -> None:
        """The instruction at a place. lasting: ids that it makes and that are there when all is done."""
        code, before = self._code, len(self.lines)
        define, operands = instruction(code, at, self._whole.definition)
        if define is None:
            self._free(operands)
        else:
            ins, outs = reads(define, operands), makes(define, operands)
            for i in ins:
                if i not in self._local:
                    self.lines.append(f"{self._name(i)} = held[{i:d}]")
            values = range(at + 2 + len(ins), at + 2 + define.operands - len(outs))
            holes = {f"t{n}": self.names[i] for n, i in enumerate(ins)} | {f"o{n}": self._name(i) for n, i in enumerate(outs)}
            holes |= {f"v{n}": self._value(place) for n, place in enumerate(values)}
            self.lines += self._whole.form(define.number).format_map(holes).split("\n")
            self.lines += [f"held[{i:d}] = {self.names[i]}" for i in outs if i in lasting]
        self.places += [at] * (len(self.lines) - before)

    def _free(self, ids: Sequence[int]) -> None:
        local = [self.names[i] for i in dict.fromkeys(ids) if i in self._local]
        self.lines += [f"del {', '.join(local)}"] if local else []
        self.lines += [f"forget({i:d}, None)" for i in ids]
        self._local.difference_update(ids)

    def _name(self, i: int) -> str:
        self._local.add(i)
        return self.names.setdefault(i, f"x{len(self.names)}")

    def _value(self, place: int) -> str:
        return f"code[{place}]" if place in self._whole.drawn else bind(self._whole.scope, self._code[place])


def _lasting(rows: Sequence[Row], code: list, definition: Definition) -> list[set[int]]:
    """By row, the ids that it makes, nothing in these rows frees, and none behind it makes again."""
    found: list[set[int]] = []
    over: set[int] = set()
    for at, _ in reversed(rows):
        define, operands = instruction(code, at, definition)
        outs = set() if define is None else set(makes(define, operands))
        found.append(outs - over)
        over.update(operands if define is None else outs)
    return found[::-1]


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
            born[new[-1]] = n, max(results(define), 0)
    lifetimes += [(first, None, nbytes) for first, nbytes in born.values()]
    return max(0, *bytes_alive(len(rows), lifetimes))


def _place(frame: Any, line: int | None) -> int:
    """Place in the program of a line of one of these functions."""
    places = frame.f_globals["places"][frame.f_code.co_name]
    return places[(line or 1) - 1]


def whereabouts(thread: int) -> int | None:
    """The place in its program that a thread is at, if it is in such a function; by any thread."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        # The code that defines the functions, and what is nested in one, is in the file too and has no places.
        if frame.f_code.co_filename == FILE and frame.f_code.co_name in frame.f_globals.get("places", ()):
            return _place(frame, frame.f_lineno)
        frame = frame.f_back
    return None
