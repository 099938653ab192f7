"""The executor: every kind of instruction, what fails and what is left in its place, collectives over a real plane."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from gt.errors import ProtocolError
from gt.ir.instr import KINDS, PROGRAMS, Define
from gt.ir.layout import Layout, Mesh, Shard, boxes
from gt.ir.template import Const, T, V
from gt.wire.messages import CHUNK, MAX_OTHERS, Data, Described, OpError, Piece
from gt.worker.engine.torch import COMBINE, TorchEngine
from gt.worker.engine.torch.gpu.direct import DirectEngine
from gt.worker.executor import BIND
from gt.worker.plane.base import PeerGone, Unrecoverable, issuing
from gt.worker.plane.symmetric import check_present
from gt.worker.process.memory_budget import Budget
from gt.worker.process.op_errors import MAX_FAILURES, ErrorReports
from gt.worker.program.runner import Poisoned
from gt.worker.uploads import MAX_CANCELLED_UPLOADS, Cancelled, UploadBuffers
from tests.helpers.limits import limit
from tests.helpers.worker_parts import Bench, DeadPlane, new, op, world


def team(rank: int, size: int = 2) -> dict:
    return {"id": 1, "workers": list(range(size)), "rank": rank, "offset": 4096, "bytes": 4096}


def channel(peer: int) -> dict:
    return {"peer": peer, "offset": 65536, "bytes": 1024, "slots": 2}


def row_boxes(shape: tuple, size: int, dim: int, parts: int = 1) -> list:
    layout = Layout(Mesh((("tp", size),), tuple(range(size))), (Shard(dim, parts),))
    return [[[list(span) for span in box] for box in boxes(layout, shape, rank)] for rank in range(size)]


def cut(whole: torch.Tensor, rows: list) -> torch.Tensor:
    """The local tensor of boxes that differ in one dim."""
    pieces = [whole[tuple(slice(a, b) for a, b in box)] for box in rows]
    dim = next((d for d in range(whole.dim()) if len({tuple(box[d]) for box in rows}) > 1), 0)
    return torch.cat(pieces, dim).contiguous()


def test_every_kind_has_a_step():
    assert set(BIND) | PROGRAMS == set(KINDS)


def test_ops_views_and_in_place_ops_alias_as_torch_does():
    bench, x = Bench(), torch.arange(6.0).view(2, 3)
    bench.put(_1=x)
    bench.do("op", op("aten.t.default", [T(0)], 1, [["view", [[3, 2], [1, 3], 0, "float32"], 0]]), 1, 2)
    bench.do("op", op("aten.add_.Scalar", [T(0), V(0)], 1, [["same", None, 0]], values=1), 2, 10.0)
    bench.do("op", op("aten.add.Tensor", [T(0), T(1)], 2, [new(x)]), 1, 1, 3)
    assert bench[2].data_ptr() == x.data_ptr()
    assert x[1, 2] == 15
    assert torch.equal(bench[3], 2 * x)
    assert not bench.sent
    assert bench.executor.stats()["instructions"] == 3


def test_a_list_op_and_an_op_with_several_outputs():
    bench, x = Bench(), torch.arange(6.0).view(2, 3)
    bench.put(_1=x.clone(), _2=x.clone(), _3=torch.tensor(2.0))
    bench.do("op", op("aten._foreach_add_.List", [[T(0)], [T(1)]], 2, [], alpha=V(0), values=1), 1, 2, 3.0)
    assert torch.equal(bench[1], 4 * x)
    views = [["view", [[2, 1], [3, 1], i, "float32"], 0] for i in range(3)]
    bench.do("op", op("aten.split.Tensor", [T(0), 1, 1], 1, views), 2, 10, 11, 12)
    assert [bench[i][0, 0].item() for i in (10, 11, 12)] == [0, 1, 2]
    mean = torch.empty(2, 1)
    bench.do(
        "op",
        op("aten.native_layer_norm.default", [T(0), [3], None, None, 1e-5], 1, [new(x), new(mean), ["none", None, -1]]),
        2,
        13,
        14,
    )
    assert bench[13].shape == (2, 3) and bench[14].shape == (2, 1)


def test_an_output_gets_the_strides_that_the_client_inferred():
    bench, x = Bench(), torch.randn(4, 6)
    bench.put(_1=x)
    wanted = ["new", [[4, 6], [1, 4], 0, "float32"], -1]
    for target in (2, 3):
        bench.do("op", op("aten.relu.default", [T(0)], 1, [wanted]), 1, target)
        assert bench[target].stride() == (1, 4) and torch.equal(bench[target], x.relu())


def test_constants_of_torch_types():
    bench = Bench()
    payload = op("aten.full.default", [[2], V(0)], 0, [new(torch.empty(2, dtype=torch.float64))], values=1)
    payload["kwargs"] = {"dtype": {"dtype": "float64"}, "device": {"device": 0}, "layout": {"layout": "strided"}}
    bench.do("op", payload, 1.5, 1)
    assert bench[1].dtype == torch.float64 and bench[1].tolist() == [1.5, 1.5]
    bench.do(
        "op",
        op("aten.clone.default", [T(0)], 1, [new(bench[1])], memory_format=Const("memory_format", "contiguous_format")),
        1,
        2,
    )
    assert bench[2].tolist() == [1.5, 1.5]


def test_where_it_is_is_not_known_while_it_goes_from_one_stream_to_another():
    """The thread of the link asks, which an error would end: it may see one stream and a place of the other."""
    bench = Bench()
    bench.do("alias", {}, 1, 2)
    executor = bench.executor
    executor.runner.code, executor.runner.base, executor.runner.place = [0, bench.number, None], 10, 1
    assert executor.where() is None
    executor.runner.code = [0, bench.number, 5]
    assert executor.where() == (1, 15, "alias", 0)


def test_a_failed_op_reports_and_leaves_a_placeholder():
    bench = Bench()
    bench.put(_1=torch.ones(2, 3), _2=torch.ones(4, 5))
    bench.do("op", op("aten.mm.default", [T(0), T(1)], 2, [["new", [[2, 5], [1, 2], 0, "float32"], -1]]), 1, 2, 3, seq=7)
    ((trouble, _),) = bench.sent
    assert (trouble.seq, trouble.kind) == (107, "op") and "mat1 and mat2" in trouble.message
    assert bench[3].stride() == (1, 2) and not bench[3].any()
    bench.do("op", op("aten.add_.Tensor", [T(0), T(1)], 2, [["same", None, 0]]), 1, 2)
    assert torch.equal(bench[1], torch.ones(2, 3))


@pytest.mark.parametrize(
    "name", ["aten.no_such_op.default", "aten.add.no_such_overload", "os.system.default", "aten.from_file.default"]
)
def test_an_op_that_the_engine_lacks_is_unsupported(name):
    bench = Bench()
    bench.do("op", op(name, [], 0, [new(torch.empty(2))]), 5)
    assert bench.sent[0][0].kind == "unsupported" and name in bench.sent[0][0].message
    assert bench[5].shape == (2,)


def test_an_argument_name_cannot_be_code():
    bench = Bench()
    bench.put(_1=torch.ones(1))
    payload = op("aten.neg.default", [T(0)], 1, [new(torch.ones(1))])
    payload["kwargs"] = {"a)+print(1": None}
    bench.do("op", payload, 1, 2)
    assert "which aten.neg.default does not take" in bench.sent[0][0].message


def test_failures_of_a_run_are_reported_by_kind_the_first_of_each_by_itself():
    sent: list[OpError] = []
    reports = ErrorReports(sent.append, {}, Budget(), lambda tensor: (0, 0))
    for seq in range(8):
        reports.report(seq, KeyError(17), "no tensor has the id 17")
    for seq in range(100, 108):
        reports.report(seq, ValueError("odd"), "odd")
    reports.end_run()
    missing, other = ([m for m in sent if m.kind == kind] for kind in ("missing", "op"))
    assert [m.seq for m in missing] == [0, 1, 2, 3, 4] and missing[-1].others == [4, 5, 6, 7]
    assert [m.seq for m in other] == list(range(100, 108)) and len(missing) + len(other) == len(sent)


def test_very_many_failures_are_told_in_messages_that_are_short_to_deal_with():
    sent: list[OpError] = []
    reports = ErrorReports(sent.append, {}, Budget(), lambda tensor: (0, 0))
    for seq in range(10_000):
        reports.report(seq, ValueError("x"), "x")
    reports.end_run()
    rest = [report.others for report in sent if report.others]
    assert [seq for part in rest for seq in part] == list(range(MAX_FAILURES, 10_000))
    assert max(map(len, rest)) == MAX_OTHERS and all(report.seq == report.others[0] for report in sent if report.others)


def test_a_poisoned_device_ends_the_process_after_it_was_reported(monkeypatch):
    bench = Bench()
    monkeypatch.setattr(TorchEngine, "poisoned", lambda self, error: "mat1" in str(error))
    bench.put(_1=torch.ones(2, 3))
    with pytest.raises(Poisoned, match="mat1"):
        bench.do("op", op("aten.mm.default", [T(0), T(0)], 1, [new(torch.ones(2, 2))]), 1, 2)
    assert isinstance(bench.sent[0][0], OpError)


def test_free_ignores_what_is_not_there_and_an_unknown_number_is_refused():
    bench = Bench()
    bench.put(_1=torch.ones(1), _2=torch.ones(1))
    bench.executor.run([0, 0, 2, 1, 99, 0, 0, 0], 0)
    assert set(bench.executor.tensors) == {2}
    with pytest.raises(ProtocolError, match="77"):
        bench.executor.run([77, 0], 0)


def test_shard_partial_alias_fill():
    bench, x = Bench(), torch.arange(24.0).view(4, 6)
    bench.put(_1=x)
    bench.do("shard", {"shape": [4, 4], "dtype": "float32", "boxes": [[[0, 4], [0, 2]], [[0, 4], [3, 5]]]}, 1, 2)
    assert torch.equal(bench[2], torch.cat([x[:, :2], x[:, 3:5]], 1))
    bench.do("shard", {"shape": [2, 6], "dtype": "float32", "boxes": [[[1, 3], [0, 6]]]}, 1, 3)
    assert torch.equal(bench[3], x[1:3]) and bench[3].data_ptr() != x[1:3].data_ptr()
    bench.do("partial", {"keep": True, "op": "sum"}, 1, 4)
    assert torch.equal(bench[4], x) and bench[4].data_ptr() != x.data_ptr()
    for reduction, value in (("sum", 0.0), ("max", -torch.inf), ("min", torch.inf), ("product", 1.0)):
        bench.do("partial", {"keep": False, "op": reduction}, 1, 5)
        assert bench[5].shape == x.shape and (bench[5] == value).all()
    bench.do("alias", {}, 1, 6)
    assert bench[6] is x
    bench.do("fill", {"shape": [2, 2], "stride": [1, 2], "dtype": "int64"}, 7)
    assert bench[7].stride() == (1, 2) and bench[7].dtype == torch.int64
    assert not bench.sent


def test_a_fetch_streams_chunks_that_later_writes_do_not_change():
    bench, x = Bench(), torch.randn(700, 900)
    bench.put(_1=x, _2=x.t(), _3=torch.empty(0), _4=torch.tensor(3.5, dtype=torch.bfloat16))
    want = x.clone()
    bench.do("fetch", {}, 1, 50)
    bench.do("fetch", {}, 2, 51)
    x.zero_()
    for key, tensor in ((50, want), (51, want.t())):
        pieces = [(m, f) for m, f in bench.sent if m.key == key]
        assert [m.offset for m, _ in pieces] == list(range(0, want.nbytes, CHUNK))
        assert b"".join(bytes(f[0]) for _, f in pieces) == tensor.contiguous().numpy().tobytes()
    bench.do("fetch", {}, 3, 52)
    assert bench.sent[-1] == (Piece(52, 0, 0), ())
    bench.do("fetch", {}, 4, 53)
    assert bench.sent[-1][0].total == 2
    bench.do("describe", {}, 2, 54)
    assert bench.sent[-1][0] == Described(54, [[[900, 700], [1, 900], 0, "float32"]])


def test_an_upload_keeps_the_buffer_that_frames_were_put_into():
    bench, array = Bench(), np.arange(12, dtype=np.float32)
    raw, uploads = array.tobytes(), bench.executor.uploads
    uploads.receive(Data(9, 0, 48), raw[:20])
    uploads.receive(Data(9, 20, 48), raw[20:])
    address = uploads._arriving[9].buffer.ctypes.data
    bench.do("upload", {"shape": [3, 4], "stride": [4, 1], "dtype": "float32"}, 1, 9)
    assert bench[1].data_ptr() == address and torch.equal(bench[1], torch.arange(12.0).view(3, 4))
    uploads.receive(Data(10, 0, 48), raw)
    bench.do("upload", {"shape": [3, 4], "stride": [1, 3], "dtype": "float32"}, 2, 10)
    assert bench[2].stride() == (1, 3) and torch.equal(bench[2], bench[1])
    uploads.receive(Data(11, 0, 0), None)
    bench.do("upload", {"shape": [0, 4], "stride": [4, 1], "dtype": "float32"}, 3, 11)
    assert bench[3].shape == (0, 4)
    uploads.receive(Data(12, 0, 8), raw[:8])
    bench.do("upload", {"shape": [3], "stride": [1], "dtype": "float32"}, 4, 12)
    assert "8 bytes were sent for f32[3], want 12" in bench.sent[0][0].message


def test_an_upload_that_will_not_come_fails_its_wait():
    for end in (lambda u: u.cancel("gone"), lambda u: u.receive(Data(9, 0, -1), None)):
        bench = Bench()
        waiting = threading.Thread(target=bench.do, args=("upload", {"shape": [3], "stride": [1], "dtype": "float32"}, 1, 9))
        waiting.start()
        end(bench.executor.uploads)
        waiting.join(limit(10))
        assert bench.sent[0][0].kind == "peer" and bench[1].shape == (3,)


def test_an_upload_fails_its_wait_also_if_thousands_were_cancelled_after_it():
    uploads, failures = UploadBuffers(), []
    for key in range(2 * MAX_CANCELLED_UPLOADS):
        uploads.receive(Data(key, 0, -1), None)

    def take(key: int) -> None:
        try:
            uploads.take(key, uploads.epoch)
        except Cancelled as error:
            failures.append(error)

    for key in (0, MAX_CANCELLED_UPLOADS, 2 * MAX_CANCELLED_UPLOADS - 1):
        thread = threading.Thread(target=take, args=(key,), daemon=True)
        thread.start()
        thread.join(limit(5))
    assert len(failures) == 3 and len(uploads._cancelled) <= MAX_CANCELLED_UPLOADS


def test_the_rest_of_an_upload_that_had_no_room_is_not_kept():
    """A shared worker kept a buffer of all its bytes, which never came."""
    uploads = UploadBuffers()

    def full(nbytes: int) -> None:
        raise MemoryError("full")

    uploads.admit = full
    uploads.receive(Data(1, 0, 3), b"x")
    with pytest.raises(MemoryError, match="no room for an upload of 3 bytes: full"):
        uploads.take(1, 0)
    uploads.admit = lambda nbytes: None  # there is room again
    uploads.receive(Data(1, 1, 3), b"y")
    uploads.receive(Data(1, 2, 3), b"z")
    assert not uploads._arriving
    uploads.receive(Data(2, 0, 2), b"a")
    uploads.receive(Data(2, 1, 2), b"b")
    assert bytes(uploads.take(2, 0)) == b"ab"


def test_a_file_is_still_awaited_after_thousands_of_later_uploads_were_cancelled():
    uploads = UploadBuffers()
    uploads.expect(0)
    for key in range(1, 2 * MAX_CANCELLED_UPLOADS):
        uploads.receive(Data(key, 0, -1), None)
    uploads._ready.wait = lambda: uploads.deliver(0, np.ones(1, np.uint8))  # its thread has read it
    assert bytes(uploads.take(0, 0)) == b"\1"


def test_a_cancel_does_not_touch_uploads_of_runs_that_come_after_it():
    uploads = UploadBuffers()
    uploads.cancel("a client left")
    uploads.receive(Data(1, 0, 1), b"x")
    assert bytes(uploads.take(1, uploads.epoch)) == b"x"


def test_live_bytes_count_each_storage_once():
    bench, x = Bench(), torch.zeros(1000)
    bench.put(_1=x, _2=x[10:], _3=torch.zeros(10))
    stats = bench.executor.stats()
    assert (stats["live_tensors"], stats["live_bytes"]) == (3, 4040)


def test_what_a_gone_peer_leaves_behind():
    bench, x = Bench(), torch.ones(2, 3)
    bench.put(_1=x)
    bench.do("all_reduce", {"team": team(0), "op": "sum"}, 1)
    rows = row_boxes((4, 3), 2, 0)
    gather = {"team": team(0), "shape": [4, 3], "dtype": "float32", "boxes": rows}
    bench.do("all_gather", gather, 1, 2)
    bench.do("reduce_scatter", {**gather, "op": "sum"}, 2, 3)
    bench.do(
        "all_to_all",
        {"team": team(0), "shape": [4, 3], "dtype": "float32", "have": rows, "want": row_boxes((4, 3), 2, 1)},
        1,
        4,
    )
    parts = [[channel(1), [[[0, 2], [0, 3]]]]]
    bench.do("recv", {"shape": [2, 3], "dtype": "int64", "parts": parts}, 5)
    bench.do("merge", {"shape": [2, 3], "dtype": "int64", "parts": parts, "local": []}, 5, 6)
    bench.do("send", {"channel": channel(1), "boxes": [[[0, 2], [0, 3]]]}, 1)
    assert [m.kind for m, _ in bench.sent] == ["peer"] * 7
    assert "worker 3 is gone: it was killed" in bench.sent[0][0].message
    assert torch.equal(x, torch.ones(2, 3))
    assert [tuple(bench[i].shape) for i in (2, 3, 4, 5, 6)] == [(4, 3), (2, 3), (4, 2), (2, 3), (2, 3)]
    assert bench[5].dtype == torch.int64


# ---- two and more executors over a real plane


@pytest.mark.parametrize("reduction", ["sum", "max", "min", "product", "norm2"])
@pytest.mark.parametrize("strided", [False, True])
def test_all_reduce(reduction, strided):
    def part(bench: Bench, rank: int) -> torch.Tensor:
        x = torch.arange(6.0).view(2, 3) * (rank + 1)
        bench.put(_1=x.t().contiguous().t() if strided else x)
        bench.do("all_reduce", {"team": team(rank, 3), "op": reduction}, 1)
        assert not bench.sent, bench.sent
        return bench[1]

    terms = torch.stack([torch.arange(6.0).view(2, 3) * (rank + 1) for rank in range(3)])
    want = {
        "sum": terms.sum(0),
        "max": terms.amax(0),
        "min": terms.amin(0),
        "product": terms.prod(0),
        "norm2": terms.norm(dim=0),
    }
    for got in world(3, part):
        torch.testing.assert_close(got, want[reduction])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape, dim, parts", [((4, 6), 0, 1), ((4, 6), 1, 1), ((5, 7), 1, 1), ((4, 12), 1, 3), ((1, 3), 0, 1)])
def test_gather_scatter_and_exchange_are_torch_slices(dtype, shape, dim, parts):
    size = 2
    rows, others = row_boxes(shape, size, dim, parts), row_boxes(shape, size, 1 - dim)
    whole = torch.arange(float(np.prod(shape))).view(shape).to(dtype)

    def part(bench: Bench, rank: int) -> list[torch.Tensor]:
        base = {"team": team(rank, size), "shape": list(shape), "dtype": str(dtype)[6:]}
        bench.put(_1=cut(whole, rows[rank]), _5=whole.t().contiguous().t())
        bench.do("all_gather", {**base, "boxes": rows}, 1, 2)
        bench.do("all_to_all", {**base, "have": rows, "want": others}, 1, 3)
        bench.do("reduce_scatter", {**base, "op": "max", "boxes": rows}, 5, 4)
        assert not bench.sent, bench.sent
        assert bench.executor.stats()["collectives"] == {"all_gather": 1, "all_to_all": 1, "reduce_scatter": 1}
        return [bench[i] for i in (2, 3, 4)]

    for rank, (gathered, exchanged, scattered) in enumerate(world(size, part)):
        assert torch.equal(gathered, whole) and gathered.dtype == dtype
        assert torch.equal(exchanged, cut(whole, others[rank]))
        assert torch.equal(scattered, cut(whole, rows[rank]))


def test_send_recv_and_merge_carry_boxes_in_order():
    x = torch.arange(24.0).view(4, 6)
    out = [[[0, 2], [1, 3]], [[2, 4], [4, 6]]]
    into = [[[0, 2], [0, 2]], [[0, 2], [2, 4]]]

    def part(bench: Bench, rank: int) -> torch.Tensor:
        if rank == 0:
            bench.put(_1=x)
            bench.do("send", {"channel": channel(1), "boxes": out}, 1)
            bench.do("send", {"channel": channel(1), "boxes": [[[1, 3], [0, 6]]]}, 1)
            bench.do("send", {"channel": channel(1), "boxes": [[[0, 1], [0, 6]]]}, 1)
            return x
        bench.do("recv", {"shape": [2, 4], "dtype": "float32", "parts": [[channel(0), into]]}, 1)
        bench.do("recv", {"shape": [2, 6], "dtype": "float32", "parts": [[channel(0), [[[0, 2], [0, 6]]]]]}, 2)
        local = [[[[0, 1], [0, 4]], [[1, 2], [2, 6]]]]
        merged = {"shape": [2, 6], "dtype": "float32", "parts": [[channel(0), [[[0, 1], [0, 6]]]]], "local": local}
        bench.do("merge", merged, 1, 3)
        assert not bench.sent, bench.sent
        received = torch.cat([x[:2, 1:3], x[2:, 4:]], 1)
        assert torch.equal(bench[1], received) and torch.equal(bench[2], x[1:3])
        assert torch.equal(bench[3][0], x[0]) and torch.equal(bench[3][1, 2:], received[0])
        return bench[3]

    world(2, part)


def test_a_failed_op_still_takes_part_in_the_collective_that_follows():
    def part(bench: Bench, rank: int) -> torch.Tensor:
        bench.put(_1=torch.ones(2, 3), _2=torch.ones(3, 2) if rank else torch.ones(5, 5))
        bench.do("op", op("aten.mm.default", [T(0), T(1)], 2, [new(torch.empty(2, 2))]), 1, 2, 3)
        bench.do("all_reduce", {"team": team(rank), "op": "sum"}, 3)
        assert [type(m) for m, _ in bench.sent] == ([] if rank else [OpError])
        return bench[3]

    assert all(torch.equal(got, torch.full((2, 2), 3.0)) for got in world(2, part))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_one_of_several_instructions_run_together_fails_and_the_others_complete(backend):
    """Members do not know where another failed: they would wait for what it leaves out."""

    def part(bench: Bench, rank: int) -> tuple:
        bench.put(_1=torch.ones(3), _2=torch.ones(3))
        bench.executor.define([Define(30, "together", {"count": 3}).wire()])
        bench.executor.define([Define(31, "all_reduce", {"team": team(rank), "op": "sum"}).wire()])
        code = [30, 0, 31, 1, 1, 31, 2, 9, 31, 3, 2]  # there is no 9
        payload = {"code": code, "randoms": [], "actions": [], "backend": backend, "channels": [], "once": False}
        bench.do("program", payload, 0, 0)
        return bench[1], bench[2], [m.seq for m, _ in bench.sent]

    for first, last, troubles in world(2, part):
        assert torch.equal(first, torch.full((3,), 2.0)) and torch.equal(last, first)
        assert troubles == [102]


@pytest.mark.slow
def test_an_instruction_costs_a_few_microseconds():
    bench, n = Bench(), 20_000
    bench.put(_1=torch.ones(4, 4), _2=torch.ones(4, 4))
    bench.executor.define([Define(16, "op", op("aten.add.Tensor", [T(0), T(1)], 2, [new(torch.ones(4, 4))])).wire()])
    code = [16, 0, 1, 2, 3] * n
    bench.executor.run(code, 0)
    start = time.thread_time()
    bench.executor.run(code, 0)
    ours = time.thread_time() - start
    x, y, add = bench[1], bench[2], torch.ops.aten.add.Tensor
    start = time.thread_time()
    for _ in range(n):
        add(x, y)
    plain = time.thread_time() - start
    assert (ours - plain) / n < 20e-6  # seconds of the CPU; measured: under 1


class Reached(DeadPlane):
    """A plane that moves memory of the engine's device; what it is asked to send has this for an end."""

    failure: Exception | None = None

    def device_transport(self, workers: Any) -> Any:
        return self

    @issuing()
    def send(self, channel: dict, data: Any) -> None:
        check_present(data)
        if self.failure is not None:
            raise self.failure


