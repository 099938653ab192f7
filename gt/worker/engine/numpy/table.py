"""The function of each op: the rows of all tables, and the ops that follow from a row.

From `add` follow `add_`, `add.out` and `_foreach_add`, from `index_add_` follows `index_add`: a row is written once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gt.errors import UnsupportedOp
from gt.ir.schema import TABLE as SCHEMAS
from gt.worker.engine.numpy import (
    activations,
    attention,
    factories,
    indexing,
    layers,
    lists,
    pointwise,
    products,
    random,
    recurrent,
    reductions,
    views,
)
from gt.worker.engine.numpy.arrays import Array, write

Function = Callable[..., Any]
TABLE: dict[str, Function] = {
    **{
        f"aten.{name}": run
        for table in (
            pointwise.TABLE, activations.TABLE, products.TABLE, reductions.TABLE, views.TABLE, layers.TABLE, indexing.TABLE,
            factories.TABLE, lists.TABLE,
        )
        for name, run in table.items()
    },
    **recurrent.TABLE,
    "gt.move.default": lambda x: x.copy(),
    "gt.lend.default": lambda x: x.copy(),
}  # fmt: skip
_BY_BASE = {name.split(".")[1]: run for name, run in reversed(TABLE.items())}  # the first overload of each
_VIEWS = {f"aten.{name}" for name in views.VIEWS}  # in place they change metadata, not values


def resolve(name: str, place: list | None) -> Function:
    """The function of an op's own arguments; UnsupportedOp where there is none."""
    if name not in SCHEMAS:
        raise UnsupportedOp(SCHEMAS.refusal(name))
    for kind in (attention.OPS, random.DRAW):
        if name in kind:
            return (attention if kind is attention.OPS else random).bind(name, place)
    for find in (TABLE.get, _in_place, _out_of_place, _foreach):
        function = find(name)
        if function is not None:
            return function
    raise UnsupportedOp(f"the numpy engine lacks {name}: run with GT_BACKEND=torch")


# ---- what follows from a row


def _in_place(name: str) -> Function | None:
    base, _, overload = name.rpartition(".")
    plain = f"{base.removesuffix('_')}.{overload}"
    run = TABLE.get(plain) if base.endswith("_") and plain not in _VIEWS else None
    return None if run is None else _writing(run)


def _writing(run: Function) -> Function:
    """run, with its result written to its first argument."""

    def into(self: Array, *args: Any, **kwargs: Any) -> Array:
        return write(self, run(self, *args, **kwargs))

    return getattr(run, "into", into)


def _out_of_place(name: str) -> Function | None:
    base, _, overload = name.rpartition(".")
    run = TABLE.get(f"{base}_.{overload}")
    return None if run is None else _on_copy(run)


def _on_copy(run: Function) -> Function:
    return lambda self, *args, **kwargs: run(self.copy("K"), *args, **kwargs)


def _foreach(name: str) -> Function | None:
    rest = name.removeprefix(lists.FOREACH)
    if rest == name or rest in lists.OTHERS:
        return None
    base = rest.partition(".")[0]
    run = _BY_BASE.get(base)
    if run is None and base.endswith("_"):
        run = _BY_BASE.get(base[:-1])
        run = None if run is None else _writing(run)
    return None if run is None else lists.each(run)
