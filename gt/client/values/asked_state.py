"""State of libraries and of C that Python code asks for by a name, and that no walk over objects meets.

A name in the user's code tells that it may ask: `getLogger`, `environ`, `initial_seed`. Knows no captured programs.
"""

from __future__ import annotations

import _thread
import ctypes
import decimal
import functools
import logging
import mmap
import operator
import queue
import socket
import types
import warnings
import weakref
from collections.abc import Iterator, Set
from typing import Any

import numpy as np
import torch

from gt import env
from gt.client.values.code_names import owners_of, texts

_ENVIRONMENT = frozenset({"environ", "getenv", "expandvars", "expanduser"})  # names with which code reads it
_PATHS = frozenset({"Path", "pathlib"})  # beside which `home` is no attribute of the user's
_SEEDS = frozenset({"initial_seed", "get_rng_state"})
_NUMPY = frozenset({"np", "numpy"})
_ASKS_LOCKS = frozenset({"locked", "acquire", "_is_owned"})
_LOCKS = (_thread.LockType, _thread.RLock)
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)
_CHANNELS = (queue.SimpleQueue, socket.socket, mmap.mmap)
_HIDDEN = frozenset(
    {("_hashlib", "HASH"), ("_blake2", "blake2b"), ("_blake2", "blake2s"), ("xml.etree.ElementTree", "Element")}
)
GETTERS = (operator.attrgetter, operator.methodcaller)


def asked_by_name(names: Set[str], function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Paths and objects that code with these names may ask for: each changes in place. function: that which has the code."""
    if names & _ENVIRONMENT or ("home" in names and names & _PATHS):
        yield "os.environ", env.every_variable()
    if "warn" in names:
        yield "warnings.filters", warnings
    if names & _SEEDS and ("torch" in names or any(_of_torch(function, name) for name in names & _SEEDS)):
        yield "torch.default_generator", torch.default_generator
    if "get_state" in names and "random" in names and names & _NUMPY:
        yield "numpy.random", np.random.mtrand._rand
    if "fp32_precision" in names:
        yield "torch.backends' fp32_precision", torch.backends
    if "flags" in names and not names.isdisjoint({"decimal", "getcontext", "localcontext"}):
        yield "decimal.getcontext()", decimal.getcontext()
    if "getLogger" in names:
        yield from _loggers(function)


def _of_torch(function: types.FunctionType, name: str) -> bool:
    """True if a global name of a function is a function of torch: methods of the user may have the same name."""
    return str(getattr(function.__globals__.get(name), "__module__", "")).startswith("torch")


def names_a_tensor(function: types.FunctionType) -> bool:
    """True if a function that names `_version` may ask a tensor for it. Attributes of `self` may be called so, too."""
    owners = owners_of(function.__code__, "_version")
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    known = function.__globals__ | {name: CellState(cell).contents for name, cell in cells.items()}
    # An object of a global or of the closure tells by itself. Of attributes and local variables it is not known
    return any(owner not in ("self", "cls") and isinstance(known.get(owner), (torch.Tensor, type(None))) for owner in owners)


def _loggers(function: types.FunctionType) -> Iterator[tuple[str, logging.Logger]]:
    """The loggers whose names a function has as texts, or in globals that it names; all of them if there is none."""
    every, known = function.__globals__, logging.root.manager.loggerDict
    named = {*texts(function.__code__), *(every.get(name) for name in function.__code__.co_names if name != "__doc__")}
    found = {name for name in named if isinstance(name, str)} & known.keys()
    yield "logging.root", logging.root
    for name in found or list(known):
        if isinstance(logger := known[name], logging.Logger):
            yield f"logging.getLogger({name!r})", logger


class CellState:
    """A cell that code has as an object. contents: None while it is empty."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    @property
    def contents(self) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:
            return None


class LockState:
    """The state of a lock. text: a comparable value, which has the owner and the count of an RLock."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    @property
    def text(self) -> str:
        return repr(self._lock)


def lock_state(node: Any, names: Set[str]) -> LockState | None:
    """The state of a lock, if code with these names asks for it; else None."""
    return LockState(node) if isinstance(node, _LOCKS) and not _ASKS_LOCKS.isdisjoint(names) else None


def is_hidden(node: Any) -> bool:
    """True for an object that changes, and whose content is not in Python objects."""
    kind = type(node)
    return isinstance(node, _CHANNELS) or (kind.__module__, kind.__name__) in _HIDDEN


def behind(node: Any) -> list | None:
    """The objects that one of C stands for; None if it is no such object."""
    if isinstance(node, weakref.ref):
        return [node()]
    if isinstance(node, _VIEWS):
        return [node.mapping]  # type: ignore[attr-defined]
    if isinstance(node, (staticmethod, classmethod)):
        return [node.__func__]
    if isinstance(node, super):
        return [node.__self__]  # type: ignore[attr-defined]
    if isinstance(node, ctypes._Pointer):
        return [node.contents] if node and _is_kept(node) else []
    if isinstance(node, _BOUND):
        # Of a method in C, such as `seen.append`, the object; of a function its module
        return [] if isinstance(node.__self__, types.ModuleType) else [node.__self__]
    return None


def _is_kept(pointer: Any) -> bool:
    """True if an object of Python keeps the memory to which a pointer leads: to read other memory may end the process."""
    address = ctypes.addressof(pointer.contents)  # reads nothing there
    objects = (pointer._objects or {}).values()
    places = [(ctypes.addressof(o), ctypes.sizeof(o)) for o in objects if isinstance(o, (pointer._type_, ctypes.Array))]
    return any(start <= address < start + size for start, size in places)


def names_of_getter(node: Any) -> tuple[set[str], Any] | None:
    """The attributes that an operator.attrgetter or methodcaller names, and its arguments; None for any other object."""
    if not isinstance(node, GETTERS):
        return None
    make, given, *_ = tuple(node.__reduce__())
    if isinstance(make, functools.partial):  # a methodcaller with keywords
        given = (*make.args, *make.keywords.values())
    return {part for text in given if isinstance(text, str) for part in text.split(".")}, given