def test_a_worker_that_fails_while_others_wait_on_their_devices_ends() -> None:
    engine = TorchEngine("cpu")
    engine.direct = DirectEngine(engine, COMBINE)
    plane = Reached()
    bench = Bench(plane, engine)
    bench.put(_1=torch.ones(2))
    sending = {"channel": channel(1), "boxes": [[[0, 2]]]}
    bench.do("send", sending, 1)
    assert not bench.sent
    plane.failure = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(Unrecoverable, match="others wait on their GPUs for a send that failed: OutOfMemoryError: CUDA"):
        bench.do("send", sending, 1, seq=4)
    (trouble,) = [message for message, _ in bench.sent]
    assert isinstance(trouble, OpError) and trouble.seq == 104 and trouble.kind == "memory"
    plane.failure = PeerGone(1, "it was killed")  # then there is nobody who waits, and the dispatcher knows what to do
    bench.do("send", sending, 1)
    assert bench.sent[1][0].kind == "peer"
    with pytest.raises(Unrecoverable, match="others are waiting in"):  # no such tensor
        bench.do("send", sending, 9)


class Reachless(DeadPlane):
    """A GPU worker's plane: it moves nothing by devices itself, its transport does."""

    def __getattr__(self, name: str) -> Any:
        if name == "recordable":  # which transports say, and no plane
            raise AttributeError(name)
        return super().__getattr__(name)


