"""The torch engine: ATen overloads by name, called on plain tensors on this worker's device, outside autograd.

A definition becomes one Python function with its constants bound; what is torch about a worker is in engine/torch*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any

import numpy as np
import torch

from gt.errors import ConfigError
from gt.ir.ops import RANDOM
from gt.ir.schema import OWN, Schema
from gt.ir.spec import Spec
from gt.ir.template import Const
from gt.worker.engine.base import IDENTITY, Combine, Compiler, HostLane
from gt.worker.engine.codegen import Call, Source, fitting
from gt.worker.engine.torch import memory, random, row_major
from gt.worker.engine.torch.bounds import CHECKS
from gt.worker.engine.torch.compiler import early_results
from gt.worker.engine.torch.compiler.inductor import Inductor, load_inductor
from gt.worker.engine.torch.compiler.lowering import LoweringProcesses, processes_beside
from gt.worker.engine.torch.dtypes import CONSTANTS, DTYPE, NAME, UNLESS, check_strides, check_view, conform
from gt.worker.engine.torch.gpu.cuda import Cuda, Events
from gt.worker.engine.torch.gpu.direct import direct
from gt.worker.engine.torch.gpu.early_values import EarlyNumbers
from gt.worker.engine.torch.gpu.graphs import Graphs
from gt.worker.engine.torch.gpu.pinned import PinnedCopies
from gt.worker.engine.torch.gpu.times import GpuTimes
from gt.worker.engine.torch.layers import attention, norms, recurrent
from gt.worker.engine.torch.libraries import load
from gt.worker.engine.torch.overloads import OVERLOADS
from gt.worker.offload.host_ops import HostEngineLane


class TorchEngine:
    """An engine.base.Engine."""

    name = "torch"

    def __init__(self, device: str = "") -> None:
        """device: "cpu" or "cuda:0"; "" is the GPU if there is one."""
        self.device = _device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        self.kind = self.device.type
        self.host = self.kind == "cpu"
        self.clock = perf_counter if self.host else None
        self._computing = None if self.host else torch.cuda.current_stream(self.device)
        self.progress = None if self.host else Events(self._mark)
        self.times = None if self.host else GpuTimes(self.device)
        self.direct = direct(self, COMBINE)
        self.copies = None if self.host else PinnedCopies(self.device)
        self.seeds = None if self.host else self._seeds()
        self.key = None if self.seeds is None else self.seeds.key
        self.early = None if self.host else EarlyNumbers(self.device)
        if self.early is not None:
            early_results.receive_by(self.early.tap)
        self._inductor: Inductor | None = None
        self._lowering: LoweringProcesses | None = None  # started before the compiler is
        self._graphs: Graphs | None = None
        self._lane: HostLane | None = None

    def _mark(self) -> torch.cuda.Event:
        assert self._computing is not None, "a GPU's"
        return self._computing.record_event(torch.cuda.Event(blocking=True))

    def _seeds(self) -> Any:
        """Seeds of a GPU's random kernels, over the key in its memory; None without Triton, where the host draws."""
        try:
            from gt.worker.engine.torch.gpu.attention_seeds import AttentionSeeds
            from gt.worker.engine.torch.gpu.philox_kernel import PhiloxKey
        except ImportError:
            return None
        return AttentionSeeds(PhiloxKey(self.device))

    def draws(self, payload: dict[str, Any]) -> bool:
        """True if the device draws an op's random numbers, by the key in its memory."""
        if self.key is None:
            return False
        from gt.worker.engine.torch.gpu.device_random import DRAW

        name, wide = payload["op"], ("float64", "complex64", "complex128")
        drawn = name in DRAW or name in attention.OPS
        return drawn and not any(out[1] is not None and out[1][3] in wide for out in payload["outs"])

    def draw_from(self, seed: int, counter: int, draws: int) -> None:
        """Set the key from which a program's draws count, in the device's order of work. draws: their number."""
        if self.seeds is not None:
            self.seeds.key.set(seed, counter)
            self.seeds.program_draws = draws

    def load(self, libraries: Sequence[str]) -> list[str]:
        return load(libraries, self.kind)

    def guard(self) -> AbstractContextManager:
        return torch.no_grad()

    # ---- ops

    def bind(self, payload: dict[str, Any]) -> Call:
        return self.source(payload).function()

    def source(self, payload: dict[str, Any]) -> Source:
        schema = fitting(payload)[0]
        unless = "" if "by_values" in schema.flags else UNLESS
        return Source(self._bound(schema, payload), payload, self._constant, check_strides, check_view, unless)

    def resolve(self, payload: dict[str, Any]) -> Callable:
        """The function that executes an `op` definition; UnsupportedOp if this engine has none."""
        return self._bound(fitting(payload)[0], payload)

    def _bound(self, schema: Schema, payload: dict[str, Any]) -> Callable:
        name = schema.op
        if name in attention.OPS:
            return attention.bind(name, payload["random"], self.seeds)
        if name in RANDOM:
            return random.bind(name, payload["random"], self.key)
        if name in recurrent.OPS:
            return recurrent.OPS[name]
        if name in ("gt.move.default", "gt.lend.default"):
            return torch.ops.aten.clone.default
        op: Callable = OVERLOADS[name]._op
        space, base, _ = name.split(".")
        if space not in OWN:
            return op
        op = ALIKE[base](op) if base in ALIKE else op
        # Layers around torch's kernel: results alike on all devices, cleared memory, checked indices, row-major inputs.
        op = op if self.host and memory.switch() is not None else memory.cleared(base, op)
        if self.host:
            op = CHECKS[base](op, schema) if base in CHECKS else norms.host(name, op)
        return row_major.row_major(op, schema) if base in row_major.OPS else op

    def compiler(self, backend: str) -> tuple[Compiler | None, str]:
        """The compiler of segments, and the reason if it is not the one that was asked for."""
        if self._inductor is None:
            self._inductor = Inductor(self, self._lowering)
        if backend != "cudagraphs" or self.host:
            return self._inductor, "no CUDA device, so inductor" if backend == "cudagraphs" else ""
        if self._graphs is None:
            self._graphs = Graphs(self._inductor, Cuda(self.device, self.seeds), self.early)
        return self._graphs, ""

    def prepare_compilation(self, idle: bool) -> None:
        """Start the processes that lower segments, which takes them seconds; if idle, import Inductor, which takes as long.

        Called for each step that is recorded.
        """
        if self._lowering is None and self._inductor is None:
            self._lowering = LoweringProcesses(self.device, processes_beside(self.device))
        if idle and not self.host and self._inductor is None:
            self.compiler("inductor")
            load_inductor()

    def _constant(self, const: Const) -> Any:
        if const.kind == "device":
            return self.device
        if const.kind == "complex":
            return complex(*const.value)
        return CONSTANTS[const.kind][const.value]

    # ---- memory

    def empty(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=DTYPE[dtype], device=self.device)

    def zeros(self, spec: Spec) -> torch.Tensor:
        return memory.laid_out(spec.shape, spec.stride, DTYPE[spec.dtype], self.device).zero_()

    def filled(self, like: torch.Tensor, op: str) -> torch.Tensor:
        value: Any = IDENTITY[op]
        if value in (float("inf"), float("-inf")) and not like.dtype.is_floating_point:
            info = (0, 1) if like.dtype == torch.bool else (torch.iinfo(like.dtype).min, torch.iinfo(like.dtype).max)
            value = info[value > 0]
        return torch.full(like.shape, value, dtype=like.dtype, device=self.device)

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    def flat(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return tensor.view(tuple(shape))

    def packed(self, tensor: torch.Tensor) -> torch.Tensor:
        if not _hidden(tensor):
            return tensor
        early = None if self.early is None else self.early.read(tensor)
        if early is not None:
            return early
        plain = tensor.detach().resolve_conj().resolve_neg()
        if not self.host:  # a copy that waits blocks the driver for all other threads
            torch.cuda.current_stream(self.device).synchronize()
        return plain.to("cpu").contiguous()

    def staging(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=DTYPE[dtype])

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.host else tensor.to(self.device)

    def view(self, tensor: torch.Tensor) -> memoryview:
        if not tensor.numel():
            return memoryview(bytearray())
        flat = tensor.as_strided((tensor.numel(),), (1,))  # view(-1) keeps an odd stride where there is one element
        return flat.view(torch.uint8).numpy().data

    def upload(self, buffer: Any, spec: Spec) -> torch.Tensor:
        if len(buffer) != spec.nbytes:
            raise ValueError(f"{len(buffer)} bytes were sent for {spec.text()}, want {spec.nbytes}")
        if not spec.numel:
            return self.zeros(spec)
        given = np.asarray(buffer, np.uint8)
        if self.host:
            data = torch.from_numpy(given)
        else:  # from pinned memory, or this thread would wait for all issued work
            pinned = torch.empty(len(given), dtype=torch.uint8, pin_memory=True)
            np.copyto(pinned.numpy(), given)  # torch would wake all its threads for it, which takes up to 16 ms
            data = pinned.to(self.device, non_blocking=True)
        return conform(data.view(DTYPE[spec.dtype]).view(spec.shape), spec)

    def combine(self, op: str, dtype: str) -> Combine:
        kind, reduce = DTYPE[dtype], COMBINE[op]

        def run(dst: memoryview, src: memoryview) -> None:
            if len(dst):
                reduce(torch.frombuffer(dst, dtype=kind), torch.frombuffer(src, dtype=kind))

        return run

    # ---- what there is

    def spec(self, tensor: torch.Tensor) -> Spec:
        return Spec(tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), NAME[tensor.dtype])

    def dtype(self, tensor: torch.Tensor) -> str:
        return NAME[tensor.dtype]

    def storage(self, tensor: torch.Tensor) -> tuple[int, int]:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    def host_rates(self) -> list[float]:
        if self.host:
            return []
        from gt.worker.engine.torch.gpu.host_rates import measure

        return measure(self.device)

    def lane(self) -> HostLane:
        if self._lane is None:
            self._lane = HostEngineLane(self) if self.host else self._gpu_lane()
        return self._lane

    def _gpu_lane(self) -> HostLane:
        from gt.worker.engine.torch.gpu.host_lane import GpuHostLane

        return GpuHostLane(self.device, TorchEngine("cpu"))

    def evicted(self, tensor: torch.Tensor) -> Any:
        if self.host:
            return None
        from gt.worker.engine.torch.gpu.pinned_copies import PinnedCopy

        return PinnedCopy(tensor)

    def shared(self, tensor: torch.Tensor) -> bool:
        own = 2 + (tensor._base is not None)  # the tensor, what it is a view of, and the object of this call
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > own  # type: ignore[attr-defined]

    def memory_of(self, tensor: torch.Tensor) -> memoryview | None:
        # All bytes of the storage as one flat tensor; `cpu` copies them only from a GPU.
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        return memoryview(whole.cpu().numpy())

    def in_memory(self, buffer: Any, spec: Spec) -> torch.Tensor:
        flat = torch.frombuffer(buffer, dtype=DTYPE[spec.dtype], count=spec.numel)
        storage = flat.to(self.device).untyped_storage()
        return torch.empty(0, dtype=flat.dtype, device=self.device).set_(storage, 0, spec.shape, spec.stride)  # no view

    def peak(self) -> int:
        return 0 if self.host else torch.cuda.max_memory_allocated(self.device)

    def switch(self, switches: dict[str, Any]) -> None:
        if switches.get("threads"):
            torch.set_num_threads(int(switches["threads"]))
        if switches.get("matmul_precision"):
            torch.set_float32_matmul_precision(switches["matmul_precision"])
        wanted = bool(switches.get("deterministic", False))
        if "deterministic" in switches and wanted != torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(wanted)  # imports Inductor: 2 s and 100 MB a worker, so only if it must
        if not self.host:
            torch.backends.cudnn.benchmark = bool(switches.get("cudnn_benchmark", False))
            torch.backends.cudnn.allow_tf32 = bool(switches.get("cudnn_tf32", True))

    def divide(self, tensor: torch.Tensor, by: int) -> None:
        tensor.div_(by)

    def bound(self, nbytes: int) -> None:
        if self.host:  # gt.worker.process.memory_budget bounds the process
            return
        there = torch.cuda.get_device_properties(self.device).total_memory
        if nbytes > there:
            raise ConfigError(f"the memory limit is {nbytes} bytes, {self.device} has {there}")
        torch.cuda.set_per_process_memory_fraction(nbytes / there, self.device)

    def clear(self) -> None:
        if (switch := memory.switch()) is not None:
            switch.value = True

    def poisoned(self, error: BaseException) -> bool:
        if self.host or isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return False
        return isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error)


