"""The pass that computes cheap values again where they are next needed, if the peak of memory is lower without them.

Autograd keeps the outputs of GELU, layer norm and casts for the backward pass, beside their inputs. Each is freed after its
last use before the peak. The same op on the same values computes it again right before its next use. Only values that
lower the peak are recomputed, within a small part of the step's work. This is rematerialization (Briggs et al. 1992), in
training selective activation recomputation (Chen et al. 2016; Korthikanti et al. 2022). An input that would be freed before is
kept if it is smaller than the value: the bf16 input of a norm in place of its fp32 cast.

Example, where %2 is freed over the peak at `softmax`:

    before:  %1 = mm; %2 = gelu %1; %3 = mm %2; %4 = softmax %3; ...; %9 = mm_backward %8 %2
    after:   %1 = mm; %2 = gelu %1; %3 = mm %2; FREE %2; %4 = softmax %3; ...; %70 = gelu %1; %9 = mm_backward %8 %70
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from gt.dispatcher.programs.passes.context import PassContext
from gt.dispatcher.programs.passes.stage_costs import costs_of_rows
from gt.dispatcher.programs.recording import Code, Instruction, Recording
from gt.dispatcher.state.failures import Planned
from gt.ir.dataflow import Liveness, liveness
from gt.ir.ops import GT_OPS, RANDOM

MAX_PEAK_LEFT = 0.98  # part of the peak that may remain: a smaller gain is not worth the time
LEAST_SHARE_OF_PEAK = 4096  # a value of less than 1/4096 of the peak is kept
MAX_CANDIDATES = 2048  # values
MAX_CHAIN_OPS = 6  # computed again for one value
MAX_FUSED_OPS = 400  # compiled as one region at most
RENAMED = frozenset({"op", "all_gather"})  # kinds whose operands may have other names
# Ops that are recomputed beside pointwise ones, with their cost in a compiled step, in parts of nominal time. A norm is a pass
# over memory of its own, which does not fuse with its readers: 32 us for 50 MB on an H200. A GELU, which fuses with its
# backward pass, takes 19 us for 200 MB.
RECOMPUTABLE = {
    "aten._to_copy.default": 1.0,
    **dict.fromkeys(("aten.native_layer_norm.default", "aten.native_group_norm.default", "aten._fused_rms_norm.default"), 3.0),
}


def rematerialize(recording: Recording, context: PassContext) -> Recording:
    """The recording with cheap values recomputed. context.recomputed: by worker their number, and the peaks before and after.

    A worker whose peak does not get much lower keeps its rows.
    """
    if not context.recompute:
        return recording
    ops = {row.seq: row for row in recording.journal}
    changed: Code = {}
    for worker, code in recording.code.items():
        # Choose, rewrite, and measure the new rows: the choice follows an estimate, so its result is compared in the end.
        uploads = [row for row in code if row.kind == "upload"]  # constants: they are alive before a replay
        rows = [row for row in code if row.kind != "upload"]
        seconds, alive = _lifetimes(worker, rows, context)
        before = max(alive.alive, default=0)
        plan = Rematerializer(rows, ops, alive, seconds, context.compiled, BOUNDS[context.recompute])
        plan.choose()
        new = list(plan.rewritten(context.fresh)) if plan.gaps else []
        after = max(_lifetimes(worker, new, context)[1].alive) if new else before
        if after < MAX_PEAK_LEFT * before:
            changed[worker] = uploads + new
            context.recomputed[worker] = [len(plan.gaps), before, after]
    return replace(recording, code={**recording.code, **changed}) if changed else recording


def _lifetimes(worker: int, rows: Sequence[Instruction], context: PassContext) -> tuple[list[float], Liveness]:
    """Nominal seconds of each row, and the lifetimes of their memory."""
    seconds, sizes = costs_of_rows(worker, rows, context.older)
    return seconds, liveness(rows, sizes, context.lasting, context.homes)


class Bounds(NamedTuple):
    """share: part of the step's nominal time, without fusion, that recomputation may take. gain: parts of the peak that a
    value has to save for each part of that time.
    """

    share: float
    gain: float


# as FinishCapture.recompute asks for it; of GPT-2's values a GELU saves 7 parts of the peak for its time, a layer norm 2.3
BOUNDS = {1: Bounds(0.03, 4.0), 2: Bounds(0.1, 0.0)}


@dataclass(slots=True)
class Recomputation:
    """A value is freed after row `last` and made again before row `first`, by `chain`: values in order, itself the last.

    beside: bytes that are made with it. kept: inputs of the chain that live until then instead, by their last uses before.
    longer: their bytes.
    """

    root: int
    last: int
    first: int
    chain: list[int]
    seconds: float
    beside: int
    kept: dict[int, int]
    longer: int


@dataclass
class Rematerializer:
    """Chooses the values to recompute. gaps: by root, its dead range, from `last` to `first` of its Recomputation; copies: by
    row, roots that are made before it. seconds: of each row.
    """

    rows: Sequence[Instruction]
    ops: dict[int, Planned]
    memory: Liveness
    seconds: Sequence[float]
    compiled: bool
    bounds: Bounds
    gaps: dict[int, tuple[int, int]] = field(default_factory=dict)
    copies: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._total = sum(self.seconds)
        self._peak = max(self.memory.alive, default=0)
        self._weights = list(accumulate((region_weight(row) for row in self.rows), initial=0))

    # ---- candidates

    def _recomputable(self, root: int) -> bool:
        """True if a value may be made twice: by an op that makes new tensors from its inputs alone and costs little."""
        row = self.rows[self.memory.touched[root][0]]
        payload = row.define.payload
        if row.kind != "op" or payload["random"] is not None or payload["op"] in RANDOM or not payload["tensors"]:
            return False
        if not payload["outs"] or any(out[0] != "new" or out[1] is None for out in payload["outs"]):
            return False
        op = self.ops.get(row.seq)
        tagged = op is not None and op.known.template.pointwise and op.known.template.op == payload["op"]
        memory = self.memory
        # The value is the same at both uses if its memory has one owner, is never written, and is not from before the step.
        steady = root not in memory.ambiguous and not memory.changed.get(root) and root not in memory.sets.older
        return steady and (tagged or payload["op"] in RECOMPUTABLE) and not row.define.effects.writes

    def _alive(self, root: int, at: int) -> bool:
        """True if a value is alive before a row, without being kept longer for it."""
        memory = self.memory
        if root in memory.sets.older:
            return True
        touched = memory.touched[root]
        if touched[0] >= at:
            return False
        # Recomputed values are dead in their gap. `touched` has the uses that earlier choices added (_add_uses).
        if root in self.gaps:
            last, first = self.gaps[root]
            return at <= last or first <= at <= touched[-1]
        return root in memory.kept or at <= touched[-1]

    def _inputs(self, root: int, at: int) -> set[int] | None:
        """The values from which one is made; None if it may not be made again before a row."""
        memory = self.memory
        if not self._recomputable(root):
            return None
        maker = memory.touched[root][0]
        inputs = {memory.root(i) for i in self.rows[maker].reads}
        # An input that is written between the two places would give another value the second time.
        for other in inputs:
            if other in memory.ambiguous or any(maker < n < at for n in memory.changed.get(other, ())):
                return None
        return inputs

    def _chain(self, root: int, at: int) -> set[int] | None:
        """The values to make again before a row so that one is alive there; None if that is impossible."""
        # Depth-first from the value to inputs that are alive anyway. A long chain is given up: it costs more than it saves.
        chain, waiting = set[int](), [root]
        while waiting:
            here = waiting.pop()
            if here in chain:
                continue
            inputs = None if len(chain) == MAX_CHAIN_OPS else self._inputs(here, at)
            if inputs is None:
                return None
            chain.add(here)
            waiting += [other for other in inputs if not self._alive(other, at)]
        return chain

    def _chain_with_kept(self, root: int, at: int) -> tuple[set[int], set[int]] | None:
        """As `_chain`, and the inputs of the value that have to be kept until the row, since they cannot be made again."""
        chain = self._chain(root, at)
        if chain is not None:
            return chain, set()
        # Only direct inputs of the value are kept; those of its inputs are not looked at.
        chain, kept = {root}, set[int]()
        for other in self._inputs(root, at) or ():
            if self._alive(other, at):
                continue
            more = self._chain(other, at)
            if more is not None:
                chain |= more
            elif other in self.gaps:
                return None
            else:
                kept.add(other)
        return (chain, kept) if kept and len(chain) <= MAX_CHAIN_OPS else None

    def _step(self, root: int, last: int, first: int) -> Recomputation | None:
        """Free a value between two uses, if all its later readers can have another name for it."""
        memory = self.memory
        if self.compiled and self._weights[first] - self._weights[last + 1] < MAX_FUSED_OPS:
            return None  # a compiler sees both uses at once, and decides itself
        # The second copy has another name, so every later reader has to be of a kind whose operands can be renamed.
        touched = memory.touched[root]
        if any(self.rows[n].kind not in RENAMED for n in touched[bisect_left(touched, first) :]):
            return None
        while self.rows[first].kind == self.rows[first - 1].kind == "all_gather" and first - 1 > last:
            first -= 1  # before all gathers that may be done as one
        chain, kept = self._chain_with_kept(root, first) or (set(), set())
        longer = sum(memory.sizes[other] for other in kept)
        if not chain or longer >= memory.sizes[root]:
            return None
        # An op makes all of its outputs again, so the bytes of the others are alive beside the value for a moment.
        makers = {memory.touched[link][0] for link in chain}
        made = sum(memory.sizes[output] for output in {memory.root(i) for n in makers for i in self.rows[n].makes})
        # The gain is net: bytes freed over the gap, less the bytes of inputs that now live through it.
        seconds = sum(self.seconds[n] * RECOMPUTABLE.get(self.rows[n].define.payload["op"], 1.0) for n in makers)
        if (memory.sizes[root] - longer) * self._total < self.bounds.gain * seconds * self._peak:
            return None
        order = sorted(chain, key=lambda root: memory.touched[root][0])  # as they were made: each after its inputs
        lasts = {other: self._last_use_before(other, first) for other in kept}
        return Recomputation(root, last, first, order, seconds, made - memory.sizes[root], lasts, longer)

    def _last_use_before(self, root: int, at: int) -> int:
        touched = self.memory.touched[root]
        return touched[bisect_left(touched, at) - 1]

    # ---- choice

    def choose(self) -> None:
        """Take the best value that is not used at the peak, until none lowers the peak."""
        memory = self.memory
        # Floats: a client may declare tensors of more bytes than an int64 has, and bytes of real ones are exact in both
        alive, left = np.array(memory.alive, np.float64), self.bounds.share * self._total
        best = int(alive.max(initial=0))
        candidates, useful = self._candidates(best), 0
        steps: list[Recomputation] = []
        # Greedy, against the peak as it is after each choice. A choice lowers one peak and may leave another as high, so
        # choices go on without an immediate gain. Those behind the last one that lowered the peak are taken back below.
        while candidates:
            peak = int(alive.argmax())
            step = self._next(candidates, peak, alive, left)
            if step is None:
                break
            self._add_uses(step)
            steps.append(step)
            # Bytes alive in each row: less in the gap, more where the chain is computed, and inputs live until then.
            alive[step.last + 1 : step.first] -= memory.sizes[step.root]
            alive[step.first] += step.beside
            for root, last in step.kept.items():
                alive[last + 1 : step.first + 1] += memory.sizes[root]
            left -= step.seconds
            if alive.max() < best:
                best, useful = int(alive.max()), len(steps)
        for step in steps[useful:]:
            del self.gaps[step.root]
        for step in steps[:useful]:
            self.copies.setdefault(step.first, set()).update(step.chain)

    def _candidates(self, peak: int) -> list[int]:
        """Values by bytes saved, times rows, per second. Values of one definition are side by side: they compile alike."""
        memory = self.memory
        scores: dict[int, float] = {}
        for root, nbytes in memory.sizes.items():
            if nbytes * LEAST_SHARE_OF_PEAK >= peak > 0 and root not in memory.kept and self._recomputable(root):
                touched = memory.touched[root]
                longest = max((b - a for a, b in pairwise(touched)), default=0)
                scores[root] = nbytes * longest / max(self.seconds[touched[0]], 1e-9)
        kinds: dict[int, list[int]] = {}
        for root in sorted(scores, key=scores.__getitem__, reverse=True)[:MAX_CANDIDATES]:
            kinds.setdefault(self.rows[memory.touched[root][0]].define.number, []).append(root)
        return [root for roots in kinds.values() for root in roots]

    def _next(self, candidates: list[int], peak: int, alive: np.ndarray, left: float) -> Recomputation | None:
        """The first candidate that may be freed across the peak. It and those before it that may not are struck off."""
        # A candidate that was looked at is struck off for good, chosen or not: that bounds the work.
        struck, chosen = [], None
        for root in candidates:
            touched = self.memory.touched[root]
            k = bisect_left(touched, peak)  # its uses k - 1 and k are on the two sides of the peak
            if not 0 < k < len(touched) or touched[k] == peak:
                continue  # not alive at the peak, or used there: freeing it lowers another place only
            struck.append(root)
            step = self._step(root, touched[k - 1], touched[k])
            if step is not None and step.seconds <= left and _highest(step, alive) < alive[peak]:
                chosen = step
                break
        for root in struck:
            candidates.remove(root)
        return chosen

    def _add_uses(self, step: Recomputation) -> None:
        """Note that the inputs of the recomputation are used where it is."""
        # `touched` stays sorted, and has a row once.
        memory, at = self.memory, step.first
        self.gaps[step.root] = step.last, at
        makers = {memory.touched[root][0] for root in step.chain}
        for root in {memory.root(i) for n in makers for i in self.rows[n].reads}:
            touched = memory.touched[root]
            k = bisect_left(touched, at)
            if (root in step.kept or self._alive(root, at)) and touched[k : k + 1] != [at]:
                insort(touched, at)

    # ---- rewriting

    def rewritten(self, fresh: Callable[[], int]) -> Iterator[Instruction]:
        """The rows with the recomputations among them; each new one stands for the row that it repeats or replaces."""
        rewriter = _Rewriter(self, fresh)
        for n in range(len(self.rows)):
            yield from rewriter.row(n)


def _highest(step: Recomputation, alive: np.ndarray) -> int:
    """At most as many bytes are alive in the rows in which a recomputation needs more than before. alive: before it."""
    # Kept inputs are alive from their own last use on, which may be before the value's: rows there gain nothing in return.
    since = min(step.kept.values(), default=step.last) + 1
    longer = int(alive[since : step.last + 1].max(initial=0)) + step.longer
    return max(longer if step.kept else 0, int(alive[step.first]) + step.beside + step.longer)


def region_weight(row: Instruction) -> int:
    """Ops that a row counts for in a compiled region: none for a view, MAX_FUSED_OPS where the region ends."""
    payload = row.define.payload
    if row.kind != "op":
        return 0 if row.kind == "alias" else MAX_FUSED_OPS
    name = payload["op"]
    if name in GT_OPS or payload["random"] is not None or name in RANDOM or name.startswith("aten._fused_"):
        return MAX_FUSED_OPS
    return int(any(out[0] == "new" for out in payload["outs"]))


class _Rewriter:
    """Rows with recomputed values under names of their own. Views of a recomputed value are made again where they are read."""

    def __init__(self, plan: Rematerializer, fresh: Callable[[], int]) -> None:
        self._plan, self._fresh, self._memory = plan, fresh, plan.memory
        self._names: dict[int, dict[int, int]] = {}  # by root that was recomputed: new names
        self._since: dict[int, int] = {}  # by root: the row before which it was recomputed
        self._out: list[Instruction] = []
        self._action = ""  # action of the row being rewritten: recomputations before it belong to the same action

    def row(self, n: int) -> list[Instruction]:
        """A row, with the recomputations before it."""
        # 1. The recomputations, in the order in which the values were made. One op may make several of the values.
        plan, self._out = self._plan, []
        row = plan.rows[n]
        self._action = row.action
        makers: dict[int, list[int]] = {}
        for root in plan.copies.get(n, set()):
            makers.setdefault(self._memory.touched[root][0], []).append(root)
        for maker in sorted(makers):
            self._repeat(maker, makers[maker], n)

        # 2. The row itself, with the new names of its inputs.
        reads = row.reads
        new = [self._name(i) for i in reads]
        if new != reads:
            row = Instruction(row.seq, row.define, [*new, *row.operands[len(new) :]], row.action, row)
        self._out.append(row)
        return self._out

    def _name(self, tensor: int) -> int:
        root = self._memory.root(tensor)
        if root not in self._since:
            return tensor
        # A view that was made before the recomputation still names the first copy, which is freed: repeat the view too. A view
        # that is made behind it reads the new name already.
        names, maker = self._names[root], self._memory.makers[tensor][0]
        if tensor not in names and maker < self._since[root]:
            self._repeat(maker, [], 0)
        return names.get(tensor, tensor)

    def _repeat(self, maker: int, roots: Sequence[int], n: int) -> None:
        """Make the tensors of a row again. roots: memory it begins, whose names change; none for a view of older memory."""
        row = self._plan.rows[maker]
        reads, makes = row.reads, row.makes
        new = [self._name(i) for i in reads]
        for root in roots:
            self._names[root], self._since[root] = {}, n
        # Outputs that are not recomputed get a name too, since the op makes them; nothing reads it, and it is freed at once.
        fresh = [self._fresh() for _ in makes]
        for i, name in zip(makes, fresh, strict=True):
            if not roots or (root := self._memory.root(i)) in roots:
                self._names[self._memory.root(i)][i] = name
        between = row.operands[len(reads) : len(row.operands) - len(makes)]
        self._out.append(Instruction(row.seq, row.define, [*new, *between, *fresh], self._action, row))
