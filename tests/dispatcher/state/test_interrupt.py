"""An interrupt: the worker skips what it has not begun, what came later waits, and only what was skipped fails."""

from __future__ import annotations

import pytest

from gt.dispatcher.events import PeerLost
from gt.dispatcher.planning.op_stream import NEVER
from gt.dispatcher.state.failures import Launched, Placed
from gt.dispatcher.state.tensors import RecipeStep
from gt.wire.messages import Ack, Done, Failed, Fetch, Interrupt, OpError, Ops, Paused, Run, Skip, Value
from tests.helpers.core_bench import CoreBench
from tests.helpers.hostile import TEMPLATES

BOTH = [[16, TEMPLATES[0]], [17, TEMPLATES[3]]]  # an upload, a neg
ORIGIN = [[1, "m.py", 3, "a", False, -1], [2, "m.py", 4, "b", False, -1]]
FIRST = [16, 1, 0, 1, 17, 1, 1, 2]


@pytest.fixture
def bench() -> CoreBench:
    made = CoreBench()
    made.give(b"c", Ops(0, BOTH, ORIGIN, FIRST), (bytes(64),))
    return made


def test_what_came_later_waits_until_all_before_it_is_through(bench):
    (run,) = bench.to(b"w0", Run)
    bench.give(b"c", Interrupt(1))  # its second batch is still on its way
    assert bench.sent == [(b"w0", Skip(0, True)), (b"w1", Skip(0, True))]
    bench.give(b"c", Ops(1, [], [], [17, 1, 2, 3]))
    (second,) = bench.to(b"w0", Run)
    for message in (Ops(2, [], [], [17, 1, 1, 4]), Fetch(7, 4)):
        bench.give(b"c", message)
        assert not bench.sent
    neg = bench.core.sessions[b"c"].journal.rows[-1].seq
    bench.give(b"w1", Paused(0, -1))
    assert not bench.sent
    bench.give(b"w0", Paused(0, neg - 1))
    assert bench.sent == [(b"w0", Skip(0, True, neg)), (b"w1", Skip(0, True, neg))]
    bench.give(b"w0", Done(run.seq))
    assert bench.sent == [(b"c", Ack(0))]
    bench.give(b"w0", OpError(neg, "interrupted", "", {}, [neg]))
    bench.give(b"w0", Done(second.seq))
    assert [type(message) for _, message in bench.sent] == [Skip, Skip, Ack, Run, Run]
    assert bench.to(b"w0", Skip) == bench.to(b"w1", Skip) == [Skip(0, False)]
    session = bench.core.sessions[b"c"]
    good = [session.table.rows[n].storage.failed is None for n in (1, 2, 3, 4)]
    assert not session.inbox and good == [True, True, False, True]
    bench.give(b"c", Fetch(8, 3))
    (failed,) = bench.to(b"c", Failed)
    assert failed.request == 8 and failed.error["message"].startswith("m.py:3: aten.neg.default was not begun")


def test_a_question_that_was_not_begun_is_answered_by_an_error(bench):
    (run,) = bench.core.sessions[b"c"].op_stream.pending
    bench.give(b"c", Fetch(7, 2))
    asked = bench.core.sessions[b"c"].fetches.open[7].seq
    bench.give(b"c", Interrupt(0))
    bench.give(b"w0", OpError(asked, "interrupted", "", {}, [asked]))
    (failed,) = bench.to(b"c", Failed)
    assert failed.request == 7 and "was not read, since an interrupt" in failed.error["message"]
    assert not bench.core.sessions[b"c"].fetches.open and run.runs


def test_what_was_done_already_is_not_interrupted(bench):
    bench.give(b"w0", Done(bench.core.workers[b"w0"].runs))
    bench.give(b"c", Interrupt(0))
    assert not bench.sent
    bench.give(b"c", Fetch(7, 2))
    (key,) = bench.core.sessions[b"c"].fetches.by_key
    bench.give(b"w0", Done(bench.core.workers[b"w0"].runs, [], [key]), (bytes(64),))
    assert bench.to(b"c", Value)


def test_several_workers_skip_from_the_same_op_on(bench):
    """From the first that none of them has begun."""
    bench.give(b"c", Ops(1, [], [], [17, 2, 1, 3]))
    bench.give(b"c", Interrupt(1))
    assert bench.to(b"w0", Skip) == bench.to(b"w1", Skip) == [Skip(0, True)]
    bench.give(b"w1", Paused(0, 4))
    bench.give(b"w1", Paused(0, 9))  # once is enough
    bench.give(b"w0", Paused(0, 2))
    assert bench.to(b"w0", Skip) == bench.to(b"w1", Skip) == [Skip(0, True, 5)]


def test_a_worker_that_is_lost_is_not_waited_for(bench):
    bench.give(b"c", Ops(1, [], [], [17, 2, 1, 3]))
    bench.give(b"c", Interrupt(1))
    bench.give(b"w1", Paused(0, 4))
    bench.feed(PeerLost(b"w0", "it was killed", 0.0))
    assert Skip(0, True, 5) in bench.to(b"w1", Skip)


def test_a_replay_that_was_not_begun_is_dropped_whole_and_what_it_changes_keeps_its_value(bench):
    session = bench.core.sessions[b"c"]
    (upload,) = (tensor for tensor in session.table.rows.values() if tensor.id == 1)
    made = session.table.rows[2]
    row = session.journal.rows[-1]
    replay = Launched(100, row.known, row.origin, (), (upload.storage,), (made.storage,), [row, row, row], 1)
    session.journal.add(replay)
    session.drop({100})
    assert upload.storage.failed is None and made.storage.failed is not None and made.storage.unallocated


def test_a_tensor_whose_terms_were_not_added_up_fails(bench):
    """Its layout is known as it would be afterwards, so that its value would be wrong without a word."""
    session = bench.core.sessions[b"c"]
    storage = session.table.rows[1].storage
    storage.moved = 7
    session.drop({8})
    assert storage.failed is None
    session.drop({7, 8})
    assert storage.failed is not None and "interrupt" in str(storage.failed.error)


def test_a_lost_worker_ends_the_interrupt(bench):
    bench.give(b"c", Interrupt(0))
    bench.give(b"c", Ops(1, [], [], [16, 1, 0, 3]), (bytes(64),))
    assert bench.core.sessions[b"c"].inbox
    bench.feed(PeerLost(b"w0", "it was killed", 0.0))
    assert bench.core.sessions[b"c"].op_stream.interrupted < 0


def test_the_end_of_a_session_ends_its_interrupt(bench):
    bench.give(b"c", Interrupt(5))
    bench.feed(PeerLost(b"c", "it was killed", 0.0))
    assert bench.to(b"w0", Skip) == [Skip(0, True, NEVER), Skip(0, False)]


def test_a_tensor_that_was_not_placed_has_its_recipe_again(bench):
    """The ops of its recipe were done by the client's program before the interrupt."""
    session = bench.core.sessions[b"c"]
    tensor = session.table.rows[1]
    other = session.table.new(9, tensor.spec, tensor.layout)
    row = session.journal.rows[-1]
    step = RecipeStep(row.known, (), (), (0,), ("inline", b""))
    session.journal.add(Placed(100, row.known, row.origin, (), (), (other.storage,), [step], {9: 0}, True))
    session.drop({100})
    session.drop({100})  # the other worker's report
    assert other.layout is None and other.storage.recipe == [step] and other.storage.failed is None
    session.table.check()
    del session.table.rows[9]
