"""Segments compiled by Inductor: traced to ATen on fake tensors, compiled once for a graph and an input signature.

The traced graph returns one tensor for each new memory. Views of results and inputs are made outside of it, so they share
memory as the ops' own results would. Inductor itself caches code on disk.
"""

from __future__ import annotations

import json
import logging
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from time import monotonic
from typing import Any

import torch

from gt.errors import UnsupportedOp
from gt.ir.arguments import operands
from gt.ir.ops import RANDOM
from gt.ir.spec import Spec
from gt.wire.deferred_imports import execute_deferred
from gt.worker.engine.base import CompiledSegment, DeviceRecorder, SegmentRefusal
from gt.worker.engine.codegen import finish, fitting
from gt.worker.engine.torch.bounds import BOUNDS
from gt.worker.engine.torch.compiler import code_cache
from gt.worker.engine.torch.compiler.accumulate import accumulated_products
from gt.worker.engine.torch.compiler.compiled_segment import Code, InputSignature, Traced
from gt.worker.engine.torch.compiler.early_results import early_taps, tap
from gt.worker.engine.torch.compiler.kernel_builds import Waits, kernel_builds, start_build_processes
from gt.worker.engine.torch.compiler.lowering import LoweringProcesses, processes_beside
from gt.worker.engine.torch.dtypes import DTYPE, NAME
from gt.worker.engine.torch.gpu import channels_last
from gt.worker.engine.torch.overloads import OVERLOADS
from gt.worker.program.partition import BoundSegment, SegmentGraph, SegmentOp

log = logging.getLogger("gt.worker")
MAX_COMPILED_GRAPHS = 1024  # that are kept
MAX_TAPS = 8  # of one graph
_alone = threading.Lock()  # tracing keeps its state in globals
UNFIT = frozenset({"inplace_view", "nondeterministic_seeded", "dynamic_output_shape", "data_dependent_output"})
# Their shapes depend on values only where an index is a mask, and then the output has no spec
BY_MASKS = frozenset({"aten.index.Tensor"})
# Ops whose results are views that their schemas do not declare, and the same with views that they do: functionalization goes by
# the schema, and would lose what is written through such a view. It knows aten._unsafe_view by name.
DECLARED = {
    "aten.unsafe_split.Tensor": "aten.split.Tensor",
    "aten.unsafe_split_with_sizes.default": "aten.split_with_sizes.default",
}
# Already one kernel over all parameters, in place; in a graph each parameter would be copied.
ONE_KERNEL = ("aten._fused_",)


