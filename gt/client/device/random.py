"""Random state of the remote device: a seed and a count of random ops. A value depends on both and on its global index."""

from __future__ import annotations

import struct
from typing import Any

import torch

_MASK = (1 << 63) - 1


class _State:
    """The seed and the number of random ops of this process."""

    seed: int | None = None  # None until the first draw, which takes torch's initial seed
    counter = 0


def draw(generator: torch.Generator | None = None) -> tuple[int, int]:
    """Seed and counter of one random op. With a generator of the user, which is on the CPU, the seed is drawn from it."""
    if generator is not None:
        # Each op gets a seed of its own, so that its count may be 0
        return int(torch.randint(_MASK, (), generator=generator)), 0
    _State.seed = initial_seed()
    _State.counter += 1
    return _State.seed, _State.counter


def manual_seed(seed: int) -> None:
    """Set the seed and start counting again."""
    _State.seed, _State.counter = int(seed) & _MASK, 0


def seed_all() -> None:
    """Seed from a random number, as torch.seed does."""
    manual_seed(torch.seed())


def initial_seed() -> int:
    """The seed of the next random op."""
    return _State.seed if _State.seed is not None else torch.initial_seed() & _MASK


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Seed and counter as 16 bytes."""
    return torch.frombuffer(bytearray(struct.pack("<QQ", initial_seed(), _State.counter)), dtype=torch.uint8)


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Restore the result of get_rng_state."""
    _State.seed, _State.counter = struct.unpack("<QQ", bytes(state.tolist()))
