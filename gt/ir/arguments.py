"""Checks of an op's arguments and outputs against its schema: types, number, written operands, shared memory.

They run once for each definition: in the dispatcher on a client's templates, in a worker on the ops that it binds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from gt.ir.schema import Argument, Schema, SchemaType
from gt.ir.template import Arg, Const, Out, T, V

INTEGERS = range(-(1 << 63), 1 << 63)


def constant(kind: str) -> Callable[[Arg], bool]:
    return lambda arg: type(arg) is Const and arg.kind == kind


# Base of a type -> test of an argument. Sizes and dims have to be constants: plans depend on them.
_IS: dict[str, Callable[[Arg], bool]] = {
    "Tensor": lambda arg: type(arg) is T,
    "Scalar": lambda arg: (
        type(arg) in (V, float, bool)
        or (type(arg) is int and arg in INTEGERS)
        or (type(arg) is Const and arg.kind == "complex")
    ),
    "float": lambda arg: type(arg) in (V, float) or (type(arg) is int and arg in INTEGERS),
    "int": lambda arg: type(arg) is int and arg in INTEGERS,
    "bool": lambda arg: type(arg) is bool,
    "str": lambda arg: type(arg) is str,
    "ScalarType": constant("dtype"),
    "Layout": constant("layout"),
    "MemoryFormat": constant("memory_format"),
    "Device": constant("device"),
    "Generator": lambda arg: False,
}


def match(schemas: Sequence[Schema], args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> Schema:
    """The first of an op's schemas that the arguments fit. ValueError gives the mismatch with the last schema."""
    for schema in schemas[:-1]:
        try:
            return _matched(schema, args, kwargs)
        except ValueError:
            continue
    return _matched(schemas[-1], args, kwargs)


def _matched(schema: Schema, args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> Schema:
    # As Python binds a call: by position, then by name; none twice, and no required one missing.
    positional = schema.positional
    if len(args) > len(positional):
        raise ValueError(f"args has {len(args)} values, {schema.op} takes at most {len(positional)}")
    for argument, arg in zip(positional, args):
        _check(schema, argument, arg)
    by_position = {argument.name for argument in positional[: len(args)]}
    for name, arg in kwargs.items():
        known = schema.named.get(name)
        if known is None or name in by_position:
            raise ValueError(
                f"kwargs has {name!r:.40}, which {schema.op} {'has already' if name in by_position else 'does not take'}"
            )
        _check(schema, known, arg)
    missing = [a.name for a in schema.arguments if a.required and a.name not in by_position and a.name not in kwargs]
    if missing:
        raise ValueError(f"args and kwargs lack {', '.join(missing)} of {schema.op}")
    return schema


def _check(schema: Schema, argument: Argument, arg: Arg) -> None:
    if not _fits(schema, argument.type, arg):
        raise ValueError(f"{argument.name} of {schema.op} is {shown(arg)}, want {argument.type.text}")


def _fits(schema: Schema, want: SchemaType, arg: Arg) -> bool:
    if arg is None:
        return want.optional
    if want.list:
        item = _item(schema, want)
        return isinstance(arg, (list, tuple)) and all(want.gaps if part is None else item(part) for part in arg)
    return _item(schema, want)(arg)


def _item(schema: Schema, want: SchemaType) -> Callable[[Arg], bool]:
    # torch makes a tensor of a number for some ops, as in `x + 1` with the schema `Tensor other`.
    is_one = _IS[want.base]
    if want.base == "Tensor" and not want.alias and not want.list and "takes_numbers" in schema.flags:
        return lambda arg: is_one(arg) or _IS["Scalar"](arg)
    return is_one


def shown(arg: Arg) -> str:
    """An argument in an error, in the words of its wire form."""
    if isinstance(arg, T):
        return f"tensor {arg.index}"
    if isinstance(arg, V):
        return f"value {arg.index} of each call"
    if isinstance(arg, Const):
        return f"the {arg.kind} {arg.value!r:.40}"
    return f"{arg!r:.80}"


# ---- outputs and written operands


def results(schema: Schema, args: Sequence[Arg], kwargs: Mapping[str, Arg], outs: Sequence[Out], writes: Sequence[int]) -> None:
    """ValueError unless outputs and written operands are those of the schema."""
    places = operands(schema, args, kwargs)
    if set(writes) != (declared := set(written(schema, args, kwargs))):
        raise ValueError(f"writes is {list(writes)!r:.80}, {schema.op} writes {sorted(declared)}")
    wants = list(_wants(schema, len(outs)))
    if len(wants) != len(outs):
        raise ValueError(f"outs has {len(outs)} outputs, {schema.op} gives {len(schema.returns)}")
    for number, (want, out) in enumerate(zip(wants, outs, strict=True)):
        if not want.alias:
            good = out.kind in ("new", "none")
        else:
            # torch's alias letter joins the result to an argument: written is `same`, only shared is `view`. A client that
            # called it `new` would make the dispatcher believe in two memories where there is one.
            kind = "same" if want.written else "view"
            shared = (a for a in schema.arguments if a.type.alias == want.alias and a.type.written == want.written)
            good = out.kind == kind and any(out.of in places.get(argument.name, ()) for argument in shared)
        if not good:
            raise ValueError(f"output {number} of outs is {out.kind!r:.20} of operand {out.of}, {schema.op} gives {want.text}")


def written(schema: Schema, args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> list[int]:
    """Numbers of the tensors that an op changes in place, by its schema.

    Some arguments are written in training alone, such as the running statistics of a batch norm. They are not among the numbers
    if the argument `training` is false.
    """
    places = operands(schema, args, kwargs)
    names = [argument.name for argument in schema.positional[: len(args)]]
    training = {**dict(zip(names, args)), **kwargs}.get("training", True)
    return [
        place
        for argument in schema.arguments
        if argument.type.written or (argument.type.may_write and training)
        for place in places.get(argument.name, ())
    ]


def _wants(schema: Schema, count: int) -> Iterator[SchemaType]:
    """The type of each flat output. Lists of results have one length."""
    # The schema does not say how long lists of results are: their outputs are what single results leave.
    lists = [value for value in schema.returns if value.list]
    rest = count - (len(schema.returns) - len(lists))
    for value in schema.returns:
        yield from [value] * (max(rest, 0) // len(lists)) if value.list else [value]


def operands(schema: Schema, args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> dict[str, list[int]]:
    """Name of argument -> numbers of its tensor operands."""
    named = [*((argument.name, arg) for argument, arg in zip(schema.positional, args)), *kwargs.items()]
    return {
        name: [part.index for part in (arg if isinstance(arg, (list, tuple)) else [arg]) if type(part) is T]
        for name, arg in named
    }
