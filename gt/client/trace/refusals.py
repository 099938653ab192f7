"""Errors in words that people know or can look up: those of the CPU's kernels, and refusals of torch's parallelism.

Nothing here runs per op: only for a refused op, for a new kind of call, for numbers in calls on small integers or random
ones, and in calls of torch.compile, DataParallel, DDP or FSDP.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._higher_order_ops import utils as higher_order
from torch.utils._pytree import tree_flatten, tree_map

from gt.client.device.remote_tensor import RemoteTensor, memory_id
from gt.client.trace.meta_kernels.missing import CHECKED_BY_THE_CPU
from gt.errors import UnsupportedOp

MAX_ELEMENTS_ON_CPU = 1 << 20  # of all operands together: the CPU executes smaller ops to get torch's error
MAX_ACCEPTED = 1024  # sets of numbers that are remembered as checked, for each kind of call
MAX_TRIED_ELEMENTS = 1 << 12  # of operands and results together: the CPU tries such a new kind of call, in about 10 us
MAX_TRIED_ORDER = 1 << 17  # numbers of a random order: more than dtypes of two bytes have
# Ops whose meta kernels accept shapes or arguments that the real ones refuse, without their namespace and overload
_MORE_THAN_META = frozenset({
    "_ctc_loss", "add", "addbmm", "addcdiv", "addmm", "addmv", "argmax", "argmin", "as_strided_scatter", "baddbmm",
    "bernoulli", "bincount", "bucketize", "complex", "cummax", "cummin", "diagonal_scatter", "fill", "geqrf", "heaviside",
    "histogram", "index", "index_add", "index_copy", "index_fill", "index_put", "index_reduce", "index_select",
    "linalg_lstsq", "masked_scatter", "masked_select", "max", "median", "min", "mode", "multinomial", "mvlgamma",
    "nanmedian", "nll_loss_forward", "normal", "poisson", "polar", "put", "searchsorted", "select_scatter", "sort", "sub",
    "topk",
}) | CHECKED_BY_THE_CPU  # fmt: skip
# Ops whose meta kernels accept a missing dim
_OF_ANY_DIM = frozenset({
    "_softmax", "index_reduce", "select_scatter", "slice_scatter", "sort", "unique_consecutive", "unique_dim",
})  # fmt: skip
# Ops of integers alone, which refuse float32: other ops of float32 and float64 are not tried
_OF_INTEGERS = frozenset({
    "bincount", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "gcd",
    "lcm", "repeat_interleave", "__and__", "__or__", "__xor__", "__iand__", "__ior__", "__ixor__",
})  # fmt: skip
# Their kernels check, as those of public ops do
_CHECKED = frozenset({
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_cdist_forward", "_ctc_loss", "_fft_c2c", "_fft_c2r", "_fft_r2c",
    "_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "_log_softmax", "_pdist_forward",
    "_prelu_kernel", "_safe_softmax", "_softmax", "_unique2", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
})  # fmt: skip
# Ops that refuse some numbers: as divisors or exponents of integers, as limits, as values of tensors
_OF_DIVISORS = frozenset({"pow", "floor_divide", "fmod", "remainder", "div"})
_OF_LIMITS = frozenset({"celu", "smooth_l1_loss"})
_FILLS = frozenset({"fill", "masked_fill", "index_fill", "clamp", "clamp_min", "clamp_max", "where", "threshold", "scatter"})
_FACTORIES = frozenset({"full", "full_like", "new_full"})
_BROADER_HERE = frozenset({"histc"})  # workers take more dtypes than the CPU's kernel, as GPUs do
# With the pointwise ops, those whose arguments name no sizes: large operands are tried with dims of 2 elements
_REDUCTIONS = frozenset({
    "_log_softmax", "_softmax", "amax", "amin", "argmax", "argmin", "bmm", "cummax", "cummin", "cumprod", "cumsum", "dot",
    "logsumexp", "max", "mean", "min", "mm", "mv", "prod", "sort", "sum", "tril", "triu",
})  # fmt: skip
_ORDINARY = frozenset({torch.float32, torch.float64})
# Ops of any size: their CPU kernels compare shapes before they compute, as every pointwise op's does
_COMPARES_FIRST = frozenset(
    f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "cat", "stack", "convolution")
)
_ERRORS = (RuntimeError, IndexError, ValueError, TypeError)
OVERLAP = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location. "
    "Please clone() the tensor before performing the operation."
)
COMPILE = (
    "torch.compile cannot compile for the remote device, whose tensors are on the workers: "
    "use gt.compile(model, backend='inductor'), or of a whole step, which has the workers compile it"
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


# Ops whose results' shapes depend on values -> what to write in a step that is to be captured
WITH_A_SIZE = {
    "index": ": keep all elements, and use torch.where(mask, x, 0) or weights of zero",
    "masked_select": ": keep all elements, and use torch.where(mask, x, 0) or weights of zero",
    "bincount": ": torch.zeros(n, device=x.device).index_add(0, x, torch.ones(x.shape, device=x.device)) has n bins",
    "nonzero": ": torch.nonzero_static(x, size=n) has n rows",
    "repeat_interleave": ": pass output_size=n",
}


def as_on_cpu(info: Any, args: list, kwargs: dict, error: Exception) -> Exception:
    """The CPU's error for an op that a meta kernel refused; the meta kernel's own if running the op on the CPU is no option.

    info: op_info.OpInfo. args, kwargs: with meta tensors. The op runs on zeros of the same shapes and dtypes.
    """
    small = _elements(args, kwargs) <= MAX_ELEMENTS_ON_CPU
    if _trusts_callers(info) or not (small or info.pointwise or info.name in _COMPARES_FIRST):
        return error
    return _cpu_error(info, args, kwargs, _zeros) or error


def accepted_by_cpu(info: Any, args: list, kwargs: dict) -> Any:
    """The op's result as meta tensors if the CPU accepts a call that a meta kernel refused, else None.

    Arguments as of as_on_cpu.
    """
    if _trusts_callers(info) or info.outs or _elements(args, kwargs) > MAX_TRIED_ELEMENTS:
        return None
    try:
        result = _on_cpu(info, args, kwargs, _strided_zeros)  # strides decide which views there are
    except _ERRORS:
        return None
    return tree_map(_as_meta, result)


def refused_by_kernel(info: Any, args: list, kwargs: dict, result: Any, gpus: bool) -> None:
    """Raise the CPU's error for a call that a meta kernel accepts and the CPU's kernel refuses, whatever the values are.

    Arguments as of as_on_cpu. result: of the meta kernel. gpus: the workers', which may have kernels for more dtypes.
    """
    kind, dtypes = _kind(info), _dtypes(args, kwargs) | _dtypes([result], {})
    shapes = kind in _MORE_THAN_META or kind.startswith("_foreach_")
    odd = not gpus and (kind in _OF_INTEGERS or not dtypes <= _ORDINARY) and kind not in _BROADER_HERE
    trusting = not shapes if info.random else _trusts_callers(info)
    into = bool(info.outs)  # meta kernels convert to the dtype of any out=, as some of the CPU's do
    if not (shapes or odd or into) or not dtypes or trusting:
        return
    # Zeros first. An error about values, as of zero as an index, has other words for ones, or is none: it is not the call's
    error = None
    if info.random:
        kwargs = {**kwargs, "generator": _generator()}
    if _elements(args, kwargs) + _elements([result], {}) <= MAX_TRIED_ELEMENTS:
        error = _cpu_error(info, args, kwargs, _zeros)
        if error is not None and not _about_dtypes(error) and not (into and _about_out(error)):
            again = _cpu_error(info, args, kwargs, _ones)  # an error about values has other words then, or is none
            same = shapes and str(again) == str(error)
            error = again if same or (again is not None and _about_dtypes(again)) else None
    elif odd and (info.pointwise or kind in _REDUCTIONS):
        error = _refused_dtypes(info, args, kwargs)
    if error is not None and not (gpus and _about_dtypes(error)):
        raise error


def _refused_dtypes(info: Any, args: list, kwargs: dict) -> Exception | None:
    """The CPU's error for the dtypes of large operands: it is tried with dims of 2 elements at most."""
    error = _cpu_error(info, args, kwargs, _small)
    return error if error is not None and _about_dtypes(error) else None


