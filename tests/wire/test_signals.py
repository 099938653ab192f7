"""The pause of Python's collector: shared by threads, apart from the program's own settings, ended in forks."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gt.wire import process_settings
from gt.wire.signals import NEVER_OBJECTS, uncollected


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)
    gc.enable()


def young() -> int:
    return gc.get_threshold()[0]


@contextmanager
def paused_elsewhere() -> Iterator[None]:
    """Another thread is inside of a pause."""
    entered, leave = threading.Event(), threading.Event()

    def run() -> None:
        with uncollected:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=run)
    thread.start()
    entered.wait()
    try:
        yield
    finally:
        leave.set()
        thread.join()


def exit_of_child(of: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(of, 0)[1])


def test_the_last_thread_inside_ends_the_pause() -> None:
    with uncollected:
        with paused_elsewhere(), process_settings.uncollected():
            assert young() == NEVER_OBJECTS
        assert young() == NEVER_OBJECTS
    assert gc.get_threshold() == (700, 10, 10)
    here = process_settings.uncollected()
    with paused_elsewhere():
        here.__enter__()
    assert young() == NEVER_OBJECTS
    here.__exit__(None, None, None)
    assert young() == 700


def test_no_pass_begins_inside() -> None:
    passes: list[str] = []
    note = lambda phase, about: passes.append(phase)  # noqa: E731
    gc.callbacks.append(note)
    try:
        with paused_elsewhere():
            kept = [[] for _ in range(5000)]
            assert not passes
        kept += [[] for _ in range(5000)]
        assert passes
    finally:
        gc.callbacks.remove(note)


def test_a_program_may_disable_the_collector_beside_a_pause() -> None:
    with paused_elsewhere():
        assert gc.isenabled()
        gc.disable()
    assert not gc.isenabled() and young() == 700
    with paused_elsewhere():
        gc.enable()
        assert young() == NEVER_OBJECTS
    assert gc.isenabled() and young() == 700


def test_a_program_may_set_thresholds_beside_a_pause() -> None:
    with paused_elsewhere():
        gc.set_threshold(900, 5, 5)
    assert gc.get_threshold() == (900, 5, 5)


def test_a_pause_that_a_program_puts_back_ends_with_the_next_one() -> None:
    with paused_elsewhere():
        seen = gc.get_threshold()
    gc.set_threshold(*seen)
    with uncollected:
        pass
    assert gc.get_threshold() == (700, 10, 10)


def test_the_child_of_a_fork_has_no_pause_of_threads_that_it_lacks() -> None:
    with paused_elsewhere():
        child = os.fork()
        if not child:
            os._exit(gc.get_threshold() != (700, 10, 10))
        assert exit_of_child(child) == 0
        assert young() == NEVER_OBJECTS


def test_a_fork_within_a_pause_ends_it_with_its_block() -> None:
    with paused_elsewhere():
        with uncollected:
            child = os.fork()
            inside = young()
        if not child:
            os._exit(not (inside == NEVER_OBJECTS and young() == 700))
        assert exit_of_child(child) == 0
