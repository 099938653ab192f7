"""The torch engine: ATen overloads by name, called on plain tensors on this worker's device, outside autograd.

A definition becomes one Python function with its constants bound; what is torch about a worker is in engine/torch*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from keyword import iskeyword
from typing import Any

import numpy as np
import torch

from gt.errors import UnsupportedOp
from gt.ir.ops import RANDOM, known
from gt.ir.spec import DTYPES, Spec
from gt.ir.template import Const, T, V, from_wire
from gt.worker.engine import torch_attention, torch_random
from gt.worker.engine.base import IDENTITY, Call, Combine

DTYPE: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
NAME = {dtype: name for name, dtype in DTYPE.items()}
# They change the metadata of their operand, which may go by other ids too: they get a tensor object of their own.
META = {
    f"aten.{name}"
    for name in (
        *("t_.default", "squeeze_.default", "squeeze_.dim", "squeeze_.dims", "unsqueeze_.default", "transpose_.default"),
        *("swapaxes_.default", "swapdims_.default", "as_strided_.default", "resize_.default", "resize_as_.default"),
    )
}


class TorchEngine:
    """Engine of base.Engine; device is "cpu" or "cuda:0"."""

    name = "torch"

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.host = self.device.type == "cpu"

    def guard(self) -> AbstractContextManager:
        return torch.no_grad()

    # ---- ops

    def bind(self, payload: dict[str, Any]) -> Call:
        name, outs = payload["op"], payload["outs"]
        op = self._resolve(name, payload)
        if name in META and any(out[0] != "same" for out in outs):
            op = _on_alias(op)
        args = from_wire(list(payload["args"]))
        kwargs = {key: from_wire(value) for key, value in payload["kwargs"].items()}
        values = payload["values"]
        finish = [(at, _finish(out)) for at, out in enumerate(outs) if out[0] in ("new", "view")]
        return _function(op, args, kwargs, payload["tensors"], values, finish, len(outs), self._constant)

    def _resolve(self, name: str, payload: dict[str, Any]) -> Callable:
        if not known(name):
            raise UnsupportedOp(f"{name} is not an op that gt knows")
        if name in torch_attention.OPS:
            return torch_attention.bind(name, payload["random"])
        if name in RANDOM:
            return torch_random.bind(name, payload["random"])
        if name == "gt.move.default":
            return torch.ops.aten.clone.default
        space, base, overload = name.split(".")
        packet = getattr(getattr(torch.ops, space), base, None)
        op = getattr(packet, overload, None)
        if op is None:
            raise UnsupportedOp(f"torch {torch.__version__} has no {name}")
        return getattr(op, "_op", op)

    def _constant(self, const: Const) -> Any:
        if const.kind == "device":
            return self.device
        if const.kind == "complex":
            return complex(*const.value)
        return getattr(torch, str(const.value).removeprefix("torch."))

    # ---- memory

    def empty(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=DTYPE[dtype], device=self.device)

    def zeros(self, spec: Spec) -> torch.Tensor:
        return torch.empty_strided(spec.shape, spec.stride, dtype=DTYPE[spec.dtype], device=self.device).zero_()

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
        return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous() if _hidden(tensor) else tensor

    def staging(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=DTYPE[dtype])

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.host else tensor.to(self.device)

    def view(self, tensor: torch.Tensor) -> memoryview:
        return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(bytearray())

    def upload(self, buffer: Any, spec: Spec) -> torch.Tensor:
        if len(buffer) != spec.nbytes:
            raise ValueError(f"{len(buffer)} bytes were sent for {spec.text()}, want {spec.nbytes}")
        if not spec.numel:
            return self.zeros(spec)
        data = torch.from_numpy(np.asarray(buffer, np.uint8)).view(DTYPE[spec.dtype]).view(spec.shape)
        data = data if self.host else data.to(self.device)
        return conform(data, spec)

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

    def switch(self, switches: dict[str, Any]) -> None:
        if switches.get("threads"):
            torch.set_num_threads(int(switches["threads"]))
        if switches.get("matmul_precision"):
            torch.set_float32_matmul_precision(switches["matmul_precision"])
        if "deterministic" in switches:
            torch.use_deterministic_algorithms(bool(switches["deterministic"]), warn_only=False)

    def poisoned(self, error: BaseException) -> bool:
        if self.host or isinstance(error, torch.OutOfMemoryError):
            return False
        return isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error)


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
    """Whether a memoryview cannot show the tensor as it lies."""
    return not tensor.is_contiguous() or not tensor.is_cpu or tensor.is_conj() or tensor.is_neg()


def _on_alias(op: Callable) -> Callable:
    return lambda tensor, *args, **kwargs: op(tensor.detach(), *args, **kwargs)


# ---- outputs


def conform(out: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The output with the strides that the client inferred, on which later views rely; ValueError for another shape."""
    if tuple(out.shape) != spec.shape or out.dtype != DTYPE[spec.dtype]:
        raise ValueError(f"the result is {NAME[out.dtype]}{list(out.shape)}, want {spec.text()}")
    if all(n < 2 or a == b for n, a, b in zip(spec.shape, out.stride(), spec.stride, strict=True)) or not spec.numel:
        return out
    if any(n > 1 and step == 0 for n, step in zip(spec.shape, spec.stride, strict=True)):
        return out  # no memory of its own to lay out
    return torch.empty_strided(spec.shape, spec.stride, dtype=out.dtype, device=out.device).copy_(out)


