"""Modules that torch imports with itself and a worker hardly ever uses: they are executed at their first use.

torch executes its meta kernels and its exporter with `import torch`, a quarter of the CPU time of that.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# They carry out no op. Inductor executes the meta kernels.
UNUSED = ("torch._meta_registrations", "torch.distributions", "torch.export")
# Modules that only these import, which other functions of torch take for attributes of torch
REACHED = frozenset({"_custom_ops", "_decomp", "_export", "_prims", "_refs"})
_lock = threading.RLock()  # several threads may use a module first


class DeferredModule(ModuleType):
    """A module that is executed when an attribute is asked for that it does not have yet."""

    def __getattr__(self, name: str) -> Any:
        execute(self)
        return self.__getattribute__(name)


class _DeferredLoader(Loader):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = DeferredModule


class _DeferringFinder(MetaPathFinder):
    """Defers some modules while `deferring`. The next import of the library's other modules executes them first."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names, self._packages = names, tuple(name.partition(".")[0] + "." for name in names)
        self.deferring = True

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not self.deferring:
            if name.startswith(self._packages) and self in sys.meta_path:
                sys.meta_path.remove(self)
                execute_deferred(*self._names)
            return None
        spec = PathFinder.find_spec(name, path, target) if name in self._names else None
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferredLoader(spec.loader)
        return spec


@contextmanager
def deferred(*names: str) -> Iterator[None]:
    """Inside, imports of these modules are deferred, until they are used or another module of their library is imported.

    Modules that are imported already stay as they are.
    """
    finder = _DeferringFinder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.deferring = False


def execute(module: ModuleType) -> None:
    """Execute a module if it is deferred. An error of the module is raised at each use."""
    with _lock:
        loader = getattr(module.__spec__, "loader", None)
        if type(module) is not DeferredModule or not isinstance(loader, _DeferredLoader):
            return
        module.__class__ = ModuleType  # type: ignore[assignment]  # it may use itself
        try:
            loader.loader.exec_module(module)
        except BaseException:
            module.__class__ = DeferredModule  # type: ignore[assignment]
            raise


def execute_deferred(*names: str) -> None:
    """Execute those of these modules that are imported and deferred."""
    for name in names:
        if (module := sys.modules.get(name)) is not None:
            execute(module)


def execute_when_reached(package: Any, names: frozenset[str], modules: Sequence[str]) -> None:
    """Have the package execute these deferred modules when one of its modules of these names, which they import, is reached.

    The package has a __getattr__ of its own, which is asked for all other names. Once a process.
    """
    original = package.__getattr__

    def __getattr__(name: str) -> Any:
        if name in names:
            execute_deferred(*modules)
            return sys.modules[f"{package.__name__}.{name}"]
        return original(name)

    package.__getattr__ = __getattr__
