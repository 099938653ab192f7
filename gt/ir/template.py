"""Template: an op with its constants. The client sends it once and names it by a number afterwards.

Tensors and scalars are holes; everything else (dims, sizes, dtypes, flags) is a constant. The args tree has global sizes in
the dispatcher, and local sizes on workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gt.ir.spec import DTYPES, Spec


@dataclass(frozen=True, slots=True)
class T:
    """Hole for the index-th tensor operand."""

    index: int


@dataclass(frozen=True, slots=True)
class V:
    """Hole for the index-th scalar operand (int, float, bool)."""

    index: int


@dataclass(frozen=True, slots=True)
class Const:
    """A constant of a torch type: kind is dtype, memory_format, layout, device (the worker's own) or complex."""

    kind: str
    value: Any = None


DEVICE = Const("device", 0)
LAYOUTS = ("strided",)
MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
KINDS = ("dtype", "memory_format", "layout", "device", "complex")
# kind -> test of a value
_KNOWN: dict[str, Callable[[Any], bool]] = {
    "dtype": lambda value: type(value) is str and value in DTYPES,
    "memory_format": lambda value: type(value) is str and value in MEMORY_FORMATS,
    "layout": lambda value: type(value) is str and value in LAYOUTS,
    "device": lambda value: type(value) is int and value == DEVICE.value,
    "complex": lambda value: (
        type(value) in (list, tuple) and len(value) == 2 and all(type(part) in (int, float) for part in value)
    ),
}
Arg = Any  # None, bool, int, float, str, T, V, Const, or a list of Arg


def to_wire(arg: Arg) -> Any:
    """The msgpack form: holes and constants are maps with one key, sequences are lists."""
    if isinstance(arg, T):
        return {"t": arg.index}
    if isinstance(arg, V):
        return {"v": arg.index}
    if isinstance(arg, Const):
        return {arg.kind: arg.value}
    if isinstance(arg, (list, tuple)):
        return [to_wire(a) for a in arg]
    return arg


_PLAIN = frozenset({int, float, bool, type(None)})


def weight(form: Any, enough: int = 1 << 62) -> int:
    """Number of numbers and names in a wire form; long texts count for more. Counting stops above `enough`."""
    # Without recursion: the form is not checked yet, and may be nested as deep as msgpack allows.
    count, below = 0, [form]
    while below and count <= enough:
        item = below.pop()
        if isinstance(item, dict):
            count += 2 * len(item)
            below.extend(item.values())
        elif isinstance(item, (list, tuple)):
            count += 1
            # A program has some hundred thousand numbers: a list of numbers is counted by its length.
            if _PLAIN.issuperset(map(type, item)):
                count += len(item)
            else:
                below.extend(item)
        else:
            count += 1 + (len(item) >> 3 if isinstance(item, (str, bytes)) else 0)
    return count


def from_wire(form: Any) -> Arg:
    """Inverse of to_wire; ValueError names the part that is no argument."""
    if isinstance(form, dict):
        if len(form) != 1:
            raise ValueError(f"argument {form!r} is not a map of one key, want a hole or a constant")
        ((kind, value),) = form.items()
        if kind in ("t", "v"):
            if type(value) is not int or value < 0:
                raise ValueError(f"hole {form!r} has no index")
            return T(value) if kind == "t" else V(value)
        if kind not in KINDS:
            raise ValueError(f"unknown constant kind {kind!r}")
        if not _KNOWN[kind](value):
            raise ValueError(f"unknown {kind} {value!r:.40}")
        return Const(kind, tuple(value) if kind == "complex" else value)
    if isinstance(form, list):
        return [from_wire(f) for f in form]
    if form is None or isinstance(form, (bool, int, float, str)):
        return form
    raise ValueError(f"argument {form!r:.40} has type {type(form).__name__}, which no argument has")


@dataclass(slots=True)
class Chosen:
    """Selects some indices of a list op's lists, which have `count` holes each.

    ins, values: operands of the whole op that the selection reads, in the order of its holes.
    """

    indices: Sequence[int]
    count: int
    ins: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)

    def __call__(self, arg: Arg) -> Arg:
        if isinstance(arg, T):
            self.ins.append(arg.index)
            return T(len(self.ins) - 1)
        if isinstance(arg, V):
            self.values.append(arg.index)
            return V(len(self.values) - 1)
        if isinstance(arg, (list, tuple)):
            return [self(item) for item in ([arg[i] for i in self.indices] if self.cuts(arg) else arg)]
        return arg

    def cuts(self, arg: Arg) -> bool:
        """True for a list with an item at each index."""
        return isinstance(arg, (list, tuple)) and len(arg) == self.count and all(isinstance(i, (T, V)) for i in arg)


@dataclass(frozen=True, slots=True)
class Out:
    """One flat output. kind: `new` memory, `view` of tensor operand `of`, `same` tensor as operand `of`, or `none`."""

    kind: str
    spec: Spec | None = None
    of: int = -1


# Example, torch.add(x, y, alpha=2) on f32[8] where the program changes alpha:
#   op "aten.add.Tensor", args (T(0), T(1)), kwargs (("alpha", V(0)),)
#   ins (f32[8], f32[8]), values 1, outs (Out("new", f32[8]),)
# A call of it in a stream is [number, origin, id of x, id of y, 2, id of the result].
@dataclass(frozen=True, eq=False)
class Template:
    """op is `aten.mm.default`; ins are the global specs of the tensor operands; values counts the scalar operands.

    writes: tensor operands changed in place. dynamic: output specs depend on values, so `outs` have no spec and the
    client asks. pointwise: torch tags the op so. A random op (ir.ops.RANDOM) has two more scalar operands than its args
    have holes: seed and op counter, last.
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    ins: tuple[Spec, ...]
    values: int
    outs: tuple[Out, ...]
    writes: tuple[int, ...] = ()
    dynamic: bool = False
    pointwise: bool = False

    @property
    def results(self) -> int:
        """Number of outputs with a new tensor id (kinds new and view)."""
        return sum(out.kind in ("new", "view") for out in self.outs)

    def wire(self) -> list:
        return [
            self.op,
            to_wire(self.args),
            {k: to_wire(v) for k, v in self.kwargs},
            [s.wire() for s in self.ins],
            self.values,
            [[o.kind, o.spec.wire() if o.spec else None, o.of] for o in self.outs],
            list(self.writes),
            self.dynamic,
            self.pointwise,
        ]

    @classmethod
    def from_wire(cls, row: list) -> Template:
        op, args, kwargs, ins, values, outs, writes, dynamic, pointwise = row
        return cls(
            op,
            tuple(from_wire(args)),
            tuple((k, from_wire(v)) for k, v in kwargs.items()),
            tuple(Spec.from_wire(s) for s in ins),
            values,
            tuple(Out(kind, Spec.from_wire(spec) if spec else None, of) for kind, spec, of in outs),
            tuple(writes),
            dynamic,
            pointwise,
        )
