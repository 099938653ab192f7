"""Data-flow analysis of instruction streams: decoding, def-use, alias sets, last uses, bytes alive. Knows no session, no torch.

`accesses` is flow-sensitive, as value numbering is: a name that is defined again is other memory. `AliasSets` is
flow-insensitive: names that ever share memory are one set (union-find). Example, where `t` is a view, `add_` writes its first:

    0  %2 = mul %0 %1     makes fresh memory m                        m is alive in rows 0 to 2
    1  %3 = t %2          %3 names m too
    2  add_ %3 %1         writes m: its version is 1 from here on     the last use of %3, and of m
    3  %5 = relu %0       makes fresh memory n                        before it FREE %2 %3 may be written

Writes and views are facts of a definition, by the table of ops (`gt.ir.instr.Effects`); a name proves nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple, Protocol

from gt.ir.instr import FIRST, Define

Definition = Callable[[int], Define | None]
OUTPUT_BITS = 20  # outputs of one instruction, below this power of two, in the name of fresh memory
NONE: Mapping[int, int] = MappingProxyType({})
OLDER = -1  # in AliasSets.memory: all memory from before the stream


class Accessing(Protocol):
    """An instruction with its operands, as far as data flow goes."""

    define: Define

    @property
    def reads(self) -> list[int]: ...

    @property
    def makes(self) -> list[int]: ...


# ---- decoding


def places(code: Sequence, size: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """Start and end of each instruction of a stream to workers.

    size: operands of a definition by its number. A number below FIRST is a reserved instruction, which has its own length.
    """
    at, end = 0, len(code)
    while at < end:
        number = code[at]
        after = at + 3 + code[at + 2] if number < FIRST else at + 2 + size(number)
        yield at, after
        at = after


def decode(code: Sequence, definition: Definition) -> Iterator[tuple[int, Define | None, Sequence]]:
    """Place, definition and operands of each instruction of a stream to workers.

    A reserved instruction (FREE, FORGET, END) has no definition, and its operands are the ids or numbers that it names.
    """
    at, end = 0, len(code)
    while at < end:
        number = code[at]
        if number < FIRST:
            after = at + 3 + code[at + 2]
            yield at, None, code[at + 3 : after]
        else:
            define = definition(number)
            assert define is not None, f"instruction {number} of a stream was never defined"
            after = at + 2 + define.operands
            yield at, define, code[at + 2 : after]
        at = after


def instruction(code: Sequence, at: int, definition: Definition) -> tuple[Define | None, Sequence]:
    """The one instruction at a place, as `decode` gives it."""
    number = code[at]
    if number < FIRST:
        return None, code[at + 3 : at + 3 + code[at + 2]]
    define = definition(number)
    assert define is not None, f"instruction {number} of a stream was never defined"
    return define, code[at + 2 : at + 2 + define.operands]


# ---- def-use of one instruction


def reads(define: Define, operands: Sequence) -> Sequence:
    """Tensors that an instruction reads, or changes in place."""
    return operands[define.effects.reads]


def makes(define: Define, operands: Sequence) -> Sequence:
    """Tensors that an instruction defines."""
    return operands[define.effects.makes]


def writes(define: Define, operands: Sequence) -> list[int]:
    """Tensors whose memory an instruction changes in place."""
    return [operands[k] for k in define.effects.writes]


def aliases(define: Define, operands: Sequence) -> list[tuple[int, int | None]]:
    """Tensors that an instruction defines, each with the tensor whose memory it shares, or None for fresh memory."""
    views = define.effects.views
    return [(i, operands[views[n]] if n in views else None) for n, i in enumerate(operands[define.effects.makes])]


# ---- memory, flow-sensitive


class MemoryAccess(NamedTuple):
    """The memory of each tensor that one instruction reads and makes, in the order of its operands."""

    reads: list[int]
    makes: list[int]


def accesses(
    rows: Sequence[Accessing], numbers: Sequence[int] | None = None, shared: Mapping[int, int] = NONE
) -> list[MemoryAccess]:
    """The memory that each row reads and makes. Memory from before the rows has the name of the tensor.

    Fresh memory has a negative name, of the number of its maker (its place unless `numbers` says otherwise) and its output.
    shared: tensors from before that share the memory of another one, with that. The rows themselves do not show it.
    """
    memory = dict(shared)
    result = []
    for place, row in enumerate(rows):
        number = place if numbers is None else numbers[place]
        # Reads come before the row's own definitions: `%2 = relu %2` reads the old memory. A view has its operand's memory.
        used = [memory.get(tensor, tensor) for tensor in row.reads]
        views = row.define.effects.views
        defined = []
        for output, tensor in enumerate(row.makes):
            memory[tensor] = base = used[views[output]] if output in views else ~(number << OUTPUT_BITS | output)
            defined.append(base)
        result.append(MemoryAccess(used, defined))
    return result


# Of the tensors that a row reads: the numbers of their makers, their memory, and the writes to it so far; None for no such
Definitions = tuple[tuple, tuple, tuple]


def reaching_definitions(
    rows: Sequence[Accessing], numbers: Sequence[int] | None = None, shared: Mapping[int, int] = NONE
) -> list[Definitions]:
    """The definitions that reach each row. Two orders of rows give the same values if these are the same in both.

    numbers: of the makers; shared: memory from before. Both as for `accesses`.
    """
    maker: dict[int, int] = {}
    versions: dict[int, int] = {}  # by memory
    result: list[Definitions] = []
    for place, (row, access) in enumerate(zip(rows, accesses(rows, numbers, shared))):
        # What the row reads is as it was before the row's own writes.
        used = access.reads
        result.append((tuple(map(maker.get, row.reads)), tuple(used), tuple(map(versions.get, used))))
        for k in row.define.effects.writes:
            versions[used[k]] = versions.get(used[k], 0) + 1
        maker.update(dict.fromkeys(row.makes, place if numbers is None else numbers[place]))
    return result


# ---- memory, flow-insensitive


@dataclass(slots=True)
class AliasSets:
    """Union-find over tensors: `root` is the same for all that ever share memory. older: roots of memory from before."""

    parents: dict[int, int] = field(default_factory=dict)
    older: set[int] = field(default_factory=set)

    def root(self, tensor: int) -> int:
        parents = self.parents
        top = tensor
        while parents.setdefault(top, top) != top:
            top = parents[top]
        # Path compression: later look-ups of these tensors take one step.
        while parents[tensor] != top:
            parents[tensor], tensor = top, parents[tensor]
        return top

    def union(self, tensor: int, other: int) -> None:
        self.parents[self.root(tensor)] = self.root(other)

    def memory(self, tensor: int) -> int:
        """As `root`, and OLDER for all memory from before: which of that is shared, the stream does not say."""
        root = self.root(tensor)
        return OLDER if root in self.older else root


@dataclass(slots=True)
class StreamSummary:
    """A whole stream that frees what is dead. made: tensors it defines. live_out: those of them whose memory is named at its
    end.
    """

    sets: AliasSets
    made: set[int]
    live_out: set[int]


def summarize(code: Sequence, definition: Definition) -> StreamSummary:
    """Alias sets of a stream, and the tensors that are live out of it."""
    sets, fresh = AliasSets(), set[int]()
    alive: set[int] = set()
    older: set[int] = set()
    for _, define, operands in decode(code, definition):
        if define is None:
            alive.difference_update(operands)
            continue
        # Read and not defined here: its memory is from before the stream.
        older.update(i for i in reads(define, operands) if i not in fresh)
        for tensor, source in aliases(define, operands):
            fresh.add(tensor)
            alive.add(tensor)
            if source is not None:
                sets.union(tensor, source)

    # A tensor that is freed while a view of it lives on is live out: its memory is still named.
    roots = {sets.root(tensor) for tensor in alive}
    sets.older = set(map(sets.root, older))
    return StreamSummary(sets, fresh, {tensor for tensor in fresh if sets.root(tensor) in roots})


def exposed(starts: Iterable[int], code: Sequence, definition: Definition) -> tuple[list[int], set[int]]:
    """Upward-exposed uses of the instructions at these places, in order, and all tensors that they define."""
    uses: dict[int, None] = {}
    defined: set[int] = set()
    for at in starts:
        define, operands = instruction(code, at, definition)
        if define is not None:
            uses.update(dict.fromkeys(i for i in reads(define, operands) if i not in defined))
            defined.update(makes(define, operands))
    return list(uses), defined


# ---- lifetimes


def last_uses(rows: Sequence[Accessing]) -> tuple[dict[int, int], dict[int, int]]:
    """The first definition of each tensor that rows make, and the last use of each tensor that they name, by row."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for n, row in enumerate(rows):
        for i in row.makes:
            first.setdefault(i, n)
            last[i] = n
        last.update(dict.fromkeys(row.reads, n))
    return first, last


