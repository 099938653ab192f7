"""GT's own ops on remote tensors: attention and moves. They have no torch overload, so their outputs are stated here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gt.client import current_session
from gt.client.current_session import Live
from gt.client.device import meta as metas
from gt.client.device.meta import Meta
from gt.client.device.random import draw
from gt.client.device.remote_tensor import Ref, RemoteTensor, make
from gt.client.trace.dispatch import settle
from gt.client.trace.shape_inference import constant
from gt.ir.ops import RANDOM
from gt.ir.spec import Spec
from gt.ir.template import Out, T, Template, V

_entries: dict[tuple, tuple[int, tuple[Meta, ...]]] = {}
current_session.on_clear.append(_entries.clear)


def record(name: str, args: tuple, outs: Callable[[], tuple[Meta, ...]], seeds: tuple[int, int] | None = None) -> tuple:
    """Record a GT op: tensors and floats are holes, the rest constants; `outs` states its outputs on a miss."""
    recorder = current_session.current()
    key: list = [name]
    ids: list[int] = []
    values: list[float] = []
    for a in args:
        if isinstance(a, RemoteTensor):
            key.append(a._ref.meta)
            ids.append(a._ref.id)
            if a._ref.pending and a.requires_grad:
                settle(a, a._ref)
        elif isinstance(a, float):
            key.append(float)
            values.append(a)
        else:
            key.append(a)
    found = _entries.get(tuple(key))
    if found is None:
        for a in args:
            if isinstance(a, RemoteTensor):
                current_session.check(a)
        made = outs()
        number = recorder.define(_template(name, args, made))
        found = _entries[tuple(key)] = (number, made)
    number, made = found
    origin = Live.origins.here()
    new = [recorder.new_id() for _ in made]
    if name in RANDOM:
        values += seeds or draw()
    recorder.code.extend([number, origin, *ids, *values, *new])
    recorder.ops += 1
    if len(recorder.code) > recorder.batch:
        recorder.full()
    return tuple(make(m, Ref(n, m, origin, recorder.lives)) for m, n in zip(made, new, strict=True))


def _template(name: str, args: tuple, outs: tuple[Meta, ...]) -> Template:
    form: list[Any] = []
    ins: list[Spec] = []
    values = 0
    for a in args:
        if isinstance(a, RemoteTensor):
            form.append(T(len(ins)))
            ins.append(a._ref.meta.spec)
        elif isinstance(a, float):
            form.append(V(values))
            values += 1
        else:
            form.append(constant(a))
    values += 2 * (name in RANDOM)
    return Template(name, tuple(form), (), tuple(ins), values, tuple(Out("new", m.spec) for m in outs))


def _cloned(meta: Meta) -> Meta:
    """As clone leaves it: strides are kept where memory is dense."""
    return metas.of(torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta").clone())


class Move(torch.autograd.Function):
    """gt.signal.move: the same value on another mesh."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, RemoteTensor):
            got = f"one on {x.device}" if isinstance(x, torch.Tensor) else f"{type(x).__name__}"
            raise TypeError(f"gt.signal.move takes a remote tensor, got {got}")
        return record("gt.move.default", (x,), lambda: (_cloned(x._ref.meta),))[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return Move.apply(grad)
