"""Finalizers of the program that use tensors: the collector runs them at any allocation, in any thread."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from gt.client.device.remote_tensor import LiveTensors, Temporary
from gt.client.exchange.arenas import ClientArenas
from gt.client.trace.recorder import Recorder
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
    gc.callbacks[:] = [one for one in gc.callbacks if one in callbacks or one.__name__ == "_note_pass"]


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
    assert noted and not any(noted) and gc.isenabled()


def test_no_pass_begins_while_a_block_is_taken(passes) -> None:
    arenas = ClientArenas(lambda message: None, 1)
    noted = passes(arenas._lock.locked)
    blocks = [arenas.take(1 << 20) for _ in range(100)]
    for block in blocks:
        arenas.free(block)
    arenas.close()
    assert noted and not any(noted) and gc.isenabled()
