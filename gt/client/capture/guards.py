"""Comparison of Python state with a snapshot, before every replay: many values in each call, since Python calls are slow."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from gt.client.capture.state_walk import NODE_HOOKS, StateItem, StateSnapshot
from gt.client.capture.watches.node_hooks import comparable_hooks, hooks_of_nodes
from gt.client.values.fingerprints import fingerprint, is_scalar_like, unchanged

# No hook of a tensor that is not differentiated is ever called
_OF_OTHERS = (attrgetter("_ref.id"), attrgetter("requires_grad"))
_OF_DIFFERENTIATED = (*_OF_OTHERS, attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks"))


class _Places:
    """Items in containers. Those that have the same names in many containers, as modules of one class, are read in one pass.

    Nothing is made for a container: many tuples at once would have Python's collector run in each replay.
    """

    def __init__(self, items: list[StateItem]) -> None:
        # By container, then by the names in it. For 100 layers of one class: {("weight", "bias"): [100
        # lists of two items]}, which itemgetter("weight", "bias") reads in one map over 100 dictionaries
        holders: dict[int, list[StateItem]] = defaultdict(list)
        for item in items:
            holders[id(item.holder)].append(item)
        groups: dict[Any, list[list[StateItem]]] = defaultdict(list)
        by_tensor: list[list[StateItem]] = []
        for n, same in enumerate(holders.values()):
            keys = tuple(item.key for item in same)
            if _is_whole(same):
                by_tensor.append(same)
            elif len(same) > 1:
                # Keys of other types may be equal and not the same, as 1 and
                # True, or slow to hash: such a container is a group alone
                groups[keys if all(type(key) is str for key in keys) else n].append(same)
        self._groups = [(itemgetter(*[i.key for i in g[0]]), [same[0].holder for same in g]) for g in groups.values()]
        self._got = [item.value for group in groups.values() for same in group for item in same]
        single = [same[0] for same in holders.values() if len(same) == 1]
        self._pairs = [(item.holder, item.key) for item in single]
        self._values = [item.value for item in single]
        self._by_tensor = [(same[0].holder, [i.key for i in same], [i.value for i in same]) for same in by_tensor]

    def identical(self) -> bool:
        """True if each place holds the very object that it held."""
        current = chain.from_iterable(map(get, holders) for get, holders in self._groups)
        return (
            all(map(is_, chain.from_iterable(current), self._got))
            and all(map(is_, [holder[key] for holder, key in self._pairs], self._values))
            and all(_same_entries(*row) for row in self._by_tensor)
        )


def _is_whole(same: list[StateItem]) -> bool:
    """True for all entries of a dictionary by tensors, as an optimizer's state: hashing each tensor is a call of Python."""
    holder = same[0].holder
    every = type(holder) in (dict, defaultdict) and len(same) == len(holder) > 1
    return every and all(isinstance(item.key, torch.Tensor) for item in same)


def _same_entries(holder: dict, keys: list, values: list) -> bool:
    """True if a dictionary has these entries. In another order they are looked up."""
    if len(holder) == len(keys) and all(map(is_, holder, keys)):
        return all(map(is_, holder.values(), values))
    return all(holder[key] is value for key, value in zip(keys, values, strict=True))


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


def bookkeeping() -> set[int]:
    """Identities of the containers in which guards hold values of the user's."""
    known: set[int] = set()
    for guard in list(_guards):
        known.update(map(id, guard.holding()))
    return known


