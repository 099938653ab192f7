"""Templates are checked once, when a client defines them: form, bounds, and arguments and outputs against the op's schema.

Shapes are taken as the template says them. Operands of each op are compared with them, and workers compare results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gt.ir import arguments, ops, shapes
from gt.ir.schema import TABLE
from gt.ir.template import T, Template, V, weight

HEAVIEST = 16 << 10  # numbers and names of one template: everybody waits while it is looked at
UPLOAD = "gt.upload.default"
LIGHT = 192  # operands and outputs of a template that is never heavier
OUT_KINDS = frozenset({"new", "view", "same", "none"})


def template(row: Any) -> Template:
    """The template of a wire form; ValueError says which of its parts is wrong, UnsupportedOp that no worker has its op."""
    if type(row) is not list or len(row) != 9:
        raise ValueError(f"{row!r:.80} has not the 9 parts of a template")
    if weight(row, HEAVIEST) > HEAVIEST:
        raise ValueError(f"it has more than {HEAVIEST} parts")
    op, args, kwargs, ins, values, outs, writes, *flags = row
    if type(op) is not str:
        raise ValueError(f"op is {op!r:.80}, want a name")
    schemas = TABLE.find(op)
    for name, part, kind in (("args", args, list), ("kwargs", kwargs, dict), ("ins", ins, list), ("outs", outs, list)):
        if type(part) is not kind:
            raise ValueError(f"{name} is a {type(part).__name__}, want a {kind.__name__}")
    if type(values) is not int or not 0 <= values <= HEAVIEST or any(type(flag) is not bool for flag in flags):
        raise ValueError(f"values {values!r:.40} or flags {flags!r:.40} are not a count and two truths")
    if type(writes) is not list or any(type(w) is not int or not 0 <= w < len(ins) for w in writes):
        raise ValueError(f"writes {writes!r:.80} do not name operands of {len(ins)}")
    made = Template.from_wire(row)
    _outs(made)
    named = dict(made.kwargs)
    schema = arguments.bind(schemas, made.args, named)
    arguments.results(schema, made.args, named, made.outs, made.writes)
    _numbered(made)
    shapes.check(schema, made.args, named, made.ins)
    if op == UPLOAD and (ins or values != 1 or [out.kind for out in made.outs] != ["new"] or made.dynamic):
        raise ValueError(f"{op} takes one frame index and makes one tensor")
    return made


def _numbered(made: Template) -> None:
    """Operands are numbered as they come in arguments, each once: rules know them by their numbers."""
    due = {T: 0, V: 0}
    for hole in _holes([*made.args, *(value for _, value in made.kwargs)]):
        kind = type(hole)
        if hole.index != due[kind]:
            count = len(made.ins) if kind is T else made.values
            raise ValueError(f"{arguments.shown(hole)} of {count} comes in {made.op} where number {due[kind]} is due")
        due[kind] += 1
    seeds = 2 if made.op in ops.RANDOM else 0
    if due[T] != len(made.ins):
        raise ValueError(f"{made.op} has {len(made.ins)} tensors, its arguments take {due[T]}")
    if due[V] + seeds != made.values and made.op != UPLOAD:
        raise ValueError(f"{made.op} has {made.values} values, its arguments take {due[V]}, seed and counter {seeds}")
    if not made.ins and not made.outs:
        raise ValueError(f"{made.op} has neither tensors nor outputs: there is nothing to do")


def chunks(made: Template) -> int:
    """In how many calls, of fewer tensors each, an op has to be done; 1 for all but long lists."""
    if len(made.ins) + len(made.outs) <= LIGHT:
        return 1
    parts = weight(made.wire())
    return 1 if parts <= HEAVIEST else 2 * parts // HEAVIEST + 1


def _outs(made: Template) -> None:
    for out in made.outs:
        if out.kind not in OUT_KINDS or type(out.of) is not int:
            raise ValueError(f"outs has the kind {out.kind!r:.40}, of {out.of!r:.40}")
        if out.kind in ("view", "same") and not 0 <= out.of < len(made.ins):
            raise ValueError(f"outs has a {out.kind} of operand {out.of} of {len(made.ins)}")
        if out.kind == "view" and len(made.ins) != 1:
            raise ValueError(f"outs has a view, which is of one operand, not of one of {len(made.ins)}")
        if out.kind in ("new", "view") and out.spec is None and not made.dynamic:
            raise ValueError(f"outs has a {out.kind} tensor without a spec")


def _holes(items: list) -> Iterator[T | V]:
    for item in items:
        if isinstance(item, (T, V)):
            yield item
        elif isinstance(item, list):
            yield from _holes(item)
