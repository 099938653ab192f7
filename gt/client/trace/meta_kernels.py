"""Parts of torch that its meta kernels and the first op of a subclass import, and that most programs never use.

Many meta kernels are Python functions that torch excludes from compilation. The exclusion imports torch._dynamo at the first
call, which takes as long as the import of torch. Until something else imports it, there is nothing to be excluded from, and
these functions are called as they are. The first op of any subclass imports DTensor: its sharding rules wait for a mesh.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

import torch

_MODULES = ("torch._refs", "torch._prims", "torch._prims_common", "torch._decomp", "torch._meta_registrations")
_KEPT = "__dynamo_disable"  # attribute of an excluded function: torch's wrapper of it, made at the first call
_DEEPEST = 8  # wrappers around one function
_RULES = "torch.distributed.tensor._ops"  # registers DTensor's sharding rules
_MESH = "torch.distributed.device_mesh"  # its DeviceMesh precedes every DTensor
_lock = threading.RLock()  # several threads may need the rules first


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


@contextmanager
def without_dtensor_rules() -> Iterator[None]:
    """Inside, an import of DTensor leaves out its sharding rules, which take a sixth of the time of torch's import.

    They are executed before the first DeviceMesh is made, or another module of torch.distributed is imported.
    """
    finder = _RulesFinder()
    if _RULES in sys.modules:
        yield
        return
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.deferring = False
        mesh = getattr(sys.modules.get(_MESH), "DeviceMesh", None)
        if mesh is None or not isinstance(sys.modules.get(_RULES), _Rules):
            sys.meta_path.remove(finder)
            _execute_rules()
        else:
            for name in ("__init__", "__setstate__"):
                _execute_before(mesh, name)


class _Rules(ModuleType):
    """The module of the rules, not executed yet."""

    def __getattr__(self, name: str) -> Any:
        _execute_rules()
        return self.__getattribute__(name)


class _RulesLoader(Loader):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Rules


class _RulesFinder(MetaPathFinder):
    """Defers the rules while `deferring`. Executes them at the next import in torch.distributed after that."""

    deferring = True

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not self.deferring:
            if name.startswith("torch.distributed.") and self in sys.meta_path:
                sys.meta_path.remove(self)
                _execute_rules()
            return None
        spec = PathFinder.find_spec(name, path, target) if name == _RULES else None
        if spec is not None and spec.loader is not None:
            spec.loader = _RulesLoader(spec.loader)
        return spec


def _execute_before(holder: Any, name: str) -> None:
    """Have a method execute the rules first. It is the original again from then on."""
    original = getattr(holder, name, None)
    if original is None:
        return

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        _execute_rules()
        if getattr(holder, name) is call:
            setattr(holder, name, original)
        return original(*args, **kwargs)

    setattr(holder, name, call)


def _execute_rules() -> None:
    """Execute the rules if they are deferred. An error of theirs is raised at each use."""
    with _lock:
        module = sys.modules.get(_RULES)
        if not isinstance(module, _Rules):
            return
        assert module.__spec__ is not None and isinstance(module.__spec__.loader, _RulesLoader)
        module.__class__ = ModuleType  # type: ignore[assignment]  # it may use itself
        try:
            module.__spec__.loader.loader.exec_module(module)
        except BaseException:
            module.__class__ = _Rules  # type: ignore[assignment]
            raise
