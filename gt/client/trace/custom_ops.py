"""GT's own ops on remote tensors: attention, recurrent layers, moves.

They have no torch overload, so callers state their outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from gt.client import current_session
from gt.client.current_session import Current
from gt.client.device import meta as metas
from gt.client.device.meta import Meta
from gt.client.device.random import draw
from gt.client.device.remote_tensor import Ref, RemoteTensor, make
from gt.client.trace.dispatch import note_first_use
from gt.client.trace.shape_inference import constant
from gt.ir.ops import RANDOM
from gt.ir.spec import Spec
from gt.ir.template import Out, T, Template, V

MIN_LENT_BYTES = 1 << 20  # the copy of a smaller tensor takes less time than to look after one that is lent
_entries: dict[tuple, tuple[int, tuple[Meta, ...]]] = {}
current_session.on_clear.append(_entries.clear)


def record(name: str, args: tuple, outs: Callable[[], tuple[Meta, ...]], seeds: tuple[int, int] | None = None) -> tuple:
    """Record one of GT's own ops and return its outputs.

    args: tensors, lists of them and floats fill holes of the template, other values are its constants. outs: gives metas of the
    outputs; it is called for a new kind of call only. seeds: seed and counter of a random op, drawn here if None.
    """
    recorder = Current.recorder or current_session.current()
    # As dispatch.call makes it: metas of tensors, the type of floats, other values as they are, and lengths of lists
    key: list = [name]
    ids: list[int] = []
    values: list[float] = []
    operands = args
    # With lengths, since two lists that are joined in one row could be divided in several ways
    if list in map(type, args):
        key += [len(argument) if type(argument) is list else -1 for argument in args]
        operands = tuple(chain.from_iterable(argument if type(argument) is list else (argument,) for argument in args))
    for argument in operands:
        if type(argument) is RemoteTensor:
            ref = argument._ref
            key.append(ref.meta)
            ids.append(ref.id)
            if ref.pending and argument.requires_grad:
                note_first_use(argument, ref)
        elif isinstance(argument, float):
            key.append(float)
            values.append(argument)
        else:
            key.append(argument)

    # A new kind of call defines a template
    entry = _entries.get(tuple(key))
    if entry is None:
        for argument in operands:
            if isinstance(argument, RemoteTensor):
                current_session.check(argument)
        output_metas = outs()
        number = recorder.define(_template(name, args, output_metas))
        entry = _entries[tuple(key)] = (number, output_metas)
    number, output_metas = entry

    # The row, and tensors for its results
    origin = Current.origins.here()
    new = [recorder.new_id() for _ in output_metas]
    if name in RANDOM:
        values += seeds or draw()
    recorder.code.extend([number, origin, *ids, *values, *new])
    recorder.ops += 1
    if len(recorder.code) > recorder.batch:
        recorder.end_batch()
    return tuple(make(m, Ref(n, m, origin, recorder.live_tensors)) for m, n in zip(output_metas, new, strict=True))


def _template(name: str, args: tuple, outs: tuple[Meta, ...]) -> Template:
    ins: list[Spec] = []
    values = 2 * (name in RANDOM)

    def argument(value: Any) -> Any:
        nonlocal values
        if isinstance(value, RemoteTensor):
            ins.append(value._ref.meta.spec)
            return T(len(ins) - 1)
        if isinstance(value, float):
            values += 1
            # `values` begins at 2 for a random op, whose seed and counter are behind the numbers of the call
            return V(values - 1 - 2 * (name in RANDOM))
        return list(map(argument, value)) if type(value) in (list, tuple) else constant(value)

    form = tuple(map(argument, args))
    return Template(name, form, (), tuple(ins), values, tuple(Out("new", m.spec) for m in outs))


def _cloned(meta: Meta) -> Meta:
    """Meta of a clone, which keeps the strides of dense memory."""
    return metas.of(torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta").clone())


def lend(tensor: RemoteTensor) -> RemoteTensor:
    """The value of a tensor that `may_lend` allows, as a new tensor. Workers copy nothing.

    Nothing may write to the operand from here on but a program that makes it anew.
    """
    return record("gt.lend.default", (tensor,), lambda: (tensor._ref.meta,))[0]


def may_lend(meta: Meta) -> bool:
    """True for a tensor of so many bytes that a copy of it counts, and that a copy would have the form of."""
    return meta.nbytes >= MIN_LENT_BYTES and meta == _cloned(meta)


class Move(torch.autograd.Function):
    """gt.signal.move: the same value on another mesh, and the gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, RemoteTensor):
            got = f"one on {x.device}" if isinstance(x, torch.Tensor) else f"{type(x).__name__}"
            raise TypeError(f"gt.signal.move takes a remote tensor, got {got}")
        return record("gt.move.default", (x,), lambda: (_cloned(x._ref.meta),))[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return Move.apply(grad)
