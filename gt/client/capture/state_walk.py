"""Snapshot of the Python state that a function may depend on: everything reachable from arguments, closure and globals.

The walk follows user code: containers, attributes, closures, modules, optimizers, and the globals that functions name. Scalars
are compared by value, objects are walked into, and of tensors only the identity counts.
"""

from __future__ import annotations

import builtins
import dis
import functools
import logging
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch

from gt.client.capture.user_code import (
    LIBRARIES,
    STATEFUL,
    has_library_base,
    is_installed,
    is_library,
    is_library_code,
    is_own,
    is_stateless,
    module_of,
)
from gt.client.capture.watches.node_hooks import hooks_of_nodes, next_serial
from gt.client.device.remote_tensor import RemoteTensor, is_leaf, tensor_identity
from gt.client.device.sparse_tensor import RemoteSparse
from gt.client.values import asked_state
from gt.client.values.code_names import names_in, operands, texts
from gt.client.values.counters import counted, may_count
from gt.client.values.fingerprints import MAX_COMPARED_BYTES, fingerprint, is_plain, is_scalar_like, is_writeable

NODE_HOOKS = "hooks of autograd nodes"
MAX_ITEMS = 200_000  # values that one snapshot compares
_CLASS_BOOKKEEPING = frozenset({
    "__module__", "__dict__", "__weakref__", "__doc__", "__annotations__", "__qualname__", "__slots__", "__slotnames__",
})  # fmt: skip
_CALLED_BY_TORCH = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl"})  # methods of modules
# Names in user code with which it may read any attribute, named or not
WHOLE = {"asdict", "astuple", "vars", "__dict__", "__getstate__", "__reduce__", "__reduce_ex__", "getattr_static"}  # as whole
_DYNAMIC_ACCESS = WHOLE | {"getattr", "setattr", "attrgetter", "__getattr__", "__getattribute__"}
_IMPORTS = (frozenset({"import_module"}), frozenset({"__import__"}), frozenset({"sys", "modules"}))  # by a text in the code
_OF_MEMBERS = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_"})  # attributes of any member of an enumeration
_GLOBAL_HOOKS = [
    (f"{module.__name__}.{name}", value)
    for module in (sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"])
    for name, value in vars(module).items()
    if name.startswith("_global") and isinstance(value, dict)
]  # hooks of all modules and optimizers
_GLOBAL_OPS = frozenset(name for name in dis.opmap if "GLOBAL" in name or name.endswith("_NAME")) - {"IMPORT_NAME"}
_STORE_OPS = frozenset({"STORE_ATTR", "DELETE_ATTR"})
_IMPORT_OPS = frozenset({"IMPORT_NAME", "IMPORT_FROM"})
CACHED_FUNCTION = type(functools.lru_cache(len))
_CONTAINERS = (dict, types.MappingProxyType, list, tuple, deque, set, frozenset, functools.partial)
_CHILD_FIELDS = frozenset({"_parameters", "_buffers", "_modules"})
_SCRATCH = {torch.autocast: ("prev", "prev_cache_enabled", "prev_fastdtype")}  # written before they are read
_NONE: Mapping = types.MappingProxyType({})
TENSOR_FIELDS = frozenset({"_ref", "_is_param"})  # attributes that GT and torch give a tensor
_HOOK_FIELDS = frozenset(key for key in torch.nn.Module().__dict__ if key.startswith("_")) - _CHILD_FIELDS


@dataclass(slots=True)
class StateItem:
    """One value of a snapshot and its place: holder[key], or getattr(holder, key) where `attribute` is true."""

    path: str
    holder: Any
    key: Any
    attribute: bool
    value: Any

    def now(self) -> Any:
        """The value that the place holds now."""
        return getattr(self.holder, self.key) if self.attribute else self.holder[self.key]

    def settable(self) -> bool:
        """True if the place can be given another value."""
        return self.attribute or isinstance(self.holder, (dict, list, deque))

    def set(self, value: Any) -> None:
        """Give the place another value."""
        if self.attribute:
            setattr(self.holder, self.key, value)
        else:
            self.holder[self.key] = value


@dataclass
class StateSnapshot:
    """The result of one walk. Paths are Python expressions for the user."""

    items: list[StateItem] = field(default_factory=list)
    lengths: list[tuple[Any, int, str]] = field(default_factory=list)  # container, its length, path
    fingerprints: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # path -> object that changes in place, its value
    absent: list[tuple[str, Any, frozenset[str]]] = field(default_factory=list)  # path, namespace, names that it lacks
    # path, function with a cache, its hits and misses
    caches: list[tuple[str, Any, tuple[int, int]]] = field(default_factory=list)
    orders: list[tuple[str, dict, list[int]]] = field(default_factory=list)  # path, dictionary, identities of its keys
    identities: dict[str, tuple[RemoteTensor, tuple]] = field(default_factory=dict)  # path -> tensor, its tensor_identity
    kinds: list[tuple[str, Any, type]] = field(default_factory=list)  # path, object, its class
    leaves: list[tuple[str, RemoteTensor]] = field(default_factory=list)  # remote tensors that may have a .grad
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)  # objects that cannot be compared: iterators, large host data
    grads: dict[str, RemoteTensor] = field(default_factory=dict)  # path of a leaf -> its gradient
    overflow: bool = False  # more than MAX_ITEMS
    names: set[str] = field(default_factory=set)  # that user code on the walk uses
    counters: dict[str, StateItem] = field(default_factory=dict)  # path -> an integer that the code only counts
    rebindable: dict[int, Any] = field(default_factory=dict)  # identity of a tensor that `.data` may rebind -> its reference
    codes: set[types.CodeType] = field(default_factory=set)  # of the user's functions on the walk
    node_hooks: dict[int, list] = field(default_factory=hooks_of_nodes)  # of autograd nodes that are alive
    serial: int = field(default_factory=next_serial)  # above those of their tables
    followed: tuple[set[str], set[str]] | None = None  # names with which a later walk may begin: used, and stored
    unread: Mapping[int, Iterable[str]] = field(default_factory=dict)  # attributes that were left out: see UnreadState
    left_flags: frozenset[str] = frozenset()  # paths of those that `leave_out` has left out: they tell kinds apart

    def add_lasting(self, path: str, tensor: RemoteTensor) -> None:
        """Add a tensor that no walk reaches, and that stays the same."""
        self.items.append(StateItem(path, {path: tensor}, path, False, tensor))
        self.identities[path] = tensor, tensor_identity(tensor)

    def tensors(self) -> Iterator[tuple[str, RemoteTensor]]:
        """Paths and remote tensors, gradients included."""
        for item in self.items:
            if isinstance(item.value, RemoteTensor):
                yield item.path, item.value
        for path, grad in self.grads.items():
            yield f"{path}.grad", grad

    def kind(self) -> tuple[frozenset[str], frozenset[str]]:
        """The leaves that have a gradient and the flags that are set, by path: other ops are likely with others."""
        return frozenset(self.grads), frozenset(item.path for item in self.items if item.value is True) | self.left_flags

    def leave_out(self, places: set[tuple[int, Any]]) -> None:
        """Compare no more those places that hold a number or text, or a list or tuple of some.

        A place: identity of its holder, and key.
        """
        # A list that a place beside these holds too may be read there
        elsewhere = {id(i.value) for i in self.items if type(i.value) is list and (id(i.holder), i.key) not in places}
        paths = {
            item.path
            for item in self.items
            if (id(item.holder), item.key) in places and id(item.value) not in elsewhere and is_plain(item.value)
        }
        self.left_flags |= {item.path for item in self.items if item.path in paths and item.value is True}
        self.items = [item for item in self.items if item.path not in paths and item.path.rpartition("[")[0] not in paths]
        self.lengths = [row for row in self.lengths if row[2] not in paths]


