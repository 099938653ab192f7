"""Errors in words that people know or can look up: the CPU's text for a meta kernel's, and refusals of torch's parallelism.

Nothing here runs per op: only for a refused op, and in calls of torch.compile, DataParallel, DDP or FSDP.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops import utils as higher_order
from torch.utils._pytree import tree_flatten, tree_map

from gt.client.device.remote_tensor import RemoteTensor
from gt.errors import UnsupportedOp

MAX_ELEMENTS_ON_CPU = 1 << 20  # of all operands together: the CPU executes smaller ops to get torch's error
# Ops of any size: their CPU kernels compare shapes before they compute, as every pointwise op's does
_COMPARES_FIRST = frozenset(
    f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "cat", "stack", "convolution")
)
COMPILE = (
    "torch.compile cannot compile for the remote device, whose tensors are on the workers: "
    "use gt.compile(step, backend='inductor'), which has the workers compile it"
)
CONTROL = (
    "torch's {} compiles its functions, and torch.compile cannot compile for the remote device: write a Python loop. "
    "torch.cond and while_loop work"
)
PARALLEL = "{} is not for the remote device: GT splits batches and weights by a config. Leave the model as it is, and {}"
CONFIG = (
    "name the workers in a YAML, such as `data: {workers: [0, 1]}` for data parallelism over two, pass it as "
    "gt.gpu_workers(2, config='the.yaml'), and run the model inside `with gt.signal.context('data'):`"
)
SHARDED_CONFIG = (
    "have GT shard its weights, gradients and optimizer state: write `gt: {data_parallel: null, zero: 3}` into a YAML, and "
    "pass it as gt.gpu_workers(2, config='the.yaml')"
)


def as_on_cpu(info: Any, args: list, kwargs: dict, error: Exception) -> Exception:
    """The CPU's error for an op that a meta kernel refused; the meta kernel's own if running the op on the CPU is no option.

    info: op_info.OpInfo. args, kwargs: with meta tensors. The op runs on zeros of the same shapes and dtypes.
    """
    small = _elements(args, kwargs) <= MAX_ELEMENTS_ON_CPU
    if _trusts_callers(info) or not (small or info.pointwise or info.name in _COMPARES_FIRST):
        return error
    return _cpu_error(info, args, kwargs, _zeros) or error


def unsuitable(info: Any, args: list, kwargs: dict) -> None:
    """Raise the CPU's error for an op that does not take operands of these dtypes, whatever their shapes.

    Arguments as of as_on_cpu.
    """
    error = _cpu_error(info, args, kwargs, _nothing)
    if error is not None:
        raise error


def overlapping(info: Any, args: list, kwargs: dict) -> None:
    """Raise the CPU's error for an op that writes in place to a tensor whose elements share memory, as after expand().

    Some ops only warn of it. Arguments as of as_on_cpu, with strides.
    """
    if _trusts_callers(info) or _elements(args, kwargs) > MAX_ELEMENTS_ON_CPU:
        return
    error = _cpu_error(info, args, kwargs, _strided_zeros)
    if error is not None and "single memory location" in str(error):
        raise error


def _elements(args: list, kwargs: dict) -> int:
    return sum(leaf.numel() for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor))


def _trusts_callers(info: Any) -> bool:
    """True for ops whose kernels may check nothing, and for random ones, which would use up the CPU's numbers."""
    return info.random or "backward" in info.name or info.name.startswith("aten._") or not info.name.startswith("aten.")


def _cpu_error(info: Any, args: list, kwargs: dict, host: Callable[[Any], Any]) -> Exception | None:
    """The CPU's error for the op on host tensors in place of meta tensors; None if it accepts them."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            info.func(*tree_map(host, args), **tree_map(host, kwargs))
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        return error.with_traceback(None)
    return None


def _zeros(leaf: Any) -> Any:
    """A CPU tensor in place of a meta tensor. Its pages are not allocated until a kernel reads them."""
    if isinstance(leaf, torch.Tensor):
        return torch.zeros(leaf.shape, dtype=leaf.dtype)
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _nothing(leaf: Any) -> Any:
    """A CPU tensor of no elements and the dtype of a meta tensor."""
    return torch.zeros(0, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else _zeros(leaf)


def _strided_zeros(leaf: Any) -> Any:
    """As _zeros, with the meta tensor's strides."""
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()
    return _zeros(leaf)


# ---- nested tensors


