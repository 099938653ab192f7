"""Recurrent layers by torch's kernels of whole layers: oneDNN's on the CPU, cuDNN's on a GPU, else torch's loop over steps.

What the kernels save for backward has a size that only they know, so it is no tensor of the plan. The output carries it until
its memory is freed. A backward whose output has none (it was copied, or used before) runs the forward once more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

Tensor: TypeAlias = torch.Tensor
# Weights of a program are tensors of their own, which cuDNN's form copies next to one another at each call
warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk", UserWarning)

_LAYERS: dict[str, Callable[..., Any]] = {
    "lstm": torch._VF.lstm,  # type: ignore[attr-defined]
    "gru": torch._VF.gru,  # type: ignore[attr-defined]
    "rnn_tanh": torch._VF.rnn_tanh,  # type: ignore[attr-defined]
    "rnn_relu": torch._VF.rnn_relu,  # type: ignore[attr-defined]
}


def _layers(x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], stack: Sequence[Any]) -> Any:
    mode, has_biases, num_layers, train, bidirectional, sizes = stack
    state = list(states) if mode == "lstm" else states[0]
    rest = (list(params), has_biases, num_layers, 0.0, train, bidirectional)
    if sizes:
        return _LAYERS[mode](x, torch.tensor(sizes), state, *rest)
    return _LAYERS[mode](x, state, *rest, False)


def _leaves(operands: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """The operands as the program has them: some kernels choose their form by what requires a gradient.

    `.data` has a version of its own: later writes of the program into an operand are the client's autograd to refuse.
    """
    return [tensor.data.requires_grad_(needed) for tensor, needed in zip(operands, needs, strict=True)]


def _live(leaves: list[Tensor], count: int, stack: Sequence[Any]) -> Any:
    """Results with their graph. count: of states."""
    mode, has_biases, num_layers, train, *rest = stack
    stack = (mode, has_biases, num_layers, train or leaves[0].is_cuda, *rest)  # cuDNN saves nothing outside of training
    with torch.enable_grad():
        return _layers(leaves[0], leaves[1 : 1 + count], leaves[1 + count :], stack)


def _forward(x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    *stack, needs, keeps = rest
    leaves, count = _leaves((x, *states, *params), needs), len(states)
    if keeps:
        live = _live(leaves, count, stack)
        results = [result.detach() for result in live]
        # An attribute of the output: it ends with the output's memory, and no table has to be kept of it.
        results[0]._gt_saved = live, leaves
    else:
        results = list(_layers(leaves[0], leaves[1 : 1 + count], leaves[1 + count :], stack))
    return (*results, *[x.new_empty(0)] * (3 - len(results)))


def _backward(  # noqa: PLR0913 - the op's arguments
    grad: Tensor | None, grad_hy: Tensor | None, grad_cy: Tensor | None, x: Tensor, states: Sequence[Tensor],
    params: Sequence[Tensor], out: Tensor, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    *stack, needs = rest
    try:
        # Used once: autograd frees the graph's buffers in this backward.
        live, leaves = out._gt_saved  # type: ignore[attr-defined]
        del out._gt_saved  # type: ignore[attr-defined]
    except AttributeError:
        leaves = _leaves((x, *states, *params), needs)
        live = _live(leaves, len(states), stack)
    given = [(result, part) for result, part in zip(live, (grad, grad_hy, grad_cy)) if part is not None]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = torch.autograd.grad([result for result, _ in given], wanted, [part for _, part in given], allow_unused=True)
    return [torch.zeros_like(leaf) if made is None else made for made, leaf in zip(found, wanted, strict=True)]


OPS: dict[str, Callable[..., Any]] = {"gt.rnn.default": _forward, "gt.rnn_backward.default": _backward}
