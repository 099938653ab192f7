"""Values that are cheap to make are made again where they are next needed, if keeping them until then sets the peak of memory.

GELU's and layer norm's outputs, casts: autograd keeps them for the backward pass beside what they are made of. Each is freed
after its last use before the peak and made anew, by the same op on the same values, right before its next. Only what lowers the
peak is made again, and no more than a small part of the step's work.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from gt.dispatcher.programs.liveness import Liveness, memory
from gt.dispatcher.programs.passes.stage_costs import Lies
from gt.dispatcher.programs.recording import Instruction, Recording
from gt.dispatcher.programs.reorder_check import written
from gt.dispatcher.state.failures import Planned
from gt.ir.ops import GT_OPS, RANDOM

WORTH = 0.98  # of the peak: less is not worth the time
SMALL = 4096  # a value that is a smaller part of the peak is kept
MOST = 2048  # values that are looked at
DEEP = 6  # ops that are done again for one value
FAR = 400  # ops that are compiled as one at most
# Beside pointwise ops, with what they take in a compiled step, in parts of nominal time: a norm is a pass of its own, that what
# reads it cannot be one with (on an H200 32 us for 50 MB; a GELU that its backward pass is fused with, 19 us for 200 MB)
CHEAP = {
    "aten._to_copy.default": 1.0,
    **dict.fromkeys(("aten.native_layer_norm.default", "aten.native_group_norm.default", "aten._fused_rms_norm.default"), 3.0),
}


def recompute(
    tape: Recording,
    lasting: Iterable[int],
    homes: Mapping[int, object],
    lies: Lies,
    fresh: Callable[[], int],
    compiled: bool,
    bounds: Bounds,
) -> dict[int, list[int]]:
    """Change the rows of a tape; by worker: how many values are made again, bytes at most before, and then.

    lasting: ids that are there afterwards. homes: by what tensors from before share memory. fresh: a new id. compiled: whether
    what lies between two things that only an instruction does is a compiler's to order. bounds: of what it may cost.
    """
    ops, told = {row.seq: row for row in tape.journal}, {}
    for worker, code in tape.code.items():
        rows = [row for row in code if row.define.kind != "upload"]  # constants: they are there before a replay
        found = memory(worker, rows, ops, lasting, homes, lies)
        before = int(found.alive.max(initial=0))
        plan = Rematerialization(rows, ops, found, compiled, bounds)
        plan.choose()
        pairs = list(plan.written(fresh)) if plan.gaps else []
        new = [row for row, _ in pairs]
        after = int(memory(worker, new, ops, lasting, homes, lies).alive.max()) if new else before
        if after < WORTH * before:
            _name(pairs, tape.names)
            tape.code[worker] = [row for row in code if row.define.kind == "upload"] + new
            told[worker] = [len(plan.gaps), before, after]
    return told


def _name(pairs: Iterable[tuple[Instruction, Instruction]], names: dict[int, str]) -> None:
    """Rows belong to the action of those that they stand for, or come before."""
    for row, old in pairs:
        name = names.get(id(old))
        if name is None:
            names.pop(id(row), None)  # of a row that is gone and lay where this does
        else:
            names[id(row)] = name


class Bounds(NamedTuple):
    """share: of the step's nominal time, as if nothing was fused, that it may take. gain: parts of the peak that a value
    has to save for each part of that time.
    """

    share: float
    gain: float


# as FinishCapture.recompute asks for it; of GPT-2's values a GELU saves 7 parts of the peak for its time, a layer norm 2.3
BOUNDS = {1: Bounds(0.03, 4.0), 2: Bounds(0.1, 0.0)}


@dataclass(slots=True)
class Again:
    """A value is freed after row `last` and made again before row `first`, by `chain`: values in order, it being the last.

    beside: bytes that are made with it.
    """

    root: int
    last: int
    first: int
    chain: list[int]
    seconds: float
    beside: int


@dataclass
class Rematerialization:
    """What is made again. gaps: by root, `last` and `first` of its Again; copies: by row, roots that are made before it."""

    rows: Sequence[Instruction]
    ops: dict[int, Planned]
    memory: Liveness
    compiled: bool
    bounds: Bounds
    gaps: dict[int, tuple[int, int]] = field(default_factory=dict)
    copies: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._total = sum(self.memory.seconds)
        self._borders = list(accumulate((border(row) for row in self.rows), initial=0))

    # ---- what can be

    def _cheap(self, root: int) -> bool:
        """Whether a value may be made twice: by an op that makes new tensors from its inputs alone and costs little."""
        row = self.rows[self.memory.touched[root][0]]
        payload = row.define.payload
        if row.define.kind != "op" or payload["random"] is not None or payload["op"] in RANDOM or not payload["tensors"]:
            return False
        if not payload["outs"] or any(out[0] != "new" or out[1] is None for out in payload["outs"]):
            return False
        op = self.ops.get(row.seq)
        tagged = op is not None and op.known.template.pointwise and op.known.template.op == payload["op"]
        found = self.memory
        steady = root not in found.loose and not found.changed.get(root) and root not in found.older
        return steady and (tagged or payload["op"] in CHEAP) and not [*written(row, self.ops)]

    def _alive(self, root: int, at: int) -> bool:
        """Whether a value is there before a row, without being kept longer for it."""
        found = self.memory
        if root in found.older:
            return True
        touched = found.touched[root]
        if touched[0] >= at:
            return False
        if root in self.gaps:
            last, first = self.gaps[root]
            return at <= last or first <= at <= touched[-1]
        return root in found.kept or at <= touched[-1]

    def _chain(self, root: int, at: int) -> list[int] | None:
        """What to make again before a row so that a value is there, in order; None if it cannot be."""
        found, chain, waiting = self.memory, set[int](), [root]
        while waiting:
            here = waiting.pop()
            if here in chain:
                continue
            if len(chain) == DEEP or not self._cheap(here):
                return None
            chain.add(here)
            maker = found.touched[here][0]
            for other in {found.root(i) for i in self.rows[maker].ids()[0]}:
                if other in found.loose or any(maker < n < at for n in found.changed.get(other, ())):
                    return None
                if not self._alive(other, at):
                    waiting.append(other)
        return sorted(chain, key=lambda root: found.touched[root][0])

    def _step(self, root: int, last: int, first: int) -> Again | None:
        """Free a value between two uses, if all that reads it afterwards can be told another name."""
        found = self.memory
        if self.compiled and self._borders[first] - self._borders[last + 1] < FAR:
            return None  # a compiler sees both uses at once, and makes of it what it will
        touched = found.touched[root]
        if any(self.rows[n].define.kind != "op" for n in touched[bisect_left(touched, first) :]):
            return None
        chain = self._chain(root, first)
        if chain is None:
            return None
        makers = {found.touched[one][0] for one in chain}
        made = sum(found.sizes[one] for one in {found.root(i) for n in makers for i in self.rows[n].ids()[1]})
        seconds = sum(found.seconds[n] * CHEAP.get(self.rows[n].define.payload["op"], 1.0) for n in makers)
        if found.sizes[root] * self._total < self.bounds.gain * seconds * found.alive.max():
            return None
        return Again(root, last, first, chain, seconds, made - found.sizes[root])

    # ---- what is

    def choose(self) -> None:
        """The best of what is not used at the peak, until nothing lowers that."""
        found = self.memory
        alive, left = found.alive.copy(), self.bounds.share * self._total
        best = int(alive.max(initial=0))
        some, useful = self._candidates(best), 0
        steps: list[Again] = []
        while some:
            peak = int(alive.argmax())
            step = self._next(some, peak, alive, left)
            if step is None:
                break
            self._take(step)
            steps.append(step)
            alive[step.last + 1 : step.first] -= found.sizes[step.root]
            alive[step.first] += step.beside
            left -= step.seconds
            if alive.max() < best:
                best, useful = int(alive.max()), len(steps)
        for step in steps[useful:]:
            del self.gaps[step.root]
        for step in steps[:useful]:
            self.copies.setdefault(step.first, set()).update(step.chain)

    def _candidates(self, peak: int) -> list[int]:
        """Values by what they save, for how long, at what cost; those of one definition side by side: they compile alike."""
        found = self.memory
        scores: dict[int, float] = {}
        for root, nbytes in found.sizes.items():
            if nbytes * SMALL >= peak > 0 and root not in found.kept and self._cheap(root):
                touched = found.touched[root]
                longest = max((b - a for a, b in pairwise(touched)), default=0)
                scores[root] = nbytes * longest / max(found.seconds[touched[0]], 1e-9)
        kinds: dict[int, list[int]] = {}
        for root in sorted(scores, key=scores.__getitem__, reverse=True)[:MOST]:
            kinds.setdefault(self.rows[found.touched[root][0]].define.number, []).append(root)
        return [root for roots in kinds.values() for root in roots]

    def _next(self, some: list[int], peak: int, alive: np.ndarray, left: float) -> Again | None:
        """The first of some that may be freed across the peak. It and those before it that may not are struck off."""
        struck, found = [], None
        for root in some:
            touched = self.memory.touched[root]
            k = bisect_left(touched, peak)
            if not 0 < k < len(touched) or touched[k] == peak:
                continue
            struck.append(root)
            step = self._step(root, touched[k - 1], touched[k])
            if step is not None and step.seconds <= left and alive[step.first] + step.beside < alive[peak]:
                found = step
                break
        for root in struck:
            some.remove(root)
        return found

    def _take(self, step: Again) -> None:
        """From now on what is made again reads there what it is made of."""
        found, at = self.memory, step.first
        self.gaps[step.root] = step.last, at
        makers = {found.touched[root][0] for root in step.chain}
        for root in {found.root(i) for n in makers for i in self.rows[n].ids()[0]}:
            touched = found.touched[root]
            k = bisect_left(touched, at)
            if self._alive(root, at) and touched[k : k + 1] != [at]:
                insort(touched, at)

    # ---- as rows

    def written(self, fresh: Callable[[], int]) -> Iterator[tuple[Instruction, Instruction]]:
        """The rows, with what is made again, each with the one that it stands for or comes before."""
        writing = _Writing(self, fresh)
        for n, row in enumerate(self.rows):
            for one in writing.row(n):
                yield one, row


def border(row: Instruction) -> int:
    """Ops that a row stands for in what is compiled as one: none for a view, FAR where that ends."""
    payload = row.define.payload
    if row.define.kind != "op":
        return 0 if row.define.kind == "alias" else FAR
    name = payload["op"]
    if name in GT_OPS or payload["random"] is not None or name in RANDOM or name.startswith("aten._fused_"):
        return FAR
    return int(any(out[0] == "new" for out in payload["outs"]))


class _Writing:
    """Rows with what is made again under names of its own. Views from before are made again where they are read."""

    def __init__(self, plan: Rematerialization, fresh: Callable[[], int]) -> None:
        self._plan, self._fresh, self._memory = plan, fresh, plan.memory
        self._names: dict[int, dict[int, int]] = {}  # by root, of what was made again: new names
        self._since: dict[int, int] = {}  # and before which row it was
        self._out: list[Instruction] = []

    def row(self, n: int) -> list[Instruction]:
        """A row, with what comes before it."""
        plan, self._out = self._plan, []
        roots = plan.copies.get(n, set())
        makers: dict[int, list[int]] = {}
        for root in roots:
            makers.setdefault(self._memory.touched[root][0], []).append(root)
        for maker in sorted(makers):
            self._again(maker, makers[maker], n)
        row = plan.rows[n]
        reads = row.ids()[0]
        new = [self._name(i) for i in reads]
        self._out.append(row if new == reads else Instruction(row.seq, row.define, [*new, *row.operands[len(new) :]]))
        return self._out

    def _name(self, tensor: int) -> int:
        root = self._memory.root(tensor)
        if root not in self._since:
            return tensor
        names, maker = self._names[root], self._memory.makers[tensor][0]
        if tensor not in names and maker < self._since[root]:
            self._again(maker, [], 0)
        return names.get(tensor, tensor)

    def _again(self, maker: int, roots: Sequence[int], n: int) -> None:
        """Make anew what a row makes. roots: memory that it begins, whose names change; none for a view of what was."""
        row = self._plan.rows[maker]
        reads, makes = row.ids()
        new = [self._name(i) for i in reads]
        for root in roots:
            self._names[root], self._since[root] = {}, n
        fresh = [self._fresh() for _ in makes]
        for i, name in zip(makes, fresh, strict=True):
            if not roots or (root := self._memory.root(i)) in roots:
                self._names[self._memory.root(i)][i] = name
        between = row.operands[len(reads) : len(row.operands) - len(makes)]
        self._out.append(Instruction(row.seq, row.define, [*new, *between, *fresh]))
