"""Values of small tensors that constants and uploads alone decide: a program reads them without a wait.

The recorder's batches are kept as they are, and followed once the program reads such a value. So recording an op costs nothing.
What is followed is a graph of rows between cells. A row is evaluated on this CPU when a read needs it. Rows on one memory are
evaluated in the order of the program, so writes through views are as on a worker. An op that is not evaluated makes what it
writes unknown.

A value is what the ops say. If a worker fails at one of them, the next read that waits raises that error.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from gt.client.values.foldable_ops import Folding, execute, folding, is_defined, is_whole
from gt.ir.instr import FIRST, FREE, LAUNCH, client_length
from gt.ir.template import Template

MAX_LOG = 1 << 16  # numbers of batches that are not followed, and words of uploads: some ten thousand ops
MAX_READ_BYTES, MAX_READ_ROWS = 4 << 20, 256  # that one read may evaluate: more takes longer than a wait
MAX_ROWS, MAX_CELLS, MAX_KEPT_BYTES = 1024, 4096, 8 << 20  # that are followed and kept
MAX_IDLE = 8  # times that a full log is followed for a program that has read nothing meanwhile


class Memory:
    """The memory of cells. ids: of the tensors that name it; blank: it is uninitialised; floats: it is decided by floats.

    makers, readers: numbers of rows that make or write it, and that read it; some are evaluated already. depth: rows of the
    longest chain that decides it, as they were when the last of them was followed.
    """

    __slots__ = ("blank", "depth", "floats", "ids", "makers", "nbytes", "readers")

    def __init__(self, nbytes: int, blank: bool = False, floats: bool = False) -> None:
        self.ids: set[int] = set()
        self.nbytes, self.blank, self.floats = nbytes, blank, floats
        self.depth = 0
        self.makers: list[int] = []
        self.readers: list[int] = []


class Cell:
    """One tensor. value: on the CPU, once it is evaluated; upload: the values of an uploaded one, which stay as they are."""

    __slots__ = ("memory", "upload", "value")

    def __init__(self, memory: Memory, upload: np.ndarray | None = None) -> None:
        self.memory, self.upload = memory, upload
        self.value: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        if self.value is None:
            assert self.upload is not None, "a row is evaluated before its operands"
            self.value, self.upload = torch.from_numpy(self.upload.copy()), None
        return self.value


@dataclass(slots=True)
class Row:
    """An op that is not evaluated yet. reads, makes: the memories of its operands, and those that it makes or writes."""

    template: Template
    cost: int
    ins: list[Cell]
    values: list
    outs: list[Cell]
    writes: list[Memory]
    reads: frozenset[Memory]
    makes: frozenset[Memory]

    def evaluate(self) -> bool:
        """Fill the outputs; False if devices may differ."""
        ins = [cell.tensor() for cell in self.ins]
        if not is_defined(self.template, ins, self.values):
            return False
        for cell, value in zip(self.outs, execute(self.template, ins, self.values), strict=True):
            cell.value = value
        return True


@dataclass(slots=True)
class _Batch:
    """Numbers of the op stream that are not followed yet, and the ids that ended with them."""

    code: list
    freed: Sequence[int]


@dataclass(slots=True)
class _Upload:
    number: int
    values: np.ndarray


@dataclass(slots=True)
class KnownValues:
    """The reads of one recorder, whose lock the caller holds. templates: its table."""

    templates: Mapping[int, Template]
    answered: int = 0  # reads
    launched: bool = False  # whether a program has been launched since a read has looked for its row
    _log: deque[_Batch | _Upload] = field(default_factory=deque)
    _logged: int = 0  # weight of the log
    _followed: int = 0  # numbers of the recorder's buffer that are followed
    _idle: int = 0
    _cells: dict[int, Cell] = field(default_factory=dict)  # by id
    _rows: dict[int, Row] = field(default_factory=dict)  # by number, in the order of the program
    _numbers: Iterator[int] = field(default_factory=itertools.count)  # of rows
    _foldings: dict[int, tuple[int, Folding | None, bool]] = field(default_factory=dict)  # by template: see _folding
    _added: int = 0  # bytes since _rows and _cells were bounded
    _interrupts: int = 0  # interrupts of the session that were seen

    # ---- called while ops are recorded

    def upload(self, number: int, values: np.ndarray) -> None:
        """A small tensor is uploaded. values: an array that nobody changes."""
        self._append(_Upload(number, values), values.nbytes // 8 + 2)

    def handed_over(self, code: list, freed: Sequence[int]) -> None:
        """These ops leave the buffer, and these ids have ended."""
        start, self._followed = self._followed, 0
        if len(code) > start or freed:
            self._append(_Batch(code[start:], freed), len(code) - start + len(freed))

    def _append(self, entry: _Batch | _Upload, weight: int) -> None:
        self._log.append(entry)
        self._logged += weight
        if self._logged > MAX_LOG:
            self._idle += 1
            # A program that reads nothing for long pays nothing: its log is shortened without being followed
            if self._idle <= MAX_IDLE and self.answered:
                self._follow_log()
            else:
                self._shorten()

    def _shorten(self) -> None:
        """Forget the older half of the log, and all that it followed."""
        self._forget_all()
        while self._log and self._logged > MAX_LOG // 2:
            entry = self._log.popleft()
            self._logged -= len(entry.code) + len(entry.freed) if type(entry) is _Batch else entry.values.nbytes // 8 + 2  # type: ignore[union-attr]

    def clear(self) -> None:
        """Any tensor may have changed, or the table of templates starts again. The recorder's buffer is empty."""
        self._clear_log()
        self._foldings.clear()
        self._followed = 0

    def _clear_log(self) -> None:
        """Any tensor may have changed."""
        self._forget_all()
        self._log.clear()
        self._logged = 0

    def _forget_all(self) -> None:
        self._cells.clear()
        self._rows.clear()
        self._added = 0

    # ---- a read

    def of(self, number: int, code: list, interrupts: int) -> torch.Tensor | None:
        """A tensor's value; None if this process cannot tell. code: the recorder's buffer.

        interrupts: of the session so far; each may have dropped ops that were handed over.
        """
        if interrupts != self._interrupts:
            # An interrupt may have dropped ops that were followed: nothing from before it is sure
            self._interrupts = interrupts
            self._clear_log()
            self._followed = len(code)
            return None
        # Batches that were handed over, then the part of the buffer that is new since the last read
        start = self._followed
        if self.launched:
            self.launched = False
            start = self._skip_to_launch(code)
        self._follow_log()
        self._follow(code, start)
        self._followed = len(code)
        cell = self._cells.get(number)
        if cell is None or cell.memory.blank or not self._evaluate(cell):
            return None
        self._idle = 0
        self.answered += 1
        return cell.tensor()

    def _evaluate(self, cell: Cell) -> bool:
        """Carry out the rows that decide a cell's value; False if they are too many, or one of them fails."""
        rows = self._deciding(cell.memory)
        if len(rows) > MAX_READ_ROWS or sum(row.cost for row in rows.values()) > MAX_READ_BYTES:
            return False
        try:
            with torch.inference_mode(False), torch.no_grad():
                # In normal mode even within inference_mode(): values outlive
                # the read, and an inference tensor could not be written
                exact = all(row.evaluate() for row in reversed(rows.values()))
        except Exception:  # the worker fails too, and says what is wrong with the arguments
            exact = False
        if exact:
            for number, row in rows.items():
                for memory in row.makes:
                    memory.depth = 0
                del self._rows[number]
            self._forget_numbers(rows.values())
        else:
            self._forget_all()
        return exact

    def _deciding(self, memory: Memory) -> dict[int, Row]:
        """The rows that decide a memory's present value, by number, the newest first. It ends after MAX_READ_ROWS.

        A row that reads a memory is executed before one that writes it.
        """
        # Backward from the read. A row is needed if it makes or writes memory that a needed row reads. A row that reads
        # a memory which a needed row will write has to be executed before that: else it would see the later value
        heap = [-number for number in memory.makers]
        heapq.heapify(heap)
        rows: dict[int, Row] = {}
        while heap and len(rows) <= MAX_READ_ROWS:
            number = -heapq.heappop(heap)
            row = self._rows.get(number)
            if row is None or number in rows:
                continue
            rows[number] = row
            earlier = [n for read in row.reads for n in read.makers if n < number]
            earlier += [n for written in row.writes for n in written.readers if n < number]
            for n in earlier:
                heapq.heappush(heap, -n)
        return rows

    def _forget_numbers(self, rows: Iterable[Row]) -> None:
        """These rows are evaluated, or dropped: the memories that they name forget all such rows."""
        for memory in {memory for row in rows for memory in row.reads | row.makes}:
            memory.makers = [n for n in memory.makers if n in self._rows]
            memory.readers = [n for n in memory.readers if n in self._rows]

    # ---- the op stream

    def _skip_to_launch(self, code: list) -> int:
        """Leave out what is before the last launch, which may write to any tensor. Returns the place to follow from."""
        behind = self._behind_launch(code, self._followed)
        if behind:
            self._clear_log()
            return behind
        for place, entry in enumerate(reversed(self._log), 1):
            if type(entry) is _Batch and (behind := self._behind_launch(entry.code, 0)):
                self._forget_all()
                for _ in range(len(self._log) - place):
                    self._log.popleft()
                entry.code = entry.code[behind:]
                break
        return self._followed

    def _behind_launch(self, code: list, at: int) -> int:
        """The place behind the last launch in these numbers, 0 for none."""
        behind = 0
        while at < len(code):
            number = code[at]
            if number < FIRST:
                at += client_length(code, at)
                if number == LAUNCH:
                    behind = at
            else:
                at += (self._foldings.get(number) or self._fold(number))[0]
        return behind

    def _fold(self, number: int) -> tuple[int, Folding | None, bool]:
        """The folding of a template that was not followed before."""
        self._foldings[number] = known = _folding(self.templates[number])
        return known

    def _follow_log(self) -> None:
        while self._log:
            entry = self._log.popleft()
            if type(entry) is _Upload:
                self._name(entry.number, Cell(Memory(entry.values.nbytes), entry.values))
            else:
                self._follow(entry.code, 0)  # type: ignore[union-attr]
                self._end(entry.freed)  # type: ignore[union-attr]
        self._logged = 0
        if self._added > MAX_KEPT_BYTES or len(self._rows) > MAX_ROWS // 2 or len(self._cells) > MAX_CELLS // 2:
            self._bound()

    def _follow(self, code: list, at: int) -> None:
        foldings, cells, end = self._foldings, self._cells, len(code)
        while at < end:
            number = code[at]
            if number < FIRST:
                if number == LAUNCH:  # a program may write to any tensor of before
                    self._forget_all()
                elif number == FREE:
                    self._end(code[at + 2 : at + 2 + code[at + 1]])
                at += client_length(code, at)
                continue
            length, way, by_first = foldings.get(number) or self._fold(number)
            # Most ops of a step are left out here: their first operand is computed by workers
            if way is not None and not (by_first and code[at + 2] not in cells):
                self._follow_op(self.templates[number], way, code, at + 2)
            at += length

    def _follow_op(self, template: Template, way: Folding, code: list, at: int) -> None:
        """An op that this process may evaluate, or that changes or names the memory of its operands."""
        # at: the row's operands; then its scalars and results
        scalars = at + len(template.ins)
        outs = scalars + template.values
        ids, values = code[at:scalars], code[scalars:outs]
        cells = [self._cells.get(number) for number in ids]
        known = [cell for cell in cells if cell is not None]
        # A longer chain is not evaluated, and following an op takes longer than leaving out one on an unknown value
        depth = 1 + max([cell.memory.depth for cell in known], default=0)
        if not way.folds or len(known) < len(cells) or depth > MAX_READ_ROWS or not _is_certain(way, known, values):
            # Not evaluated: its results are not known, and no longer the memory that it writes or names
            for place in way.touched:
                if (cell := cells[place]) is not None:
                    self._forget(cell.memory)
            return
        writes = [known[place].memory for place in template.writes]
        for memory in writes:
            memory.blank = False
        outputs = [out for out in template.outs if out.kind in ("new", "view")]
        results = []
        for number, out in zip(code[outs : outs + len(outputs)], outputs, strict=True):
            # A view is a cell of its base's memory, so that a write through either is seen by both
            memory = known[out.of].memory if out.kind == "view" else Memory(way.cost, way.blank, way.fractions)
            results.append(Cell(memory))
            self._name(number, results[-1])
        reads = frozenset([cell.memory for cell in known])
        makes = frozenset([*(cell.memory for cell in results), *writes])
        number = next(self._numbers)
        self._rows[number] = Row(template, way.cost, known, values, results, writes, reads, makes)
        for memory in reads:
            memory.readers.append(number)
        for memory in makes:
            memory.makers.append(number)
            memory.depth = depth

    def _name(self, number: int, cell: Cell) -> None:
        self._cells[number] = cell
        if not cell.memory.ids:
            self._added += cell.memory.nbytes
        cell.memory.ids.add(number)

    def _end(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (cell := self._cells.pop(number, None)) is not None:
                cell.memory.ids.discard(number)

    def _forget(self, memory: Memory) -> None:
        for number in memory.ids:
            self._cells.pop(number, None)

    def _bound(self) -> None:
        """Drop the rows that decide nothing alive. If too much is left, drop floats, and then all."""
        # Backward: a row stays if it fills memory that a living tensor, or a later row that stays, reads
        alive = {cell.memory for cell in self._cells.values()}
        kept = {}
        for number, row in reversed(self._rows.items()):
            if not alive.isdisjoint(row.makes):
                kept[number] = row
                alive |= row.reads
        self._keep(dict(reversed(kept.items())))
        self._added = sum(memory.nbytes for memory in alive)
        if self._is_much():
            self._drop_floats()
        if self._is_much():
            self._forget_all()

    def _keep(self, rows: dict[int, Row]) -> None:
        """Drop all other rows."""
        dropped, self._rows = self._rows, rows
        self._forget_numbers(dropped.values())

    def _is_much(self) -> bool:
        return self._added > MAX_KEPT_BYTES or len(self._rows) > MAX_ROWS or len(self._cells) > MAX_CELLS

    def _drop_floats(self) -> None:
        """Forget what rows on floats decide, such as counters that nobody reads: masks stay known."""
        lost: set[Memory] = set()
        kept = {}
        for number, row in self._rows.items():
            if any(memory.floats for memory in row.makes) or not lost.isdisjoint(row.reads):
                lost |= row.makes
            else:
                kept[number] = row
        self._keep(kept)
        for memory in lost:
            self._forget(memory)
            self._added -= memory.nbytes


def _is_certain(way: Folding, cells: list[Cell], values: list) -> bool:
    """False for an op that reads uninitialised memory, or makes an integer of a fraction."""
    for place, cell in enumerate(cells):
        # Uninitialised memory may be overwritten whole, as by fill_(), where no other tensor names a part of it
        fresh = way.overwrites and place == 0 and len(cell.memory.ids) == 1
        if cell.memory.blank and not fresh:
            return False
    return way.fractions or all(is_whole(value, way.fills) for value in values)


def _folding(template: Template) -> tuple[int, Folding | None, bool]:
    """Numbers of the template's rows; how its ops are evaluated, if they are; True if one has no effect on what is known unless
    its first operand is known: no other one is written or viewed, and it is not evaluated then."""
    way = folding(template)
    by_first = way is not None and bool(template.ins) and not any(way.touched)
    return 2 + len(template.ins) + template.values + template.results, way, by_first
