"""Recording of one call: its ops as rows that are compared with those of another call.

The comparison renames tensors: to the op that made them, or to the path in Python of a tensor from before the call.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gt.client.capture.constants import ArgumentRead, Constants, Place, same_value
from gt.client.capture.recorded_op import RecordedOp
from gt.client.capture.user_code import is_library
from gt.client.reports import progress
from gt.client.trace import recorder as recorders
from gt.ir.instr import client_ops
from gt.ir.ops import RANDOM
from gt.ir.spec import Spec, row_major_stride
from gt.ir.template import T, to_wire

SHARED = "another thread used remote tensors during the call: have it do so between two calls"
VALIDATES = " by torch.distributions, which checks its arguments: pass validate_args=False"
_CURES = {
    "torch.amp.grad_scaler": " by torch.amp.GradScaler: give the optimizer fused=True",
    "torch.optim.lr_scheduler": " by a learning-rate scheduler: call its step() after the function",
    "gt.client.groups.loss_scale": " by precision fp16, to leave out a step that overflowed: give the optimizer fused=True",
}  # by module
_CURE = ": return the tensor, and read it after the function"
KEEPS_GRAPH = "its results have a graph, so that the next calls have a program for each pass"
SAME = "; have the function do the same ops at each call"

if TYPE_CHECKING:
    from gt.client.capture.host_draws import HostDraws
    from gt.client.capture.program.state_reads import CallState
    from gt.client.capture.watches.scheduler_step import SchedulerStep
    from gt.client.device.remote_tensor import RemoteTensor
    from gt.client.trace.provenance import Origins
    from gt.client.trace.recorder import Recorder
    from gt.ir.template import Template


@dataclass(slots=True)
class Difference:
    """The first difference of two recordings. place: `file:line` of the user's code, or ""; what: one line of text."""

    place: str
    what: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}" if self.place else self.what


