"""The closed table of ops: what torch has agrees with it, and what it lacks goes nowhere, in the dispatcher or in a worker."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from gt.cli import main as gt_command
from gt.errors import ConfigError, UnsupportedOp
from gt.ir import check
from gt.ir.ops import GT_OPS, RANDOM
from gt.ir.schema import FILE, LEFT_OUT, TABLE, OpTable, Schema
from gt.ir.template import T, V
from gt.wire.messages import Ops
from gt.worker.engine.numpy import NumpyEngine
from gt.worker.engine.numpy.table import TABLE as NUMPY
from gt.worker.engine.torch.overloads import OVERLOADS, line
from tests.helpers import ROOT
from tests.helpers.core_bench import CoreBench
from tests.helpers.hostile import row, spec
from tests.helpers.limits import limit
from tests.helpers.worker_parts import Bench, new, op, world
from tools import op_denied, op_schemas

VERSION = ".".join(torch.__version__.split(".")[:2])
NO_OP = "is not an op of the table"
T0, T1, V0 = {"t": 0}, {"t": 1}, {"v": 0}
F4, F44, I4 = spec(4), spec(4, 4), spec(4, dtype="int64")
NONE: list = []


def within(schema: Schema) -> bool:
    """True if the table has the installed version of torch."""
    return op_schemas.ordered(schema.since) <= op_schemas.ordered(VERSION) <= op_schemas.ordered(schema.until)


# ---- the table


def test_the_installed_torch_has_the_tables_ops_as_it_says():
    aten = [name for name in TABLE if name.startswith("aten.")]
    assert len(aten) > 1000
    for name in aten:
        if any(map(within, TABLE.find(name))):
            found = Schema.parse(line(OVERLOADS[name]))
            assert (found.arguments, found.returns) in [(s.arguments, s.returns) for s in TABLE.find(name)]


def test_each_op_of_the_installed_torch_is_in_the_table_or_left_out():
    if VERSION not in ("2.11", "2.12", "2.13"):
        pytest.skip(f"the table was not made with torch {VERSION}")
    names = [name[6:] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    lost = [name for name in map(op_schemas.op_name, names) if name not in TABLE and name not in TABLE.left_out]
    assert lost == [] and len(names) > 3000


def test_the_table_is_what_its_tool_makes():
    if VERSION == "2.13":
        version, lines = op_schemas.installed()
        assert op_schemas.merged({version: lines}, FILE.read_text()) == FILE.read_text()


def test_an_op_with_two_schemas_takes_arguments_of_either():
    table = OpTable()
    table.add(
        ["aten.f.default(Tensor self) -> (Tensor)  # 2.11-2.11", "aten.f.default(Tensor self, int n) -> (Tensor)  # 2.12-2.13"]
    )
    assert [len(schema.arguments) for schema in table.find("aten.f.default")] == [1, 2]


def test_each_op_left_out_by_name_has_a_reason_and_a_call_and_is_in_no_row():
    for name, (reason, call) in {**op_denied.DENIED, **op_denied.SCRIPT}.items():
        assert len(reason) > 20 and call, name
    left = TABLE.left_out
    assert set(left).isdisjoint(TABLE) and all(len(why) > 20 for why in left.values())
    assert not [name for name in TABLE if op_denied.denied(name)]
    for name in ("aten.set_.source_Tensor", "aten._reshape_alias.default", "aten.from_file.default", "aten._print.default"):
        assert left[name] not in LEFT_OUT.values(), name
    assert "generator" in left["aten.rand.default"] and "shape, strides" in left["aten.resize_.default"]
    for name in ("save", "manual_seed", "set_grad_enabled", "warn", "wait", "get_gradients", "set_data"):  # some of JIT's alone
        assert not [known for known in TABLE if known.startswith(f"aten.{name}.")], name


def test_the_table_says_which_ops_write_and_which_alias():
    (add,), (view,), (adam,) = (TABLE.find(f"aten.{n}") for n in ("add_.Tensor", "view.default", "_fused_adam_.default"))
    assert add.writes == ("self",) and not add.aliases and view.aliases and not view.writes
    assert adam.writes == ("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")


def test_every_op_that_gt_names_is_in_it():
    assert set(GT_OPS) | RANDOM <= set(TABLE)
    named = set()
    for path in [*(ROOT / "gt" / "dispatcher").rglob("*.py"), *(ROOT / "gt" / "worker").rglob("*.py")]:
        named |= set(re.findall(r'"(aten\.\w+\.\w+)"', path.read_text()))
    assert named and named <= set(TABLE)
    assert [name for name in NUMPY if name not in TABLE and name not in TABLE.left_out] == []


# ---- its owner may extend it


def test_its_owner_adds_a_schema_and_nobody_adds_what_is_left_out_for_what_it_does():
    table = OpTable(FILE.read_text())
    with pytest.raises(UnsupportedOp, match=r"gt ops other\.nms\.default"):
        table.find("other.nms.default")
    assert table.add(["# a comment", "", "other.nms.default(Tensor boxes, float limit) -> (Tensor)  # 2.11-2.13 by_values"])
    assert table.find("other.nms.default")[0].positional[1].type.base == "float"
    with pytest.raises(ConfigError, match=r"mine, line 1: aten._reshape_alias.default cannot be added: it checks neither"):
        table.add(["aten._reshape_alias.default(Tensor(a) self, int[] size, int[] stride) -> (Tensor(a))  # 2.13-2.13"], "mine")
    given = "aten.x.y(*, Tensor(a!) out) -> (Tensor(a!))  # 2.13-2.13"
    for bad in ("aten.x.y(Storage s) -> (Tensor)  # 2.13-2.13", "aten.x.y", given, "aten.x.y() -> (Tensor)  # 2.13-2.13 quick"):
        with pytest.raises(ConfigError, match="line 1"):
            table.add([bad])


def test_gt_ops_writes_a_line_that_gt_ops_in_the_environment_adds(tmp_path, capsys):
    assert gt_command(["ops", "prims.sin.default"]) == 0
    (tmp_path / "ops.txt").write_text(capsys.readouterr().out)
    code = "from gt.ir.schema import TABLE; print('prims.sin.default' in TABLE, 'aten.add.Tensor' in TABLE)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"GT_OPS": str(tmp_path / "ops.txt"), "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=True, timeout=limit(60),
    )  # fmt: skip
    assert done.stdout.split() == ["True", "True"]
    assert gt_command(["ops", "aten.no_such_op.default"]) == 1 and "has no aten.no_such_op" in capsys.readouterr().err
    assert gt_command(["ops", "aten.set_.source_Tensor"]) == 1 and "rebinds the storage" in capsys.readouterr().err


# ---- what a client defines


def refused(form: list) -> str:
    with pytest.raises((ValueError, UnsupportedOp)) as info:
        check.template(form)
    return str(info.value)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (row("aten.__setattr__.__call__", ["pwn", {"layout": "strided"}], [], [("none", None, -1)]), NO_OP),
        (row("aten.pwn.system", ["id"], [], [("none", None, -1)]), "is not an op of the table"),
        (row("aten.mul.__class__", [], [], [("none", None, -1)]), "is not an op of the table"),
        (row("aten.save.default", [T0, "/tmp/x"], [F4], [("none", None, -1)]), "it writes a file"),
        (row("aten.neg.default", [{"layout": "os"}], [], [F4]), "unknown layout 'os'"),
        (row("aten.clone.default", [T0], [F4], [F4], memory_format={"memory_format": "ops"}), "unknown memory_format 'ops'"),
        (row("aten._reshape_alias.default", [T0, [9], [1]], [F4], [("view", spec(9), 0)]), "checks neither sizes nor strides"),
        (row("aten.view_copy.dtype", [T0, 100], [F4], [F4]), "dtype of aten.view_copy.dtype is 100, want ScalarType"),
        (row("aten.neg.default", [1.0], [], [F4]), "self of aten.neg.default is 1.0, want Tensor"),
        (row("aten.neg.default", [T0, T0], [F4], [F4]), "args has 2 values, aten.neg.default takes at most 1"),
        (row("aten.neg.default", [], [], [F4]), "args and kwargs lack self of aten.neg.default"),
        (row("aten.neg.default", [T0], [F4], [F4], other=1), "kwargs has 'other', which aten.neg.default does not take"),
        (row("aten.neg.default", [T0], [F4], [F4], self=T0), "kwargs has 'self', which aten.neg.default has already"),
        (row("aten.sum.dim_IntList", [T0, [V0]], [F4], [spec()], 1), "want int[]?"),
        (row("aten.sum.dim_IntList", [T0, V0], [F4], [spec()], 1), "dim of aten.sum.dim_IntList is value 0 of each call"),
        (row("aten.sum.dim_IntList", [T0, [1 << 63]], [F4], [spec()]), "want int[]?"),
        (row("aten._softmax.default", [T0, 0, 0], [F4], [F4]), "half_to_float of aten._softmax.default is 0, want bool"),
        (row("aten.cat.default", [[T0, None]], [F4], [F4]), "want Tensor[]"),
        (row("aten.index.Tensor", [T0, [None, 3]], [F44], [F4]), "want Tensor?[]"),
        (row("aten.cat.default", [T0], [F4], [F4]), "tensors of aten.cat.default is tensor 0, want Tensor[]"),
        (row("aten.maximum.default", [T0, V0], [F4], [F4], 1), "other of aten.maximum.default is value 0 of each call"),
        (row("aten.zeros.default", [[4]], [], [F4], device=3), "device of aten.zeros.default is 3, want Device?"),
        (row("aten.neg.default", [T0], [F4], [F4, F4]), "outs has 2 outputs, aten.neg.default gives 1"),
        (row("aten.neg.default", [T0], [F4], [("view", F4, 0)]), "output 0 of outs is 'view' of operand 0"),
        (row("aten.neg.default", [T0], [F4], [("same", None, 0)], 0, (0,)), "writes is [0], aten.neg.default writes []"),
        (row("aten.neg.default", [T0], [F4], [("same", None, 0)]), "output 0 of outs is 'same' of operand 0"),
        (row("aten.view.default", [T0, [4]], [F4], [F4]), "output 0 of outs is 'new'"),
        (row("aten.add_.Tensor", [T0, T1], [F4, F4], [("same", None, 1)], 0, (0,)), "output 0 of outs is 'same' of operand 1"),
        (row("aten.add_.Tensor", [T0, T1], [F4, F4], [("same", None, 0)]), "writes is [], aten.add_.Tensor writes [0]"),
        (row("aten.add.out", [T0, T1], [F4] * 3, [("same", None, 2)], 0, (2,), out={"t": 2}), "it writes to tensors"),
        (row("aten.uniform_.default", [T0], [F4], [("same", None, 0)], 2, (0,), generator=1), "want Generator?"),
        (row("gt.sdpa.default", [T0], [F4], [F4]), "lack key, value, attn_mask"),
    ],
)  # fmt: skip
def test_a_template_that_its_schema_does_not_allow_is_refused_by_field(form, says):
    assert says in refused(form)
    assert says in CoreBench().refusal(b"c", Ops(0, [[16, form]], [], []))


def test_what_torch_takes_is_taken():
    for form in (
        row("aten.mul.Tensor", [T0, V0], [F4], [F4], 1),
        row("aten.add_.Tensor", [T0, 2], [F4], [("same", None, 0)], 0, (0,)),
        row("aten.index.Tensor", [T0, [None, T1]], [F44, I4], [F44]),
        row("aten.split.Tensor", [T0, 2], [F4], [("view", spec(2), 0)] * 2),
        row("aten.convolution_backward.default", [T0, T1, {"t": 2}, [0], [1], [0], [1], False, [0], 1, [True, False, False]],
            [spec(1, 1, 4)] * 3, [spec(1, 1, 4), ("none", None, -1), ("none", None, -1)]),
        row("aten.native_batch_norm.default", [T0, None, None, T1, {"t": 2}, True, 0.1, 1e-5], [F44, F4, F4], [F44, F4, F4],
            0, (1, 2)),
        row("aten.pow.Tensor_Scalar", [T0, {"complex": [1.0, 2.0]}], [F4], [F4]),
        row("aten._foreach_add_.Scalar", [[T0, T1], V0], [F4, F4], [], 1, (0, 1)),
    ):  # fmt: skip
        check.template(form)


def test_an_op_takes_tensors_of_the_shapes_that_its_template_says():
    bench, neg = CoreBench(), row("aten.neg.default", [T0], [spec(1 << 20)], [spec(1 << 20)])
    zeros = row("aten.zeros.default", [[4]], [], [F4])
    says = bench.refusal(b"c", Ops(0, [[16, zeros], [17, neg]], [[1, "f", 1, "", False, -1]], [16, 1, 1, 17, 1, 1, 2]))
    assert "operand 0 of aten.neg.default is f32[4], its template says f32[1048576]" in says


def attention_backward(grad=(2, 4, 8, 16), out=(2, 4, 8, 16), lse=(2, 4, 8), kept="float32"):
    q, kv = spec(2, 4, 8, 16), spec(2, 4, 6, 16)
    ins = [spec(*grad), q, kv, kv, spec(*out), spec(*lse, dtype=kept)]
    holes = [{"t": n} for n in range(6)]
    return row("gt.sdpa_backward.default", [*holes[:4], None, *holes[4:], 0.0, False, None, False], ins, [q, kv, kv], 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"grad": (1, 1, 1, 1)}, {"out": (1, 1, 1, 1)}, {"grad": (1, 4, 8, 16), "out": (1, 4, 8, 16), "lse": (1, 4, 8)},
        {"lse": (1, 1, 1)}, {"lse": (2, 4, 0)}, {"lse": (2, 4, 1)}, {"kept": "float16"},
        {"grad": (2, 4, 8, 1), "out": (2, 4, 8, 1)}, {"grad": (8, 16), "out": (8, 16), "lse": (8,)},
    ],
)  # fmt: skip
def test_the_backward_of_attention_takes_what_its_forward_kept(wrong):
    """Its kernels read the gradient, the output and logsumexp by the sizes of the query."""
    check.template(attention_backward())
    with pytest.raises(ValueError, match=r"logsumexp \[..., L\] in float32"):
        check.template(attention_backward(**wrong))
    assert "is refused: want query" in CoreBench().refusal(b"c", Ops(0, [[16, attention_backward(**wrong)]], [], []))


# ---- what a worker executes


@pytest.mark.parametrize(
    "name", ["aten.__setattr__.__call__", "os.system.default", "aten.add", "aten.rand.default", "aten.add.Tensor.x"]
)
def test_a_worker_finds_no_op_that_the_table_lacks(name):
    with pytest.raises(UnsupportedOp):
        OVERLOADS[name]
    for engine in (None, NumpyEngine()):
        bench = Bench(engine=engine)
        bench.do("op", op(name, [], 0, []))
        assert bench.sent[0][0].kind == "unsupported" and not hasattr(torch.ops.aten, "pwn")


def test_a_worker_checks_arguments_when_it_binds():
    bench = Bench()
    bench.put(_1=torch.ones(4))
    bench.do("op", op("aten.view_copy.dtype", [T(0), 100], 1, [new(torch.ones(4))]), 1, 2)
    bench.do("op", op("aten.sum.dim_IntList", [T(0), V(0)], 1, [new(torch.ones(()))], 1), 1, 0, 3)
    assert "want ScalarType" in bench.sent[0][0].message and "value 0 of each call" in bench.sent[1][0].message


@pytest.mark.parametrize("engine", ["torch", "numpy"])
def test_a_view_is_compared_with_the_plan_each_time(engine):
    bench = Bench(engine=NumpyEngine() if engine == "numpy" else None)
    ones = (lambda *shape: torch.ones(shape).numpy()) if engine == "numpy" else (lambda *shape: torch.ones(shape))
    bench.put(_1=ones(2, 3), _2=ones(4, 5))
    turn = op("aten.t.default", [T(0)], 1, [["view", spec(3, 2), 0]])
    bench.do("op", turn, 1, 3)
    assert not bench.sent
    bench.executor.run([bench.number, 0, 2, 4], 100)
    assert "the result is float32[5, 4], want f32[3,2]" in bench.sent[0][0].message


def test_a_result_sized_by_values_is_compared_with_the_plan_each_time():
    bench = Bench()
    bench.put(_1=torch.ones(4), _2=torch.tensor([True, False, False, True]), _3=torch.tensor([True] * 4))
    bench.do("op", op("aten.masked_select.default", [T(0), T(1)], 2, [new(torch.ones(2))]), 1, 2, 4)
    assert not bench.sent
    bench.executor.run([bench.number, 0, 1, 3, 5], 100)
    assert "the result is float32[4], want f32[2]" in bench.sent[0][0].message


def test_members_of_a_collective_take_part_with_what_was_planned():
    """One brings less than it is to: nobody gets what others have left in the team's buffer."""
    boxes = [[[[0, 512]]], [[[512, 1024]]]]
    moves = {
        "all_gather": {"shape": [1024], "dtype": "float32", "boxes": boxes},
        "reduce_scatter": {"shape": [1024], "dtype": "float32", "boxes": boxes, "op": "sum"},
        "all_to_all": {"shape": [1024], "dtype": "float32", "have": boxes, "want": boxes[::-1]},
    }
    whole = {"all_gather": 512, "reduce_scatter": 1024, "all_to_all": 512}

    def part(bench: Bench, rank: int) -> list:
        for n, (kind, payload) in enumerate(moves.items()):
            team = {"id": 7, "workers": [0, 1], "rank": rank, "offset": 0, "bytes": 1 << 12}
            bench.put(_1=torch.full((whole[kind],), 7.0))
            bench.do(kind, {"team": team, **payload}, 1, 10 + n)  # leaves sevens in the buffer
            assert len(bench.sent) == n, bench.sent
            short = torch.zeros(whole[kind])[: 8 if rank == 0 else None]
            bench.put(_1=short, _2=torch.zeros(4096))
            bench.executor.run([bench.number, 0, 1, 20 + n], 100)
        return [(m.message, bench.executor.tensors) for m, _ in bench.sent]

    liar, honest = world(2, part)
    assert [text for text, _ in liar] and all("planned is float32" in text for text, _ in liar), liar
    held = honest[0][1] if honest else {}
    assert all(not (held[20 + n] == 7).any() for n in range(3) if 20 + n in held)


