"""Counters of user code, such as `self.steps += 1`, which nothing on the walk reads: a replay counts on in Python's place.

A name is a counter if each of its uses in the code that a function reaches is `x.name += ...`. Then no op and no branch depends
on its value. Bytecode shows the uses; where code may reach any attribute by other means, nothing is a counter.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gt.client.capture.user_code import LIBRARIES, is_library, module_of

# Names with which code reads attributes and variables that it does not name
UNNAMED_ACCESS = frozenset(
    {
        "deepcopy",
        "copy",
        "replace",
        "globals",
        "locals",
        "eval",
        "exec",
        "dir",
        "dumps",
        "save",
        "inspect",
        "__getstate__",
        "gc",
    }
)
_SKIPPED = frozenset({"EXTENDED_ARG", "CACHE", "NOP", "RESUME"})
_NAMING = ("ATTR", "METHOD", "GLOBAL", "NAME", "DEREF", "IMPORT")  # in the names of instructions whose operand is a name
_LOADS = {"LOAD_ATTR": "STORE_ATTR", "LOAD_GLOBAL": "STORE_GLOBAL", "LOAD_DEREF": "STORE_DEREF"}
_PLAIN_SETTERS = (object.__setattr__, torch.nn.Module.__setattr__)


def counted(codes: Iterable[types.CodeType]) -> frozenset[str]:
    """The names that this code only counts."""
    counts: set[str] = set()
    others: set[str] = set()
    for code in codes:
        more = _uses(code)
        counts |= more[0]
        others |= more[1]
    return frozenset() if others & UNNAMED_ACCESS else frozenset(counts - others)


@functools.lru_cache(maxsize=4096)
def _uses(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Names that code counts, and names that it uses otherwise, nested functions included."""
    rows = [row for row in dis.get_instructions(code) if row.opname not in _SKIPPED]
    counts: set[str] = set()
    within: set[int] = set()  # rows that load and store a counter
    for place, row in enumerate(rows):
        end = _end_of_count(rows, place) if row.opname in _LOADS else 0
        if end:
            counts.add(row.argval)
            within |= {place, end}
    others = {row.argval for place, row in enumerate(rows) if place not in within and _names(row)}
    others.update(*(_strings(row.argval) for row in rows if row.opname.startswith("LOAD_CONST")))
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            counts |= _uses(part)[0]
            others |= _uses(part)[1]
    return frozenset(counts), frozenset(others)


def _names(row: dis.Instruction) -> bool:
    return isinstance(row.argval, str) and any(kind in row.opname for kind in _NAMING)


def _strings(constant: Any) -> Iterator[str]:
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, (tuple, frozenset)):
        for part in constant:
            yield from _strings(part)


def _end_of_count(rows: list[dis.Instruction], place: int) -> int:
    """The row that stores what the row at `place` has loaded, if all between them is `+= ...` of a simple term; else 0."""
    load = rows[place]
    attribute = load.opname == "LOAD_ATTR"
    if attribute and (not place or not _is(rows[place - 1], "COPY", 1, "DUP_TOP")):
        return 0
    height = 0  # of the stack above the loaded value
    for at in range(place + 1, len(rows) - 1 - attribute):
        row = rows[at]
        if row.opname == "INPLACE_ADD" or (row.opname == "BINARY_OP" and row.argrepr == "+="):
            end = at + 1 + attribute
            swapped = not attribute or _is(rows[at + 1], "SWAP", 2, "ROT_TWO")
            stored = rows[end].opname == _LOADS[load.opname] and rows[end].argval == load.argval
            return end if height == 1 and swapped and stored else 0
        if row.opcode in dis.hasjrel or row.opcode in dis.hasjabs or row.is_jump_target:
            return 0
        height += dis.stack_effect(row.opcode, row.arg)
        if height < 1:  # it takes the loaded value
            return 0
    return 0


def _is(row: dis.Instruction, name: str, arg: int, older: str) -> bool:
    return (row.opname == name and row.arg == arg) or row.opname == older


@functools.lru_cache(maxsize=4096)
def may_count(kind: type, name: str) -> bool:
    """True if a class leaves its attribute `name` to the user's code: none of its bases reads it, or sees it change."""
    plain = kind.__setattr__ in _PLAIN_SETTERS and kind.__getattribute__ is object.__getattribute__
    if not plain or not isinstance(inspect.getattr_static(kind, name, 0), int):
        return False
    for base in kind.__mro__[:-1]:
        if not is_library(module_of(base)):
            continue  # the user's, whose code is on the walk
        functions = [function for function in vars(base).values() if isinstance(function, types.FunctionType)]
        known = module_of(base).partition(".")[0] in LIBRARIES
        if not known or any(name in names for function in functions for names in _uses(function.__code__)):
            return False
    return True