@dataclass
class CallRecording:
    """The ops of one call, appended in the recorder's batches. seed, counter: random state before the call.

    known: id -> place and value of the arguments, and of small state, whose values this process has.
    state: tells which state that was; None where a call knows none.
    """

    recorder: Recorder
    origins: Origins
    seed: int
    counter: int
    deferred: bool = False  # workers execute nothing of the call before its end
    strict: bool = False  # libraries are told that no value may be read
    strict_next: bool = False  # the next recording has to be strict
    tick: progress.Tick = progress.nothing  # told how many ops are recorded
    host_draws: HostDraws | None = None  # the tape of its draws on the CPU
    known: dict[int, tuple[Place, torch.Tensor]] = field(default_factory=dict)
    state: CallState | None = None
    argument_reads: list[ArgumentRead] = field(default_factory=list)
    first: int = 0  # ids of tensors made in the call start here
    ops: list[RecordedOp] = field(default_factory=list)
    prevents: list[Difference] = field(default_factory=list)  # reasons for which the call can be no program
    _deferred: list[int] = field(default_factory=list)  # ids from before the call that ended in it
    _sources: list[tuple[StorageWeakRef, str]] = field(default_factory=list)
    _was_asked: bool = False
    detaches: bool = False  # results of the call had a graph
    optimized: frozenset[int] = frozenset()  # ids of the parameters of optimizers
    keeps_graph: bool = False  # whether results have a graph that the caller may use
    outlived: set[int] = field(default_factory=set)  # storages that it uploaded, and that were alive after it
    counts: dict[str, int] = field(default_factory=dict)  # path of a counter -> what the call has added to it
    cut: bool = False  # Python has to run at each call: no later recording would do better
    steps: list[SchedulerStep] = field(default_factory=list)  # of schedulers, which a replay makes too

    def __post_init__(self) -> None:
        self.first = self.recorder.new_id()
        self.thread = threading.get_ident()
        self._constants = Constants(self.known)

    # ---- during the call

    records = True  # values cannot be read, as in a CUDA graph's capture
    shared = False  # whether another thread used remote tensors meanwhile

    @property
    def most_held(self) -> int:
        """Numbers that are held back before they are handed over."""
        return recorders.MAX_HELD_BATCHES * recorders.MAX_BATCH_NUMBERS if self.deferred else 0

    def uploads(self, code: list) -> list:
        """The list that takes the rows of uploads: that of the ops."""
        return code

    def take_batch(self, code: list, frames: list, freed: list[int]) -> tuple[list, list[int]]:
        """Parse a batch of the op stream. Returns the batch, and the ids among `freed` that may be freed now."""
        # A row of the op stream: template, origin, ids of operands, scalars, ids of results
        before = len(self.ops)
        for template, at in client_ops(code, self.recorder.templates):
            origin, ins = code[at + 1], at + 2
            scalars = ins + len(template.ins)
            outs = scalars + template.values
            values = code[scalars:outs]
            if template.op == "gt.upload.default":
                # The scalar numbers a frame of the batch. A negative one stands for a large upload, whose data is in no frame
                values = [frames[values[0]] if values[0] >= 0 else b""]
                if code[scalars] < 0:
                    self.refuse("the function uploads more than 256 KiB of data; pass the data as an argument", origin)
            self.ops.append(RecordedOp(template, origin, code[ins:scalars], values, code[outs : outs + template.results]))
        self.tick(len(self.ops) - before)
        return code, self.defer(freed)

    def defer(self, freed: list[int]) -> list[int]:
        """Hold back ids from before the call, which the dispatcher may still need for it; returns the others."""
        # Ids are handed out in order, so that a lower one is from before the call
        self._deferred += [i for i in freed if i < self.first]
        return [i for i in freed if i >= self.first]

    def take_deferred(self) -> list[int]:
        """The ids that `defer` has held back, once."""
        held, self._deferred = self._deferred, []
        return held

    def refuse(self, what: str, origin: int) -> None:
        """Note an op for which no call can be one program; the call itself goes on."""
        self.cut = self.cut or "depends on values" in what
        self.prevents.append(Difference(self.origins.where(origin), what))

    def refuse_program(self, why: str) -> None:
        """Note a reason for which Python has to run at each call."""
        self.cut = True
        self.prevents.append(Difference("", why))

    def forbids_reads(self) -> bool:
        """A library's question whether a capture forbids reads of values: yes, once a recording has failed for one."""
        self._was_asked = True
        return self.strict

    def folded(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor that constants decide, or arguments, if the call may read these; else None."""
        self.recorder.flush()
        number = tensor._ref.id  # type: ignore[attr-defined]
        value = self._constants.value(self.ops, number)
        return None if self.strict and self._constants.by_argument(number) else value

    def constant(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor that is read during the call, if it is the same at each call, or can be computed before it.

        None: the caller reads it, and this call becomes no program.
        """
        value = self.folded(tensor)
        if value is not None:
            # A choice by arguments becomes a guard that each replay computes
            if self._constants.varies(tensor._ref.id):  # type: ignore[attr-defined]
                self.argument_reads.append(self._constants.read(tensor._ref.id))  # type: ignore[attr-defined]
            return value

        where = self.origins.where(self.origins.here())
        if self.state is not None and (path := self.state.may_decide(tensor, self.makers(), self.ops)):
            what = f"the value of {path} is read, which the next recording knows before the call"
            self.prevents.append(Difference(where, what))
            return None

        # Any other read prevents a program. A library that asks first takes another way if it may not read: record once more
        if self._was_asked and not self.strict:
            self.strict_next = True
            self.prevents.append(
                Difference(where, "a library reads a value to choose an algorithm; the next recording forbids that")
            )
            return None
        self.cut = True
        self.prevents.append(
            Difference(where, f"the value of a remote tensor of shape {list(tensor.shape)} is read{_reader()}")
        )
        return None

    def upload(self, host: torch.Tensor) -> RemoteTensor | None:
        """Return the tensor that has the values of an upload already; None if the caller has to upload it."""
        drawn = self.host_draws.upload(host) if self.host_draws is not None else None
        if drawn is None:
            self.source(host)
        return drawn

    def source(self, host: torch.Tensor) -> None:
        """Note a CPU tensor that the call uploads: one that outlives the call may have other values at the next."""
        if self.host_draws is not None and self.host_draws.follows(host):
            return
        self._sources.append((StorageWeakRef(host.untyped_storage()), self.origins.where(self.origins.here())))

    # ---- after the call

    def computed(self, number: int) -> ArgumentRead | None:
        """The computation of a tensor's value after the call, if arguments and small state decide it; else None."""
        known = self._constants.value(self.ops, number) is not None and self._constants.varies(number)
        return self._constants.read(number) if known else None

    def finish(self) -> None:
        """End the call: ops of other threads prevent a program, and CPU tensors that it uploaded and that are still alive."""
        self.state = None  # which keeps tensors
        if self.shared:
            # First of all, since it explains reasons that other threads' ops have caused
            self.prevents.insert(0, Difference("", SHARED))
        # One that has ended was a temporary value of the call. A storage that is alive may be filled anew before the next call
        for source, where in self._sources:
            if not source.expired():
                self.outlived.add(source.cdata)
                self.prevents.append(
                    Difference(where, "the function uses a CPU tensor; pass it as an argument, or move it to remote once")
                )
        self._sources.clear()

    def trains(self) -> bool:
        """True if the call has made an optimizer's step, so that a graph from before it is of no use."""
        return bool(self.optimized) and self.writes_to(self.optimized)

    def writes_to(self, ids: frozenset[int]) -> bool:
        """True if an op of the call changes one of these tensors."""
        for op in self.ops:
            outs = op.template.outs
            # An op without results, as of lists, may change any of its operands
            silent = not outs or any(out.kind == "none" for out in outs)
            if silent and not ids.isdisjoint(op.ins):
                return True
            if any(out.kind == "same" and op.ins[out.of] in ids for out in outs):
                return True
        return False

    def makers(self) -> dict[int, tuple[int, int]]:
        """Id of a tensor -> (op, output) that made it."""
        return {i: (number, output) for number, op in enumerate(self.ops) for output, i in enumerate(op.outs)}

    def reads(self) -> dict[int, int]:
        """Id of a tensor from before the call that it reads or writes -> the first op that does."""
        own: set[int] = set()
        first_uses: dict[int, int] = {}
        for number, op in enumerate(self.ops):
            for i in op.ins:
                if i not in own:
                    first_uses.setdefault(i, number)
            own.update(op.outs)
        return first_uses

    def draws(self) -> int:
        """Counters of random ops that the call used."""
        counters = [op.values[-1] for op in self.ops if op.template.op in RANDOM]
        return max([c - self.counter for c in counters], default=0)


def _reader() -> str:
    """The part of torch that reads a value now, and the way to have it read none; of the user's own code the way alone."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module in _CURES or module.startswith("torch.distributions."):
            return _CURES.get(module, VALIDATES)
        if module.startswith("torch.optim.") and module != "torch.optim.optimizer":
            kind = frame.f_globals.get("__all__", ("an optimizer",))[0]
            return f" by torch.optim's {kind}, which decides by it in each step: AdamW, for one, reads no values"
        if not is_library(module):
            break
        frame = frame.f_back  # type: ignore[assignment]
    return _CURE


def reads_differ(a: CallRecording, b: CallRecording) -> bool:
    """True if a value that both calls have read of their arguments is not the same."""
    return any(not same_value(old.value, new.value) for old, new in zip(a.argument_reads, b.argument_reads, strict=False))


def difference(a: CallRecording, b: CallRecording, names_a: dict[int, Any], names_b: dict[int, Any]) -> Difference | None:
    """The first difference between two recordings, None if they agree.

    names_a, names_b: id of a tensor from before the call -> its path, which is the same in both.
    """
    # Ids differ in any two calls. A tensor is compared by (op, output) that made it, or by its path
    made_a, made_b = a.makers(), b.makers()
    where = b.origins.where
    for number, (old, new) in enumerate(zip(a.ops, b.ops, strict=False)):
        # A kind of call has one template, so that identity tells
        if old.template is not new.template or old.origin != new.origin:
            text = f"op {number} differs from the call before: {_describe_change(old, new, b.origins)}"
            return Difference(where(new.origin), text + SAME)
        for place, (i, j) in enumerate(zip(old.ins, new.ins, strict=True)):
            was, now = (made_a.get(i) or names_a.get(i)), (made_b.get(j) or names_b.get(j))
            if was != now:
                names = f"{_describe_tensor(now)}, and was {_describe_tensor(was)}"
                return Difference(where(new.origin), f"operand {place} of {new.name} is {names} in the call before")
        changed = _changed_scalars(a, b, old, new)
        if changed is not None:
            return Difference(where(new.origin), changed)
    if len(a.ops) != len(b.ops):
        longer = a if len(a.ops) > len(b.ops) else b
        extra = longer.ops[min(len(a.ops), len(b.ops))]
        text = f"this call has {len(b.ops)} ops, the call before had {len(a.ops)}; {extra.name} is the first that only one has"
        return Difference(where(extra.origin), text)
    added = [{item for item in tape.counts.items() if item[1]} for tape in (a, b)]
    for path in sorted(added[0] ^ added[1]):
        was, now = (tape.counts.get(path[0], 0) for tape in (a, b))
        return Difference("", f"the function adds {now} to {path[0]}, and has added {was} in the call before")
    return None


def _describe_change(old: RecordedOp, new: RecordedOp, origins: Origins) -> str:
    """Describe the part of an op that differs: its name, operands, constants, line, group or micro-batch."""
    before, now = old.template, new.template
    if before.op != now.op:
        return f"it was {old.name}, and is {new.name}"
    if before.ins != now.ins:
        was, is_ = (" ".join(spec.text() for spec in template.ins) for template in (before, now))
        if was == is_:
            was, is_ = (" ".join(_layout(spec) for spec in template.ins) for template in (before, now))
        return f"the operands of {new.name} were {was}, and are {is_}"
    if (before.args, before.kwargs) != (now.args, now.kwargs):
        was, is_ = (_constants_of(template) for template in (before, now))
        return f"the constant arguments of {new.name} were {was}, and are {is_}"
    if old.origin != new.origin:
        return f"{new.name} was called {origins.text(old.origin)}, and is called {origins.text(new.origin)}"
    return f"{new.name} has other results or writes other operands"


def _layout(spec: Spec) -> str:
    """An operand as text with its place in memory, where that is another than a new tensor's."""
    stride = "" if spec.stride == row_major_stride(spec.shape) else f" of strides {list(spec.stride)}"
    return f"{spec.text()}{stride}{f' at element {spec.offset}' if spec.offset else ''}"


def _constants_of(template: Template) -> str:
    shown = [str(to_wire(arg)) for arg in template.args if not isinstance(arg, T)]
    shown += [f"{name}={to_wire(arg)}" for name, arg in template.kwargs if not isinstance(arg, T)]
    return f"({', '.join(shown)})"


def _describe_tensor(name: Any) -> str:
    """A tensor from before the call, or output k of op n, in words."""
    if isinstance(name, tuple):
        return f"a result of op {name[0]}"
    return str(name) if name else "a tensor that nothing names"


def _changed_scalars(a: CallRecording, b: CallRecording, old: RecordedOp, new: RecordedOp) -> str | None:
    """Describe scalars or data that differ; counters of random numbers are compared from the start of each call."""
    pairs = list(zip(old.values, new.values, strict=True))
    if old.template.op in RANDOM:
        # A random op ends with its seed and counter
        (seed_a, seed_b), (counter_a, counter_b) = pairs[-2:]
        del pairs[-2:]
        drawn = max(seed_a, seed_b) >= 0  # attention without dropout draws nothing: its seed is negative
        if drawn and (seed_a != a.seed or seed_b != b.seed):
            return f"{new.name} draws from a generator of its own, which a replay does not have: leave generator= out"
        if drawn and counter_a - a.counter != counter_b - b.counter:
            return f"{new.name} draws other random numbers, as the function seeds the generator: seed it outside the function"
    for was, now in pairs:
        if isinstance(was, bytes):
            if was != now:
                return "the data that the function uploads here differs from call to call; pass it as an argument"
        elif type(was) is not type(now) or repr(was) != repr(now):  # the sign of zero counts, and one NaN is like another
            return (
                f"a number in {new.name} was {was!r} and is {now!r}, which a replay would not see: pass it as a remote tensor"
            )
    return None
