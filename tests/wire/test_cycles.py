"""Reference cycles that a call makes are freed after it, and objects from before cost nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from gt.wire.process_settings import cycles_collected


class Node:
    def __init__(self) -> None:
        self.cycle = self


@pytest.fixture
def thawed() -> Iterator[None]:
    """No object is frozen, as in most programs, and no collection begins by itself."""
    gc.unfreeze()
    gc.disable()
    yield
    gc.enable()
    gc.freeze()


def test_cycles_made_inside_are_freed_and_others_are_not_visited(thawed: None) -> None:
    gc.collect()
    before = Node()
    old = weakref.ref(before)
    gc.collect(1)  # into the oldest generation
    del before
    with cycles_collected():
        new = weakref.ref(Node())
        assert gc.get_freeze_count()
    assert new() is None and not gc.get_freeze_count()
    assert old() is not None, "a collection of all objects"
    gc.collect()
    assert old() is None


def test_objects_that_the_interpreter_has_frozen_change_nothing(thawed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts with some hundreds frozen. Each recorded call made a full collection there, 0.2 s beside libraries."""
    before = Node()
    old = weakref.ref(before)
    gc.collect()
    del before
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    with cycles_collected():
        pass
    assert old() is not None, "a collection of all objects"


def test_young_cycles_from_before_are_freed(thawed: None) -> None:
    young = weakref.ref(Node())
    with cycles_collected():
        assert young() is None


def test_objects_that_the_program_has_frozen_stay_frozen(thawed: None) -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with cycles_collected():
        new = weakref.ref(Node())
    assert new() is None and gc.get_freeze_count() >= count // 2


def test_objects_are_thawed_after_an_error(thawed: None) -> None:
    with pytest.raises(ValueError, match="no"), cycles_collected():
        raise ValueError("no")
    assert not gc.get_freeze_count()
