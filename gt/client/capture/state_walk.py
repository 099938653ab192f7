"""What a function's outcome may depend on: everything reachable from its arguments, closure and globals, as a list of items.

A walk looks at user code only: containers, attributes, closures, modules, optimizers, and the globals that functions
name. Values that Python compares cheaply are compared; objects are walked into; of tensors it is asked which they are.
"""

from __future__ import annotations

import datetime
import functools
import pathlib
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch

from gt.client.capture.user_code import FOREIGN, STATE, foreign, foreign_base, idle, installed
from gt.client.device.remote_tensor import RemoteTensor

MOST = 200_000  # items of one walk
LARGEST = 1 << 16  # bytes of a NumPy array that is compared
_PLAIN = frozenset({
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type(...), slice, range,
    datetime.date, datetime.datetime, datetime.timedelta, pathlib.PosixPath,
})  # fmt: skip
_SAID = frozenset({"__module__", "__dict__", "__weakref__", "__doc__", "__annotations__", "__qualname__", "__slots__"})
_DYNAMIC = frozenset(
    {"asdict", "astuple", "getattr", "setattr", "vars", "__dict__", "attrgetter", "__getattr__", "__getattribute__"}
)
_GLOBAL = [
    (f"{module.__name__}.{name}", value)
    for module in (sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"])
    for name, value in vars(module).items()
    if name.startswith("_global") and isinstance(value, dict)
]  # hooks of all modules and optimizers
_HOOKS = frozenset(key for key in torch.nn.Module().__dict__ if key.startswith("_")) - {"_parameters", "_buffers", "_modules"}


def plain(value: Any) -> bool:
    """Whether a value is compared as a whole: it has neither parts that change nor code of the user's."""
    return type(value) in _PLAIN or isinstance(value, (Enum, np.generic))


def exact(value: Any) -> Any:
    """What two plain values have to share to be the same: the sign of zero counts, and one NaN is like another."""
    return repr(value) if isinstance(value, (float, complex, np.generic)) else value


@dataclass(slots=True)
class Item:
    """holder[key] or, where `attribute`, getattr(holder, key), and its value when walked."""

    path: str
    holder: Any
    key: Any
    attribute: bool
    value: Any

    def now(self) -> Any:
        return getattr(self.holder, self.key) if self.attribute else self.holder[self.key]


@dataclass
class Reach:
    """One walk's result."""

    items: list[Item] = field(default_factory=list)
    sized: list[tuple[Any, int, str]] = field(default_factory=list)  # containers that must not grow or shrink
    stamps: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # things with values of their own, and these
    orders: list[tuple[str, dict, list[int]]] = field(default_factory=list)  # keys of dictionaries, by identity
    looks: dict[str, tuple[RemoteTensor, tuple]] = field(default_factory=dict)
    kinds: list[tuple[str, Any, type]] = field(default_factory=list)
    leaves: list[tuple[str, RemoteTensor]] = field(default_factory=list)  # remote tensors that may have a .grad
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)  # what cannot be compared: iterators, large host data
    grads: dict[str, RemoteTensor] = field(default_factory=dict)  # path of a leaf -> the gradient it had
    overflow: bool = False

    def tensors(self) -> Iterator[tuple[str, RemoteTensor]]:
        """Remote tensors by the place where they were found, gradients included."""
        for item in self.items:
            if isinstance(item.value, RemoteTensor):
                yield item.path, item.value
        for path, grad in self.grads.items():
            yield f"{path}.grad", grad


def reach(roots: dict[str, Any]) -> Reach:
    """Everything that matters below these (name -> object): what code names that is reached by names it uses."""
    used: set[str] = set()
    while True:
        walk = Walk(roots, used)
        found = walk.run()
        if walk.names & _DYNAMIC:
            return Walk(roots, None).run()
        if walk.names <= used:
            return found
        used |= walk.names


