"""Names that code uses, as its bytecode has them."""

from __future__ import annotations

import dis
import functools
import types


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
