"""What an op gives, found once for each kind of call: torch's meta kernels run, and the answer is kept as an Entry.

Everything here is off the hot path. Shape and dtype errors are torch's own, with the CPU's text, raised on the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gt.client import current_session
from gt.client.device import meta as metas
from gt.client.device.meta import Meta, dtype_name
from gt.client.device.remote_tensor import RemoteTensor, Shown
from gt.client.trace import refusals
from gt.client.trace.op_info import ASK, CONST, FIRST, INTO, LONG, ONE, TENSOR, TENSORS, VALUE, VALUES, Entry, OpInfo
from gt.errors import UnsupportedOp
from gt.ir import check
from gt.ir.schema import TABLE
from gt.ir.template import DEVICE, Arg, Const, Out, T, Template, V
from gt.wire.signals import uninterrupted

# Ops in place over lists that have no meta kernel: their outputs are their inputs
_NO_META = ("aten._fused_", "aten._amp_", "aten._foreach_copy_")


# Ops whose meta kernels do not check what the real ones do: names of arguments that must have one dtype
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
}
_INDICES: dict[str, tuple[str, tuple[torch.dtype, ...]]] = {
    "aten.embedding.default": ("indices", (torch.int64, torch.int32)),
    "aten.nll_loss_forward.default": ("target", (torch.int64, torch.uint8)),
    "aten.nll_loss2d_forward.default": ("target", (torch.int64,)),
    "aten.gather.default": ("index", (torch.int64, torch.int32)),
}


# Ops whose meta kernels say what GPUs save in evaluation; the CPU saves nothing, which is as good
_SAVES_NOTHING = ("aten.native_batch_norm.default", "aten._native_batch_norm_legit.default")


def _grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
    """Rows (or columns, or inner dims) in groups that end at `offs`: torch's meta kernel wants bfloat16, its kernels do not."""
    if offs is not None and offs.dtype != torch.int32:
        raise RuntimeError(f"aten._grouped_mm: expected offs to be int32, got {dtype_name(offs.dtype)}")
    if (a.dim() == 2 or b.dim() == 2) and offs is None:
        raise RuntimeError("aten._grouped_mm: offs is needed where a matrix has 2 dims")
    if (a.dim() == 3 or b.dim() == 3) and a.size(-1) != b.size(-2):
        raise RuntimeError(f"aten._grouped_mm: {list(a.shape)} and {list(b.shape)} do not contract")
    groups = [] if a.dim() != b.dim() else [a.size(0) if a.dim() == 3 else offs.numel()]
    return a.new_empty([*groups, a.size(-2), b.size(-1)], dtype=out_dtype)


