"""Places where a session's runs of ops have parted or met again: fragments end there, so that what is common is a program.

A branch that Python takes by chance makes another run of ops each time, of which all but the branch was met before. Two runs
part behind the last op that both have, and meet before the first op that both have again. These places are learned by
comparing runs, as a trace cache learns where traces end. Ops are compared by template and line, not by shapes or tensor ids.

Example, where Python chooses X or Y by chance:

    first run:   A B X C D
    second run:  A B Y C D        they part behind B and meet before C
    from then on: [A B] [X] [C D] and [A B] [Y] [C D]: two of three parts are met again
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from gt.dispatcher.fairness.time_slices import Leavings
from gt.dispatcher.programs.fragments.fragment_pattern import MAX_NUMBERS, FragmentPattern, text
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.ir.instr import END_FRAGMENT, FRAGMENT, FRAGMENT_HEADER, OTHER_LENGTHS, RECORD, unchecked_length

MAX_ENDS = 128  # runs of ops that new ones are compared with
MAX_PLACES = 1024  # remembered places of each kind; beyond that the one met longest ago is forgotten
SEED, COUNTER, COUNT = FRAGMENT_HEADER - 3, FRAGMENT_HEADER - 2, FRAGMENT_HEADER - 1  # places in a header
Place = tuple[int, int]  # numbers of an op's template and origin


@dataclass(slots=True)
class Outline:
    """A run of ops to compare with later ones. names: of each op, its place and which of the run's tensors it reads."""

    places: list[Place]
    names: array
    pattern: FragmentPattern
    code: list
    seed: int
    counter: int

    def differs(self, n: int, other: Outline, m: int) -> bool:
        """True if op n has a scalar for which a program has been planned, and op m of the other run has another one."""
        mine, others = self.pattern.ops[n].values, other.pattern.ops[m].values
        constants = self.pattern.constants
        return any(a in constants and constants[a] != text(other.code[b]) for a, b in zip(mine, others, strict=False))


def outline(code: list, pattern: FragmentPattern, seed: int, counter: int) -> Outline:
    """The outline of a run that has this pattern."""
    numbers: dict[int, int] = {}
    places: list[Place] = []
    names = array("q")
    for op in pattern.ops:
        start = op.values.start - op.known.tensors - 2
        place = code[start], code[start + 1]
        places.append(place)
        read = [numbers.setdefault(i, len(numbers)) for i in code[start + 2 : op.values.start]]
        names.append(hash((place, *read)))
        stop = start + 2 + op.known.length
        for i in code[stop - op.known.results : stop]:
            numbers.setdefault(i, len(numbers))
    return Outline(places, names, pattern, code, seed, counter)


