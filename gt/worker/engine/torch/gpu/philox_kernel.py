"""Random numbers drawn on a GPU by a Triton kernel: the same words as engine/philox.py draws on the host.

Word i is the (i mod 4)-th of the Philox4x64-10 block i // 4 + 1, keyed by (seed, counter) (Salmon et al., 2011). Blocks are
numbered as NumPy does. The key is read from memory, so a recorded graph draws new numbers at each replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, pi, prod

import torch
import triton
import triton.language as tl

from gt.ir.layout import Box
from gt.worker.engine.philox import MASK, Words
from gt.worker.instructions.pieces import as_boxes, extent, index, local

BLOCK = 512  # Philox blocks of one kernel program, of four words each
MAX_DIMS = 3  # of a box that one launch draws
MAX_RELATIVE = 1 << 30  # distance from the key's counter that is passed as an argument
# Kinds of Sampling.
WORD, HIT, UNIFORM, NORMAL, DROPOUT = range(5)


@triton.jit
def _round(a, b, c, d, k0, k1):  # type: ignore[no-untyped-def]
    # Multipliers of Philox4x64 (Salmon et al., 2011); `umulhi` is the upper half of the 128-bit product.
    m0 = tl.full(a.shape, 0xD2E7470EE14C6C93, tl.uint64)
    m1 = tl.full(a.shape, 0xCA5A826395121157, tl.uint64)
    return tl.umulhi(m1, c) ^ b ^ k0, m1 * c, tl.umulhi(m0, a) ^ d ^ k1, m0 * a


@triton.jit
def _block(number, k0, k1):  # type: ignore[no-untyped-def]
    """The four words of blocks of these numbers."""
    a = number.to(tl.uint64) + 1
    b = tl.zeros_like(a)
    c = tl.zeros_like(a)
    d = tl.zeros_like(a)
    # Weyl constants of the key schedule: the golden ratio, and sqrt(3) - 1.
    w0 = tl.full(a.shape, 0x9E3779B97F4A7C15, tl.uint64)
    w1 = tl.full(a.shape, 0xBB67AE8584CAA73B, tl.uint64)
    k0 = k0 + tl.zeros_like(a)
    k1 = k1 + tl.zeros_like(a)
    for _ in tl.static_range(10):
        a, b, c, d = _round(a, b, c, d, k0, k1)
        k0 += w0
        k1 += w1
    return a, b, c, d


@triton.jit
def _put(out, x, kept, at, inside, word, threshold, scale, shift: tl.constexpr, kind: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913 - the kernel's arguments
    # By kind: the word itself, a hit, a uniform number, a normal one, dropout of x.
    if kind == 0:
        tl.store(out + at, word.to(tl.int64, bitcast=True), inside)
    # 53 bits against ceil(p * 2^53): the comparison of a float64 with p, without float64.
    elif kind == 1:
        tl.store(out + at, (word >> 11) < threshold.to(tl.uint64), inside)
    elif kind == 2:
        tl.store(out + at, (word >> shift).to(tl.float32) * scale, inside)
    elif kind == 3:
        # Box-Muller with the word's two halves: radius in (0, 1], angle in turns of 2 pi / 2^32 (`scale`).
        radius = ((word >> 32).to(tl.uint32).to(tl.float32) + 1.0) * 2.3283064365386963e-10
        angle = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32) * scale
        tl.store(out + at, tl.sqrt(tl.maximum(tl.log(radius) * -2.0, 0.0)) * tl.cos(angle), inside)
    else:
        hit = (word >> 11) < threshold.to(tl.uint64)
        value = tl.load(x + at, inside, other=0.0).to(tl.float32)
        tl.store(kept + at, hit, inside)
        tl.store(out + at, tl.where(hit, value, 0.0) * scale, inside)


@triton.jit(do_not_specialize=["relative", "count", "threshold"])
def _whole(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - the kernel's arguments
    out, x, kept, key, relative, count, threshold, scale, shift: tl.constexpr, kind: tl.constexpr, size: tl.constexpr
):
    """Elements of a whole tensor, row-major: word i for element i."""
    number = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    k0 = tl.load(key).to(tl.uint64, bitcast=True)
    k1 = (tl.load(key + 1) + relative).to(tl.uint64, bitcast=True)
    a, b, c, d = _block(number, k0, k1)
    at = number * 4
    _put(out, x, kept, at, at < count, a, threshold, scale, shift, kind)
    _put(out, x, kept, at + 1, at + 1 < count, b, threshold, scale, shift, kind)
    _put(out, x, kept, at + 2, at + 2 < count, c, threshold, scale, shift, kind)
    _put(out, x, kept, at + 3, at + 3 < count, d, threshold, scale, shift, kind)


@triton.jit(do_not_specialize=["relative", "count", "threshold", "start", "n1", "n2", "s0", "s1", "s2"])
def _piece(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - the kernel's arguments
    out, x, kept, key, relative, count, threshold, scale, start, n1, n2, s0, s1, s2, shift: tl.constexpr, kind: tl.constexpr,
    size: tl.constexpr,
):  # fmt: skip
    """Elements of a box of three dims [.., n1, n2], with strides `s0, s1, s2` in the whole, from `start` on."""
    at = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    # Elements of a piece are scattered over blocks, so each computes its own block and keeps one word of four.
    flat = start + (at // n2 // n1) * s0 + (at // n2 % n1) * s1 + (at % n2) * s2
    k0 = tl.load(key).to(tl.uint64, bitcast=True)
    k1 = (tl.load(key + 1) + relative).to(tl.uint64, bitcast=True)
    a, b, c, d = _block(flat // 4, k0, k1)
    lane = flat % 4
    word = tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))
    _put(out, x, kept, at, at < count, word, threshold, scale, shift, kind)


class PhiloxKey:
    """(seed, counter) in a device's memory, known here too. Kernels get the distance of a draw's counter from it."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.zeros(2, dtype=torch.int64, device=device)
        self._seed, self._counter = self.memory
        self._held = 0, 0

    @property
    def held(self) -> tuple[int, int]:
        """Seed and counter."""
        return self._held

    def set(self, seed: int, counter: int) -> None:
        """Set the key in the device's order of work; nothing waits for the host."""
        if seed != self._held[0]:
            self._seed.fill_(_signed(seed))
        if counter != self._held[1]:
            self._counter.fill_(_signed(counter))
        self._held = seed, counter

    def relative(self, words: Words) -> int:
        seed, counter = map(int, words.key)
        # A graph has `relative` baked in, and reads the key at each launch: within a recording the key cannot be changed.
        if seed != self._held[0] or not 0 <= counter - self._held[1] < MAX_RELATIVE:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a draw that is recorded has another seed than its program")
            self.set(seed, counter)
        return counter - self._held[1]


