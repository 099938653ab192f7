"""Shape inference of an op, once for each kind of call: torch's meta kernels run, and an Entry keeps the result.

Nothing here is on the hot path. Shape and dtype errors are torch's own, with the CPU's text, raised on the user's line.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch

from gt.client import current_session
from gt.client.device import meta as metas
from gt.client.device.meta import Meta, dtype_name
from gt.client.device.remote_tensor import ONE_DEVICE, RemoteTensor, Shown, wrapper_of
from gt.client.trace import refusals
from gt.client.trace.meta_kernels import spare_dynamo, spare_symbolic_shapes, without_dtensor_rules
from gt.client.trace.meta_kernels.replaced import KERNELS
from gt.client.trace.op_info import (
    ASK,
    CONST,
    DEFAULTED,
    FIRST,
    INTO,
    LONG,
    NUMBERS,
    ONE,
    TENSOR,
    TENSORS,
    VALUE,
    VALUES,
    Entry,
    OpInfo,
)
from gt.errors import UnsupportedOp
from gt.ir import check
from gt.ir.schema import TABLE
from gt.ir.template import DEVICE, Arg, Const, Out, T, Template, V
from gt.wire.process_settings import uncollected
from gt.wire.signals import uninterrupted

# In-place ops over lists without a meta kernel: their outputs are their inputs
_NO_META = (
    "aten._fused_adam_.", "aten._fused_adamw_.", "aten._fused_sgd_.", "aten._fused_adagrad_.",
    "aten._amp_", "aten._foreach_copy_",
)  # fmt: skip
# Ops whose meta kernels do not check dtypes as the real ones do: names of arguments that must have one dtype
_ONE_DTYPE: dict[str, tuple[str, ...]] = {
    "aten.mm.default": ("self", "mat2"),
    "aten.bmm.default": ("self", "mat2"),
    "aten.mv.default": ("self", "vec"),
    "aten.dot.default": ("self", "tensor"),
    "aten.addmm.default": ("self", "mat1", "mat2"),
    "aten.addmv.default": ("self", "mat", "vec"),
    "aten.baddbmm.default": ("self", "batch1", "batch2"),
    "aten.convolution.default": ("input", "weight", "bias"),
    "aten._grouped_mm.default": ("self", "mat2"),
    "aten.binary_cross_entropy.default": ("self", "target"),
    "aten._cdist_forward.default": ("x1", "x2"),
    "aten.linalg_cross.default": ("self", "other"),
    "aten.linalg_lstsq.default": ("self", "b"),
    "aten.histogram.bins_tensor": ("self", "bins"),
    **{f"aten._embedding_bag{kind}.default": ("weight", "per_sample_weights") for kind in ("", "_forward_only")},
    **{f"aten.grid_sampler_{dims}d.default": ("input", "grid") for dims in (2, 3)},
    **{f"aten.fractional_max_pool{dims}d.default": ("self", "random_samples") for dims in (2, 3)},
    **{f"aten.{name}.default": ("self", "values") for name in ("index_put", "index_put_", "_index_put_impl_")},
    **{f"aten.{name}.default": ("self", "source") for name in ("index_copy", "index_copy_", "index_add", "index_add_")},
}
# Norms, whose other operands have the input's dtype, or are float32 beside half precision
_OF_NORMS = ("weight", "bias", "running_mean", "running_var")
_NORMS = frozenset(
    f"aten.{name}.default"
    for name in ("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit")
)
_HALVES = (torch.float16, torch.bfloat16)
_INDICES: dict[str, tuple[str, tuple[torch.dtype, ...]]] = {
    "aten.embedding.default": ("indices", (torch.int64, torch.int32)),
    "aten.nll_loss_forward.default": ("target", (torch.int64, torch.uint8)),
    "aten.nll_loss2d_forward.default": ("target", (torch.int64,)),
    "aten.multi_margin_loss.default": ("target", (torch.int64,)),
    "aten.multilabel_margin_loss_forward.default": ("target", (torch.int64,)),
    "aten.gather.default": ("index", (torch.int64, torch.int32)),
}

# Ops whose meta kernels return the statistics that GPUs save even in evaluation; the CPU saves none, and none are needed
_SAVES_NOTHING = ("aten.native_batch_norm.default", "aten._native_batch_norm_legit.default")

# In errors of meta kernels that cannot tell a shape: of torch, and of other libraries' ops
_NO_SHAPE = ("meta tensor", "with meta Tensors", "no fake impl")

_NOT_OF_BOOL = frozenset({"sub", "rsub", "neg", "relu", "_foreach_sub", "_foreach_neg"})  # whose meta kernels accept it
_OF_FLOATS = {"std": "std and var", "var": "std and var", "std_mean": "std_mean", "var_mean": "var_mean"}


class _Encoder:
    """Encodes a call's arguments in order: as arguments of the template, and as stand-ins for the meta kernel."""

    def __init__(self, with_offsets: bool) -> None:
        self._with_offsets = with_offsets
        self.tensors: list[RemoteTensor] = []
        self.metas: list[Meta] = []  # theirs, as the template has them
        self.stand_ins: list[torch.Tensor] = []
        self.values = 0

    def encode(self, kind: int, argument: Any) -> tuple[Arg, Any]:
        if isinstance(argument, RemoteTensor):
            self.tensors.append(argument)
            self.metas.append(argument._ref.meta if self._with_offsets else argument._ref.meta.without_offset())
            self.stand_ins.append(self.metas[-1].stand_in())
            return T(len(self.tensors) - 1), self.stand_ins[-1]
        if isinstance(argument, (list, tuple)):
            element = {TENSORS: TENSOR, VALUES: VALUE}.get(kind, CONST)
            pairs = [self.encode(element, x) for x in argument]
            return [p[0] for p in pairs], [p[1] for p in pairs]
        if kind in (TENSOR, VALUE) and isinstance(argument, (bool, int, float)):
            self.values += 1
            return V(self.values - 1), argument
        return constant(argument), torch.device("meta") if isinstance(argument, torch.device) else argument


