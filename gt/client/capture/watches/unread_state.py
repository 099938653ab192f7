"""Attributes that change between calls of a captured function, and that its calls do not use: they are not compared.

Of an object that a library knows every attribute is compared, since the library's code is not walked. A user's module is one,
so `self.history.append(loss.item())` after each call would ask for a program for each length. In recorded calls a descriptor
on the object's class stands for an attribute that changes, and notes each use. What a call has not used while all that is
compared was the same, a replay would not use either. A variable in the closure of a callback is used by code that has its name.
"""

from __future__ import annotations

import contextlib
import gc
import types
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from gt.client.capture.guards import Guard, bookkeeping
from gt.client.capture.recording import CallRecording, Difference
from gt.client.capture.state_walk import WHOLE, StateItem, StateSnapshot
from gt.client.values.fingerprints import fingerprint, is_scalar_like, unchanged
from gt.wire.signals import uninterrupted

USED = "is used in this call, and was not compared before it; the next calls can become a program"
# Names with which code reads all attributes of an object at once, as pickling in C does, and code that looks up one by them
_READERS = frozenset(
    {"vars", "__dict__", "__getstate__", "__reduce_ex__", "__reduce__", "dumps", "dump", "Pickler", "__closure__"}
)
_LOOKUPS = frozenset({
    *(("torch.nn.modules.module", name) for name in ("__getattr__", "__setattr__", "register_parameter", "register_buffer")),
    *(("torch.utils._python_dispatch", name) for name in ("__init__", "__enter__", "__exit__")),
    *(("transformers.utils.generic", name) for name in ("__post_init__", "<genexpr>")),
    ("functools", "__get__"), ("importlib._bootstrap_external", "exec_module"),
})  # fmt: skip
_STATE = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)  # whose tensors a walk has to find
_IN_PLACE = (list, dict, set, deque, bytearray, np.ndarray)  # values that other holders may see change
MAX_NESTED = 32  # containers below one value that are looked at
_HEAP_TYPE = 1 << 9  # of tp_flags: a class that Python code has made
_MISSING = object()
_CONTENTS = "cell_contents"  # the attribute of a variable in a closure
_Place = tuple[int, str]  # identity of the `__dict__`, and name


class AttributeWatch:
    """A descriptor that stands for one attribute of a class's objects, which keep their values in their `__dict__`."""

    def __init__(self, kind: type, name: str) -> None:
        self.used: set[int] = set()  # identities of each `__dict__` whose attribute was used
        self._kind, self.name = kind, name
        self._own = vars(kind).get(name, _MISSING)
        self._behind = next((vars(cls)[name] for cls in kind.__mro__ if name in vars(cls)), _MISSING)
        if hasattr(type(self._behind), "__set__"):
            raise TypeError(f"{kind.__name__}.{name} is a descriptor, which decides where its values are")
        if self._behind is not _MISSING and kind.__subclasses__():
            raise TypeError(f"super().{name} of a subclass is {kind.__name__}'s own value")
        setattr(kind, name, self)

    def remove(self) -> bool:
        """Give the class its own attribute back: False if somebody has given it another one."""
        if vars(self._kind).get(self.name) is not self:
            return False
        if self._own is _MISSING:
            delattr(self._kind, self.name)
        else:
            setattr(self._kind, self.name, self._own)
        return True

    def _values(self, thing: Any) -> dict:
        own = object.__getattribute__(thing, "__dict__")
        self.used.add(id(own))
        return own

    def __get__(self, thing: Any, kind: type | None = None) -> Any:
        if thing is not None and self.name in (own := self._values(thing)):
            return own[self.name]
        if self._behind is _MISSING:
            raise AttributeError(f"{self._kind.__name__!r} object has no attribute {self.name!r}")
        get = getattr(type(self._behind), "__get__", None)
        return self._behind if get is None else get(self._behind, thing, kind)

    def __set__(self, thing: Any, value: Any) -> None:
        self._values(thing)[self.name] = value

    def __delete__(self, thing: Any) -> None:
        if self._values(thing).pop(self.name, _MISSING) is _MISSING:
            raise AttributeError(self.name)


