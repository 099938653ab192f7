"""Objects of Python classes that a captured function makes and returns, as a dataclass or a cache of keys and values.

`opened` puts their attributes in their place, so that whatever goes through results meets the tensors in them. `closed` makes
objects of these again, which are new ones at each replay, as they would be at each call.

An object is opened if nobody but the results can have it: then its identity is of no meaning.
"""

from __future__ import annotations

import typing
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES, _get_node_type, register_pytree_node, tree_leaves

from gt.client.values.fingerprints import is_scalar_like
from gt.wire.process_settings import referrers

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that a `class` statement makes
_BASES = (object, typing.Generic, typing.Protocol)  # which have no data of their own


class ObjectParts:
    """An object, as its class and its attributes: a node of torch's trees, whose leaves are those of the attributes."""

    __slots__ = ("kind", "names", "values")

    def __init__(self, kind: type, names: tuple[str, ...], values: list) -> None:
        self.kind, self.names, self.values = kind, names, values

    def object(self) -> Any:
        """A new object with these attributes. No code of its class runs."""
        made: Any = object.__new__(self.kind)
        slots = set(_slots(self.kind))
        for name, value in zip(self.names, self.values, strict=True):
            # A property may have the name of an entry, and is not asked
            if name in slots:
                object.__setattr__(made, name, closed(value))
            else:
                made.__dict__[name] = closed(value)
        return made


register_pytree_node(
    ObjectParts,
    lambda parts: (parts.values, (parts.kind, parts.names)),
    lambda values, context: ObjectParts(context[0], context[1], list(values)),
)


def opened(results: Any, given: Iterable) -> Any:
    """Results with ObjectParts in place of the objects that a call has made; as they are if somebody else has one of these.

    given: leaves of the call's arguments, which are the caller's.
    """
    found = _Found({id(leaf) for leaf in given})
    if not found.search(results) or not found.objects or not found.alone():
        return results
    return found.opened(results)


def closed(results: Any) -> Any:
    """Results with new objects in place of ObjectParts. Containers that have none stay the same."""
    if type(results) is ObjectParts:
        return results.object()
    return _mapped(results, closed)


def makes_objects(results: Any) -> bool:
    """True if there are ObjectParts among results."""
    return any(type(part) is ObjectParts for part in tree_leaves(results, is_leaf=lambda part: type(part) is ObjectParts))


class _Found:
    """The objects among results, with all that is between them and the root."""

    def __init__(self, given: set[int]) -> None:
        self.objects: dict[int, tuple[str, ...]] = {}  # identity -> names of the attributes
        self._given, self._path = given, dict[int, Any]()

    def search(self, thing: Any) -> bool:
        """Note what is below a result. False if an object appears twice, or cannot be made again."""
        parts = _parts(thing)
        if parts is not None:
            children: list = parts[0]
        elif id(thing) in self._given or not _is_plain(thing):
            return True  # a leaf: who asks for results refuses what he does not know
        else:
            own = _attributes(thing)
            children = [*own.values()]
            if id(thing) in self.objects or weakref.getweakrefcount(thing):
                return False
            self.objects[id(thing)] = tuple(own)
        if parts is not None and id(thing) in self._path and isinstance(thing, (list, dict)):
            return False
        self._path[id(thing)] = thing
        return all([self.search(child) for child in children])

    def alone(self) -> bool:
        """True if nothing but results refers to the objects, and to the containers around them."""
        held = [thing for thing in self._path.values() if self._leads_to_object(thing)]
        known = {id(self._path), *map(id, held)}
        known |= {id(thing.__dict__) for thing in held if hasattr(thing, "__dict__")}
        # A frame that is there as an object is one that runs: those of GT, and of the caller, who has not got the results yet
        return all(id(other) in known or isinstance(other, FrameType) for other in referrers(held))

    def _leads_to_object(self, thing: Any) -> bool:
        if id(thing) in self.objects:
            return True
        return any(map(self._leads_to_object, (_parts(thing) or ((),))[0]))

    def opened(self, thing: Any) -> Any:
        names = self.objects.get(id(thing))
        if names is None:
            return _mapped(thing, self.opened)
        own = _attributes(thing)
        return ObjectParts(type(thing), names, [self.opened(own[name]) for name in names])


def _mapped(thing: Any, change: Callable[[Any], Any]) -> Any:
    """A container with changed children; the same one if none has changed."""
    parts = _parts(thing)
    if parts is None:
        return thing
    children, context, node = parts
    changed = [change(child) for child in children]
    if all(new is old for new, old in zip(changed, children, strict=True)):
        return thing
    return node.unflatten_fn(changed, context)


def _parts(thing: Any) -> tuple[list, Any, Any] | None:
    """Children, context and kind of a container that torch's trees know; None for a leaf."""
    if isinstance(thing, torch.Tensor) or is_scalar_like(thing):
        return None
    node = SUPPORTED_NODES.get(_get_node_type(thing))
    if node is None:
        return None
    children, context = node.flatten_fn(thing)
    return list(children), context, node


def _is_plain(thing: Any) -> bool:
    """True for an object whose attributes are all that it has: no data of C, and nothing that runs at its end."""
    kind = type(thing)
    if isinstance(thing, (torch.Tensor, torch.nn.Module, BaseException)) or is_scalar_like(thing) or isinstance(thing, type):
        return False
    classes = [base for base in kind.__mro__ if base not in _BASES]
    made_by_object = kind.__new__ is object.__new__ or all("__new__" not in vars(base) for base in classes)
    return made_by_object and all(base.__flags__ & _HEAP_TYPE for base in classes) and not hasattr(kind, "__del__")


def _attributes(thing: Any) -> dict[str, Any]:
    """An object's own attributes, those in slots too."""
    slots = {name: getattr(thing, name) for name in _slots(type(thing)) if hasattr(thing, name)}
    return {**slots, **getattr(thing, "__dict__", {})}


def _slots(kind: type) -> Iterator[str]:
    """Names of the slots of a class and its bases."""
    for base in kind.__mro__:
        own = vars(base).get("__slots__", ())
        for name in (own,) if isinstance(own, str) else own:
            if name not in ("__dict__", "__weakref__"):
                # A private name is kept under that of its class
                yield f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
