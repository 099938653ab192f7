"""Segments of which some ops cannot be compiled: these are instructions, and what is between them is compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gt.ir.instr import FIRST
from gt.ir.template import T
from gt.worker.program.partition import DefinitionTraits, partition
from tests.helpers.compiled_parts import Script, replay, report, same

Held = dict[int, torch.Tensor]


def grouped() -> tuple[Script, Held]:
    """Products of groups of rows between other ops: torch has their kernel for fp32, but no shape function for it."""
    torch.manual_seed(0)
    held = {1: torch.randn(8, 4), 2: torch.randn(2, 4, 4), 3: torch.tensor([3, 8], dtype=torch.int32)}
    script, x = Script(held), 1
    for _ in range(2):
        (x,) = script.op("aten.tanh.default", [T(0)], [x])
        (x,) = script.op("aten.mul.Scalar", [T(0), 1.5], [x])
        (x,) = script.op("aten._grouped_mm.default", [T(0), T(1), T(2)], [x, 2, 3])
    (x,) = script.op("aten.exp.default", [T(0)], [x])
    script.op("aten.sin_.default", [T(0)], [x])
    return script, held


def complex_state() -> Held:
    """Real tensors, and a complex one that was made before the program, whose definitions do not show its dtype."""
    torch.manual_seed(0)
    return {1: torch.randn(4, dtype=torch.complex64), 2: torch.randn(4, 2), 3: torch.randn(4, 2)}


def overlapping() -> Held:
    """Two parts of one memory that overlap, neither of which holds the other."""
    base = torch.arange(12.0)
    return {1: base[:8].view(2, 4), 2: base[4:].view(2, 4), 3: torch.ones(2, 4)}


def compared(script: Script, make: Callable[[], Held]) -> dict[str, Any]:
    """The report of a program that has the values and the memory of its instructions, three times."""
    got, want = script.bench("inductor", make()), script.bench("eager", make())
    for _ in range(4):
        replay(got)
        replay(want)
        same(got, want, rtol=0)
    return report(got)


def test_an_op_that_cannot_be_compiled_is_executed_between_compiled_ones(graphs: list) -> None:
    """The compiler names that op. Equal parts are compiled once."""
    script, _ = grouped()
    found = compared(script, lambda: grouped()[1])
    assert (found["segments"], found["compiled"], found["distinct"], len(graphs)) == (3, 3, 2, 2)
    assert [(count, why[:30]) for count, why in found["reasons"]] == [(2, "aten._grouped_mm.default: Expe")]


def test_a_segment_that_is_compiled_when_it_is_reached_is_divided_at_once(graphs: list) -> None:
    held = {1: torch.randn(8, 4), 2: torch.randn(2, 4, 4), 3: torch.tensor([3, 8], dtype=torch.int32)}
    script = Script(held)
    (large,) = script.op("aten.repeat.default", [T(0), [64, 1]], [1])  # what ends within it sets the peak of memory
    (large2,) = script.op("aten.exp.default", [T(0)], [large])
    (total,) = script.op("aten.sum.dim_IntList", [T(0), [0]], [large2])
    script.free(large, large2)
    (x,) = script.op("aten.mul.Tensor", [T(0), T(1)], [1, total])
    script.op("aten._grouped_mm.default", [T(0), T(1), T(2)], [x, 2, 3])
    got, want = script.bench("inductor", held, once=True), script.bench("eager", held)
    replay(got)
    replay(want)
    same(got, want, rtol=0)
    assert len(graphs) == 1 and [count for count, _ in report(got)["reasons"]] == [1]


def test_a_refused_op_has_no_traceback_in_the_workers_output(graphs: list, caplog: pytest.LogCaptureFixture) -> None:
    script, held = grouped()
    with caplog.at_level(logging.WARNING):
        replay(script.bench("inductor", held), 2)
    assert not caplog.records


def test_complex_state_keeps_no_other_op_from_being_compiled(graphs: list) -> None:
    """Moments of an optimizer are such state."""
    script = Script(complex_state())
    (x,) = script.op("aten.tanh.default", [T(0)], [2])
    (x,) = script.op("aten.add.Tensor", [T(0), T(1)], [x, 3])
    (real,) = script.op("aten.view_as_real.default", [T(0)], [1])
    script.op("aten.add_.Tensor", [T(0), T(1)], [real, x])
    (y,) = script.op("aten.mul.Tensor", [T(0), T(1)], [real, x])
    script.op("aten.exp.default", [T(0)], [y])
    found = compared(script, complex_state)
    assert found["compiled"] == found["segments"] == 2
    assert found["reasons"] == [[1, "aten.view_as_real.default: complex numbers are not compiled"]]


def test_writes_to_memory_that_inputs_share_keep_no_other_op_from_being_compiled(graphs: list) -> None:
    script = Script(overlapping())
    (x,) = script.op("aten.tanh.default", [T(0)], [3])
    (x,) = script.op("aten.exp.default", [T(0)], [x])
    script.op("aten.add_.Tensor", [T(0), T(1)], [1, x])
    (y,) = script.op("aten.mul.Tensor", [T(0), T(1)], [2, x])
    script.op("aten.sub.Tensor", [T(0), T(1)], [y, 1])
    found = compared(script, overlapping)
    assert found["compiled"] == found["segments"] == 2
    assert [(count, "that several of its inputs share" in why) for count, why in found["reasons"]] == [(1, True)]


def rows_of_a_buffer() -> Held:
    """A buffer, an argument and the weights of a loop. The buffer begins somewhere in its memory."""
    torch.manual_seed(0)
    return {1: torch.zeros(3, 20, 5)[:, 2:], 2: torch.randn(3, 5), 3: torch.randn(5, 5)}


@pytest.mark.parametrize("own", [0, 1])
def test_rows_that_a_loop_writes_into_one_buffer_are_no_reason(graphs: list, own: int) -> None:
    """Equal parts of the loop are compiled once, wherever in the buffer they write. own: rows of it that each part reads."""
    script, x = Script(rows_of_a_buffer()), 2
    for turn in range(3):
        for step in range(3):
            (x,) = script.op("aten.mm.default", [T(0), T(1)], [x, 3])
            (x,) = script.op("aten.tanh.default", [T(0)], [x])
            (row,) = script.op("aten.select.int", [T(0), 1, 6 * turn + 2 * step + own], [1])
            script.op("aten.copy_.default", [T(0), T(1)], [row, x])
            if own:
                (before,) = script.op("aten.select.int", [T(0), 1, 6 * turn + 2 * step], [1])
                (x,) = script.op("aten.add.Tensor", [T(0), T(1)], [x, before])
        script.stop()
    found = compared(script, rows_of_a_buffer)
    assert (found["segments"], found["compiled"], found["distinct"], found["reasons"]) == (3, 3, 1, [])


@pytest.mark.usefixtures("graphs")
def test_code_for_rows_apart_is_not_used_for_rows_that_overlap() -> None:
    """A program's inputs may move between replays."""
    base = torch.zeros(20)
    held = {1: base[:4], 2: base[8:12], 3: torch.ones(4)}
    script = Script(held)
    script.op("aten.add_.Tensor", [T(0), T(1)], [1, 3])
    (x,) = script.op("aten.mul.Tensor", [T(0), T(1)], [1, 2])
    script.op("aten.sub_.Tensor", [T(0), T(1)], [2, x])
    got, want = script.bench("inductor", dict(held)), script.bench("eager", {})
    for offset in (8, 8, 9, 2, 0):
        for bench in (got, want):
            moved = torch.arange(20.0)
            bench.executor.tensors.update({1: moved[:4], 2: moved[offset : offset + 4], 3: torch.ones(4)})
            replay(bench)
        same(got, want, rtol=0)