class FragmentCuts:
    """The places of one session. `parted`: fragments end behind such an op. `met`: they begin before such an op."""

    def __init__(self) -> None:
        self.parted: OrderedDict[Place, None] = OrderedDict()
        self.met: OrderedDict[Place, None] = OrderedDict()
        self._ends: OrderedDict[tuple[bool, Place], Outline] = OrderedDict()  # the last run that began, or ended, with an op

    def leave(self, leavings: Leavings) -> None:
        """The session is over."""
        leavings.add(self._ends, large=True)

    def clear(self) -> None:
        """Numbers of templates begin again."""
        self.parted.clear()
        self.met.clear()
        self._ends.clear()

    def add(self, new: Outline) -> None:
        """Learn from a run that was met for the first time, by the last one that began, or else ended, with the same op."""
        ends = (True, new.places[0]), (False, new.places[-1])
        known = next((self._ends[end] for end in ends if end in self._ends), None)
        if known is not None:
            self._learn(known, new)
        for end in ends:
            self._ends[end] = new
            self._ends.move_to_end(end)
        while len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)

    def _learn(self, known: Outline, new: Outline) -> None:
        """Note where a new run differs from one that was met before."""
        # At the head ops are compared with the tensors that they read: runs of one op over other tensors have parted. At the
        # tail numbers of tensors differ after another middle, so only template and line are compared.
        most, size = min(len(known.names), len(new.names)), len(new.names)
        head = 0
        while head < most and known.names[head] == new.names[head] and not known.differs(head, new, head):
            head += 1
        if head == size == len(known.names):
            return  # nothing that is compared differs
        tail = 0
        while tail < most - head:
            n = -1 - tail
            if known.places[n] != new.places[n] or known.differs(n, new, n):
                break
            tail += 1
        if head:
            self._note(self.parted, new.places[head - 1])
        if tail:
            self._note(self.met, new.places[size - tail])

    def _note(self, places: OrderedDict[Place, None], place: Place) -> None:
        places[place] = None
        if len(places) > MAX_PLACES:
            places.popitem(last=False)

    def split(self, code: list, templates: Mapping[int, OpSchema]) -> list:
        """A batch whose fragments end and begin at these places. What cannot be followed stays as it is."""
        if not self.parted and not self.met:
            return code
        # This is a client's code: every count is checked before its use
        result: list = []
        done = 0  # what precedes it is in the result
        at = _next_fragment(code, 0, templates)
        while at >= 0:
            first = at + FRAGMENT_HEADER
            end = first + code[first - 1]
            count = code[end + 1] if end + 1 < len(code) and code[end] == END_FRAGMENT else None
            if type(count) is not int or not 0 <= count <= len(code) - end - 2:
                break
            behind = end + 2 + count
            if parts := self._split_fragment(code, at, code[end + 2 : behind], templates):
                result += code[done:at] + parts
                done = behind
            at = _next_fragment(code, behind, templates)
        return result + code[done:] if done else code

    def _split_fragment(self, code: list, at: int, ended: list, templates: Mapping[int, OpSchema]) -> list:
        """The parts of the fragment at a place; [] if it has one. ended: ids that its end frees."""
        header, first = code[at : at + FRAGMENT_HEADER], at + FRAGMENT_HEADER
        end = first + header[COUNT]
        bounds, counters, last = self._bounds(code, first, end, (header[SEED], header[COUNTER]), templates)
        if len(bounds) < 3:
            return []
        # 1. An id that the fragment's end frees is freed at the end of the part that names it last (or of the last part).
        freed: list[list[int]] = [[] for _ in counters]
        for i in ended:
            freed[last.get(i, -1) if type(i) is int else -1].append(i)
        # 2. Each part with a header, an end, and the random counter at its start.
        result = []
        for n, ids in enumerate(freed):
            rows = code[bounds[n] : bounds[n + 1]]
            result += [*header[:COUNTER], counters[n], len(rows), *rows, END_FRAGMENT, len(ids), *ids]
        return result

    def parts(self, run: Outline, templates: Mapping[int, OpSchema]) -> list[tuple[list, int]]:
        """The parts of a run, each with its random counter."""
        bounds, counters, _ = self._bounds(run.code, 0, len(run.code), (run.seed, run.counter), templates)
        return [(run.code[a:b], counter) for (a, b), counter in zip(itertools.pairwise(bounds), counters, strict=True)]

    def _bounds(
        self, code: list, at: int, end: int, draws: tuple[int, int], templates: Mapping[int, OpSchema]
    ) -> tuple[list[int], list[int], dict[int, int]]:
        """Places where parts begin, and the end of the last; the random counter of each; the last part to name each tensor."""
        # A part begins before an op that is in `met`, or behind one that is in `parted` (`wanted`). Frees and declarations
        # between two ops stay with the op before. A part's counter is that of its first draw: the client's counter counts up
        # over the whole fragment.
        parted, met, (seed, counter) = self.parted, self.met, draws
        bounds, counters, last = [at], [counter], dict[int, int]()
        drawn = ops = wanted = False
        while at < end:
            known = templates.get(code[at])
            stop = at + (2 + known.length if known is not None else unchecked_length(code, at))
            if stop <= at or stop > end:
                return [at], [], {}
            if known is not None:
                place = code[at], code[at + 1]
                if ops and (wanted or place in met):
                    bounds.append(at)
                    counters.append(counter)
                    drawn = False
                ops, wanted = True, place in parted
                scalars = at + 2 + known.tensors
                outs = scalars + known.values
                if known.random and not drawn and known.values > 1 and code[outs - 2] == seed:
                    counters[-1], drawn = code[outs - 1], True
                last.update(dict.fromkeys((*code[at + 2 : scalars], *code[outs:stop]), len(counters) - 1))
            at = stop
        return [*bounds, end], counters, last


def _next_fragment(code: list, at: int, templates: Mapping[int, OpSchema]) -> int:
    """The place of a batch's next fragment, from the beginning of a row on; -1 for none whose header can be read."""
    end = len(code)
    while at < end and code[at] != FRAGMENT:
        known = templates.get(code[at])
        length = 2 + known.length if known is not None else unchecked_length(code, at) or OTHER_LENGTHS.get(code[at], 0)
        if not length or code[at] == RECORD:
            return -1
        at += length
    header = code[at : at + FRAGMENT_HEADER]
    if len(header) < FRAGMENT_HEADER or any(type(n) is not int for n in header):
        return -1
    return at if 0 < header[COUNT] <= min(MAX_NUMBERS, end - at - FRAGMENT_HEADER) else -1