def _about_dtypes(error: Exception) -> bool:
    """True for the errors of kernels that lack a dtype."""
    return isinstance(error, NotImplementedError) or any(text in str(error) for text in ("not implemented for", "not support "))


def _about_out(error: Exception) -> bool:
    """True for the errors of kernels that want an out= of another dtype."""
    return any(text in str(error) for text in ("dtype", "scalar type", "scalar_type", "bool tensor for result"))


def _kind(info: Any) -> str:
    """The op's name without namespace, overload, and the underscore of the form in place."""
    name: str = info.name.split(".")[1]
    return name if name.endswith("__") else name.removesuffix("_")


def _dtypes(args: list, kwargs: dict) -> set[torch.dtype]:
    return {leaf.dtype for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)}


def check_masks(x: torch.Tensor, indices: Any) -> None:
    """IndexError in torch's words for a mask of another shape than the dims that it selects from."""
    dim = 0
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            dim += 1
            continue
        for place, size in enumerate(index.shape):
            # A mask of n dims selects from the next n dims of the tensor
            if dim + place < x.dim() and size != x.shape[dim + place]:
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index {place} does not match the shape of the indexed "
                    f"tensor {list(x.shape)} at index {dim + place}"
                )
        dim += index.dim()


def check_dim(info: Any, args: list, kwargs: dict) -> None:
    """IndexError in torch's words for a dim that the tensor lacks."""
    if _kind(info) not in _OF_ANY_DIM:
        return
    named = {**dict(zip(info.names, args, strict=False)), **kwargs}
    dim, dims = named.get("dim", 0), max(args[0].dim(), 1)
    if type(dim) is int and not -dims <= dim < dims:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-dims}, {dims - 1}], but got {dim})")