def test_a_box_beyond_a_tensor_is_not_cut():
    bench = Bench()
    bench.put(_1=torch.ones(4))
    bench.do("shard", {"shape": [8], "dtype": "float32", "boxes": [[[0, 8]]]}, 1, 2)
    bench.do("shard", {"shape": [8], "dtype": "float32", "boxes": [[[0, 4]], [[4, 8]]]}, 1, 3)
    assert [m.message.partition(",")[0] for m, _ in bench.sent] == ["the tensor has shape [4]"] * 2


# ---- kernels that take shapes or values as they are


@pytest.mark.parametrize(
    "form",
    [
        row("aten._adaptive_avg_pool2d_backward.default", [T0, T1], [spec(8, 1, 5), spec(2, 3, 4)], [spec(2, 3, 4)]),
        row("aten._cdist_backward.default", [T0, T1, {"t": 2}, 1.0, {"t": 3}],
            [spec(3, 1), spec(3, 5), spec(3, 5), spec(3, 3)], [spec(3, 5)]),
        row("aten._fft_c2r.default", [T0, [0], 0, 1 << 20], [spec(4, dtype="complex64")], [F4]),
        row("aten._softmax_backward_data.default", [T0, T1, 0, {"dtype": "float32"}], [F44, F4], [F44]),
        row("aten._native_batch_norm_legit.default", [T0, None, None, T1, {"t": 2}, True, 0.1, 1e-5],
            [F44, spec(3), F4], [F44, F4, F4], 0, (1, 2)),
        row("aten._fused_sgd_.default", [[T0], [T1], []], [spec(1000), spec(1)], [], 0, (0, 1), weight_decay=0.0, momentum=0.0,
            lr=0.1, dampening=0.0, nesterov=False, maximize=False, is_first_step=True),
        row("aten.replication_pad1d_backward.default", [T0, T1, [1, 2]], [spec(1, 6), spec(64, 3)], [spec(64, 3)]),
        row("aten.reflection_pad3d.default", [T0, []], [spec(1, 2, 3, 4, 4)], [spec(1, 2, 3, 4, 4)]),
        row("aten.replication_pad2d.default", [T0, [1, 1]], [spec(1, 2, 3, 4)], [spec(1, 2, 3, 6)]),
        row("aten.slow_conv3d_forward.default", [T0, T1, [], None, [1, 1, 1], [0, 0, 0]],
            [spec(1, 2, 3, 4, 4), spec(2, 2, 1, 1, 1)], [spec(1, 2, 3, 4, 4)]),
        row("aten.fractional_max_pool3d_backward.default", [T0, T1, [2, 3, 4], [], {"t": 2}],
            [spec(2, 3, 2, 2, 2), spec(2, 3, 4, 4, 4), spec(2, 3, 2, 2, 2, dtype="int64")], [spec(2, 3, 4, 4, 4)]),
        row("aten.fractional_max_pool2d_backward.default", [T0, T1, [2, 3], [2], {"t": 2}],
            [spec(2, 3, 2, 2), spec(2, 3, 4, 4), spec(2, 3, 2, 2, dtype="int64")], [spec(2, 3, 4, 4)]),
        row("aten.lu_unpack.default", [T0, T1], [F44, spec(0, dtype="int32")], [F44] * 3),
        row("aten._batch_norm_no_update.default", [T0, None, None, None, None, 1.0, 0.5], [F44], [F44] * 4),
        row("aten.batch_norm_update_stats.default", [T0, T1, None, 0.1], [spec(1, 4, 4), spec(4)], [F4, F4]),
        row("aten._cholesky_solve_helper.default", [T0, T1, False], [F44, spec(3, 3, 3, 3)], [F44]),
        row("aten._chunk_cat.default", [[T0], 0, 1], [spec()], [F4]),
        row("aten._weight_norm_interface.default", [T0, T1, 0], [spec(0), spec(1)], [F4, F4]),
        row("aten._weight_norm_interface_backward.default", [T0, T1, {"t": 2}, {"t": 3}, 0], [F4, spec(0), spec(16), spec(0)],
            [F4, F4]),
    ],
    ids=lambda form: form[0],
)  # fmt: skip
def test_shapes_that_a_kernel_takes_as_they_are_are_checked_before(form):
    assert "is refused: " in refused(form)


