"""Captured steps have the losses and weights of plain torch on the CPU: new values in each call, and a smaller last batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gt
from tests.programs.objectives import PROGRAMS
from tests.programs.program import Program
from tests.programs.test_programs import CONFIG, TOLERANCE, data_parallel

Make = Callable[[str], Program]
IN_PARTS = frozenset({"lookahead"})  # its Python counts, and decides by it

pytestmark = pytest.mark.usefixtures("plain_threads")


def outcome(
    make: Make, device: str, place: Callable[[Program], Any] | None = None
) -> tuple[list[float], list[torch.Tensor], Any]:
    """Losses, weights and buffers in the end, and the step."""
    torch.manual_seed(0)
    program = make(device)
    step = program.step if device == "cpu" else gt.compile(program.step)
    with contextlib.nullcontext() if place is None else place(program):
        losses = [float(step(*batch)) for batch in program.batches]
    return losses, [value.detach().cpu() for module in program.modules for value in module.state_dict().values()], step


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_a_captured_step_is_that_of_plain_torch(make: Make, workers: int, session: Callable[..., None]) -> None:
    session(CONFIG if workers == 2 else "")
    losses, weights, step = outcome(make, "remote", data_parallel if workers == 2 else None)
    torch.testing.assert_close((losses, weights), outcome(make, "cpu")[:2], **TOLERANCE)
    assert make.__name__ in IN_PARTS or step._programs[0].replays >= 3, step.explain()