def _as_mul(grad: torch.Tensor, x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """The strides of an elementwise kernel of two operands: those of decompositions, which torch's meta kernels are, differ."""
    return torch.mul(grad, x)


# Ops whose own meta kernels do not say what their real ones do
_META: dict[str, Callable] = {
    "aten._grouped_mm.default": _grouped_mm,
    **dict.fromkeys(
        (f"aten.{name}_backward.default" for name in ("softplus", "hardswish", "hardtanh", "hardsigmoid", "logit")), _as_mul
    ),
}


class _Encoder:
    """Walks a call's arguments in order, making the template's args and stand-ins for the meta kernel."""

    def __init__(self) -> None:
        self.tensors: list[RemoteTensor] = []
        self.values = 0

    def encode(self, kind: int, a: Any) -> tuple[Arg, Any]:
        if isinstance(a, RemoteTensor):
            self.tensors.append(a)
            return T(len(self.tensors) - 1), a._ref.meta.stand_in()
        if isinstance(a, (list, tuple)):
            element = {TENSORS: TENSOR, VALUES: VALUE}.get(kind, CONST)
            pairs = [self.encode(element, x) for x in a]
            return [p[0] for p in pairs], [p[1] for p in pairs]
        if kind in (TENSOR, VALUE) and isinstance(a, (bool, int, float)):
            self.values += 1
            return V(self.values - 1), a
        return constant(a), torch.device("meta") if isinstance(a, torch.device) else a


def constant(a: Any) -> Arg:
    """A constant argument in the template's form."""
    if a is None or isinstance(a, (bool, int, float, str)):
        return a
    if isinstance(a, torch.dtype):
        return Const("dtype", dtype_name(a))
    if isinstance(a, torch.device):
        return DEVICE
    if isinstance(a, torch.layout):
        return Const("layout", str(a)[6:])
    if isinstance(a, torch.memory_format):
        return Const("memory_format", str(a)[6:])
    if isinstance(a, complex):
        return Const("complex", (a.real, a.imag))
    raise UnsupportedOp(f"argument {a!r} of type {type(a).__name__} cannot be sent to a worker")


def infer(info: OpInfo, args: tuple, kwargs: dict) -> Entry:
    """Infer a call, define its template and return the entry (the caller keeps it)."""
    if info.name not in TABLE and not info.outs:
        raise UnsupportedOp(f"{TABLE.refusal(info.name)}; or compute it on the CPU and move the result with .to('remote')")
    encoder = _Encoder()
    pairs = [encoder.encode(kind, a) for kind, a in zip(info.kinds, args, strict=False)]
    named = {k: encoder.encode(info.named[k], a) for k, a in kwargs.items()}
    for tensor in encoder.tensors:
        current_session.check(tensor)
    stand_ins, stand_named = [p[1] for p in pairs], {k: p[1] for k, p in named.items()}
    _check_dtypes(info, args, kwargs)
    entry = Entry()
    found, known = _run_meta(info, stand_ins, stand_named)
    if info.outs:
        entry.mode = INTO
        entry.metas = _changed_outs(info, kwargs, stand_named) if known else []
        return entry
    positions = _operands(info, args, kwargs)
    outs = _outs(info, entry, found, known, positions)
    entry.written = tuple(i for name in info.writes for i in positions.get(name, ()))
    template = Template(
        info.name,
        tuple(p[0] for p in pairs),
        tuple((k, p[0]) for k, p in named.items()),
        tuple(t._ref.meta.spec for t in encoder.tensors),
        encoder.values + 2 * info.random,
        tuple(outs),
        entry.written + _unsaid(info, args, positions),
        not known,
        info.pointwise,
    )
    if (chunks := check.chunks(template)) > 1:
        entry.number, entry.mode = chunks, LONG
    else:
        entry.number = current_session.current().define(template)
    return entry


def _unsaid(info: OpInfo, args: tuple, positions: dict[str, list[int]]) -> tuple[int, ...]:
    """Operands that are written though the schema does not say so, and autograd is not to know: statistics of a batch."""
    if info.name != "aten.native_batch_norm.default" or not args[5]:
        return ()
    return tuple(i for name in ("running_mean", "running_var") for i in positions[name])


def _check_dtypes(info: OpInfo, args: tuple, kwargs: dict) -> None:
    """Raises what torch's kernels would for dtypes that its meta kernels let pass."""
    given = {**dict(zip(info.names, args, strict=False)), **kwargs}
    found = [(n, given[n].dtype) for n in _ONE_DTYPE.get(info.name, ()) if isinstance(given.get(n), torch.Tensor)]
    for name, dtype in found[1:]:
        if dtype != found[0][1]:
            first, other = dtype_name(found[0][1]), dtype_name(dtype)
            raise RuntimeError(f"expected {found[0][0]} and {name} to have the same dtype, but got: {first} != {other}")
    name, kinds = _INDICES.get(info.name, ("", ()))
    if name and given[name].dtype not in kinds and given[name].numel():
        want = " or ".join(dtype_name(k) for k in kinds)
        raise RuntimeError(f"{info.name}: expected {name} to be {want}, got {dtype_name(given[name].dtype)}")


def warm() -> None:
    """The first meta kernel of a process imports half of torch, for a second: called where there is time."""
    with torch.no_grad(), uninterrupted():
        torch.empty(1, device="meta").add(1)


def _run_meta(info: OpInfo, args: list, kwargs: dict) -> tuple[Any, bool]:
    """What the op gives on stand-ins, and whether that can be known without its values."""
    if info.name.startswith(_NO_META):
        return None, True
    if info.dynamic and _by_values(info, args, kwargs):
        return None, False
    try:
        with torch.no_grad(), uninterrupted():  # the first of them imports half of torch, which a Ctrl-C would break
            found = _META.get(info.name, info.func)(*args, **kwargs)
        if info.name in _SAVES_NOTHING and not args[5]:
            found = (found[0], *(f.new_empty(0) for f in found[1:]))
        if info.names[-1] == "output_mask" and len(args) == len(info.names):  # kernels give nothing where nothing is asked for
            found = tuple(f if asked else None for f, asked in zip(found, args[-1], strict=True))
        if info.name == "aten.multilabel_margin_loss_forward.default" and args[0].dim() < 2:  # its meta kernel keeps a dim
            found = (args[0].new_empty(()), found[1])
        return found, True
    except NotImplementedError:
        return None, False
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
        if "meta tensor" in str(error):
            return None, False
        raise refusals.as_on_cpu(info, args, kwargs, error) from None


def _by_values(info: OpInfo, args: list, kwargs: dict) -> bool:
    """Whether this call's shape depends on values: most that may do so say it by an argument instead."""
    if info.name == "aten.index.Tensor":  # by a mask: as many elements as it has ones
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if info.name == "aten.one_hot.default":
        return dict(zip(info.names, args, strict=False), **kwargs).get("num_classes", -1) < 0
    if info.name == "aten.repeat_interleave.Tensor":
        return kwargs.get("output_size") is None
    return True


def _flat(found: Any) -> list:
    if isinstance(found, (list, tuple)):
        return [x for f in found for x in _flat(f)]
    return [found]


def _changed_outs(info: OpInfo, kwargs: dict, stand_named: dict) -> list[Meta]:
    """New metas of out= tensors, if the op gave any of them another shape; else nothing."""
    changed, after = False, []
    for name in info.outs:
        for tensor, result in zip(_flat(kwargs[name]), _flat(stand_named[name]), strict=True):
            after.append(metas.of(result))
            given = tensor._ref.meta
            if given.shape != tuple(result.shape):
                changed = True
                if any(n > 1 and step == 0 for n, step in zip(given.shape, given.stride, strict=True)):
                    raise RuntimeError(
                        f"unsupported operation: more than one element of {name} of {info.name}, of shape {list(given.shape)}, "
                        "is the same memory; clone() it first"
                    )
    return after if changed else []


def _operands(info: OpInfo, args: tuple, kwargs: dict) -> dict[str, list[int]]:
    """Argument name -> numbers of its tensor operands."""
    count = 0
    found: dict[str, list[int]] = {}
    for name, a in [*zip(info.names, args, strict=False), *kwargs.items()]:
        tensors = [x for x in _flat(a) if isinstance(x, RemoteTensor)]
        found[name] = list(range(count, count + len(tensors)))
        count += len(tensors)
    return found


def _outs(info: OpInfo, entry: Entry, found: Any, known: bool, positions: dict[str, list[int]]) -> Iterator[Out] | list[Out]:
    """The template's outputs; fills the entry's metas, mode and result tree."""
    schema = info.func._schema
    outs: list[Out] = []
    results = []
    one = len(schema.returns) == 1
    values = [found] if one else (list(found) if found is not None else [None] * len(schema.returns))
    for declared, value in zip(schema.returns, values, strict=True):
        alias = declared.alias_info
        if not known and str(declared.type) != "Tensor":
            raise UnsupportedOp(f"{info.name}: the number of its results depends on values; compute it on x.cpu()")
        if alias is not None and alias.is_write:
            names = [n for n in info.writes if _alias_set(info, n) == alias.before_set] or info.writes
            results.append(_same(outs, positions[names[0]][0]))
            continue
        of = _base_operand(info, alias, positions) if alias is not None else -1
        results.append(_made(info, entry, outs, value, known, of))
    entry.result = results[0] if one else tuple(results)
    if not known:
        entry.mode = ASK
    elif one and entry.result == ("new", 0):
        entry.mode = ONE
    elif one and entry.result == ("arg", 0) and positions[info.names[0]] == [0]:
        entry.mode = FIRST
    return outs


def _alias_set(info: OpInfo, name: str) -> set:
    return info.func._schema.arguments[info.names.index(name)].alias_info.before_set


def _same(outs: list[Out], operand: int) -> tuple:
    outs.append(Out("same", None, operand))
    return ("arg", operand)


def _base_operand(info: OpInfo, alias: Any, positions: dict[str, list[int]]) -> int:
    """The tensor operand that a view output shares memory with."""
    for argument in info.func._schema.arguments:
        given = argument.alias_info
        if given is not None and not given.is_write and (not alias.before_set or given.before_set & alias.before_set):
            return positions[argument.name][0]
    return positions[info.names[0]][0]


def _made(info: OpInfo, entry: Entry, outs: list[Out], value: Any, known: bool, of: int) -> Any:
    """One declared return: a tensor, nothing, a list of tensors, or a number."""
    kind = "view" if of >= 0 else "new"
    if not known:
        outs.append(Out(kind, None, of))
        entry.metas.append(None)  # type: ignore[arg-type]
        return ("new", len(entry.metas) - 1)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise UnsupportedOp(f"{info.name} makes a {value.layout} tensor, and remote tensors are strided")
        meta = metas.of(value)
        outs.append(Out(kind, meta.spec, of))
        entry.metas.append(meta)
        return ("new", len(entry.metas) - 1)
    if isinstance(value, (list, tuple)):
        return [_made(info, entry, outs, v, known, of) for v in value]
    if value is None:
        outs.append(Out("none"))
    return ("const", value)


def is_remote(device: Any) -> bool:
    if device is None:
        return True
    found = torch.device(device)
    if found.index and found.type in Shown.types:
        raise RuntimeError(f"there is no {found}: all workers are one device, and signal groups say which of them does what")
    return found.type in Shown.types