def constant(argument: Any) -> Arg:
    """A constant argument in the template's form."""
    if argument is None or isinstance(argument, (bool, int, float, str)):
        return argument
    if isinstance(argument, torch.dtype):
        return Const("dtype", dtype_name(argument))
    if isinstance(argument, torch.device):
        return DEVICE
    if isinstance(argument, torch.layout):
        return Const("layout", str(argument)[6:])
    if isinstance(argument, torch.memory_format):
        return Const("memory_format", str(argument)[6:])
    if isinstance(argument, complex):
        return Const("complex", (argument.real, argument.imag))
    raise UnsupportedOp(f"argument {argument!r} of type {type(argument).__name__} cannot be sent to a worker")


def infer(info: OpInfo, args: tuple, kwargs: dict) -> Entry:
    """Run shape inference for a call, define its template and return the entry, which the caller keeps.

    UnsupportedOp for an op that workers do not execute; torch's own errors for wrong shapes and dtypes.
    """
    if info.name not in TABLE and not info.outs and info.name not in current_session.current().library_ops:
        raise UnsupportedOp(f"{TABLE.refusal(info.name)}; or compute it on the CPU and move the result with .to('remote')")
    # Two forms of each argument: of the template, as T(0) or a constant, and a stand-in on the meta device
    encoder = _Encoder(info.makes_views)
    pairs = [encoder.encode(kind, a) for kind, a in zip(info.kinds, args, strict=False)]
    named = {k: encoder.encode(info.named[k], a) for k, a in kwargs.items()}
    for tensor in encoder.tensors:
        current_session.check(tensor)

    # Checks that meta kernels lack, the meta kernel itself, then checks of its result
    stand_ins, stand_named = [p[1] for p in pairs], {k: p[1] for k, p in named.items()}
    if (mismatch := _mismatch(info, stand_ins, stand_named)) is not None:
        raise refusals.as_on_cpu(info, stand_ins, stand_named, mismatch)
    _check_kind(info, encoder.tensors, stand_ins, stand_named)
    entry = Entry()
    result, known = _run_meta(info, stand_ins, stand_named)
    with uninterrupted():
        refusals.refused_by_kernel(info, stand_ins, stand_named, result, current_session.current().gpus)
    if info.outs:
        entry.mode = INTO
        entry.metas = _changed_outs(info, kwargs, stand_named) if known else []
        return entry

    # Outputs: new tensors, views, and operands that are written in place, which keep their shape
    positions = _operands(info, args, kwargs)
    outs = _outs(info, entry, result, known, positions)
    entry.written = tuple(i for name in info.writes for i in positions.get(name, ()))
    if entry.written:
        entry.series = None
        _check_targets(info, encoder, entry.written, stand_ins, stand_named)
    if _takes_default(info, entry, encoder.tensors, kwargs):
        entry.mode = DEFAULTED
        return entry
    # The template. A random op has two scalars more, seed and counter
    template = Template(
        info.name,
        tuple(p[0] for p in pairs),
        tuple((k, p[0]) for k, p in named.items()),
        tuple(meta.spec for meta in encoder.metas),
        encoder.values + 2 * info.random,
        tuple(outs),
        entry.written + _undeclared_writes(info, args, positions),
        not known,
        info.pointwise,
    )
    if (chunks := check.chunks(template)) > 1:
        entry.number, entry.mode = chunks, LONG
    else:
        entry.number = current_session.current().define(template)
    if encoder.values and entry.mode <= FIRST and refusals.reads_numbers(info, encoder.tensors, entry.metas):
        checked = Entry()
        checked.mode, checked.number, checked.metas, checked.result = NUMBERS, entry.number, entry.metas, entry
        return checked
    return entry