def bytes_alive(length: int, lifetimes: Iterable[tuple[int, int | None, int]]) -> list[int]:
    """Bytes alive at each of `length` rows. lifetimes: first row, last row (None: beyond the end) and bytes."""
    # Differences between neighbouring rows; their running sum is the answer. One pass, however long the lifetimes are.
    change = [0] * (length + 1)
    for first, last, nbytes in lifetimes:
        change[first] += nbytes
        if last is not None:
            change[last + 1] -= nbytes
    return list(accumulate(change[:length]))


@dataclass(slots=True)
class Liveness:
    """Lifetimes of the memory of one worker's rows, by the roots of its alias sets.

    makers: row and output that define a tensor. touched, changed: rows that use and that write a root, in order. sizes: bytes
    by root, of memory that the rows make. kept: roots alive after the rows. ambiguous: roots with a name that is defined
    twice, or with a part of unknown origin. alive: bytes at each row of the memory made here.
    """

    sets: AliasSets = field(default_factory=AliasSets)
    makers: dict[int, tuple[int, int]] = field(default_factory=dict)
    touched: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    changed: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    sizes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    kept: set[int] = field(default_factory=set)
    ambiguous: set[int] = field(default_factory=set)
    alive: list[int] = field(default_factory=list)

    def root(self, tensor: int) -> int:
        return self.sets.root(tensor)


