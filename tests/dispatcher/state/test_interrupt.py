"""An interrupt: the worker skips what it has not begun, what came later waits, and only what was skipped fails."""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace

import pytest

from gt.dispatcher.events import PeerLost
from gt.dispatcher.planning.op_stream import NEVER
from gt.dispatcher.state.failures import Cause, Launched, Placed, Planned
from gt.dispatcher.state.tensors import RecipeStep, Storage, Tensor
from gt.errors import OpFailed
from gt.ir.instr import DISCARD, FREE, RECORD
from gt.ir.layout import Layout, Mesh, Partial, R, Shard, replicated
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


def test_an_interrupt_lasts_until_the_run_of_a_question_is_through(bench):
    """It is of no batch. A worker that had not come to it took the next interrupt's place for this one's: it waited in the
    question's collective for another, which had skipped that.
    """
    (batch,) = bench.to(b"w0", Run)
    bench.give(b"c", Fetch(7, 2))
    (question,) = bench.to(b"w0", Run)
    asked = bench.core.sessions[b"c"].fetches.open[7].seq
    bench.give(b"c", Interrupt(0))
    for worker in (b"w0", b"w1"):
        bench.give(worker, Paused(0, asked - 1))
    bench.give(b"w0", Done(batch.seq))
    assert not any(not skip.on for skip in bench.to(b"w0", Skip))
    bench.give(b"w0", OpError(asked, "interrupted", "", {}, [asked]))
    bench.give(b"w0", Done(question.seq))
    assert bench.to(b"w0", Skip)[-1] == Skip(0, False)


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


def test_what_is_planned_once_others_were_dropped_keeps_what_it_would_have_changed(bench):
    """The rest of the client's batches comes after the workers' first reports."""
    session = bench.core.sessions[b"c"]
    upload, made = (session.table.rows[n].storage for n in (1, 2))
    row = session.journal.rows[-1]
    session.drop({row.seq})
    assert made.failed is not None
    session.journal.add(change := Planned(100, row.known, row.origin, (upload, made), (upload,), ()))
    session.failures.spread(change)
    assert upload.failed is made.failed
    session.drop({100})
    assert upload.failed is None


def test_what_a_dropped_op_would_have_healed_stays_failed(bench):
    session = bench.core.sessions[b"c"]
    upload, made = (session.table.rows[n].storage for n in (1, 2))
    row = session.journal.rows[-1]
    cause = made.failed = Cause(OpFailed("no"))
    session.failures.troubled = True
    fills = copy(row.known)
    fills.overwrites = True
    session.journal.add(fill := Planned(100, fills, row.origin, (upload, made), (made,), ()))
    session.failures.spread(fill)
    assert made.failed is None
    session.drop({100})
    assert made.failed is cause
    session.failures.spread(fill)
    made.failed = lost = Cause(OpFailed("lost"), lost=0)
    session.drop({100, 101})
    assert made.failed is lost


def test_a_tensor_whose_terms_were_not_added_up_fails(bench):
    """Its layout is known as it would be afterwards, so that its value would be wrong without a word."""
    session = bench.core.sessions[b"c"]
    storage = session.table.rows[1].storage
    storage.moved = 7
    session.drop({8})
    assert storage.failed is None
    session.drop({7, 8})
    assert storage.failed is not None and "interrupt" in str(storage.failed.error)


MESH = Mesh((("n", 2),), (0, 1))


@pytest.mark.parametrize("terms", [True, False])
def test_a_tensor_that_was_not_moved_stays_where_it_was(bench, terms):
    """Among the same workers: each has its old piece until the new one is there."""
    session = bench.core.sessions[b"c"]
    intern, redistributor = session.context.intern, session.op_stream._redistributor
    tensor = session.table.rows[1]
    have = tensor.layout = intern(Layout(MESH, (Partial("sum") if terms else Shard(0),)))
    session.outbox.begin_run()
    first = session.emitter.seq
    redistributor.relayout(tensor.storage, intern(Layout(MESH, (R,))))
    assert tensor.layout is not have and tensor.storage.moved == first
    session.emitter.end_op()
    redistributor.relayout(tensor.storage, intern(Layout(MESH, (Shard(0),))))
    second = tensor.storage.moved
    session.drop({second})
    assert tensor.layout.replicated and tensor.storage.failed is None
    session.drop({first, second})  # what one worker alone was to do, it reports alone
    assert tensor.layout is have and tensor.storage.failed is None and tensor.storage.moved < 0


