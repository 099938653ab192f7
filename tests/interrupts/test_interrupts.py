"""Some of the random interrupts, and what they have found."""

from __future__ import annotations

import time

import pytest

from tests.helpers.limits import limit
from tests.interrupts.engine import LAYOUTS, Engine
from tests.interrupts.simulation import simulate

# Seeds of the simulation that have failed
FOUND = [1, 510, 531, 556, 625, 1001, 1030, 1139, 1517, 1649]
SEED = 7_000_000


@pytest.mark.parametrize("seed", FOUND)
def test_values_are_of_the_ops_that_were_carried_out(seed: int) -> None:
    assert simulate(seed, 1)["cases"] == 1


def test_random_interleavings_of_two_workers() -> None:
    counts = simulate(SEED, 40, time.monotonic() + limit(5))
    assert counts["interrupts"] > counts["cases"] > 3 and counts["dropped"]


@pytest.mark.parametrize("name", ["one", "zero3", "pp", "draws", "files"])
def test_training_goes_on_from_a_prefix_of_the_program(name: str) -> None:
    layout = next(layout for layout in LAYOUTS if layout["name"] == name)
    with Engine(layout) as engine:
        until, seed = time.monotonic() + limit(2), SEED
        while time.monotonic() < until or not engine.counts["interrupted"]:
            engine.run(seed)
            seed += 1
            assert seed < SEED + 40
    assert engine.counts["cases"]
