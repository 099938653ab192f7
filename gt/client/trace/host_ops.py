"""Ops between remote tensors and the host: fetches, copies both ways, and ops whose answer Python needs at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from gt.client import current_session
from gt.client.current_session import Current
from gt.client.device import meta as metas
from gt.client.device.remote_tensor import RemoteTensor, rebind
from gt.client.trace.dispatch import call, empty
from gt.client.trace.op_info import OpInfo, info_of
from gt.client.trace.shape_inference import is_remote
from gt.client.trace.uploads import mixed_devices, upload
from gt.errors import OpFailed
from gt.ir.instr import STATE

aten = torch.ops.aten
_FILLS = frozenset({"aten.zeros_like.default", "aten.ones_like.default", "aten.full_like.default"})
# torch wraps the step of every optimizer in a function with this code
_STEP = next(c for c in torch.optim.Optimizer.profile_hook_step.__code__.co_consts if isinstance(c, CodeType))


def fetch(tensor: RemoteTensor) -> torch.Tensor:
    """A tensor's values on the CPU, with the same strides if those are dense. Waits for the workers, if they decide them."""
    current_session.check(tensor)
    recorder = current_session.current()
    tape = recorder.own_tape()
    # A recording decides by itself which values are constants: one that is known by chance may be another at the next call
    origin = Current.origins.here()
    known = recorder.known_value(tensor, origin) if tape is None or not tape.records else None
    if known is None and tape is not None:
        constant = tape.constant(tensor)
        # A recorded call that reads a value which its arguments do not decide becomes no program, and goes on as an eager one
        known = constant.clone() if constant is not None else recorder.known_value(tensor, origin) if tape.records else None
    if known is not None:
        return known

    # Wait for the workers' answer
    recorder.flush_ops(asks=True)
    recorder.note_wait()
    recorder.ask_value(tensor)
    meta = tensor._ref.meta
    shape, dtype, data = recorder.session.fetch(tensor._ref.id, meta.numel * meta.dtype.itemsize)
    kind = getattr(torch, dtype)
    if not len(data):
        return torch.empty(shape, dtype=kind)
    values = torch.frombuffer(data, dtype=kind).reshape(shape)
    recorder.note_read(tensor, values)
    like = tensor._ref.meta
    # Fetched bytes are in row-major order; a transposed or channels-last tensor has its strides here, too
    if values.stride() == like.stride or tuple(shape) != like.shape:
        return values
    return torch.empty_like(like.stand_in(), device="cpu").copy_(values)


RemoteTensor.fetched = staticmethod(fetch)


