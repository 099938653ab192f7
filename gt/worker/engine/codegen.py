"""Python source of an op from its argument tree, with constants bound. For every engine; knows no kind of tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

from gt.ir import arguments
from gt.ir.schema import TABLE, Schema
from gt.ir.spec import Spec
from gt.ir.template import Arg, Const, T, V, from_wire

Call = Callable[..., Any]  # (*tensors, *values) -> None, one tensor, or a tuple: one for each `new` or `view` output
# (globals of the function, name of the output's strides among them, its spec) -> tensor -> tensor with the spec's strides
Check = Callable[[dict[str, Any], str, Spec], Callable[[Any], Any]]
# (globals of the function, name of the view's shape among them, its spec) -> view -> None; ValueError for another shape
CheckView = Callable[[dict[str, Any], str, Spec], Callable[[Any], None]]


def finish(outs: Sequence[Sequence[Any]]) -> list[tuple[int, bool, Spec | None]]:
    """Outputs that get an id, as (place, True for a view, wanted spec). The spec is None if the shape depends on values."""
    kept = [(at, out) for at, out in enumerate(outs) if out[0] in ("new", "view")]
    return [(at, out[0] == "view", None if out[1] is None else Spec.from_wire(out[1])) for at, out in kept]


def fitting(payload: dict[str, Any]) -> tuple[Schema, list[Arg], dict[str, Arg]]:
    """The schema of an `op` definition, and its arguments. UnsupportedOp if the table lacks it, ValueError if they misfit."""
    args, kwargs = from_wire(list(payload["args"])), {name: from_wire(arg) for name, arg in payload["kwargs"].items()}
    return arguments.match(TABLE.find(payload["op"]), args, kwargs), args, kwargs


@dataclass(frozen=True, slots=True)
class Source:
    """An op as Python source.

    check: for outputs; check_view: for views with a shape that was not checked before.
    unless: the condition for `check`, on `{out}` and its `{stride}`; "" checks always.
    """

    op: Callable
    payload: dict[str, Any]
    constant: Callable[[Const], Any]
    check: Check
    check_view: CheckView
    unless: str = ""

    def function(self) -> Call:
        """(*tensors, *values) -> None, one output, or a tuple of outputs with an id. Generated code makes a call one frame."""
        payload, bound = self.payload, dict[str, Any]()
        tensors = [f"t{i}" for i in range(payload["tensors"])]
        values = [f"v{i}" for i in range(payload["values"])]
        outs = [f"r{n}" for n in range(len(finish(payload["outs"])))]
        if not outs and self._arguments(tensors, values, bound) == tensors + values:
            return self.op
        lines = [*self.statements(tensors, values, outs, bound), f"return {', '.join(outs) or None}"]
        # The source has only names made here and identifiers that were checked.
        exec(f"def call({', '.join(tensors + values)}):\n    " + "\n    ".join(lines), bound)
        return bound["call"]

    def statements(self, tensors: list[str], values: list[str], outs: list[str], bound: dict[str, Any]) -> list[str]:
        """Lines that execute the op on tensors and values of these names. bound: their globals, which are added to."""
        call = f"{bind(bound, self.op)}({', '.join(self._arguments(tensors, values, bound))})"
        ends = finish(self.payload["outs"])
        if not ends:
            return [call]
        if len(ends) > 1 or len(self.payload["outs"]) > 1:
            lines = [f"r = list({bind(bound, _flatten)}({call}))"]
            lines += [*(f"{out} = r[{at}]" for out, (at, *_) in zip(outs, ends, strict=True)), "del r"]
        else:
            lines = [f"{outs[0]} = {call}", f"if type({outs[0]}) is list: {outs[0]} = {outs[0]}[0]"]
        for out, (_, view, spec) in zip(outs, ends, strict=True):
            if spec is not None and view:
                shape = f"s{len(bound)}"
                lines.append(f"if {out}.shape != {shape}: {bind(bound, self.check_view(bound, shape, spec))}({out})")
            elif spec is not None:
                stride = f"s{len(bound)}"
                check = bind(bound, self.check(bound, stride, spec))
                guard = f"if {self.unless.format(out=out, stride=stride)}: " if self.unless else ""
                lines.append(f"{guard}{out} = {check}({out})")
            else:  # the checks above find None, as it has no shape
                lines.append(f"if {out} is None: {bind(bound, _refuse_none)}()")
        return lines

    def _arguments(self, tensors: list[str], values: list[str], bound: dict[str, Any]) -> list[str]:
        """Source of the op's arguments; constants are put into `bound`."""

        def text(arg: Any) -> str:
            if isinstance(arg, (T, V)):
                holes = tensors if isinstance(arg, T) else values
                if not 0 <= arg.index < len(holes):
                    raise ValueError(f"argument {arg} is beyond the {len(tensors)} tensors and {len(values)} values")
                return holes[arg.index]
            if isinstance(arg, list) and _has_hole(arg):
                return f"[{', '.join(map(text, arg))}]"
            return bind(bound, _constants(arg, self.constant))

        parts = [text(arg) for arg in from_wire(list(self.payload["args"]))]
        for key, value in self.payload["kwargs"].items():
            if not key.isidentifier() or iskeyword(key):
                raise ValueError(f"{key!r} is not an argument name")
            parts.append(f"{key}={text(from_wire(value))}")
        if getattr(self.op, "draws", False):  # GT's own: seed and counter come last
            parts += [f"seed={values[-2]}", f"counter={values[-1]}"]
        return parts


def bind(bound: dict[str, Any], value: Any) -> str:
    """Bind a value among these globals; its name."""
    name = f"c{len(bound)}"
    bound[name] = value
    return name


def _refuse_none() -> None:
    raise ValueError("the op gave no tensor for a result that the program wants: its arguments leave that result out")


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
