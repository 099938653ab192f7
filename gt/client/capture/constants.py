"""Constant folding in a recorded call, for values such as positions, masks and flags.

Libraries read such values to choose an algorithm (is this mask all true?). A value is folded if it depends only on constants
of the call, on arguments whose values this process has, or on small state (program/state_reads.py). A choice by constants is
the same at each call. A choice by arguments or state is a guard: each replay computes it from its own ones. Every other read
inside a recording is refused. Folding is done on the CPU, for values that are equal on every device: integers and truth values,
and floats of state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gt.client.capture.recorded_op import RecordedOp
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace.recorder import Recorder
from gt.client.values.foldable_ops import execute, folding, is_defined
from gt.client.values.uploaded_values import DTYPES, MAX_BYTES
from gt.ir.check import UPLOAD
from gt.ir.ops import RANDOM

MAX_ELEMENTS = 1 << 22  # largest folded value: larger ones take long, and no library reads them to choose


def argument_value(leaf: Any, recorder: Recorder) -> torch.Tensor | None:
    """The value of a small integer argument before a call, on the CPU: a CPU tensor, or one uploaded and not changed since.

    Else None.
    """
    if not isinstance(leaf, torch.Tensor) or leaf.dtype not in DTYPES:
        return None
    if isinstance(leaf, RemoteTensor):
        return recorder.uploaded_value(leaf)
    plain = leaf.is_cpu and leaf.layout is torch.strided
    return leaf if plain and leaf.numel() * leaf.itemsize <= MAX_BYTES else None


def argument_values(leaves: list, recorder: Recorder) -> dict[int, torch.Tensor]:
    """Copies of the arguments' values that are known before a call, by place."""
    return {k: value.clone() for k, leaf in enumerate(leaves) if (value := argument_value(leaf, recorder)) is not None}


@dataclass(frozen=True, eq=False)
class StatePlace:
    """A small tensor of state from before the call. number: its id then."""

    path: str
    tensor: RemoteTensor
    number: int

    def __str__(self) -> str:
        return self.path


Place = int | StatePlace  # of an argument, or of state


@dataclass(frozen=True)
class ArgumentRead:
    """A value that a recorded call has read, and the ops that compute it from arguments and state. Ids are those of the call.

    arguments: id -> place. ops: each with the values of its constant operands. tensor: the id that was read.
    """

    arguments: Mapping[int, Place]
    ops: tuple[tuple[RecordedOp, Mapping[int, torch.Tensor]], ...]
    tensor: int
    value: torch.Tensor

    def violation(self, value_of: Callable[[Place], torch.Tensor | None]) -> str:
        """The reason why a replay would differ, or "". value_of: the value of the argument at a place, None if not known."""
        value = self.compute(value_of)
        if isinstance(value, str):
            return value
        if same_value(value, self.value):
            return ""
        return f"the function reads a value of {self._sources()}, which is another one now"

    def compute(self, value_of: Callable[[Place], torch.Tensor | None]) -> torch.Tensor | str:
        """The value for these arguments; as text the reason why it is not known."""
        # The arguments of this call, then the recorded ops on them
        values: dict[int, torch.Tensor] = {}
        for number, place in self.arguments.items():
            value = value_of(place)
            if value is None:
                return f"the function reads a value of {_source(place)}, which only the workers know now"
            values[number] = value if isinstance(place, int) else value.clone()  # ops may write to state
        with torch.inference_mode(False), torch.no_grad():
            for op, constants in self.ops:
                results = _execute(op, {**values, **constants})
                if results is None:
                    return f"{op.name} of an argument, which the function reads, fails"
                values.update(zip(op.outs, results, strict=False))
        return values[self.tensor]

    def holds(self, recorder: Recorder) -> bool:
        """False if state alone decides the value, and another one now. May wait for the state's values."""
        places = self.state()
        if not places or len(places) < len(self.arguments) or any(p.tensor._ref.id != p.number for p in places):
            return True
        return not self.violation(lambda place: recorder.state_value(place.tensor))  # type: ignore[union-attr]

    def state(self) -> list[StatePlace]:
        """The places of state among those that it is computed from."""
        return [place for place in self.arguments.values() if not isinstance(place, int)]

    def _sources(self) -> str:
        numbers = sorted(place for place in self.arguments.values() if isinstance(place, int))
        return " and ".join([*([f"argument {' and '.join(map(str, numbers))}"] if numbers else ()), *map(str, self.state())])


