"""Segments as code that Inductor makes: traced to ATen on fake tensors, compiled once for a form and what it is given.

The graph returns one tensor for each new memory, and views of that, or of what was given, are made anew outside of it: so they
share memory as the ops' own results would. Code is kept on disk by Inductor itself.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import defaultdict
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gt.errors import UnsupportedOp
from gt.ir.arguments import operands
from gt.ir.ops import RANDOM
from gt.ir.spec import Spec
from gt.worker.engine.base import CompiledSegment, DeviceRecorder
from gt.worker.engine.codegen import finish, fitting
from gt.worker.engine.torch.bounds import BOUNDS
from gt.worker.engine.torch.compiled_segment import Code, InputPattern, Traced
from gt.worker.engine.torch.dtypes import NAME
from gt.worker.engine.torch.gpu import channels_last
from gt.worker.engine.torch.overloads import OVERLOADS
from gt.worker.program.partition import Form, Wired

log = logging.getLogger("gt.worker")
MOST = 1024  # compiled forms that are kept
_alone = threading.Lock()  # tracing keeps its state in globals
UNFIT = frozenset({"inplace_view", "nondeterministic_seeded", "dynamic_output_shape", "data_dependent_output"})
# One kernel over all parameters already, in place; as a graph each would be copied.
WHOLE = ("aten._fused_",)


class Inductor:
    """An engine.base.Compiler."""

    name = "inductor"
    recorder: DeviceRecorder | None = None

    def __init__(self, engine: Any) -> None:
        warnings.filterwarnings("ignore", r"\s*Online softmax is disabled", UserWarning)  # says nothing to who runs the program
        self._engine = engine
        self.channels_last = engine.kind == "cuda"  # whether convolutions may be laid out so
        self.draws = engine.draws
        self._kept: dict[Hashable, CompiledSegment | str] = {}
        self._fits: dict[str, bool] = {}

    # ---- what can be compiled

    def fits(self, payload: dict[str, Any]) -> bool:
        name = payload["op"]
        if not name.startswith("aten.") or name in RANDOM or payload["random"] is not None or name.startswith(WHOLE):
            return False
        if any(out[0] == "new" and out[1] is None for out in payload["outs"]):
            return False
        if any(out[1] is not None and out[1][3].startswith("complex") for out in payload["outs"]):
            return False
        if name not in self._fits:
            self._fits[name] = self._op_fits(name, payload)
        return self._fits[name]

    def _op_fits(self, name: str, payload: dict[str, Any]) -> bool:
        try:
            self._engine.resolve(payload)
        except UnsupportedOp:
            return False
        return not ({tag.name for tag in OVERLOADS[name].tags} & UNFIT or (self._engine.host and name.split(".")[1] in BOUNDS))

    def seen(self, inputs: Sequence[torch.Tensor]) -> InputPattern:
        specs = tuple((tuple(t.shape), t.stride(), t.dtype) for t in inputs)
        bases = [t.untyped_storage().data_ptr() if t.numel() else -n - 1 for n, t in enumerate(inputs)]
        first = [bases.index(base) for base in bases]
        offsets = [t.storage_offset() for t in inputs]
        alike = tuple((n, offset if first.count(n) > 1 else 0) for n, offset in zip(first, offsets, strict=True))
        return InputPattern(specs, alike)

    # ---- compiling

    def compile(self, wired: Wired, seen: InputPattern) -> CompiledSegment:
        written = _written(wired)
        seen = seen.where(written)
        settings = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
        key = wired.form, seen, settings
        if key not in self._kept:
            while len(self._kept) >= MOST:
                del self._kept[next(iter(self._kept))]
            try:
                self._kept[key] = self._compile(wired, seen, written, key)
            except Exception as error:
                log.info("a segment of %d ops is not compiled", len(wired.payloads), exc_info=error)
                self._kept[key] = f"{type(error).__name__}: {error}"
        found = self._kept[key]
        if isinstance(found, str):
            raise UnsupportedOp(found)
        return found

    def _compile(self, wired: Wired, seen: InputPattern, written: frozenset[int], key: Hashable) -> CompiledSegment:
        import torch._inductor.config as settings
        from torch._inductor.compile_fx import compile_fx

        if any(dtype.is_complex for _, _, dtype in seen.specs):
            raise ValueError("complex numbers are not compiled")
        threads = settings.compile_threads if self._engine.device.type == "cuda" else 1  # more are processes, idle afterwards
        with _alone, settings.patch(compile_threads=threads):
            traced = self._trace(wired, seen, written)
            run = compile_fx(traced.graph, traced.fakes)
        return Code(traced, run, seen, written, key)

    def _trace(self, wired: Wired, seen: InputPattern, written: frozenset[int]) -> Traced:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        counts = [sum(out[0] in ("new", "view") for out in payload["outs"]) for payload in wired.payloads]
        taken = _Taken(seen, written)
        last = self.channels_last and channels_last.gains(_kernels(wired, seen))
        check = {"check": channels_last.loosely, "unless": ""} if last else {}
        calls = [replace(self._engine.source(payload), **check).function() for payload in wired.payloads]
        ends = [end for payload in wired.payloads for end in finish(payload["outs"])]
        specs = [None] * wired.form.inputs + [None if view else spec for _, view, spec in ends]
        found: list[Any] = []

        def run(*given: torch.Tensor) -> list[torch.Tensor]:
            slots = taken.slots(given)
            rows = zip(wired.form.calls, calls, wired.payloads, wired.values, counts, strict=True)
            with channels_last.ChannelsLast() if last else nullcontext():
                for call, bound, payload, values, count in rows:
                    if last and any(out[0] == "view" for out in payload["outs"]):
                        channels_last.settle(slots, call.ins, specs)
                    made = bound(*[slots[i] for i in call.ins], *values)
                    slots += [] if count == 0 else [made] if count == 1 else made
            if last:
                channels_last.settle(slots, wired.form.outputs, specs)
            found[:] = _results(slots, wired.form)
            return found[0]

        with FakeTensorMode():
            device = self._engine.device
            shapes = [seen.specs[i] for i in taken.given]
            fakes = [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in shapes]
            versions = [fake._version for fake in fakes]
            graph = make_fx(run)(*fakes)
        changed = {n for n, fake, old in zip(taken.given, fakes, versions, strict=True) if fake._version != old}
        if not changed <= {taken.bases[n] for n in written}:
            raise ValueError("an op changes an input that its schema does not declare as written")
        _, outs, specs = found
        return Traced(graph, fakes, taken.given, outs, specs, changed)


def _kernels(wired: Wired, seen: InputPattern) -> list[tuple[torch.Size, int, torch.dtype]]:
    """Shape, groups and dtype of each convolution's weight in a segment, where that is an input."""
    found = []
    for call, payload in zip(wired.form.calls, wired.payloads, strict=True):
        if payload["op"] in channels_last.NAMES:
            weight, groups = (1, 8) if payload["op"] == "aten.convolution.default" else (2, 9)
            number = call.ins[payload["args"][weight]["t"]]
            if number < len(seen.specs):
                shape, _, dtype = seen.specs[number]
                found.append((torch.Size(shape), payload["args"][groups], dtype))
    return found