@pytest.mark.parametrize(
    ("name", "args", "tensors"),
    [
        ("aten.max_pool2d_with_indices_backward.default", [T(0), T(1), [2, 2], [2, 2], [0, 0], [1, 1], False, T(2)],
         (torch.ones(1, 1, 1, 1), torch.ones(1, 1, 2, 2), torch.tensor([[[[1 << 40]]]]))),
        ("aten._ctc_loss.default", [T(0), T(1), [4], [2]], (torch.zeros(4, 1, 3), torch.tensor([[1, 1 << 40]]))),
        ("aten.lu_unpack.default", [T(0), T(1)], (torch.eye(2), torch.tensor([1, 1 << 30], dtype=torch.int32))),
        ("aten.embedding_dense_backward.default", [T(0), T(1), 4, -1, True], (torch.ones(2, 3), torch.tensor([0, 1 << 40]))),
        ("aten.segment_reduce.default", [T(0), "sum"], (torch.ones(4), torch.tensor([3, 1 << 40]))),
        ("aten.repeat_interleave.Tensor", [T(0)], (torch.tensor([1 << 62] * 4),)),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
def test_a_cpu_worker_looks_at_values_that_a_kernel_indexes_memory_by(name, args, tensors):
    bench = Bench()
    bench.put(**{f"_{n}": tensor for n, tensor in enumerate(tensors, 1)})
    kwargs = {"lengths": T(1), "unsafe": True} if "segment" in name else {}
    outs = [["new", spec(2), -1], *([["new", spec(2), -1]] * ("ctc" in name)), *([["new", spec(2), -1]] * 2 * ("lu_" in name))]
    bench.do("op", op(name, args, len(tensors), outs, **kwargs), *range(1, len(tensors) + 1), *range(10, 10 + len(outs)))
    assert "has values from" in bench.sent[0][0].message or "beyond" in bench.sent[0][0].message, bench.sent
    assert "trusts_values" in TABLE.find(name)[0].flags


@pytest.mark.parametrize("degree", [3.0, 1e18])
@pytest.mark.parametrize("kind", ["default", "n_scalar"])
def test_a_polynomial_of_a_degree_that_takes_for_ever_is_refused(kind, degree):
    given = [torch.ones(2), torch.tensor([1.0, degree])][: 2 if kind == "default" else 1]
    bench = Bench()
    bench.put(**{f"_{n}": tensor for n, tensor in enumerate(given, 1)})
    args = [T(0), T(1) if kind == "default" else degree]
    form = op(f"aten.special_legendre_polynomial_p.{kind}", args, len(given), [["new", spec(2), -1]])
    bench.do("op", form, *range(1, len(given) + 1), 10)
    said = [row[0].message for row in bench.sent]
    assert len(said) == (degree > 3) and all("up to 1e+18, want 65536 at most" in text for text in said)


@pytest.mark.parametrize(
    ("dtype", "step", "said"), [("int8", 0.5, True), ("int64", -0.25, True), ("float32", 0.5, False), ("int64", 2, False)]
)
def test_a_range_whose_step_is_0_as_an_integer_is_refused(dtype, step, said):
    """Its kernel divides by the step, which ends the process."""
    bench = Bench()
    args = [0, 3 if step > 0 else -3, step]
    bench.do("op", op("aten.range.step", args, 0, [["new", None, -1]], dtype={"dtype": dtype}), 10)
    assert ["is 0 as" in row[0].message for row in bench.sent] == [True] * said, bench.sent