def liveness(
    rows: Sequence[Accessing], nbytes: Sequence[Sequence[int]], lasting: Iterable[int], homes: Mapping[int, object]
) -> Liveness:
    """Lifetimes of the memory of rows.

    nbytes: of each row, the bytes of each tensor that it makes. lasting: tensors that are alive afterwards. homes: by what
    tensors from before the rows share memory.
    """
    result = _alias_sets(rows, homes)
    sets, makers = result.sets, result.makers

    # 1. Uses, writes and bytes of each root. Fresh memory begins at the row that makes it; views add no bytes.
    result.kept = {sets.root(i) for i in lasting if i in sets.parents or i in makers}
    change = [0] * (len(rows) + 1)  # bytes by which the sum alive differs from the row before
    for place, row in enumerate(rows):
        used, effects = row.reads, row.define.effects
        defined = [sets.root(i) for i in row.makes]
        for root in {*map(sets.root, used), *defined}:
            result.touched[root].append(place)
        for index in effects.writes:
            result.changed[sets.root(used[index])].append(place)
        for index, root in enumerate(defined):
            if index not in effects.views and root not in sets.older:
                result.sizes[root] += nbytes[place][index]
                change[place] += nbytes[place][index]

    # 2. It ends behind the last row that touches it, unless it is alive afterwards.
    for root, size in result.sizes.items():
        if root not in result.kept:
            change[result.touched[root][-1] + 1] -= size
    result.alive = list(accumulate(change[: len(rows)]))
    return result


def _alias_sets(rows: Sequence[Accessing], homes: Mapping[int, object]) -> Liveness:
    """The alias sets of rows, the makers of their tensors, and the roots that are ambiguous."""
    result = Liveness()
    sets, makers = result.sets, result.makers
    # Tensors from before that share memory are one set with the first of their home.
    firsts: dict[object, int] = {}
    for tensor, home in homes.items():
        sets.union(tensor, firsts.setdefault(home, tensor))
    again: set[int] = set()
    older: set[int] = set()
    for place, row in enumerate(rows):
        used, defined, views = row.reads, row.makes, row.define.effects.views
        older.update(name for name in used if name not in makers)
        # A row with views and other results, or views of several operands: which result shares what is not followed.
        if views and (len(views) < len(defined) or len(used) != 1):
            again.update(defined)
        for output, name in enumerate(defined):
            # A name with two definitions is two memories, which one set cannot tell apart.
            if name in makers or name in older:
                again.add(name)
            makers[name] = place, output
            if output in views:
                sets.union(name, used[views[output]])
    sets.older = {sets.root(name) for name in older}
    result.ambiguous = {sets.root(name) for name in again}
    return result
