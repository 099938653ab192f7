"""Patterns of fragments: the numbers of a run of ops that must be equal for its program to serve, and those that may differ.

A fragment's code is a list of numbers. Templates and origins must be equal. Ids of tensors may differ if the same ids stand
in the same places. Scalars are parameters. A comparison is a few calls over the whole list, not a loop over ops in Python.
Example: [20, 3, 5, 0.5, 8,  21, 3, 8, 5, 9] is mul of tensor 5 by 0.5, which makes 8, and add of 8 and 5, which makes 9.

    fixed: places 0, 1, 5, 6, templates and origins: 20, 3, 21, 3         values: place 3
    ins:   places 2 and 8, tensor 0 from before                           made: places 4 and 7, tensor 0; place 9, tensor 1

The code [20, 3, 6, 0.1, 10,  21, 3, 10, 6, 11] has the same pattern. With 7 in place of the second 6 it has another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from gt.dispatcher.sharding.op_schema import OpSchema
from gt.ir.instr import FIRST, FREE, PARAM, unchecked_length

MAX_NUMBERS = 1 << 13  # numbers in a fragment's code; clients send some 1,500
Getter = Callable[[list], tuple]


def getter(places: Sequence[int]) -> Getter:
    """A function that gives the numbers at these places as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda code: (code[places[0]],)) if places else (lambda code: ())


@dataclass(slots=True)
class FragmentCall:
    """One call's numbers for a pattern: ids of the tensors from before, ids of those made in it, and the code itself."""

    ins: tuple
    made: tuple
    code: list
    seed: int
    counter: int


class _Names:
    """Tensors of one kind, numbered in the order of their first places."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.first: list[int] = []  # place of each
        self.places: list[int] = []  # all places
        self.order: list[int] = []  # number of the tensor at each of them

    def add(self, tensor: int, place: int) -> None:
        number = self.numbers.get(tensor)
        if number is None:
            number = self.numbers[tensor] = len(self.first)
            self.first.append(place)
        self.places.append(place)
        self.order.append(number)


@dataclass(slots=True)
class PatternOp:
    """One op of a pattern: its schema, and the places in the code of its scalars, but for a seed and counter that follow on."""

    known: OpSchema
    values: range


@dataclass(eq=False)
class FragmentPattern:
    """The pattern of one fragment's code. `constants` are places of scalars that have to be equal, found when it is sealed."""

    ops: list[PatternOp]
    makers: list[int]  # the op that makes each
    params: list[tuple[bool, int]]  # tensors that it declares as parameters: whether from before, and the number
    freed: list[tuple[bool, int]]  # tensors that its code frees, in the same form
    fixed: tuple[Getter, tuple]  # takes the numbers that have to be equal, and these
    # Each tensor from before by its first place, then all places of such tensors, and the number of the tensor at each of them.
    first_in: Getter
    in_places: Getter
    in_order: tuple[int, ...]
    # The same for tensors that the code makes.
    first_made: Getter
    made_places: Getter
    made_order: tuple[int, ...]
    randoms: list[tuple[int, int]]  # place of a seed and, behind it, a counter; the counter from the fragment's start
    constants: dict[int, str] = field(default_factory=dict)  # place -> the scalar, as text

    def match(self, code: list, seed: int, counter: int) -> FragmentCall | None:
        """The numbers of a call that has this pattern; None if it has another."""
        # 1. Templates and origins. 2. The ids at all places follow from those at first places. 3. Two tensors of the pattern
        #    are never one: else an op might write what another reads, which the program does not know.
        at_fixed, fixed = self.fixed
        if at_fixed(code) != fixed:
            return None
        ins, new_ids = self.first_in(code), self.first_made(code)
        if tuple(map(ins.__getitem__, self.in_order)) != self.in_places(code):
            return None
        if tuple(map(new_ids.__getitem__, self.made_order)) != self.made_places(code):
            return None
        if len({*ins, *new_ids}) != len(ins) + len(new_ids):
            return None
        # 4. Draws with the session's seed, at the same distance from the fragment's counter. 5. Scalars that planning used.
        if any(code[place] != seed or code[place + 1] - counter != relative for place, relative in self.randoms):
            return None
        if any(text(code[place]) != shown for place, shown in self.constants.items()):
            return None
        return FragmentCall(ins, new_ids, code, seed, counter)

    def freed_by(self, call: FragmentCall) -> list[int]:
        """Ids that the code of a call frees."""
        return [(call.ins if before else call.made)[number] for before, number in self.freed]


