"""Parts of torch that its meta kernels and the first op of a subclass import, and that most programs never use.

Many meta kernels are Python functions that torch excludes from compilation. The exclusion imports torch._dynamo at the first
call, which takes as long as the import of torch. Until something else imports it, there is nothing to be excluded from, and
these functions are called as they are. They also ask torch's symbolic shapes, and sympy, about sizes, which are plain numbers
here. The first op of any subclass imports DTensor: its sharding rules wait for a mesh.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import FunctionType
from typing import Any

import torch
from torch.utils._ordered_set import OrderedSet

from gt.wire.deferred_imports import StandIn, deferred, execute_deferred, is_deferred

_MODULES = ("torch._refs", "torch._prims", "torch._prims_common", "torch._decomp", "torch._meta_registrations")
_KEPT = "__dynamo_disable"  # attribute of an excluded function: torch's wrapper of it, made at the first call
_DEEPEST = 8  # wrappers around one function
_RULES = "torch.distributed.tensor._ops"  # registers DTensor's sharding rules
_MESH = "torch.distributed.device_mesh"  # its DeviceMesh precedes every DTensor
_SYMBOLIC = "torch.fx.experimental.symbolic_shapes"
# Modules that ask it about sizes, and import it in each function anew
_ASKING = frozenset({
    "torch", "torch._decomp.decompositions", "torch._meta_registrations", "torch._prims", "torch._prims_common",
    "torch._prims_common.wrappers", "torch._refs", "torch._refs.fft", "torch._refs.linalg", "torch._refs.nn.functional",
    "torch._refs.special", "torch._tensor", "torch.autograd", "torch.distributed.tensor._collective_utils",
})  # fmt: skip


def _same_sizes(x: Any, y: Any) -> Any:
    """The equality of two whole numbers, or of two series of them; NotImplemented for other arguments."""
    if type(x) is type(y) is int:
        return x == y
    plain = all(isinstance(series, (tuple, list)) and {*map(type, series)} <= {int} for series in (x, y))
    return [*x] == [*y] if plain else NotImplemented


def _symbols(x: Any) -> Any:
    """The symbols in the sizes of a tensor, of which a plain one has none."""
    plain = type(x) is torch.Tensor and x.layout == torch.strided and {*map(type, (*x.shape, *x.stride()))} <= {int}
    return OrderedSet() if plain and type(x.storage_offset()) is int else NotImplemented


# Functions of symbolic shapes, in any version -> their answers to plain arguments, or NotImplemented
_ANSWERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("guard_or_false", "guard_or_true", "statically_known_true", "guard_bool", "guard_size_oblivious"),
        lambda a: a if type(a) is bool else NotImplemented,
    ),
    "expect_true": lambda a, skip=0: a if type(a) is bool else NotImplemented,
    **dict.fromkeys(("guard_int", "size_hint"), lambda a, *_: a if type(a) is int else NotImplemented),
    "guarding_hint_or_throw": lambda a: a if type(a) in (bool, int) else NotImplemented,
    **dict.fromkeys(("has_guarding_hint", "has_hint"), lambda a: True if type(a) in (bool, int, float) else NotImplemented),
    "is_nested_int": lambda a: False if type(a) in (bool, int, float) else NotImplemented,
    "sym_and": lambda *terms: all(terms) if {*map(type, terms)} == {bool} else NotImplemented,
    "sym_or": lambda *terms: any(terms) if {*map(type, terms)} == {bool} else NotImplemented,
    "sym_eq": _same_sizes,
    "free_unbacked_symbols": _symbols,
    **dict.fromkeys(("_constrain_range_for_size", "constrain_range"), lambda *_, **__: NotImplemented),
}


class _NotRaised(RuntimeError):
    """The error of symbolic shapes while these are deferred: nothing raises it."""


class _NoExpression:
    """The class of sympy's expressions while sympy is deferred: nothing is an instance."""


@cache
def spare_dynamo() -> None:
    """Have meta kernels run without torch._dynamo while it is not imported. Does nothing once it is, or the second time."""
    if "torch._dynamo" in sys.modules:
        return
    # All functions that torch excludes have the code of one inner function, by which they are known
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
    # Level by level through wrappers: decorators hold the function in a cell of their closure, or as __wrapped__
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


@cache
def spare_symbolic_shapes() -> None:
    """Have meta kernels run without sympy and torch's symbolic shapes, which are executed when something else uses them.

    Does nothing for those that are imported, or the second time.
    """
    basic = StandIn(_NoExpression, frozenset({"torch._prims_common"}))
    with deferred("sympy", stand_ins={"Basic": basic}):
        importlib.import_module("sympy")
    functions = {name: StandIn(_answering(name, answer), _ASKING) for name, answer in _ANSWERS.items()}
    error = StandIn(_NotRaised, frozenset({"torch.distributed.tensor._decompositions"}))
    with deferred(_SYMBOLIC, before=(), stand_ins={**functions, "GuardOnDataDependentSymNode": error}):
        importlib.import_module(_SYMBOLIC)


def _answering(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """The function of symbolic shapes of this name: `answer` for plain arguments, else itself."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = answer(*args, **kwargs)
        return getattr(sys.modules[_SYMBOLIC], name)(*args, **kwargs) if result is NotImplemented else result

    return call


@contextmanager
def without_dtensor_rules() -> Iterator[None]:
    """Inside, an import of DTensor leaves out its sharding rules, which take a sixth of the time of torch's import.

    They are executed before the first DeviceMesh is made, or another module of torch.distributed is imported.
    """
    if _RULES in sys.modules:
        yield
        return
    with deferred(_RULES, before=("torch.distributed.",)):
        yield
    mesh = getattr(sys.modules.get(_MESH), "DeviceMesh", None)
    if mesh is None or not is_deferred(_RULES):
        execute_deferred(_RULES)
        return
    for name in ("__init__", "__setstate__"):
        _execute_before(mesh, name)


def _execute_before(holder: Any, name: str) -> None:
    """Have a method execute the rules first. It is the original again from then on."""
    original = getattr(holder, name, None)
    if original is None:
        return

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        execute_deferred(_RULES)
        if getattr(holder, name) is call:
            setattr(holder, name, original)
        return original(*args, **kwargs)

    setattr(holder, name, call)