def _written(wired: Wired) -> frozenset[int]:
    """Inputs that an op of the segment may change, themselves or through a view."""
    base = list(range(wired.form.inputs))  # of each tensor, the input in whose memory it lies, -1 for none
    written: set[int] = set()
    for call, payload in zip(wired.form.calls, wired.payloads, strict=True):
        for place in _writes(payload):
            written.add(base[call.ins[place]])
        for out in payload["outs"]:
            if out[0] in ("new", "view"):
                base.append(base[call.ins[out[2]]] if out[0] == "view" else -1)
    return frozenset(written - {-1})


def _writes(payload: dict[str, Any]) -> list[int]:
    """Places of an op's tensors that it changes."""
    schema, args, kwargs = fitting(payload)
    held = operands(schema, args, kwargs)
    return [place for name in schema.writes for place in held.get(name, ())]


@dataclass(slots=True)
class _Taken:
    """What the graph is given. Where inputs share memory that is written it gets the one that holds the others."""

    seen: InputPattern
    written: frozenset[int]
    given: list[int] = field(default_factory=list)  # inputs that the graph takes
    bases: list[int] = field(default_factory=list)  # of each input, the one taken for it

    def __post_init__(self) -> None:
        groups: dict[int, list[int]] = defaultdict(list)
        for n, (first, _) in enumerate(self.seen.alike):
            groups[first].append(n)
        self.bases = list(range(len(self.seen.alike)))
        for members in groups.values():
            if len(members) > 1 and not self.written.isdisjoint(members):
                base = self._whole(members)
                if self.seen.alike[base][1]:  # in a graph offsets count from the base, as_strided's from where memory begins
                    raise ValueError("it writes memory that several of its inputs share from an offset on")
                for n in members:
                    self.bases[n] = base
        self.given = sorted(set(self.bases))

    def _whole(self, members: list[int]) -> int:
        """The input whose elements are all that the others have."""
        ends = {n: self._span(n) for n in members}
        low, high = min(a for a, _ in ends.values()), max(b for _, b in ends.values())
        dtypes = {self.seen.specs[n][2] for n in members}
        for n in members:
            shape, _, _ = self.seen.specs[n]
            if ends[n] == (low, high) and torch.Size(shape).numel() == high - low and len(dtypes) == 1:
                return n
        raise ValueError("it changes memory that several of its inputs share, of which none holds the others")

    def _span(self, n: int) -> tuple[int, int]:
        (shape, stride, _), start = self.seen.specs[n], self.seen.alike[n][1]
        if not all(shape):
            return start, start
        return start, start + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))

    def slots(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of each input a tensor, from those that the graph takes."""
        taken = dict(zip(self.given, given, strict=True))
        found = []
        for n, base in enumerate(self.bases):
            if n == base:
                found.append(taken[n])
                continue
            shape, stride, _ = self.seen.specs[n]
            found.append(torch.ops.aten.as_strided.default(taken[base], shape, stride, self.seen.alike[n][1]))
        return found


def _results(slots: list[torch.Tensor], form: Form) -> tuple[list, list, list]:
    """What the graph returns; of each output where it is; their specs."""
    inputs = form.inputs
    owners: dict[int, int] = {}  # memory -> the tensor that was made with it
    for n, tensor in enumerate(slots):
        owners.setdefault(tensor.untyped_storage()._cdata, n)
    results: list[int] = []
    outs: list[tuple[bool, int, tuple | None]] = []
    specs: list[Spec] = []
    for n in form.outputs:
        out = slots[n]
        owner = owners[out.untyped_storage()._cdata]
        base = slots[owner]
        place = None
        if n != owner:
            _inside(out, base, owner < inputs)
            place = tuple(out.shape), out.stride(), out.storage_offset() - base.storage_offset()
        if owner >= inputs and owner not in results:
            results.append(owner)
        outs.append((owner < inputs, owner if owner < inputs else results.index(owner), place))
        specs.append(Spec(tuple(out.shape), tuple(out.stride()), 0, NAME[out.dtype]))
    return [slots[n] for n in results], outs, specs


def _inside(out: torch.Tensor, base: torch.Tensor, given: bool) -> None:
    """ValueError unless a view can be made of the base alone, or of all the memory that it is given in."""
    first = out.storage_offset() - base.storage_offset()
    last = first + sum((size - 1) * step for size, step in zip(out.shape, out.stride(), strict=True)) if out.numel() else first
    if out.dtype != base.dtype or not (given or (_dense(base) and first >= 0 and last < max(base.numel(), 1))):
        raise ValueError("a result is a view that the memory it was made of does not show")


def _dense(tensor: torch.Tensor) -> bool:
    """Whether its elements are next to one another, each once."""
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride != step:
            return False
        step *= size
    return True
