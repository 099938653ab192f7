"""Modules that other modules import and a process hardly ever uses: they are executed at their first use.

`import torch` executes meta kernels and an exporter that no worker needs, and the first op of a program imports sympy.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Modules of torch that workers defer: they execute no op. Inductor executes the meta kernels.
UNUSED = ("torch._meta_registrations", "torch.distributions", "torch.export")
# Modules that only these import, which other functions of torch take for attributes of torch
REACHED = frozenset({"_custom_ops", "_decomp", "_export", "_prims", "_refs"})
# Attributes that the import system asks a module for, and sets before it executes the module if this has them
_OF_IMPORTS = frozenset({"__path__", "__file__", "__cached__"})
_lock = threading.RLock()  # several threads may use a module first
_executing: set[str] = set()  # names of modules, by the thread that holds the lock


@dataclass(frozen=True)
class StandIn:
    """An attribute's value for some modules while its own module is deferred. Modules that keep it get the real one then."""

    value: Any
    importers: frozenset[str]  # names of these modules


# A deferred module is in sys.modules as a DeferredModule, whose code has not been executed. The first attribute that it lacks
# executes it, and gives it the class ModuleType again: from then on an access costs what it always does.
class DeferredModule(ModuleType):
    """A module that is executed when an attribute is asked for that it does not have yet."""

    def __getattr__(self, name: str) -> Any:
        if (loader := _loader(self)) is not None and self.__name__ not in _executing and name in loader.stand_ins:
            # `from x import y` reads the attribute in a frame of the importing module.
            stand_in = loader.stand_ins[name]
            if sys._getframe(1).f_globals.get("__name__") in stand_in.importers:
                return stand_in.value
        if name not in _OF_IMPORTS:
            execute(self)
        return ModuleType.__getattribute__(self, name)


class _DeferredLoader(Loader):
    """Makes a module that is executed at its first use. stand_ins: by name, values that some importers get without that."""

    def __init__(self, loader: Any, stand_ins: Mapping[str, StandIn]) -> None:
        self.loader, self.stand_ins = loader, stand_ins

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = DeferredModule


class _LoadedLoader(Loader):
    """The loader of a module that was imported while its import was about to begin. It is not executed a second time."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _DeferringFinder(MetaPathFinder):
    """Defers some modules while `deferring`. After that it executes them before a module whose name has one of the prefixes."""

    def __init__(self, names: tuple[str, ...], prefixes: tuple[str, ...], stand_ins: Mapping[str, StandIn]) -> None:
        self._names, self._prefixes, self._stand_ins = names, prefixes, stand_ins
        self.deferring = True

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not self.deferring:
            if name.startswith(self._prefixes) and self in sys.meta_path:
                sys.meta_path.remove(self)
                execute_deferred(*self._names)
                # One of them has imported it.
                if (module := sys.modules.get(name)) is not None:
                    loader = _LoadedLoader(module)
                    # Of a module that has appeared meanwhile the import system takes the module's own spec
                    module.__spec__ = importlib.util.spec_from_loader(name, loader, is_package=hasattr(module, "__path__"))
                    return module.__spec__
            return None
        spec = PathFinder.find_spec(name, path, target) if name in self._names else None
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferredLoader(spec.loader, self._stand_ins)
        return spec


@contextmanager
def deferred(
    *names: str, before: Sequence[str] | None = None, stand_ins: Mapping[str, StandIn] | None = None
) -> Iterator[None]:
    """Inside, imports of these modules are deferred. Modules that are imported already stay as they are.

    before: prefixes of names; the first import of such a module executes the deferred ones first, by default of any other
    module of their library. stand_ins: attributes whose use does not execute their module.
    """
    prefixes = tuple(name.partition(".")[0] + "." for name in names) if before is None else tuple(before)
    finder = _DeferringFinder(names, prefixes, stand_ins or {})
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.deferring = False
        if not prefixes:
            sys.meta_path.remove(finder)


def execute(module: ModuleType) -> None:
    """Execute a module if it is deferred. Other threads that use it wait. An error of the module is raised at each use."""
    with _lock:
        name, loader = module.__name__, _loader(module)
        # The module's own code asks it for attributes while it is executed: these are ordinary look-ups.
        if loader is None or name in _executing:
            return
        _executing.add(name)
        try:
            loader.loader.exec_module(module)
        finally:
            _executing.discard(name)
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = loader.loader
        module.__class__ = ModuleType
        _replace(module, loader.stand_ins)


def _loader(module: ModuleType) -> _DeferredLoader | None:
    """The loader of a module that is deferred, or being executed."""
    loader = getattr(module.__spec__, "loader", None)
    return loader if type(module) is DeferredModule and isinstance(loader, _DeferredLoader) else None


def _replace(module: ModuleType, stand_ins: Mapping[str, StandIn]) -> None:
    """Give modules that have imported stand-ins by name the attributes themselves."""
    for attribute, stand_in in stand_ins.items():
        for name in stand_in.importers:
            table = sys.modules.get(name, module).__dict__
            for key in [key for key, value in table.items() if value is stand_in.value]:
                table[key] = module.__dict__[attribute]


def execute_deferred(*names: str) -> None:
    """Execute those of these modules that are imported and deferred."""
    for name in names:
        if (module := sys.modules.get(name)) is not None:
            execute(module)


def is_deferred(name: str) -> bool:
    """True for a module that is imported and not executed yet."""
    return isinstance(sys.modules.get(name), DeferredModule)


def execute_when_reached(package: Any, names: frozenset[str], modules: Sequence[str]) -> None:
    """Have the package execute these deferred modules when one of its modules of these names, which they import, is reached.

    The package has a __getattr__ of its own, which is asked for all other names. Once a process.
    """
    original: Callable[[str], Any] = package.__getattr__

    def __getattr__(name: str) -> Any:
        if name in names:
            execute_deferred(*modules)
            return sys.modules[f"{package.__name__}.{name}"]
        return original(name)

    package.__getattr__ = __getattr__
