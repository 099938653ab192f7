"""Shapes of the operands of recurrent layers (gt.rnn). Knows no torch.

torch's order of parameters, for each layer and direction in it: weights of the input [gates hidden, input], of the state
[gates hidden, state], then both biases if there are any, then the projection [state, hidden] of an LSTM that has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Shape = tuple[int, ...]
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}  # by mode: gates of a cell


class Stack(NamedTuple):
    """Constants of the ops: layers without dropout between them. sizes: sequences at each step of packed rows, else empty."""

    mode: str
    has_biases: bool
    num_layers: int
    train: bool
    bidirectional: bool
    sizes: Sequence[int]


def fits(x: Shape, states: Sequence[Shape], params: Sequence[Shape], stack: Stack) -> bool:
    """True if the layers can be computed: x [steps, batch, input] or, with `sizes`, packed [rows, input].

    states: [layers directions, batch, state], of an LSTM also [layers directions, batch, hidden].
    """
    mode, has_biases, num_layers, _, bidirectional, sizes = stack
    if len(states) != 1 + (mode == "lstm") or num_layers < 1 or any(len(shape) != 3 or 0 in shape for shape in states):
        return False

    # The state of an LSTM with a projection is shorter than its hidden cell; of others both are one.
    directions = 1 + bidirectional
    _, batch, state = states[0]
    hidden = states[-1][-1]
    if any(shape[:2] != (num_layers * directions, batch) for shape in states) or not _rows_fit(x, batch, sizes):
        return False
    gates, projected = GATES[mode] * hidden, state != hidden
    biases = [(gates,), (gates,)] if has_biases else []

    # Parameters in torch's order: deeper layers read the states of both directions side by side.
    wanted: list[Shape] = []
    for layer in range(num_layers):
        width = x[-1] if layer == 0 else state * directions
        wanted += ([(gates, width), (gates, state), *biases] + [(state, hidden)] * projected) * directions
    return list(params) == wanted


def _rows_fit(x: Shape, batch: int, sizes: Sequence[int]) -> bool:
    """True for [steps, batch, input], or for the rows of packed sequences: `sizes` of them a step, never more than before."""
    if 0 in x:
        return False
    if not sizes:
        return len(x) == 3 and x[1] == batch
    # Packed sequences are sorted by length: as steps go on, some end and none begins.
    falling = all(earlier >= later for earlier, later in zip(sizes, [*sizes[1:], 1]))
    return len(x) == 2 and falling and sizes[0] == batch and sum(sizes) == x[0]
