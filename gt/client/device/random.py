"""Random state of the remote device: a seed and a count of random ops. A value depends on these and on its global index."""

from __future__ import annotations

import struct
from typing import Any

import torch

_MASK = (1 << 63) - 1


class _State:
    seed: int | None = None  # None: torch's own initial seed, at the first draw
    counter = 0


def draw(generator: torch.Generator | None = None) -> tuple[int, int]:
    """Seed and counter of one random op. A (CPU) generator of the user's gives the seed."""
    if generator is not None:
        return int(torch.randint(_MASK, (), generator=generator)), 0
    _State.seed = initial_seed()
    _State.counter += 1
    return _State.seed, _State.counter


def manual_seed(seed: int) -> None:
    _State.seed, _State.counter = int(seed) & _MASK, 0


def seed_all() -> None:
    manual_seed(torch.seed())


def initial_seed() -> int:
    return _State.seed if _State.seed is not None else torch.initial_seed() & _MASK


def get_rng_state(device: Any = None) -> torch.Tensor:
    """16 bytes: seed and counter."""
    return torch.frombuffer(bytearray(struct.pack("<QQ", initial_seed(), _State.counter)), dtype=torch.uint8)


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _State.seed, _State.counter = struct.unpack("<QQ", bytes(state.tolist()))
