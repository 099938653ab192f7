"""User code or library code: user code is walked for the names it uses; of a library only objects with user state count.

Code and globals of the standard library, torch and packages that pip installed are assumed not to change.
"""

from __future__ import annotations

import functools
import glob
import os
import site
import sys
import sysconfig
import threading
import types
from collections.abc import Mapping
from typing import Any

LIBRARIES = frozenset({
    *sys.stdlib_module_names, "torch", "gt", "gt_autoload", "numpy", "zmq", "msgpack", "yaml", "pytest", "_pytest",
})  # fmt: skip
STATEFUL = (
    "torch.nn",
    "torch.optim",
    "torch.ao.nn",
    "torch.amp",
    "torch.cuda.amp",
    "torch.distributions",
)  # modules of libraries whose objects hold the user's state
_STATELESS_STDLIB = frozenset({
    "logging", "typing", "abc", "_abc", "dataclasses", "enum", "inspect", "importlib", "re", "unittest", "contextlib",
    "builtins", "threading", "functools", "operator", "warnings",
})  # whose objects never decide what a function does  # fmt: skip
_SIGNALS = threading.Event, threading.Semaphore, threading.Barrier  # of threads, which code asks
_SITE_FOLDERS = tuple(
    {f"{path}{os.sep}" for path in (*map(sysconfig.get_path, ("purelib", "platlib")), *site.getsitepackages()) if path}
)
_installed: dict[str, bool] = {
    "__main__": False
}  # top packages of libraries; __main__ is the user's even if an installed notebook kernel started it


def module_of(kind: Any) -> str:
    """Name of the module of a class; "" where it has none: `__module__` of a class may be a descriptor of its objects'."""
    name = kind.__module__
    return name if isinstance(name, str) else ""


def is_library(module: str | None) -> bool:
    """True unless the module is the user's own code."""
    top = module.partition(".")[0] if module else ""
    return not top or top in LIBRARIES or is_installed(top)


def is_library_code(namespace: Mapping[str, Any]) -> bool:
    """True if code with these globals is a library's: functools.wraps gives a function another's `__module__`.

    Globals without a name are those of a program's exec(), which is the user's.
    """
    name = namespace.get("__name__")
    # collections.namedtuple gives each class a constructor with a name of its own, which keeps no state
    return isinstance(name, str) and (is_library(name) or name.startswith("namedtuple_"))


def is_installed(module: str) -> bool:
    """True for modules of packages in a folder of pip's: their objects are the user's state, their code is not."""
    top = module.partition(".")[0]
    known = _installed.get(top)
    if known is None and top in sys.modules:
        package = sys.modules[top]
        files = [file for file in (getattr(package, "__file__", None), *getattr(package, "__path__", ())) if file]
        folders = {os.path.dirname(file) for file in files}
        known = any(str(file).startswith(_SITE_FOLDERS) for file in files) or any(top in _listed(folder) for folder in folders)
        _installed[top] = known
    return bool(known)


@functools.cache
def _listed(folder: str) -> frozenset[str]:
    """Top modules that pip has put into a folder of another name, as with `--target` or `--user`: it lists its files there."""
    tops = set()
    for path in glob.glob(os.path.join(glob.escape(folder), "*.dist-info", "RECORD")):
        with open(path, encoding="utf-8", errors="replace") as rows:
            tops |= {row.partition(",")[0].partition("/")[0].removesuffix(".py") for row in rows}
    return frozenset(tops)


def is_stateless(kind: type) -> bool:
    """True if nothing inside an object of this class decides what a function does."""
    top = module_of(kind).partition(".")[0]
    if issubclass(kind, _SIGNALS):
        return False
    assumed = top in LIBRARIES and not module_of(kind).startswith(STATEFUL)
    return assumed and (top not in sys.stdlib_module_names or top in _STATELESS_STDLIB)


def has_library_base(kind: type) -> bool:
    """True if library code, which is not walked, knows instances of this class and may use any attribute."""
    return any(is_library(module_of(cls)) for cls in kind.__mro__[:-1])


def is_own(function: types.FunctionType) -> bool:
    """True for functions written in GT itself, whatever functools.wraps has made of their names."""
    return str(function.__globals__.get("__name__", "")).partition(".")[0] == "gt"
