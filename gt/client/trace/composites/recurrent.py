"""Recurrent layers (nn.RNN, nn.GRU, nn.LSTM) as one op forward and one backward, so that workers choose the kernel.

torch's own form for other devices is a loop over time steps: thousands of ops for a short sequence. Dropout between layers is
an op of its own, as in that loop, so that its mask does not depend on the split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from gt.client.device import meta as metas
from gt.client.device.meta import Meta
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace.custom_ops import record
from gt.client.trace.op_info import info_of
from gt.client.trace.uploads import mixed_devices
from gt.ir import recurrent
from gt.ir.recurrent import Stack

aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """A kernel of `aten::<mode>.input` or, with `packed`, of `aten::<mode>.data`, with torch's arguments."""

    mode: str
    packed: bool

    @property
    def overload(self) -> Any:
        packet = getattr(aten, self.mode)
        return packet.data if self.packed else packet.input

    def __call__(self, *args: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        names = [argument.name for argument in self.overload._schema.arguments]
        arguments = {**dict(zip(names, args)), **named}
        x, params = arguments["data" if self.packed else "input"], list(arguments["params"])
        states = list(arguments["hx"]) if self.mode == "lstm" else [arguments["hx"]]
        tensors = [x, *states, *params]
        if not all(isinstance(tensor, RemoteTensor) for tensor in tensors):  # one on the CPU, or in a transform of torch.func
            if any(tensor.device.type == "cpu" for tensor in tensors):
                raise mixed_devices(info_of(self.overload), next(t for t in tensors if t.device.type == "cpu"))
            return self.overload.decompose(*args, **named)
        sizes = tuple(map(int, arguments["batch_sizes"].tolist())) if self.packed else ()
        first = bool(arguments.get("batch_first", False))
        stack = Stack(
            self.mode, arguments["has_biases"], arguments["num_layers"], arguments["train"], arguments["bidirectional"], sizes
        )
        if not _fits(x, states, params, stack, first):  # torch's own form has the error
            return self.overload.decompose(*args, **named)
        x, *states_after = _layers(x.transpose(0, 1) if first else x, states, params, stack, arguments["dropout"])
        return (x.transpose(0, 1) if first else x, *states_after)


def _fits(x: Any, states: list, params: list, stack: Stack, batch_first: bool) -> bool:
    """True for operands that torch's kernels of whole layers take: one dtype, and the shapes of the layers."""
    if len({tensor.dtype for tensor in (x, *states, *params)}) > 1 or not x.is_floating_point():
        return False
    steps_first = x._ref.meta.spec.shape
    if batch_first and len(steps_first) == 3:
        steps_first = (steps_first[1], steps_first[0], steps_first[2])
    before, weights = ([tuple(tensor.shape) for tensor in group] for group in (states, params))
    return recurrent.fits(steps_first, before, weights, stack)


def _layers(x: Any, states: list, params: list, stack: Stack, dropout: float) -> tuple[torch.Tensor, ...]:
    """(output, states after the last step), with dropout between the layers of a stack that trains."""
    depth = stack.num_layers
    if not (dropout and stack.train and depth > 1):
        return _Layers.apply(stack, torch.is_grad_enabled(), len(states), x, *states, *params)
    directions = 1 + stack.bidirectional
    width, after = len(params) // depth, []
    one = stack._replace(num_layers=1)
    for layer in range(depth):
        own = [state.narrow(0, layer * directions, directions) for state in states]
        x, *last = _layers(x, own, params[layer * width : (layer + 1) * width], one, 0.0)
        after.append(last)
        x = F.dropout(x, dropout, True) if layer < depth - 1 else x
    return (x, *map(torch.cat, zip(*after, strict=True)))


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stack: Stack, keeps: bool, count: int, x: Any, *rest: Any) -> Any:  # type: ignore[override]
        states, params = list(rest[:count]), list(rest[count:])
        needs = ctx.needs_input_grad[3:]
        operands = (x, states, params, *stack, needs, keeps and any(needs))
        outs = record("gt.rnn.default", operands, lambda: _outs(x, states, params, stack))
        # A program seldom uses the states: a gradient that is absent stays None, where torch would make zeros
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *rest, outs[0])
        ctx.stack, ctx.count = stack, count
        return outs[: 1 + count]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        x, *rest, out = ctx.saved_tensors
        nothing = (None, None, None)
        if all(grad is None for grad in grads):
            return (*nothing, *(None for _ in (x, *rest)))
        if torch.is_grad_enabled():  # create_graph: the loop over steps can be differentiated again, a kernel of layers cannot
            return (*nothing, *_differentiable(ctx.stack, ctx.count, grads, x, rest))
        needs, states, params = ctx.needs_input_grad[3:], rest[: ctx.count], rest[ctx.count :]
        given = (*grads, None)[:3]
        wanted = [tensor for tensor, needed in zip((x, *rest), needs, strict=True) if needed]
        results = record(
            "gt.rnn_backward.default", (*given, x, list(states), list(params), out, *ctx.stack, needs),
            lambda: tuple(metas.contiguous(tuple(tensor.shape), tensor.dtype) for tensor in wanted),
        )  # fmt: skip
        made = iter(results)
        return (*nothing, *(next(made) if needed else None for needed in needs))


def _outs(x: Any, states: list, params: list, stack: Stack) -> tuple[Meta, ...]:
    """Metas of the output, of the states after the last step, and of an empty one in the place of a cell state."""
    x_shape, *shapes = (tuple(tensor.shape) for tensor in (x, *states))
    width = shapes[0][-1] * (1 + stack.bidirectional)
    ends = [metas.contiguous(shape, x.dtype) for shape in (*shapes, (0,))[:2]]
    return metas.contiguous((*x_shape[:-1], width), x.dtype), *ends


def _differentiable(stack: Stack, count: int, grads: Any, x: Any, rest: list) -> list[Any]:
    """Gradients of x, states and parameters through torch's loop over steps."""
    states, params = rest[:count], rest[count:]
    given: Any = list(states) if count == 2 else states[0]
    layers = (list(params), stack.has_biases, stack.num_layers, 0.0, stack.train, stack.bidirectional)
    packet = getattr(aten, stack.mode)
    if stack.sizes:
        outs = packet.data.decompose(x, torch.tensor(stack.sizes), given, *layers)
    else:
        outs = packet.input.decompose(x, given, *layers, False)
    used = [(out, grad) for out, grad in zip(outs, grads) if grad is not None]
    operands = [x, *rest]
    wanted = [tensor for tensor in operands if tensor.requires_grad]
    gradients = iter(
        torch.autograd.grad([out for out, _ in used], wanted, [grad for _, grad in used], create_graph=True, allow_unused=True)
    )
    return [next(gradients) if tensor.requires_grad else None for tensor in operands]


# Kernels by torch's name of the overload
KERNELS: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    f"{mode}.{'data' if packed else 'input'}": Kernel(mode, packed) for mode in recurrent.GATES for packed in (False, True)
}