def text(value: Any) -> str:
    """A scalar as text: the type and the sign of zero count, and one NaN is like another."""
    return f"{type(value).__name__} {value!r}"


def pattern_key(backend: str, code: list) -> tuple:
    """A key that runs of one pattern share: their length and first op. A run may begin with a declaration, whose id varies."""
    return backend, len(code), code[0], code[1] if len(code) > 1 and code[0] >= FIRST else 0


def count_ops(code: list, templates: Mapping[int, OpSchema]) -> tuple[int, bool]:
    """The number of ops of a fragment that has no pattern, as far as its code can be followed.

    With it: whether the shape of an op's result depends on values.
    """
    at = ops = 0
    dynamic = False
    while at < len(code):
        known = templates.get(code[at])
        if known is not None:
            ops, at = ops + 1, at + 2 + known.length
            dynamic = dynamic or known.template.dynamic
        elif length := unchecked_length(code, at):
            at += length
        else:
            break
    return ops, dynamic


# The code is from a client and not trusted: what cannot be followed has no pattern, and is planned op by op, where the errors
# are raised.
def parse(code: list, templates: Mapping[int, OpSchema], seed: int, counter: int) -> FragmentPattern | None:
    """The pattern of a fragment's code; None where it has something else than ops whose shapes are known."""
    before, results = _Names(), _Names()
    fixed: list[int] = []
    ops: list[PatternOp] = []
    makers: list[int] = []
    params: list[int] = []
    freed: list[int] = []
    randoms: list[tuple[int, int]] = []
    at, end = 0, len(code)
    if end > MAX_NUMBERS:
        return None
    while at < end:
        if code[at] == PARAM and at + 1 < end:
            fixed.append(at)
            params.append(code[at + 1])
            (results if code[at + 1] in results.numbers else before).add(code[at + 1], at + 1)
            at += 2
            continue
        if code[at] == FREE and at + 1 < end and type(code[at + 1]) is int and 0 <= code[at + 1] <= end - at - 2:
            fixed += (at, at + 1)
            for place in range(at + 2, at + 2 + code[at + 1]):
                freed.append(code[place])
                (results if code[place] in results.numbers else before).add(code[place], place)
            at += 2 + code[at + 1]
            continue
        # An op: template, origin, operands, scalars, results.
        known = templates.get(code[at])
        if known is None or known.template.dynamic or known.name == "gt.upload" or at + 2 + known.length > end:
            return None
        scalars = at + 2 + known.tensors
        outs = scalars + known.values
        fixed += (at, at + 1)
        for place in range(at + 2, scalars):
            (results if code[place] in results.numbers else before).add(code[place], place)
        stop = outs  # end of the scalars that are parameters: a seed and counter are bound by the launch
        if known.random and known.values > 1 and code[outs - 2] == seed:
            stop -= 2
            randoms.append((stop, code[stop + 1] - counter))
        for place in range(outs, at + 2 + known.length):
            if code[place] in results.numbers or code[place] in before.numbers:
                return None
            results.add(code[place], place)
            makers.append(len(ops))
        ops.append(PatternOp(known, range(scalars, stop)))
        at += 2 + known.length
    if not ops:
        return None

    def numbered(ids: list[int]) -> list[tuple[bool, int]]:
        return [(i in before.numbers, (before if i in before.numbers else results).numbers[i]) for i in ids]

    at_fixed = getter(fixed)
    return FragmentPattern(
        ops, makers, numbered(params), numbered(freed),
        (at_fixed, at_fixed(code)),
        getter(before.first), getter(before.places), tuple(before.order),
        getter(results.first), getter(results.places), tuple(results.order),
        randoms,
    )  # fmt: skip
