"""Comparison of Python state with a snapshot, before every replay: many values in each call, since Python calls are slow."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from operator import attrgetter, is_, itemgetter

from gt.client.capture.state_walk import StateItem, StateSnapshot, fingerprint, is_scalar_like, unchanged

_OF_DIFFERENTIATED = attrgetter("_ref.id", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_OF_OTHERS = attrgetter("_ref.id", "requires_grad")  # no hook of a tensor that is not differentiated is ever called


class Guard:
    """The guard of one program. Values are compared by identity, and by value where that differs."""

    def __init__(self, snapshot: StateSnapshot) -> None:
        self._snapshot = snapshot
        self._items = snapshot.items
        holders: dict[int, list[StateItem]] = defaultdict(list)
        for item in snapshot.items:
            if not item.attribute:
                holders[id(item.holder)].append(item)
        many = [items for items in holders.values() if len(items) > 1]
        self._getters = [(itemgetter(*[item.key for item in items]), items[0].holder) for items in many]
        self._got = [item.value for items in many for item in items]
        single = [items[0] for items in holders.values() if len(items) == 1]
        self._pairs = [(item.holder, item.key) for item in single]
        self._values = [item.value for item in single]
        named = [item for item in snapshot.items if item.attribute]
        self._named = [(item.holder, item.key) for item in named]
        self._named_values = [item.value for item in named]
        self._filled = [thing for thing, length, _ in snapshot.lengths if length]
        self._lengths = [length for _, length, _ in snapshot.lengths if length]
        self._empty = [thing for thing, length, _ in snapshot.lengths if not length]
        self._leaves = [tensor for tensor, _ in snapshot.identities.values() if tensor.requires_grad]
        self._others = [tensor for tensor, _ in snapshot.identities.values() if not tensor.requires_grad]
        self._identities = self._identities_now()
        self._ordered = [thing for _, thing, _ in snapshot.orders]
        self._keys = [keys for _, _, keys in snapshot.orders]
        self._kinds = [thing for _, thing, _ in snapshot.kinds]
        self._types = [kind for _, _, kind in snapshot.kinds]

    def _identities_now(self) -> tuple[list, list]:
        return list(map(_OF_DIFFERENTIATED, self._leaves)), list(map(_OF_OTHERS, self._others))

    def violation(self) -> str:
        """The first difference from the snapshot as text, or ""."""
        try:
            identical = (
                all(map(is_, chain.from_iterable([get(holder) for get, holder in self._getters]), self._got))
                and all(map(is_, [holder[key] for holder, key in self._pairs], self._values))
                and all(map(is_, [getattr(holder, key) for holder, key in self._named], self._named_values))
            )
        except (LookupError, AttributeError, ValueError, TypeError):
            return _changed_item(self._items) or "an object that the function uses is gone"
        if not identical and (why := _changed_item(self._items)):
            return why
        if any(self._empty) or list(map(len, self._filled)) != self._lengths:
            path, old, new = next((path, n, len(thing)) for thing, n, path in self._snapshot.lengths if len(thing) != n)
            return f"{path} had {old} elements and has {new}"
        if self._identities_now() != self._identities:
            return f"{self._changed_tensor()} has other memory, requires_grad or hooks than before"
        if [list(map(id, thing)) for thing in self._ordered] != self._keys:
            return next(
                f"the keys of {path} are in another order"
                for path, thing, keys in self._snapshot.orders
                if list(map(id, thing)) != keys
            )
        if list(map(type, self._kinds)) != self._types:
            return next(f"{path} has another class" for path, thing, kind in self._snapshot.kinds if type(thing) is not kind)
        for path, (thing, then) in self._snapshot.fingerprints.items():
            if fingerprint(thing) != then:
                return f"{path} was changed in place"
        return ""

    def _changed_tensor(self) -> str:
        """Path of the first tensor whose memory, requires_grad or hooks differ."""
        for tensors, now, then in zip((self._leaves, self._others), self._identities_now(), self._identities, strict=True):
            for tensor, a, b in zip(tensors, now, then, strict=True):
                if a != b:
                    return next(path for path, (known, _) in self._snapshot.identities.items() if known is tensor)
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
