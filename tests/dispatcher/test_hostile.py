"""Liars, and what they may not do: each is refused by name, and the honest program beside them keeps its values."""

from __future__ import annotations

import itertools
import logging
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gt.client.session import Session
from gt.dispatcher.core import MAX_LOGGED_REFUSALS
from gt.dispatcher.events import Malformed, PeerLost, Received, Tick
from gt.dispatcher.server import Server
from gt.dispatcher.state.fetches import MAX_REQUESTS
from gt.dispatcher.state.op_queue import QueuedBatch
from gt.dispatcher.state.uploads import WINDOW_BYTES
from gt.dispatcher.state.validate import CREDIT
from gt.errors import DispatcherLost, UnsupportedOp
from gt.ir import check
from gt.ir.instr import COMPILED_LATER, DISCARD, FREE, PARAM, RECORD
from gt.ir.spec import Spec
from gt.wire.link import MAY_SEND, hello
from gt.wire.messages import (
    CHUNK,
    MAX_OTHERS,
    Data,
    Describe,
    Done,
    Exit,
    Failed,
    Fetch,
    Goodbye,
    Inspect,
    Notice,
    OpError,
    Ops,
    Piece,
    PrepareCompilation,
    Report,
    Run,
    Stats,
    UploadChunk,
    UploadProgress,
    UploadRequest,
    Value,
    Welcome,
    WindowUpdate,
)
from gt.wire.router import Gone
from gt.worker.uploads import UploadBuffers
from tests.helpers.core_bench import CoreBench
from tests.helpers.hostile import TEMPLATES, mutated, rounds, row, spec
from tests.helpers.toy_core import ToyCore
from tests.stress import fuzz

UPLOAD, NEG = TEMPLATES[0], TEMPLATES[3]


def nested(depth: int) -> list:
    return [nested(depth - 1)] if depth else []


@pytest.fixture
def bench() -> CoreBench:
    return CoreBench()


# ---- many at once


@pytest.mark.parametrize("seed", [1, 2])
def test_thousands_of_lies_harm_nobody(seed):
    field = rounds(seed, 4000)
    assert field.refused > 500 and field.slowest < 2
    assert field.internal < 20  # what nobody thought of is refused too, but is rare


def test_every_message_and_code_is_said_as_a_peer_would_say_it():
    """Liars who are put out for all that they say of a kind test nothing behind its first check."""
    codes = ("FREE", "PARAM", "SHARDED", "STATE", "GRAD", "FRAGMENT", "DISCARD", "LAUNCH", "DROP")
    want = {("client", code) for code in (*codes, *(f"RECORD {way}" for way in range(COMPILED_LATER + 1)))}
    want |= {(role, cls.__name__) for role, (said, _) in MAY_SEND.items() for cls in said}
    for seed in range(20):
        want -= rounds(seed, 1000).taken.keys()
        if not want:
            return
    raise AssertionError(f"never said, or never taken: {sorted(want)}")


@given(st.integers(0, 1 << 32))
@settings(max_examples=10, deadline=None)
def test_lies_from_any_seed_harm_nobody(seed):
    rounds(seed, 150)


def test_bytes_of_any_kind_are_a_message_or_refused():
    found = fuzz.fuzz_codec(1, 30_000)
    assert found["refused"] > 10_000


def test_a_program_runs_on_beside_raw_bytes_and_broken_links(caplog):
    caplog.set_level(logging.CRITICAL, "gt")
    found = fuzz.fuzz_sockets(1, 1500)
    assert found["values_compared"] >= 50


@given(st.integers(0, 1 << 32))
@settings(max_examples=200, deadline=None)
def test_a_mutated_template_is_one_or_a_value_error(seed):
    rng = fuzz.random.Random(seed)
    form = mutated(rng, rng.choice(TEMPLATES))
    try:
        made = check.template(form)
    except (ValueError, TypeError, KeyError, UnsupportedOp):
        return
    assert check.template(made.wire()).wire() == made.wire()


