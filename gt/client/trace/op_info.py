"""Facts of one ATen overload: kinds of its arguments, its known calls, and the handler of an op that is not simply recorded.

Knows schemas only. The modules that handle ops import this one and register their handlers here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gt.client import current_session
from gt.client.device import meta as metas
from gt.client.device.meta import Meta
from gt.ir import ops

Handler = Callable[["OpInfo", tuple, dict], Any]
Condition = Callable[["OpInfo"], bool]

# Kinds of an argument
TENSOR, CONST, VALUE, LIST, TENSORS, VALUES, TYPED = range(7)
_KINDS = {
    "Tensor": TENSOR, "Optional[Tensor]": TENSOR, "number": VALUE, "Optional[number]": VALUE, "float": VALUE,
    "Optional[float]": VALUE, "List[Tensor]": TENSORS, "List[Optional[Tensor]]": TENSORS, "List[number]": VALUES,
}  # fmt: skip
# Modes of an entry, by its result: ONE new tensor, the FIRST argument, MANY tensors, INTO out=, ASK: a shape that only the
# dispatcher learns. LONG: in chunks. DEFAULTED: torch's default dtype, which workers would not give it. NUMBERS: checked first
ONE, FIRST, MANY, INTO, ASK, LONG, DEFAULTED, NUMBERS = range(8)
# Ops whose output shape depends on a Scalar
_SHAPED_BY_VALUE = ("aten.arange", "aten.range")


class OpInfo:
    """One ATen overload: kinds of its arguments, properties from its schema, and its known calls."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func, self.name = func, str(func)
        typed = self.name.startswith(_SHAPED_BY_VALUE)
        self.named = {argument.name: _kind(argument, typed) for argument in schema.arguments}
        self.kinds = tuple(_kind(argument, typed) for argument in schema.arguments)
        self.second = self.kinds[1] if len(self.kinds) > 1 else CONST
        # All arguments but the first are constants; with `lists`, some of them are lists of numbers
        self.constant, self.lists = set(self.kinds[1:]) <= {CONST, LIST}, LIST in self.kinds[1:]
        self.writes = [
            argument.name for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.names = [argument.name for argument in schema.arguments]
        # torch counts the writes of these ops in their kernels, which remote tensors do not reach
        self.counts_writes = bool(self.writes) and self.name.startswith("aten._foreach_")
        self.random = self.name in ops.RANDOM
        self.composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        self.outs = [argument.name for argument in schema.arguments if argument.is_out]
        self.dynamic = torch.Tag.dynamic_output_shape in func.tags
        self.pointwise = torch.Tag.pointwise in func.tags
        aliases = [each.alias_info for each in schema.returns if each.alias_info is not None and not each.alias_info.is_write]
        # Storage offsets of operands decide nothing about a call that makes no view
        self.makes_views = bool(
            aliases
            or self.outs
            or not self.name.startswith("aten.")
            or torch.Tag.inplace_view in func.tags
            or self.name.startswith(ops.UNSAID_VIEWS)
            or "as_strided" in self.name
        )
        self.handler: Callable | None = None
        self.cache: dict[tuple, Entry] = {}  # signature of a call -> its entry


class Entry:
    """The result of shape inference for one kind of call.

    number: of the template, or of chunks with mode LONG. metas: of outputs that get an id, in order. result: the value to
    return as a tree of ("new", output), ("arg", operand) and ("const", value). series: tuple or list, if the value is one of
    outputs and None alone; `slots` has the output of each place then, and is empty if the outputs are the value as they are.
    made: bytes of memory that the call makes. written: operands that are written in place.
    view: the outputs are views of the first operand. wrapper: arguments of new_tensor for the output with mode ONE.
    With mode NUMBERS, result is the entry to record the call by, and `accepted` has numbers that were checked.
    """

    __slots__ = ("accepted", "made", "metas", "mode", "number", "result", "series", "slots", "view", "wrapper", "written")

    def __init__(self) -> None:
        self.number, self.mode = 0, MANY
        self.accepted: set[tuple] = set()
        self.metas: list[Meta] = []
        self.result: Any = None
        self.series: type[tuple] | type[list] | None = None
        self.slots: list[int | None] = []
        self.made = 0
        self.written: tuple[int, ...] = ()
        self.wrapper: tuple = ()
        self.view = False


def _kind(argument: Any, typed: bool) -> int:
    text = str(argument.real_type)
    kind = _KINDS.get(text)
    if kind is None:
        return LIST if text.startswith(("List[", "Optional[List[")) else CONST
    return TYPED if typed and kind == VALUE else kind


_infos: dict[int, OpInfo] = {}
_default = torch.float32  # torch's default dtype, of which the caches of `_infos` are
_others: dict[torch.dtype, dict[int, dict[tuple, Entry]]] = {}  # caches of other default dtypes, by the keys of `_infos`
_handlers: dict[str, Handler | None] = {}  # by name of the overload; None: simply recorded, whatever the conditions say
_conditional: list[tuple[Condition, Handler]] = []  # handlers for ops without one by name: the first whose condition holds


def register(by_name: dict[str, Handler | None], conditional: list[tuple[Condition, Handler]]) -> None:
    """Add handlers of ops that are not simply recorded; overloads that were looked up before get theirs now."""
    _handlers.update(by_name)
    _conditional.extend(conditional)
    for info in _infos.values():
        info.handler = _handler_of(info)


def _handler_of(info: OpInfo) -> Handler | None:
    if info.name in _handlers:
        return _handlers[info.name]
    return next((handler for condition, handler in _conditional if condition(info)), None)


def info_of(func: Any) -> OpInfo:
    """OpInfo of an overload. Overloads are never freed, so their identity is a key."""
    info = _infos.get(id(func))
    if info is None:
        info = OpInfo(func)
        info.handler = _handler_of(info)
        _infos[id(func)] = info
    return info


def infos_by_name() -> dict[str, OpInfo]:
    """The overloads that were called so far, by name."""
    return {info.name: info for info in [*_infos.values()]}


def use_default(dtype: torch.dtype) -> None:
    """From now on calls are those of this default dtype."""
    global _default
    for key, info in _infos.items():
        _others.setdefault(_default, {})[key] = info.cache
        info.cache = _others.get(dtype, {}).pop(key, {})
    _default = dtype


def _clear() -> None:
    _others.clear()
    for info in _infos.values():
        info.cache.clear()
    metas.clear()


current_session.on_clear.append(_clear)
