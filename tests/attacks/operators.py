"""Every op with wild arguments of the right types: schemas from the product's table, or from torch where there is none."""

from __future__ import annotations

import importlib
import random
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from gt.ir.ops import RANDOM
from gt.ir.spec import DTYPES, Spec, contiguous

_TYPE = re.compile(r"(?:Optional\[)?(List\[)?(Optional\[)?(\w+)\]*")
JIT = {"number": "Scalar", "SymInt": "int"}
KNOWN = (
    "Tensor", "Scalar", "int", "float", "bool", "str", "ScalarType", "Layout", "MemoryFormat", "Device", "Generator",
    "complex",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A type of an argument or a result."""

    base: str
    list: bool = False
    optional: bool = False
    gaps: bool = False
    alias: bool = False
    written: bool = False


@dataclass(frozen=True)
class Op:
    name: str
    positional: tuple[tuple[str, Kind], ...]
    named: tuple[tuple[str, Kind], ...]
    returns: tuple[Kind, ...]


@cache
def schemas() -> dict[str, Op]:
    """The ops to try, by name."""
    try:
        table = importlib.import_module("gt.ir.schema").TABLE
    except ImportError:
        return _of_torch()
    found = {}
    for name in table:
        for one in table.find(name):
            rows = [(a.name, _of_table(a.type), a.by_name) for a in one.arguments]
            returns = tuple(_of_table(value) for value in one.returns)
            found[name] = _op(name, rows, returns)
    return found


def _op(name: str, rows: list[tuple[str, Kind, bool]], returns: tuple[Kind, ...]) -> Op:
    positional = tuple((n, kind) for n, kind, by_name in rows if not by_name)
    return Op(name, positional, tuple((n, kind) for n, kind, by_name in rows if by_name), returns)


def _of_table(value: Any) -> Kind:
    return Kind(value.base, value.list, value.optional, value.gaps, bool(value.alias), value.written)


def _of_torch() -> dict[str, Op]:
    """All of torch's ATen schemas whose types can be sent."""
    import torch

    found = {}
    for schema in torch._C._jit_get_all_schemas():
        if not schema.name.startswith("aten::"):
            continue
        name = f"aten.{schema.name[6:]}.{schema.overload_name or 'default'}"
        try:
            rows = [(a.name, _of_jit(a), a.kwarg_only) for a in schema.arguments]
            found[name] = _op(name, rows, tuple(_of_jit(r) for r in schema.returns))
        except ValueError:
            continue
    return found


def _of_jit(argument: Any) -> Kind:
    text = str(argument.real_type)
    match = _TYPE.fullmatch(text)
    base = JIT.get(match[3], match[3]) if match else ""
    if match is None or base not in KNOWN:
        raise ValueError(text)
    info = argument.alias_info
    written = bool(info and info.is_write)
    return Kind(base, bool(match[1]), text.startswith("Optional["), bool(match[2]), info is not None, written)


# ---- operands that a session uploads first

FORMS: list[tuple[tuple[int, ...], str]] = [
    ((4, 4), "float32"), ((4,), "float32"), ((), "float32"), ((2, 3, 8, 8), "float32"), ((16,), "float32"), ((0,), "float32"),
    ((1, 4, 4), "float32"), ((2, 4, 4), "float64"), ((4, 4), "bfloat16"), ((4, 4), "float16"), ((4, 4), "complex64"),
    ((4,), "int64"), ((4, 4), "int64"), ((), "int64"), ((3,), "int64"), ((4,), "int32"), ((4, 4), "bool"), ((16,), "uint8"),
    ((4, 4), "int8"), ((3, 3, 3, 3), "float32"), ((2, 3, 4, 4, 4), "float32"),
]  # fmt: skip
# Views of them, which reach the same memory more than once: (place in FORMS, shape, stride, offset)
EXPANDED: list[tuple[int, tuple[int, ...], tuple[int, ...], int]] = [
    (2, (4, 4), (0, 0), 0), (1, (4, 4), (0, 1), 0), (1, (4, 4), (1, 0), 0), (0, (2, 4, 4), (0, 4, 1), 0),
    (2, (2, 3, 8, 8), (0, 0, 0, 0), 0), (19, (2, 3, 3, 3), (0, 9, 3, 1), 54), (4, (5, 4), (2, 1), 1), (2, (1 << 16,), (0,), 0),
    (0, (4, 0, 4), (0, 0, 0), 15), (7, (2, 4, 4), (0, 4, 0), 16), (8, (2, 4, 4), (0, 4, 1), 0), (10, (4, 4), (0, 1), 0),
    (11, (4, 4), (0, 1), 0), (14, (4,), (0,), 1), (11, (16,), (0,), 3), (16, (4, 4), (0, 0), 0),
    (20, (2, 3, 4, 4, 4), (0, 0, 0, 0, 0), 9),
]  # fmt: skip
EVIL = {13: [1 << 40], 14: [1 << 62, -(1 << 63), 7]}  # of integers that look like indices and are none


def pool(rng: random.Random) -> list[tuple[list, bytes]]:
    """(spec, bytes) of each operand."""
    made = []
    for n, (shape, dtype) in enumerate(FORMS):
        form = contiguous(shape, dtype)
        if dtype == "int64":
            values = EVIL.get(n) or [rng.randrange(4) for _ in range(form.numel)]
            data = np.array(values, np.int64).tobytes()
        elif dtype in ("float32", "float64"):
            data = np.array([rng.choice((0.0, 1.0, -2.0, 0.5)) for _ in range(form.numel)], dtype).tobytes()
        else:
            data = bytes(rng.choice((0, 1)) for _ in range(form.nbytes))
        made.append((form.wire(), data))
    return made


def expanded() -> list[list]:
    """Specs of the views in EXPANDED."""
    return [Spec(shape, stride, offset, FORMS[place][1]).wire() for place, shape, stride, offset in EXPANDED]


# ---- arguments

INTS = [-1, 0, 1, 2, 3, 4, 7, 16, 100, 1 << 16, 1 << 24, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63), -2]
FLOATS = [0.0, 1.0, 0.5, -1.0, 2.0, 1e-30, 1e38, 1e308, float("inf"), float("nan")]
TEXTS = [
    "", "none", "mean", "sum", "linear", "reduced", "ij", "gelu", "tanh", "constant", "reflect", "floor", "a,b->ab",
    "x" * 9999,
]  # fmt: skip
SIZES = [
    [], [0], [1], [2], [4], [16], [4, 4], [2, 2], [1, 1], [0, 1], [-1], [65536], [1 << 20], [1 << 40], [1 << 62, 4],
    [2, 3, 8, 8],
]  # fmt: skip
SIZES += [[1] * 30, [2] * 70, [1, 1, 1], [3, 3], [1 << 31], [-(1 << 63)], [4, -4], [1 << 16, 1 << 16]]