# ---- one by one


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (Ops(5, [], [], []), "Ops.seq is 5, want 0"),
        (Ops(0, [[3, NEG]], [], []), "numbers from 16"),
        (Ops(0, [[16, "x"]], [], []), "Ops.templates: template 16: 'x' is not a template"),
        (Ops(0, [[16, 0.5]], [], []), "Ops.templates: template 16: 0.5 is not a template"),
        (Ops(0, [[16, row("aten.neg.default", nested(30), [], [])]], [], []), "Ops.templates is nested more than 24 deep"),
        (Ops(0, [[16, row("os.system.default", [], [], [])]], [], []), "os.system.default is not an op of the table"),
        (Ops(0, [[16, [*NEG[:3], [[[1 << 62, 4], [4, 1], 0, "float32"]], *NEG[4:]]]], [], []), "more than any memory holds"),
        (Ops(0, [[16, row("aten.neg.default", [{"t": 4}], [spec(2)], [spec(2)])]], [], []), "tensor 4 of 1"),
        (Ops(0, [[16, row("aten.neg.default", [], [], [("view", spec(2), 9)])]], [], []), "view of operand 9, want one"),
        (Ops(0, [[16, row("aten.t.default", [{"t": 0}], [spec(2)] * 2, [("view", spec(2), 0)])]], [], []), "with 2 operands"),
        (Ops(0, [], [[1, "f", "1", "", False]], []), "Ops.origins"),
        (Ops(0, [], [[1, "f", 1, "g" * 5000, False]], []), "Ops.origins"),
        (Ops(0, [], [], [FREE, -2]), "Ops.code frees -2 tensors"),
        (Ops(0, [], [], [FREE, 1 << 40, 1]), "Ops.code frees"),
        (Ops(0, [], [], [7, 7]), "want a template or a control code"),
        (Ops(0, [], [], [1, 99]), "tensor %99 is not of this session"),
        (Ops(0, [[16, NEG]], [], [16, 0, 1, 2]), "names an id that this session does not have"),
        (Ops(0, [[16, UPLOAD]], [], [16, 0]), "ends within an op"),
        (Ops(0, [[16, UPLOAD]], [], [16, 0, 0, 1]), "uploads frame 0 of 0"),
        (Ops(0, [[16, UPLOAD]], [], [16, 0, -1, 1 << 41]), "as the id of a new tensor"),
        (Ops(0, [[16, UPLOAD]], [], [16, 0, -1, 1, 16, 0, -1, 1]), "as the id of a new tensor"),
    ],
)
def test_a_batch_that_is_none_names_its_field(bench, batch, says):
    assert says in bench.refusal(b"c", batch)


def test_batches_replayed_or_out_of_order_end_the_session(bench):
    bench.give(b"c", Ops(0, [[16, UPLOAD]], [], []))
    assert "Ops.seq is 0, want 1" in bench.refusal(b"c", Ops(0, [[16, UPLOAD]], [], []))
    bench.client(b"d")
    assert "Ops.seq is 1, want 0" in bench.refusal(b"d", Ops(1, [], [], []))


def test_another_sessions_tensors_cannot_be_named(bench):
    bench.client(b"d")
    bench.give(b"c", Ops(0, [[16, UPLOAD], [17, NEG]], [], [16, 0, 0, 1, 17, 0, 1, 2]), (bytes(64),))
    for base in (0, 1 << 40):
        for question in (Fetch(1, 2 + base), Inspect(1, 2 + base), Describe(1, [2 + base])):
            assert "is not of this session" in bench.refusal(b"d", question)
            bench.client(b"d")


def test_half_a_batch_reaches_no_worker_and_a_whole_one_afterwards_does(bench):
    good = [[16, UPLOAD], [17, NEG]]
    bench.client(b"d")
    bench.refusal(b"c", Ops(0, good, [], [16, 0, 0, 1, 17, 0, 1, 2, 99, 0]), (bytes(64),))
    assert not [m for _, m in bench.sent if isinstance(m, Run) and m.defines]
    keys = {m.key for m in bench.to(b"w0", Data)}
    assert [m.total for m in bench.to(b"w0", Data)] == [64, -1] and len(keys) == 1  # and what was sent for it is called off
    bench.give(b"d", Ops(0, good, [], [16, 0, 0, 1, 17, 0, 1, 2]), (bytes(64),))
    (run,) = bench.to(b"w0", Run)
    assert {define[1] for define in run.defines} == {"upload", "op"}


def test_a_fault_of_ours_ends_one_session_and_leaves_no_half_batch(bench, monkeypatch):
    bench.client(b"d")
    session = bench.core.sessions[b"c"]
    monkeypatch.setattr(session.planner, "_after", lambda *_: 1 / 0)
    batch = Ops(0, [[16, UPLOAD], [17, NEG]], [], [16, 0, 0, 1, 17, 0, 1, 2])
    assert "internal error of the server: ZeroDivisionError" in bench.refusal(b"c", batch, (bytes(64),))
    assert not any(run.defines for run in bench.to(b"w0", Run))
    bench.give(b"d", batch, (bytes(64),))
    assert bench.to(b"w0", Run)