def _device(name: str) -> torch.device:
    unknown = ConfigError(f"no device is called {name!r}: --device may be cpu or cuda:0")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise unknown from None
    if device.type not in ("cpu", "cuda"):
        raise unknown
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"no {name} here, there are {torch.cuda.device_count()} GPUs: see `gt doctor`, or use --device cpu")
    return device


def _norm2(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(torch.hypot(dst, src))


COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sum": lambda dst, src: dst.add_(src),
    "product": lambda dst, src: dst.mul_(src),
    "max": lambda dst, src: torch.maximum(dst, src, out=dst),
    "min": lambda dst, src: torch.minimum(dst, src, out=dst),
    "norm2": _norm2,
}


def _hidden(tensor: torch.Tensor) -> bool:
    """True if a memoryview cannot show the tensor."""
    return not tensor.is_contiguous() or not tensor.is_cpu or tensor.is_conj() or tensor.is_neg()


def _batch_norm(op: Callable) -> Callable:
    """Batch norm whose evaluation saves nothing, as on the CPU. Other devices return statistics of the batch."""

    def call(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        out, *saved = op(*args, **kwargs)
        return (out, *(saved if args[5] else [s[:0] for s in saved]))

    return call


def _embedding_bag(op: Callable) -> Callable:
    """Embedding bag whose saved tensors have the shapes of other devices. On the CPU they depend on its kernel."""

    def call(weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, *rest: Any, **named: Any) -> tuple:
        out, bag_of, sizes, largest = op(weight, indices, offsets, *rest, **named)
        # Some CPU kernels leave these empty. Rebuild them: the bag of index i is the last offset at or before i.
        if bag_of.numel() != indices.numel():
            places = torch.arange(indices.numel(), dtype=offsets.dtype, device=offsets.device)
            bag_of = torch.bucketize(places, offsets, right=True).sub_(1).to(indices.dtype)
        if sizes.numel() < offsets.numel():
            sizes = torch.nn.functional.pad(sizes, (0, offsets.numel() - sizes.numel()))
        mode = rest[1] if len(rest) > 1 else named.get("mode", 0)
        return out, bag_of, sizes, largest if mode == 2 else indices.new_empty(0)

    return call


def _as_real(op: Callable) -> Callable:
    """view_as_real without a conjugate bit: the client has none, so it is resolved first."""
    return lambda x: op(x.resolve_conj())


def _log_sigmoid(op: Callable) -> Callable:
    """log(sigmoid(x)) = min(x, 0) - log(1 + exp(-|x|)), and exp(-|x|) for the backward pass, which GPU kernels leave empty."""

    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.is_cpu:
            return op(x)
        wide = x.float() if x.dtype in norms.HALF else x
        small = wide.abs().neg().exp()
        return (wide.clamp(max=0) - small.log1p()).to(x.dtype), small.to(x.dtype)

    return call


def _histc(op: Callable) -> Callable:
    """Histogram of integers too, as on GPUs: programs that check the device's type take `remote` for a GPU."""

    def call(x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        through = x.is_cpu and not x.is_floating_point()
        return op(x.double(), *rest, **named).to(x.dtype) if through else op(x, *rest, **named)

    return call


# Ops whose results differ from the client's inference (shapes of minor results, conjugate bits) -> their mend
ALIKE: dict[str, Callable[[Callable], Callable]] = {
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), _batch_norm),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), _embedding_bag),
    "histc": _histc,
    "log_sigmoid_forward": _log_sigmoid,
    "view_as_real": _as_real,
}
