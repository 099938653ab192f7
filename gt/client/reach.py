"""What a function's outcome may depend on: everything reachable from its arguments, closure and globals, as a list of items.

A walk looks at user code only: containers, attributes, closures, modules, optimizers, and the globals that functions
name. Values that Python compares cheaply are compared; objects are walked into; of tensors it is asked which they are.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch

from gt.client.tensor import RemoteTensor

MOST = 200_000  # items of one walk
LARGEST = 1 << 16  # bytes of a NumPy array that is compared
SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum, type(...), slice)
_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "gt", "numpy", "pytest", "_pytest"})
_STATE = ("torch.nn", "torch.optim", "torch.ao.nn")  # of foreign packages, those whose objects are the user's state
_SAID = frozenset({"__module__", "__dict__", "__weakref__", "__doc__", "__annotations__", "__qualname__", "__slots__"})
_DYNAMIC = frozenset({"getattr", "setattr", "vars", "__dict__", "attrgetter", "__getattr__", "__getattribute__"})
_HOOKS = frozenset(key for key in torch.nn.Module().__dict__ if key.startswith("_")) - {"_parameters", "_buffers", "_modules"}


def _foreign(module: str | None) -> bool:
    """Whether code of this module is not the user's."""
    return not module or module.partition(".")[0] in _FOREIGN


@dataclass(slots=True)
class Item:
    """holder[key] or, where `attribute`, getattr(holder, key); `value` when walked, `stamp` what else has to be the same."""

    path: str
    holder: Any
    key: Any
    attribute: bool
    value: Any
    stamp: Any = None

    def now(self) -> Any:
        return getattr(self.holder, self.key) if self.attribute else self.holder[self.key]


@dataclass
class Reach:
    """One walk's result. lengths: containers that must not grow or shrink."""

    items: list[Item] = field(default_factory=list)
    sized: list[tuple[Any, int, str]] = field(default_factory=list)
    leaves: list[tuple[str, RemoteTensor]] = field(default_factory=list)  # remote tensors that may have a .grad
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    arrays: list[str] = field(default_factory=list)  # NumPy arrays too large to compare
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
        for name, root in roots.items():
            if isinstance(root, RemoteTensor):
                self._leaf(name, root)
            elif not isinstance(root, SCALARS):
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
        if isinstance(thing, dict):
            self._sized(path, thing)
            for n, (key, value) in enumerate(list(thing.items())):
                name = repr(key) if isinstance(key, SCALARS) else str(n)
                self._item(f"{path}[{name}]", thing, key, False, value)
                if not isinstance(key, (*SCALARS, torch.Tensor)):
                    self._queue.append((f"{path} key {n}", key))
        elif isinstance(thing, (list, tuple)):
            self._sized(path, thing)
            for n, value in enumerate(thing):
                self._item(f"{path}[{n}]", thing, n, False, value)
        elif isinstance(thing, (set, frozenset, deque)):
            self._sized(path, thing)
            for n, value in enumerate(list(thing)):
                self._queue.append((f"{path}[{n}]", value))
        elif isinstance(thing, types.FunctionType):
            self._function(path, thing)
        elif isinstance(thing, types.MethodType):
            self._queue.append((path, thing.__self__))
            self._queue.append((path, thing.__func__))
        elif isinstance(thing, functools.partial):
            self._queue.extend([(path, thing.func), (path, thing.args), (path, thing.keywords)])
        elif isinstance(thing, type):
            self._class(path, thing)
        elif not isinstance(thing, (types.ModuleType, types.BuiltinFunctionType, np.ndarray, torch.Tensor, torch.Generator)):
            self._object(path, thing)

    def _sized(self, path: str, thing: Any) -> None:
        self.found.sized.append((thing, len(thing), path))

    def _item(self, path: str, holder: Any, key: Any, attribute: bool, value: Any) -> None:
        stamp = None
        if isinstance(value, RemoteTensor):
            self._leaf(path, value)
        elif isinstance(value, torch.Tensor):
            stamp = 0 if value.is_inference() else value._version
        elif isinstance(value, np.ndarray):
            if value.nbytes > LARGEST:
                self.found.arrays.append(path)
            else:
                stamp = value.tobytes()
        elif not isinstance(value, SCALARS):
            self._queue.append((path, value))
        self.found.items.append(Item(path, holder, key, attribute, value, stamp))

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
        for n, value in enumerate(function.__defaults__ or ()):
            self._queue.append((f"{path} default {n}", value))
        if function.__kwdefaults__:
            self._queue.append((f"{path} defaults", function.__kwdefaults__))
        if function.__dict__:
            self._queue.append((path, function.__dict__))
        if _foreign(function.__module__):
            return
        names = _names(function.__code__)
        self.names |= names
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType):
                self._module(name, value, names)
            else:
                self._item(name, function.__globals__, name, False, value)

    def _module(self, path: str, module: types.ModuleType, names: set[str]) -> None:
        """What user code names of a user's module."""
        if not _foreign(module.__name__):
            for name in sorted(names & module.__dict__.keys()):
                self._item(f"{path}.{name}", module, name, True, module.__dict__[name])

    def _class(self, path: str, cls: type) -> None:
        if _foreign(cls.__module__):
            return
        every = self.used is None or _foreign_base(cls)
        for name, value in list(vars(cls).items()):
            if every or name in self.used or (name.startswith("__") and name not in _SAID):  # type: ignore[operator]
                if name in ("__init__", "__new__") and self.used is not None and cls.__name__ not in self.used:
                    continue  # it is made elsewhere
                if isinstance(value, (classmethod, staticmethod)):
                    value = value.__func__
                elif isinstance(value, property):
                    value = value.fget
                if isinstance(value, types.FunctionType):
                    self._queue.append((f"{path}.{name}", value))
                elif isinstance(value, SCALARS) or not hasattr(value, "__get__"):
                    self._item(f"{path}.{name}", cls, name, True, getattr(cls, name))
        for base in cls.__bases__:
            self._queue.append((path, base))

    def _object(self, path: str, thing: Any) -> None:
        kind = type(thing)
        if _foreign(kind.__module__) and not kind.__module__.startswith(_STATE):
            return
        if isinstance(thing, torch.optim.Optimizer):
            self.found.optimizers.append(thing)
        self._queue.append((kind.__name__, kind))
        own = getattr(thing, "__dict__", None)
        if isinstance(own, dict):
            self._attributes(path, thing, own)
        for cls in kind.__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                    self._item(f"{path}.{name}", thing, name, True, getattr(thing, name))

    def _attributes(self, path: str, thing: Any, own: dict) -> None:
        module = isinstance(thing, torch.nn.Module)
        for name, value in list(own.items()):
            if module and name in ("_parameters", "_buffers", "_modules"):
                self._sized(f"{path}.{name}", value)
                for key, part in list(value.items()):
                    self._item(f"{path}.{key}", value, key, False, part)
            elif module and name in _HOOKS and isinstance(value, dict) and not value:
                self._sized(f"{path}.{name}", value)
            elif self.used is None or name in self.used or _foreign_base(type(thing)):
                self._item(f"{path}.{name}", own, name, False, value)