def _signed(word: int) -> int:
    word &= MASK
    return word - (1 << 64) if word >> 63 else word


@dataclass(frozen=True, slots=True)
class Sampling:
    """Arguments that map a word to a number. kind: WORD to DROPOUT; threshold: of hits; scale, digits: of uniform numbers."""

    kind: int
    threshold: int = 0
    scale: float = 1.0
    digits: int = 0


def draw(
    key: PhiloxKey,
    words: Words,
    out: torch.Tensor,
    sampling: Sampling,
    x: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> None:
    """Fill a contiguous `out`, which is the piece of `words`. x, kept: of DROPOUT, contiguous and of the same shape."""
    numbers, kind = (sampling.threshold, sampling.scale), (64 - sampling.digits, sampling.kind)
    relative, tensors = key.relative(words), (out, out if x is None else x, out if kept is None else kept)
    if words.place is None:
        _launch(key, relative, tensors, numbers, kind, None)
        return
    whole, boxes = tuple(words.place[0]), as_boxes(words.place[1])
    size, places = local(boxes)
    if size != tuple(out.shape):
        raise ValueError(f"a random tensor of shape {tuple(out.shape)} was planned as {size} of {whole}")
    pieces = [piece for box, place in zip(boxes, places, strict=True) for piece in _pieces(whole, box, place)]
    for box, place in pieces:
        strides = None if extent(box) == whole else _strides(whole, box)
        if len(pieces) == 1:
            _launch(key, relative, tensors, numbers, kind, strides)
            continue
        # Several boxes: each is drawn into a contiguous part, then put in its place.
        parts = [tensor[index(place)].contiguous() for tensor in tensors]
        _launch(key, relative, parts, numbers, kind, strides)
        for tensor, part in zip(tensors, parts, strict=True):
            tensor[index(place)] = part


def _pieces(whole: tuple[int, ...], box: Box, place: Box) -> Iterator[tuple[Box, Box]]:
    """A box and its place in the tensor, as boxes that a kernel can draw: of at most three strided dims."""
    if len(_dims(whole, box)) <= MAX_DIMS:
        yield box, place
        return
    # Too many strided dims: peel the outermost one off, an index at a time.
    at = next(dim for dim, (start, stop) in enumerate(box) if stop - start > 1)
    for n in range(box[at][1] - box[at][0]):
        yield from _pieces(whole, _row(box, at, n), _row(place, at, n))


def _row(box: Box, at: int, n: int) -> Box:
    first = box[at][0] + n
    return (*box[:at], (first, first + 1), *box[at + 1 :])


def _launch(
    key: PhiloxKey, relative: int, tensors: Sequence[torch.Tensor], numbers: tuple[int, float], kind: tuple[int, int],
    strides: tuple[int, ...] | None,
) -> None:  # fmt: skip
    count = tensors[0].numel()
    if not count:
        return
    if strides is None:
        grid = (triton.cdiv(count, 4 * BLOCK),)
        _whole[grid](*tensors, key.memory, relative, count, *numbers, *kind, BLOCK)
    else:
        _piece[(triton.cdiv(count, BLOCK),)](*tensors, key.memory, relative, count, *numbers, *strides, *kind, BLOCK)


def _dims(whole: tuple[int, ...], box: Box) -> list[list[int]]:
    """[extent, step in the whole] of a box, the outermost first: neighbours of which the inner one is whole are one."""
    dims: list[list[int]] = []
    for at, (n, size) in enumerate(zip(extent(box), whole, strict=True)):
        step = prod(whole[at + 1 :])
        if dims and dims[-1][1] == step * size and n == size:
            dims[-1] = [dims[-1][0] * n, step]
        elif n != 1 or not dims:
            dims.append([n, step])
    return dims


def _strides(whole: tuple[int, ...], box: Box) -> tuple[int, ...]:
    """(start, n1, n2, s0, s1, s2) of a box as one of three dims."""
    start = sum(first * prod(whole[at + 1 :]) for at, (first, _) in enumerate(box))
    dims = _dims(whole, box)
    dims = [[1, 0]] * (MAX_DIMS - len(dims)) + dims
    return start, dims[1][0], dims[2][0], dims[0][1], dims[1][1], dims[2][1]


# ---- what ops draw


def hits(key: PhiloxKey, words: Words, shape: Sequence[int], p: float) -> torch.Tensor:
    """True with probability p, bool of this shape."""
    out = torch.empty(tuple(shape), dtype=torch.bool, device=key.memory.device)
    draw(key, words, out, Sampling(HIT, threshold=ceil(p * 2.0**53)))
    return out


def uniform(key: PhiloxKey, words: Words, shape: Sequence[int], digits: int) -> torch.Tensor:
    """[0, 1) as float32, with so many binary digits, 24 at most."""
    out = torch.empty(tuple(shape), dtype=torch.float32, device=key.memory.device)
    draw(key, words, out, Sampling(UNIFORM, scale=2.0**-digits, digits=digits))
    return out


def normal(key: PhiloxKey, words: Words, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal float32: the host's formula, whose logarithm and cosine differ from a GPU's in the last digits."""
    out = torch.empty(tuple(shape), dtype=torch.float32, device=key.memory.device)
    draw(key, words, out, Sampling(NORMAL, scale=2 * pi * 2.0**-32))
    return out


def dropout(key: PhiloxKey, words: Words, x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x where it is kept, over 1 - p, and where that is (bool); 0 < p < 1."""
    x = x.contiguous()
    out, kept = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    sampling = Sampling(DROPOUT, threshold=ceil((1 - p) * 2.0**53), scale=1.0 / (1.0 - p))
    draw(key, words, out, sampling, x, kept)
    return out, kept