def snapshot(
    roots: dict[str, Any], followed: tuple[set[str], set[str]] | None = None, unread: Mapping[int, Iterable[str]] = _NONE
) -> StateSnapshot:
    """Everything below the roots (name -> object) that user code can reach by the attributes that it names.

    User code that is met names more attributes, so walks are repeated until none adds a name. followed: of an earlier snapshot
    of these roots. Where the code still names the same, one walk is enough. unread: see UnreadState.
    """
    if followed is not None:
        walker = StateWalker(roots, *followed, unread=unread)
        state = walker.run()
        if (walker.names, walker.stores) == followed:
            state.names, state.counters, state.followed = walker.names, walker.counters(), followed
            return state
    used: set[str] = set()
    stored: set[str] = set()
    while True:
        # Names grow with each walk, and are finite: the loop ends when a walk meets no code that names more
        walker = StateWalker(roots, used, stored, unread=unread)
        state = walker.run()
        state.names = walker.names
        # Code with getattr() and the like may read any attribute, so all of them count
        if walker.names & _DYNAMIC_ACCESS:
            state = StateWalker(roots, None, walker.stores, walker.names, _NONE if walker.names & WHOLE else unread).run()
            state.names = walker.names
            return state
        if walker.names <= used:
            state.counters = walker.counters()
            state.followed = (used, stored) if (walker.names, walker.stores) == (used, stored) else None
            return state
        used |= walker.names
        stored |= walker.stores