def test_a_tensor_that_was_to_leave_its_worker_fails(bench):
    """That frees it, also if it skips the rest."""
    session = bench.core.sessions[b"c"]
    tensor = session.table.rows[1]
    session.outbox.begin_run()
    session.op_stream._redistributor.relayout(tensor.storage, session.context.intern(replicated(Mesh((), (1,)))))
    session.drop({tensor.storage.moved})
    assert tensor.layout.mesh.workers == (1,) and "interrupt" in str(tensor.storage.failed.error)


def test_care_ends_once_nothing_that_failed_is_left(bench):
    """Without care plans are looked up; while it lasts, every op is looked at."""
    session, (run,) = bench.core.sessions[b"c"], bench.to(b"w0", Run)
    bench.give(b"c", Interrupt(0))
    for worker in (b"w0", b"w1"):
        bench.give(worker, Paused(0, -1))
    neg = session.journal.rows[-1].seq
    bench.give(b"w0", OpError(neg, "interrupted", "", {}, [neg]))
    bench.give(b"w0", Done(run.seq))

    def care_after(batch: int, code: list[int]) -> bool:
        bench.give(b"c", Ops(batch, [], [], code))
        for sent in bench.to(b"w0", Run):
            bench.give(b"w0", Done(sent.seq))
        return session.failures.troubled

    assert session.table.rows[2].storage.failed is not None
    assert [care_after(n, [17, 1, 1, 2 + n]) for n in (1, 2, 3)] == [True] * 3
    care_after(4, [FREE, 1, 2])
    assert [care_after(n, [17, 1, 1, 2 + n]) for n in range(5, 15)][-1] is False


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


def test_an_answer_to_an_earlier_interrupt_is_none_to_the_next(bench):
    """Its workers had gone on since: each would skip from another op on."""
    (run,) = bench.to(b"w0", Run)
    bench.give(b"c", Interrupt(0))
    bench.give(b"w0", Done(run.seq))  # it was through when it was asked
    assert Skip(0, True, NEVER) in bench.to(b"w1", Skip)
    bench.give(b"c", Ops(1, [], [], [17, 1, 1, 3]))
    bench.give(b"c", Interrupt(1))
    for worker in (b"w0", b"w1"):
        bench.give(worker, Paused(0, 0))
        assert not bench.sent
    bench.give(b"w0", Paused(0, 7))
    bench.give(b"w1", Paused(0, -1))
    assert bench.to(b"w0", Skip) == bench.to(b"w1", Skip) == [Skip(0, True, 8)]


def test_the_loss_of_a_worker_that_the_session_has_not_used_ends_the_pause(bench):
    assert bench.core.sessions[b"c"].emitter.used == {0}
    bench.give(b"c", Interrupt(0))
    bench.give(b"w0", Paused(0, 1))
    bench.feed(PeerLost(b"w1", "it was killed", 0.0))
    assert bench.to(b"w0", Skip) == [Skip(0, True, 2)]


def test_an_error_that_is_told_after_the_drop_harms_and_heals_nothing_of_dropped_ops(bench):
    """Workers tell in any order: one that a failed op, another that it has skipped those behind it."""
    session = bench.core.sessions[b"c"]
    journal, row = session.journal, session.journal.rows[-1]
    weight, other = (session.table.rows[n].storage for n in (1, 2))
    fills = copy(row.known)
    fills.overwrites = True
    journal.add(Planned(100, row.known, row.origin, (other,), (other,), ()))
    journal.add(Planned(101, row.known, row.origin, (other, weight), (weight,), ()))
    journal.add(Planned(102, fills, row.origin, (other,), (other,), ()))
    session.drop({101, 102})
    session.failures.trouble(100, OpFailed("no"))
    assert weight.failed is None and str(other.failed.error) == "no"