def test_state_that_an_optimizer_makes_after_a_backward_pass_changes_no_graph_of_that(graphs: list) -> None:
    """Its first step makes zeros, or copies of gradients: the next calls have the code of the first."""
    texts = []
    for makers in ([], ["zeros_like", "zeros_like"], ["clone", "clone", "zeros_like"]):
        torch.manual_seed(0)
        held = {1: torch.randn(4, 4), 2: torch.randn(4, 4)}
        script = Script(held)
        (x,) = script.op("aten.mm.default", [T(0), T(1)], [1, 2])
        (copy,) = script.op("aten.clone.default", [T(0)], [x])  # within it, such an op stays
        (y,) = script.op("aten.add.Tensor", [T(0), T(1)], [x, copy])
        script.free(copy)
        for name in makers:
            script.op(f"aten.{name}.default", [T(0)], [y])
        got, want = script.bench("inductor", dict(held)), script.bench("eager", dict(held))
        for _ in range(3):
            replay(got)
            replay(want)
            same(got, want, rtol=0)
        assert report(got)["segments"] == report(got)["compiled"] == 1 + bool(makers)
        texts.append({graph.code for graph in graphs})
        graphs.clear()
    assert texts[0] <= texts[1] and texts[0] <= texts[2]


def test_a_copy_of_what_is_sent_stays_in_the_segment_that_makes_it() -> None:
    traits = {
        FIRST: DefinitionTraits(True, "mul", computes=True, tensors=1),
        FIRST + 1: DefinitionTraits(True, "clone", computes=True, tensors=1, makes=True),
        FIRST + 2: DefinitionTraits(),  # a transfer
        FIRST + 3: DefinitionTraits(tensors=1),  # an op that is not compiled
    }
    code = [FIRST, 0, 1, 2, FIRST, 0, 2, 3, FIRST + 1, 0, 3, 4]
    places = [0, 4, 8, len(code)]
    for last, sizes in ((FIRST + 2, [3, 1]), (FIRST + 3, [2, 2])):
        rows = [(at, None) for at in places]
        pieces = partition(rows, [*code, last, 0, 4], traits.__getitem__)
        assert [len(part) for _, part in pieces] == sizes
