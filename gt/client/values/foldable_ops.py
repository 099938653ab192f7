"""Ops that this process may evaluate in place of a worker: pure, and with the same bits on every device.

These are ops on integers and truth values. Of small floats those belong to it that only move values, compare them, or round
once by IEEE 754: sums, differences, products. Random numbers do not, nor ties that devices break in their own way, nor anything
that a processor leaves undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gt.ir.ops import RANDOM
from gt.ir.spec import Spec
from gt.ir.template import Const, T, Template, V

MAX_BYTES = 1 << 20  # largest result: a larger one takes as long as a wait
MAX_COST = 4 * MAX_BYTES  # largest cost of one op, in bytes read and made
MAX_FLOAT_BYTES = 16 << 10  # largest tensor of floats: a table of a noise schedule, or a counter, but no data and no weights
FLOATS = frozenset({torch.float32, torch.float64})
_DTYPES = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64"})
_FLOAT_NAMES = frozenset({"float32", "float64"})
_POINTWISE = (
    "add sub rsub mul neg abs eq ne lt le gt ge logical_and logical_or logical_xor logical_not bitwise_and bitwise_or "
    "bitwise_xor bitwise_not maximum minimum clamp clamp_min clamp_max where masked_fill fill zero copy floor_divide remainder"
)
_REDUCTIONS = "all any sum prod amax amin cumsum count_nonzero max.default min.default"
_VIEWS = "view.default slice select expand permute t transpose unsqueeze squeeze unbind split split_with_sizes diagonal"
_COPIES = (
    "clone _to_copy cat stack repeat flip roll tril triu constant_pad_nd index_select gather index index_put "
    "arange zeros ones full scalar_tensor eye zeros_like ones_like full_like new_zeros new_ones new_full"
)
_FOLDED = frozenset(f"{_POINTWISE} {_REDUCTIONS} {_VIEWS} {_COPIES}".split())
# Those that are exact, or round once, for floats. Sums of several terms, and quotients, differ between devices
_FOLDED_FLOATS = frozenset(
    "add sub rsub mul neg abs eq ne lt le gt ge logical_and logical_or logical_xor logical_not where masked_fill fill zero "
    f"copy all any {_VIEWS} clone _to_copy cat stack repeat flip roll tril triu constant_pad_nd index_select gather zeros ones "
    "full scalar_tensor eye zeros_like ones_like full_like new_zeros new_ones new_full".split()
)
_SCALED = frozenset({"add", "sub", "rsub"})  # with `alpha` devices may round twice
_BLANK = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})  # any value at all
_OVERWRITES = frozenset({"fill_", "zero_", "copy_"})  # every element of their first operand
_FILLS = frozenset({"fill", "full", "full_like", "new_full", "masked_fill"})
_DIVISIONS = frozenset({"floor_divide", "remainder"})  # by zero and by -1, processors differ
_BUILDERS: dict[str, Any] = {
    "device": lambda value: torch.device("cpu"),
    "complex": lambda value: complex(*value),
}  # kind of a template's constant -> its Python value on the CPU


@dataclass(frozen=True, slots=True)
class Folding:
    """The evaluation of a template in this process.

    folds: it may be evaluated. cost: bytes that it reads and makes. blank: it makes uninitialised memory. overwrites: it gives
    every element of its first operand a value. fills: with a number. fractions: it takes any number. touched: operands that it
    writes, or makes views of.
    """

    folds: bool
    cost: int
    blank: bool
    overwrites: bool
    fills: bool
    fractions: bool
    touched: tuple[int, ...]


def folding(template: Template) -> Folding | None:
    """None for an op that neither is evaluated nor changes or names the memory of its operands."""
    views = tuple(out.of for out in template.outs if out.kind == "view")
    touched = (*template.writes, *views)
    name = template.op.split(".")[1]
    plain = name.removesuffix("_")
    blank, floats = name in _BLANK, _has_floats(template)
    folded = _FOLDED_FLOATS if floats else _FOLDED
    named = blank or plain in folded or f"{plain}.{template.op.split('.')[2]}" in folded
    if not named or not template.op.startswith("aten.") or not (_is_exact_float(template) if floats else _is_exact(template)):
        return Folding(False, 0, False, False, False, False, touched) if touched else None
    made = [out.spec for out in template.outs if out.kind == "new" and out.spec is not None]
    cost = sum(spec.nbytes for spec in (*template.ins, *made))
    folds = cost <= MAX_COST and all(spec.nbytes <= MAX_BYTES for spec in made)
    return Folding(folds, cost, blank, name in _OVERWRITES, plain in _FILLS, floats, touched)


def _specs(template: Template) -> list[Spec | None]:
    return [*template.ins, *(out.spec for out in template.outs if out.kind in ("new", "view"))]


def _has_floats(template: Template) -> bool:
    return any(spec is not None and spec.dtype in _FLOAT_NAMES for spec in _specs(template))


def _is_exact(template: Template) -> bool:
    if template.dynamic or template.op in RANDOM:
        return False
    return all(spec is not None and spec.dtype in _DTYPES for spec in _specs(template)) and not _has_float(
        (template.args, template.kwargs)
    )


def _is_exact_float(template: Template) -> bool:
    """True for an op with floats among its operands or results that has the same bits on every device."""
    specs = _specs(template)
    if template.dynamic or template.op in RANDOM or any(spec is None for spec in specs):
        return False
    if any(spec.dtype not in _FLOAT_NAMES | _DTYPES or spec.nbytes > MAX_FLOAT_BYTES for spec in specs if spec is not None):
        return False
    # Floats that become integers: processors differ for values that do not fit
    made = [out.spec for out in template.outs if out.kind in ("new", "view")] + [template.ins[n] for n in template.writes]
    if any(spec is not None and spec.dtype not in _FLOAT_NAMES and spec.dtype != "bool" for spec in made):
        return False
    plain = template.op.split(".")[1].removesuffix("_")
    return plain not in _SCALED or (len(template.args) <= 2 and not template.kwargs)


def _has_float(form: Any) -> bool:
    if isinstance(form, (list, tuple)):
        return any(map(_has_float, form))
    return isinstance(form, float) or (isinstance(form, Const) and form.kind == "complex")


def is_whole(value: Any, fills: bool) -> bool:
    """True for a number that is one integer in every dtype. torch.ones fills its memory with 1.0."""
    return type(value) is not float or (fills and value.is_integer() and 0 <= value <= 127)


def is_defined(template: Template, ins: Sequence[torch.Tensor], values: Sequence[Any]) -> bool:
    """False where devices may differ for these operands: divisors below one, several values for one element.

    Those also have it that an op reads what it writes through another view.
    """
    for place in template.writes:
        target = ins[place]
        memory = target.untyped_storage().data_ptr()
        for other in ins:
            # Such as x[1:].add_(x[:-1]): an element may be read before or after it is written
            if other.untyped_storage().data_ptr() == memory and not other.is_set_to(target):
                return False
    name = template.op.split(".")[1].removesuffix("_")
    if name in _DIVISIONS:
        divisors = [value for value in values if type(value) is int] if values else []
        return all(value > 0 for value in divisors) and all(bool((tensor > 0).all()) for tensor in ins[1:])
    if name == "index_put":
        accumulates = (len(template.args) > 3 and template.args[3] is True) or ("accumulate", True) in template.kwargs
        # Two different values for one index: devices choose one of them, in their own ways. Sums and a single value are sure
        return accumulates or ins[-1].numel() == 1
    return True


def execute(template: Template, ins: Sequence[torch.Tensor], values: Sequence[Any]) -> list[torch.Tensor]:
    """Carry out an op of ATen on the CPU; its new tensors and views, in order. Errors are torch's."""

    def fill(arg: Any) -> Any:
        if isinstance(arg, T):
            return ins[arg.index]
        if isinstance(arg, V):
            return values[arg.index]
        if isinstance(arg, Const):
            return _BUILDERS.get(arg.kind, _named)(arg.value)
        return [fill(item) for item in arg] if isinstance(arg, (list, tuple)) else arg

    _, base, overload = template.op.split(".")
    call = getattr(getattr(torch.ops.aten, base), overload)
    results = call(*map(fill, template.args), **{name: fill(value) for name, value in template.kwargs})
    outputs = list(results) if isinstance(results, (list, tuple)) else [results]
    kinds = [out.kind for out in template.outs]
    return [tensor for kind, tensor in zip(kinds, outputs, strict=False) if kind in ("new", "view")]


def _named(name: Any) -> Any:
    """The dtype, layout or memory format of torch with this name, which this client has put into a template."""
    return getattr(torch, str(name).removeprefix("torch."))
