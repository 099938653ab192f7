"""torch's meta kernels without torch._dynamo, whose import takes as long as the import of torch.

Many of these kernels are Python functions that torch excludes from compilation. The exclusion imports torch._dynamo at the
first call. Until something else imports it, there is nothing to be excluded from, and these functions are called as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

import torch

_MODULES = ("torch._refs", "torch._prims", "torch._prims_common", "torch._decomp", "torch._meta_registrations")
_KEPT = "__dynamo_disable"  # attribute of an excluded function: torch's wrapper of it, made at the first call
_DEEPEST = 8  # wrappers around one function


@cache
def spare_dynamo() -> None:
    """Have meta kernels run without torch._dynamo while it is not imported. Does nothing once it is, or the second time."""
    if "torch._dynamo" in sys.modules:
        return
    code = torch._compile._disable_dynamo(lambda: None).__code__
    for function in _functions():
        if function.__code__ is code:
            cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
            excluded = cells["fn"].cell_contents if "fn" in cells else None
            if excluded is not None and _KEPT not in vars(excluded):
                setattr(excluded, _KEPT, _plain(excluded, function))


def _plain(excluded: Callable, wrapper: Callable) -> Callable:
    """A function that calls `excluded`, or torch's own wrapper of it from the import of torch._dynamo on."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not hasattr(sys.modules.get("torch._dynamo"), "disable"):
            return excluded(*args, **kwargs)
        if getattr(excluded, _KEPT, None) is call:
            delattr(excluded, _KEPT)
        return wrapper(*args, **kwargs)

    return call


def _functions() -> Iterator[FunctionType]:
    """Functions of the modules of meta kernels, registered ones, and those that they wrap."""
    roots = [vars(module) for name, module in list(sys.modules.items()) if name.startswith(_MODULES)]
    level = [value for table in [*roots, *torch._decomp.global_decomposition_table.values()] for value in table.values()]
    seen: set[int] = set()
    for _ in range(_DEEPEST):
        functions = [f for f in level if type(f) is FunctionType and id(f) not in seen]
        seen.update(map(id, functions))
        yield from functions
        level = [value for function in functions for value in _inner(function)]


def _inner(function: FunctionType) -> Iterator[Any]:
    yield getattr(function, "__wrapped__", None)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue
