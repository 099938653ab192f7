"""Recurrent layers step by step, forward and backward through time. Backward runs forward again for what it needs.

Packed sequences are computed as a padded batch whose finished sequences keep their states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gt.ir.recurrent import Stack
from gt.worker.engine.numpy.arrays import Array, fractions


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


# ---- cells: (x's part of the gates [batch, gates hidden], state's part, states) -> (new states, what backward needs), and
# (gradients of new states, what backward needs, states) -> (gradients of both parts, gradients of the states beside the gates)


def _lstm(given: Array, held: Array, states: list[Array]) -> tuple[list[Array], Any]:
    # torch's order of gates: input, forget, cell, output (Hochreiter and Schmidhuber, 1997). states: hidden, cell.
    i, f, g, o = np.split(given + held, 4, -1)
    i, f, g, o = _sigmoid(i), _sigmoid(f), np.tanh(g), _sigmoid(o)
    c = f * states[1] + i * g
    return [o * np.tanh(c), c], (i, f, g, o, c)


def _lstm_back(grads: list[Array], kept: Any, states: list[Array]) -> tuple[Array, Array, list[Array | None]]:
    (i, f, g, o, c), (dh, dc) = kept, grads
    tanh_c = np.tanh(c)
    dc = dc + dh * o * (1 - tanh_c * tanh_c)
    parts = dc * g * i * (1 - i), dc * states[1] * f * (1 - f), dc * i * (1 - g * g), dh * tanh_c * o * (1 - o)
    gates = np.concatenate(parts, -1)
    return gates, gates, [None, dc * f]


def _gru(given: Array, held: Array, states: list[Array]) -> tuple[list[Array], Any]:
    # torch's order: reset, update, new (Cho et al., 2014). torch applies the reset gate behind the state's product, as cuDNN
    # does.
    (xr, xz, xn), (hr, hz, hn) = np.split(given, 3, -1), np.split(held, 3, -1)
    r, z = _sigmoid(xr + hr), _sigmoid(xz + hz)
    n = np.tanh(xn + r * hn)
    return [n + z * (states[0] - n)], (r, z, n, hn)


def _gru_back(grads: list[Array], kept: Any, states: list[Array]) -> tuple[Array, Array, list[Array | None]]:
    (r, z, n, hn), (dh,) = kept, grads
    dn = dh * (1 - z) * (1 - n * n)
    dz, dr = dh * (states[0] - n) * z * (1 - z), dn * hn * r * (1 - r)
    return np.concatenate((dr, dz, dn), -1), np.concatenate((dr, dz, dn * r), -1), [dh * z]


def _plain(activation: Callable[[Array], Array]) -> Callable[..., tuple[list[Array], Any]]:
    def cell(given: Array, held: Array, states: list[Array]) -> tuple[list[Array], Any]:
        new = activation(given + held)
        return [new], new

    return cell


def _plain_back(slope: Callable[[Array], Array]) -> Callable[..., tuple[Array, Array, list[Array | None]]]:
    def back(grads: list[Array], kept: Any, states: list[Array]) -> tuple[Array, Array, list[Array | None]]:
        gates = grads[0] * slope(kept)
        return gates, gates, [None]

    return back


_CELLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "lstm": (_lstm, _lstm_back),
    "gru": (_gru, _gru_back),
    "rnn_tanh": (_plain(np.tanh), _plain_back(lambda y: 1 - y * y)),
    "rnn_relu": (_plain(lambda x: np.maximum(x, 0)), _plain_back(lambda y: (y > 0).astype(y.dtype))),
}


# ---- one direction of one layer


@dataclass
class _Pass:
    """One direction of one layer. x [steps, batch, input]; alive: sequences that go on at each step, the first ones."""

    mode: str
    x: Array
    states: list[Array]
    weights: Sequence[Array]
    has_biases: bool
    order: Sequence[int]
    alive: Sequence[int]
    history: list[Any] = field(default_factory=list)  # of each step: its states before, what its cell kept, hidden state
    out: Array = field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        self.biases = self.weights[2:4] if self.has_biases else (0, 0)
        rest = self.weights[4 if self.has_biases else 2 :]
        self.projection = rest[0] if rest else None

    def run(self) -> list[Array]:
        """States after the last step; `out` has the output of each step."""
        cell, states = _CELLS[self.mode][0], [state.copy() for state in self.states]
        self.out = np.zeros((*self.x.shape[:2], states[0].shape[-1]), states[0].dtype)
        given = np.matmul(self.x, self.weights[0].T) + self.biases[0]
        for step in self.order:
            count = self.alive[step]
            before = [state[:count] for state in states]
            new, kept = cell(given[step, :count], before[0] @ self.weights[1].T + self.biases[1], before)
            hidden = new[0]
            if self.projection is not None:
                new[0] = hidden @ self.projection.T
            self.history.append((before, kept, hidden))
            # Sequences that are over keep their last state; they are the last rows, as a packed batch is sorted by length.
            states = [np.concatenate((part, state[count:])) for part, state in zip(new, states, strict=True)]
            self.out[step, :count] = new[0]
        return states

    def back(self, grad: Array, ends: list[Array]) -> tuple[Array, list[Array], list[Array]]:
        """Gradients of x, of the states before the first step and of the weights. Call it after `run`."""
        grads, weights = [end.copy() for end in ends], [np.zeros_like(weight) for weight in self.weights]
        x, cell = np.zeros_like(self.x), _CELLS[self.mode][1]
        for step, (before, kept, hidden) in zip(reversed(self.order), reversed(self.history), strict=True):
            count = self.alive[step]
            parts = [part[:count] for part in grads]
            parts[0] = parts[0] + grad[step, :count]
            if self.projection is not None:
                weights[-1] += parts[0].T @ hidden
                parts[0] = parts[0] @ self.projection
            given, held, beside = cell(parts, kept, before)
            weights[0] += given.T @ self.x[step, :count]
            weights[1] += held.T @ before[0]
            if self.has_biases:
                weights[2] += given.sum(0)
                weights[3] += held.sum(0)
            x[step, :count] = given @ self.weights[0]
            through = held @ self.weights[1]
            new = [through if beside[0] is None else beside[0] + through, *beside[1:]]
            grads = [np.concatenate((part, old[count:])) for part, old in zip(new, grads, strict=True)]
        return x, grads, weights


# ---- layers


@dataclass
class _LayerStack:
    x: Array  # [steps, batch, input]
    states: Sequence[Array]
    params: Sequence[Array]
    stack: Stack
    passes: list[_Pass] = field(default_factory=list)

    def run(self) -> tuple[Array, list[Array]]:
        """(output [steps, batch, directions state], states after the last step)"""
        directions, x = 1 + self.stack.bidirectional, self.x
        count, width = self.stack.num_layers * directions, len(self.params) // (self.stack.num_layers * directions)
        alive, after = self.stack.sizes or [x.shape[1]] * len(x), []
        for number in range(count):
            order = range(len(x))[:: -1 if number % directions else 1]
            own, weights = [state[number] for state in self.states], self.params[number * width : (number + 1) * width]
            self.passes.append(_Pass(self.stack.mode, x, own, weights, self.stack.has_biases, order, alive))
            after.append(self.passes[-1].run())
            if number % directions == directions - 1:
                x = np.concatenate([part.out for part in self.passes[-directions:]], -1)
        return x, [np.stack(part) for part in zip(*after, strict=True)]

    def back(self, grad: Array, ends: list[Array]) -> list[Array]:
        """Gradients of x, states and parameters. Call it after `run`."""
        directions = 1 + self.stack.bidirectional
        states: list[list[Array]] = []
        params: list[Array] = []
        for layer in reversed(range(self.stack.num_layers)):
            numbers = range(layer * directions, (layer + 1) * directions)
            parts = np.split(grad, directions, -1)
            made = [self.passes[n].back(part, [end[n] for end in ends]) for n, part in zip(numbers, parts, strict=True)]
            grad = sum((x for x, _, _ in made[1:]), made[0][0])
            states = [part for _, part, _ in made] + states
            params = [weight for _, _, part in made for weight in part] + params
        return [grad, *(np.stack(part) for part in zip(*states, strict=True)), *params]


def _stacked(x: Array, states: Sequence[Array], params: Sequence[Array], stack: Sequence[Any]) -> _LayerStack:
    x, *rest = fractions(x, *states, *params)
    made = Stack(*stack)
    return _LayerStack(_padded(x, made.sizes), rest[: len(states)], rest[len(states) :], made)


def _padded(rows: Array, sizes: Sequence[int]) -> Array:
    """Rows of packed sequences as [steps, batch, ...], zeros where a sequence has ended."""
    if not sizes:
        return rows
    made = np.zeros((len(sizes), sizes[0], *rows.shape[1:]), rows.dtype)
    for step, part in enumerate(np.split(rows, np.cumsum(sizes)[:-1])):
        made[step, : len(part)] = part
    return made


def _packed(x: Array, sizes: Sequence[int]) -> Array:
    return np.concatenate([x[step, :count] for step, count in enumerate(sizes)]) if sizes else x


def _forward(x: Array, states: Sequence[Array], params: Sequence[Array], *rest: Any) -> tuple[Array, ...]:
    layers = _stacked(x, states, params, rest[:-2])
    out, after = layers.run()
    return (_packed(out, layers.stack.sizes), *after, *[np.zeros(0, out.dtype)] * (2 - len(after)))


def _backward(  # noqa: PLR0913 - the op's arguments
    grad: Array | None, grad_hy: Array | None, grad_cy: Array | None, x: Array, states: Sequence[Array],
    params: Sequence[Array], out: Array, *rest: Any,
) -> list[Array]:  # fmt: skip
    *stack, needs = rest
    layers = _stacked(x, states, params, stack)
    result, after = layers.run()
    whole = np.zeros_like(result) if grad is None else _padded(fractions(grad)[0], layers.stack.sizes)
    given = zip(after, (grad_hy, grad_cy))
    ends = [np.zeros_like(end) if part is None else fractions(part)[0] for end, part in given]
    found, *others = layers.back(whole, ends)
    grads = (_packed(found, layers.stack.sizes), *others)
    return [part for part, needed in zip(grads, needs, strict=True) if needed]


TABLE: dict[str, Callable[..., Any]] = {"gt.rnn.default": _forward, "gt.rnn_backward.default": _backward}
