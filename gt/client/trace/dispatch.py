"""The hot path: one ATen call on remote tensors becomes one row of numbers in the recorder's buffer.

A key is built from the arguments (interned metas, constants, types of scalars); a known key gives the template's number
and the metas of the outputs. Nothing here waits, except for ops whose output shape depends on values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gt.client.current_session import Live, check, current
from gt.client.device import meta as metas
from gt.client.device.remote_tensor import _AUTOCAST, LAZY, Alias, Ref, RemoteTensor, make, rebind
from gt.client.trace.op_info import (
    ASK,
    CONST,
    FIRST,
    INTO,
    LIST,
    ONE,
    TENSOR,
    TENSORS,
    TYPED,
    VALUE,
    VALUES,
    Entry,
    OpInfo,
    _infos,
    info_of,
)
from gt.client.trace.shape_inference import miss
from gt.client.trace.uploads import upload_operands
from gt.errors import UnsupportedOp
from gt.ir.instr import PARAM

# Mode of an entry -> the function that carries such a call out as several ops; modules register theirs
SEVERAL_OPS: dict[int, Callable[[OpInfo, Entry, tuple, dict], Any]] = {}
_wrap = torch.Tensor._make_wrapper_subclass
_strided = torch.strided
_known = _infos.get


class HostOperand(Exception):
    """A CPU tensor among the operands; the call is done again with it uploaded."""


def dispatch(cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    """RemoteTensor.__torch_dispatch__."""
    info = _known(id(func)) or info_of(func)
    if info.handler is not None:
        return info.handler(info, args, kwargs or {})
    return call(info, args, kwargs)


def fallback(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What arrives without a remote tensor among its arguments (factories), or below the Python key."""
    return dispatch(RemoteTensor, func, (), args, kwargs)


def call(info: OpInfo, args: tuple, kwargs: dict | None = None, extra: tuple = ()) -> Any:
    """Record a call; `extra` scalars go last (seed and counter)."""
    recorder = Live.recorder or current()
    key: list = []
    ids: list = []
    values: list = []
    put = key.append
    try:
        for kind, a in zip(info.kinds, args):
            if type(a) is RemoteTensor:
                ref = a._ref
                put(ref.meta)
                ids.append(ref.id)
                if ref.pending and a.requires_grad:
                    settle(a, ref)
            elif kind == CONST:
                put(a)
            else:
                collect(kind, a, key, ids, values)
        if kwargs:
            named = info.named
            for name, a in kwargs.items():
                put(name)
                kind = named[name]
                if kind == CONST:
                    put(a)
                else:
                    collect(kind, a, key, ids, values)
    except HostOperand:
        return call(info, *upload_operands(info, args, kwargs or {}), extra)
    at = tuple(key)
    entry = info.cache.get(at)
    if entry is None:
        entry = miss(info, args, kwargs or {})
        info.cache[at] = entry
    if extra:
        values.extend(extra)
    origin = Live.origins.here()
    recorder.ops += 1
    mode = entry.mode
    code = recorder.code
    if mode == ONE:
        number = recorder.new_id()
        meta = entry.metas[0]
        if meta.large and recorder.lives.ended:
            recorder.release()
        code.extend((entry.number, origin, *ids, *values, number))
        made = _wrap(
            RemoteTensor, meta.shape, meta.stride, meta.offset, None, meta.dtype, _strided, LAZY, False, False, None,
            False, False, _AUTOCAST,
        )  # fmt: skip
        made._ref = Ref(number, meta, origin, recorder.lives)
        if len(code) > recorder.batch:
            recorder.full()
        return made
    if mode == FIRST:
        code.extend((entry.number, origin, *ids, *values))
        args[0]._ref.pending = origin
        if len(code) > recorder.batch:
            recorder.full()
        return args[0]
    return finish(info, entry, args, kwargs or {}, extra, [entry.number, origin, *ids, *values])


def collect(kind: int, a: Any, key: list, ids: list, values: list) -> None:
    """Add an argument that is not a plain constant to the key, operands and scalars."""
    if type(a) is RemoteTensor:
        ref = a._ref
        key.append(ref.meta)
        ids.append(ref.id)
        if ref.pending and a.requires_grad:
            settle(a, ref)
    elif a is None:
        key.append(None)
    elif kind == LIST:
        key.append(tuple(a) if isinstance(a, (list, tuple)) else a)
    elif kind in (VALUE, TENSOR) and isinstance(a, (bool, int, float)):
        key.append(type(a))
        values.append(a)
    elif kind in (TENSORS, VALUES):
        key.append(len(a))
        element = TENSOR if kind == TENSORS else VALUE
        for x in a:
            if type(x) is RemoteTensor:  # as above, without a call: an optimizer's lists have hundreds
                ref = x._ref
                key.append(ref.meta)
                ids.append(ref.id)
                if ref.pending and x.requires_grad:
                    settle(x, ref)
            else:
                collect(element, x, key, ids, values)
    elif isinstance(a, torch.Tensor):
        raise HostOperand
    elif kind == TYPED:
        key.append((type(a), a))
    else:
        key.append(a)


