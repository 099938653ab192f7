"""Attributes that change between calls of a captured function, and that its calls do not use: they are not compared.

Of an object that a library knows every attribute is compared, since the library's code is not walked. A user's module is one,
so `self.history.append(loss.item())` after each call would ask for a program for each length. In recorded calls a descriptor
on the object's class stands for an attribute that changes, and notes each use. What a call has not used while all that is
compared was the same, a replay would not use either.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import types
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gt.client.capture.recording import CallRecording, Difference
from gt.client.capture.state_walk import WHOLE, StateItem, StateSnapshot
from gt.client.values.code_names import texts
from gt.client.values.fingerprints import fingerprint, is_scalar_like, unchanged

USED = "is used in this call, and was not compared before it; the next calls can become a program"
# Code of the standard library that reads all of an object's `__dict__`
_READS_ALL = frozenset(
    function.__code__
    for module, names in ((copy, ("_reconstruct",)), (dataclasses, ("asdict", "astuple", "_asdict_inner", "_astuple_inner")))
    for name in names
    if isinstance(function := getattr(module, name, None), types.FunctionType)
)
_DICTIONARIES = frozenset({"vars", "__dict__"})  # names with which code reads one
_STATE = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)  # whose tensors a walk has to find
_MISSING = object()
_Place = tuple[int, str]  # identity of the `__dict__`, and name


class AttributeWatch:
    """A descriptor that stands for one attribute of a class's objects, which keep their values in their `__dict__`."""

    def __init__(self, kind: type, name: str) -> None:
        self.used: set[int] = set()  # identities of each `__dict__` whose attribute was used
        self._kind, self._name = kind, name
        self._own = vars(kind).get(name, _MISSING)
        self._behind = next((vars(cls)[name] for cls in kind.__mro__ if name in vars(cls)), _MISSING)
        if hasattr(type(self._behind), "__set__"):
            raise TypeError(f"{kind.__name__}.{name} is a descriptor, which decides where its values are")
        setattr(kind, name, self)

    def remove(self) -> None:
        """Give the class its own attribute back."""
        if self._own is _MISSING:
            delattr(self._kind, self._name)
        else:
            setattr(self._kind, self._name, self._own)

    def _values(self, thing: Any) -> dict:
        own = object.__getattribute__(thing, "__dict__")
        self.used.add(id(own))
        return own

    def __get__(self, thing: Any, kind: type | None = None) -> Any:
        if thing is not None and self._name in (own := self._values(thing)):
            return own[self._name]
        if self._behind is _MISSING:
            raise AttributeError(f"{self._kind.__name__!r} object has no attribute {self._name!r}")
        get = getattr(type(self._behind), "__get__", None)
        return self._behind if get is None else get(self._behind, thing, kind)

    def __set__(self, thing: Any, value: Any) -> None:
        self._values(thing)[self._name] = value

    def __delete__(self, thing: Any) -> None:
        if self._values(thing).pop(self._name, _MISSING) is _MISSING:
            raise AttributeError(self._name)


