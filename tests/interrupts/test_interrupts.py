"""Some of the random interrupts, and what they have found."""

from __future__ import annotations

import pytest

from tests.interrupts.engine import LAYOUTS, Engine
from tests.interrupts.simulation import simulate

# Seeds of the simulation that have failed
FOUND = [1, 510, 531, 556, 625, 1001, 1030, 1139, 1517, 1649]
SEED = 7_000_000


@pytest.mark.parametrize("seed", FOUND)
def test_values_are_of_the_ops_that_were_carried_out(seed: int) -> None:
    assert simulate(seed, 1)["cases"] == 1


def test_random_interleavings_of_two_workers() -> None:
    counts = simulate(SEED, 20)
    assert counts["interrupts"] > counts["cases"] and counts["dropped"]


@pytest.mark.parametrize("name", ["one", "zero3", "pp", "draws", "files"])
def test_training_goes_on_from_a_prefix_of_the_program(name: str) -> None:
    layout = next(layout for layout in LAYOUTS if layout["name"] == name)
    with Engine(layout) as engine:
        while engine.counts["cases"] < 3 or not engine.counts["interrupted"]:
            engine.run(SEED + engine.counts["cases"])
            assert engine.counts["cases"] < 40