def _takes_default(info: OpInfo, entry: Entry, operands: list[RemoteTensor], kwargs: dict) -> bool:
    """True where a result has the program's default dtype for no other reason, and workers have float32 for theirs."""
    default = torch.get_default_dtype()
    if default is torch.float32 or kwargs.get("dtype") is not None or not (operands or "dtype" in info.named):
        return False
    if any(t._ref.meta.dtype.is_floating_point or t._ref.meta.dtype.is_complex for t in operands):
        return False
    kinds = (default, torch.complex128) if default is torch.float64 else (default,)
    return any(meta is not None and meta.dtype in kinds for meta in entry.metas)


def _undeclared_writes(info: OpInfo, args: tuple, positions: dict[str, list[int]]) -> tuple[int, ...]:
    """Operands that are written although the schema does not say so: running statistics. Autograd must not see the write."""
    if info.name != "aten.native_batch_norm.default" or not args[5]:
        return ()
    return tuple(i for name in ("running_mean", "running_var") for i in positions[name])


def _mismatch(info: OpInfo, args: list, kwargs: dict) -> RuntimeError | None:
    """The error of torch's kernels for dtypes that its meta kernels accept."""
    named = {**dict(zip(info.names, args, strict=False)), **kwargs}
    dtypes = [(n, named[n].dtype) for n in _ONE_DTYPE.get(info.name, ()) if isinstance(named.get(n), torch.Tensor)]
    if "index_put" in info.name and named["values"].numel() == 1 and _has_mask(named["indices"]):
        return None  # one number for the elements of a mask is converted
    for name, dtype in dtypes[1:]:
        if dtype != dtypes[0][1]:
            first, second = dtype_name(dtypes[0][1]), dtype_name(dtype)
            return RuntimeError(f"expected {dtypes[0][0]} and {name} to have the same dtype, but got: {first} != {second}")
    name, kinds = _INDICES.get(info.name, ("", ()))
    if info.name in _NORMS:
        kinds = (named["input"].dtype, *([torch.float32] if named["input"].dtype in _HALVES else []))
        others = (n for n in _OF_NORMS if isinstance(named.get(n), torch.Tensor) and named[n].dtype not in kinds)
        name = next(others, "")
    if name and named[name].dtype not in kinds and named[name].numel():
        want = " or ".join(dtype_name(k) for k in kinds)
        return RuntimeError(f"{info.name}: expected {name} to be {want}, got {dtype_name(named[name].dtype)}")
    return None