def reads_numbers(info: Any, operands: list[RemoteTensor], results: list) -> bool:
    """True for a kind of call that the CPU's kernel refuses for some numbers: they divide, or do not fit into the dtype."""
    kind = _kind(info)
    if kind in _FILLS or kind in _FACTORIES:
        filled = results[0].dtype if results else operands[0].dtype
        return filled is torch.float16 or not (filled.is_floating_point or filled.is_complex or filled is torch.bool)
    if kind in _OF_LIMITS:
        return True
    return kind in _OF_DIVISORS and not any(t.dtype.is_floating_point or t.dtype.is_complex for t in operands)


def check_call(info: Any, args: tuple, kwargs: dict, results: list, gpus: bool) -> None:
    """Raise the CPU's error for the numbers among a call's arguments. results: metas of new tensors."""
    if _kind(info) in _FACTORIES:
        value = dict(zip(info.names, args), **kwargs)["fill_value"]
        return _try_numbers(torch.ops.aten.fill_.Scalar, gpus, 0, ((results[0].dtype, 1),), ..., value)
    every = [*args, *kwargs.values()]
    if any(isinstance(a, list) or (isinstance(a, torch.Tensor) and type(a) is not RemoteTensor) for a in every):
        return None
    kinds = tuple((a.dtype, a.dim()) for a in every if type(a) is RemoteTensor)
    tried = [... if type(a) is RemoteTensor else a for a in every]
    # A divisor must be no zero, as in `7 // x`; an index of one element has to be one
    number = int(_kind(info) in _OF_DIVISORS)
    return _try_numbers(info.func, gpus, number, kinds, *tried[: len(args)], **dict(zip(kwargs, tried[len(args) :])))


@functools.lru_cache(4096, typed=True)
def _try_numbers(
    func: Any, gpus: bool, number: int, kinds: tuple[tuple[torch.dtype, int], ...], *args: Any, **kwargs: Any
) -> None:
    """Try an op on tensors of one element, which is `number`. kinds: their dtypes and dims. args, kwargs: `...` for tensors."""
    # One element is enough: the kernels refuse these numbers before they look at elements
    tensors = iter([torch.full([1] * dims, number, dtype=dtype, device="cpu") for dtype, dims in kinds])
    tried = [next(tensors) if a is ... else a for a in args]
    named = {name: next(tensors) if a is ... else a for name, a in kwargs.items()}
    if any(argument.name == "generator" for argument in func._schema.arguments):
        named["generator"] = _generator()
    try:
        with torch.no_grad(), warnings.catch_warnings(), _programs_numbers_kept(func):
            warnings.simplefilter("ignore")
            func(*tried, **named)
    except _ERRORS as error:
        if not (gpus and _about_dtypes(error)):
            raise error.with_traceback(None) from None


@functools.lru_cache(256)
def check_order(n: int, dtype: torch.dtype, gpus: bool) -> None:
    """Raise the CPU's error for a random order of n numbers that a dtype lacks."""
    # A dtype that lacks numbers lacks some of the first ones, but for int32, whose order nobody would try
    try:
        torch.randperm(min(n, MAX_TRIED_ORDER), dtype=dtype, generator=_generator(), device="cpu")
    except _ERRORS as error:
        if not (gpus and _about_dtypes(error)):
            raise error.with_traceback(None) from None


def note_accepted(accepted: set[tuple], numbers: tuple) -> None:
    """Remember numbers that were checked."""
    if len(accepted) >= MAX_ACCEPTED:
        accepted.clear()
    accepted.add(numbers)