def nested(*args: Any, **kwargs: Any) -> Any:
    raise UnsupportedOp(
        "remote has no nested tensors: pad the parts, as torch.nn.utils.rnn.pad_sequence does, and give attention a mask; or "
        "concatenate them and keep the offsets"
    )


def nested_tensors(module: Any) -> None:
    """Refuse a jagged tensor of remote parts when it is made, and not in its backward."""
    original = module.NestedTensor.__new__

    def new(cls: type, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return nested() if isinstance(values, RemoteTensor) else original(cls, values, *args, **kwargs)

    module.NestedTensor.__new__ = staticmethod(new)


# ---- torch's own compiler and data parallelism


def prepare() -> None:
    """Make torch.compile, DataParallel and DistributedDataParallel refuse remote tensors with advice."""
    torch.compile = _compile(torch.compile)
    if hasattr(higher_order, "_hop_compile_and_call"):  # since torch 2.13
        higher_order._hop_compile_and_call = _control_flow(higher_order._hop_compile_and_call)
    for cls in (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel):
        for name in ("__init__", "forward"):
            setattr(cls, name, _parallel(cls.__name__, CONFIG, getattr(cls, name)))


def sharded_parallel(module: Any) -> None:
    """torch.distributed.fsdp: make both kinds of FSDP refuse remote parameters with advice, before they look for ranks."""
    cls = module.FullyShardedDataParallel
    cls.__init__ = _parallel(cls.__name__, SHARDED_CONFIG, cls.__init__)
    original = module.fully_shard

    @functools.wraps(original)
    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        modules = module if isinstance(module, (list, tuple)) else [module]
        if any(isinstance(m, torch.nn.Module) and _remote(m) for m in modules):
            raise UnsupportedOp(PARALLEL.format("fully_shard", SHARDED_CONFIG))
        return original(module, *args, **kwargs)

    module.fully_shard = fully_shard


def _compile(original: Any) -> Any:
    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.nn.Module) and _remote(args[0]):
            raise UnsupportedOp(COMPILE)
        compiled = original(*args, **kwargs)
        _guard_dynamo()
        return compiled

    return compile


def _control_flow(original: Any) -> Any:
    """Control flow by functions, which torch compiles even in eager mode: for remote tensors Python decides."""

    @functools.wraps(original)
    def compile_and_call(fn: Any, args: tuple, kwargs: dict | None = None) -> Any:
        if not any(isinstance(leaf, RemoteTensor) for leaf in tree_flatten(args)[0]):
            return original(fn, args, kwargs)
        if fn.__name__ not in _IN_PYTHON:
            raise UnsupportedOp(CONTROL.format(fn.__name__.removeprefix("run_flattened_")))
        return _IN_PYTHON[fn.__name__](*args)

    return compile_and_call


def _cond(choice: Any, if_true: Callable, if_false: Callable, operands: Any) -> Any:
    return (if_true if choice else if_false)(*operands)


def _while_loop(condition: Callable, body: Callable, carried: tuple, others: tuple) -> Any:
    while condition(*carried, *others):
        carried = body(*carried, *others)
    return carried


# By the name of the function that torch would compile
_IN_PYTHON: dict[str, Callable] = {"_cond_op_wrapper": _cond, "_while_loop_op_wrapper": _while_loop}


@functools.cache
def _guard_dynamo() -> None:
    """Refuse remote tensors during tracing: a module on the CPU may have moved since torch.compile was called."""
    from torch._dynamo.exc import ShortenTraceback
    from torch._dynamo.variables.builder import VariableBuilder

    class CompileRefusal(UnsupportedOp, ShortenTraceback):
        """The refusal as a class that dynamo raises unchanged."""

        first_useful_frame = None

    original = VariableBuilder._wrap

    def wrap(self: Any, value: Any) -> Any:
        if isinstance(value, RemoteTensor):
            raise CompileRefusal(COMPILE)
        return original(self, value)

    VariableBuilder._wrap = wrap  # type: ignore[method-assign]


def _parallel(name: str, advice: str, original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = args[0] if args else kwargs.get("module")
        if any(isinstance(m, torch.nn.Module) and _remote(m) for m in (inner, self.__dict__.get("_modules", {}).get("module"))):
            raise UnsupportedOp(PARALLEL.format(name, advice))
        return original(self, *args, **kwargs)

    return call


def _remote(module: torch.nn.Module) -> bool:
    """True if a module has a remote parameter or buffer."""
    return any(isinstance(t, RemoteTensor) for tensors in (module.parameters(), module.buffers()) for t in tensors)