class UnreadState:
    """The attributes of one compiled function that are not compared. As a context manager it notes the uses inside."""

    def __init__(self) -> None:
        self._places: dict[_Place, tuple[Any, str]] = {}  # its `__dict__` or cell, and its path
        self._watched: dict[_Place, tuple[Any, StateItem]] = {}  # owner and item of those that changed before this call
        self._owners: dict[_Place, Any] = {}  # of the places
        self._used: set[_Place] = set()  # by some call
        # As the last recorded call has left them: owner, name, path and value. Nothing here keeps an object alive
        self._left: list[tuple[weakref.ref, str, str, Any]] = []
        self._watches: list[AttributeWatch] = []
        self._reads_all = False  # True if the user's code may read all attributes of an object at once

    def names(self) -> Mapping[int, set[str]]:
        """The attributes that walks leave out, by identity of the `__dict__` that has them."""
        names: dict[int, set[str]] = defaultdict(set)
        for number, name in self._places:
            names[number].add(name)
        return names

    def paths(self) -> list[str]:
        """The attributes as a user reads them, sorted."""
        return sorted(path.lstrip(".") for _, path in self._places.values())

    def begin(self, refused: Iterable[Guard]) -> None:
        """A call is about to be recorded. refused: guards of programs that could not serve it."""
        self._watched = {}
        for known, name, path, value in self._left:
            if (owner := known()) is not None and _value((own := vars(owner)).get(name)) != value:
                self._watched[id(own), name] = owner, StateItem(path, own, name, False, None)
        self._left = []
        for guard in () if self._reads_all else refused:
            owners, holders = _objects(guard.snapshot)
            for item in _changed(guard.snapshot, holders):
                self._watch_above(item, owners, holders)
        shared = _shared([item for _, item in self._watched.values()])
        self._watched = {place: row for place, row in self._watched.items() if place not in shared}

    def __enter__(self) -> None:
        with uninterrupted():
            self._watch()

    def __exit__(self, *error: Any) -> None:
        with uninterrupted():
            self._unwatch()

    def _watch(self) -> None:
        rows = [(owner, name) for (_, name), owner in self._owners.items()]
        rows += [(owner, name) for (_, name), (owner, _) in self._watched.items()]
        rows = [row for row in rows if not isinstance(row[0], types.CellType)]
        every = {(type(owner), name) for owner, name in rows}
        for kind, name in every:
            # A watch on a base serves, unless a class before it has such an attribute
            found = next((cls for cls in kind.__mro__[1:] if name in vars(cls) or (cls, name) in every), None)
            if name not in vars(kind) and (found, name) in every:
                continue
            try:
                self._watches.append(AttributeWatch(kind, name))
            except (TypeError, AttributeError, ValueError):  # a class that takes no attributes
                self._used |= {(id(vars(owner)), name) for owner, other in rows if other == name}

    def _unwatch(self) -> None:
        watches, self._watches = self._watches, []
        for watch in watches:
            kept = False
            with contextlib.suppress(TypeError, AttributeError):
                kept = watch.remove()
            # Where the call has written to the class, all places of this name count as used
            places = [*self._places, *self._watched] if not kept else []
            self._used |= {(number, watch.name) for number in watch.used} | {p for p in places if p[1] == watch.name}

    def finish(self, ran: Iterable[tuple[str, types.CodeType]] | None, tape: CallRecording, leaving: StateSnapshot) -> None:
        """The call is over, and has left this state. ran: modules and code that ran in it; None where nothing told of it.

        What it has not used is left out of the next walks. A place that it has used is compared again.
        """
        self._reads_all |= not WHOLE.isdisjoint(leaving.names)
        blind = ran is None or self._reads_all
        readers = (row for row in ran or () if not _READERS.isdisjoint(row[1].co_names))
        blind |= any((name, code.co_name) not in _LOOKUPS for name, code in readers)
        paths = {place: path for place, (_, path) in self._places.items()}
        paths |= {place: item.path for place, (_, item) in self._watched.items()}
        variables = {name for _, code in ran or () for name in (*code.co_freevars, *code.co_cellvars)}
        self._used |= {p for p, path in paths.items() if p[1] == _CONTENTS and path.rpartition(".")[2] in variables}
        for place, (_, path) in list(self._places.items()):
            if blind or place in self._used:
                self._used.add(place)
                del self._places[place], self._owners[place]
                tape.prevents.append(Difference("", f"{path.lstrip('.')} {USED}"))
        for place, (owner, item) in self._watched.items():
            if not blind and place not in self._used:
                self._places[place], self._owners[place] = (item.holder, item.path), owner
        self._watched = {}
        if self._reads_all:
            return
        owners, _ = _objects(leaving)
        for item in leaving.items:
            owner = owners.get(id(item.holder))
            if owner is not None and self._may_leave_out(owner, item):
                with contextlib.suppress(TypeError):  # a class whose objects take no weak reference
                    self._left.append((weakref.ref(owner), item.key, item.path, _value(item.value)))

    def _watch_above(self, item: StateItem, owners: dict[int, Any], holders: dict[int, StateItem]) -> None:
        """Watch the innermost attribute above a changed item, if no call has used it."""
        above: StateItem | None = item
        seen: set[int] = set()
        while above is not None and id(above) not in seen:
            seen.add(id(above))
            owner = owners.get(id(above.holder))
            if isinstance(above.holder, types.CellType):
                if not isinstance(above.value, _STATE) and (id(above.holder), above.key) not in self._used:
                    self._watched[id(above.holder), above.key] = above.holder, above
                return
            if owner is not None:
                if self._may_leave_out(owner, above):
                    self._watched[id(above.holder), above.key] = owner, above
                return  # an object of which an attribute is used may be known to others than those above
            above = holders.get(id(above.holder))

    def _may_leave_out(self, owner: Any, item: StateItem) -> bool:
        """True for an attribute that no call has used, of an object whose attributes no code in C reads by itself."""
        special = item.attribute or type(item.key) is not str or item.key.startswith("__") or isinstance(item.value, _STATE)
        # An optimizer's state is of account to calls of another kind
        special |= isinstance(owner, torch.optim.Optimizer) or (id(item.holder), item.key) in self._used
        return not special and all(cls is object or cls.__flags__ & _HEAP_TYPE for cls in type(owner).__mro__)


