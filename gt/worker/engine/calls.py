"""From an op's args tree to one Python function with its constants bound. For every engine; knows no kind of tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from keyword import iskeyword
from typing import Any

from gt.ir.spec import Spec
from gt.ir.template import Const, T, V, from_wire
from gt.worker.engine.base import Call

# (names of the made function, name of this output's strides among them, its spec) -> tensor -> the tensor as it has to be
Check = Callable[[dict[str, Any], str, Spec], Callable[[Any], Any]]


def finish(outs: Sequence[Sequence[Any]]) -> list[tuple[int, Spec | None]]:
    """Places of the outputs that get an id, and the spec that a new one has to have.

    None for views and outputs whose shape depends on values.
    """
    kept = [(at, out) for at, out in enumerate(outs) if out[0] in ("new", "view")]
    return [(at, Spec.from_wire(out[1]) if out[0] == "new" and out[1] is not None else None) for at, out in kept]


def function(op: Callable, payload: dict[str, Any], constant: Callable[[Const], Any], check: Check, unless: str = "") -> Call:
    """(*tensors, *values) -> None, one output, or a tuple of those that get an id. Made as source: a call is one frame.

    unless: condition to make the check under, of `{out}` and its `{stride}`; none checks always.
    """
    tensors, values, outs = payload["tensors"], payload["values"], payload["outs"]
    bound: dict[str, Any] = {"op": op, "flatten": _flatten}
    holes = [f"t{i}" for i in range(tensors)] + [f"v{i}" for i in range(values)]
    parts = _arguments(payload, holes, bound, constant)
    if getattr(op, "draws", False):  # GT's own: seed and counter come last
        parts += [f"seed=v{values - 2}", f"counter=v{values - 1}"]
    ends = finish(outs)
    if not ends and parts == holes:
        return op
    lines = [f"r = op({', '.join(parts)})"]
    if ends and (len(ends) > 1 or len(outs) > 1):
        lines.append("r = list(flatten(r))")
        lines += [f"r{n} = r[{at}]" for n, (at, _) in enumerate(ends)]
    elif ends:
        lines.append("r0 = r if type(r) is not list else r[0]")
    for n, (_, spec) in enumerate(ends):
        if spec is not None:
            bound[f"f{n}"] = check(bound, f"s{n}", spec)
            guard = f"if {unless.format(out=f'r{n}', stride=f's{n}')}: " if unless else ""
            lines.append(f"{guard}r{n} = f{n}(r{n})")
    lines.append("return " + (", ".join(f"r{n}" for n in range(len(ends))) or "None"))
    # Only names made here and identifiers checked above are in the source.
    exec(f"def call({', '.join(holes)}):\n    " + "\n    ".join(lines), bound)
    return bound["call"]


def _arguments(payload: dict[str, Any], holes: list[str], bound: dict[str, Any], constant: Callable[[Const], Any]) -> list[str]:
    """The source of the op's arguments; constants are put into `bound`."""

    def text(arg: Any) -> str:
        if isinstance(arg, (T, V)):
            hole = f"{'t' if isinstance(arg, T) else 'v'}{arg.index}"
            if hole not in holes:
                raise ValueError(f"argument {arg} is beyond the {len(holes)} tensors and values")
            return hole
        if isinstance(arg, list) and _has_hole(arg):
            return f"[{', '.join(map(text, arg))}]"
        name = f"c{len(bound)}"
        bound[name] = _constants(arg, constant)
        return name

    parts = [text(arg) for arg in from_wire(list(payload["args"]))]
    for key, value in payload["kwargs"].items():
        if not key.isidentifier() or iskeyword(key):
            raise ValueError(f"{key!r} is no argument name")
        parts.append(f"{key}={text(from_wire(value))}")
    return parts


def _flatten(result: Any) -> Iterator[Any]:
    if isinstance(result, (list, tuple)):
        for part in result:
            yield from _flatten(part)
    else:
        yield result


def _has_hole(arg: Any) -> bool:
    return isinstance(arg, (T, V)) or (isinstance(arg, list) and any(map(_has_hole, arg)))


def _constants(arg: Any, constant: Callable[[Const], Any]) -> Any:
    if isinstance(arg, Const):
        return constant(arg)
    return [_constants(a, constant) for a in arg] if isinstance(arg, list) else arg
