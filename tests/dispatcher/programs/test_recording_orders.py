"""Recordings and launches in orders that no honest client has, and recordings one right behind the other."""

from __future__ import annotations

import pytest

from gt.ir.dataflow import decode
from gt.ir.instr import DISCARD, FREE, LAUNCH, PARAM, RECORD, Define
from gt.wire.messages import FinishCapture, Ops, Report, Run, UploadChunk, UploadRequest
from tests.helpers.core_bench import CoreBench
from tests.helpers.hostile import TEMPLATES

UPLOAD, NEG = TEMPLATES[0], TEMPLATES[3]
A, B = [1, "f", 1, "a", False, -1], [2, "f", 2, "b", False, -1]


@pytest.fixture
def bench() -> CoreBench:
    return CoreBench()


def seal(program: int) -> FinishCapture:
    return FinishCapture(program, program, "", "eager", [], -1, 0, 0)


def test_a_worker_that_only_freed_a_tensor_has_no_part_in_a_program(bench):
    code = [16, 1, 0, 1, 16, 2, 1, 2, 17, 1, 1, 3, 17, 2, 2, 4]  # tensors of both workers
    bench.give(b"c", Ops(0, [[16, UPLOAD], [17, NEG]], [A, B], code), (bytes(64), bytes(64)))
    bench.give(b"c", Ops(1, [], [], [RECORD, 1, 0, 1, 3, 17, 1, 3, 5, FREE, 1, 4]))
    bench.give(b"c", seal(1))
    assert [report.body["why"] for report in bench.to(b"c", Report)] == [""]
    bench.give(b"c", Ops(2, [], [], [LAUNCH, 1, 0, 0]))
    assert {peer for peer, message in bench.sent if isinstance(message, Run)} == {b"w0"}


def test_a_launch_that_reads_a_freed_tensor_which_had_moved_is_refused(bench):
    """Its program was recorded outside of groups. The tensor is a parameter, which its first use in a group moves."""
    code = [16, 3, 0, 1, PARAM, 1, 17, 3, 1, 9, RECORD, 1, 0, 1, 1, 17, 3, 1, 2]
    bench.give(b"c", Ops(0, [[16, UPLOAD], [17, NEG]], [A, B, [3, "f", 3, "", False, -1]], code), (bytes(64),))
    bench.give(b"c", seal(1))
    bench.give(b"c", Ops(1, [], [], [LAUNCH, 1, 0, 0, 17, 2, 1, 3, FREE, 1, 1]))
    assert "reads %1, which is freed" in bench.refusal(b"c", Ops(2, [], [], [LAUNCH, 1, 0, 0]))


def test_what_an_upload_held_back_is_of_the_recording_in_which_it_was_written(bench):
    """A second call is recorded, to be executed whole, before the upload of the first one has come."""
    first = [RECORD, 1, 1, 0, 16, 1, -1, 1, 17, 1, 1, 2, DISCARD]
    second = [RECORD, 2, 1, 0, 18, 1, 3, 17, 1, 3, 4]
    bench.give(b"c", Ops(0, [[16, UPLOAD], [17, NEG], [18, TEMPLATES[1]]], [A, B], [*first, *second]))
    (request,) = bench.to(b"c", UploadRequest)
    runs = bench.give(b"c", UploadChunk(request.key, 0, 64), (bytes(64),))
    runs += bench.give(b"c", Ops(1, [], [], [DISCARD]))
    assert bench.core.sessions.keys() == {b"c"}
    defines, kinds = {}, []
    for message in [m for _, m in runs if isinstance(m, Run)]:
        defines |= {row[0]: Define.from_wire(row) for row in message.defines}
        rows = [define for _, define, _ in decode(message.code, defines.__getitem__) if define is not None]
        kinds += [define.payload["op"] for define in rows if define.kind == "op"]
    assert "aten.neg.default" in kinds, "the first call's op is sent as it was written"