class Call:
    """An op's arguments as a template's: filled by `of`."""

    def __init__(self, rng: random.Random, op: Op, operands: list[list], canary: str) -> None:
        self.rng, self.operands, self.canary = rng, operands, canary
        self.ins: list[int] = []  # places in the pool
        self.values: list[Any] = []
        self.writes: list[int] = []
        self.wild = rng.choice((0.02, 0.1, 0.3))
        self.base = rng.choice([n for n, form in enumerate(operands) if form[3] == "float32"])
        self.last: list[int] = []  # sizes, so that strides can be as many
        self.args = [self.of(kind, name) for name, kind in op.positional]
        self.kwargs = {name: self.of(kind, name) for name, kind in op.named if not kind.optional or rng.random() < 0.5}
        if op.name in RANDOM:
            self.values += [7, rng.randrange(100)]
        self.outs = self._outs(op)

    def of(self, kind: Kind, name: str) -> Any:
        rng = self.rng
        if kind.optional and rng.random() < 0.4:
            return None
        if not kind.list:
            return self.one(kind)
        if kind.base == "int":
            if "stride" in name and rng.random() < 0.7:
                return [rng.choice((1, 1, 1, 0, 4, 100)) for _ in self.last]
            self.last = self.sizes()
            return self.last
        count = rng.choice((0, 1, 2, 2, 3, 4))
        return [None if kind.gaps and rng.random() < 0.3 else self.one(kind) for _ in range(count)]

    def sizes(self) -> list[int]:
        rng = self.rng
        if rng.random() < self.wild:
            return rng.choice(SIZES)
        if rng.random() < 0.5:
            return list(self.operands[self.base][0])
        return [rng.choice((0, 1, 1, 2, 3, 4)) for _ in range(rng.randrange(5))]

    def one(self, kind: Kind) -> Any:
        rng, wild = self.rng, self.rng.random() < self.wild
        if kind.base == "Tensor":
            return self.tensor(kind)
        if kind.base == "int":
            return rng.choice(INTS) if wild else rng.choice((-1, 0, 0, 1, 1, 2, 3, 4))
        if kind.base == "float":
            return rng.choice(FLOATS) if wild else rng.choice((0.0, 0.1, 0.5, 1.0))
        if kind.base == "bool":
            return rng.random() < 0.5
        if kind.base == "str":
            return rng.choice((*TEXTS, self.canary))
        if kind.base == "complex":
            return {"complex": [rng.choice(FLOATS), 1.0]}
        if kind.base == "Scalar":
            value = rng.choice((*INTS, *FLOATS)) if wild else rng.choice((0, 1, 2, 0.5, -1.0))
            if rng.random() < 0.5:
                return value
            self.values.append(value)
            return {"v": len(self.values) - 1}
        return self.constant(kind.base, wild)

    def constant(self, base: str, wild: bool) -> Any:
        rng = self.rng
        if wild and rng.random() < 0.5:
            return rng.choice(INTS)
        if base == "ScalarType":
            return {"dtype": rng.choice(list(DTYPES))}
        if base == "Layout":
            return {"layout": rng.choice(("strided", "strided", "sparse_coo", "sparse_csr", "_mkldnn", "jagged"))}
        if base == "MemoryFormat":
            forms = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
            return {"memory_format": rng.choice(forms)}
        return {"device": 0} if base == "Device" else None

    def tensor(self, kind: Kind) -> dict[str, int]:
        """An operand: most often like the first, so that shapes agree."""
        rng = self.rng
        place = self.base if rng.random() < 0.5 else rng.randrange(len(self.operands))
        if place in self.ins and rng.random() < 0.01:  # a hole that comes twice
            index = self.ins.index(place)
        else:
            self.ins.append(place)
            index = len(self.ins) - 1
        if kind.written:
            self.writes.append(index)
        return {"t": index}

    def _outs(self, op: Op) -> list[list]:
        """Results: what the schema says, now and then another kind."""
        outs = []
        written = list(dict.fromkeys(self.writes))
        for kind in op.returns:
            honest = self.rng.random() < 0.97
            if kind.base != "Tensor":
                outs.append(["none", None, -1])
            elif kind.written and honest and written:
                outs.append(["same", None, written.pop(0) if len(written) > 1 else written[0]])
            elif kind.alias and honest and len(self.ins) == 1:
                outs += [["view", None, 0]] * (self.rng.choice((1, 2, 3)) if kind.list else 1)
            else:
                outs += [["new", None, -1]] * (self.rng.choice((1, 2, 3, 4)) if kind.list else 1)
        return outs

    def template(self, name: str, said: list | None = None) -> list:
        """said: the spec that the client says its results have; None: it will ask."""
        outs = [[kind, said if kind in ("new", "view") else None, of] for kind, _, of in self.outs]
        ins = [self.operands[n] for n in self.ins]
        return [name, self.args, self.kwargs, ins, len(self.values), outs, sorted(set(self.writes)), said is None, False]


def tried(names: list[str], seed: int) -> list[str]:
    """All ops in an order of the seed's; those that allocate or alias come more than once."""
    rng = random.Random(seed)
    loose = [name for name in names if re.search(r"empty|alias|strided|resize|view|set_|unsafe", name)]
    order = [*names, *loose, *loose]
    rng.shuffle(order)
    return order