class Inductor:
    """An engine.base.Compiler."""

    name = "inductor"
    recorder: DeviceRecorder | None = None

    def __init__(self, engine: Any, processes: LoweringProcesses | None = None) -> None:
        """processes: that lower segments beside this one; None starts as many as fit the device and its host."""
        warnings.filterwarnings("ignore", r"\s*Online softmax is disabled", UserWarning)  # of no use to the user
        code_cache.secure()
        if engine.kind == "cuda":
            start_build_processes()
        self._engine = engine
        self.channels_last = engine.kind == "cuda"  # convolutions may have this layout
        self.accumulates = engine.kind == "cuda"  # products may add to a tensor, whose numbers are then rounded once
        self.draws = engine.draws
        self._kept: dict[Hashable, CompiledSegment | SegmentRefusal] = {}
        self._fits: dict[str, bool] = {}
        self._processes = processes or LoweringProcesses(engine.device, processes_beside(engine.device))

    # ---- what can be compiled

    def fits(self, payload: dict[str, Any]) -> bool:
        name = payload["op"]
        if not name.startswith("aten.") or name in RANDOM or payload["random"] is not None or name.startswith(ONE_KERNEL):
            return False
        if any(out[0] == "new" and out[1] is None for out in payload["outs"]):
            return False
        if any(out[1] is not None and out[1][3].startswith("complex") for out in payload["outs"]):
            return False
        if any(out[0] == "view" for out in payload["outs"]) and not _declares_views(name):
            return False
        if name not in self._fits:
            self._fits[name] = self._op_fits(name, payload)
        return self._fits[name]

    def _op_fits(self, name: str, payload: dict[str, Any]) -> bool:
        try:
            self._engine.resolve(payload)
        except UnsupportedOp:
            return False
        return not (unfit_tags(name) or (self._engine.host and name.split(".")[1] in BOUNDS))

    def _taps(self, made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Taps of a GPU's numbers, which the program may read while the code is still at work."""
        numbers = [] if self._engine.host else [t for t in made if t.numel() == 1 and not t.is_complex()]
        return [tap(number) for number in numbers[:MAX_TAPS]]

    def signature(self, inputs: Sequence[torch.Tensor]) -> InputSignature:
        specs = tuple((tuple(t.shape), t.stride(), t.dtype) for t in inputs)
        # Sharing by storage. Empty tensors all have address 0, so each gets a label of its own.
        bases = [t.untyped_storage().data_ptr() if t.numel() else -n - 1 for n, t in enumerate(inputs)]
        first = [bases.index(base) for base in bases]
        offsets = [t.storage_offset() for t in inputs]
        alike = tuple((n, offset if first.count(n) > 1 else 0) for n, offset in zip(first, offsets, strict=True))
        return InputSignature(specs, alike)

    # ---- compiling

    def compile(
        self, requests: Sequence[tuple[BoundSegment, InputSignature]], more: bool = False
    ) -> list[CompiledSegment | SegmentRefusal]:
        """See engine.base.Compiler. Kernels of a segment are built while the next ones are lowered."""
        keys: list[Hashable] = []
        fresh: dict[Hashable, _Request] = {}
        for segment, signature in requests:
            request = _request(segment, signature)
            # Settings that change generated code are part of the key.
            keys.append((segment.graph, request.signature, request.settings))
            if keys[-1] not in self._kept:
                fresh.setdefault(keys[-1], request)
        results = {key: self._kept[key] for key in keys if key in self._kept} | self._compile(fresh)
        if not more and not any(isinstance(result, SegmentRefusal) and result.calls for result in results.values()):
            self._processes.end()  # parts of a segment that is divided do not follow either
        self._keep(results)
        return [results[key] for key in keys]

    def _compile(self, requests: dict[Hashable, _Request]) -> dict[Hashable, CompiledSegment | SegmentRefusal]:
        results: dict[Hashable, CompiledSegment | SegmentRefusal] = {}
        lowered: dict[Hashable, tuple[Code, Waits]] = {}
        with _alone, kernel_builds(self._engine.host) as waits:
            longest = sorted(requests.items(), key=lambda item: -len(item[1].payloads))
            if requests:
                log.debug("%d graphs are lowered, beside %s", len(requests), self._processes)
            for key in self._processes.order({key: request.line for key, request in longest}):
                start = monotonic()
                try:
                    results[key] = code = self._lower(requests[key], key)
                    code.seconds.generating = monotonic() - start
                    log.debug("%d ops are lowered after %.1f s", len(requests[key].payloads), code.seconds.generating)
                    lowered[key] = code, waits.copy()
                except Exception as error:
                    results[key] = _refusal(requests[key], error)
                waits.clear()

            # All graphs are lowered; now wait for their kernels, which build processes have compiled meanwhile.
            for key, (code, kernels) in lowered.items():
                start = monotonic()
                try:
                    for wait in kernels:
                        wait()
                    code.seconds.kernels = monotonic() - start
                except Exception as error:
                    results[key] = _refusal(requests[key], error)
        return results

    def _keep(self, results: dict[Hashable, CompiledSegment | SegmentRefusal]) -> None:
        self._kept.update(results)
        while len(self._kept) > MAX_COMPILED_GRAPHS:
            del self._kept[next(iter(self._kept))]

    def _lower(self, request: _Request, key: Hashable) -> Code:
        compile_fx = load_inductor()
        traced = self._trace(request)
        with early_taps(), accumulated_products() if self.accumulates else nullcontext():
            run = compile_fx(traced.graph, traced.fakes)
        return Code(traced, run, request.signature, request.written, key)

    def lower_on_disk(self, line: bytes) -> None:
        """Lower a segment for another process, which finds its code in Inductor's folder. line: of the request."""
        request = _Request.read(line)
        threads, precision, deterministic = request.settings
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        # Even to set what is the default changes the key by which Inductor keeps code.
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        with _alone, self._engine.guard(), kernel_builds(self._engine.host, build=False) as waits:
            self._lower(request, None)
            for wait in waits if self._engine.host else ():
                wait()

    def warm_up(self) -> None:
        """Lower a small graph, and keep no code: what Inductor makes at its first use on a device takes it seconds."""
        from torch._functorch import config as tracing
        from torch._inductor import config
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        compile_fx = load_inductor()
        with _alone, self._engine.guard(), kernel_builds(self._engine.host, build=False):
            with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True):
                fakes = [torch.empty(shape, device=self._engine.device) for shape in ((64, 32), (32, 64), (64,))]
                graph = make_fx(_small_layer)(*fakes)
            with config.patch(fx_graph_cache=False), tracing.patch(enable_autograd_cache=False):
                compile_fx(graph, fakes)

    def _trace(self, request: _Request) -> Traced:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        signature, written = request.signature, request.written
        counts = [sum(out[0] in ("new", "view") for out in payload["outs"]) for payload in request.payloads]
        graph_inputs = _GraphInputs(signature, written)
        last = self.channels_last and channels_last.gains(_kernels(request))
        check = {"check": channels_last.check_but_strides, "unless": ""} if last else {}
        declared = [{**payload, "op": DECLARED.get(payload["op"], payload["op"])} for payload in request.payloads]
        calls = [replace(self._engine.source(payload), **check).function() for payload in declared]
        ends = [end for payload in request.payloads for end in finish(payload["outs"])]
        specs = [None] * request.graph.inputs + [None if view else spec for _, view, spec in ends]
        results: list[Any] = []
        refused: dict[int, Exception] = {}  # by the number of a call

        # The function that is traced: the ops one by one, on slots as in a segment's numbering. make_fx records the ATen
        # calls.
        def run(*given: torch.Tensor) -> list[torch.Tensor]:
            slots = graph_inputs.slots(given)
            rows = zip(request.graph.calls, calls, request.payloads, request.values, counts, strict=True)
            with channels_last.ChannelsLast() if last else nullcontext():
                for number, (call, bound, payload, values, count) in enumerate(rows):
                    if last and any(out[0] == "view" for out in payload["outs"]):
                        channels_last.restore_strides(slots, call.ins, specs)
                    operands = [slots[i] for i in call.ins]
                    try:
                        outputs = bound(*_real(operands), *values)
                    except Exception as error:  # go on: all that are refused are told at once
                        refused[number] = error
                        outputs = _stand_ins(payload, operands)
                    slots += [] if count == 0 else [outputs] if count == 1 else outputs
            if refused:
                raise _CallsRefused(refused)
            if last:
                channels_last.restore_strides(slots, request.graph.outputs, specs)
            results[:] = _results(slots, request.graph)
            return [*results[0], *self._taps(results[0])]

        # Inductor caches no code on disk without a ShapeEnv. All shapes are static: it has no symbols.
        with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True), _quiet():
            device = self._engine.device
            shapes = [signature.specs[i] for i in graph_inputs.given]
            fakes = [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in shapes]
            versions = [fake._version for fake in fakes]
            graph = make_fx(run)(*fakes)
        # A fake's version counts in-place writes: what the trace wrote is compared with what the schemas declare.
        changed = {n for n, fake, old in zip(graph_inputs.given, fakes, versions, strict=True) if fake._version != old}
        if not changed <= {graph_inputs.bases[n] for n in written}:
            raise ValueError("an op changes an input that its schema does not declare as written")
        _, outs, specs = results
        return Traced(graph, fakes, graph_inputs.given, outs, specs, changed)


