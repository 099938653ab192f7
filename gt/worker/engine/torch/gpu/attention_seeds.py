"""Seeds of dropout within fused attention kernels: a function of the op's seed and counter, and of the piece of the scores.

The kernels draw from torch's generator, and want seed and offset (always 0) again in backward. Op by op, the generator gets
the seed before each call. In a CUDA graph each call has a generator of its own, which is seeded before each launch. So a mask
is the same op by op and in graphs, and when forward is computed again (activation checkpointing).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gt import env
from gt.worker.engine.philox import MASK, Words
from gt.worker.engine.torch.gpu.philox_kernel import PhiloxKey
from gt.worker.instructions.pieces import as_boxes

log = logging.getLogger("gt.worker")
SEED_MASK = (1 << 62) - 1  # kernels take a seed as a signed or an unsigned number
GAMMA = 0x9E3779B97F4A7C15


def mixed_seed(seed: int, counter: int, piece: int) -> int:
    """Three words as one: splitmix64 (Steele, Lea and Flood 2014), its state changed by each word."""
    state = 0
    for word in (seed, counter, piece):
        state = ((state ^ word) + GAMMA) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state & SEED_MASK


@triton.jit
def _mix(state, word):  # type: ignore[no-untyped-def]
    state = (state ^ word) + tl.full(state.shape, 0x9E3779B97F4A7C15, tl.uint64)
    state = (state ^ (state >> 30)) * tl.full(state.shape, 0xBF58476D1CE4E5B9, tl.uint64)
    state = (state ^ (state >> 27)) * tl.full(state.shape, 0x94D049BB133111EB, tl.uint64)
    return state ^ (state >> 31)


@triton.jit(do_not_specialize=["relative", "piece"])
def _write_state(out, key, relative, piece):  # type: ignore[no-untyped-def]
    """out[0] = mixed_seed(seed, counter, piece), out[1] = 0: the offset."""
    at = tl.arange(0, 2)
    seed = tl.load(key + at * 0).to(tl.uint64, bitcast=True)
    counter = (tl.load(key + 1 + at * 0) + relative).to(tl.uint64, bitcast=True)
    # The same as `mixed_seed`, on the device, for the backward pass in a graph.
    state = _mix(tl.zeros_like(seed), seed)
    state = _mix(state, counter)
    state = _mix(state, (at * 0 + piece).to(tl.int64).to(tl.uint64, bitcast=True))
    state = state & tl.full(state.shape, 0x3FFFFFFFFFFFFFFF, tl.uint64)
    tl.store(out + at, tl.where(at == 0, state, tl.zeros_like(state)).to(tl.int64, bitcast=True))


@dataclass(frozen=True, slots=True)
class GraphDraw:
    """One call of a kernel in a CUDA graph. relative: distance of its counter from the key's."""

    generator: torch.Generator
    relative: int
    piece: int


class AttentionSeeds:
    """Seeds for the attention kernels of one GPU."""

    def __init__(self, key: PhiloxKey) -> None:
        self.key, self.exact = key, env.flag("GT_EXACT_ATTENTION_DROPOUT")
        self.program_draws = 0  # draws of the running program: an upper bound of its calls
        self._spare: list[torch.Generator] = []  # registered with the graph that is being recorded
        self._drawn: list[GraphDraw] = []

    def register(self, graph: torch.cuda.CUDAGraph) -> list[GraphDraw]:
        """A recording begins: give its graph generators. The result is filled by the recording.

        Where torch refuses them, attention with dropout cannot be recorded, and everything else can.
        """
        # Generators have to be registered before the capture begins, when the number of calls is not known: an upper bound.
        self._spare, self._drawn = [], []
        try:
            for _ in range(self.program_draws):
                generator = torch.Generator(self.key.memory.device)
                graph.register_generator_state(generator)
                self._spare.append(generator)
        except (AttributeError, RuntimeError) as error:
            log.warning("attention with dropout is not recorded in CUDA graphs: %s: %s", type(error).__name__, error)
        return self._drawn

    def seed(self, draws: list[GraphDraw]) -> None:
        """Seed the generators of a graph for its next launch."""
        seed, counter = self.key.held
        for draw in draws:
            draw.generator.manual_seed(mixed_seed(seed, counter + draw.relative, draw.piece))

    @contextmanager
    def drawing(self, words: Words) -> Iterator[None]:
        """Within: torch's generator draws by the seed of these words."""
        default = torch.cuda.default_generators[self.key.memory.device.index or 0]
        if not torch.cuda.is_current_stream_capturing():
            # Op by op: the host seeds the default generator, and the kernel reads it when it is launched.
            default.manual_seed(_mixed(words))
            yield
            return
        if not self._spare:
            raise RuntimeError("attention with dropout has no generator in this recording")
        # The kernel draws from torch's default generator: lend it this one's state for the time of the call.
        own = self._spare.pop()
        self._drawn.append(GraphDraw(own, self.key.relative(words), _piece(words)))
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(own.graphsafe_get_state())
        try:
            yield
        finally:
            default.graphsafe_set_state(before)

    def device_state(self, words: Words) -> torch.Tensor:
        """[seed, offset] of the draw of these words as int64 [2] in the GPU's memory; a graph writes it at each launch."""
        state = torch.empty(2, dtype=torch.int64, device=self.key.memory.device)
        _write_state[(1,)](state, self.key.memory, self.key.relative(words), _piece(words))
        return state

    def state(self, words: Words) -> tuple[torch.Tensor, torch.Tensor]:
        """(seed, offset), scalars as the memory-efficient kernel's backward takes them: the host's, but not in a graph."""
        if torch.cuda.is_current_stream_capturing():
            return tuple(self.device_state(words).unbind())  # type: ignore[return-value]
        seed = _mixed(words)
        return torch.tensor(seed, dtype=torch.int64), torch.tensor(0, dtype=torch.int64)


def _mixed(words: Words) -> int:
    seed, counter = map(int, words.key)
    return mixed_seed(seed, counter, _piece(words))


def _piece(words: Words) -> int:
    """Index of the first score that this worker has, among all: pieces of one tensor must draw different masks."""
    if words.place is None:
        return 0
    flat = 0
    for size, (start, _) in zip(words.place[0], as_boxes(words.place[1])[0], strict=True):
        flat = flat * size + start
    return flat & SEED_MASK