class StateWalker:
    """One breadth-first walk. used: attributes of objects that user code names, None for all. stored: those that it assigns.

    named: those that it names, where `used` is None.
    """

    def __init__(
        self, roots: dict[str, Any], used: set[str] | None, stored: set[str], named: AbstractSet[str] = frozenset(),
        unread: Mapping[int, Iterable[str]] = _NONE,
    ) -> None:  # fmt: skip
        self.snapshot, self.used, self._stored, self._unread = StateSnapshot(unread=unread), used, stored, unread
        self._of_libraries = stored | (named if used is None else used) | _CALLED_BY_TORCH  # compared in libraries
        self._builtins: set[str] = set()  # names of builtins that code uses
        self.names: set[str] = set()  # that functions on the walk use
        self.stores: set[str] = set()  # attributes that they assign
        self._seen: dict[int, Any] = {}  # by identity
        self._queue: deque[tuple[str, Any]] = deque()
        self._visited_tensors: set[int] = set()  # tensors, by identity
        self._library_state: set[int] = set()  # objects held by library code, which is not walked; by identity
        self._unordered: set[int] = set()  # dictionaries whose order does not matter, by identity
        self._integers: dict[int, str] = {}  # identity of an item -> name of the variable or attribute that holds an integer
        self._queue.extend([*_GLOBAL_HOOKS, ("torch.Tensor", torch.Tensor)])  # methods of tensors may be replaced
        self._queue.extend((f"{NODE_HOOKS}[{n}]", hooks) for n, hooks in enumerate(self.snapshot.node_hooks.values()))
        # A tensor that is an argument is compared by its metadata, as part of the key. As a leaf it may have a .grad
        for name, root in roots.items():
            if isinstance(root, RemoteTensor):
                self._add_hooks(name, root)
                self._add_leaf(name, root)
            elif not is_scalar_like(root):
                self._queue.append((name, root))

    def run(self) -> StateSnapshot:
        while self._queue:
            path, node = self._queue.popleft()  # breadth first: an object is named by its shortest path
            if id(node) in self._seen:
                continue
            self._seen[id(node)] = node  # kept alive, so that identities stay unique
            if len(self.snapshot.items) > MAX_ITEMS:
                self.snapshot.overflow = True
                break
            try:
                self._visit(path, node)
            except RuntimeError as error:  # of a tensor without memory of its own, as a sparse or nested one
                self.snapshot.opaque.append(f"{path} cannot be compared ({str(error).splitlines()[0]})")
        return self.snapshot

    def counters(self) -> dict[str, StateItem]:
        """Integers that the code on the walk only counts, by path."""
        names = counted(self.snapshot.codes) if self._integers else ()
        items = [item for item in self.snapshot.items if type(item.value) is int]
        kept = {id(item) for item in items if self._integers.get(id(item)) in names}
        # A place that is also reached by other means, as a key of a dictionary, may be read there
        elsewhere = {(id(item.holder), item.key) for item in items if id(item) not in kept}
        return {i.path: i for i in items if id(i) in kept and (id(i.holder), i.key) not in elsewhere}

    def _note_integer(self, name: str) -> None:
        """The newest item is a variable or attribute of this name, which may be a counter."""
        item = self.snapshot.items[-1]
        if type(item.value) is int:
            self._integers[id(item)] = name

    def _visit(self, path: str, node: Any) -> None:
        kind = type(node)
        if isinstance(node, _CONTAINERS):
            self._visit_container(path, node)
            if module_of(kind) not in LIBRARIES:  # a user's subclass, which may have attributes
                self._visit_object(path, node)
                return
        elif not self._visit_code(path, node):
            self._visit_value(path, node)
        if not isinstance(node, (type, types.ModuleType, types.MethodType)):
            # A function that functools.wraps has wrapped is user code, even if the wrapper is a library's
            wrapped = getattr(node, "__dict__", {}).get("__wrapped__")  # lru_cache, gt.compile
            if wrapped is not None:
                self._queue.append((path, wrapped))
            if type(node) is CACHED_FUNCTION:
                self.snapshot.caches.append((path, node, node.cache_info()[:2]))

    def _visit_container(self, path: str, node: Any) -> None:
        if isinstance(node, (dict, types.MappingProxyType)):
            self._visit_dict(path, node)
        elif isinstance(node, (list, tuple, deque)):
            self._add_length(path, node)
            for index, value in enumerate(list(iter(node))):  # list(node) would call its __len__
                self._add_item(f"{path}[{index}]", node, index, False, value)
        elif isinstance(node, functools.partial):
            self._queue.extend([(path, node.func), (path, node.args), (path, node.keywords)])
            self._add_stored(path, node.__dict__)
        else:  # a set
            # The order of a set says nothing. An empty one is compared by its length alone, as any empty container
            if node:
                self._add_fingerprint(path, node)
            else:
                self._add_length(path, node)
            for index, value in enumerate(list(node)):
                self._queue.append((f"{path}[{index}]", value))

    def _visit_code(self, path: str, node: Any) -> bool:
        """Visit a function, method, class, module or weak reference; False for any other object."""
        if isinstance(node, types.FunctionType):
            self._visit_function(path, node)
        elif isinstance(node, types.MethodType):
            self._queue.extend([(path, node.__self__), (path, node.__func__)])
        elif isinstance(node, type):
            self._visit_class(path, node)
        elif isinstance(node, types.ModuleType):
            self._visit_module(path, node)
        elif isinstance(node, types.CellType):
            cell = asked_state.CellState(node)
            self._add_item(f"{path}.cell_contents", cell, "contents", True, cell.contents)
        elif (getter := asked_state.names_of_getter(node)) is not None:
            self.names |= getter[0]
            self._queue.append((path, getter[1]))
        elif (things := asked_state.behind(node)) is not None:
            self._queue.extend((path, thing) for thing in things)
        else:
            return False
        return True

    def _visit_value(self, path: str, node: Any) -> None:
        kind = type(node)
        if not isinstance(node, RemoteTensor) and fingerprint(node) is not None:
            self._add_fingerprint(path, node)
            if isinstance(node, torch.Tensor):
                self._visit_cpu_tensor(path, node)
            if is_library(module_of(kind)):
                self._add_stored(path, getattr(node, "__dict__", {}))
            else:  # a subclass of the user's, which may have attributes
                self._visit_object(path, node)
        elif hasattr(kind, "__next__") and is_library(module_of(kind)):
            self.snapshot.opaque.append(f"{path} is an iterator ({kind.__name__}), whose position cannot be compared")
        elif asked_state.is_hidden(node):
            self.snapshot.opaque.append(f"{path} is a {kind.__name__}, whose content cannot be compared")
        elif (lock := asked_state.lock_state(node, self._of_libraries)) is not None:
            self.snapshot.items.append(StateItem(f"{path}.locked()", lock, "text", True, lock.text))
        elif not isinstance(node, torch.Tensor):
            self._visit_object(path, node)

    def _visit_cpu_tensor(self, path: str, tensor: torch.Tensor) -> None:
        """Attributes of a CPU tensor that the code uses, as a remote one's."""
        for name in ("requires_grad", *(("grad",) if is_leaf(tensor) else ())):
            self._add_item(f"{path}.{name}", tensor, name, True, getattr(tensor, name))
        for name in list(tensor.__dict__.keys() - TENSOR_FIELDS):
            if self.used is None or name in self.used:
                self._add_item(f"{path}.{name}", tensor.__dict__, name, False, tensor.__dict__[name])

    def _visit_dict(self, path: str, node: Any) -> None:
        self._add_length(path, node)
        # The order of keys decides the order of ops, but in libraries'
        # own tables, as an optimizer's state, where code looks keys up
        if id(node) in self._unordered:
            self._unordered.update(id(value) for value in node.values() if isinstance(value, dict))
        elif len(node) > 1:
            self.snapshot.orders.append((path, node, list(map(id, node))))
        for index, (key, value) in enumerate(list(dict.items(node) if isinstance(node, dict) else node.items())):
            name = repr(key) if is_scalar_like(key) else str(index)
            self._add_item(f"{path}[{name}]", node, key, False, value)
            if not is_scalar_like(key) and not isinstance(key, RemoteTensor):
                self._queue.append((f"{path} key {index}", key))

    def _add_fingerprint(self, path: str, node: Any) -> None:
        if isinstance(node, np.ndarray) and node.nbytes > MAX_COMPARED_BYTES and not is_writeable(node):
            return  # most are mapped files, which nothing in Python writes
        if isinstance(node, (np.ndarray, torch.Tensor)) and node.nbytes > MAX_COMPARED_BYTES:
            self.snapshot.opaque.append(f"{path} is a large {'array' if isinstance(node, np.ndarray) else 'CPU tensor'}")
        else:
            self.snapshot.fingerprints[f"{path}, {type(node).__name__}"] = (node, fingerprint(node))
            if isinstance(node, np.ndarray) and node.dtype.hasobject:
                self._queue.append((path, node.ravel().tolist()))

    def _add_length(self, path: str, node: Any) -> None:
        length = tuple.__len__(node) if isinstance(node, tuple) else len(node)  # a class of tuples may refuse len()
        self.snapshot.lengths.append((node, length, path))

    def _add_item(self, path: str, holder: Any, key: Any, attribute: bool, value: Any) -> None:
        # Tensors are compared by identity, scalars by value; all else is walked into
        if isinstance(value, RemoteTensor):
            self._add_tensor(path, value)
            for n, part in enumerate(value.parts if isinstance(value, RemoteSparse) else ()):
                self._add_item(f"{path}'s part {n}", value.parts, n, False, part)  # type: ignore[attr-defined]
        elif isinstance(value, Enum):
            self._queue.append((type(value).__name__, type(value)))
            self._visit_member(path, value)
        elif not is_scalar_like(value):
            self._queue.append((path, value))
        self.snapshot.items.append(StateItem(path, holder, key, attribute, value))

    def _visit_member(self, path: str, member: Enum) -> None:
        if id(member) not in self._seen:
            self._seen[id(member)] = member
            own = vars(member)
            for name in own.keys() - _OF_MEMBERS:
                self._add_item(f"{path}.{name}", own, name, False, own[name])

    def _add_tensor(self, path: str, tensor: RemoteTensor) -> None:
        if id(tensor) in self._visited_tensors:
            return
        self._visited_tensors.add(id(tensor))
        self.snapshot.identities[path] = tensor, tensor_identity(tensor)
        self._add_hooks(path, tensor)
        self._add_leaf(path, tensor)
        # Attributes that a user gives a parameter, as p.rate = 0.1 or p.sum_of_gradients = zeros_like(p)
        own = tensor.__dict__
        self._add_length(f"{path}'s attributes", own)
        for name in own.keys() - TENSOR_FIELDS if len(own) > 1 else ():
            if self.used is None or name in self.used:
                self._add_item(f"{path}.{name}", own, name, False, own[name])

    def _add_hooks(self, path: str, tensor: RemoteTensor) -> None:
        """User code that backward() calls, with the state that only it knows, such as an optimizer for each parameter."""
        for hooks in (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)):
            if hooks is not None:
                self._queue.append((f"{path}'s hooks", hooks))

    def _add_leaf(self, path: str, tensor: RemoteTensor) -> None:
        # A frozen parameter keeps the gradient that it had, and optimizers use it until zero_grad() drops it
        follows = is_leaf(tensor) and (tensor.requires_grad or "_is_param" in tensor.__dict__ or tensor.grad is not None)
        if id(tensor) not in self._seen and follows:
            self._seen[id(tensor)] = tensor
            self.snapshot.leaves.append((path, tensor))
            if isinstance(tensor.grad, RemoteTensor):
                self.snapshot.grads[path] = tensor.grad

    def _visit_function(self, path: str, function: types.FunctionType) -> None:
        """Closure and attributes of any function but GT's own; code, defaults and the globals that it names of a user's."""
        if is_own(function):  # such as the hook with which gt.plan follows optimizers
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                if id(cell) not in self._unread:
                    self._add_item(f"{path}.{name}" if path else name, cell, "cell_contents", True, cell.cell_contents)
                    self._note_integer(name)
            except ValueError:  # empty
                continue
        self._queue.append((f"{path or function.__qualname__}'s attributes", function.__dict__))

        # A library's code is assumed not to change. Its closure was walked above: it may hold a user's function
        if is_library_code(function.__globals__):
            self._add_asked({function.__name__}, function)  # under any name of the user's
            return
        for name in ("__defaults__", "__kwdefaults__", "__code__"):
            value = getattr(function, name)
            self.snapshot.items.append(StateItem(f"{path or function.__qualname__}.{name}", function, name, True, value))
            if name != "__code__" and value:
                self._queue.append((f"{path or function.__qualname__}.{name}", value))

        # Globals that the code names, and the names for later walks
        names = names_in(function.__code__)
        self.names |= names
        self.stores |= operands(function.__code__, _STORE_OPS)
        if names & _DYNAMIC_ACCESS:
            self.stores |= texts(function.__code__)
        self.snapshot.codes.add(function.__code__)
        self._add_asked(names, function)
        self._visit_globals(function)
        self._visit_imported(function, names)

    def _add_asked(self, names: set[str], function: types.FunctionType) -> None:
        """State that no object leads to, and that code asks for by these names."""
        for path, thing in asked_state.asked_by_name(names, function):
            self._queue.append((path, thing)) if fingerprint(thing) is None else self._add_fingerprint(path, thing)
        if "_version" in names and asked_state.names_a_tensor(function):
            self.snapshot.opaque.append("the version of a tensor, which a replay does not count,")

    def _visit_globals(self, function: types.FunctionType) -> None:
        """Globals and builtins that a user's function names."""
        every = function.__globals__
        named = operands(function.__code__, _GLOBAL_OPS)
        if "globals" in named:  # code may read any
            named |= texts(function.__code__) | {name for name in every if not name.startswith("__")}
        # A builtin that the code names, until a later cell of a notebook gives a global of the program that name
        self._add_absent("globals", every, named)
        for name in sorted(named & every.keys()):
            self._add_item(name, every, name, False, every[name])
            self._note_integer(name)
        for name in sorted(named.intersection(vars(builtins)) - every.keys() - self._builtins):
            self.snapshot.items.append(StateItem(name, vars(builtins), name, False, getattr(builtins, name)))
            self._builtins.add(name)

    def _visit_imported(self, function: types.FunctionType, names: set[str]) -> None:
        """Those users' modules that a function's own code imports."""
        if any(needed <= names for needed in _IMPORTS):
            self._add_modules(name for name in texts(function.__code__) & sys.modules.keys() if not is_library(name))
        if {"sys", "modules"} <= names:
            self._add_absent("sys.modules", sys.modules, texts(function.__code__))
        package = function.__globals__.get("__package__") or ""
        loaded = {name: next((n for n in (name, f"{package}.{name}") if sys.modules.get(n)), "") for name in names}
        modules = {name: place for name, place in loaded.items() if place and not is_library(sys.modules[place].__name__)}
        # A function of another origin may have the name of a module that somebody has imported, such as train()
        self._add_modules(modules[name] for name in modules.keys() & operands(function.__code__, _IMPORT_OPS) if modules)

    def _add_modules(self, names: Iterable[str]) -> None:
        """Users' modules under these names. Another one may come there, as it is imported anew."""
        for name in sorted(names):
            self._add_item(name, sys.modules, name, False, sys.modules[name])

    def _visit_module(self, path: str, module: types.ModuleType) -> None:
        """Those globals of a user's module that user code names."""
        if not is_library(module.__name__):
            every = self.used is None
            self._add_absent(path, module.__dict__, self._of_libraries | {"__getattr__"})
            for name, value in list(module.__dict__.items()):
                if name == "__getattr__" or (not name.startswith("__") and (every or name in self.used)):  # type: ignore[operator]
                    self._add_item(f"{path}.{name}", module.__dict__, name, False, value)
                    self._note_integer(name)
        else:
            self._add_replaceable(path, module.__dict__)
            if module is logging:
                self._add_fingerprint("logging.root", logging.root)

    def _add_stored(self, path: str, own: Any) -> None:
        """Those attributes of a library's object that user code assigns. They are not walked into."""
        for name in sorted(self._stored & own.keys()):
            self.snapshot.items.append(StateItem(f"{path}.{name}", own, name, False, own[name]))

    def _add_replaceable(self, path: str, own: Any, besides: AbstractSet[str] = frozenset()) -> None:
        """Those attributes of a library's module or class that user code names, and the method of modules that torch calls.

        Any code of the program may replace them. Walked into are a function of the user's, and numbers and texts in a list or
        dictionary, as in sys.argv. besides: names that are left out.
        """
        for name in sorted((self._of_libraries & own.keys()) - besides):
            value = own[name]
            self.snapshot.items.append(StateItem(f"{path}.{name}", own, name, False, value))
            plain = type(value) in (list, dict) and is_plain(list(value.values() if type(value) is dict else value))
            if plain or (isinstance(value, types.FunctionType) and not is_library_code(value.__globals__)):
                self._queue.append((f"{path}.{name}", value))

    def _add_absent(self, path: str, own: Any, names: AbstractSet[str]) -> None:
        """Names that a namespace lacks, where another one answers for it: a builtin, a class's base, a default of getattr()."""
        if missing := frozenset(names - own.keys() - _CLASS_BOOKKEEPING):
            self.snapshot.absent.append((path, own, missing))

    def _visit_class(self, path: str, cls: type) -> None:
        own, inherited = vars(cls), {name for base in cls.__mro__[1:] for name in vars(base)}
        if is_library(module_of(cls)):
            # torch's tracers replace this one for a while, as another thread may do at any time
            self._add_replaceable(path, own, {"__call__"} if cls is torch.nn.Module else frozenset())
            self._add_absent(path, own, self._of_libraries)
            return
        self._add_absent(path, own, self._of_libraries | inherited)
        self.snapshot.items.append(StateItem(f"{path}.__bases__", cls, "__bases__", True, cls.__bases__))
        for member in cls.__members__.values() if issubclass(cls, Enum) else ():
            self._visit_member(f"{path}.{member.name}", member)
        every = self.used is None or has_library_base(cls)
        for name, value in list(vars(cls).items()):
            if every or name in self.used or (name.startswith("__") and name not in _CLASS_BOOKKEEPING):  # type: ignore[operator]
                # A constructor names many globals, and is of no account where no code on the walk names its class
                if name in ("__init__", "__new__") and self.used is not None and cls.__name__ not in self.used:
                    continue  # no user code makes instances
                self.snapshot.items.append(StateItem(f"{path}.{name}", vars(cls), name, False, value))
                # The functions in classmethod, property, cached_property and wrappers: descriptors hide them from the walk
                for part in ("__func__", "fget", "fset", "func", "__wrapped__"):
                    inner = getattr(value, part, None) if not isinstance(value, (type, types.FunctionType)) else None
                    if isinstance(inner, (types.FunctionType, *asked_state.GETTERS)):
                        self._queue.append((f"{path}.{name}", inner))
                if isinstance(value, RemoteTensor):
                    self._add_tensor(f"{path}.{name}", value)
                elif not is_scalar_like(value) and not isinstance(value, (classmethod, staticmethod, property)):
                    self._queue.append((f"{path}.{name}", value))
        self._queue.extend((path, base) for base in (type(cls), *cls.__bases__))

    def _visit_object(self, path: str, node: Any) -> None:
        kind = type(node)
        if is_stateless(kind):
            self._add_stored(path, getattr(node, "__dict__", {}))
            return
        self.snapshot.kinds.append((path, node, kind))
        if isinstance(node, torch.optim.Optimizer) and "param_groups" in vars(node):  # not a wrapper, as Accelerate's
            self.snapshot.optimizers.append(node)
        self._queue.append((kind.__name__, kind))
        own = getattr(node, "__dict__", None)
        if isinstance(own, dict):
            self._add_length(f"{path}'s attributes", own)
            if not isinstance(node, (torch.nn.Module, torch.optim.Optimizer)):  # torch fills the dictionary of these
                self.snapshot.items.append(StateItem(f"{path}.__dict__", node, "__dict__", True, own))
            self._visit_attributes(path, node, own)
        for cls in kind.__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(node, name):
                    self._add_item(f"{path}.{name}", node, name, True, getattr(node, name))

    def _visit_attributes(self, path: str, node: Any, own: dict) -> None:
        module, kind = isinstance(node, torch.nn.Module), type(node)
        if is_installed(module_of(type(node))):
            self._library_state.update(map(id, own.values()))
        # Library code is not walked, so it is not known which attributes it names: where it knows the object, all count
        every = self.used is None or has_library_base(type(node)) or id(node) in self._library_state
        unread = _SCRATCH.get(kind) or self._unread.get(id(own), ())

        # A module's children are at `model.layer`, not at `model._modules['layer']`, in paths that a user reads.
        # Its empty tables of hooks are compared by length alone: a model has a dozen of them for each module
        for name, value in list(own.items()):
            if module and name in _CHILD_FIELDS:
                self._add_length(f"{path}.{name}", value)
                for key, part in list(value.items()):
                    self._add_item(f"{path}.{key}", value, key, False, part)
            elif module and name in _HOOK_FIELDS and isinstance(value, dict) and not value:
                self._add_length(f"{path}.{name}", value)
            elif (every or name in self.used) and name not in unread:  # type: ignore[operator]
                if isinstance(value, dict) and module_of(type(node)).startswith(STATEFUL):
                    self._unordered.add(id(value))
                self._add_item(f"{path}.{name}", own, name, False, value)
                if type(value) is int and may_count(kind, name):  # type: ignore[arg-type]
                    self._note_integer(name)