def _small_layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A product, a function of each element, and a sum: one of each kind that Inductor lowers in its own way."""
    return torch.nn.functional.gelu(torch.addmm(bias, x, weight)).softmax(-1).sum(0)


def load_inductor() -> Callable:
    """Inductor's entry, after the imports that it needs."""
    execute_deferred("torch._meta_registrations")
    from torch._inductor.compile_fx import compile_fx

    return compile_fx


@cache
def _declares_views(name: str) -> bool:
    """True if functionalization knows that results are views, of the op itself or of that which takes its place."""
    known = name in DECLARED or name == "aten._unsafe_view.default"
    return known or any(returned.alias_info is not None for returned in OVERLOADS[name]._schema.returns)


def unfit_tags(name: str) -> set[str]:
    """Tags with which an op fits no segment and no graph. Its outputs have specs."""
    tags = {tag.name for tag in OVERLOADS[name].tags} & UNFIT
    return tags - {"dynamic_output_shape"} if name in BY_MASKS else tags


@dataclass(frozen=True, slots=True)
class _Request:
    """A segment to be lowered, as plain data: a process beside this one may lower it.

    graph, payloads, values: as in BoundSegment. written: inputs that an op may change. settings: those of torch that change
    code: threads, precision of float32 matmuls, determinism.
    """

    graph: SegmentGraph
    payloads: tuple[dict[str, Any], ...]
    values: tuple[tuple, ...]
    signature: InputSignature
    written: frozenset[int]
    settings: tuple[int, str, bool]

    def line(self) -> str:
        """The request as JSON, without the texts of its ops."""
        graph = self.graph.inputs, [(call.ins, call.made) for call in self.graph.calls], self.graph.outputs
        specs = [(shape, stride, NAME[dtype]) for shape, stride, dtype in self.signature.specs]
        signature = specs, self.signature.alike
        return json.dumps([graph, self.payloads, self.values, signature, sorted(self.written), self.settings])

    @classmethod
    def read(cls, line: bytes) -> _Request:
        (inputs, calls, outputs), payloads, values, (specs, alike), written, settings = json.loads(line)
        graph = SegmentGraph(inputs, tuple(SegmentOp("", tuple(ins), (), made) for ins, made in calls), tuple(outputs))
        signature = InputSignature(
            tuple((tuple(shape), tuple(stride), DTYPE[dtype]) for shape, stride, dtype in specs), tuple(map(tuple, alike))
        )
        return cls(graph, tuple(payloads), tuple(map(tuple, values)), signature, frozenset(written), tuple(settings))


