"""Hooks of autograd nodes: `node.register_hook` and `register_prehook`. Torch keeps them in C++, where no walk finds them.

Each node has a table of its hooks, which Python code of torch makes. The tables are noted there, and end with their nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from torch.autograd.function import Function, _HookMixin

_serials = itertools.count()
_tables: WeakValueDictionary[int, dict] = WeakValueDictionary()  # serial number -> table of one node


def register() -> None:
    """Note each table from now on."""
    original: Callable[[dict | None, Any], tuple] = Function._register_hook

    def register_hook(table: dict | None, hook: Any) -> tuple:
        own, handle = original(table, hook)
        if table is None:
            _tables[next(_serials)] = own
        return own, handle

    _HookMixin._register_hook = staticmethod(register_hook)


def next_serial() -> int:
    """A number above those of all tables that are there."""
    return next(_serials)


def hooks_of_nodes() -> dict[int, list]:
    """Serial number of each table that is alive and not empty -> its hooks. The result keeps no table alive."""
    return {serial: list(table.values()) for serial, table in sorted(_tables.items()) if table} if _tables else {}


def comparable_hooks(hooks: dict[int, list], made: range) -> dict[int, list[int]]:
    """Hooks in a form that can be compared, without those of tables whose serial numbers are in `made`."""
    return {serial: list(map(id, of_node)) for serial, of_node in hooks.items() if serial not in made}
