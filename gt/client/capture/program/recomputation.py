"""Recomputation across two programs: cheap values that autograd has saved are made again in the backward pass.

A forward program leaves what autograd saves in memory that its backward program reads. Of a chain of pointwise ops autograd
saves nearly each value. Most can be made again from the few that a matrix product has made, as torch.compile's partition does
(the min-cut of AOTAutograd, after Chen et al. 2016). Here a value is left out if at most MAX_CHAIN_OPS cheap ops make it of
values that are kept. A result may be kept instead: bf16 logits, of which the loss makes a log_softmax in float32.

Example, of y = silu(g) * u, where silu saves %1, and mul saves %3 and %2, and the next product saves %4:

    kept before:  %1 = mm; %2 = mm; %3 = silu %1; %4 = mul %3 %2
    kept after:   %1, %2; the backward pass has %30 = silu %1; %40 = mul %30 %2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from gt.client import current_session
from gt.client.capture.recorded_op import RecordedOp
from gt.client.device.remote_tensor import LAZY, without_autocast
from gt.client.trace.op_info import OpInfo, infos_by_name
from gt.ir.ops import RANDOM
from gt.ir.template import Const, T, V

MAX_CHAIN_OPS = 16  # that make one value again; views are free
MAX_READ_BYTES_PER_BYTE = 3.0  # bytes that they read, for each byte of the value: to keep it is a write and a read of it
LEAST_SHARE_OF_SAVED = 4096  # a value of less than 1/4096 of what is saved is kept
# Ops besides pointwise ones that a compiler fuses with their readers. Of a softmax it makes two passes over the operand
CHEAP = frozenset(
    {"aten._to_copy.default", "aten.cat.default", "aten.clone.default", "aten._softmax.default", "aten._log_softmax.default"}
)
MIN_LEFT_OUT_BYTES_PER_BYTE = 2  # bytes that are left out, for each byte of a result that is kept instead
_CONSTANTS = {"dtype": torch, "memory_format": torch, "layout": torch}  # kind -> the module that has constants of it


@dataclass(frozen=True, slots=True)
class Step:
    """An op that is called again. ins, outs: ids of the recorded call's tensors."""

    info: OpInfo
    op: RecordedOp

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of the op, of these operands."""
        template = self.op.template
        args = [self._argument(arg, tensors) for arg in template.args]
        kwargs = {name: self._argument(arg, tensors) for name, arg in template.kwargs}
        with current_session.Current.origins.standing_for(self.op.origin), torch.no_grad(), without_autocast():
            results = self.info.func(*args, **kwargs)
        return [results] if isinstance(results, torch.Tensor) else [*results]

    def _argument(self, arg: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """An argument as torch takes it, of its form in the template."""
        if isinstance(arg, T):
            return tensors[arg.index]
        if isinstance(arg, V):
            return self.op.values[arg.index]
        if isinstance(arg, Const):
            if arg.kind in _CONSTANTS:
                return getattr(_CONSTANTS[arg.kind], arg.value)
            return LAZY if arg.kind == "device" else complex(*arg.value)
        return [self._argument(item, tensors) for item in arg] if isinstance(arg, (list, tuple)) else arg


@dataclass
class RecomputationPlan:
    """The way in which each tensor that autograd has saved is had in the backward pass. Tensors are ids of the recorded call.

    numbers: of the saved tensors, by place. kept: places of those that are kept. results: places of the results of the call
    that are kept with them. narrow: places of those of which the operand of their cast is kept, with its dtype. slots: where a
    kept tensor is. steps: the op that makes a tensor again, and which of its results that is. reads: places among the tensors
    from before the call. nbytes: of values that are not kept.
    """

    numbers: list[int]
    kept: list[int]
    results: list[int]
    narrow: dict[int, torch.dtype]
    slots: dict[int, int]
    steps: dict[int, tuple[Step, int]]
    reads: dict[int, int]
    nbytes: int

    def tensors_to_keep(self, saved: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list:
        """The tensors to keep of all that autograd has saved, and of the results of the call."""
        with torch.no_grad(), without_autocast():
            kept = [saved[place].to(self.narrow[place]) if place in self.narrow else saved[place] for place in self.kept]
            return kept + [results[place].detach() for place in self.results]

    def text(self) -> str:
        """A line for explain()."""
        again = len(self.numbers) - len(self.kept) + len(self.narrow)
        nbytes = f"{self.nbytes / 2**20:.1f} MiB"
        return f"{again} of {len(self.numbers)} values that autograd saves are computed again: {nbytes} less"


class SavedValues:
    """Values that autograd has saved, by place, for one backward pass. uses: how often each is asked for."""

    def __init__(
        self, plan: RecomputationPlan, kept: Sequence[torch.Tensor], reads: Sequence[torch.Tensor], uses: Counter
    ) -> None:
        self._plan, self._kept, self._reads = plan, kept, reads
        self._left = Counter(uses)
        self._made: dict[int, torch.Tensor] = {}  # by place, until their last use

    def __getitem__(self, place: int) -> torch.Tensor:
        if (value := self._made.get(place)) is None:
            value = self._value(self._plan.numbers[place], {})
        self._left[place] -= 1
        if self._left[place] > 0:
            self._made[place] = value
        else:
            self._made.pop(place, None)
        return value

    def _value(self, number: int, made: dict[int, torch.Tensor]) -> torch.Tensor:
        """A tensor of the recorded call. made: those of the same chain."""
        plan = self._plan
        if number in made:
            return made[number]
        if (slot := plan.slots.get(number)) is not None:
            value = self._kept[slot]
        elif (read := plan.reads.get(number)) is not None:
            value = self._reads[read]
        else:
            step, output = plan.steps[number]
            value = step([self._value(other, made) for other in step.op.ins])[output]
        made[number] = value
        return value


@dataclass
class Chooser:
    """Chooses what to recompute of the tensors of one recorded call.

    saved, reads: tensors that autograd has saved, from the call and from before it. results: of the call, those with a graph.
    held: saved ones that the backward pass may change in place. thorough: whether bytes count for more than time.
    """

    ops: Sequence[RecordedOp]
    saved: Sequence[Any]
    reads: Sequence[Any]
    results: Sequence[Any]
    held: Sequence[Any]
    thorough: bool
    _memory: dict[int, int] = field(default_factory=dict)  # of a tensor that is a view
    _written: set[int] = field(default_factory=set)  # memory that an op changes
    _makers: dict[int, tuple[int, int]] = field(default_factory=dict)  # op and output
    _steps: dict[int, tuple[Step, int]] = field(default_factory=dict)
    _instead: dict[int, int] = field(default_factory=dict)  # results that are kept, by id: their places

    def __post_init__(self) -> None:
        self._infos = infos_by_name()
        self._numbers = [tensor._ref.id for tensor in self.saved]
        self._reads = {t._ref.id: k for k, t in enumerate(self.reads) if hasattr(t, "_ref")}
        self._results = {t._ref.id: k for k, t in enumerate(self.results) if hasattr(t, "_ref")}
        self._memory |= {t._ref.id: t._ref.memory for t in self.reads if hasattr(t, "_ref")}
        for at, op in enumerate(self.ops):
            self._note(at, op)
        # A value is made again from what its chain begins with, as the forward pass has left it
        self._written.update(self._root(tensor._ref.memory) for tensor in self.held)
        live = current_session.current().live_tensors.all
        for number in self._written - self._makers.keys():  # views from before the call
            if number in live and (reference := live[number]()) is not None:
                self._written.add(reference.memory)

    def _note(self, at: int, op: RecordedOp) -> None:
        template, results = op.template, iter(enumerate(op.outs))
        self._written.update(self._root(op.ins[k]) for k in template.writes)
        if not template.outs:
            self._written.update(map(self._root, op.ins))  # as of lists: it may change any operand
        for out in template.outs:
            if out.kind == "same":
                self._written.add(self._root(op.ins[out.of]))
            elif out.kind in ("new", "view"):
                output, number = next(results)
                self._makers[number] = at, output
                if out.kind == "view":
                    self._memory[number] = self._root(op.ins[out.of])

    def _root(self, number: int) -> int:
        return self._memory.get(number, number)

    def choose(self) -> RecomputationPlan | None:
        """The plan of one call; None if all is kept."""
        places: dict[int, list[int]] = {}  # by memory
        for place, number in enumerate(self._numbers):
            places.setdefault(self._root(number), []).append(place)
        nbytes = {root: max(self.saved[place]._ref.meta.nbytes for place in group) for root, group in places.items()}
        least = sum(nbytes.values()) / LEAST_SHARE_OF_SAVED
        kept, narrow, left = set(self._numbers), dict[int, tuple[int, torch.dtype]](), 0
        # In the order in which they were made: what makes a value is decided before the value. And once more: the operand of a
        # cast, once it takes the place of its result, may make what was looked at before
        for root in 2 * sorted(places, key=lambda root: self._makers.get(root, (-1, 0))):
            numbers = {self._numbers[place] for place in places[root]}
            if nbytes[root] < least or root in self._written or not numbers <= kept:
                continue
            if self._drops(numbers, kept, nbytes[root]) or self._drops(numbers, kept, nbytes[root], self._results):
                kept -= numbers
                left += nbytes[root]
            elif numbers == {root} and (narrower := self._narrower(root)):
                kept = kept - numbers | {narrower[0]}
                narrow[root] = narrower
                left += nbytes[root] // 2
        if not left:
            return None

        # The operand of a widening cast takes the place of its result
        standing = [narrow[number][0] if number in narrow else number for number in self._numbers]
        places_kept = [place for place, number in enumerate(standing) if number in kept]
        slots = {number: slot for slot, number in enumerate([*[standing[place] for place in places_kept], *self._instead])}
        dtypes = {place: narrow[self._numbers[place]][1] for place in places_kept if self._numbers[place] in narrow}
        results = [*self._instead.values()]
        return RecomputationPlan(self._numbers, places_kept, results, dtypes, slots, self._steps, self._reads, left)

    def _drops(self, numbers: set[int], kept: set[int], nbytes: int, results: Mapping[int, int] = MappingProxyType({})) -> bool:
        """True if the tensors of one memory can be made again of the others that are kept, at little cost. Notes the ops.

        results: those that may be kept instead, where they are smaller by far.
        """
        chain: dict[int, tuple[Step, int]] = {}
        sources, waiting, others = dict[int, int](), [*numbers], (kept - numbers).union(self._instead)
        instead: dict[int, int] = {}
        while waiting:
            number = waiting.pop()
            if number in chain:
                continue
            if number in others or number in self._reads:
                sources[self._root(number)] = self._bytes(number)
                continue
            if number in results and number not in numbers and self._root(number) not in self._written:
                sources[self._root(number)] = instead[number] = self._bytes(number)
                continue
            found = self._step(number)
            if found is None:
                return False
            chain[number] = found
            waiting += found[0].op.ins
            if len({id(step.op) for step, _ in chain.values() if step.op.template.outs[0].kind == "new"}) > MAX_CHAIN_OPS:
                return False
        if not self.thorough and sum(sources.values()) > MAX_READ_BYTES_PER_BYTE * nbytes:
            return False
        if MIN_LEFT_OUT_BYTES_PER_BYTE * sum(instead.values()) > nbytes:
            return False
        self._steps |= chain
        self._instead |= {number: results[number] for number in instead}
        return True

    def _bytes(self, number: int) -> int:
        """Bytes of a tensor of the call; of one from before it none: parameters of norms are small, and read anyway."""
        if number not in self._makers:
            return 0
        at, output = self._makers[number]
        outs = [out.spec for out in self.ops[at].template.outs if out.kind in ("new", "view")]
        spec = outs[output]
        return spec.nbytes if spec is not None else 0

    def _step(self, number: int) -> tuple[Step, int] | None:
        """The op that makes a tensor again; None if it may not be called twice, or costs much."""
        if number not in self._makers or self._root(number) in self._written:
            return None
        at, output = self._makers[number]
        op = self.ops[at]
        template = op.template
        info = self._infos.get(template.op)
        if info is None or (info.handler is not None and template.op not in CHEAP):
            return None
        if template.writes or template.dynamic or template.op in RANDOM:
            return None
        if any(out.kind not in ("new", "view") for out in template.outs) or len(template.outs) != 1 or not op.ins:
            return None
        views = template.outs[0].kind == "view"
        if not (views or template.pointwise or template.op in CHEAP) or any(self._root(i) in self._written for i in op.ins):
            return None
        return Step(info, op), output

    def _narrower(self, root: int) -> tuple[int, torch.dtype] | None:
        """The tensor of half the bits from which a value has been cast to float32, with its dtype; or None."""
        found = self._step(root)
        if found is None or found[0].op.template.op != "aten._to_copy.default":
            return None
        op = found[0].op
        (before,), after = op.template.ins, op.template.outs[0].spec
        if before.dtype not in ("bfloat16", "float16") or after is None or after.dtype != "float32":
            return None
        if (before.shape, before.stride) != (after.shape, after.stride):
            return None
        self._steps[root] = found
        return op.ins[0], getattr(torch, before.dtype)
