"""How the memory of one worker's rows comes and goes: what shares it, what touches and changes it, bytes alive at each row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from gt.dispatcher.programs.passes.stage_costs import NOTHING, Lies, Look, looks, nominally
from gt.dispatcher.programs.recording import Instruction
from gt.dispatcher.programs.reorder_check import viewed, written
from gt.dispatcher.sharding import cost
from gt.dispatcher.state.failures import Planned


@dataclass(slots=True)
class Liveness:
    """roots: of each id, the one that stands for its memory; ids that ever share some have one root.

    makers: row and output that made an id. touched, changed: rows by root, in order. sizes: bytes by root, if made here.
    older: roots of what was there before; kept: of what is there afterwards. loose: roots of which too little is known.
    seconds: nominal, of each row. alive: bytes at each row of what is made here, ended at its last use.
    """

    roots: dict[int, int] = field(default_factory=dict)
    makers: dict[int, tuple[int, int]] = field(default_factory=dict)
    touched: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    changed: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    sizes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    older: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    loose: set[int] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)
    alive: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def root(self, tensor: int) -> int:
        roots = self.roots
        found = tensor
        while roots.setdefault(found, found) != found:
            found = roots[found]
        while roots[tensor] != found:
            roots[tensor], tensor = found, roots[tensor]
        return found

    def join(self, one: int, other: int) -> None:
        self.roots[self.root(one)] = self.root(other)


def memory(
    worker: int,
    rows: Sequence[Instruction],
    ops: dict[int, Planned],
    lasting: Iterable[int],
    homes: Mapping[int, object],
    lies: Lies,
) -> Liveness:
    """Of a worker's rows. lasting: ids that are there afterwards. homes: what tensors from before share memory by."""
    found = Liveness()
    firsts: dict[object, int] = {}
    for tensor, home in homes.items():
        found.join(tensor, firsts.setdefault(home, tensor))
    again: set[int] = set()
    older: set[int] = set()
    shared: dict[int, dict[int, int]] = {}  # by definition, what it makes views of
    for n, row in enumerate(rows):
        reads, makes = row.ids()
        number = row.define.number
        if number not in shared:
            shared[number] = viewed(row)
        views = shared[number]
        older.update(i for i in reads if i not in found.makers)
        if views and (len(views) < len(makes) or len(reads) != 1):
            again.update(makes)
        for k, i in enumerate(makes):
            if i in found.makers or i in older:
                again.add(i)
            found.makers[i] = n, k
            if k in views:
                found.join(i, reads[views[k]])
    found.older = {found.root(i) for i in older}
    found.kept = {found.root(i) for i in lasting if i in found.roots or i in found.makers}
    found.loose = {found.root(i) for i in again}
    _count(found, worker, rows, ops, lies, shared)
    return found


def _count(
    found: Liveness,
    worker: int,
    rows: Sequence[Instruction],
    ops: dict[int, Planned],
    lies: Lies,
    shared: dict[int, dict[int, int]],
) -> None:
    seen: dict[int, Look] = {}
    known: dict[int, tuple[float, list[Look]]] = {}  # of an op's definition, which is of one size
    change = np.zeros(len(rows) + 1, np.int64)
    for n, row in enumerate(rows):
        reads, makes = row.ids()
        number = row.define.number
        if number in known:
            seconds, outs = known[number]
            seen.update(zip(makes, outs, strict=True))
        else:
            ins, made = looks(worker, row, seen, lies)
            outs = list(made.values())
            seconds = _seconds(row, ins, outs)
            if row.define.kind == "op":
                known[number] = seconds, outs
        found.seconds.append(seconds)
        for root in {found.root(i) for i in (*reads, *makes)}:
            found.touched[root].append(n)
        for k in written(row, ops):
            found.changed[found.root(reads[k])].append(n)
        views = shared[number]
        for k, i in enumerate(makes):
            if k not in views and (root := found.root(i)) not in found.older:
                nbytes = _nbytes(outs[k])
                found.sizes[root] += nbytes
                change[n] += nbytes
    for root, nbytes in found.sizes.items():
        if root not in found.kept:
            change[found.touched[root][-1] + 1] -= nbytes
    found.alive = change.cumsum()[: len(rows)]


def _nbytes(look: Look) -> int:
    return prod(look[0]) * look[1]


def _seconds(row: Instruction, ins: Sequence[Look], outs: Sequence[Look]) -> float:
    if NOTHING in ins or NOTHING in outs:  # a constant, or what depends on values
        return cost.seconds(0, sum(map(_nbytes, (*ins, *outs))))
    return nominally(row, ins, outs)
