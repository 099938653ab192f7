"""From an op's args tree to one Python function with its constants bound, and outputs as the client inferred them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from keyword import iskeyword
from typing import Any

import torch

from gt.ir.spec import DTYPES, Spec
from gt.ir.template import Const, T, V
from gt.worker.engine.base import Call

DTYPE: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
NAME = {dtype: name for name, dtype in DTYPE.items()}

# ---- outputs


def conform(out: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The output with the strides that the client inferred, on which later views rely; ValueError for another shape."""
    if tuple(out.shape) != spec.shape or out.dtype != DTYPE[spec.dtype]:
        raise ValueError(f"the result is {NAME[out.dtype]}{list(out.shape)}, want {spec.text()}")
    if all(n < 2 or a == b for n, a, b in zip(spec.shape, out.stride(), spec.stride, strict=True)) or not spec.numel:
        return out
    if any(n > 1 and step == 0 for n, step in zip(spec.shape, spec.stride, strict=True)):
        return out  # no memory of its own to lay out
    return torch.empty_strided(spec.shape, spec.stride, dtype=out.dtype, device=out.device).copy_(out)


def finish(out: Sequence[Any]) -> Spec | None:
    """The spec that a new output has to have; None for views and outputs whose shape depends on values."""
    return Spec.from_wire(out[1]) if out[0] == "new" and out[1] is not None else None


def _flatten(result: Any) -> Iterator[Any]:
    if isinstance(result, (list, tuple)):
        for part in result:
            yield from _flatten(part)
    else:
        yield result


def _checked(scope: dict[str, Any], stride: str, spec: Spec) -> Callable[[torch.Tensor], torch.Tensor]:
    """conform; remembers under the name `stride` which strides need no second look."""
    scope[stride] = None

    def check(out: torch.Tensor) -> torch.Tensor:
        result = conform(out, spec)
        if result is out:
            scope[stride] = out.stride()
        return result

    return check


# ---- calls


def function(
    op: Callable,
    args: list,
    kwargs: dict[str, Any],
    tensors: int,
    values: int,
    finish: list[tuple[int, Spec | None]],
    outs: int,
    constant: Callable[[Const], Any],
) -> Call:
    """(*tensors, *values) -> None, one output, or a tuple of those in `finish`. Made as source: a call is one frame."""
    bound: dict[str, Any] = {"op": op, "flatten": _flatten}
    holes = [f"t{i}" for i in range(tensors)] + [f"v{i}" for i in range(values)]

    def text(arg: Any) -> str:
        if isinstance(arg, (T, V)):
            hole = f"{'t' if isinstance(arg, T) else 'v'}{arg.index}"
            if hole not in holes:
                raise ValueError(f"argument {arg} is beyond {tensors} tensors and {values} values")
            return hole
        if isinstance(arg, list) and _has_hole(arg):
            return f"[{', '.join(map(text, arg))}]"
        name = f"c{len(bound)}"
        bound[name] = _constants(arg, constant)
        return name

    parts = [text(arg) for arg in args]
    for key, value in kwargs.items():
        if not key.isidentifier() or iskeyword(key):
            raise ValueError(f"{key!r} is no argument name")
        parts.append(f"{key}={text(value)}")
    random = getattr(op, "draws", False)  # GT's own: seed and counter come last
    parts += [f"seed=v{values - 2}", f"counter=v{values - 1}"] if random else []
    if not finish and parts == holes:
        return op
    lines = [f"r = op({', '.join(parts)})"]
    if finish and (len(finish) > 1 or outs > 1):
        lines.append("r = list(flatten(r))")
        lines += [f"r{n} = r[{at}]" for n, (at, _) in enumerate(finish)]
    elif finish:
        lines.append("r0 = r if type(r) is not list else r[0]")
    for n, (_, spec) in enumerate(finish):
        if spec is not None:
            bound[f"f{n}"] = _checked(bound, f"s{n}", spec)
            lines.append(f"if r{n}.stride() != s{n}: r{n} = f{n}(r{n})")
    lines.append("return " + (", ".join(f"r{n}" for n in range(len(finish))) or "None"))
    # Only names made here and identifiers checked above are in the source.
    exec(f"def call({', '.join(holes)}):\n    " + "\n    ".join(lines), bound)
    return bound["call"]


def _has_hole(arg: Any) -> bool:
    return isinstance(arg, (T, V)) or (isinstance(arg, list) and any(map(_has_hole, arg)))


def _constants(arg: Any, constant: Callable[[Const], Any]) -> Any:
    if isinstance(arg, Const):
        return constant(arg)
    return [_constants(a, constant) for a in arg] if isinstance(arg, list) else arg
