"""Finalizers of the program that use tensors: the collector runs them at any allocation, in any thread."""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from gt.client.device.remote_tensor import LiveTensors, Temporary, _note_pass
from gt.client.exchange.arenas import ClientArenas
from gt.client.trace.recorder import Recorder
from gt.wire.signals import NEVER_OBJECTS, uncollected
from tests.helpers.inline_session import InlineSession, inline  # noqa: F401 - a fixture


class Cycle:
    """Garbage for the collector; `end` is called when it is found."""

    def __init__(self, end: Any) -> None:
        self.own, self.end = self, end

    def __del__(self) -> None:
        self.end()


@pytest.fixture
def passes():
    """Have the collector make passes often; where(): a list to which each pass adds what it gives."""
    before, noted = gc.get_threshold(), []

    def at_each(where: Any) -> list:
        def note(phase: str, about: dict) -> None:
            noted.append(where())

        gc.callbacks.append(note)
        gc.set_threshold(3, 1000, 1000)
        return noted

    callbacks = [*gc.callbacks]
    yield at_each
    gc.set_threshold(*before)
    gc.callbacks[:] = [one for one in gc.callbacks if one in callbacks or one is _note_pass]


def test_a_finalizer_reads_a_tensor_that_ends_with_it(inline: InlineSession) -> None:  # noqa: F811
    """The collector ends weak references to a tensor before it runs the finalizer, which needs the tensor still."""
    x, sums = torch.ones(4, device="remote"), []
    for n in range(5):  # the first one that is read hands over what has ended, tensors of the others too
        y = x * n
        Cycle(lambda y=y: sums.append(y.sum().item()))
        del y
    gc.collect()
    assert sorted(sums) == [0.0, 4.0, 8.0, 12.0, 16.0] and (x + 1).sum().item() == 8.0


def test_references_that_end_in_a_pass_are_taken_after_it() -> None:
    live, taken = LiveTensors(), []
    live.ended.append(one := Temporary(7))
    Cycle(lambda: taken.append(live.take_ended()))
    gc.collect(1)
    assert taken == [[]] and live.take_ended() == [one]


def test_a_pass_calls_no_function_of_python() -> None:
    """One would swallow the exception of a signal in it, and be counted as cost of the op that the pass came in."""
    LiveTensors()
    assert _note_pass in gc.callbacks
    called: list[str] = []
    kept, gc.callbacks[:] = gc.callbacks[:], [_note_pass]
    before = sys.gettrace()
    sys.settrace(lambda frame, event, about: called.append(frame.f_code.co_name))
    try:
        gc.collect(0)
    finally:
        sys.settrace(before)
        gc.callbacks[:] = kept
    assert not called


def test_no_pass_begins_while_ops_are_handed_over(passes) -> None:
    class Session:
        failure, waiting = None, False

        def submit(self, *_: Any, asks: bool) -> None:
            self.made = [[] for _ in range(1000)]

    recorder = Recorder(Session(), lambda: None)
    noted = passes(recorder._lock.locked)
    for n in range(20):
        recorder.code.extend((20, 1, n))
        recorder.flush()
    assert noted and not any(noted) and gc.isenabled() and gc.get_threshold()[0] == 3


def test_no_pass_begins_while_a_block_is_taken(passes) -> None:
    arenas = ClientArenas(lambda message: None, 1)
    noted = passes(arenas._lock.locked)
    blocks = [arenas.take(1 << 20) for _ in range(100)]
    for block in blocks:
        arenas.free(block)
    arenas.close()
    assert noted and not any(noted) and gc.isenabled() and gc.get_threshold()[0] == 3


def _arena_calls() -> dict[str, Any]:
    arenas = ClientArenas(lambda message: None, 1)
    fd = os.memfd_create("lent")
    block, number = arenas.take(1 << 20), arenas.lend(fd, 1, False)
    os.close(fd)
    return {
        "take": lambda: arenas.take(1 << 20),
        "free": lambda: arenas.free(block),
        "abandon": lambda: arenas.abandon(block),
        "take back": lambda: arenas.take_back(number),
        "close": arenas.close,
    }


def _recorder_calls() -> dict[str, Any]:
    class Session:
        failure, waiting = None, False

        def submit(self, *_: Any, asks: bool) -> None:
            pass

    recorder = Recorder(Session(), lambda: None)
    row = [20, 1, 0]
    recorder.code.extend(row)
    x = torch.ones(1, device="remote")
    recorder.read.ask(x._ref.id, [], 0)
    return {
        "frame": lambda: recorder.emit_with_frame(row, b"", 2),
        "upload": lambda: recorder.emit_large_upload(row),
        "note upload": lambda: recorder.note_upload(7, np.ones(1, np.int64), False),
        "ask": lambda: recorder.ask_value(x),
        "note read": lambda: recorder.note_read(x, torch.ones(1)),
        "stale": recorder.flush_stale,
    }


@pytest.mark.parametrize("calls", [_arena_calls, _recorder_calls])
def test_an_interrupt_at_the_end_of_a_pause_ends_it_all_the_same(inline: InlineSession, calls: Any) -> None:  # noqa: F811
    threshold, pressed = gc.get_threshold(), []
    assert threshold[0] < NEVER_OBJECTS

    def trace(frame: FrameType, event: str, about: Any) -> Any:
        if frame.f_code is type(uncollected).__exit__.__code__ and not pressed:
            pressed.append(None)
            signal.raise_signal(signal.SIGINT)
        return None

    for name, call in calls().items():
        pressed.clear()
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with pytest.raises(KeyboardInterrupt):
                call()
        finally:
            sys.settrace(before)
        assert pressed and gc.get_threshold() == threshold, name
