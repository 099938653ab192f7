"""Checks of a client's template, once when it is defined: form, limits, and agreement with the op's schema.

Shapes are not checked here. The dispatcher compares each op's operands with the template's, and workers compare results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gt.ir import arguments, ops, shapes
from gt.ir.schema import TABLE, OpTable, SessionOps
from gt.ir.template import T, Template, V, weight

MAX_TEMPLATE_PARTS = 16 << 10  # numbers and names of one template: the dispatcher serves nobody during its check
MAX_ALL_TEMPLATE_PARTS = 1 << 21  # of all templates of a session: the client begins its table again before
UPLOAD = "gt.upload.default"
LIGHT_OPERANDS = 192  # operands and outputs up to which a template never has more than MAX_TEMPLATE_PARTS
OUT_KINDS = frozenset({"new", "view", "same", "none"})


def template(row: Any, table: SessionOps | OpTable = TABLE) -> Template:
    """The template of a wire form, by a session's ops.

    ValueError names the part that is wrong; UnsupportedOp names an op that no worker has.
    """
    if type(row) is not list or len(row) != 9:
        raise ValueError(f"{row!r:.80} is not a template, want a list of 9 parts")
    # 1. Size and types of the parts, before anything walks through them.
    if weight(row, MAX_TEMPLATE_PARTS) > MAX_TEMPLATE_PARTS:
        raise ValueError(f"a template has at most {MAX_TEMPLATE_PARTS} parts, and this one has more")
    op, args, kwargs, ins, values, outs, writes, *flags = row
    if type(op) is not str:
        raise ValueError(f"op is {op!r:.80}, want a name")
    schemas = table.find(op)
    for name, part, kind in (("args", args, list), ("kwargs", kwargs, dict), ("ins", ins, list), ("outs", outs, list)):
        if type(part) is not kind:
            raise ValueError(f"{name} is a {type(part).__name__}, want a {kind.__name__}")
    if type(values) is not int or not 0 <= values <= MAX_TEMPLATE_PARTS or any(type(flag) is not bool for flag in flags):
        raise ValueError(f"values is {values!r:.40} and flags {flags!r:.40}, want a whole number from 0 up and two booleans")
    if type(writes) is not list or any(type(w) is not int or not 0 <= w < len(ins) for w in writes):
        raise ValueError(f"writes is {writes!r:.80}, want numbers of operands below {len(ins)}")

    # 2. The template itself: first alone, then against the op's schema, then rules of shapes that kernels trust.
    parsed = Template.from_wire(row)
    _outs(parsed)
    named = dict(parsed.kwargs)
    schema = arguments.match(schemas, parsed.args, named)
    arguments.results(schema, parsed.args, named, parsed.outs, parsed.writes)
    _numbered(parsed)
    shapes.check(schema, parsed.args, named, parsed.ins)
    # An upload's value is a frame index, which no argument of the schema takes.
    if op == UPLOAD and (ins or values != 1 or [out.kind for out in parsed.outs] != ["new"] or parsed.dynamic):
        raise ValueError(f"{op} takes one frame index and makes one tensor")
    return parsed


def _numbered(made: Template) -> None:
    """ValueError unless operands are numbered in the order of the arguments, each once: rules rely on the numbers."""
    # The next number of each kind of hole.
    due = {T: 0, V: 0}
    for hole in _holes([*made.args, *(value for _, value in made.kwargs)]):
        kind = type(hole)
        if hole.index != due[kind]:
            count = len(made.ins) if kind is T else made.values
            raise ValueError(f"arguments of {made.op} have {arguments.shown(hole)} of {count}, want number {due[kind]}")
        due[kind] += 1
    seeds = 2 if made.op in ops.RANDOM else 0
    if due[T] != len(made.ins):
        raise ValueError(f"{made.op} has {len(made.ins)} tensors, its arguments take {due[T]}")
    if due[V] + seeds != made.values and made.op != UPLOAD:
        raise ValueError(f"{made.op} has {made.values} values, its arguments take {due[V]}, seed and counter {seeds}")
    if not made.ins and not made.outs:
        raise ValueError(f"{made.op} has no tensors and no outputs, want at least one of them")


def chunks(made: Template) -> int:
    """Number of calls, of fewer tensors each, into which an op is divided: 1 for all but long lists."""
    if len(made.ins) + len(made.outs) <= LIGHT_OPERANDS:
        return 1
    parts = weight(made.wire())
    return 1 if parts <= MAX_TEMPLATE_PARTS else 2 * parts // MAX_TEMPLATE_PARTS + 1


def _outs(made: Template) -> None:
    for out in made.outs:
        if out.kind not in OUT_KINDS or type(out.of) is not int:
            raise ValueError(
                f"outs has kind {out.kind!r:.40} and operand {out.of!r:.40}, want one of {', '.join(OUT_KINDS)} and a number"
            )
        if out.kind in ("view", "same") and not 0 <= out.of < len(made.ins):
            raise ValueError(f"outs has a {out.kind} of operand {out.of}, want one of {len(made.ins)} operands")
        if out.kind == "view" and len(made.ins) != 1:
            raise ValueError(f"outs has a view of an op with {len(made.ins)} operands, want 1")
        if out.kind in ("new", "view") and out.spec is None and not made.dynamic:
            raise ValueError(f"outs has a {out.kind} tensor without a spec")


def _holes(items: list) -> Iterator[T | V]:
    for item in items:
        if isinstance(item, (T, V)):
            yield item
        elif isinstance(item, list):
            yield from _holes(item)
