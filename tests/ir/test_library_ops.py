"""Schemas of libraries' ops, as a worker announces them: bounded, and never torch's own."""

from __future__ import annotations

import pytest

from gt.dispatcher.cluster.peer_info import worker_info
from gt.dispatcher.cluster.workers import Cluster
from gt.errors import ProtocolError, UnsupportedOp
from gt.ir import check
from gt.ir.schema import MAX_LIBRARY_LINE_CHARACTERS, MAX_LIBRARY_OPS, SessionOps, common, library_schemas

NMS = "vision.nms.default(Tensor dets, Tensor scores, float limit) -> (Tensor)  # 2.13-2.13 by_values"
PAIR = "vision.pair.default(Tensor(a0!) x) -> ()  # 2.13-2.13"


def test_a_worker_s_lines_are_schemas_by_name():
    ops = library_schemas([NMS, PAIR])
    assert list(ops) == ["vision.nms.default", "vision.pair.default"]
    assert ops["vision.pair.default"].writes == ("x",) and ops["vision.nms.default"].line == NMS


@pytest.mark.parametrize(
    "lines",
    [
        "text",
        [1],
        ["aten.mm.default(Tensor a) -> (Tensor)  # 2.13-2.13"],
        ["aten.new.default(Tensor a) -> (Tensor)  # 2.13-2.13"],
        ["gt.upload.default() -> (Tensor)  # 2.13-2.13"],
        ["a/b.c.d(Tensor a) -> (Tensor)  # 2.13-2.13"],
        ["vision.nms(Tensor a) -> (Tensor)  # 2.13-2.13"],
        ["vision.nms.default(File a) -> (Tensor)  # 2.13-2.13"],
        ["vision.nms.default(Tensor \x1ba) -> (Tensor)  # 2.13-2.13"],
        ["vision.n.d(Tensor a) -> (Tensor) -> (Tensor)  # 2.13-2.13"],
        [NMS + " " * MAX_LIBRARY_LINE_CHARACTERS],
        [NMS] * (MAX_LIBRARY_OPS + 1),
    ],
)
def test_other_lines_are_refused(lines: object):
    with pytest.raises(ValueError):
        library_schemas(lines)
    with pytest.raises(ProtocolError, match=r"Hello\.info\.ops"):
        worker_info({"ops": lines})


def test_a_session_has_the_ops_that_all_its_workers_have_alike():
    other = NMS.replace("float limit", "float limit, int most")
    both = common([library_schemas([NMS, PAIR]), library_schemas([PAIR, NMS])])
    assert list(both) == ["vision.nms.default", "vision.pair.default"]
    assert list(common([library_schemas([NMS, PAIR]), library_schemas([other, PAIR])])) == ["vision.pair.default"]
    assert common([library_schemas([NMS]), {}]) == {} == common([])
    cluster = Cluster()
    cluster.add(b"a", worker_info({"ops": [NMS, PAIR]}))
    assert list(cluster.library_ops()) == ["vision.nms.default", "vision.pair.default"]
    cluster.add(b"b", worker_info({"ops": [NMS]}))
    assert list(cluster.library_ops()) == ["vision.nms.default"]
    cluster.workers[1].lost = "gone"
    assert len(cluster.library_ops()) == 2


def test_a_client_s_template_is_checked_by_its_session_s_ops_alone():
    spec = [[4], [1], 0, "float32"]
    row = ["vision.nms.default", [{"t": 0}, {"t": 1}, 0.5], {}, [spec, spec], 0, [["new", None, -1]], [], True, False]
    assert check.template(row, SessionOps(library_schemas([NMS]))).op == "vision.nms.default"
    with pytest.raises(UnsupportedOp, match="gt worker --library"):
        check.template(row)
    with pytest.raises(ValueError, match=r"limit of vision\.nms"):
        check.template([row[0], [{"t": 0}, {"t": 1}, "x"], *row[2:]], SessionOps(library_schemas([NMS])))
