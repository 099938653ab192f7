"""Ops between remote tensors and the host: fetches, copies both ways, and ops whose answer Python needs at once."""

from __future__ import annotations

from typing import Any

import torch

from gt.client import current_session
from gt.client.current_session import Live
from gt.client.device import meta as metas
from gt.client.device.remote_tensor import RemoteTensor, rebind
from gt.client.trace.dispatch import call, empty
from gt.client.trace.op_info import OpInfo, info_of
from gt.client.trace.shape_inference import is_remote
from gt.client.trace.uploads import mixed, upload

aten = torch.ops.aten


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