def _request(segment: BoundSegment, signature: InputSignature) -> _Request:
    settings = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    written = frozenset[int]().union(*_written(segment.graph, segment.payloads))
    return _Request(segment.graph, segment.payloads, segment.values, signature.reduced(written), written, settings)


def _refusal(request: _Request, error: Exception) -> SegmentRefusal:
    log.info("a segment of %d ops is not compiled", len(request.payloads), exc_info=error)
    if isinstance(error, _SharedInputs):
        written = _written(request.graph, request.payloads)
        return SegmentRefusal(str(error), tuple(n for n, inputs in enumerate(written) if not inputs.isdisjoint(error.inputs)))
    if not isinstance(error, _CallsRefused):
        return SegmentRefusal(f"{type(error).__name__}: {error}")
    number, first = next(iter(error.calls.items()))
    return SegmentRefusal(f"{request.payloads[number]['op']}: {first}", tuple(error.calls))


class _CallsRefused(Exception):
    """Calls of a segment that cannot be traced, by number, with their errors."""

    def __init__(self, calls: dict[int, Exception]) -> None:
        super().__init__(f"{len(calls)} ops cannot be traced")
        self.calls = calls


class _SharedInputs(Exception):
    """Inputs of a segment share memory that it writes, as no graph can tell."""

    def __init__(self, why: str, inputs: Sequence[int]) -> None:
        super().__init__(f"it writes memory that several of its inputs share{why}")
        self.inputs = inputs


@contextmanager
def _quiet() -> Iterator[None]:
    """torch prints no traceback of an op that is refused: `explain()` tells the reason."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _real(operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """The operands, none of which may be complex: definitions do not show the dtypes of a program's inputs."""
    if any(operand.is_complex() for operand in operands):
        raise ValueError("complex numbers are not compiled")
    return operands


def _stand_ins(payload: dict[str, Any], operands: list[torch.Tensor]) -> Any:
    """Outputs with the specs of a call that was refused, for the ops after it."""
    outs = [out for out in payload["outs"] if out[0] in ("new", "view")]
    specs = [Spec.from_wire(out[1]) for out in outs]
    device = operands[0].device
    made = [torch.empty_strided(spec.shape, spec.stride, dtype=DTYPE[spec.dtype], device=device) for spec in specs]
    return made[0] if len(made) == 1 else made


def _kernels(request: _Request) -> list[tuple[torch.Size, int, torch.dtype]]:
    """Shape, groups and dtype of each convolution's weight in a segment, where that is an input."""
    kernels = []
    for call, payload in zip(request.graph.calls, request.payloads, strict=True):
        if payload["op"] in channels_last.NAMES:
            weight, groups = (1, 8) if payload["op"] == "aten.convolution.default" else (2, 9)
            number = call.ins[payload["args"][weight]["t"]]
            if number < len(request.signature.specs):
                shape, _, dtype = request.signature.specs[number]
                kernels.append((torch.Size(shape), payload["args"][groups], dtype))
    return kernels


def _written(graph: SegmentGraph, payloads: Sequence[dict[str, Any]]) -> list[set[int]]:
    """By call: inputs that it may change, directly or through a view."""
    base = list(range(graph.inputs))  # by tensor: the input whose memory it shares, -1 for none
    written: list[set[int]] = []
    for call, payload in zip(graph.calls, payloads, strict=True):
        # A write through a view counts for the input behind it.
        written.append({base[call.ins[place]] for place in _writes(payload)} - {-1})
        for out in payload["outs"]:
            if out[0] in ("new", "view"):
                base.append(base[call.ins[out[2]]] if out[0] == "view" else -1)
    return written


