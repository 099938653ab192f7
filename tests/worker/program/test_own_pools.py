"""Two programs in turn on a played device, where one reads what the other has left in a pool of its own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from gt.ir.instr import FORGET, FREE, Define
from gt.ir.template import T
from gt.worker.engine.torch.gpu import graphs
from gt.worker.engine.torch.slots import address
from tests.helpers.compiled_parts import Script, inputs, longer, program, replay, same
from tests.helpers.worker_parts import Bench
from tests.worker.program.test_compile_graphs import Engine, Played, device  # noqa: F401

SECOND = 98  # number of the program that reads


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any bytes that would be copied out for another program count."""
    monkeypatch.setattr(graphs, "OWN_POOL_BYTES", 1)


def reader(seed: int, first: Script, length: int) -> Script:
    """A random program of what another one leaves and reads."""
    script = Script(dict(first.held))
    script.next = 3000
    return longer(script, seed + 1000, length)


def define(bench: Bench, script: Script, backend: str) -> None:
    """A second program of a bench."""
    defines = [Define(200 + n, kind, payload).wire() for n, (kind, payload) in enumerate(script.defines)]
    lasting = sorted(i for i in script.held if i > 3000)
    code: list = [FREE, 0, len(lasting), *lasting] if lasting else []
    for n, (place, operands) in enumerate(script.rows):
        code += [FREE if place < 0 else 200 + place, n, *operands]
    payload = {"code": code, "randoms": [], "actions": [], "backend": backend, "channels": [], "once": False}
    bench.executor.define([*defines, Define(SECOND, "program", payload).wire()])


def pairs(played: Played, seed: int, length: int = 10) -> tuple[Bench, Bench]:
    """Two programs on the device, and as instructions."""
    first = program(seed, length)
    second = reader(seed, first, length)
    got, want = first.bench("cudagraphs", inputs(seed), Engine(played)), first.bench("eager", inputs(seed))
    played.held = got.executor.tensors
    for bench, backend in ((got, "cudagraphs"), (want, "eager")):
        define(bench, second, backend)
    return got, want


def both(bench: Bench) -> None:
    replay(bench)
    bench.executor.run([SECOND, 0, 0, 0], 0)


def apart(bench: Bench) -> list[bool]:
    """Whether each program has a pool of its own."""
    return [bench.executor._compiled[n]._replays.apart for n in (99, SECOND)]


def test_random_pairs(device: Played) -> None:  # noqa: F811
    own = 0
    for seed in range(60):
        device.pool.clear()
        got, want = pairs(device, seed)
        rng = random.Random(seed)
        for _ in range(9):
            again = rng.random() < 0.2  # one of them twice
            for bench in (got, want):
                both(bench)
                if again:
                    replay(bench)
            same(got, want)
        own += apart(got)[0]
    assert own > 20


def chain(played: Played, extra: Any = None) -> tuple[Bench, Bench]:
    """A program that leaves a product, and one that reads it."""
    first = Script({1: torch.ones(4, 4), 3: torch.ones(4, 4)})
    (left,) = first.op("aten.add.Tensor", [T(0), T(1)], [1, 3])
    second = Script({**first.held})
    second.next = 3000
    second.op("aten.mul.Tensor", [T(0), T(1)], [left, 3])
    if extra is not None:
        extra(second, left)
    benches = first.bench("cudagraphs", {}, Engine(played)), first.bench("eager", {})
    for bench, backend in zip(benches, ("cudagraphs", "eager"), strict=True):
        bench.executor.tensors.update({1: torch.ones(4, 4), 3: torch.full((4, 4), 2.0)})
        define(bench, second, backend)
    played.held = benches[0].executor.tensors
    return benches


def test_what_a_program_leaves_for_another_is_read_in_place(device: Played, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    got, want = chain(device)
    for _ in range(5):
        both(got)
        both(want)
        same(got, want)
    copies: list[int] = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda new, old: copies.append(len(new)))
    where, records = address(got.executor.tensors[1001]), device.records
    for _ in range(3):
        both(got)
        assert address(got.executor.tensors[1001]) == where
    both(want)
    same(got, want)
    assert apart(got) == [True, False] and not copies and device.records == records
    assert not any(run._recording.slots for run in got.executor._compiled[SECOND]._replays.runs)


def test_a_view_that_the_second_makes_keeps_its_values(device: Played) -> None:  # noqa: F811
    """The first program's next replay writes over what the view is of."""
    got, want = chain(device, lambda script, left: script.op("aten.t.default", [T(0)], [left]))
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for turn in range(7):
        for bench in (got, want):
            bench.executor.tensors[1].fill_(float(turn))
            both(bench)
            # A name that outlives the next replay, as a result's
            bench.executor.define([Define(97, "alias", {}).wire()])
            bench.executor.run([97, 0, 3002, 5000 + turn], 0)
        held.append((got.executor.tensors[5000 + turn], want.executor.tensors[5000 + turn]))
    same(got, want)
    assert apart(got)[0] and len(held) == 7


@pytest.mark.parametrize("number", [99, SECOND])
def test_one_of_them_is_forgotten(device: Played, number: int) -> None:  # noqa: F811
    got, want = chain(device)
    for bench in (got, want):
        for _ in range(5):
            both(bench)
        bench.executor.run([FORGET, 0, 1, number], 0)
    device.scramble()
    same(got, want)
    for bench in (got, want):
        for _ in range(3):
            bench.executor.run([99 + SECOND - number, 0, 0, 0], 0)
    same(got, want)


def test_its_inputs_move(device: Played) -> None:  # noqa: F811
    """It is recorded again, and so is what reads its results."""
    got, want = chain(device)
    for turn in range(12):
        for bench in (got, want):
            if turn in (5, 8):
                bench.executor.tensors[1] = torch.full((4, 4), float(turn))
            both(bench)
        same(got, want)
    assert apart(got)[0]