def settle(tensor: RemoteTensor, ref: Ref | Alias) -> None:
    """First use of a tensor that requires grad: mark its autograd node, or announce it as a parameter."""
    try:
        node = tensor.grad_fn
    except RuntimeError:  # a view made under no_grad, its base changed since: torch will not say, and nothing needs it
        return
    if node is not None:
        Live.origins.mark(node, ref.pending)
        ref.pending = 0
        return
    if tensor._is_view():  # of a parameter, made under no_grad: it says that it requires grad, and is no leaf of anything
        return
    if not ref.home:
        check(tensor)
        Live.recorder.code.extend((PARAM, ref.id))  # type: ignore[union-attr]
        ref.home = -1
    if torch.is_grad_enabled():
        ref.home = Live.origins.here()
        ref.pending = 0


def announce(buffer: RemoteTensor) -> None:
    """A module's buffer is laid out as a parameter is, whole on each worker, where data is split as it enters a group."""
    if not buffer._ref.home:
        check(buffer)
        Live.recorder.code.extend((PARAM, buffer._ref.id))  # type: ignore[union-attr]
        buffer._ref.home = -1


def finish(info: OpInfo, entry: Entry, args: tuple, kwargs: dict, extra: tuple, row: list) -> Any:
    """The calls that are not one new tensor or one in-place target."""
    several = SEVERAL_OPS.get(entry.mode)
    if several is not None:
        return several(info, entry, args, kwargs)
    recorder, origin = current(), row[1]
    numbers = [recorder.new_id() for _ in entry.metas]
    if recorder.lives.ended and any(meta is not None and meta.large for meta in entry.metas):
        recorder.release()
    recorder.code.extend(row + numbers)
    if entry.mode == ASK:
        if recorder.tape is not None:
            recorder.tape.refuse(f"the shape of {info.name}'s result depends on values, which a replay does not know", origin)
        recorder.flush()
        found = [metas.of_spec(spec) for spec in recorder.session.describe(numbers)]
    else:
        found = entry.metas
    made = [make(m, Ref(n, m, origin, recorder.lives)) for n, m in zip(numbers, found, strict=True)]
    if len(recorder.code) > recorder.batch:
        recorder.full()
    operands = _tensors((args, kwargs)) if entry.written else ()
    for i in entry.written:
        operands[i]._ref.pending = origin
    return _build(entry.result, made, operands)


def _build(tree: Any, made: list, operands: Any) -> Any:
    if tree == ():
        return None
    if type(tree) is list:
        return [_build(t, made, operands) for t in tree]
    if type(tree[0]) is not str:
        return tuple(_build(t, made, operands) for t in tree)
    what, value = tree
    return made[value] if what == "new" else operands[value] if what == "arg" else value


def _tensors(tree: Any) -> list[RemoteTensor]:
    """Remote tensors of arguments, in the order of operands."""
    found: list[RemoteTensor] = []
    _gather((tree,), found)
    return found


def _gather(trees: Any, found: list[RemoteTensor]) -> None:
    for tree in trees:
        if type(tree) is RemoteTensor:
            found.append(tree)
        elif isinstance(tree, (list, tuple)):
            _gather(tree, found)
        elif isinstance(tree, dict):
            _gather(tree.values(), found)


def _without_out(info: OpInfo) -> Any:
    """The overload that returns what this one writes to out=: of the same arguments, with dtype and device at most."""
    wanted = {(a.name, str(a.real_type)) for a in info.func._schema.arguments if not a.is_out}
    packet = getattr(torch.ops.aten, info.name.split(".")[1])
    found = []
    for overload in (getattr(packet, name) for name in packet.overloads()):
        arguments = overload._schema.arguments
        given = {(a.name, str(a.real_type)) for a in arguments}
        if not any(a.is_out for a in arguments) and wanted <= given:
            found.append((len(given), overload))
    if not found:
        raise UnsupportedOp(
            f"{info.name} is not supported on remote with out=: call the op without out=, and copy_() its result"
        )
    return min(found, key=lambda pair: pair[0])[1]


def _into(info: OpInfo, entry: Entry, args: tuple, kwargs: dict) -> Any:
    """out=: the results are copied there. Tensors of another shape become new ones; the same objects then name these."""
    named = [kwargs[name] for name in info.outs]
    targets, given = _tensors(named), {name: a for name, a in kwargs.items() if name not in info.outs}
    op = _without_out(info)
    for name, value in (("dtype", targets[0].dtype if targets else None), ("device", LAZY)):
        if name in info_of(op).named and given.get(name) is None:
            given[name] = value
    made = _tensors(op(*args, **given))
    looks = entry.metas or [metas.contiguous(tuple(m.shape), t.dtype) for m, t in zip(made, targets, strict=True)]
    for target, result, look in zip(targets, made, looks, strict=True):
        if target.shape != look.shape:
            rebind(target, empty(look))
        torch.ops.aten.copy_.default(target, result)
    returned = named if info.func._schema.returns else []
    return tuple(returned) if len(returned) != 1 else returned[0]


SEVERAL_OPS[INTO] = _into


def empty(meta: metas.Meta) -> RemoteTensor:
    """New memory of a given look, uninitialised."""
    func = torch.ops.aten.empty_strided.default
    return call(info_of(func), (list(meta.shape), list(meta.stride)), {"dtype": meta.dtype, "device": LAZY})


RemoteTensor.__torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]
