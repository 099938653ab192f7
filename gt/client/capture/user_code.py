"""Whose code is whose: what is the user's is walked for what it names; of torch's and of libraries' only objects are state.

The code and the globals of packages that pip installed are taken to stay as they are.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig

FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "gt", "numpy", "pytest", "_pytest"})
STATE = (
    "torch.nn",
    "torch.optim",
    "torch.ao.nn",
    "torch.amp",
    "torch.cuda.amp",
    "torch.distributions",
)  # of foreign packages, those whose objects are the user's state
_QUIET = frozenset({
    "logging", "typing", "abc", "_abc", "dataclasses", "enum", "inspect", "importlib", "re", "unittest", "contextlib",
    "builtins", "threading", "functools", "operator", "weakref", "warnings",
})  # of no consequence  # fmt: skip
_SITES = tuple(
    {f"{path}{os.sep}" for path in (*map(sysconfig.get_path, ("purelib", "platlib")), *site.getsitepackages()) if path}
)
_places: dict[str, bool] = {"__main__": False}  # the user's, whatever started it: a notebook's kernel is installed


def foreign(module: str | None) -> bool:
    """Whether code of this module is not the user's."""
    top = module.partition(".")[0] if module else ""
    return not top or top in FOREIGN or installed(top)


def installed(module: str) -> bool:
    """Whether a module is of a package that lies where pip puts them: its objects are the user's state, its code is not."""
    top = module.partition(".")[0]
    found = _places.get(top)
    if found is None and top in sys.modules:
        package = sys.modules[top]
        files = [getattr(package, "__file__", None), *getattr(package, "__path__", ())]
        found = _places[top] = any(str(file).startswith(_SITES) for file in files if file)
    return bool(found)


def idle(kind: type) -> bool:
    """Whether nothing below an object of this class decides what a function does."""
    top = kind.__module__.partition(".")[0]
    known = top in FOREIGN and not kind.__module__.startswith(STATE)
    return known and (top not in sys.stdlib_module_names or top in _QUIET)


def foreign_base(kind: type) -> bool:
    """Whether code that is not walked (torch's, a library's) knows instances of this class and may use any attribute."""
    return any(foreign(cls.__module__) for cls in kind.__mro__[:-1])