def test_the_end_of_one_session_survives_a_fault_in_it(bench, monkeypatch):
    bench.client(b"d")
    monkeypatch.setattr(bench.core.sessions[b"c"], "lose", lambda worker: 1 / 0)
    bench.feed(PeerLost(b"w1", "killed"))
    assert set(bench.core.sessions) == {b"d"}


def test_credit_is_kept_by_the_server_too(bench):
    for n in range(CREDIT):
        templates = [[16, UPLOAD], [17, NEG]] if n == 0 else []
        bench.give(b"c", Ops(n, templates, [], [16, 0, 0, 2 * n + 1, 17, 0, 2 * n + 1, 2 * n + 2]), (bytes(64),))
    assert "beyond the credit of 64 batches" in bench.refusal(b"c", Ops(CREDIT, [], [], []))


def test_requests_under_way_are_bounded(bench):
    bench.give(b"c", Ops(0, [[16, UPLOAD]], [], [16, 0, 0, 1]), (bytes(64),))
    for n in range(MAX_REQUESTS):
        bench.give(b"c", Fetch(n, 1))
    assert "more than 256 requests are open" in bench.refusal(b"c", Fetch(MAX_REQUESTS, 1))
    bench.client(b"d")
    for n in range(MAX_REQUESTS):
        bench.give(b"d", Stats(n))
    assert "one of more than 256" in bench.refusal(b"d", Stats(MAX_REQUESTS))


# ---- claims of length


def asked(bench: CoreBench, rows: int = 1 << 20) -> UploadRequest:
    """The request to a client for a host copy of [rows, 4] floats that an op uses."""
    form, neg = (
        row("gt.upload.default", [], [], [spec(rows, 4)], 1),
        row("aten.neg.default", [{"t": 0}], [spec(rows, 4)], [spec(rows, 4)]),
    )
    bench.give(b"c", Ops(0, [[16, form], [17, neg]], [], [16, 0, -1, 1, 17, 0, 1, 2]))
    (need,) = bench.to(b"c", UploadRequest)
    return need


@pytest.mark.parametrize(
    ("offset", "total", "size", "says"),
    [
        (0, 10 << 30, 64, "UploadChunk.total is 10737418240, the region has 16777216 bytes"),
        (0, -1, 64, "UploadChunk.total is -1"),
        (64, 16 << 20, 64, "UploadChunk.offset is 64 with 64 bytes, want 0"),
        (0, 16 << 20, 0, "UploadChunk.offset is 0 with 0 bytes"),
    ],
)
def test_a_host_copy_is_what_was_asked_for(bench, offset, total, size, says):
    need = asked(bench)
    assert says in bench.refusal(b"c", UploadChunk(need.key, offset, total), (bytes(size),) if size else ())