def _finish(out: Sequence[Any]) -> Spec | None:
    """The spec that a new output has to have; None for views and outputs whose shape depends on values."""
    return Spec.from_wire(out[1]) if out[0] == "new" and out[1] is not None else None


def _flatten(result: Any) -> Iterator[Any]:
    if isinstance(result, (list, tuple)):
        for part in result:
            yield from _flatten(part)
    else:
        yield result


def _checked(scope: dict[str, Any], stride: str, spec: Spec) -> Callable[[torch.Tensor], torch.Tensor]:
    """conform; remembers under the name `stride` which strides need no second look."""
    scope[stride] = None

    def check(out: torch.Tensor) -> torch.Tensor:
        result = conform(out, spec)
        if result is out:
            scope[stride] = out.stride()
        return result

    return check


# ---- calls


def _function(
    op: Callable,
    args: list,
    kwargs: dict[str, Any],
    tensors: int,
    values: int,
    finish: list[tuple[int, Spec | None]],
    outs: int,
    constant: Callable[[Const], Any],
) -> Call:
    """(*tensors, *values) -> None, one output, or a tuple of those in `finish`. Made as source: a call is one frame."""
    bound: dict[str, Any] = {"op": op, "flatten": _flatten}
    holes = [f"t{i}" for i in range(tensors)] + [f"v{i}" for i in range(values)]

    def text(arg: Any) -> str:
        if isinstance(arg, (T, V)):
            hole = f"{'t' if isinstance(arg, T) else 'v'}{arg.index}"
            if hole not in holes:
                raise ValueError(f"argument {arg} is beyond {tensors} tensors and {values} values")
            return hole
        if isinstance(arg, list) and _has_hole(arg):
            return f"[{', '.join(map(text, arg))}]"
        name = f"c{len(bound)}"
        bound[name] = _constants(arg, constant)
        return name

    parts = [text(arg) for arg in args]
    for key, value in kwargs.items():
        if not key.isidentifier() or iskeyword(key):
            raise ValueError(f"{key!r} is no argument name")
        parts.append(f"{key}={text(value)}")
    random = getattr(op, "draws", False)  # GT's own: seed and counter come last
    parts += [f"seed=v{values - 2}", f"counter=v{values - 1}"] if random else []
    if not finish and parts == holes:
        return op
    lines = [f"r = op({', '.join(parts)})"]
    if finish and (len(finish) > 1 or outs > 1):
        lines.append("r = list(flatten(r))")
        lines += [f"r{n} = r[{at}]" for n, (at, _) in enumerate(finish)]
    elif finish:
        lines.append("r0 = r if type(r) is not list else r[0]")
    for n, (_, spec) in enumerate(finish):
        if spec is not None:
            bound[f"f{n}"] = _checked(bound, f"s{n}", spec)
            lines.append(f"if r{n}.stride() != s{n}: r{n} = f{n}(r{n})")
    lines.append("return " + (", ".join(f"r{n}" for n in range(len(finish))) or "None"))
    # Only names made here and identifiers checked above are in the source.
    exec(f"def call({', '.join(holes)}):\n    " + "\n    ".join(lines), bound)
    return bound["call"]


def _has_hole(arg: Any) -> bool:
    return isinstance(arg, (T, V)) or (isinstance(arg, list) and any(map(_has_hole, arg)))


def _constants(arg: Any, constant: Callable[[Const], Any]) -> Any:
    if isinstance(arg, Const):
        return constant(arg)
    return [_constants(a, constant) for a in arg] if isinstance(arg, list) else arg