def _check_kind(info: OpInfo, tensors: list[RemoteTensor], args: list, kwargs: dict) -> None:
    """Raise the error of torch's kernels for a truth value, or an integer, where its meta kernels accept it."""
    kind = info.name.split(".")[1].removesuffix("_")
    if kind in _NOT_OF_BOOL and (any(t.dtype is torch.bool for t in tensors) or any(type(a) is bool for a in args)):
        refusals.unsuitable(info, args, kwargs)
    if kind in _OF_FLOATS and not (tensors[0].dtype.is_floating_point or tensors[0].dtype.is_complex):
        raise RuntimeError(f"{_OF_FLOATS[kind]} only support floating point and complex dtypes")


class _Probe(torch.Tensor):
    """A tensor whose ops return None."""

    __torch_dispatch__ = classmethod(lambda cls, *call: None)  # type: ignore[assignment]


def warm() -> None:
    """Run a meta kernel, and dispatch an op to Python: the first ones of a process import some of torch's modules.

    Called while workers start.
    """
    with uninterrupted(), torch.no_grad(), uncollected():
        spare_dynamo()
        spare_symbolic_shapes()
        torch.empty(1, device="meta").add(1)
        with without_dtensor_rules():
            _Probe._make_wrapper_subclass(_Probe, (1,)).neg_()  # type: ignore[attr-defined]


def _run_meta(info: OpInfo, args: list, kwargs: dict) -> tuple[Any, bool]:
    """The op's result on stand-ins, and whether it can be known without values."""
    if info.name.startswith(_NO_META):
        return None, True
    if info.name.startswith(("aten.index.", "aten.index_put")):
        refusals.check_masks(args[0], args[1])
    refusals.check_dim(info, args, kwargs)
    if info.dynamic and _by_values(info, args, kwargs):
        return None, False
    spare_dynamo()
    spare_symbolic_shapes()
    try:
        quiet = warnings.catch_warnings() if info.writes and not info.outs else contextlib.nullcontext()
        with uninterrupted(), torch.no_grad(), quiet:  # the first one imports much of torch, which Ctrl-C would break
            if info.writes and not info.outs:
                warnings.simplefilter("ignore")  # that it resizes what is written in place: _check_target refuses it
            result = KERNELS.get(info.name, info.func)(*args, **kwargs)
            _check_cast(info, args, kwargs)
        if info.name in _SAVES_NOTHING and not args[5]:
            result = (result[0], *(saved.new_empty(0) for saved in result[1:]))
        if info.names[-1] == "output_mask" and len(args) == len(info.names):  # other kernels return None for masked outputs
            result = tuple(output if wanted else None for output, wanted in zip(result, args[-1], strict=True))
        if info.name == "aten.multilabel_margin_loss_forward.default" and args[0].dim() < 2:  # its meta kernel keeps a dim
            result = (args[0].new_empty(()), result[1])
        return result, True
    except NotImplementedError:
        return None, False
    except (RuntimeError, IndexError, KeyError, ValueError, TypeError, AssertionError) as error:
        if any(text in str(error) for text in _NO_SHAPE):
            return None, False
        if not current_session.current().gpus and (accepted := refusals.accepted_by_cpu(info, args, kwargs)) is not None:
            return accepted, True
        raise refusals.as_on_cpu(info, args, kwargs, error) from None