def test_host_frames_beyond_the_window_are_refused(bench):
    need = asked(bench)
    for n in range(need.upto // CHUNK):
        bench.give(b"c", UploadChunk(need.key, n * CHUNK, 16 << 20), (bytes(CHUNK),))
    assert f"up to {WINDOW_BYTES} at most" in bench.refusal(b"c", UploadChunk(need.key, need.upto, 16 << 20), (bytes(CHUNK),))


def test_an_absurd_upload_allocates_nothing(bench):
    need = asked(bench, 1 << 57)
    assert need.upto == WINDOW_BYTES
    bench.give(b"c", UploadChunk(need.key, 0, 1 << 61), (bytes(CHUNK),))
    uploads = UploadBuffers()
    for message in bench.to(b"w0", Data):
        uploads.receive(message, memoryview(bytes(CHUNK)))  # no room: that upload fails, not the worker
    with pytest.raises(Exception, match="no room for an upload of 2305843009213693952 bytes"):
        uploads.take(need.key, 0)


def test_frames_are_bounded_in_number_and_size():
    from gt.errors import ProtocolError
    from gt.wire.link import Gate

    gate = Gate()
    gate.admit(hello("client"))
    with pytest.raises(ProtocolError, match="UploadChunk came with 2 frames, it has at most 1"):
        gate.admit(UploadChunk(1, 0, 5), 2)
    with pytest.raises(ProtocolError, match="a frame of 2000000 bytes"):
        gate.admit(UploadChunk(1, 0, 5), 1, 2_000_000)


@pytest.mark.parametrize("wire", [
    [[1 << 63], [1], 0, "float32"], [[-1], [1], 0, "float32"], [[1.5], [1], 0, "float32"], [[2], [True], 0, "float32"],
    [[2], [1], -1, "float32"], [[2], [1], 0, "object"], [[2], [1, 1], 0, "float32"], [[1] * 65, [1] * 65, 0, "float32"],
    [[1 << 61, 1 << 61], [1, 1], 0, "float32"], ["ab", "ab", 0, "float32"], [[2], [1], 0, ["float32"]],
])  # fmt: skip
def test_no_tensor_has_such_a_spec(wire):
    with pytest.raises(ValueError, match=r"shape|dtype|bytes"):
        Spec.from_wire(wire)


# ---- workers that lie


def fetching(bench: CoreBench) -> int:
    """The key under which w0 is asked for a value of 64 bytes."""
    bench.give(b"c", Ops(0, [[16, UPLOAD], [17, NEG]], [], [16, 0, 0, 1, 17, 0, 1, 2]), (bytes(64),))
    bench.give(b"c", Fetch(7, 2))
    (key,) = bench.core.sessions[b"c"].fetches.by_key
    return key


@pytest.mark.parametrize(
    ("peer", "message", "frames", "says"),
    [
        (b"w1", Piece(0, 0, 64), (bytes(64),), "belongs to another worker's piece"),
        (b"w0", Piece(0, 8, 64), (bytes(8),), "Piece.offset is 8"),
        (b"w0", Piece(0, 0, 64), (bytes(65),), "Piece.offset is 0 with 65 bytes of 64"),
        (b"w0", Done(99), (), "Done.seq is 99"),
        (b"w0", Fetch(1, 1), (), "has not been welcomed"),
    ],
)
def test_a_worker_that_lies_is_lost_and_says_why(bench, peer, message, frames, says):
    key = fetching(bench)
    if isinstance(message, Piece):
        message = Piece(key, message.offset, message.total)
    bench.give(peer, message, frames)
    (exit_,) = bench.to(peer, Exit)
    assert says in exit_.reason and peer in bench.closed
    failed = [m.error for m in bench.to(b"c", Failed)]
    assert peer == b"w1" or (failed[0]["kind"] == "WorkerLost" and says in failed[0]["message"])
    assert b"c" in bench.core.sessions


def test_a_piece_of_another_size_is_the_clients_lie(bench):
    key = fetching(bench)
    bench.give(b"w0", Piece(key, 0, 10 << 30), (bytes(64),))
    (failed,) = bench.to(b"c", Failed)
    assert "%2 was declared as f32[4,4] by the client" in failed.error["message"]
    assert b"w0" in bench.core.workers and b"c" in bench.core.sessions


def test_what_a_worker_took_is_what_it_was_sent(bench):
    need = asked(bench)
    bench.give(b"w0", UploadProgress(need.key, 5))
    assert "UploadProgress.upto is 5" in bench.to(b"w0", Exit)[0].reason


@pytest.mark.parametrize("kind", ["op", "missing", "peer", "interrupted"])
def test_a_worker_fails_no_op_of_a_session_that_sent_it_nothing(bench, kind):
    fetching(bench)
    journal = bench.core.sessions[b"c"].journal
    numbers = [row.seq for row in journal.rows]
    assert len(numbers) > 1
    bench.give(b"w1", OpError(numbers[0], kind, "so it says", {}, numbers))
    assert not bench.to(b"c", Failed) and not bench.core.sessions[b"c"].failures.troubled
    assert [row.seq for row in journal.rows] == numbers and b"w1" in bench.core.workers


@pytest.mark.parametrize(("more", "says"), [([1 << 40], "the number 1099511627776"), ([0] * (MAX_OTHERS + 1), "4097 others")])
@pytest.mark.parametrize("kind", ["op", "interrupted"])
def test_a_worker_says_of_ops_that_were_issued_that_they_failed(bench, kind, more, says):
    """Else the server would keep such numbers, and take them for failed once they are issued."""
    fetching(bench)
    bench.give(b"w0", OpError(0, kind, "so it says", {}, more))
    (exit_,) = bench.to(b"w0", Exit)
    assert says in exit_.reason and not bench.core.sessions[b"c"].failures._failed_ops


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"name": "w0"}, "a worker named 'w0' is here already"),
        ({"heap_bytes": 1 << 62}, "heap_bytes"),
        ({"heap_bytes": "8"}, "Hello.info.heap_bytes is '8'"),
        ({"pid": 2.5}, "Hello.info.pid"),
        ({"name": "a\nb"}, "name"),
        ({"evil": 1}, "Hello.info.evil"),
    ],
)
def test_a_worker_says_who_it_is(bench, info, says):
    assert says in bench.refusal(b"x", hello("worker", info=info))


