"""Where remote tensors meet the host: uploads, fetches, copies both ways, and CPU operands of remote ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gt.client import current_session
from gt.client.current_session import Live
from gt.client.device import meta as metas
from gt.client.device.meta import Meta
from gt.client.device.remote_tensor import Ref, RemoteTensor, Shown, make, rebind
from gt.client.trace.dispatch import call, empty, info_of
from gt.client.trace.shape_inference import TENSORS, OpInfo, is_remote
from gt.ir.template import Out, Template

INLINE = 256 << 10  # bytes that travel with the ops; larger data is kept here until a worker asks
aten = torch.ops.aten
_uploads: dict[Meta, int] = {}
current_session.on_clear.append(_uploads.clear)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Pointwise ops that take a number where a 0-dim CPU tensor is given, and whose result is of the target's dtype anyway
_TAKES_NUMBER = frozenset(f"aten.{op}_.Tensor" for op in ("add", "sub", "mul", "div", "remainder", "floor_divide"))


def upload(host: torch.Tensor) -> RemoteTensor:
    """A remote tensor of a host tensor's values, row-major."""
    recorder = current_session.current()
    if recorder.tape is not None:
        recorder.tape.source(host)
    meta = metas.contiguous(tuple(host.shape), host.dtype)
    template = _uploads.get(meta)
    if template is None:
        number = recorder.define(Template("gt.upload.default", (), (), (), 1, (Out("new", meta.spec),)))
        template = _uploads[meta] = number
    data = _values(host)
    number, origin = recorder.new_id(), Live.origins.here()
    row = [template, origin, -1, number]
    if data.nbytes <= INLINE:
        recorder.emit_with_frame(row, data.tobytes(), 2)
    else:
        recorder.session.keep(number, data.copy(order="C").view(f"V{data.itemsize}"))
        recorder.code.extend(row)
    recorder.ops += 1
    return make(meta, Ref(number, meta, origin, recorder.lives))


def _values(host: torch.Tensor) -> np.ndarray:
    """A host tensor's values as an array of the same shape; of integers where NumPy lacks the dtype."""
    if host.is_conj() or host.is_neg():
        host = host.resolve_conj().resolve_neg()
    try:
        return host.detach().numpy()
    except TypeError:  # bfloat16, float8
        return host.detach().contiguous().view(_INTEGERS[host.element_size()]).numpy()


def fetch(tensor: RemoteTensor) -> torch.Tensor:
    """The values, on the CPU, with the same strides where they are dense. Waits."""
    current_session.check(tensor)
    recorder = current_session.current()
    if recorder.tape is not None:
        constant = recorder.tape.constant(tensor)
        if constant is not None:
            return constant.clone()
    recorder.settle()
    recorder.awaited()
    shape, dtype, data = recorder.session.fetch(tensor._ref.id)
    kind = getattr(torch, dtype)
    if not len(data):
        return torch.empty(shape, dtype=kind)
    found = torch.frombuffer(data, dtype=kind).reshape(shape)
    like = tensor._ref.meta
    if found.stride() == like.stride or tuple(shape) != like.shape:
        return found
    made = torch.empty_like(like.stand_in(), device="cpu")
    return made.copy_(found)