def test_a_cut_of_ones_own_piece_goes_by_the_device_alone() -> None:
    engine = TorchEngine("cpu")
    engine.direct = DirectEngine(engine, COMBINE)
    bench = Bench(Reachless(), engine)
    bench.put(_1=torch.arange(4.0))
    cut = {"shape": [2], "dtype": "float32", "parts": [], "local": [[[[2, 4]], [[0, 2]]]]}
    bench.do("merge", cut, 1, 2)
    assert not bench.sent and bench[2].tolist() == [2.0, 3.0]
    assert bench.executor._table.device_only


def test_a_part_that_there_is_no_room_for_is_taken_from_its_channel_like_the_others() -> None:
    """Or what comes next by that channel would be taken for it."""

    def part(bench: Bench, rank: int) -> None:
        if rank == 0:
            bench.put(_1=torch.arange(6.0).reshape(2, 3))
            for _ in range(2):
                for boxes in ([[[0, 2], [0, 1]]], [[[0, 2], [1, 3]]]):
                    bench.do("send", {"channel": channel(1), "boxes": boxes}, 1)
            return
        parts = [[channel(0), [[[0, 2], [0, 1]]]], [channel(0), [[[0, 2], [1, 3]]]]]
        staging, asked = bench.executor._engine.staging, []

        def full(shape: Any, dtype: str) -> Any:
            asked.append(shape)
            if len(asked) == 2:
                raise MemoryError("no room")
            return staging(shape, dtype)

        bench.executor._engine.staging = full
        for dst in (5, 6):
            bench.do("recv", {"shape": [2, 3], "dtype": "float32", "parts": parts}, dst)
        (trouble,) = [message for message, _ in bench.sent]
        assert "no room" in trouble.message
        assert torch.equal(bench[6], torch.arange(6.0).reshape(2, 3))

    world(2, part)


def test_the_end_of_an_interrupt_ends_no_later_one():
    """The next has begun while the end of the first was queued behind other work."""
    executor = Bench().executor
    executor.pause(3)
    executor.skip(3, 7)
    first = executor.pauses[3]
    executor.pause(3)
    executor.resume(3, first)
    assert 3 in executor.interrupted
    executor.skip(3, 9)
    executor.resume(3, executor.pauses[3])
    assert not executor.interrupted
