"""Names that code uses, as its bytecode has them."""

from __future__ import annotations

import dis
import functools
import types

_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_GLOBAL", "LOAD_NAME")
_NO_OPS = frozenset({"CACHE", "EXTENDED_ARG", "NOP"})


def names_in(code: types.CodeType) -> set[str]:
    """Globals and attributes that code names, nested functions included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
        elif isinstance(constant, tuple):  # attribute names of a class pattern
            names |= {name for name in constant if isinstance(name, str)}
    return names


@functools.lru_cache(maxsize=4096)
def texts(code: types.CodeType) -> frozenset[str]:
    """Texts in code, which may be names of attributes for setattr(), nested functions included."""
    own = {constant for constant in code.co_consts if isinstance(constant, str)}
    return frozenset(own.union(*(texts(part) for part in code.co_consts if isinstance(part, types.CodeType))))


@functools.lru_cache(maxsize=4096)
def operands(code: types.CodeType, ops: frozenset[str]) -> frozenset[str]:
    """Names that code uses by some instructions, nested functions included: `model.x` does not read a global `x`."""
    own = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in ops}
    return frozenset(own.union(*(operands(part, ops) for part in code.co_consts if isinstance(part, types.CodeType))))


@functools.lru_cache(maxsize=4096)
def owners_of(code: types.CodeType, attribute: str) -> frozenset[str]:
    """Names of the variables of which code asks an attribute, nested functions included; "" for any other object."""
    owners, before = set(), None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval == attribute:
            owner = before.argval if before is not None and before.opname.startswith(_LOADS) else ""
            owners.add(owner[-1] if isinstance(owner, tuple) else owner)  # one instruction may load two variables
        if instruction.opname not in _NO_OPS:
            before = instruction
    return frozenset(owners.union(*(owners_of(part, attribute) for part in code.co_consts if isinstance(part, types.CodeType))))