@pytest.mark.parametrize(
    ("switches", "config", "says"),
    [
        ({"threads": 1 << 50}, "", "Hello.switches.threads"),
        ({"workers": "2"}, "", "Hello.switches.workers"),
        ({"evil": 1}, "", "Hello.switches.evil"),
        ({}, "a: " + "[" * 3000, "nested too deep: more than 16 lists and mappings"),
        ({}, '["]",' * 6000, "nested too deep: more than 16 lists and mappings"),
        ({}, "- " * 5000, "nested too deep"),
        ({}, "#" * 40_000, "40000 characters"),
    ],
)
def test_a_client_says_what_it_wants(bench, switches, config, says):
    start = time.thread_time()
    assert says in bench.refusal(b"x", hello("client", config=config, switches=switches))
    assert time.thread_time() - start < 1


def test_hello_comes_once(bench):
    assert "Hello came twice" in bench.refusal(b"c", hello("client"))


def test_refusals_are_logged_so_many_a_second(bench, caplog):
    with caplog.at_level(logging.WARNING, "gt.dispatcher"):
        for n in range(1000):
            bench.feed(Malformed(b"x%d" % n, "garbage", 5.0))
        assert len(caplog.records) == MAX_LOGGED_REFUSALS
        bench.feed(Malformed(b"y", "garbage", 6.5))
    assert f"{1000 - MAX_LOGGED_REFUSALS} more of the last second's refusals" in caplog.text


# ---- bounded on the way to workers


def test_what_a_batch_makes_is_cut_to_fit_bodies(bench):
    """Many small tensors, each id nine bytes on the wire to a worker."""
    count = 60_000
    session = bench.core.sessions[b"c"]
    code = itertools.chain.from_iterable((17, 0, 1, n) for n in range(2, count))
    bench.give(b"c", Ops(0, [[16, UPLOAD], [17, NEG]], [], [16, 0, 0, 1, *code]), (bytes(64),))
    runs = bench.to(b"w0", Run)
    assert len(runs) > 1 and max(len(run.code) for run in runs) < 140_000
    assert [run.seq for run in runs] == list(range(1, len(runs) + 1))
    assert session.op_stream.pending[0].runs == {0: len(runs)}
    bench.feed(PeerLost(b"c", "gone"))
    assert max(len(run.code) for run in bench.to(b"w0", Run)) < 140_000


def test_a_message_that_fits_no_body_ends_its_receiver_not_the_server():
    core = ToyCore()
    answers = core.answers
    core.answers = lambda *a: (
        [(Report(a[1].request, {"long": "x" * (17 << 20)}),)] if isinstance(a[1], Inspect) else answers(*a)
    )
    server = Server(core=core)
    thread = threading.Thread(target=server.run, name="gt-test-server")
    thread.start()
    try:
        first, second = Session(server.address), Session(server.address)
        with pytest.raises(DispatcherLost, match=r"Report has .* bytes, at most 16777216 fit a body"):
            first.inspect(1)
        assert second.fetch(1)[1] == "float64"
        first.close()
        second.close()
    finally:
        server.stop()
        thread.join()


def test_another_thread_may_ask_for_the_workers_while_one_goes(monkeypatch):
    """`gt.ray` asks, and failed for a worker that had lost its name and was counted still."""
    server, asked = Server(core=ToyCore()), []
    server._workers, server._names = {b"w0", b"w1"}, {b"w0": "first", b"w1": "second"}
    monkeypatch.setattr(server, "_forget", lambda peer: asked.append(server.worker_names))
    try:
        server._handle_item(Gone(b"w0", "its process has ended"))
        assert asked == [["second"]]
    finally:
        server.stop()
        server.run()