def _objects(state: StateSnapshot) -> tuple[dict[int, Any], dict[int, StateItem]]:
    """Objects by the identity of their `__dict__`, but where two classes share one, and items by that of their value."""
    rows = [(id(vars(node)), node) for _, node, _ in state.kinds if hasattr(node, "__dict__")]
    classes = Counter(number for number, _ in {(number, type(node)) for number, node in rows})
    owners = {number: node for number, node in rows if classes[number] == 1}
    holders: dict[int, StateItem] = {}
    for item in state.items:
        if not is_scalar_like(item.value):
            holders.setdefault(id(item.value), item)
    return owners, holders


def _shared(items: list[StateItem]) -> set[_Place]:
    """Places whose value changes in place and is held by others too: a library's object may read it there."""
    known: dict[int, tuple[Any, _Place]] = {}  # containers by identity, and the place below which they are
    shared: set[_Place] = set()
    for item in items:
        place, queue = (id(item.holder), item.key), deque([item.now()])
        nested = 0
        while queue:
            value = queue.popleft()
            if not isinstance(value, _IN_PLACE) or id(value) in known:
                continue
            if (nested := nested + 1) > MAX_NESTED:
                shared.add(place)
                break
            known[id(value)] = value, place
            if isinstance(value, (list, deque, set, dict)):
                queue += value.values() if isinstance(value, dict) else value
    if not known:
        return shared
    own = bookkeeping()
    allowed = {id(item.holder) for item in items} | known.keys() | {id(known), *map(id, known.values())}
    for referrer in gc.get_referrers(*(value for value, _ in known.values())):
        if id(referrer) in allowed or id(referrer) in own or isinstance(referrer, (StateItem, types.FrameType)):
            continue
        if id(_attributes(referrer)) in allowed:
            continue  # the object that has the attribute, where Python keeps no dictionary of it
        shared |= {known[id(thing)][1] for thing in gc.get_referents(referrer) if id(thing) in known}
    return shared


def _attributes(thing: Any) -> Any:
    """An object's `__dict__`; None where it has none. Runs no code of its class."""
    try:
        return object.__getattribute__(thing, "__dict__")
    except (AttributeError, TypeError):
        return None


def _value(value: Any) -> Any:
    """A number or text as it is; identity and length of anything else."""
    return value if is_scalar_like(value) else (id(value), len(value) if isinstance(value, (list, dict, set)) else 0)


def _changed(then: StateSnapshot, holders: dict[int, StateItem]) -> Iterable[StateItem]:
    """Items of a snapshot with another value now, and those whose container has another length or content."""
    for item in then.items:
        try:
            if not unchanged(item.value, item.now()):
                yield item
        except (LookupError, AttributeError, ValueError, TypeError):
            continue  # gone: its container has another length
    things = [thing for thing, length, _ in then.lengths if not isinstance(thing, tuple) and len(thing) != length]
    things += [thing for thing, value in then.fingerprints.values() if fingerprint(thing) != value]
    yield from (holders[id(thing)] for thing in things if id(thing) in holders)
