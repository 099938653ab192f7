"""What may be done to terms before they are added up: ops that are linear, on numbers that stay what they are."""

from __future__ import annotations

from itertools import product

from gt.dispatcher.sharding.base import Place, out_dtype
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.ir.layout import Partial

# Linear in all operands together, which have to be so many tensors: Partial in, Partial out
LINEAR = {"add": 2, "add_": 2, "sub": 2, "sub_": 2, "neg": 1, "neg_": 1, "clone": 1}
# Linear in the first operand when the other is a number, as it is or as a tensor of one
SCALED = frozenset({"mul", "mul_", "div", "div_"})
WIDER = {("float32", "float64"), *product(("bfloat16", "float16"), ("float32", "float64"))}
FEW = 1 << 18  # elements: terms of more are added up before they are made wider, since adding up takes what bytes take


def linear(known: OpSchema, places: list[Place]) -> bool:
    """Whether terms of the operands make terms of the result."""
    ins, made = known.template.ins, known.template.outs
    terms = places[:1] if known.name in SCALED else places
    if not terms or not all(isinstance(p, Partial) and p.op == "sum" for p in terms) or not of_one_kind(known, places):
        return False
    if known.name in SCALED:
        if known.named(2, "rounding_mode") is not None:
            return False
        numbers = len(places) == 2 and not any(spec.shape for spec in ins)  # a loss over its weight; others may be over 0
        return len(places) == 1 or (numbers and not isinstance(places[1], Partial))
    if known.name == "_to_copy":
        return made[0].spec is not None and (ins[0].dtype, made[0].spec.dtype) in WIDER and ins[0].numel <= FEW
    same = len({spec.shape for spec in ins}) == 1
    return known.name in LINEAR and same and len(places) == LINEAR[known.name]  # a number would be added once a worker


def counts_up(known: OpSchema, places: list[Place]) -> bool:
    """Whether a number of terms is added to one that all have, as losses are over micro-batches: one worker's is that, then."""
    terms = [isinstance(p, Partial) for p in places]
    sums = known.name in ("add", "sub") or (known.name in ("add_", "sub_") and terms[:1] == [True])
    alike = [(spec.shape, spec.dtype) for spec in known.template.ins] == [((), out_dtype(known))] * 2
    return sums and alike and any(terms) and all(p.op == "sum" for p in places if isinstance(p, Partial))


def of_one_kind(known: OpSchema, places: list[Place]) -> bool:
    """Whether terms stay what they are: those that become integers are each cut, integers that become wider wrap no more."""
    kinds = {out_dtype(known), *(s.dtype for s, p in zip(known.template.ins, places, strict=True) if isinstance(p, Partial))}
    return len(kinds) == 1 or not any("int" in kind or kind == "bool" for kind in kinds)
