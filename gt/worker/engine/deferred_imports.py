"""Modules that a library imports with itself and a worker hardly ever uses: they are executed at their first use.

torch executes its meta kernels and its exporter with `import torch`, a quarter of the CPU time of that. Knows no library.
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


class _Finder(MetaPathFinder):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in self._names else None
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferredLoader(spec.loader)
        return spec


@contextmanager
def deferred(*names: str) -> Iterator[None]:
    """Inside, imports of these modules are deferred. Modules that are imported already stay as they are."""
    finder = _Finder(frozenset(names))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


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
