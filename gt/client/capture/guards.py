"""Whether what a walk found is as it was. Asked before every replay, so by calls that compare many things at once."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from operator import attrgetter, is_, itemgetter

from gt.client.capture.state_walk import Item, Reach, plain, same, stamp

_LOOK = attrgetter("_ref", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_HELD = attrgetter("_ref", "requires_grad")  # of a tensor that is not differentiated: no hook of it is ever called


class Guard:
    """Made once a program. Things are compared by identity; where that differs, by value."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._items = reach.items
        holders: dict[int, list[Item]] = defaultdict(list)
        for item in reach.items:
            if not item.attribute:
                holders[id(item.holder)].append(item)
        many = [items for items in holders.values() if len(items) > 1]
        self._getters = [(itemgetter(*[item.key for item in items]), items[0].holder) for items in many]
        self._got = [item.value for items in many for item in items]
        single = [items[0] for items in holders.values() if len(items) == 1]
        self._pairs = [(item.holder, item.key) for item in single]
        self._values = [item.value for item in single]
        named = [item for item in reach.items if item.attribute]
        self._named = [(item.holder, item.key) for item in named]
        self._named_values = [item.value for item in named]
        self._sized = [thing for thing, length, _ in reach.sized if length]
        self._lengths = [length for _, length, _ in reach.sized if length]
        self._empty = [thing for thing, length, _ in reach.sized if not length]
        self._leaves = [tensor for tensor, _ in reach.looks.values() if tensor.requires_grad]
        self._others = [tensor for tensor, _ in reach.looks.values() if not tensor.requires_grad]
        self._looks = self._look()
        self._ordered = [thing for _, thing, _ in reach.orders]
        self._keys = [keys for _, _, keys in reach.orders]
        self._kinds = [thing for _, thing, _ in reach.kinds]
        self._types = [kind for _, _, kind in reach.kinds]

    def _look(self) -> tuple[list, list]:
        return list(map(_LOOK, self._leaves)), list(map(_HELD, self._others))

    def broken(self) -> str:
        """What is not as it was, or ""."""
        try:
            same = (
                all(map(is_, chain.from_iterable([get(holder) for get, holder in self._getters]), self._got))
                and all(map(is_, [holder[key] for holder, key in self._pairs], self._values))
                and all(map(is_, [getattr(holder, key) for holder, key in self._named], self._named_values))
            )
        except (LookupError, AttributeError, ValueError, TypeError):
            return _changed(self._items) or "an object that the function uses is gone"
        if not same and (why := _changed(self._items)):
            return why
        if any(self._empty) or list(map(len, self._sized)) != self._lengths:
            path, old, new = next((path, n, len(thing)) for thing, n, path in self._reach.sized if len(thing) != n)
            return f"{path} had {old} elements and has {new}"
        if self._look() != self._looks:
            return f"{self._other()} has other memory, requires_grad or hooks than before"
        if [list(map(id, thing)) for thing in self._ordered] != self._keys:
            return next(
                f"the keys of {path} are in another order"
                for path, thing, keys in self._reach.orders
                if list(map(id, thing)) != keys
            )
        if list(map(type, self._kinds)) != self._types:
            return next(f"{path} has another class" for path, thing, kind in self._reach.kinds if type(thing) is not kind)
        for path, (thing, then) in self._reach.stamps.items():
            if stamp(thing) != then:
                return f"{path} was changed in place"
        return ""

    def _other(self) -> str:
        """The path of the first tensor that does not look as it did."""
        for tensors, now, then in zip((self._leaves, self._others), self._look(), self._looks, strict=True):
            for tensor, a, b in zip(tensors, now, then, strict=True):
                if a != b:
                    return next(path for path, (one, _) in self._reach.looks.items() if one is tensor)
        raise AssertionError("no tensor looks otherwise")


def _changed(items: list[Item]) -> str:
    for item in items:
        try:
            value = item.now()
        except (LookupError, AttributeError, ValueError, TypeError):
            return f"{item.path} is gone"
        if not same(item.value, value):
            if plain(item.value) and plain(value):
                return f"{item.path} was {item.value!r:.60} and is {value!r:.60}"
            return f"{item.path} is another {type(value).__name__} than before"
    return ""
