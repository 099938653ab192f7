"""RemoteTensor: an id and metadata behind the interface of a torch tensor; the data is on workers.

Its C++ device is `lazy`, for which autograd stays in the caller's thread and calls no Python guard. Python sees `remote`.
Python methods of torch that need a tensor's bytes are defined here, by fetching.
"""

from __future__ import annotations

import copy
import functools
import gc
import operator
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from gt.client.device.meta import Meta
from gt.errors import UnsupportedOp
from gt.ir.spec import row_major_stride

LAZY = torch.device("lazy", 0)
# NumPy's functions behind the operators of its numbers -> operators
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv,
    "floor_divide": operator.floordiv, "remainder": operator.mod, "power": operator.pow, "matmul": operator.matmul,
    "less": operator.lt, "less_equal": operator.le, "greater": operator.gt, "greater_equal": operator.ge,
    "equal": operator.eq, "not_equal": operator.ne,
}  # fmt: skip
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # so that autocast("remote") applies
_base = torch._C.TensorBase
_plain: weakref.WeakSet[type] = weakref.WeakSet()  # classes of users that were warned of
new_tensor = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]


def new_view(base: torch.Tensor, *args: Any) -> Any:
    """As new_tensor, for a view of `base`: in either mode an inference tensor if that is one.

    torch makes a view share its base's version counter, which an inference tensor lacks.
    """
    inference = base.is_inference()
    if inference is not torch.is_inference_mode_enabled():
        with torch.inference_mode(inference):
            return new_tensor(*args)
    return new_tensor(*args)


ONE_DEVICE = "there is no {}: all workers are one device, and signal groups say which of them does what"
NO_DEVICE = (
    "a remote tensor cannot be copied to {0}, which this process does not have ({2}). It is on its workers already, and on "
    "their GPUs if they have some: leave .cuda() or .to('{0}') out, or name {1!r} there; .cpu() copies its value here"
)


class Shown:
    """The device that Python sees: `remote` once the name is registered, `lazy` before."""

    device = LAZY
    types = frozenset({"lazy"})


class _Saved(threading.local):
    """The values of remote tensors that this thread's torch.save has fetched, by storage; None outside of one.

    memories: by the id of the memory, those that begin with it and have no gaps: tensors of that memory share their storage.
    """

    hosts: dict[int, torch.Tensor] | None = None
    memories: dict[int, torch.Tensor] | None = None


saved = _Saved()


class Ref:
    """The id of one tensor view on workers. The end of this object notes the id, and the recorder writes its FREE.

    pending: origin of the op that made the tensor, until it is written into the autograd node; then 0. home: origin of a
    parameter's first use, for the op that accumulates its gradient. memory: see memory_id.
    """

    __slots__ = ("__weakref__", "home", "id", "memory", "meta", "pending")

    def __init__(self, number: int, meta: Meta, pending: int, live_tensors: LiveTensors, memory: int = 0) -> None:
        self.id, self.memory = number, memory or number
        self.meta = meta
        self.pending = pending
        self.home = 0
        # Not a weakref.finalize: its callback would run Python code for each tensor that ends
        live = LiveRef(self, live_tensors.end)
        live.id = number
        live_tensors.all[number] = live  # last: Ctrl-C before it ends the weak reference, and no callback names an id


class LiveRef(weakref.ref):
    """Weak reference to a Ref. Its callback is a list's append, which runs no bytecode: a __del__ would swallow Ctrl-C."""

    __slots__ = ("id",)
    id: int


class Temporary:
    """The id of a tensor that no Python object had."""

    __slots__ = ("id",)

    def __init__(self, number: int) -> None:
        self.id = number


# Once results of so many bytes have been recorded, ids that have ended are freed at once, and not with their batch. A share of
# what is alive bounds what workers hold in vain, in small models too; a value that is freed alone costs the dispatcher 7 us
MIN_MADE_BYTES, MAX_MADE_BYTES, MADE_SHARE = 128 << 10, 128 << 20, 64
RECOUNT_SHARES = 16  # such shares that are made before what is alive is counted again
# A count takes 0.3 us for each tensor that is alive. So it waits until ids have been taken a quarter as many times: large
# results would have it after every few ops
RECOUNT_TAKES = 4


