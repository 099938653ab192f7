"""Fragments in the dispatcher alone: what is launched, what a fragment's program serves, and messages that are refused."""

from __future__ import annotations

import pytest

from gt.dispatcher.programs.fragments.fragment_cuts import FragmentCuts
from gt.dispatcher.programs.fragments.fragment_pattern import parse
from gt.ir.instr import END_FRAGMENT, FRAGMENT, FREE
from gt.wire.messages import Failed, InspectFragments, Ops, Report
from tests.helpers.core_bench import CoreBench
from tests.helpers.hostile import TEMPLATES

UPLOAD, NEG = TEMPLATES[0], TEMPLATES[3]
ORIGINS = [[1, "f.py", 1, "", False, -1]]
START = [16, 1, 0, 1]  # an upload makes tensor 1


def fragment(first: int, source: int = 1, call: int = 0) -> list:
    """Three negations, whose last result outlives the fragment."""
    ops = [17, 1, source, first, 17, 1, first, first + 1, 17, 1, first + 1, first + 2]
    return [FRAGMENT, 5, call, 0, 0, 0, len(ops), *ops, END_FRAGMENT, 2, first, first + 1]


@pytest.fixture
def bench() -> CoreBench:
    bench = CoreBench("")
    bench.give(b"c", Ops(0, [[16, UPLOAD], [17, NEG]], ORIGINS, START), (bytes(64),))
    return bench


def counts(bench: CoreBench) -> dict:
    bench.give(b"c", InspectFragments(3, 5))
    return bench.to(b"c", Report)[0].body


def test_the_third_call_is_one_instruction(bench: CoreBench) -> None:
    seen = []
    for call in range(4):
        emitter = bench.core.sessions[b"c"].emitter
        before = emitter.sent
        bench.give(b"c", Ops(1 + call, [], [], fragment(10 * (call + 1), call=call)))
        seen.append(emitter.sent - before)
    assert seen[2:] == [1, 1] and seen[1] >= 3, seen
    report = counts(bench)
    assert (report["ops"], report["carried"], report["last_carried"], report["programs"]) == (12, 6, 3, 1), report
    alive = {i for i in bench.core.sessions[b"c"].table.rows if i < 1 << 39}
    assert alive == {1, 12, 22, 32, 42}


def test_another_operand_order_is_another_fragment(bench: CoreBench) -> None:
    for call in range(4):
        bench.give(b"c", Ops(1 + call, [], [], fragment(10 * (call + 1), call=call)))
    ops = [17, 1, 1, 60, 17, 1, 60, 61, 17, 1, 60, 62]  # the last reads the first result, not the second
    bench.give(b"c", Ops(5, [], [], [FRAGMENT, 5, 9, 0, 0, 0, len(ops), *ops, END_FRAGMENT, 1, 60]))
    report = counts(bench)
    assert (report["last_ops"], report["last_carried"]) == (3, 0), report


@pytest.mark.parametrize(
    "code",
    [
        [FRAGMENT],
        [FRAGMENT, 1, 1, 0, 0, 0],
        [FRAGMENT, 1, 1, 0, 0, 0, 4, 17, 1, 1, 2],
        [FRAGMENT, 1, 1, 9, 0, 0, 4, 17, 1, 1, 2, END_FRAGMENT, 0],
        [FRAGMENT, 1, 1, 0, 0, 0, -4, 17, 1, 1, 2, END_FRAGMENT, 0],
        [FRAGMENT, 1, 1, 0, 0, 0, 1 << 40, 17, 1, 1, 2, END_FRAGMENT, 0],
        [FRAGMENT, 1, 1, 0, 0, 0, 3, 17, 1, 1, 2, END_FRAGMENT, 0],
        [FRAGMENT, 1, 1, 0.5, 0, 0, 4, 17, 1, 1, 2, END_FRAGMENT, 0],
        [FRAGMENT, 1, 1, 0, 0, 0, 4, 17, 1, 1, 2, END_FRAGMENT, 5, 2],
        [FRAGMENT, 1, 1, 0, 0, 0, 4, 17, 1, 1, 2, END_FRAGMENT, -1],
        [END_FRAGMENT],
        [END_FRAGMENT, 3, 1],
    ],
)
def test_a_malformed_fragment_is_refused(bench: CoreBench, code: list) -> None:
    bench.give(b"c", Ops(1, [], [], code))
    assert "fragment" in str(bench.to(b"c", Failed)[0].error), bench.sent