class UnreadState:
    """The attributes of one compiled function that are not compared. As a context manager it notes the uses inside."""

    def __init__(self) -> None:
        self._places: dict[_Place, tuple[dict, str]] = {}  # its `__dict__`, and its path
        self._watched: dict[
            _Place, tuple[Any, StateItem]
        ] = {}  # owner and item of those that have changed, in the call under way
        self._owners: dict[_Place, Any] = {}  # of the places
        self._used: set[_Place] = set()  # by some call
        self._left: list[tuple[Any, StateItem, Any]] = []  # owner, item and value, as the last recorded call has left them
        self._watches: list[AttributeWatch] = []

    def names(self) -> Mapping[int, set[str]]:
        """The attributes that walks leave out, by identity of the `__dict__` that has them."""
        names: dict[int, set[str]] = defaultdict(set)
        for number, name in self._places:
            names[number].add(name)
        return names

    def paths(self) -> list[str]:
        """The attributes as a user reads them, sorted."""
        return sorted(path.lstrip(".") for _, path in self._places.values())

    def begin(self, refused: Iterable[StateSnapshot]) -> None:
        """A call is about to be recorded. refused: the state of programs that could not serve it."""
        self._watched = {}
        for owner, item, value in self._left:
            if _value(item.holder.get(item.key)) != value:
                self._watched[id(item.holder), item.key] = owner, item
        self._left = []
        for then in refused:
            owners, holders = _objects(then)
            for item in _changed(then, holders):
                self._watch_above(item, owners, holders)

    def __enter__(self) -> None:
        rows = [(owner, name) for (_, name), owner in self._owners.items()]
        rows += [(owner, name) for (_, name), (owner, _) in self._watched.items()]
        every = {(type(owner), name) for owner, name in rows}
        for kind, name in every:
            # A watch on a base serves, unless a class before it has such an attribute
            found = next((cls for cls in kind.__mro__[1:] if name in vars(cls) or (cls, name) in every), None)
            if name not in vars(kind) and (found, name) in every:
                continue
            try:
                self._watches.append(AttributeWatch(kind, name))
            except (TypeError, AttributeError, ValueError):  # a class that takes no attributes
                self._used |= {(id(vars(owner)), name) for owner, other in rows if other == name and type(owner) is kind}

    def __exit__(self, *error: Any) -> None:
        watches, self._watches = self._watches, []
        for watch in watches:
            with contextlib.suppress(TypeError, AttributeError):
                watch.remove()
            self._used |= {(number, watch._name) for number in watch.used}

    def finish(self, ran: Iterable[types.CodeType] | None, tape: CallRecording, leaving: StateSnapshot) -> None:
        """The call is over, and has left this state. ran: the code that ran in it; None where nothing told of it.

        What it has not used is left out of the next walks. A place that it has used is compared again.
        """
        by_text = set().union(*(texts(code) for code in ran or () if not _DICTIONARIES.isdisjoint(code.co_names)))
        blind = ran is None or not _READS_ALL.isdisjoint(ran) or not WHOLE.isdisjoint(leaving.names)
        for place, (_, path) in list(self._places.items()):
            if blind or place in self._used or place[1] in by_text:
                self._used.add(place)
                del self._places[place], self._owners[place]
                tape.prevents.append(Difference("", f"{path.lstrip('.')} {USED}"))
        for place, (owner, item) in self._watched.items():
            if not blind and place not in self._used and place[1] not in by_text:
                self._places[place], self._owners[place] = (item.holder, item.path), owner
        self._watched = {}
        owners, _ = _objects(leaving)
        self._left = [
            (owner, item, _value(item.value))
            for item in leaving.items
            if (owner := owners.get(id(item.holder))) is not None and self._may_leave_out(owner, item)
        ]

    def _watch_above(self, item: StateItem, owners: dict[int, Any], holders: dict[int, StateItem]) -> None:
        """Watch the innermost attribute above a changed item that no call has used."""
        above: StateItem | None = item
        seen: set[int] = set()
        while above is not None and id(above) not in seen:
            seen.add(id(above))
            owner = owners.get(id(above.holder))
            if owner is not None and self._may_leave_out(owner, above):
                self._watched[id(above.holder), above.key] = owner, above
                return
            above = holders.get(id(above.holder if owner is None else owner))

    def _may_leave_out(self, owner: Any, item: StateItem) -> bool:
        """True for an attribute that no call has used. An optimizer's state is of account to calls of another kind."""
        special = item.attribute or type(item.key) is not str or item.key.startswith("__") or isinstance(item.value, _STATE)
        return not special and not isinstance(owner, torch.optim.Optimizer) and (id(item.holder), item.key) not in self._used


def _objects(state: StateSnapshot) -> tuple[dict[int, Any], dict[int, StateItem]]:
    """Objects by the identity of their `__dict__`, and items by that of their value."""
    owners = {id(vars(node)): node for _, node, _ in state.kinds if hasattr(node, "__dict__")}
    holders: dict[int, StateItem] = {}
    for item in state.items:
        if not is_scalar_like(item.value):
            holders.setdefault(id(item.value), item)
    return owners, holders


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
