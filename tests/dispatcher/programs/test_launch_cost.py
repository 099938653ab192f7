"""The dispatcher in a replay: what a launch costs, in lines executed, and what it notices of layouts and versions."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gt
from gt.client import current_session
from gt.dispatcher.core import Core
from gt.dispatcher.programs.program import Program
from gt.ir.layout import Layout, Mesh, Shard
from tests.corpus.session import PlannedSession
from tests.corpus.transcript import Transcript

PAIR = "whole: {workers: [0]}\npair: {shard: {axis: 0, workers: [0, 1]}}\n"


class Replays:
    """A training step of so many layers, whose dispatcher is in this process."""

    def __init__(self, layers: int, config: str = PAIR) -> None:
        self.session = PlannedSession(config, "test.yaml", 2, Transcript())
        self._before = current_session.set_aside()
        current_session.connect(self.session, config, "test.yaml")
        self.model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)]).to("remote")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.step = gt.compile(self._step)
        self.x = torch.ones(4, 4).to("remote")
        for _ in range(6):
            self.step(self.x).item()
        assert len(self.step._programs) == 1 and self.step._programs[0].replays > 1, self.step.explain()

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        with gt.signal.context("whole"):
            loss = self.model(x).sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @property
    def core(self) -> Core:
        return self.session._core

    @property
    def program(self) -> Program:
        (program,) = self.core.sessions[b"client"].programs.all.values()
        return program

    def version(self, tensor: torch.Tensor) -> int:
        current_session.current().flush()
        return self.core.sessions[b"client"].table.rows[tensor._ref.id].storage.version  # type: ignore[attr-defined]

    def lines(self, run: Callable[[], Any]) -> int:
        """Lines of Python that the dispatcher executes: each round of a loop counts, a pass in C does not."""
        count, handle = 0, self.core.handle

        def note(frame: Any, event: str, arg: Any) -> Any:
            nonlocal count
            count += event == "line"
            return note

        def counted(event: Any) -> list:
            before = sys.gettrace()
            sys.settrace(note)
            try:
                return handle(event)
            finally:
                sys.settrace(before)

        gc.collect()  # what ends in a collection may call functions: none comes while they are counted
        gc.disable()
        self.core.handle = counted  # type: ignore[method-assign]
        try:
            run()
        finally:
            del self.core.handle
            gc.enable()
        return count

    def close(self) -> None:
        self.core.check()
        current_session.disconnect()
        current_session.restore(self._before)


@pytest.fixture
def replays(request: pytest.FixtureRequest) -> Any:
    made: list[Replays] = []

    def make(layers: int) -> Replays:
        made.append(Replays(layers))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_launch_takes_as_many_lines_for_any_number_of_parameters(replays: Callable[[int], Replays]) -> None:
    counts = []
    for layers in (1, 4):
        one = replays(layers)
        counts.append([one.lines(lambda one=one: one.step(one.x).item()) for _ in range(3)])
        one.close()
    assert counts[0] == counts[1] and min(counts[0]) > 0


def test_a_launch_is_a_write_of_what_the_program_writes_and_so_is_each_after_its_end(replays: Callable[[int], Replays]) -> None:
    one = replays(2)
    weight = one.model[0].weight
    versions = [one.version(weight)]
    for _ in range(2):
        one.step(one.x)
        versions.append(one.version(weight))
    with torch.no_grad():
        weight.mul_(2)
    versions.append(one.version(weight))
    assert versions == sorted({*versions}), "each write has made it a new one"
    one.step._programs.clear()
    gc.collect()
    assert one.version(weight) == versions[-1]
    assert not one.core.sessions[b"client"].programs.all
    assert not one.core.sessions[b"client"].table.rows[weight._ref.id].storage.programs


def test_a_launch_finds_that_a_weight_was_moved_since_the_one_before(replays: Callable[[int], Replays]) -> None:
    one = replays(2)
    one.step(one.x)
    current_session.current().flush()
    context = one.core.sessions[b"client"].context
    row = context.table.rows[one.model[0].weight._ref.id]
    lay, program = row.layout, one.program
    assert program.compared == context.table.relaid and lay is not None and not lay.mesh.axes
    context.set_layout(row, Layout(Mesh((("shard", 2),), (0, 1)), (Shard(0),)))
    assert row.layout is not lay and program.compared != context.table.relaid
    one.step(one.x)
    current_session.current().flush()
    assert row.layout is lay
    one.step(one.x)
    current_session.current().flush()
    assert program.compared == context.table.relaid