def test_a_replay_that_was_not_begun_leaves_what_it_would_have_failed_or_healed(bench):
    session = bench.core.sessions[b"c"]
    weight, read = (session.table.rows[n].storage for n in (1, 2))
    result = session.table.new(9, session.table.rows[1].spec, session.table.rows[1].layout).storage
    read.failed = cause = Cause(OpFailed("no"))
    program = SimpleNamespace(failed=None, reads=[read], writes=[weight], makes=[result])
    assert not session.programs._launcher.doomed(program, 100)
    assert weight.failed is result.failed is cause
    session.drop({100})
    assert weight.failed is None and result.failed is None
    program.reads, result.failed = [weight], cause
    assert not session.programs._launcher.doomed(program, 101) and result.failed is None
    session.drop({101})
    assert result.failed is cause
    del session.table.rows[9]


def test_a_recording_that_begins_within_an_interrupt_is_not_held_back(bench):
    """It would end behind the interrupt, which would wait for it."""
    bench.give(b"c", Interrupt(2))
    bench.give(b"c", Ops(1, [], [], [RECORD, 1, 1, 0]))
    session = bench.core.sessions[b"c"]
    assert session.context.tape is not None and session.outbox.deferred is None
    bench.give(b"c", Ops(2, [], [], [DISCARD]))


def test_a_call_that_was_held_back_is_not_dropped(bench):
    """It is one instruction under the number of its first op: the others would seem to have been executed."""
    session = bench.core.sessions[b"c"]
    bench.give(b"c", Ops(1, [], [], [RECORD, 1, 1, 0, 17, 1, 1, 3, 17, 1, 3, 4, DISCARD]))
    bench.give(b"c", Interrupt(1))
    for worker in (b"w0", b"w1"):
        bench.give(worker, Paused(0, -1))
    (skip,) = bench.to(b"w0", Skip)
    assert skip.since > max(row.seq for row in session.journal.rows)


def test_sums_of_rows_that_were_kept_are_freed(bench):
    session = bench.core.sessions[b"c"]
    tensor = session.table.rows[1]
    sums = Tensor(session.emitter.temporary(), tensor.spec, Storage(), tensor.layout)
    sums.copies = {tensor.layout: (0, 77)}
    tensor.sums = 0, sums
    session.drop({100})
    assert tensor.sums is None
    assert session.op_stream.stale == [(tensor.layout.mesh.workers, 77), (tensor.layout.mesh.workers, sums.id)]


def test_what_is_not_placed_is_not_ahead_of_what_is(bench):
    """An op in place on a tensor that is a recipe costs no instruction, so that no worker drops it."""
    fill = [18, TEMPLATES[14]]
    bench.give(b"c", Ops(1, [fill], [[3, "m.py", 5, "", False, -1]], [16, 1, 0, 3, 18, 3, 3, 1.0]), (bytes(64),))
    session = bench.core.sessions[b"c"]
    storage = session.table.rows[3].storage
    assert [step.known.name for step in storage.recipe] == ["gt.upload", "fill_"]
    bench.give(b"c", Interrupt(2))
    bench.give(b"c", Ops(2, [], [], [17, 1, 1, 4, 18, 3, 3, 2.0, 16, 1, 0, 5, 18, 3, 5, 2.0]), (bytes(64),))
    neg = session.journal.rows[-1].seq
    bench.give(b"w0", OpError(neg, "interrupted", "", {}, [neg]))
    bench.give(b"w0", Done(bench.core.workers[b"w0"].runs))
    assert session.op_stream.interrupted < 0
    assert [step.values for step in storage.recipe if step.known.name == "fill_"] == [(1.0,)]
    newer = session.table.rows[5].storage  # what the program has made since has the value that the program gave it
    assert [step.known.name for step in newer.recipe] == ["gt.upload", "fill_"]