def _foreign_base(kind: type) -> bool:
    """Whether code that is not walked (torch's, a library's) knows instances of this class and may use any attribute."""
    return any(_foreign(cls.__module__) for cls in kind.__mro__[:-1])


def _names(code: types.CodeType) -> set[str]:
    """Globals and attributes that code names, functions within it included."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


def same(old: Any, new: Any) -> bool:
    """Whether a value is what it was: the same object, or an equal scalar."""
    if old is new:
        return True
    return type(old) is type(new) and isinstance(old, SCALARS) and (old == new or (old != old and new != new))


class Guard:
    """Whether everything that was reached is as it was. Called before every replay: one list comprehension, mostly."""

    def __init__(self, reach: Reach) -> None:
        self._items = [item for item in reach.items if not item.attribute]
        self._attributes = [item for item in reach.items if item.attribute]
        self._pairs = [(item.holder, item.key) for item in self._items]
        self._ids = [id(item.value) for item in self._items]
        self._named = [(item.holder, item.key) for item in self._attributes]
        self._named_ids = [id(item.value) for item in self._attributes]
        self._reach = reach
        self._sized = [thing for thing, length, _ in reach.sized if length]
        self._lengths = [length for _, length, _ in reach.sized if length]
        self._empty = [thing for thing, length, _ in reach.sized if not length]
        self._stamped = [item for item in reach.items if item.stamp is not None]

    def broken(self) -> str:
        """What is not as it was, or ""."""
        try:
            if [id(holder[key]) for holder, key in self._pairs] != self._ids and (why := _changed(self._items)):
                return why
            if [id(getattr(h, k)) for h, k in self._named] != self._named_ids and (why := _changed(self._attributes)):
                return why
        except (LookupError, AttributeError, ValueError, TypeError):
            return _changed(self._items) or _changed(self._attributes) or "something that it uses is gone"
        if any(self._empty) or list(map(len, self._sized)) != self._lengths:
            path, old, new = next((path, n, len(thing)) for thing, n, path in self._reach.sized if len(thing) != n)
            return f"{path} had {old} elements and has {new}"
        for item in self._stamped:
            value = item.value
            if (value.tobytes() if isinstance(value, np.ndarray) else value._version) != item.stamp:
                return f"{item.path} was changed in place"
        return ""


def _changed(items: list[Item]) -> str:
    for item in items:
        try:
            value = item.now()
        except (LookupError, AttributeError, ValueError, TypeError):
            return f"{item.path} is gone"
        if not same(item.value, value):
            if isinstance(item.value, SCALARS) and isinstance(value, SCALARS):
                return f"{item.path} was {item.value!r:.60} and is {value!r:.60}"
            return f"{item.path} is another {type(value).__name__}"
    return ""