def _check_cast(info: OpInfo, args: list, kwargs: dict) -> None:
    """Raise if an op in place computes values that its tensor cannot hold, such as halves: some meta kernels do not."""
    kind, _, overload = info.name.removeprefix("aten.").partition(".")
    if not info.pointwise or not info.writes or not kind.endswith("_") or args[0].dtype.is_floating_point:
        return
    func = getattr(getattr(torch.ops.aten, kind[:-1], None), overload, None)
    result = args[0] if func is None else func(*args, **kwargs)
    if not torch.can_cast(result.dtype, args[0].dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {args[0].dtype}")


def _check_targets(info: OpInfo, encoder: _Encoder, written: tuple[int, ...], args: list, kwargs: dict) -> None:
    for i in written:
        _check_target(info, encoder.metas[i], encoder.stand_ins[i], args, kwargs)
    if info.pointwise or info.name == "aten.copy_.default":
        refusals.check_overlap(encoder.tensors, written)


def _check_target(info: OpInfo, meta: Meta, stand_in: torch.Tensor, args: list, kwargs: dict) -> None:
    """Raise the error of torch's kernels for a tensor that cannot be written in place: some meta kernels resize or accept it.

    stand_in: the tensor's, after the meta kernel.
    """
    if tuple(stand_in.shape) != meta.shape:
        broadcast = list(stand_in.shape)
        raise RuntimeError(f"output with shape {list(meta.shape)} doesn't match the broadcast shape {broadcast}")
    if any(size > 1 and step == 0 for size, step in zip(meta.shape, meta.stride, strict=True)):
        refusals.overlapping(info, args, kwargs)


def _has_mask(indices: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _by_values(info: OpInfo, args: list, kwargs: dict) -> bool:
    """True if this call's output shape depends on values. Some ops can have the shape as an argument instead."""
    if info.name == "aten.index.Tensor":  # with a mask: as many elements as it has ones
        return _has_mask(args[1])
    if info.name == "aten._ctc_loss.default":
        return False
    if info.name == "aten.one_hot.default":
        return dict(zip(info.names, args, strict=False), **kwargs).get("num_classes", -1) < 0
    if info.name == "aten.repeat_interleave.Tensor":
        return kwargs.get("output_size") is None
    return True


def _flat(tree: Any) -> list:
    if isinstance(tree, (list, tuple)):
        return [leaf for branch in tree for leaf in _flat(branch)]
    return [tree]


def _changed_outs(info: OpInfo, kwargs: dict, stand_named: dict) -> list[Meta]:
    """New metas of all out= tensors if the op changed the shape of any; [] otherwise."""
    changed, after = False, []
    for name in info.outs:
        for tensor, result in zip(_flat(kwargs[name]), _flat(stand_named[name]), strict=True):
            after.append(metas.of(result))
            before = tensor._ref.meta
            if before.shape != tuple(result.shape):
                changed = True
                if any(size > 1 and step == 0 for size, step in zip(before.shape, before.stride, strict=True)):
                    raise RuntimeError(
                        f"unsupported operation: more than one element of {name} of {info.name}, of shape "
                        f"{list(before.shape)}, is the same memory; clone() it first"
                    )
    return after if changed else []


def _operands(info: OpInfo, args: tuple, kwargs: dict) -> dict[str, list[int]]:
    """Argument name -> numbers of its tensor operands."""
    count = 0
    positions: dict[str, list[int]] = {}
    for name, a in [*zip(info.names, args, strict=False), *kwargs.items()]:
        tensors = [x for x in _flat(a) if isinstance(x, RemoteTensor)]
        positions[name] = list(range(count, count + len(tensors)))
        count += len(tensors)
    return positions


def _outs(info: OpInfo, entry: Entry, result: Any, known: bool, positions: dict[str, list[int]]) -> list[Out]:
    """The template's outputs; fills the entry's metas, mode, result tree and series.

    result: of the meta kernel. known: whether it is valid without values. positions: as _operands gives them.
    """
    schema = info.func._schema
    outs: list[Out] = []
    trees = []
    single = len(schema.returns) == 1
    # One row per declared return; a kernel that knows nothing has none for each
    values = [result] if single else (list(result) if result is not None else [None] * len(schema.returns))
    for declared, value in zip(schema.returns, values, strict=True):
        alias = declared.alias_info
        if not known and str(declared.type) != "Tensor":
            raise UnsupportedOp(f"{info.name}: the number of its results depends on values; compute it on x.cpu()")
        # Tensor(a!): the operand itself. Tensor(a): a view of it. Tensor: new memory
        if alias is not None and alias.is_write:
            names = [n for n in info.writes if _alias_set(info, n) == alias.before_set] or info.writes
            trees.append(_in_place(outs, positions[names[0]][0]))
            continue
        base = _base_operand(info, alias, positions) if alias is not None else -1
        entry.view = entry.view or base >= 0
        trees.append(_new_output(info, entry, outs, value, known, base))

    # The mode: fast ways for one new tensor, for the first argument, and for a series of new tensors
    entry.result = trees[0] if single else tuple(trees)
    if not known:
        entry.mode = ASK
    elif single and entry.result == ("new", 0):
        entry.mode = ONE
        entry.wrapper = wrapper_of(entry.metas[0])
    elif single and entry.result == ("arg", 0) and positions[info.names[0]] == [0]:
        entry.mode = FIRST
    elif entry.metas and all(leaf == ("const", None) or (type(leaf) is tuple and leaf[0] == "new") for leaf in entry.result):
        entry.series = type(entry.result)
        slots = [leaf[1] for leaf in entry.result]
        entry.slots = [] if slots == list(range(len(entry.metas))) else slots
    if known and not entry.view:
        entry.made = sum(meta.nbytes for meta in entry.metas)
    return outs


def _alias_set(info: OpInfo, name: str) -> set:
    return info.func._schema.arguments[info.names.index(name)].alias_info.before_set


def _in_place(outs: list[Out], operand: int) -> tuple:
    outs.append(Out("same", None, operand))
    return ("arg", operand)


def _base_operand(info: OpInfo, alias: Any, positions: dict[str, list[int]]) -> int:
    """The tensor operand that a view output shares memory with."""
    for argument in info.func._schema.arguments:
        source = argument.alias_info
        if source is not None and not source.is_write and (not alias.before_set or source.before_set & alias.before_set):
            return positions[argument.name][0]
    return positions[info.names[0]][0]


def _new_output(info: OpInfo, entry: Entry, outs: list[Out], value: Any, known: bool, base: int) -> Any:
    """Result tree of one declared return: a tensor, None, a list of tensors, or a number. base: operand of a view, or -1."""
    kind = "view" if base >= 0 else "new"
    if not known:
        outs.append(Out(kind, None, base))
        entry.metas.append(None)  # type: ignore[arg-type]
        return ("new", len(entry.metas) - 1)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise UnsupportedOp(f"{info.name} makes a {value.layout} tensor, and remote tensors are strided")
        meta = metas.of(value)
        outs.append(Out(kind, meta.spec, base))
        entry.metas.append(meta)
        return ("new", len(entry.metas) - 1)
    if isinstance(value, (list, tuple)):
        return [_new_output(info, entry, outs, v, known, base) for v in value]
    if value is None:
        outs.append(Out("none"))
    return ("const", value)


def is_remote(device: Any) -> bool:
    """True for the remote device and for None, as a device argument. RuntimeError for a remote device with another index."""
    if device is None:
        return True
    wanted = torch.device(device)
    if wanted.index and wanted.type in Shown.types:
        raise RuntimeError(ONE_DEVICE.format(wanted))
    return wanted.type in Shown.types