class Walk:
    """names: attributes of plain objects that some code names; None for all."""

    def __init__(self, roots: dict[str, Any], used: set[str] | None) -> None:
        self.found, self.used = Reach(), used
        self.names: set[str] = set()  # that the functions which were met use
        self._seen: dict[int, Any] = {}
        self._queue: deque[tuple[str, Any]] = deque()
        self._looked: set[int] = set()  # tensors, by identity
        self._given: set[int] = set()  # objects that a library has, whose code is not looked at, by identity
        self._unordered: set[int] = set()  # dictionaries whose order is of no consequence, by identity
        self._queue.extend(_GLOBAL)
        for name, root in roots.items():
            if isinstance(root, RemoteTensor):
                self._leaf(name, root)
            elif not plain(root):
                self._queue.append((name, root))

    def run(self) -> Reach:
        while self._queue:
            path, thing = self._queue.popleft()
            if id(thing) in self._seen:
                continue
            self._seen[id(thing)] = thing  # held, so that ids stay unique
            if len(self.found.items) > MOST:
                self.found.overflow = True
                break
            self._open(path, thing)
        return self.found

    def _open(self, path: str, thing: Any) -> None:
        kind = type(thing)
        if isinstance(thing, (dict, types.MappingProxyType)):
            self._dict(path, thing)
        elif isinstance(thing, (list, tuple, deque)):
            self._sized(path, thing)
            for n, value in enumerate(list(thing)):
                self._item(f"{path}[{n}]", thing, n, False, value)
        elif isinstance(thing, (set, frozenset)):
            if thing:
                self._stamp(path, thing)
            else:
                self._sized(path, thing)
            for n, value in enumerate(list(thing)):
                self._queue.append((f"{path}[{n}]", value))
        elif isinstance(thing, types.FunctionType):
            self._function(path, thing)
        elif isinstance(thing, types.MethodType):
            self._queue.extend([(path, thing.__self__), (path, thing.__func__)])
        elif isinstance(thing, functools.partial):
            self._queue.extend([(path, thing.func), (path, thing.args), (path, thing.keywords)])
        elif isinstance(thing, type):
            self._class(path, thing)
        elif isinstance(thing, types.ModuleType):
            self._module(path, thing)
        elif isinstance(thing, weakref.ref):
            self._queue.append((path, thing()))
        elif not isinstance(thing, RemoteTensor) and stamp(thing) is not None:
            self._stamp(path, thing)
        elif hasattr(kind, "__next__") and foreign(kind.__module__):
            self.found.opaque.append(f"{path} is an iterator ({kind.__name__}), whose position cannot be compared")
        elif not isinstance(thing, (types.BuiltinFunctionType, torch.Tensor)):
            self._object(path, thing)
        if isinstance(thing, (dict, list, tuple, set, frozenset, deque, functools.partial)) and kind.__module__ not in FOREIGN:
            self._object(path, thing)
        elif not isinstance(thing, (type, types.ModuleType, types.MethodType)):
            wrapped = getattr(thing, "__dict__", {}).get("__wrapped__")  # lru_cache, gt.compile
            if wrapped is not None:
                self._queue.append((path, wrapped))

    def _dict(self, path: str, thing: Any) -> None:
        self._sized(path, thing)
        if id(thing) in self._unordered:
            self._unordered.update(id(value) for value in thing.values() if isinstance(value, dict))
        elif len(thing) > 1:
            self.found.orders.append((path, thing, list(map(id, thing))))
        for n, (key, value) in enumerate(list(dict.items(thing) if isinstance(thing, dict) else thing.items())):
            name = repr(key) if plain(key) else str(n)
            self._item(f"{path}[{name}]", thing, key, False, value)
            if not plain(key) and not isinstance(key, torch.Tensor):
                self._queue.append((f"{path} key {n}", key))

    def _stamp(self, path: str, thing: Any) -> None:
        if isinstance(thing, np.ndarray) and thing.nbytes > LARGEST and not thing.flags.writeable:
            return  # a file's, mostly
        if isinstance(thing, (np.ndarray, torch.Tensor)) and thing.nbytes > LARGEST:
            self.found.opaque.append(f"{path} is a large {'array' if isinstance(thing, np.ndarray) else 'CPU tensor'}")
        else:
            self.found.stamps[f"{path}, {type(thing).__name__}"] = (thing, stamp(thing))

    def _sized(self, path: str, thing: Any) -> None:
        self.found.sized.append((thing, len(thing), path))

    def _item(self, path: str, holder: Any, key: Any, attribute: bool, value: Any) -> None:
        if isinstance(value, RemoteTensor):
            self._look(path, value)
        elif isinstance(value, Enum):
            self._queue.append((type(value).__name__, type(value)))
        elif not plain(value):
            self._queue.append((path, value))
        self.found.items.append(Item(path, holder, key, attribute, value))

    def _look(self, path: str, tensor: RemoteTensor) -> None:
        if id(tensor) in self._looked:
            return
        self._looked.add(id(tensor))
        self.found.looks[path] = tensor, look(tensor)
        for hooks in (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)):
            if hooks is not None:
                self._sized(f"{path}'s hooks", hooks)
        self._leaf(path, tensor)

    def _leaf(self, path: str, tensor: RemoteTensor) -> None:
        if id(tensor) not in self._seen and tensor.requires_grad and tensor.is_leaf:
            self._seen[id(tensor)] = tensor
            self.found.leaves.append((path, tensor))
            if isinstance(tensor.grad, RemoteTensor):
                self.found.grads[path] = tensor.grad

    def _function(self, path: str, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                self._item(f"{path}.{name}" if path else name, cell, "cell_contents", True, cell.cell_contents)
            except ValueError:  # empty
                continue
        self._queue.append((f"{path or function.__qualname__}'s attributes", function.__dict__))
        if foreign(function.__module__):
            return
        for name in ("__defaults__", "__kwdefaults__", "__code__"):
            value = getattr(function, name)
            self.found.items.append(Item(f"{path or function.__qualname__}.{name}", function, name, True, value))
            if name != "__code__" and value:
                self._queue.append((f"{path or function.__qualname__}.{name}", value))
        names = _names(function.__code__)
        self.names |= names
        for name in sorted(names & function.__globals__.keys()):
            self._item(name, function.__globals__, name, False, function.__globals__[name])
        package = function.__globals__.get("__package__") or ""
        for name in names:  # imported within
            module = sys.modules.get(name) or sys.modules.get(f"{package}.{name}")
            if module is not None and not foreign(module.__name__):
                self._queue.append((name, module))

    def _module(self, path: str, module: types.ModuleType) -> None:
        """What user code names of a user's module."""
        if not foreign(module.__name__):
            every = self.used is None
            for name, value in list(module.__dict__.items()):
                if name == "__getattr__" or (not name.startswith("__") and (every or name in self.used)):  # type: ignore[operator]
                    self._item(f"{path}.{name}", module.__dict__, name, False, value)

    def _class(self, path: str, cls: type) -> None:
        if foreign(cls.__module__):
            return
        every = self.used is None or foreign_base(cls)
        for name, value in list(vars(cls).items()):
            if every or name in self.used or (name.startswith("__") and name not in _SAID):  # type: ignore[operator]
                if name in ("__init__", "__new__") and self.used is not None and cls.__name__ not in self.used:
                    continue  # it is made elsewhere
                self.found.items.append(Item(f"{path}.{name}", vars(cls), name, False, value))
                for part in ("__func__", "fget", "fset", "func", "__wrapped__"):
                    inner = getattr(value, part, None) if not isinstance(value, (type, types.FunctionType)) else None
                    if isinstance(inner, types.FunctionType):
                        self._queue.append((f"{path}.{name}", inner))
                if not plain(value) and not isinstance(value, (classmethod, staticmethod, property, torch.Tensor)):
                    self._queue.append((f"{path}.{name}", value))
                elif isinstance(value, RemoteTensor):
                    self._look(f"{path}.{name}", value)
        for base in cls.__bases__:
            self._queue.append((path, base))

    def _object(self, path: str, thing: Any) -> None:
        kind = type(thing)
        if idle(kind):
            return
        self.found.kinds.append((path, thing, kind))
        if isinstance(thing, torch.optim.Optimizer):
            self.found.optimizers.append(thing)
        self._queue.append((kind.__name__, kind))
        own = getattr(thing, "__dict__", None)
        if isinstance(own, dict):
            self._sized(f"{path}'s attributes", own)
            self._attributes(path, thing, own)
        for cls in kind.__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                    self._item(f"{path}.{name}", thing, name, True, getattr(thing, name))

    def _attributes(self, path: str, thing: Any, own: dict) -> None:
        module = isinstance(thing, torch.nn.Module)
        if installed(type(thing).__module__):
            self._given.update(map(id, own.values()))
        every = self.used is None or foreign_base(type(thing)) or id(thing) in self._given
        for name, value in list(own.items()):
            if module and name in ("_parameters", "_buffers", "_modules"):
                self._sized(f"{path}.{name}", value)
                for key, part in list(value.items()):
                    self._item(f"{path}.{key}", value, key, False, part)
            elif module and name in _HOOKS and isinstance(value, dict) and not value:
                self._sized(f"{path}.{name}", value)
            elif every or name in self.used:  # type: ignore[operator]
                if isinstance(value, dict) and type(thing).__module__.startswith(STATE):
                    self._unordered.add(id(value))
                self._item(f"{path}.{name}", own, name, False, value)


def _names(code: types.CodeType) -> set[str]:
    """Globals and attributes that code names, functions within it included."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
        elif isinstance(constant, tuple):  # of a class pattern
            found |= {name for name in constant if isinstance(name, str)}
    return found


def stamp(thing: Any) -> Any:
    """The value of what changes in place and is compared as a whole; None if it is no such thing."""
    if isinstance(thing, np.ndarray):
        return (thing.shape, thing.dtype.str, thing.tobytes() if thing.nbytes <= LARGEST else b"")
    if isinstance(thing, torch.Tensor):
        if thing.device.type != "cpu" or thing.layout is not torch.strided or thing.nbytes > LARGEST:
            return (thing.shape, 0 if thing.is_inference() else thing._version)
        return (thing.shape, thing.dtype, bytes(thing.detach().contiguous().view(-1).view(torch.uint8).numpy()))
    if isinstance(thing, (set, frozenset)):
        return frozenset((type(e), exact(e)) if plain(e) else id(e) for e in thing)
    if isinstance(thing, random.Random):
        return thing.getstate()
    if isinstance(thing, torch.Generator):
        return bytes(thing.get_state().numpy()) if thing.device.type == "cpu" else None
    if isinstance(thing, (np.random.Generator, np.random.RandomState)):
        bits = thing.bit_generator if isinstance(thing, np.random.Generator) else thing._bit_generator  # type: ignore[attr-defined]
        return repr(bits.state)
    if isinstance(thing, ContextVar):
        return exact(thing.get(None))
    if isinstance(thing, bytearray) or type(thing).__module__ in ("array", "ctypes", "_ctypes"):
        try:
            return bytes(memoryview(thing))
        except TypeError:
            return None
    return None


def look(tensor: RemoteTensor) -> tuple:
    """What of a tensor decides which ops follow: which memory it names, whether it is differentiated, its hooks."""
    hooks = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
    return (tensor._ref, tensor.requires_grad, len(hooks[0] or ()), len(hooks[1] or ()))


def same(old: Any, new: Any) -> bool:
    """Whether a value is what it was: the same object, or an equal scalar."""
    if old is new:
        return True
    return type(old) is type(new) and plain(old) and bool(exact(old) == exact(new))