def local_scalar(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    return fetch(args[0]).item()


def to_copy(info: OpInfo, args: tuple, kwargs: dict) -> torch.Tensor:
    """_to_copy: to another dtype remotely, or to another device through a fetch."""
    source, device = args[0], kwargs.get("device")
    kwargs = {k: v for k, v in kwargs.items() if k not in ("pin_memory", "non_blocking")}
    if device is None or is_remote(device):
        return call(info, args, {k: v for k, v in kwargs.items() if k != "device"})
    if device.type == "meta":
        return info.func(source._ref.meta.stand_in(), **kwargs)
    here = fetch(source)
    return torch.ops.aten._to_copy.default(here, **kwargs) if _differs(here, kwargs) else here


def _differs(here: torch.Tensor, wanted: dict) -> bool:
    return (
        wanted["device"].type != "cpu"
        or wanted.get("dtype") not in (None, here.dtype)
        or wanted.get("memory_format") not in (None, torch.preserve_format)
    )


def copy(info: OpInfo, args: tuple, kwargs: dict) -> torch.Tensor:
    """copy_ among remote tensors, and both ways between host and remote."""
    target, source = args[0], args[1]
    if not isinstance(target, RemoteTensor):
        return target.copy_(fetch(source))
    if isinstance(source, RemoteTensor):
        return call(info, (target, source))
    source = source.detach()
    if current_session.current().tape is not None:
        current_session.current().tape.source(source)
    if source.dtype != target.dtype:
        source = source.to(target.dtype)
    given = target._ref
    plain = metas.contiguous(given.meta.shape, given.meta.dtype) is given.meta
    if plain and tuple(source.shape) == given.meta.shape and Live.fresh == (given.id, current_session.current().ops):
        # `cpu.to("remote")` arrives as an empty tensor and a copy into it: name the upload instead
        target._ref = upload(source)._ref
        return target
    return call(info, (target, upload(source)))


def new_empty(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """Factories of uninitialised memory; remembers the newest for `copy`."""
    if not is_remote(kwargs.get("device")):
        return elsewhere(info, args, kwargs)
    kwargs.pop("pin_memory", None)
    made = call(info, args, kwargs)
    Live.fresh = (made._ref.id, current_session.current().ops)
    return made


def placed(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """An op with a device argument: x.new_zeros, zeros_like and so on, perhaps on another device."""
    kwargs.pop("pin_memory", None)
    if is_remote(kwargs.get("device")):
        return call(info, args, kwargs)
    return elsewhere(info, args, kwargs)


def elsewhere(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """A factory that takes only the look of a remote tensor: torch does it on the other device."""
    return info.func(*(a._ref.meta.stand_in() if isinstance(a, RemoteTensor) else a for a in args), **kwargs)


def upload_operands(info: OpInfo, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """CPU operands as torch allows them beside an accelerator: 0-dim ones and indices; any other is an error."""

    def convert(kind: int, a: Any, index: bool) -> Any:
        if isinstance(a, (list, tuple)) and kind == TENSORS:
            return [convert(0, x, index) for x in a]
        if not isinstance(a, torch.Tensor) or isinstance(a, RemoteTensor):
            return a
        if a.device.type != "cpu" or not (a.dim() == 0 or index):
            raise mixed(info, a)
        if a.dim() == 0 and info.name in _TAKES_NUMBER and not a.is_complex():
            if current_session.current().tape is not None:
                current_session.current().tape.source(a)
            return a.item()
        return upload(a)

    made = [convert(kind, a, name == "indices") for kind, name, a in zip(info.kinds, info.names, args, strict=False)]
    named = {k: convert(info.named[k], a, k == "indices") for k, a in kwargs.items()}
    if any(isinstance(a, torch.Tensor) and not isinstance(a, RemoteTensor) for a in [*made, *named.values()]):
        raise mixed(info, made[0])
    return tuple(made), named


def mixed(info: OpInfo, host: torch.Tensor) -> RuntimeError:
    remote, here = Shown.device, host.device
    shape = list(host.shape)
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {remote} and {here}! "
        f"{info.name} got a {here} tensor of shape {shape}; move it with .to({remote.type!r})"
    )


def equal(info: OpInfo, args: tuple, kwargs: dict) -> bool:
    a, b = args
    if not (isinstance(a, RemoteTensor) and isinstance(b, RemoteTensor)):
        raise mixed(info, b if isinstance(a, RemoteTensor) else a)
    if a.shape != b.shape:
        return False
    same = call(info_of(aten.eq.Tensor), (a, b))
    return bool(fetch(call(info_of(aten.all.default), (same,))).item())


def tensor_split(x: torch.Tensor, indices: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    """By a tensor of indices or of a number, which torch asks for on the CPU: they are constants of the op, so this waits."""
    return list(torch.tensor_split(x, indices.detach().cpu().tolist(), dim))


def allclose(info: OpInfo, args: tuple, kwargs: dict) -> bool:
    return bool(torch.isclose(*args, **kwargs).all().item())


def set_(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """x.set_(y): x names y's memory."""
    if len(args) == 2 and isinstance(args[1], RemoteTensor):
        rebind(args[0], args[1])
        return args[0]
    raise RuntimeError(f"{info.name}: a remote tensor has no storage here; assign with .data = or copy_()")


def resize(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """resize_: a view of the same memory where it is large enough, else new memory with the old elements first."""
    target = args[0]
    size = tuple(args[1].shape if isinstance(args[1], torch.Tensor) else args[1])
    wanted = metas.contiguous(size, target.dtype)
    old = target._ref.meta
    if wanted.shape == old.shape:
        return target
    keep = min(wanted.numel, old.numel)
    if wanted.numel <= old.numel:
        view = call(info_of(aten.as_strided.default), (target, list(wanted.shape), list(wanted.stride), old.offset))
        rebind(target, view)
        return target
    made = empty(wanted)
    if keep:
        front = call(info_of(aten.as_strided.default), (made, [keep], [1], 0))
        flat = call(info_of(aten.as_strided.default), (target, [keep], [1], old.offset))
        call(info_of(aten.copy_.default), (front, flat))
    rebind(target, made)
    return target