def test_ends_and_ticks_of_nobody_are_nothing(bench):
    for event in (PeerLost(b"nobody", "gone"), Tick(1.0), Received(b"nobody", Goodbye())):
        bench.feed(event)
    for message in (Report(3, {}), WindowUpdate(1, 2), Value(1, [], "x", []), Welcome(0, "", [], [], 1)):
        assert bench.refusal(b"nobody", message)
    assert np.all([b"w0" in bench.core.workers, b"c" in bench.core.sessions])


def test_the_number_of_a_template_is_none_while_a_batch_waits(bench):
    """A batch that waits for what follows has the next one's numbers looked at before they are checked."""
    bench.core.sessions[b"c"].op_stream.coming.append(QueuedBatch(0, [FREE, 0], ()))
    assert "Ops.templates: [[], [" in bench.refusal(b"c", Ops(0, [[[], NEG]], [], []))


def test_a_table_of_templates_that_begins_again_leaves_none_of_the_last_behind(bench):
    """All templates of a session have a bound, which a client passed that began with number 16 again and again."""
    templates = bench.core.sessions[b"c"].context.templates
    for turn in range(5):
        numbers = [16, *range(17 + 50 * turn, 67 + 50 * turn)]
        bench.give(b"c", Ops(turn, [[number, UPLOAD if number == 16 else NEG] for number in numbers], [], []))
        assert sorted(templates) == numbers
    bench.give(b"c", Ops(5, [], [], [16, 0, 0, 1, 217, 0, 1, 2]), (bytes(64),))
    assert "names an id that this session does not have" in bench.refusal(b"c", Ops(6, [], [], [17, 0, 1, 3]))


def test_few_unknown_groups_get_a_near_name():
    names = [f"{n:03}{'x' * 50}" for n in range(200)]
    bench = CoreBench("".join(f"{name}: {{workers: [0]}}\n" for name in names[:64]))
    bench.give(b"c", Ops(0, [], [[n + 1, "f.py", 1, name + "y", False, -1] for n, name in enumerate(names[:100])], []))
    near = [m.text for m in bench.to(b"c", Notice) if "did you mean" in m.text]
    assert 0 < len(near) <= 4 < len(bench.to(b"c", Notice))


def test_a_recording_has_no_numbers_of_ops_that_another_session_used(bench):
    """An input is placed as its recording begins, under numbers of its own: a failure is told to one session."""
    upload, data = row("gt.upload.default", [], [], [spec(4, 4)], 1), (bytes(64),)
    begin = [17, 1, 1, 2, RECORD, 1, 0, 1, 1]  # a first use places tensor 1; the recording takes it
    bench.client(b"d")
    origins = [[1, "f", 1, "", False, -1]]
    bench.give(b"c", Ops(0, [[16, upload], [17, NEG]], origins, [16, 1, 0, 1, *begin, DISCARD]), data)
    bench.give(b"d", Ops(0, [[16, upload], [17, NEG]], origins, [16, 1, 0, 1, 17, 1, 1, 2, 17, 1, 2, 3]), data)
    bench.give(b"c", Ops(1, [], [], [16, 1, 0, 3]), data)
    bench.give(b"d", Ops(1, [], [], [17, 1, 3, 4, 17, 1, 4, 5]))
    bench.give(b"c", Ops(2, [], [], [RECORD, 1, 0, 1, 3, DISCARD, 17, 1, 3, 4]))
    numbers = [row.seq for peer in (b"c", b"d") for row in bench.core.sessions[peer].journal.rows]
    assert len(numbers) > 6 and len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(("how", "told"), [(0, 0), (1, 1), (3, 1), (COMPILED_LATER, 1)])
def test_every_worker_is_told_of_a_recording_whose_program_will_be_compiled(bench, how, told):
    """A compiler takes seconds to start, so workers begin with it before the recorded call."""
    bench.give(b"c", Ops(0, [[17, NEG]], [[1, "f", 1, "", False, -1]], [RECORD, 1, how, 0, DISCARD]))
    workers = [worker.peer for worker in bench.core.cluster.workers]
    assert [len(bench.to(peer, PrepareCompilation)) for peer in workers] == [told] * len(workers)


