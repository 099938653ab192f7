"""Ops on partial tensors before they are reduced: linear ops, in dtypes that keep the sum exact."""

from __future__ import annotations

from itertools import product

from gt.dispatcher.sharding.base import Place, out_dtype
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.ir.layout import Partial

# op -> number of tensors in which together it is linear: Partial in, Partial out
LINEAR = {"add": 2, "add_": 2, "sub": 2, "sub_": 2, "neg": 1, "neg_": 1, "clone": 1, "gt.lend": 1}
# Linear in the first operand if the other is a number or a tensor without dims
SCALED = frozenset({"mul", "mul_", "div", "div_"})
WIDER = {("float32", "float64"), *product(("bfloat16", "float16"), ("float32", "float64"))}
WIDEN_ELEMENTS = 1 << 18  # larger partial tensors are reduced before a cast to a wider dtype, which would cost bytes


def linear(known: OpSchema, places: list[Place]) -> bool:
    """True if the op on partial operands gives a partial result."""
    # sum(f(t_i)) = f(sum(t_i)) has to hold. So f is linear in all operands that are terms, and no other operand is added: it
    # would count once a worker.
    ins, outs = known.template.ins, known.template.outs
    terms = places[:1] if known.name in SCALED else places
    if not terms or not all(isinstance(p, Partial) and p.op == "sum" for p in terms) or not same_dtype_kind(known, places):
        return False
    if known.name in SCALED:
        if known.named(2, "rounding_mode") is not None:
            return False
        numbers = len(places) == 2 and not any(spec.shape for spec in ins)  # a loss / its weight; other divisors may be 0
        return len(places) == 1 or (numbers and not isinstance(places[1], Partial))
    if known.name == "_to_copy":
        return outs[0].spec is not None and (ins[0].dtype, outs[0].spec.dtype) in WIDER and ins[0].numel <= WIDEN_ELEMENTS
    same = len({spec.shape for spec in ins}) == 1
    return known.name in LINEAR and same and len(places) == LINEAR[known.name]  # not replicated: added once a worker


def casts_gradient(known: OpSchema) -> bool:
    """True for a cast from a dtype of mixed precision to fp32, and for a product with a number on workers."""
    ins, outs = known.template.ins, known.template.outs
    if known.name == "_to_copy":
        return outs[0].spec is not None and (ins[0].dtype, outs[0].spec.dtype) in WIDER
    return known.name == "mul" and len(ins) == 2 and not ins[1].shape and ins[0].dtype == ins[1].dtype == "float32"


def adds_replicated_scalar(known: OpSchema, places: list[Place]) -> bool:
    """True for partial + replicated scalar, as losses over micro-batches are summed: one worker keeps the replicated one."""
    terms = [isinstance(p, Partial) for p in places]
    sums = known.name in ("add", "sub") or (known.name in ("add_", "sub_") and terms[:1] == [True])
    alike = [(spec.shape, spec.dtype) for spec in known.template.ins] == [((), out_dtype(known))] * 2
    return sums and alike and any(terms) and all(p.op == "sum" for p in places if isinstance(p, Partial))


def same_dtype_kind(known: OpSchema, places: list[Place]) -> bool:
    """True if a cast commutes with the sum. Floats to integers truncate each term; wider integers no longer wrap."""
    kinds = {out_dtype(known), *(s.dtype for s, p in zip(known.template.ins, places, strict=True) if isinstance(p, Partial))}
    return len(kinds) == 1 or not any("int" in kind or kind == "bool" for kind in kinds)
