"""Settings of processes: imports without passes of Python's collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from gt.wire.process_settings import YOUNG_OBJECTS, collect_less, uncollected
from gt.wire.signals import NEVER_OBJECTS


class Node:
    def __init__(self) -> None:
        self.cycle = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Without objects that other tests' libraries have frozen."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()


def test_objects_of_an_import_are_old_afterwards_and_can_still_be_collected() -> None:
    with uncollected():
        assert gc.get_threshold()[0] == NEVER_OBJECTS
        nodes = [Node() for _ in range(100)]
    assert gc.get_threshold()[0] < NEVER_OBJECTS and not gc.get_freeze_count()
    old = {id(thing) for thing in gc.get_objects(2)}
    assert all(id(node) in old for node in nodes)
    nodes.clear()
    assert gc.collect() >= 99


def test_objects_that_the_program_has_frozen_stay_so() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with uncollected():
        pass
    assert gc.get_freeze_count() > frozen // 2 and gc.isenabled()  # some may have ended meanwhile


def test_a_program_without_the_collector_stays_without() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


def test_a_pass_over_the_middle_generation_meets_few_objects():
    """Each takes some 0.4 us, and all peers wait: a batch of a client's that makes many is met in parts."""
    before, met = gc.get_threshold(), [0]

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 1:
            met.append(len(gc.get_objects(generation=0)) + len(gc.get_objects(generation=1)))

    collect_less()
    gc.callbacks.append(note)
    try:
        kept = [[n] for n in range(10 * YOUNG_OBJECTS)]
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
        gc.unfreeze()
    assert len(kept) == 10 * YOUNG_OBJECTS and len(met) > 1 and max(met) < 4 * YOUNG_OBJECTS