@pytest.mark.parametrize("made", [[1], [1 << 39], [0], [-2], [0.5]])
def test_a_launch_makes_tensors_under_new_ids_only(bench: CoreBench, made: list) -> None:
    for call in range(4):
        bench.give(b"c", Ops(1 + call, [], [], fragment(10 * (call + 1), call=call)))
    ops = [17, 1, 12, 60, 17, 1, 60, 61, 17, 1, 61, *made]
    bench.give(b"c", Ops(5, [], [], [FRAGMENT, 5, 9, 0, 0, 0, len(ops), *ops, END_FRAGMENT, 2, 60, 61]))
    assert "new" in str(bench.to(b"c", Failed)[0].error), bench.sent


@pytest.mark.parametrize("rest", [[FREE, -2], [FREE, 1 << 40, 1], [FREE], [FREE, 0.5], [99, 1], [17, 1, 1], [3, 1, 0, 0]])
def test_code_that_is_no_run_of_ops_has_no_pattern(bench: CoreBench, rest: list) -> None:
    templates = bench.core.sessions[b"c"].context.templates
    assert parse([17, 1, 1, 2, *rest], templates, 0, 0) is None
    assert parse([17, 1, 1, 2, FREE, 1, 1], templates, 0, 0) is not None


def test_templates_that_begin_again_end_all_fragments(bench: CoreBench) -> None:
    for call in range(3):
        bench.give(b"c", Ops(1 + call, [], [], fragment(10 * (call + 1), call=call)))
    bench.give(b"c", Ops(4, [[17, NEG]], [], fragment(90, call=7)))
    assert counts(bench)["last_carried"] == 0


def test_a_launch_that_was_not_begun_fails_what_it_would_have_moved(bench: CoreBench) -> None:
    """Its layout is known as it would be afterwards."""
    session = bench.core.sessions[b"c"]
    for call in range(3):
        bench.give(b"c", Ops(1 + call, [], [], fragment(10 * (call + 1), call=call)))
    (program,) = (f.program for f in session.op_stream.fragments._fragments._all)
    tensor = session.table.rows[1]
    program.changed.append((0, tensor.layout))
    program.views.append((0, 1))
    bench.give(b"c", Ops(4, [], [], fragment(40, call=3)))
    launched = session.journal.rows[-1]
    assert tensor.storage.failed is None
    session.drop({launched.seq})
    assert "was not begun" in str(tensor.storage.failed.error)


@pytest.mark.parametrize("joined", [1, 3])
def test_runs_that_part_and_meet_again_are_programs_of_their_parts(joined: int) -> None:
    """joined: calls in a batch, as those of a client whose workers are busy."""
    bench = CoreBench("")
    batch: list[int] = []
    origins = [[n, "f.py", n, "", False, -1] for n in range(1, 8)]
    bench.give(b"c", Ops(0, [[16, UPLOAD], [17, NEG]], origins, START), (bytes(64),))
    middles = ([3], [4, 5], [3], [4, 5], [], [3], [4, 5], [], [4, 5], [3], [], [3])
    for call, middle in enumerate(middles):
        lines, first = [1, 2, *middle, 6, 7], 10 * (call + 1)
        ops = [n for k, line in enumerate(lines) for n in (17, line, first + k - 1 if k else 1, first + k)]
        ended = [first + k for k in range(len(lines) - 1)]
        header = [FRAGMENT, 5, call, 0, 0, 0, len(ops)]
        batch += [*header, *ops, END_FRAGMENT, len(ended), *ended]
        if (call + 1) % joined:
            batch += [17, 1, 1, 1000 + call, FREE, 1, 1000 + call]  # an op between two calls
            continue
        bench.give(b"c", Ops(1 + call // joined, [], [], batch))
        batch = []
        alive = {i for i in bench.core.sessions[b"c"].table.rows if i < 1 << 39}
        assert first + len(lines) - 1 in alive and alive.isdisjoint(ended)
        if call >= len(middles) - 4:  # all three ways were met, and are executed whole
            assert counts(bench)["last_carried"] == len(lines), (call, counts(bench))


def test_a_batch_that_cannot_be_followed_is_not_cut() -> None:
    cuts = FragmentCuts()
    cuts.met[17, 1] = None
    whole = [FRAGMENT, 5, 0, 0, 0, 0, 2, 99, 1, END_FRAGMENT, 0]
    for code in ([], [FRAGMENT], [FRAGMENT, 5, 0, 0, 0, 0, 99, 17], [99, 1, 2], whole):
        assert cuts.split(code, {}) is code