class _CollectorPass(set):
    """Not empty while Python's collector makes a pass, of which there is one at a time: it has keys of what a pass tells.

    A pass assigns to `start` and `stop`, in C alone. A callback in Python would swallow the exception of a signal in it.
    """

    __slots__ = ()
    start = property(None, set.update)
    stop = property(None, set.difference_update)


_collecting = _CollectorPass()
_note_pass = functools.partial(setattr, _collecting)  # (phase, about), as the collector calls it


class LiveTensors:
    """The ids of one session that are alive, and those that have ended.

    made: bytes of results that were recorded since ended ids were taken. most: so many, before these are taken at once.
    """

    def __init__(self) -> None:
        self.made, self.most = 0, MIN_MADE_BYTES
        self._uncounted, self._takes = 0, 0  # bytes that were made, and times that ids were taken, since `most` was set
        self.all: dict[int, LiveRef] = {}
        self.ended: list[LiveRef | Temporary] = []
        self.end = self.ended.append
        if _note_pass not in gc.callbacks:
            gc.callbacks.append(_note_pass)

    def take_ended(self) -> list[LiveRef | Temporary]:
        """References that have ended since the last call, for `forget`. Takes no time, so that no op is recorded meanwhile."""
        # The collector ends weak references before it runs finalizers of the program, which may use these tensors
        if _collecting:
            return []
        # Other threads append meanwhile, in callbacks: exactly the copied references are removed
        ended = self.ended[:]
        del self.ended[: len(ended)]
        return ended

    def forget(self, ended: list[LiveRef | Temporary]) -> list[int]:
        """The ids of references that have ended. They are no longer counted as alive."""
        self._uncounted += self.made
        self._takes += 1
        self.made = 0
        try:
            ids = [live.id for live in ended]
        except AttributeError:  # Ctrl-C came before one had its id
            ids = [live.id for live in ended if hasattr(live, "id")]
        forget = self.all.pop
        for number in ids:
            forget(number, None)  # a Temporary's is not there
        if self._uncounted > RECOUNT_SHARES * self.most and RECOUNT_TAKES * self._takes > len(self.all):
            self._set_most()
        return ids

    def _set_most(self) -> None:
        """Count what is alive: to keep a sum would cost each op, and a few times in a step is often enough."""
        refs = [live() for live in [*self.all.values()]]
        nbytes = sum(ref.meta.nbytes for ref in refs if ref is not None)  # views have bytes, too
        self._uncounted, self._takes, self.most = 0, 0, min(max(MIN_MADE_BYTES, nbytes // MADE_SHARE), MAX_MADE_BYTES)


class Alias:
    """The reference of a second tensor object for one view, as detach makes it. Nothing is sent for it.

    memory: see memory_id; the object of an alias has no base that would tell.
    """

    __slots__ = ("home", "id", "memory", "meta", "pending", "target")

    def __init__(self, tensor: RemoteTensor) -> None:
        target = tensor._ref
        self.target: Ref = target.target if isinstance(target, Alias) else target
        self.memory = memory_id(tensor)
        self.id, self.meta, self.pending, self.home = self.target.id, self.target.meta, -1, 0


def memory_id(tensor: torch.Tensor) -> int:
    """The id of the tensor whose memory this one is a view of, or has itself."""
    while isinstance(base := tensor._base, RemoteTensor):
        tensor = base
    ref = tensor._ref  # type: ignore[attr-defined]
    return ref.memory if isinstance(ref, Alias) else ref.id


def view_of(base: Ref | Alias, view: Ref) -> Ref:
    """The reference of a view, with its memory."""
    view.memory = base.memory
    return view


def _lacks(device: torch.device) -> bool:
    """True if this process has no device of a type."""
    try:
        return not torch.get_device_module(device).is_available()
    except (RuntimeError, AttributeError):
        return device.type not in ("cpu", "meta")


moves: dict[int, Callable[[RemoteTensor], RemoteTensor]] = {}  # memory -> what `.to("remote")` returns of a tensor in it


class RemoteTensor(torch.Tensor):
    """A tensor on the `remote` device."""

    _ref: Ref | Alias
    prints_edges: ClassVar[Callable[[], bool]] = staticmethod(lambda: False)  # True while ops may be recorded for a text
    fetched: ClassVar[Callable[[RemoteTensor], torch.Tensor]]  # its value, on the CPU
    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return Shown.device

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        value = _base.data.__get__(self)
        if value.is_inference() and not torch.is_inference_mode_enabled():
            return make(self._ref.meta, Alias(self))  # which may be written, as torch has it; a detach() may not
        return value

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, RemoteTensor):
            raise RuntimeError(
                f"cannot set the data of a remote tensor to one on {value.device}: use .to({Shown.device.type!r}) first"
            )
        rebind(self, value)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        duplicate = kwargs.pop("copy", False)
        place = 3 if args and isinstance(args[0], (str, int, torch.device)) else 2  # place of `copy` as a positional argument
        if len(args) > place:
            duplicate, args = args[place], (*args[:place], *args[place + 1 :])
        if args and isinstance(args[0], RemoteTensor):  # `x.to(other)` means other's device and dtype
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.index and device.type in Shown.types:
            raise RuntimeError(ONE_DEVICE.format(device))
        if device is not None and device.type not in Shown.types:
            try:
                return _base.to(self, device, dtype or self.dtype, non_blocking, True, memory_format=memory_format)
            except (AssertionError, RuntimeError) as error:  # torch's for a device that it was not built for, or lacks
                if not _lacks(device):
                    raise
                raise RuntimeError(NO_DEVICE.format(device.type, Shown.device.type, str(error).partition("\n")[0])) from None
        if dtype in (None, self.dtype) and memory_format is None:
            move = moves.get(memory_id(self)) if moves and device is not None else None
            return self.clone() if duplicate else self if move is None else move(self)
        return _base.to(
            self, dtype or self.dtype, non_blocking, duplicate, memory_format=memory_format or torch.preserve_format
        )

    def cuda(self, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format) -> torch.Tensor:
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return self.to(where, non_blocking=non_blocking, memory_format=memory_format)

    def as_subclass(self, cls: type) -> torch.Tensor:  # type: ignore[override]
        """Itself: a tensor of the user's class is a plain one on workers, as after `x.to("remote")`. Warns once a class."""
        if not (isinstance(cls, type) and issubclass(cls, torch.Tensor)) or isinstance(self, cls):
            return _base.as_subclass(self, cls)
        if cls not in _plain:
            _plain.add(cls)
            device, name = Shown.device.type, cls.__name__
            text = f"a {device} tensor is a plain one and no {name}: call its methods before .to({device!r}), or after .cpu()"
            through_torch = sys._getframe(1).f_globals.get("__name__") == "torch._tensor"  # of a result, by the class's methods
            warnings.warn(text, stacklevel=4 if through_torch else 2)
        return self

    def numpy(self, *, force: bool = False) -> Any:
        return (self.detach() if force else self).cpu().numpy()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def __float__(self) -> float:
        return float(_value(self) if _below() else _base.__float__(self))

    def __int__(self) -> int:
        return int(_value(self) if _below() else _base.__int__(self))

    def __index__(self) -> int:
        return operator.index(_value(self) if _below() else _base.__index__(self))

    def __bool__(self) -> bool:
        return bool(_value(self) if _below() else _base.__bool__(self))

    def __complex__(self) -> complex:
        return complex(_value(self) if _below() else _base.__complex__(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.cpu().numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise BufferError(f"a {Shown.device.type} tensor's memory is on workers, and DLPack shares memory: use tensor.cpu()")

    def __dlpack_device__(self) -> Any:
        return self.__dlpack__()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """NumPy's functions. Operators with NumPy's numbers stay remote; with arrays they raise, as on a GPU."""
        if method == "__call__" and len(inputs) == 2:
            arrays = [x for x in inputs if isinstance(x, np.ndarray) and x.ndim]
            if arrays:
                raise TypeError(
                    f"unsupported operands of np.{ufunc.__name__}: a remote tensor of shape {list(self.shape)} and a "
                    f"numpy.ndarray of shape {list(arrays[0].shape)}; try torch.from_numpy(array).to({Shown.device.type!r}), "
                    "or tensor.cpu()"
                )
            # `np.float64(2) * x` calls np.multiply(2.0, x): NumPy asks here, since its number is on the left
            if ufunc.__name__ in _OPERATORS and not kwargs:
                first, second = (x.item() if isinstance(x, (np.generic, np.ndarray)) else x for x in inputs)
                return _OPERATORS[ufunc.__name__](first, second)
        return getattr(ufunc, method)(*[x.cpu() if isinstance(x, RemoteTensor) else x for x in inputs], **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        text = _text(self.detach())[:-1]  # without the last parenthesis
        extra = f", device='{self.device}'"
        try:
            node = "" if self.grad_fn is None else type(self.grad_fn).__name__
        except RuntimeError:  # as in is_leaf
            node = "Invalid"
        if node:
            extra += f", grad_fn=<{node}>"
        elif self.requires_grad:
            extra += ", requires_grad=True"
        shown = f"{text}{extra})"
        return f"Parameter containing:\n{shown}" if getattr(self, "_is_param", False) else shown

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(str(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        host = _host(self).requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            host = torch.nn.Parameter(host, requires_grad=self.requires_grad)
        return host.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> RemoteTensor:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment"
            )
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            copied = self.detach().clone()
        copied.requires_grad_(self.requires_grad)
        if self.grad is not None and not getattr(self, "_is_param", False):  # as torch's Parameter
            copied.grad = copy.deepcopy(self.grad, memo)
        copied.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k != "_ref"})
        memo[id(self)] = copied
        return copied

    def __copy__(self) -> RemoteTensor:
        copied = self.detach().requires_grad_(self.requires_grad)
        copied.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_ref"})
        return copied

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        result = _base.type(self, dtype, non_blocking, **kwargs)
        return result.replace("lazy", Shown.device.type) if isinstance(result, str) else result

    def _typed_storage(self) -> Any:  # called by storage(), is_shared() and share_memory_()
        raise UnsupportedOp(
            "a remote tensor has no storage in this process: use a copy, x.cpu(); a data set whose DataLoader has worker "
            "processes has to hold CPU tensors"
        )

    def untyped_storage(self) -> RemoteStorage:  # type: ignore[override]
        return RemoteStorage(self)

    def data_ptr(self) -> int:
        return RemoteStorage(self).data_ptr() + self.storage_offset() * self.itemsize if self.numel() else 0

    def pin_memory(self, device: Any = None) -> torch.Tensor:
        raise RuntimeError(f"cannot pin {self.type()!r}: only dense CPU tensors can be pinned; leave pin_memory() out")


def _host(tensor: RemoteTensor) -> torch.Tensor:
    """Values on the CPU for pickle. In a torch.save, tensors of one memory, such as tied weights, have one storage."""
    if saved.hosts is None or saved.memories is None:
        return tensor.detach().cpu()
    number, meta = memory_id(tensor), tensor._ref.meta
    whole = saved.memories.get(number)
    if whole is not None and whole.dtype is tensor.dtype and _end(meta) <= whole.numel():
        # A view of memory that was fetched for this file already
        return whole.new_empty(0).set_(whole.untyped_storage(), meta.offset, meta.shape, meta.stride)
    host = tensor.detach().cpu()
    saved.hosts[host.untyped_storage()._cdata] = host
    # All of the memory: later tensors of it in this file are views of this storage
    if not meta.offset and host.stride() == meta.stride and _end(meta) == host.numel():
        saved.memories[number] = host
    return host


def _end(meta: Meta) -> int:
    """The number of elements from the beginning of a tensor's memory to its own end."""
    last = sum((size - 1) * step for size, step in zip(meta.shape, meta.stride, strict=True))
    return meta.offset + last + 1 if meta.numel else 0


def is_leaf(tensor: torch.Tensor) -> bool:
    """The tensor's is_leaf; False for a view made under no_grad whose base has changed since, for which torch raises."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def tensor_identity(tensor: RemoteTensor) -> tuple:
    """The part of a tensor that decides which ops follow: its memory, requires_grad, and the number of its hooks."""
    hooks = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
    return (tensor._ref.id, tensor.requires_grad, len(hooks[0] or ()), len(hooks[1] or ()))


def _below() -> bool:
    """True where torch keeps Python's kernels out, as `torch.tensor([x, y])` does while it reads the values of a list."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)


def without_autocast() -> Any:
    """A context in which ops on remote tensors are called with the dtypes that they are given."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


def _value(tensor: RemoteTensor) -> Any:
    if tensor.numel() != 1:
        raise ValueError("only one element tensors can be converted to Python scalars")
    return RemoteTensor.fetched(tensor).item()


def _text(tensor: RemoteTensor) -> str:
    """torch's text of the values. Of a large tensor torch shows the edges, and only these are fetched."""
    options = torch._tensor_str.PRINT_OPTS
    if tensor.numel() <= options.threshold or not RemoteTensor.prints_edges():
        return repr(tensor.cpu())
    edge = options.edgeitems
    with torch.no_grad():
        # Cut the middle out of each long dim, on the workers
        for dim, size in enumerate(tensor.shape):
            if size > 2 * edge + 1:  # one more than is shown, so that torch leaves something out here too
                parts = tensor.narrow(dim, 0, edge + 1), tensor.narrow(dim, size - edge, edge)
                tensor = torch.cat(parts, dim)  # type: ignore[assignment]
    with torch._tensor_str.printoptions(threshold=0):
        return repr(tensor.cpu())


class RemoteStorage:
    """A substitute for a storage: tells which tensors share memory, for programs that find tied weights by pointers.

    Addresses are invalid on every processor, and different for different memory.
    """

    def __init__(self, tensor: RemoteTensor) -> None:
        self._id = memory_id(tensor)
        while isinstance(tensor._base, RemoteTensor):
            tensor = tensor._base
        self.device, self._meta = Shown.device, tensor._ref.meta

    def data_ptr(self) -> int:
        # 2 ** 36 bytes apart, so that addresses within a tensor do not reach the next one's; beyond what processors map
        return (1 << 60) + (self._id << 20 << 16) if self._meta.numel else 0

    def nbytes(self) -> int:
        return _end(self._meta) * self._meta.dtype.itemsize

    size = __len__ = nbytes


def wrapper_of(meta: Meta) -> tuple:
    """The arguments of `_make_wrapper_subclass` for a tensor. torch counts row-major strides faster than it reads them."""
    if not meta.wrapper:
        plain = not meta.offset and meta.stride == row_major_stride(meta.shape)
        stride, offset = (None, None) if plain else (meta.stride, meta.offset)
        meta.wrapper = (
            RemoteTensor, meta.shape, stride, offset, None, meta.dtype, torch.strided, LAZY, False, False, None,
            False, False, _AUTOCAST,
        )  # fmt: skip
    return meta.wrapper


def make(meta: Meta, ref: Ref | Alias, base: torch.Tensor | None = None) -> RemoteTensor:
    """A new tensor object for a reference. base: the tensor that it is a view of."""
    wrapper = meta.wrapper or wrapper_of(meta)
    tensor: RemoteTensor = new_tensor(*wrapper) if base is None else new_view(base, *wrapper)
    tensor._ref = ref
    return tensor


def rebind(target: RemoteTensor, value: RemoteTensor) -> None:
    """Make `target` name the memory of `value`, for `p.data = y`, in-place view ops and out= that resizes."""
    shell = make(value._ref.meta, value._ref, target)  # a tensor of the target's kind, else torch refuses it
    _base.data.__set__(target, shell)
    # An alias: both objects name one id now, which ends with the last of them
    target._ref = Alias(value)