def test_a_stream_of_recordings_without_ops_has_each_worker_prepare_once(bench):
    """One message has room for 60,000, of which each would be a message to every worker."""
    begins = [RECORD, 1, COMPILED_LATER, 0] * 1000
    bench.give(b"c", Ops(0, [], [], [*begins, RECORD, 1, 1, 0, *begins, RECORD, 1, 3, 0]))
    idle = [[m.idle for m in bench.to(b"w%d" % n, PrepareCompilation)] for n in range(2)]
    assert idle == [[False, True]] * 2
    bench.feed(PeerLost(b"w1", "killed"))
    bench.give(b"w1+", hello("worker", info={"name": "w1", "heap_bytes": 1 << 30}))
    bench.give(b"c", Ops(1, [], [], begins))
    assert [len(bench.to(peer, PrepareCompilation)) for peer in (b"w0", b"w1+")] == [1, 1]


def test_no_worker_waits_for_a_client_when_another_is_lost(bench):
    """A client that never sends an upload would hang the other workers for all sessions, once an op ends one of them."""
    bench.client(b"d")
    origins = [[1, "f", 1, "b", False, -1], [2, "f", 1, "a", False, -1]]
    code = [16, 1, 0, 1, 17, 1, 1, 2, 16, 2, -1, 3, 17, 2, 3, 4]  # the first upload is here; the second one is asked for
    bench.give(b"c", Ops(0, [[16, UPLOAD], [17, NEG]], origins, code), (bytes(64),))
    (need,) = bench.to(b"c", UploadRequest)
    bench.feed(PeerLost(b"w1", "killed"))
    (run,) = bench.to(b"w0", Run)
    assert need.key in run.code and [m.key for m in bench.to(b"w0", Data) if m.total == -1] == [need.key]
    bench.give(b"w0", UploadProgress(need.key, 0))  # said before it knew
    bench.give(b"c", UploadChunk(need.key, 0, 64), (bytes(64),))
    assert not bench.to(b"w0", Data) and {b"c", b"d"} <= set(bench.core.sessions) and b"w0" in bench.core.workers


def test_what_only_others_have_to_do_waits_on_for_its_upload_when_a_worker_is_lost(bench):
    origins = [[1, "f", 1, "b", False, -1], [2, "f", 1, "a", False, -1]]
    bench.give(b"c", Ops(0, [[16, UPLOAD], [17, NEG]], origins, [16, 1, 0, 1, 17, 1, 1, 2]), (bytes(64),))
    bench.give(b"c", Ops(1, [], [], [16, 2, -1, 3, 17, 2, 3, 4]))
    (need,) = bench.to(b"c", UploadRequest)
    bench.feed(PeerLost(b"w1", "killed"))
    assert not any(need.key in run.code for run in bench.to(b"w0", Run)) and not bench.to(b"w0", Data)
    bench.give(b"c", UploadChunk(need.key, 0, 64), (bytes(64),))
    assert [need.key in run.code for run in bench.to(b"w0", Run)] == [True]


@pytest.mark.parametrize("how", [-1, COMPILED_LATER + 1, 1.0, None, "1"])
def test_a_recording_in_no_known_way_is_refused(bench, how):
    bench.give(b"c", Ops(0, [], [], [RECORD, 1, how, 0]))
    assert any("records in way" in m.reason for m in bench.to(b"c", Exit))


@pytest.mark.parametrize("ids", [(1, 2, 3), (3, 2, 1), (2, 3, 1), (9, 1, 5)])
def test_views_follow_their_base_whatever_ids_a_client_gives_them(ids):
    bench, (base, flat, square) = CoreBench(), ids
    forms = [
        row("aten.view.default", [{"t": 0}, [16]], [spec(4, 4)], [("view", spec(16), 0)]),
        row("aten.view.default", [{"t": 0}, [2, 8]], [spec(16)], [("view", spec(2, 8), 0)]),
        row("aten.mm.default", [{"t": 0}, {"t": 1}], [spec(4, 4)] * 2, [spec(4, 4)]),
    ]
    code = [16, 0, 0, base, 17, 0, base, 20, 18, 0, base, flat, 19, 0, flat, square, PARAM, base, 20, 1, 20, base, 21]
    rows = [[16, UPLOAD], [17, NEG], [18, forms[0]], [19, forms[1]], [20, forms[2]]]
    bench.give(b"c", Ops(0, rows, [[1, "f", 1, "b", False, -1]], code), (bytes(64),))  # its check() holds views and bases
    tensors = bench.core.sessions[b"c"].table.rows
    assert {tensors[i].layout.mesh.workers for i in ids} == {(1,)}, "the parameter moved to its group, with both views"