def same_value(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True for equal values; zeros of another sign are others, which Python can tell."""
    return torch.equal(a, b) and (not a.is_floating_point() or torch.equal(a.signbit(), b.signbit()))


def _source(place: Place) -> str:
    return f"argument {place}" if isinstance(place, int) else place.path


@dataclass(frozen=True)
class _Step:
    """An op of a recording that depends on arguments. constants: copies of its other operands.

    reads, makes: the memories of its operands, and those that it makes, names or writes. tensors: keep these memories alive.
    """

    op: RecordedOp
    constants: Mapping[int, torch.Tensor]
    reads: frozenset[int]
    makes: frozenset[int]
    tensors: tuple[torch.Tensor, ...]


class Constants:
    """The folded values of one recording, whose ops are followed in order.

    arguments: id -> place and value, of arguments and state with a known value. No other id names their memory: to make a view
    is an op, and then an argument's value is not known. The values of state may be written.
    """

    def __init__(self, arguments: Mapping[int, tuple[Place, torch.Tensor]]) -> None:
        self._values: dict[int, torch.Tensor] = {i: value for i, (_, value) in arguments.items()}  # tensor id -> its value
        self._places = {i: place for i, (place, _) in arguments.items()}
        self._given = frozenset(_memory(value) for place, value in arguments.values() if isinstance(place, int))
        self._of_state = {i for i, place in self._places.items() if not isinstance(place, int)}  # ids that depend on state
        self._steps: list[_Step] = []  # the ops on what depends on arguments, in the order of the call
        self._made: set[int] = set()  # ids of their results
        self._followed = 0

    def value(self, ops: list[RecordedOp], tensor: int) -> torch.Tensor | None:
        """A tensor's value after these ops; None if it depends on anything else, or is a float that state does not decide."""
        with torch.no_grad():
            for op in ops[self._followed :]:
                self._follow(op)
        # Floats are followed, since integers may be computed from them, but never told: their bits differ by processor. Those
        # of state are told: only ops are followed on them that have the same bits everywhere
        self._followed = len(ops)
        value = self._values.get(tensor)
        inexact = value is not None and (value.is_floating_point() or value.is_complex()) and tensor not in self._of_state
        return None if inexact else value

    def varies(self, tensor: int) -> bool:
        """True for a value that depends on arguments or state."""
        return tensor in self._made or tensor in self._places

    def by_argument(self, tensor: int) -> bool:
        """True for a value that depends on arguments, and not on state alone."""
        return self.varies(tensor) and any(isinstance(place, int) for place in self.read(tensor).arguments.values())

    def read(self, tensor: int) -> ArgumentRead:
        """A computation of a value that varies."""
        # Backward: an op is needed if it makes or writes memory that the read, or a needed op behind it, reads
        needed, steps = {_memory(self._values[tensor])}, []
        for step in reversed(self._steps):
            if not needed.isdisjoint(step.makes):
                needed |= step.reads
                steps.append((step.op, step.constants))
        steps.reverse()
        arguments = {i: place for i, place in self._places.items() if i == tensor or any(i in op.ins for op, _ in steps)}
        return ArgumentRead(arguments, tuple(steps), tensor, self._values[tensor].clone())

    def _follow(self, op: RecordedOp) -> None:
        template = op.template
        written = [op.ins[place] for place in template.writes]
        varies = any(map(self.varies, op.ins))
        of_state = not self._of_state.isdisjoint(op.ins)
        # A replay writes to memory that it has made, never to an argument's, nor to a constant
        refused = (varies and not all(map(self._is_own, written))) or (of_state and not self._is_exact(op))
        results = None if refused else self._compute(op)
        if results is None:
            # What is written later through a view that has no value here would not be seen
            for tensor in (*written, *(op.ins[out.of] for out in template.outs if out.kind == "view")):
                self._forget_memory(tensor)
            return
        self._values.update(zip(op.outs, results, strict=False))
        if varies:
            self._made.update(op.outs)
            self._of_state.update(op.outs if of_state else ())
            # Copied now: an op in place may write the constant later in the call
            others = {i: self._values[i].clone() for i in op.ins if not self.varies(i)}
            reads = [self._values[i] for i in op.ins if i not in others]
            makes = [*results, *(self._values[i] for i in written)]
            memories = frozenset(map(_memory, reads)), frozenset(map(_memory, makes))
            self._steps.append(_Step(op, others, *memories, (*reads, *makes)))

    def _is_own(self, tensor: int) -> bool:
        """True for a tensor whose memory an op on arguments has made, or of state."""
        own = tensor in self._made or tensor in self._of_state
        return own and _memory(self._values[tensor]) not in self._given

    def _is_exact(self, op: RecordedOp) -> bool:
        """True for an op with the same bits on each device, for these operands."""
        way = folding(op.template)
        if way is None or not way.folds or any(i not in self._values for i in op.ins):
            return False
        return is_defined(op.template, [self._values[i] for i in op.ins], op.values)

    def _compute(self, op: RecordedOp) -> list | None:
        """The new tensors of an op whose operands are all folded; None for any other op."""
        if any(i not in self._values for i in op.ins):
            return None
        return _execute(op, self._values)

    def _forget_memory(self, tensor: int) -> None:
        """Remove a tensor, and all views of its memory, from the folded values."""
        if tensor not in self._values:
            return
        # The folded tensors are real ones on the CPU: views of one memory are views here, too
        written = _memory(self._values[tensor])
        self._values = {i: value for i, value in self._values.items() if _memory(value) != written}
        self._places = {i: place for i, place in self._places.items() if i in self._values}
        self._made &= self._values.keys()
        self._of_state &= self._values.keys()


def _execute(op: RecordedOp, known: Mapping[int, torch.Tensor]) -> list | None:
    """The new tensors of an op for these operands; None for an op that is not folded, or fails."""
    template = op.template
    if template.op == UPLOAD:
        return _uploaded(op)
    if not template.op.startswith("aten.") or template.op in RANDOM or template.dynamic:
        return None
    if sum(out.spec.numel for out in template.outs if out.spec is not None) > MAX_ELEMENTS:
        return None

    try:
        return execute(template, [known[i] for i in op.ins], op.values)
    except Exception:  # not a constant then; the op itself reports what is wrong with its arguments
        return None


def _uploaded(op: RecordedOp) -> list | None:
    """The tensor of an upload of the call, such as an index that was a list: calls that agree upload the same bytes."""
    spec, data = op.template.outs[0].spec, op.values[0]
    if spec is None or not data or (dtype := getattr(torch, spec.dtype)) not in DTYPES:
        return None
    return [torch.frombuffer(bytearray(data), dtype=dtype).view(spec.shape)]


def _memory(tensor: torch.Tensor) -> int:
    """The number of a tensor's memory, which no other memory has while the tensor is alive."""
    return tensor.untyped_storage()._cdata
