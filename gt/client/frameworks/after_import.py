"""Calls of a function once a module has been imported: at once if it is, else after its import, whenever that is.

Other frameworks are so told of the device whether a program imports them before GT or after it, and none is imported for it.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

log = logging.getLogger("gt.client")
Call = Callable[[Any], None]


class _WatchingFinder(MetaPathFinder):
    """Finds a watched module by the other finders, and has its import end with the call, also if it is imported again."""

    def __init__(self, calls: dict[str, Call]) -> None:
        self._calls = calls
        self._sought: set[str] = set()  # names that are being looked up by the other finders

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        call = self._calls.get(name)
        if call is None or name in self._sought:
            return None
        self._sought.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._sought.discard(name)
        if spec is None or spec.loader is None:
            return None
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            loader.exec_module = execute  # type: ignore[method-assign]
            execute(module)
            _guarded(call, module)

        loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def watch(calls: dict[str, Call]) -> None:
    """Call each function with the module of its name. Once, on import of GT."""
    for name, call in calls.items():
        if name in sys.modules:
            _guarded(call, sys.modules[name])
    sys.meta_path.insert(0, _WatchingFinder(dict(calls)))


def _guarded(call: Call, module: ModuleType) -> None:
    """A version of a framework that is not as expected costs its support and not its import."""
    try:
        call(module)
    except Exception as error:
        log.warning("%s does not know the device remote: %s: %s", module.__name__, type(error).__name__, error)
