"""Random numbers as a function of seed, op counter and global element index; a piece draws its own elements. NumPy only.

Element i takes the i-th 64-bit word of Philox4x64 keyed by (seed, counter); a piece jumps to its words. Every engine draws
from here, so all of them give the same numbers.
"""

from __future__ import annotations

from itertools import product
from math import pi, prod, sqrt
from typing import Any

import numpy as np

from gt.ir.layout import Box
from gt.worker.instructions.pieces import as_boxes, extent, index, local

MASK = (1 << 64) - 1
SHORT_RUN_WORDS = 1024  # a shorter run of memory is drawn together with its neighbours

# ---- words


class Words:
    """The 64-bit words of one draw; `place` is [global shape, boxes held], or None where the tensor is whole."""

    def __init__(self, seed: int, counter: int, place: list | None) -> None:
        self.key = np.array([int(seed) & MASK, int(counter) & MASK], np.uint64)
        self.place = place

    def of(self, shape: tuple[int, ...]) -> np.ndarray:
        """The words of the elements that a local tensor of this shape holds, in its row-major order and shape."""
        if self.place is None:
            return self._run(0, prod(shape)).reshape(shape)
        whole, boxes = tuple(self.place[0]), as_boxes(self.place[1])
        size, places = local(boxes)
        if size != tuple(shape):
            raise ValueError(f"a random tensor of shape {tuple(shape)} was planned as {size} of {whole}")
        if len(boxes) == 1:
            return self._box(whole, boxes[0])
        words = np.empty(shape, np.uint64)
        for box, place in zip(boxes, places, strict=True):
            words[index(place)] = self._box(whole, box)
        return words

    def _run(self, start: int, count: int) -> np.ndarray:
        bits = np.random.Philox(key=self.key, counter=start // 4)
        return bits.random_raw(start % 4 + count)[start % 4 :]

    def _box(self, whole: tuple[int, ...], box: Box) -> np.ndarray:
        size = extent(box)
        if size == whole or not prod(size):
            return self._run(0, prod(size)).reshape(size)
        at = _run_dim(whole, box)
        steps = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
        first, last = box[at]
        words = np.empty(size, np.uint64)
        cut = (slice(None), *index(box[at + 1 :]))
        bits = np.random.Philox(key=self.key)
        block = 0
        for where in product(*(range(start, stop) for start, stop in box[:at])):
            start = sum(i * step for i, step in zip(where, steps, strict=False)) + first * steps[at]
            count = (last - first) * steps[at]
            bits.advance((start // 4 - block) & MASK)
            run = bits.random_raw(start % 4 + count)
            block = (start + count + 3) // 4
            rows = run[start % 4 :].reshape(last - first, *whole[at + 1 :])
            words[tuple(i - a for i, (a, _) in zip(where, box, strict=False))] = rows[cut]
        return words


def _run_dim(whole: tuple[int, ...], box: Box) -> int:
    """The dim from which a box is drawn as one run: its inner dims are whole, or too short to be drawn apart."""
    at = len(whole) - 1
    while at > 0 and box[at] == (0, whole[at]):
        at -= 1
    while at > 0 and (box[at][1] - box[at][0]) * prod(whole[at + 1 :]) < SHORT_RUN_WORDS:
        at -= 1
    return at


# ---- distributions: words -> values


def uniform(words: np.ndarray, digits: int) -> np.ndarray:
    """[0, 1) with as many binary digits as the dtype has, float32 where they fit."""
    kind = np.float64 if digits > 24 else np.float32
    values = (words >> np.uint64(64 - digits)).astype(kind)
    values *= kind(2.0**-digits)
    return values


def normal(words: np.ndarray, double: bool) -> np.ndarray:
    """Standard normal by Box and Muller (1958): radius from the high half of a word, angle from the low half."""
    radius, angle = _polar(words, double)
    np.cos(angle, out=angle)
    radius *= angle
    return radius.reshape(words.shape)


def complex_normal(words: np.ndarray, double: bool) -> np.ndarray:
    """Real and imaginary part normal with variance 1/2: both coordinates of the same point."""
    radius, angle = _polar(words, double)
    radius *= radius.dtype.type(sqrt(0.5))
    return (radius * np.exp(1j * angle).astype(np.complex128 if double else np.complex64)).reshape(words.shape)


def _polar(words: np.ndarray, double: bool) -> tuple[np.ndarray, np.ndarray]:
    kind = np.float64 if double else np.float32
    halves = np.ascontiguousarray(words).reshape(-1).view(np.uint32)
    radius, angle = halves[1::2].astype(kind), halves[0::2].astype(kind)
    radius += kind(1)
    radius *= kind(2.0**-32)
    np.log(radius, out=radius)
    radius *= kind(-2)
    np.sqrt(np.maximum(radius, 0, out=radius), out=radius)
    angle *= kind(2 * pi * 2.0**-32)
    return radius, angle


def hits(words: np.ndarray, p: Any) -> np.ndarray:
    """True with probability p, a number or an array."""
    return (words >> np.uint64(11)) < np.ceil(np.asarray(p, np.float64) * 2.0**53).astype(np.uint64)


def poisson(words: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """By inversion; above a rate of 256 the normal approximation with Cornish and Fisher's first correction."""
    large = rate > 256
    z = normal(words, True)
    root = np.sqrt(np.maximum(rate, 0))
    result = np.maximum(np.floor(rate + root * z + (z * z - 1) / 6 + 0.5), 0)
    u = uniform(words, 53)[~large]
    small = rate[~large]
    term = np.exp(-small)
    total, count = term.copy(), np.zeros_like(small)
    step = 0
    while (more := (u >= total) & (step < small + 40 * np.sqrt(small + 1))).any():
        step += 1
        term = term * small / step
        count[more] += 1
        total = total + term
    result[~large] = count
    return result