def test_a_question_between_two_interrupts_is_answered(bench):
    """It waits behind the first one; what the second drops comes behind the question."""
    bench.give(b"c", Interrupt(0))
    bench.give(b"c", Fetch(7, 1))
    bench.give(b"c", Ops(1, [], [], [17, 1, 1, 3]))
    bench.give(b"c", Interrupt(1))
    session = bench.core.sessions[b"c"]
    asked = session.fetches.open[7].seq
    assert not session.inbox
    last = bench.core.workers[b"w0"].runs
    dropped = [asked, session.journal.rows[-1].seq]
    bench.give(b"w0", OpError(asked, "interrupted", "", {}, dropped))
    assert bench.to(b"c", Failed)[0].request == 7
    bench.give(b"w0", Done(last))
    assert session.op_stream.interrupted < 0


def test_a_value_that_failed_is_failed_though_a_later_op_would_have_failed_it_too(bench):
    """The later op is dropped; it was planned, and so marked, before the earlier one's error was told."""
    session = bench.core.sessions[b"c"]
    row = session.journal.rows[-1]
    value, gone = (session.table.rows[n].storage for n in (1, 2))
    session.journal.add(Planned(100, row.known, row.origin, (value,), (value,), ()))
    session.journal.add(between := Planned(101, row.known, row.origin, (value,), (), ()))
    session.drop({row.seq})
    session.journal.add(later := Planned(102, row.known, row.origin, (value, gone), (value,), ()))
    session.failures.spread(later)
    between.writes = (other := session.table.new(9, session.table.rows[1].spec, session.table.rows[1].layout).storage,)
    session.failures.trouble(100, OpFailed("no"))
    assert other.failed is not None  # though the value is failed for another cause by now
    session.drop({102})
    assert value.failed is not None
    del session.table.rows[9]


def test_what_was_dropped_is_failed_though_a_later_op_that_failed_it_was_dropped_too(bench):
    session = bench.core.sessions[b"c"]
    row = session.journal.rows[-1]
    upload, made = (session.table.rows[n].storage for n in (1, 2))
    upload.failed, session.failures.troubled = Cause(OpFailed("no")), True
    session.journal.add(change := Planned(100, row.known, row.origin, (made, upload), (made,), ()))
    session.failures.spread(change)
    assert made.failed is upload.failed
    session.drop({row.seq})
    session.drop({100})
    assert made.failed is not None and "was not begun" in str(made.failed.error)


def test_a_view_that_was_dropped_is_made_once_the_interrupt_is_over(bench):
    """Else what is written through it, or through its base, would be of two tensors."""
    bench.give(b"c", Ops(1, [[21, TEMPLATES[8]]], [], [21, 1, 1, 3]))
    session = bench.core.sessions[b"c"]
    for batch in (1, 2):  # the next interrupt drops it again
        bench.give(b"c", Interrupt(batch))
        dropped = [row.seq for row in session.journal.rows][-batch:]
        bench.give(b"w0", OpError(dropped[0], "interrupted", "", {}, dropped))
        bench.give(b"w0", Done(bench.core.workers[b"w0"].runs))
        (run,) = bench.to(b"w0", Run)
        assert run.code[-2:] == [1, 3] and session.table.rows[3].storage.failed is None
        bench.give(b"c", Ops(batch + 1, [], [], [17, 1, 3, 3 + batch]))


def test_views_of_what_is_lost_are_not_made(bench):
    session = bench.core.sessions[b"c"]
    storage = session.table.rows[1].storage
    storage.failed = Cause(OpFailed("lost"), lost=0)
    before = session.emitter.sent
    session.redistributor.make_views(storage)
    assert session.emitter.sent == before
