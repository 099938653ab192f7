"""Segments as code that Inductor makes: traced to ATen on fake tensors, compiled once for a form and what it is given.

The graph returns one tensor for each new memory, and views of that, or of what was given, are made anew outside of it: so they
share memory as the ops' own results would. Code is kept on disk by Inductor itself.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import Any

import torch

from gt.errors import UnsupportedOp
from gt.ir.ops import RANDOM
from gt.ir.spec import Spec
from gt.worker.engine.base import Compiled, Misfit, Recorder
from gt.worker.engine.torch.calls import DTYPE, NAME, conform
from gt.worker.engine.torch.memory import laid_out
from gt.worker.segments import Form, Wired

log = logging.getLogger("gt.worker")
MOST = 1024  # compiled forms that are kept
_alone = threading.Lock()  # tracing keeps its state in globals
UNFIT = frozenset({"inplace_view", "nondeterministic_seeded", "dynamic_output_shape", "data_dependent_output"})
# One kernel over all parameters already, in place; as a graph each would be copied.
WHOLE = ("aten._fused_",)
SPECIAL = frozenset({"aten.set_", "aten.resize", "aten.record_stream", "aten._local_scalar_dense"})


@dataclass(frozen=True, slots=True)
class Seen:
    """Inputs: shape, strides and dtype of each, and which share memory."""

    specs: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    alike: tuple[tuple[int, int], ...]  # of each: the first input in the same memory, and its offset if there are several

    def where(self, written: frozenset[int]) -> Seen:
        """Without what does not matter: only of memory that is written it does who shares it."""
        firsts = {self.alike[n][0] for n in written}
        return Seen(self.specs, tuple(row if row[0] in firsts else (n, 0) for n, row in enumerate(self.alike)))


@dataclass(slots=True)
class Traced:
    """A segment's graph and what to do around it. given: places of the inputs that it takes.

    outs: of each output (whether of an input, which result or input, None or its shape, strides and offset there).
    """

    graph: torch.fx.GraphModule
    fakes: list[torch.Tensor]
    given: list[int]
    outs: list[tuple[bool, int, tuple | None]]
    specs: list[Spec]


class Inductor:
    """An engine.base.Compiler."""

    name = "inductor"
    recorder: Recorder | None = None

    def __init__(self, engine: Any) -> None:
        warnings.filterwarnings("ignore", r"\s*Online softmax is disabled", UserWarning)  # says nothing to who runs the program
        self._engine = engine
        self._kept: dict[Hashable, Compiled | str] = {}
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
            self._engine.resolve(name, payload)
        except UnsupportedOp:
            return False
        return name.rpartition(".")[0] not in SPECIAL and not {tag.name for tag in op(name).tags} & UNFIT

    def seen(self, inputs: Sequence[torch.Tensor]) -> Seen:
        specs = tuple((tuple(t.shape), t.stride(), t.dtype) for t in inputs)
        bases = [t.untyped_storage().data_ptr() if t.numel() else -n - 1 for n, t in enumerate(inputs)]
        first = [bases.index(base) for base in bases]
        offsets = [t.storage_offset() for t in inputs]
        return Seen(specs, tuple((n, offset if first.count(n) > 1 else 0) for n, offset in zip(first, offsets, strict=True)))

    # ---- compiling

    def compile(self, wired: Wired, seen: Seen) -> Compiled:
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

    def _compile(self, wired: Wired, seen: Seen, written: frozenset[int], key: Hashable) -> Compiled:
        import torch._inductor.config as settings
        from torch._inductor.compile_fx import compile_fx

        if any(dtype.is_complex for _, _, dtype in seen.specs):
            raise ValueError("complex numbers are not compiled")
        threads = settings.compile_threads if self._engine.device.type == "cuda" else 1  # more are processes, idle afterwards
        with _alone, settings.patch(compile_threads=threads):
            traced = self._trace(wired, seen, written)
            run = compile_fx(traced.graph, traced.fakes)
        return Code(traced, run, seen, written, key)

    def _trace(self, wired: Wired, seen: Seen, written: frozenset[int]) -> Traced:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        calls = [self._engine.bind(payload) for payload in wired.payloads]
        counts = [sum(out[0] in ("new", "view") for out in payload["outs"]) for payload in wired.payloads]
        taken = _Taken(seen, written)
        found: list[Any] = []

        def run(*given: torch.Tensor) -> list[torch.Tensor]:
            slots = taken.slots(given)
            for call, bound, values, count in zip(wired.form.calls, calls, wired.values, counts, strict=True):
                made = bound(*[slots[i] for i in call.ins], *values)
                slots += [] if count == 0 else [made] if count == 1 else made
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
            raise ValueError("an op changes what it is given, and its schema does not say so")
        _, outs, specs = found
        return Traced(graph, fakes, taken.given, outs, specs)


def op(name: str) -> Any:
    """The overload of a name."""
    space, base, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), base), overload)


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
    schema, found = op(payload["op"])._schema, []
    for n, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = payload["args"][n] if n < len(payload["args"]) else payload["kwargs"].get(argument.name)
        holes = given if isinstance(given, list) else [given]
        found += [hole["t"] for hole in holes if isinstance(hole, dict) and "t" in hole]
    return found


@dataclass(slots=True)
class _Taken:
    """What the graph is given. Where inputs share memory that is written it gets the one that holds the others."""

    seen: Seen
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
                    raise ValueError("it changes memory that several of its inputs share, from an offset on")
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


class Code:
    """An engine.base.Compiled."""

    def __init__(self, traced: Traced, run: Callable, seen: Seen, written: frozenset[int], key: Hashable) -> None:
        self.key, self.writes = key, bool(written)
        self.specs: Sequence[Spec] = traced.specs
        self.run, self.given, self.outs = run, traced.given, traced.outs
        self._shapes = [torch.Size(shape) for shape, _, _ in seen.specs]
        self._strides = [stride for _, stride, _ in seen.specs]
        self._dtypes = [dtype for _, _, dtype in seen.specs]
        self._alike = _Alike(seen, written) if written else None
        self._all = self.given == list(range(len(seen.specs)))
        self._mends: dict[int, Callable] | None = None  # of results that are not as they have to be; None before the first
        self._wanted = [(tuple(meta.shape), meta.stride(), meta.dtype) for meta in _metas(traced.graph)]

    def check(self, inputs: list[torch.Tensor]) -> None:
        if list(map(_SHAPE, inputs)) != self._shapes or list(map(_STRIDE, inputs)) != self._strides:
            raise Misfit("shapes or strides")
        if [t.dtype for t in inputs] != self._dtypes:
            raise Misfit("dtypes")
        if self._alike is not None:
            self._alike.check(inputs)

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.check(inputs)
        results = self.run(*(inputs if self._all else [inputs[i] for i in self.given]))
        if self._mends is None:
            self._mends = self._mend(results, inputs)
        if self._mends:
            results = list(results)
            for n, mend in self._mends.items():
                results[n] = mend(results[n])
        return self.named(inputs, results)

    def named(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs, of inputs and what the graph returned."""
        made = []
        for of_input, n, place in self.outs:
            base = inputs[n] if of_input else results[n]
            if place is not None:
                base = base.as_strided(place[0], place[1], base.storage_offset() + place[2])
            made.append(base)
        return made

    def _mend(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> dict[int, Callable]:
        """What to do with results that share memory, which the ops' own would not, or lie otherwise."""
        held = {t.untyped_storage().data_ptr() for t in inputs if t.numel()}
        mends: dict[int, Callable] = {}
        for n, (result, (shape, stride, dtype)) in enumerate(zip(results, self._wanted, strict=True)):
            if tuple(result.shape) != shape or result.dtype != dtype:
                raise ValueError(f"the result is {NAME[result.dtype]}{list(result.shape)}, want {NAME[dtype]}{list(shape)}")
            memory = result.untyped_storage().data_ptr()
            spec = Spec(shape, tuple(stride), 0, NAME[dtype])
            if result.numel() and (memory in held or result.storage_offset()):
                mends[n] = _copied(spec)
            elif conform(result, spec) is not result:
                mends[n] = _conformed(spec)
            held.add(memory)
        return mends


_SHAPE, _STRIDE, _OFFSET, _ADDRESS = torch.Tensor.size, torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.data_ptr


class _Alike:
    """Whether inputs share memory as those did that were seen: what is written lies apart, or with the same as then."""

    def __init__(self, seen: Seen, written: frozenset[int]) -> None:
        self._sizes = [dtype.itemsize for _, _, dtype in seen.specs]
        apart = {seen.alike[n][0] for n in written}
        self._labels = [  # of inputs that have elements: the memory if it is written, else -1
            (n, first if first in apart else -1) for n, (first, _) in enumerate(seen.alike) if all(seen.specs[n][0])
        ]
        firsts = [first for first, _ in seen.alike]
        self._several = [
            (n, first, offset * self._sizes[n]) for n, (first, offset) in enumerate(seen.alike) if firsts.count(first) > 1
        ]

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        offsets = [offset * size for offset, size in zip(map(_OFFSET, inputs), self._sizes, strict=True)]
        bases = list(map(sub, map(_ADDRESS, inputs), offsets))
        owner: dict[int, int] = {}
        if any(owner.setdefault(bases[n], label) != label for n, label in self._labels):
            raise Misfit("which share memory")
        if any(bases[n] != bases[first] or offsets[n] != offset for n, first, offset in self._several):
            raise Misfit("where in shared memory they lie")


def _metas(graph: torch.fx.GraphModule) -> list[torch.Tensor]:
    (returned,) = next(node for node in graph.graph.nodes if node.op == "output").args
    return [node.meta["val"] for node in returned]


def _copied(spec: Spec) -> Callable[[torch.Tensor], torch.Tensor]:
    def copy(result: torch.Tensor) -> torch.Tensor:
        return laid_out(spec.shape, spec.stride, DTYPE[spec.dtype], result.device).copy_(result)

    return copy


def _conformed(spec: Spec) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda result: conform(result, spec)
