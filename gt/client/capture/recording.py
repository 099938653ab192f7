"""One recorded call: the ops it made as rows that can be compared with those of another call.

Ids are renamed to what they mean: made by the n-th op, or a tensor that was there, known by the place where Python has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gt.client.capture.constants import Constants
from gt.client.capture.recorded_op import RecordedOp
from gt.errors import CaptureError
from gt.ir.instr import DROP, FIRST, FREE, PARAM
from gt.ir.ops import RANDOM
from gt.ir.template import T, to_wire

SAME = "; have the function do the same ops at each call"

if TYPE_CHECKING:
    from gt.client.trace.provenance import Origins
    from gt.client.trace.recorder import Recorder
    from gt.ir.template import Template


@dataclass(slots=True)
class Difference:
    """What two recordings do not share. place: (file, line) of the user's; what: one line."""

    place: str
    what: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}" if self.place else self.what


@dataclass
class CallRecording:
    """Takes what the recorder hands over, from the first op of a call to its last. seed, counter: random state before.

    late: whether nothing of it is carried out before its end. strict: whether libraries are told that no value may be read;
    strict_next: whether they have to be, the next time.
    """

    recorder: Recorder
    origins: Origins
    seed: int
    counter: int
    late: bool = False
    strict: bool = False
    strict_next: bool = False
    first: int = 0  # ids of tensors made in the call start here
    ops: list[RecordedOp] = field(default_factory=list)
    prevents: list[Difference] = field(default_factory=list)
    _deferred: list[int] = field(default_factory=list)  # ended meanwhile, but not made in the call
    _sources: list[tuple[StorageWeakRef, str]] = field(default_factory=list)
    _constants: Constants = field(default_factory=Constants)
    _was_asked: bool = False

    def __post_init__(self) -> None:
        self.first = self.recorder.new_id()

    # ---- while the call runs

    def take(self, code: list, frames: list, freed: list[int]) -> list[int]:
        """Parse a batch; of what has ended, what may be freed now."""
        at, templates = 0, self.recorder.templates
        while at < len(code):
            number = code[at]
            if number < FIRST:
                at += 2 + code[at + 1] if number == FREE else 2 if number in (PARAM, DROP) else 1
                continue
            template = templates[number]
            one = at + 2
            two = one + len(template.ins)
            three = two + template.values
            end = three + template.results
            values = code[two:three]
            if template.op == "gt.upload.default":
                values = [frames[values[0]] if values[0] >= 0 else b""]
                if code[two] < 0:
                    self.refuse("the function uploads more than 256 KiB of data; pass the data as an argument", code[at + 1])
            self.ops.append(RecordedOp(template, code[at + 1], code[one:two], values, code[three:end]))
            at = end
        return self.defer(freed)

    def defer(self, freed: list[int]) -> list[int]:
        """Of what has ended, what may be freed now: not what was there before."""
        self._deferred += [i for i in freed if i < self.first]
        return [i for i in freed if i >= self.first]

    def take_deferred(self) -> list[int]:
        found, self._deferred = self._deferred, []
        return found

    def refuse(self, what: str, origin: int) -> None:
        """Note why this call can be no program; it goes on."""
        self.prevents.append(Difference(self.origins.where(origin), what))

    def asked(self) -> bool:
        """A library asks whether values may be read: they may not if a recording before failed because one was."""
        self._was_asked = True
        return self.strict

    def constant(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A value that is asked for while the call runs, if it is the same at each call. None: read it, this is no program.

        CaptureError where nothing but the function itself can be to blame.
        """
        self.recorder.flush()
        found = self._constants.value(self.ops, tensor._ref.id)  # type: ignore[attr-defined]
        if found is not None:
            return found
        where = self.origins.where(self.origins.here())
        if self._was_asked and not self.strict:
            self.strict_next = True
            self.prevents.append(
                Difference(where, "a library reads a value to choose an algorithm; the next recording forbids that")
            )
            return None
        raise CaptureError(
            f"{where}: the value of a remote tensor of shape {list(tensor.shape)} is asked for inside a compiled function, "
            "whose Python does not run in a replay: return the tensor and read it outside"
        )

    def source(self, host: torch.Tensor) -> None:
        """A CPU tensor is uploaded in the call: one that outlives it may have other values the next time."""
        self._sources.append((StorageWeakRef(host.untyped_storage()), self.origins.where(self.origins.here())))

    # ---- afterwards

    def finish(self) -> None:
        """The call is over, and so is all that it made and nobody keeps."""
        for source, where in self._sources:
            if not source.expired():
                self.prevents.append(
                    Difference(where, "the function uses a CPU tensor; pass it as an argument, or move it to remote once")
                )
        self._sources.clear()

    def made(self) -> dict[int, tuple[int, int]]:
        """Tensor -> (op, output) that made it."""
        return {i: (n, k) for n, op in enumerate(self.ops) for k, i in enumerate(op.outs)}

    def read(self) -> dict[int, int]:
        """Tensors that were there before and that it reads or writes -> the first op that does."""
        made: set[int] = set()
        found: dict[int, int] = {}
        for n, op in enumerate(self.ops):
            for i in op.ins:
                if i not in made:
                    found.setdefault(i, n)
            made.update(op.outs)
        return found

    def draws(self) -> int:
        """Random numbers' counters that it used up."""
        counters = [op.values[-1] for op in self.ops if op.template.op in RANDOM]
        return max([c - self.counter for c in counters], default=0)


def difference(a: CallRecording, b: CallRecording, names_a: dict[int, Any], names_b: dict[int, Any]) -> Difference | None:
    """The first thing in which two recordings differ. names: tensors that were there -> what they are called in both."""
    made_a, made_b = a.made(), b.made()
    where = b.origins.where
    for n, (old, new) in enumerate(zip(a.ops, b.ops, strict=False)):
        if old.template is not new.template or old.origin != new.origin:
            text = f"op {n} differs from the call before: {_change(old, new, b.origins)}"
            return Difference(where(new.origin), text + SAME)
        for k, (i, j) in enumerate(zip(old.ins, new.ins, strict=True)):
            was, now = (made_a.get(i) or names_a.get(i)), (made_b.get(j) or names_b.get(j))
            if was != now:
                text = f"operand {k} of {new.name} is {_tensor(now)}, and was {_tensor(was)} in the call before"
                return Difference(where(new.origin), text)
        found = _constants(a, b, old, new)
        if found is not None:
            return Difference(where(new.origin), found)
    if len(a.ops) != len(b.ops):
        longer = a if len(a.ops) > len(b.ops) else b
        extra = longer.ops[min(len(a.ops), len(b.ops))]
        text = f"this call has {len(b.ops)} ops, the call before had {len(a.ops)}; {extra.name} is the first that only one has"
        return Difference(where(extra.origin), text)
    return None


def _change(old: RecordedOp, new: RecordedOp, origins: Origins) -> str:
    """Say which part of an op differs: its name, operands, constants, line, group or micro-batch."""
    before, now = old.template, new.template
    if before.op != now.op:
        return f"it was {old.name}, and is {new.name}"
    if before.ins != now.ins:
        was, is_ = (" ".join(spec.text() for spec in template.ins) for template in (before, now))
        return f"the operands of {new.name} were {was}, and are {is_}"
    if (before.args, before.kwargs) != (now.args, now.kwargs):
        was, is_ = (_constants_of(template) for template in (before, now))
        return f"the constant arguments of {new.name} were {was}, and are {is_}"
    if old.origin != new.origin:
        return f"{new.name} was called {origins.text(old.origin)}, and is called {origins.text(new.origin)}"
    return f"{new.name} has other results or writes other operands"


def _constants_of(template: Template) -> str:
    shown = [str(to_wire(arg)) for arg in template.args if not isinstance(arg, T)]
    shown += [f"{name}={to_wire(arg)}" for name, arg in template.kwargs if not isinstance(arg, T)]
    return f"({', '.join(shown)})"


def _tensor(name: Any) -> str:
    """A tensor that was there before, or output k of op n, in words."""
    if isinstance(name, tuple):
        return f"a result of op {name[0]}"
    return str(name) if name else "a tensor that nothing names"


def _constants(a: CallRecording, b: CallRecording, old: RecordedOp, new: RecordedOp) -> str | None:
    """Scalars and data that differ; random numbers count from where the call began."""
    pairs = list(zip(old.values, new.values, strict=True))
    if old.template.op in RANDOM:
        (seed_a, seed_b), (one, two) = pairs[-2:]
        del pairs[-2:]
        drawn = max(seed_a, seed_b) >= 0  # attention without dropout draws nothing, and says so
        if drawn and (seed_a != a.seed or seed_b != b.seed):
            return f"{new.name} draws from a generator of its own, which a replay does not have: leave generator= out"
        if drawn and one - a.counter != two - b.counter:
            return f"{new.name} draws other random numbers, as the function seeds the generator: seed it outside the function"
    for x, y in pairs:
        if isinstance(x, bytes):
            if x != y:
                return "the data that the function uploads here differs from call to call; pass it as an argument"
        elif type(x) is not type(y) or repr(x) != repr(y):  # the sign of zero counts, and one NaN is like another
            return f"a number in {new.name} was {x!r} and is {y!r}, which a replay would not see: pass it as a remote tensor"
    return None
