"""A batch that ends in a question: its ops and the fetch are one Run, its value and the acknowledgement are one message."""

from __future__ import annotations

import pytest

from gt.dispatcher.state.fetches import MAX_REQUESTS
from gt.wire.messages import Ack, Data, Done, Failed, Fetch, OpError, Ops, Piece, Run, UploadChunk, UploadRequest, Value
from tests.helpers.core_bench import CoreBench
from tests.helpers.hostile import TEMPLATES

SHAPE = [4, 4]
BOTH = [[16, TEMPLATES[0]], [17, TEMPLATES[3]]]  # an upload, a neg
CODE = [16, 0, 0, 1, 17, 0, 1, 2]


@pytest.fixture
def bench() -> CoreBench:
    return CoreBench("")


def runs(bench: CoreBench) -> list[Run]:
    return bench.to(b"w0", Run) + bench.to(b"w1", Run)


def test_a_batch_and_its_fetch_are_one_run(bench):
    bench.give(b"c", Ops(0, BOTH, [], CODE, [7, 2, -1]), (bytes(64),))
    (run,) = runs(bench)
    assert [define[1] for define in run.defines] == ["upload", "op", "fetch"]
    (key,) = bench.core.sessions[b"c"].fetches.by_key
    bench.give(b"w0", Done(run.seq, [], [key]), (bytes(64),))
    assert bench.sent == [(b"c", Value(7, SHAPE, "float32", [[key, [[[0, 4], [0, 4]]]]], 0))]
    assert not bench.core.sessions[b"c"].op_stream.pending and not bench.core.sessions[b"c"].fetches.open


def test_errors_of_the_batch_come_before_the_value(bench):
    bench.give(b"c", Ops(0, BOTH, [[1, "m.py", 3, "", False, -1]], [16, 0, 0, 1, 17, 1, 1, 2], [7, 2, -1]), (bytes(64),))
    (run,) = runs(bench)
    (key,) = bench.core.sessions[b"c"].fetches.by_key
    neg = next(row.seq for row in bench.core.sessions[b"c"].journal.rows if row.known.template.op == "aten.neg.default")
    bench.give(b"w0", OpError(neg, "op", "it fails"))
    bench.give(b"w0", Done(run.seq, [], [key]), (bytes(64),))
    assert not bench.to(b"c", Value)
    (failed,) = bench.to(b"c", Failed)
    assert failed.request == 7 and "m.py:3" in failed.error["message"] and bench.to(b"c", Ack) == [Ack(0)]


def test_a_fetch_that_is_refused_takes_no_op_with_it(bench):
    bench.give(b"c", Ops(0, BOTH, [[1, "m.py", 3, "", False, -1]], [16, 0, 0, 1, 17, 1, 1, 2]), (bytes(64),))
    neg = bench.core.sessions[b"c"].journal.rows[-1].seq
    bench.give(b"w0", OpError(neg, "op", "it fails"))
    bench.give(b"c", Ops(1, [], [], [17, 0, 1, 3], [7, 2, -1]))
    assert [failed.request for failed in bench.to(b"c", Failed)] == [7]
    (run,) = runs(bench)
    bench.give(b"w0", Done(run.seq))
    assert bench.to(b"c", Ack) == [Ack(1)]


def test_a_batch_that_waits_for_an_upload_keeps_its_fetch_behind_it(bench):
    bench.give(b"c", Ops(0, BOTH, [], [16, 0, -1, 1, 17, 0, 1, 2], [7, 2, -1]))
    (need,) = bench.to(b"c", UploadRequest)
    assert not runs(bench)
    bench.give(b"c", Ops(1, [], [], [17, 0, 2, 3], [8, 3, -1]))
    assert not runs(bench)
    bench.give(b"c", UploadChunk(need.key, 0, 64), (bytes(64),))
    assert bench.to(b"w0", Data) and runs(bench)
    session = bench.core.sessions[b"c"]
    assert sorted(session.fetches.open) == [7, 8] and not session.inbox
    keys = list(session.fetches.by_key)
    bench.give(b"w0", Done(runs(bench)[-1].seq, [], keys), (bytes(64), bytes(64)))
    assert [(m.request, m.acked) for m in bench.to(b"c", Value)] == [(7, 1), (8, -1)]


def test_two_sessions_share_a_worker_and_each_gets_its_value(bench):
    bench.client(b"d", "")
    for peer in (b"c", b"d"):
        bench.give(peer, Ops(0, BOTH, [], CODE, [7, 2, -1]), (bytes(64),))
    for peer in (b"c", b"d"):
        (key,) = bench.core.sessions[peer].fetches.by_key
        bench.give(b"w0", Piece(key, 0, 64), (bytes(64),))
    bench.give(b"w0", Done(bench.core.workers[b"w0"].runs))
    assert [(p, m.acked) for p, m in bench.sent if isinstance(m, Value)] == [(b"c", 0), (b"d", 0)]


@pytest.mark.parametrize("fetch", [[1], [1, 2, 0.5], [True, 2, -1], [1, 2, -1, 4]])
def test_a_fetch_of_another_form_is_refused(bench, fetch):
    assert "Ops.fetch is" in bench.refusal(b"c", Ops(0, BOTH, [], CODE, fetch), (bytes(64),))


def test_requests_are_bounded(bench):
    bench.give(b"c", Ops(0, BOTH, [], CODE), (bytes(64),))
    for n in range(MAX_REQUESTS):
        bench.give(b"c", Fetch(n, 1))
    assert "requests are open" in bench.refusal(b"c", Ops(1, [], [], [17, 0, 1, 3], [MAX_REQUESTS, 3, -1]))


def test_pieces_without_their_frames_are_the_workers_lie(bench):
    bench.give(b"c", Ops(0, BOTH, [], CODE, [7, 2, -1]), (bytes(64),))
    (run,) = runs(bench)
    bench.give(b"w0", Done(run.seq, [], [1, 2]), (bytes(64),))
    assert b"w0" in bench.closed and b"c" in bench.core.sessions