class Guard:
    """The guard of one program. Values are compared by identity, and by value where that differs."""

    def __init__(
        self, snapshot: StateSnapshot, entry: StateSnapshot, counts: Mapping[str, int], state: Sequence[torch.Tensor] = ()
    ) -> None:
        """snapshot, entry: the state after the recorded call, with which others are compared, and that before it.

        counts: path of a counter -> what a replay adds to it. No op depends on its value, which is not compared.
        state: CPU tensors that a replay changes. HostDraws compares what the function reads of them.
        """
        self.snapshot = snapshot
        self._made = range(entry.serial, snapshot.serial)  # tables of hooks of the call's own nodes, which will end
        self._node_hooks = comparable_hooks(snapshot.node_hooks, self._made)
        self._state = [(tensor, tensor.shape, tensor.dtype) for tensor in state]
        self._fingerprints = {
            path: row for path, row in snapshot.fingerprints.items() if not any(row[0] is tensor for tensor in state)
        }
        counters = {path: snapshot.counters[path] for path in counts}
        places = {(id(item.holder), item.key): (item, counts[path]) for path, item in counters.items()}
        self._counters = list(places.values())
        left_out = {id(item) for item in counters.values()}
        self._items = [item for item in snapshot.items if id(item) not in left_out]
        self._places = _Places([item for item in self._items if not item.attribute])
        named = [item for item in self._items if item.attribute]
        self._named = [(item.holder, item.key) for item in named]
        self._named_values = [item.value for item in named]
        self._counted = [row for row in snapshot.lengths if not isinstance(row[0], tuple)]  # a tuple keeps its length
        self._filled = [thing for thing, length, _ in self._counted if length]
        self._lengths = [length for _, length, _ in self._counted if length]
        self._empty = [thing for thing, length, _ in self._counted if not length]
        self._leaves = [tensor for tensor, _ in snapshot.identities.values() if tensor.requires_grad]
        self._others = [tensor for tensor, _ in snapshot.identities.values() if not tensor.requires_grad]
        self._identities = self._identities_now()
        self._absent = [(own.keys().isdisjoint, names) for _, own, names in snapshot.absent]
        self._cleared: set[str] = set()  # functions
        self._cache_uses = {path: uses for path, _, uses in snapshot.caches}  # hits and misses, when they were seen last
        self._ordered = [thing for _, thing, _ in snapshot.orders]
        self._keys = [keys for _, _, keys in snapshot.orders]
        self._kinds = [thing for _, thing, _ in snapshot.kinds]
        self._types = [kind for _, _, kind in snapshot.kinds]
        _guards.add(self)

    @property
    def counts(self) -> bool:
        """True if a replay adds to counters."""
        return bool(self._counters)

    def _identities_now(self) -> tuple[list[list], list[list]]:
        """Columns of values, of tensors that are differentiated and of others."""
        with torch._C.DisableTorchFunctionSubclass():  # torch looks for an override at each attribute of a subclass
            leaves = [list(map(get, self._leaves)) for get in _OF_DIFFERENTIATED]
            return leaves, [list(map(get, self._others)) for get in _OF_OTHERS]

    def holding(self) -> Iterator[Any]:
        """The lists, tuples and dictionaries here that hold values of the user's."""
        snapshot, places = self.snapshot, self._places
        yield from (places._got, places._values, self._named_values, self._filled, self._empty, self._ordered, self._kinds)
        yield from chain(places._pairs, self._named, *([holders] for _, holders in places._groups))
        yield from (values for _, _, values in places._by_tensor)
        yield from chain(snapshot.lengths, snapshot.orders, snapshot.kinds, snapshot.fingerprints.values(), snapshot.absent)

    def _has_cleared(self) -> bool:
        """True once a cache was cleared. It may be filled again since: its function has run anew."""
        for path, function, _ in self.snapshot.caches:
            hits, misses, *_ = function.cache_info()
            before = self._cache_uses[path]
            if hits < before[0] or misses < before[1]:
                self._cleared.add(path)
            self._cache_uses[path] = hits, misses
        return bool(self._cleared)

    def count(self) -> None:
        """Add to the counters what the recorded call has added."""
        for item, number in self._counters:
            item.set(item.now() + number)

    def violation(self) -> str:
        """The first difference from the snapshot as text, or ""."""
        try:
            identical = self._places.identical() and all(
                map(is_, [getattr(holder, key) for holder, key in self._named], self._named_values)
            )
            for item, _ in self._counters:
                if type(item.now()) is not int:
                    return f"{item.path} is a {type(item.now()).__name__}, and was an integer"
        except (LookupError, AttributeError, ValueError, TypeError):
            return _changed_item(self._items) or "an object that the function uses is gone"

        # Another object may have an equal value: only then are values compared, one by one
        if not identical and (why := _changed_item(self._items)):
            return why

        # Entries that were added: the items above only show those that are gone or replaced
        if any(self._empty) or list(map(len, self._filled)) != self._lengths:
            path, old, new = next((path, n, len(thing)) for thing, n, path in self._counted if len(thing) != n)
            return f"{path} had {old} elements and has {new}"

        if not all([disjoint(names) for disjoint, names in self._absent]):
            path, added = next((path, names & own.keys()) for path, own, names in self.snapshot.absent if names & own.keys())
            return f"{path} had no {min(added)}, and has one now"

        if self.snapshot.caches and self._has_cleared():
            return f"the cache of {min(self._cleared)} was cleared"

        # Tensors that are the same objects, with other memory, requires_grad or hooks
        if self._identities_now() != self._identities:
            return f"{self._changed_tensor()} has other memory, requires_grad or hooks than before"

        if comparable_hooks(hooks_of_nodes(), self._made) != self._node_hooks:
            return f"{NODE_HOOKS} were added or removed"

        # Keys in another order lead to ops in another order
        if [list(map(id, thing)) for thing in self._ordered] != self._keys:
            return next(
                f"the keys of {path} are in another order"
                for path, thing, keys in self.snapshot.orders
                if list(map(id, thing)) != keys
            )
        if list(map(type, self._kinds)) != self._types:
            return next(f"{path} has another class" for path, thing, kind in self.snapshot.kinds if type(thing) is not kind)

        # Last, since it is the dearest: whole contents of arrays, sets and generators
        for path, (thing, then) in self._fingerprints.items():
            if fingerprint(thing) != then:
                return f"{path} was changed in place"
        if any((tensor.shape, tensor.dtype) != (shape, dtype) for tensor, shape, dtype in self._state):
            return "a CPU tensor that the function changes has another shape or dtype"
        return ""

    def _changed_tensor(self) -> str:
        """Path of the first tensor whose memory, requires_grad or hooks differ."""
        for tensors, now, then in zip((self._leaves, self._others), self._identities_now(), self._identities, strict=True):
            for tensor, current, former in zip(tensors, zip(*now, strict=True), zip(*then, strict=True), strict=True):
                if current != former:
                    return next(path for path, (known, _) in self.snapshot.identities.items() if known is tensor)
        raise AssertionError("no tensor differs")


def _changed_item(items: list[StateItem]) -> str:
    for item in items:
        try:
            value = item.now()
        except (LookupError, AttributeError, ValueError, TypeError):
            return f"{item.path} is gone"
        if not unchanged(item.value, value):
            if is_scalar_like(item.value) and is_scalar_like(value):
                return f"{item.path} was {item.value!r:.60} and is {value!r:.60}"
            return f"{item.path} is another {type(value).__name__} than before"
    return ""