@contextmanager
def _programs_numbers_kept(func: Any) -> Iterator[None]:
    """Put the state of torch's CPU generator back after a try of an op that draws from it, and takes no other generator."""
    if torch.Tag.nondeterministic_seeded not in func.tags or any(a.name == "generator" for a in func._schema.arguments):
        yield
        return
    state = torch.random.get_rng_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


@functools.cache
def _generator() -> torch.Generator:
    """The generator of tried calls, so that they leave the program's random numbers alone."""
    return torch.Generator()


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
    if _is_private(info) or _elements(args, kwargs) > MAX_ELEMENTS_ON_CPU:
        return
    if info.random:
        kwargs = {**kwargs, "generator": _generator()}
    error = _cpu_error(info, args, kwargs, _strided_zeros)
    if error is not None and "single memory location" in str(error):
        raise error


def check_overlap(tensors: list[RemoteTensor], written: tuple[int, ...]) -> None:
    """Raise the CPU's error for an elementwise op that writes to memory of which it reads other elements, as `x += x.t()`.

    It is told when a kind of call is new. Later calls of its kind fail on the worker.
    """
    if any(_overlap_partly(tensors[i], other) for i in written for other in tensors if other is not tensors[i]):
        raise RuntimeError(OVERLAP)


def _overlap_partly(a: RemoteTensor, b: RemoteTensor) -> bool:
    """True as for torch's get_overlap_status, which judges dense memory alone."""
    if not (a.numel() and b.numel()) or memory_id(a) != memory_id(b):
        return False
    if not (_dense(a) and _dense(b)):
        return False
    # In bytes, since the two may be of different dtypes
    starts = [t.storage_offset() * t.itemsize for t in (a, b)]
    ends = [start + t.numel() * t.itemsize for start, t in zip(starts, (a, b), strict=True)]
    if starts[0] == starts[1] and ends[0] == ends[1]:
        return a.stride() != b.stride()
    return max(starts) < min(ends)


def _dense(t: torch.Tensor) -> bool:
    """True if the elements fill a range of memory, in any order of dims."""
    filled = 1
    for step, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size != 1 and step != filled:
            return False
        filled *= size
    return True


def _elements(args: list, kwargs: dict) -> int:
    return sum(leaf.numel() for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor))


def _trusts_callers(info: Any) -> bool:
    """True for ops whose kernels may check nothing, and for random ones, which would use up the CPU's numbers."""
    return info.random or _is_private(info)


def _is_private(info: Any) -> bool:
    public = ("aten.__", "aten._foreach_")
    private = info.name.startswith("aten._") and not info.name.startswith(public) and _kind(info) not in _CHECKED
    return "backward" in info.name or private or not info.name.startswith("aten.")


def _cpu_error(info: Any, args: list, kwargs: dict, host: Callable[[Any], Any]) -> Exception | None:
    """The CPU's error for the op on host tensors in place of meta tensors; None if it accepts them."""
    try:
        _on_cpu(info, args, kwargs, host)
    except _ERRORS as error:
        return error.with_traceback(None)
    return None


def _on_cpu(info: Any, args: list, kwargs: dict, host: Callable[[Any], Any]) -> Any:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _programs_numbers_kept(info.func):
            return info.func(*tree_map(host, args), **tree_map(host, kwargs))


def _zeros(leaf: Any) -> Any:
    """A CPU tensor in place of a meta tensor. Its pages are not allocated until a kernel reads them."""
    if isinstance(leaf, torch.Tensor):
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu")
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _ones(leaf: Any) -> Any:
    """As _zeros, of other values."""
    return _zeros(leaf).fill_(1) if isinstance(leaf, torch.Tensor) else _zeros(leaf)


def _small(leaf: Any) -> Any:
    """As _zeros, with dims of 2 elements at most, so that dims of one size keep one."""
    if isinstance(leaf, torch.Tensor):
        return torch.zeros([min(size, 2) for size in leaf.shape], dtype=leaf.dtype, device="cpu")
    return _zeros(leaf)


def _as_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf


def _nothing(leaf: Any) -> Any:
    """A CPU tensor of no elements and the dtype of a meta tensor."""
    return torch.zeros(0, dtype=leaf.dtype, device="cpu") if isinstance(leaf, torch.Tensor) else _zeros(leaf)


def _strided_zeros(leaf: Any) -> Any:
    """As _zeros, with the meta tensor's strides."""
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu").zero_()
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