def _writes(payload: dict[str, Any]) -> list[int]:
    """Places of an op's tensors that it changes."""
    schema, args, kwargs = fitting(payload)
    held = operands(schema, args, kwargs)
    return [place for name in schema.writes for place in held.get(name, ())]


@dataclass(slots=True)
class _GraphInputs:
    """Inputs that the graph takes. Of inputs that share written elements it takes the one that holds the others."""

    signature: InputSignature
    written: frozenset[int]
    given: list[int] = field(default_factory=list)  # inputs that the graph takes
    bases: list[int] = field(default_factory=list)  # by input: the input that the graph takes for it

    def __post_init__(self) -> None:
        groups: dict[int, list[int]] = defaultdict(list)
        for n, (first, _) in enumerate(self.signature.alike):
            groups[first].append(n)
        self.bases = list(range(len(self.signature.alike)))
        for first, members in groups.items():
            if len(members) > 1 and not self.written.isdisjoint(members) and not self.signature.apart(first):
                # Functionalization knows aliasing only through views: so the graph gets one base, and makes the other inputs
                # as views of it.
                base = self._whole(members)
                if self.signature.alike[base][1]:  # in a graph offsets count from the base, as_strided's from the storage
                    raise _SharedInputs(" from an offset on", members)
                for n in members:
                    self.bases[n] = base
        self.given = sorted(set(self.bases))

    def _whole(self, members: list[int]) -> int:
        """The input that holds all elements of the others."""
        ends = {number: self._span(number) for number in members}
        low, high = min(start for start, _ in ends.values()), max(end for _, end in ends.values())
        dtypes = {self.signature.specs[number][2] for number in members}
        for number in members:
            shape, _, _ = self.signature.specs[number]
            if ends[number] == (low, high) and torch.Size(shape).numel() == high - low and len(dtypes) == 1:
                return number
        raise _SharedInputs(", and none of them spans the others", members)

    def _span(self, n: int) -> tuple[int, int]:
        (shape, stride, _), start = self.signature.specs[n], self.signature.alike[n][1]
        if not all(shape):
            return start, start
        return start, start + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))

    def slots(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A tensor for each input, made from those that the graph takes."""
        given_by_number = dict(zip(self.given, given, strict=True))
        tensors = []
        for n, base in enumerate(self.bases):
            if n == base:
                tensors.append(given_by_number[n])
                continue
            shape, stride, _ = self.signature.specs[n]
            tensors.append(torch.ops.aten.as_strided.default(given_by_number[base], shape, stride, self.signature.alike[n][1]))
        return tensors


def _results(slots: list[torch.Tensor], graph: SegmentGraph) -> tuple[list, list, list]:
    """The results of the graph; for each output its place in them; the specs of outputs."""
    inputs = graph.inputs
    owners: dict[int, int] = {}  # memory -> the tensor that was made with it
    for number, tensor in enumerate(slots):
        owners.setdefault(tensor.untyped_storage()._cdata, number)
    results: list[int] = []
    outs: list[tuple[bool, int, tuple | None]] = []
    specs: list[Spec] = []
    for number in graph.outputs:
        out = slots[number]
        owner = owners[out.untyped_storage()._cdata]
        base = slots[owner]
        place = None
        if number != owner:
            _inside(out, base, owner < inputs)
            place = tuple(out.shape), out.stride(), out.storage_offset() - base.storage_offset()
        if owner >= inputs and owner not in results:
            results.append(owner)
        outs.append((owner < inputs, owner if owner < inputs else results.index(owner), place))
        specs.append(Spec(tuple(out.shape), tuple(out.stride()), 0, NAME[out.dtype]))
    return [slots[number] for number in results], outs, specs


def _inside(out: torch.Tensor, base: torch.Tensor, given: bool) -> None:
    """ValueError unless the output can be a view of its base, or of all the memory of an input."""
    first = out.storage_offset() - base.storage_offset()
    last = first + sum((size - 1) * step for size, step in zip(out.shape, out.stride(), strict=True)) if out.numel() else first
    if out.dtype != base.dtype or not (given or (_dense(base) and first >= 0 and last < max(base.numel(), 1))):
        raise ValueError("a result is a view that reaches beyond its base")


def _dense(tensor: torch.Tensor) -> bool:
    """True if its elements are next to one another, each once."""
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride != step:
            return False
        step *= size
    return True
