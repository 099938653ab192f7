"""Overloads of the installed torch by name, of the table's ops alone, and the table's line for an overload."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gt.errors import UnsupportedOp
from gt.ir.schema import MAY, TABLE, OpTable, Schema

# torch's real types in the table's words, where these differ
_WORDS = {"number": "Scalar"}
# Arguments that an op writes although its schema does not say so: statistics of a batch
_UNSAID = {"aten.native_batch_norm.default": ("running_mean", "running_var")}
_BY_VALUES = frozenset({"dynamic_output_shape", "data_dependent_output"})
_SIZED_BY_NUMBERS = ("arange", "range")
# Functions of Python's that take a number for a tensor; in place too
_TAKE_NUMBERS = ("add", "sub", "mul", "div", "floor_divide", "remainder")


class Overloads(dict[str, torch._ops.OpOverload]):
    """Overloads by name, each looked up in torch when first asked for. OpTable.find refuses names that the table lacks."""

    def __init__(self, table: OpTable) -> None:
        self._table = table

    def __missing__(self, name: str) -> torch._ops.OpOverload:
        schemas = self._table.find(name)
        op = look_up(name)
        # The client validates arguments by the table. With another schema here they would be bound to the wrong parameters.
        if _form(Schema.parse(line(op))) not in map(_form, schemas):
            raise UnsupportedOp(f"torch {torch.__version__} has another {name} than the table: {op._schema}")
        self[name] = op
        return op


OVERLOADS = Overloads(TABLE)


def look_up(name: str) -> torch._ops.OpOverload:
    """An overload of the installed torch. For names of the table and of the process's owner, never for one that was sent."""
    space, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    op = getattr(getattr(getattr(torch.ops, space, None), base, None), overload, None)
    if type(op) is not torch._ops.OpOverload:
        raise UnsupportedOp(f"torch {torch.__version__} has no {name}")
    return op


def line(op: Any, versions: str = "", more: Iterable[str] = ()) -> str:
    """The table's line for an overload. versions: as 2.11-2.13, by default the installed one. more: further flags.

    ValueError for a schema that the table has no words for.
    """
    return row(name_of(op), op._schema, {tag.name for tag in op.tags}, versions, more)


def row(name: str, schema: Any, tags: Iterable[str], versions: str = "", more: Iterable[str] = ()) -> str:
    """The same of a torch._C.FunctionSchema."""
    version = ".".join(torch.__version__.split(".")[:2])
    parts, by_name = [], False
    for argument in schema.arguments:
        if argument.kwarg_only and not by_name:
            parts.append("*")
            by_name = True
        mark = "!" if argument.alias_info is not None and argument.alias_info.is_write else ""
        mark = MAY if argument.name in _UNSAID.get(name, ()) else mark
        default = f"={_default(argument.default_value)}" if argument.has_default_value() else ""
        parts.append(f"{_type(argument, mark)} {argument.name}{default}")
    returns = [
        _type(value, "!" if value.alias_info is not None and value.alias_info.is_write else "") for value in schema.returns
    ]
    flags = " ".join(sorted({*_flags(name, set(tags)), *more}))
    text = f"{name}({', '.join(parts)}) -> ({', '.join(returns)})  # {versions or f'{version}-{version}'} {flags}".rstrip()
    Schema.parse(text)
    return text


def name_of(op: Any) -> str:
    return f"{op.namespace}.{op._schema.name.partition('::')[2]}.{op._overloadname}"


def _flags(name: str, tags: set[str]) -> Iterable[str]:
    base = name.split(".")[1]
    if tags & _BY_VALUES or base in _SIZED_BY_NUMBERS:
        yield "by_values"
    if base.removesuffix("_") in _TAKE_NUMBERS:
        yield "takes_numbers"


def _type(value: Any, mark: str) -> str:
    text, suffix = str(value.real_type), ""
    # Optional[List[Tensor]] becomes Tensor[]?: from the outside in.
    while text.endswith("]"):
        kind, _, text = text[:-1].partition("[")
        suffix = ("[]" if kind == "List" else "?") + suffix
    letter = ""
    if value.alias_info is not None:
        letter = min(value.alias_info.before_set, default="a").removeprefix("alias::")
    alias = f"({letter}{mark})" if letter or mark else ""
    return f"{_WORDS.get(text, text)}{alias}{suffix}"


def _default(value: Any) -> str:
    return repr(value).replace(" ", "")


def _form(schema: Schema) -> tuple:
    return schema.arguments, schema.returns