def local_scalar(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    return fetch(args[0]).item()


def assert_async(info: OpInfo, args: tuple, kwargs: dict) -> None:
    """torch._assert_async raises on its line, as on the CPU: it waits for the value."""
    info.func(fetch(args[0]), *args[1:])


def to_copy(info: OpInfo, args: tuple, kwargs: dict) -> torch.Tensor:
    """_to_copy: remote for another dtype, by a fetch for another device."""
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
    """copy_ between remote tensors, and both ways between host and remote."""
    target, source = args[0], args[1]
    if not isinstance(target, RemoteTensor):
        return target.copy_(fetch(source))
    if isinstance(source, RemoteTensor):
        return call(info, (target, source))
    if not target.numel() and source.shape == target.shape:
        return target
    source = source.detach()
    tape = current_session.current().own_tape()
    if tape is not None:
        tape.source(source)
    if source.dtype != target.dtype:
        source = source.to(target.dtype)
    meta = target._ref.meta
    if metas.contiguous(meta.shape, meta.dtype) is meta and tuple(source.shape) == meta.shape and is_new(target):
        # `cpu.to("remote")` is dispatched as an empty tensor and a copy into it: name the upload instead
        target._ref = upload(source)._ref
        return target
    return call(info, (target, upload(source)))


def new_empty(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """Factories of uninitialised memory. `copy` needs to know the newest one."""
    if not is_remote(kwargs.get("device")):
        return from_shapes(info, args, kwargs)
    kwargs.pop("pin_memory", None)
    tensor = call(info, args, kwargs)
    Current.fresh = (tensor._ref.id, current_session.current().ops)
    return tensor


def is_new(tensor: RemoteTensor) -> bool:
    """True for uninitialised memory that the op before this one made: nothing else names it."""
    # The number of ops tells that no other op was recorded since, which could have used it
    return Current.fresh == (tensor._ref.id, current_session.current().ops)


def placed(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """An op with a device argument (x.new_zeros, zeros_like): remote, or on the other device that the argument names."""
    kwargs.pop("pin_memory", None)
    if not is_remote(kwargs.get("device")):
        return from_shapes(info, args, kwargs)
    tensor = call(info, args, kwargs)
    if Current.offloads and info.name in _FILLS and _is_state(args):
        Current.recorder.code.extend((STATE, tensor._ref.id))  # type: ignore[union-attr]
    return tensor


def _is_state(args: tuple) -> bool:
    """True if an optimizer fills a tensor like a parameter: offloaded state leaves the device as it is made.

    Else the first step would need room for all of it there. A closure of the step computes with gradients: it makes no state.
    """
    if not (isinstance(args[0], RemoteTensor) and args[0].is_leaf and args[0].requires_grad):
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP:
            return not torch.is_grad_enabled()
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return True  # as Adagrad does
        frame = frame.f_back
    return False


def from_shapes(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """An op that needs only shapes and dtypes of remote tensors: a factory on another device, is_same_size. Nothing is sent."""
    return info.func(*(a._ref.meta.stand_in() if isinstance(a, RemoteTensor) else a for a in args), **kwargs)


def ends(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """linspace and logspace between tensors, which are read, as torch reads them."""
    read = (fetch(a).item() if isinstance(a, RemoteTensor) else a.item() if isinstance(a, torch.Tensor) else a for a in args)
    return getattr(torch, info.name.split(".")[1])(*read, **kwargs)


def fill(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """fill_ by a tensor. One of the host takes a remote value, as the CPU takes that of a GPU."""
    target, value = args
    if isinstance(target, RemoteTensor) or value.dim():
        return call(info, args, kwargs)
    return target.fill_(fetch(value).item())


def equal(info: OpInfo, args: tuple, kwargs: dict) -> bool:
    left, right = args
    if not (isinstance(left, RemoteTensor) and isinstance(right, RemoteTensor)):
        raise mixed_devices(info, right if isinstance(left, RemoteTensor) else left)
    if left.shape != right.shape:
        return False
    same = call(info_of(aten.eq.Tensor), (left, right))
    return bool(fetch(call(info_of(aten.all.default), (same,))).item())


def check_factorization(info: OpInfo, args: tuple, kwargs: dict) -> None:
    """_linalg_check_errors: torch.linalg.LinAlgError at the line of a factorization that failed. Waits, as on CUDA.

    A program that retries with jitter catches it. A call that is recorded for replays does not wait: its worker raises.
    """
    if _recorded():
        call(info, args, kwargs)
    else:
        info.func(fetch(args[0]), *args[1:], **kwargs)


def checked(name: str) -> Callable:
    """A factorization that returns its status last, and checks it by itself with check_errors=True. name: in torch's errors."""

    def handler(info: OpInfo, args: tuple, kwargs: dict) -> Any:
        if not kwargs.get("check_errors") or _recorded():
            return call(info, args, kwargs)
        results = call(info, args, kwargs | {"check_errors": False})
        aten._linalg_check_errors.default(fetch(results[-1]), name, is_matrix=args[0].dim() == 2)
        return results

    return handler


def converging(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """A decomposition without a status, as svd and eigh: torch.linalg.LinAlgError at its line where a worker's op fails.

    The error that it had on the worker is the cause.
    """
    results = call(info, args, kwargs)
    first = results if isinstance(results, RemoteTensor) else min(results, key=torch.Tensor.dim)
    if first.numel() and not _recorded():
        try:
            fetch(first[(0,) * first.dim()])
        except OpFailed as error:
            if error.op != info.name:  # its input has failed
                raise
            what = str(error).partition(f" failed on worker {error.worker}: ")[2].partition("\n")[0]
            raise torch.linalg.LinAlgError(what or str(error)) from error
    return results


def _recorded() -> bool:
    """True within a call that is recorded for replays, which do not come back to Python."""
    tape = current_session.current().own_tape()
    return tape is not None and tape.records


def tensor_split(x: torch.Tensor, indices: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    """tensor_split by a tensor of indices. Its values are constants of the op, so this waits."""
    return list(torch.tensor_split(x, indices.detach().cpu().tolist(), dim))


def allclose(info: OpInfo, args: tuple, kwargs: dict) -> bool:
    return bool(torch.isclose(*args, **kwargs).all().item())


def set_(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """x.set_(y): x names the memory of y."""
    if len(args) == 2 and isinstance(args[1], RemoteTensor):
        rebind(args[0], args[1])
        return args[0]
    raise RuntimeError(f"{info.name}: a remote tensor has no storage here; assign with .data = or copy_()")


def _elements_behind(tensor: RemoteTensor) -> int:
    """The number of elements of the memory that a tensor is a view of, as far as this object knows."""
    while isinstance(tensor._base, RemoteTensor):
        tensor = tensor._base
    meta = tensor._ref.meta
    return meta.offset + meta.numel


def resize(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """resize_: a view of the same memory if that is large enough, else new memory that begins with the old elements."""
    target = args[0]
    size = tuple(args[1].shape if isinstance(args[1], torch.Tensor) else args[1])
    wanted = metas.contiguous(size, target.dtype)
    old = target._ref.meta
    if wanted.shape == old.shape:
        return target
    # Torch keeps the memory where it is large enough. Else memory is new, and begins with the old elements
    keep = min(wanted.numel, old.numel)
    if old.offset + wanted.numel <= _elements_behind(target):
        view = call(info_of(aten.as_strided.default), (target, list(wanted.shape), list(wanted.stride), old.offset))
        rebind(target, view)
        return target
    larger = empty(wanted)
    if keep:
        front = call(info_of(aten.as_strided.default), (larger, [keep], [1], 0))
        flat = call(info_of(aten.as_strided.default), (target, [keep], [1], old.offset))
        call(info_of(aten.copy_.default), (front, flat))
    rebind(target, larger)
    return target


# ---- lengths of sequences are on the CPU on every device: they decide shapes, and become constants of the ops


def pack(info: OpInfo, args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """_pack_padded_sequence: the steps of all sequences, time by time; the batch size of each time stays on the CPU.

    Lengths on remote are read. RuntimeError in torch's words for lengths that are not sorted or not those of the batch.
    """
    padded, lengths, batch_first = args
    if isinstance(lengths, RemoteTensor):  # as a captured function gets those of the CPU
        lengths = lengths.cpu()
    steps = padded.transpose(0, 1) if batch_first else padded
    # The CPU's kernel computes batch sizes, and checks lengths, from a stand-in with one feature of 1 byte
    like = torch.empty((*steps.shape[:2], 0 if not padded.numel() else 1), dtype=torch.int8)
    sizes = aten._pack_padded_sequence.default(like, lengths, False)[1]
    # Example: lengths (3, 2, 2) are batch sizes (3, 3, 1): of times 0 and 1 all three sequences, of time 2 the
    # first alone. Times with one batch size are cut out together, so there are as many parts as different lengths
    parts, start, counts = [], 0, sizes.tolist()
    for time in range(1, len(counts) + 1):
        if time == len(counts) or counts[time] != counts[start]:
            parts.append(steps[start:time, : counts[start]].flatten(0, 1))
            start = time
    return torch.cat(parts), sizes


def ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor, target_lengths: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """ctc_loss with lengths in tensors. Those of the CPU become lists, as on CUDA; its mean divides by the lengths."""
    overload, lengths = aten.ctc_loss.Tensor, (input_lengths, target_lengths)
    if all(isinstance(length, RemoteTensor) for length in lengths):
        return overload.decompose(log_probs, targets, *lengths, *rest)
    return aten.ctc_loss.IntList(log_probs, targets, *(length.reshape(-1).tolist() for length in lengths), *rest)


def one_hot(index: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """one_hot, which torch computes here by its rule for meta tensors: that compares with each class, and checks nothing.

    The arguments are checked as on the CPU, and values where they are read anyway: for the number of classes. CPU workers check
    the others by looking them up. A GPU that looks for what is not there ends its process.
    """
    if index.dtype is not torch.int64:
        raise RuntimeError(f"one_hot is only applicable to index tensor of type LongTensor, got {index.dtype}; try .long()")
    if not index.numel():
        if num_classes <= 0:
            raise RuntimeError("Can not infer total number of classes from empty tensor.")
    elif num_classes == -1:
        if index.min().item() < 0:
            raise RuntimeError("Class values must be non-negative.")
        num_classes = int(index.max().item()) + 1
        return _compare(index, num_classes)
    elif num_classes < 1:
        raise RuntimeError("Class values must be smaller than num_classes.")
    elif not current_session.current().gpus:
        index = torch.embedding(torch.arange(num_classes, device=index.device).unsqueeze(1), index).squeeze(-1)
    return _compare(index, num_classes)


def _compare(index: torch.Tensor, classes: int) -> torch.Tensor:
    return torch.eq(index.unsqueeze(-1), torch.arange(classes, device=index.device)).to(torch.int64)
