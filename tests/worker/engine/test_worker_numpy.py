"""The numpy engine against torch: every ATen call of many programs once more on arrays, then training through workers."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gt.errors import UnsupportedOp
from gt.ir.ops import RANDOM
from gt.ir.spec import Spec
from gt.ir.template import Const, T, V
from gt.wire.messages import Data
from gt.worker.engine.numpy import NumpyEngine, arrays
from gt.worker.engine.numpy.table import TABLE, resolve
from gt.worker.engine.torch import NAME
from gt.worker.engine.torch import random as torch_random
from gt.worker.engine.torch.layers import attention, recurrent
from gt.worker.engine.torch.layers.norms import RMS_NORMS
from tests.helpers import CONFIGS
from tests.helpers.models import GPT, mini
from tests.helpers.processes import started
from tests.helpers.worker_parts import Bench, new, op, world
from tests.system.parity.test_parity import OPTIMIZERS, train
from tests.worker.engine import oracle
from tests.worker.engine.test_worker_engine import ThroughEngine

pytestmark = pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter:UserWarning")

ENGINE = NumpyEngine()
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.complex64: 2e-5, torch.complex128: 1e-9}
SKIP = ("empty", "new_empty", "lift_fresh", "_local_scalar_dense", "is_same_size", "allclose", "equal", "set_", "resize")


LOOSE = {"aten.hardsigmoid_backward.default": 1e-7}  # torch has 1/6 as a float32 there
NOT_COMPARED = {  # what uninitialised memory has in it; RMS norms, which torch's CPU splits, are compared below
    *("empty.memory_format", "empty_like.default", "empty_strided.default", "new_empty.default", "new_empty_strided.default"),
    *("_fused_rms_norm.default", "_fused_rms_norm_backward.default"),
}


class Arrays:
    """Tensors of one call as arrays; those that share a storage share it here too."""

    def __init__(self) -> None:
        self._storages: dict[int, np.ndarray] = {}

    def __getitem__(self, x: torch.Tensor) -> np.ndarray:
        storage = x.untyped_storage()
        key = storage.data_ptr() or id(storage)
        if key not in self._storages:
            whole = torch.empty(0, dtype=x.dtype).set_(storage, 0, (storage.nbytes() // x.element_size(),))  # type: ignore[call-overload]
            self._storages[key] = whole.numpy().copy()
        found = self._storages[key]
        kind = arrays.DTYPE[NAME[x.dtype]]
        return arrays.strided(found.view(kind), x.shape, x.stride(), x.storage_offset())


def flat(tree: Any) -> list:
    return [x for part in tree for x in flat(part)] if isinstance(tree, (list, tuple)) else [tree]


def close(got: np.ndarray, want: torch.Tensor, what: str, strides: bool = True) -> None:
    assert got.dtype == arrays.DTYPE[NAME[want.dtype]], what
    limit = LOOSE.get(what, TOLERANCE.get(want.dtype, 0))
    torch.testing.assert_close(
        torch.from_numpy(np.array(got)), want, rtol=limit, atol=limit, equal_nan=True, check_stride=False,
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip
    if strides and want.numel():
        steps = [step // got.itemsize for n, step in zip(got.shape, got.strides) if n > 1]
        assert steps == [step for n, step in zip(want.shape, want.stride()) if n > 1], what


class Twice(ThroughEngine):
    """Does every ATen call once more with the numpy engine: values, strides, what is written, what is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.lacking: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = f"aten.{func._schema.name.split('::')[1]}.{func._overloadname}"
        tensors: list[torch.Tensor] = []
        values: list[Any] = []
        forms = [self.form(a, tensors, values) for a in args]
        named = {k: self.form(v, tensors, values) for k, v in kwargs.items() if v is not None}
        if (
            func.namespace != "aten"
            or torch.Tag.nondeterministic_seeded in func.tags
            or name.startswith(tuple(f"aten.{s}" for s in SKIP))
        ):
            return func(*args, **kwargs)
        memory = Arrays()
        try:
            given = [memory[t] for t in tensors]
        except KeyError:  # a dtype that NumPy lacks
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        returns = flat(result) if func._schema.returns else []
        outs = [self.out(func, r, tensors) for r in returns]
        try:
            with ENGINE.guard():
                made = ENGINE.bind(op(name, forms, len(tensors), outs, len(values), **named))(*given, *values)
        except UnsupportedOp:
            self.lacking.add(name)
            return result
        self.seen.add(name)
        self.compare(name, made, returns, outs, given, tensors)
        return result

    @staticmethod
    def out(func: Any, result: Any, tensors: list[torch.Tensor]) -> list:
        if not isinstance(result, torch.Tensor):
            return ["none", None, -1]
        if func._schema.is_mutable:
            return ["same", None, 0]
        if any(r.alias_info for r in func._schema.returns):
            return ["view", None, 0]
        return new(result)

    @staticmethod
    def compare(name: str, made: Any, returns: list, outs: list, given: list, tensors: list) -> None:
        kept = [(r, o) for r, o in zip(returns, outs, strict=True) if o[0] in ("new", "view")]
        for (want, out), got in zip(kept, flat(made) if kept else [], strict=True):
            close(got, want, name)
            if out[0] == "view" and want.numel():
                assert any(arrays.owner(got) is arrays.owner(g) for g in given), name
                if want.dtype == tensors[0].dtype:
                    assert arrays.offset(got) == want.storage_offset(), name
        for array, tensor in zip(given, tensors, strict=True):
            close(array, tensor, f"{name}, operand")


# ---- operands


def maker(dtype: torch.dtype, layout: str) -> Callable[..., torch.Tensor]:
    """Random operands: contiguous, or transposed parts of larger memory that start somewhere in it."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> torch.Tensor:
        if layout == "contiguous" or not shape:
            return (torch.rand(shape, generator=generator, dtype=torch.float64) * 4 - 2).to(dtype)
        whole = (torch.rand([2 * n + 1 for n in reversed(shape)], generator=generator, dtype=torch.float64) * 4 - 2).to(dtype)
        return whole.permute(*reversed(range(len(shape))))[tuple(slice(1, 1 + 2 * n, 2) for n in shape)]

    return make


def run(program: Callable[[Any], None], make: Any) -> Twice:
    torch.manual_seed(0)
    with Twice() as mode:
        program(make)
    return mode


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("name", oracle.PROGRAMS)
def test_an_op_gives_what_torch_gives(name: str, dtype: torch.dtype, layout: str) -> None:
    run(oracle.PROGRAMS[name], maker(dtype, layout))


@pytest.mark.parametrize("name", ["functions", "joining", "factories"])
def test_half_precision_is_rounded_once(name: str) -> None:
    run(oracle.PROGRAMS[name], maker(torch.float16, "strided"))


def test_every_row_is_compared() -> None:
    seen = set().union(*(run(program, maker(torch.float32, "contiguous")).seen for program in oracle.PROGRAMS.values()))
    lacks = {name for name in TABLE if name.startswith("aten.")} - seen - {f"aten.{name}" for name in NOT_COMPARED}
    assert not lacks


def test_a_row_takes_the_arguments_of_its_op() -> None:
    for name, row in TABLE.items():
        if not name.startswith("aten."):
            continue
        _, base, overload = name.split(".")
        schema = getattr(getattr(torch.ops.aten, base), overload)._schema
        given = [a for a in schema.arguments if not a.kwarg_only], [a for a in schema.arguments if a.kwarg_only]
        needed = [[a for a in arguments if not a.has_default_value()] for arguments in given]
        for places, named in (given, needed):
            inspect.signature(row).bind(*places, **{a.name: a for a in named})


def supported(name: str) -> bool:
    """True if the engine has a function for this op."""
    try:
        return resolve(name, None) is not None
    except UnsupportedOp:
        return False


def test_the_ops_of_the_engine_are_torchs() -> None:
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    found = {op for name in names if supported(op := f"aten.{name}" if "." in name else f"aten.{name}.default")}
    assert {name for name in TABLE if name.startswith("aten.")} <= found
    assert len(found) > 600


# ---- GT's own ops and random numbers


@pytest.mark.parametrize("causal, mask, gqa, dropout", [
    (False, None, False, 0.0), (True, None, False, 0.0), (False, "bool", False, 0.0), (False, "float", False, 0.0),
    (True, None, True, 0.0), (True, None, False, 0.25), (False, "bool", True, 0.25),
])  # fmt: skip
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_attention_is_torchs(causal: bool, mask: str | None, gqa: bool, dropout: float, layout: str) -> None:
    x = maker(torch.float32, layout)
    q, k, v = x(2, 4, 7, 8), *(x(2, 2 if gqa else 4, 9 if not causal else 7, 8) for _ in range(2))
    m = {None: None, "bool": torch.rand(7, 9) > 0.4, "float": torch.randn(2, 1, 7, 9)}[mask]
    if mask == "bool":
        m[0] = False  # type: ignore[index]
    rest, draw = (dropout, causal, None, gqa), {"seed": 3, "counter": 4}
    want = attention.bind("gt.sdpa.default", None)(q, k, v, m, *rest, **draw)
    grad = x(*want[0].shape)
    grads = attention.bind("gt.sdpa_backward.default", None)(grad, q, k, v, m, *want, *rest, **draw)
    memory = Arrays()
    a, b, c, d, g = (None if t is None else memory[t] for t in (q, k, v, m, grad))
    with ENGINE.guard():
        got = resolve("gt.sdpa.default", None)(a, b, c, d, *rest, **draw)
        back = resolve("gt.sdpa_backward.default", None)(g, a, b, c, d, *got, *rest, **draw)
    for ours, theirs in zip((got[0], *back), (want[0], *grads), strict=True):
        close(ours, theirs, "attention", strides=False)


@pytest.mark.parametrize("bias", [(2, 4, 7, 9), (4, 7, 9), (2, 1, 7, 9), (1, 4, 1, 9), (7, 1)])
def test_the_gradient_of_a_learned_bias_is_torchs(bias: tuple[int, ...]) -> None:
    x = maker(torch.float32, "contiguous")
    q, k, v, m, grad = x(2, 4, 7, 8), x(2, 4, 9, 8), x(2, 4, 9, 8), x(*bias), x(2, 4, 7, 8)
    rest, draw = (0.0, False, None, False), {"seed": 3, "counter": 4}
    names = "gt.sdpa_biased.default", "gt.sdpa_biased_backward.default"
    want = attention.bind(names[0], None)(q, k, v, m, *rest, **draw)
    grads = attention.bind(names[1], None)(grad, q, k, v, m, *want, *rest, **draw)
    memory = Arrays()
    a, b, c, d, g = (memory[t] for t in (q, k, v, m, grad))
    with ENGINE.guard():
        got = resolve(names[0], None)(a, b, c, d, *rest, **draw)
        back = resolve(names[1], None)(g, a, b, c, d, *got, *rest, **draw)
    assert len(back) == 4
    for ours, theirs in zip((got[0], *back), (want[0], *grads), strict=True):
        close(ours, theirs, "attention", strides=False)


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("shape", [(6,), (4, 6)])
@pytest.mark.parametrize("weighed, eps", [(True, None), (False, 0.1)])
def test_rms_norms_are_torchs(layout: str, shape: tuple[int, ...], weighed: bool, eps: float | None) -> None:
    forward, backward = (f"aten._fused_rms_norm{name}.default" for name in ("", "_backward"))
    x, grad, weight = maker(torch.float32, layout)(3, 4, 6), torch.randn(3, 4, 6), torch.randn(shape) if weighed else None
    want = RMS_NORMS[forward](x, shape, weight, eps)
    grads = RMS_NORMS[backward](grad, x, shape, want[1], weight, [True, weighed])
    memory = Arrays()
    a, g, w = (None if t is None else memory[t] for t in (x, grad, weight))
    with ENGINE.guard():
        got = resolve(forward, None)(a, shape, w, eps)
        back = resolve(backward, None)(g, a, shape, got[1], w, [True, weighed])
    for ours, theirs in zip((*got, *back), (*want, *grads), strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            close(ours.astype(np.float32), theirs, "RMS norm", strides=False)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("mode", ["lstm", "projected", "gru", "rnn_tanh", "rnn_relu"])
@pytest.mark.parametrize("sizes", [(), (3, 3, 2, 1)], ids=["padded", "packed"])
@pytest.mark.parametrize("layers, both, biases", [(1, False, False), (2, True, True)])
def test_recurrent_layers_are_torchs(mode: str, sizes: tuple, layers: int, both: bool, biases: bool) -> None:
    kind = {"lstm": torch.nn.LSTM, "projected": torch.nn.LSTM, "gru": torch.nn.GRU}.get(mode, torch.nn.RNN)
    width = 3 if mode == "projected" else 5
    layer = kind(4, 5, layers, bidirectional=both, bias=biases, **({"proj_size": 3} if mode == "projected" else {}))
    mode = "lstm" if mode == "projected" else mode
    count = layers * (1 + both)
    states = [torch.randn(count, 3, n) for n in ((width, 5) if mode == "lstm" else (width,))]
    x, params = torch.randn(*((sum(sizes), 4) if sizes else (4, 3, 4))), [p.detach() for p in layer.parameters()]
    stack, needs = (mode, biases, layers, True, both, sizes), [True] * (1 + len(states) + len(params))
    forward, backward = (recurrent.OPS[f"gt.{name}.default"] for name in ("rnn", "rnn_backward"))
    want = forward(x, states, params, *stack, needs, False)
    given = [torch.randn_like(result) if result.numel() else None for result in want]
    grads = backward(*given, x, states, params, want[0], *stack, needs)
    memory = Arrays()

    def arrays_of(tree: Any) -> Any:
        return None if tree is None else [arrays_of(part) for part in tree] if isinstance(tree, list) else memory[tree]

    operands = [arrays_of(part) for part in (x, states, params)]
    with ENGINE.guard():
        got = resolve("gt.rnn.default", None)(*operands, *stack, needs, False)
        back = resolve("gt.rnn_backward.default", None)(*map(arrays_of, given), *operands, got[0], *stack, needs)
    for ours, theirs in zip((*got, *back), (*want, *grads), strict=True):
        close(ours, theirs, mode, strides=False)


RANDOM_ARGUMENTS: dict[str, tuple] = {
    "bernoulli_.float": (0.3,), "random_.to": (10,), "random_.from": (-5, 6), "geometric_.default": (0.25,),
    "native_dropout.default": (0.25, True), "multinomial.default": (2,), "normal.Tensor_float": (2.0,),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(RANDOM - set(attention.OPS)))
@pytest.mark.parametrize("place", [None, [[4, 12], [[[0, 4], [6, 12]]]]], ids=["whole", "piece"])
def test_both_engines_draw_the_same_numbers(name: str, place: list | None) -> None:
    x = torch.rand(4, 6)
    rest: tuple = RANDOM_ARGUMENTS.get(name.removeprefix("aten."), ())
    first: tuple = (x,)
    if name == "aten.randperm.default":
        first, place = (12,), place and [[12], [[[6, 12]]]]
    if name in ("aten.bernoulli_.Tensor", "aten.normal.Tensor_Tensor"):
        rest = (torch.rand(4, 6),)
    if name == "aten.normal.float_Tensor":
        first = (1.0, x)
    memory = Arrays()
    given = [memory[a] if isinstance(a, torch.Tensor) else a for a in (*first, *rest)]
    want = torch_random.bind(name, place)(*first, *rest, seed=5, counter=6)
    got = resolve(name, place)(*given, seed=5, counter=6)
    for ours, theirs in zip(flat(got), flat(want), strict=True):
        close(np.asarray(ours).astype(arrays.DTYPE[NAME[theirs.dtype]]), theirs, name)


# ---- the engine in an executor


def bench() -> Bench:
    return Bench(engine=ENGINE)


def test_views_alias_and_writes_go_through_them() -> None:
    b = bench()
    b.do("op", op("aten.arange.start_step", [0, 12, 1], 0, [["new", [[12], [1], 0, "float32"], -1]]), 1)
    steps: list[tuple[str, list, int, int]] = [
        ("view.default", [T(0), [3, 4]], 1, 2),
        ("t.default", [T(0)], 2, 3),
        ("slice.Tensor", [T(0), 0, 1, 3], 3, 4),
        ("select.int", [T(0), 1, 2], 4, 5),
        ("as_strided.default", [T(0), [2, 2], [4, 1], 5], 5, 6),
        ("expand.default", [T(0), [2, 2, 2]], 6, 7),
        ("select.int", [T(0), 0, 1], 5, 8),
    ]
    for name, args, source, made in steps:
        b.do("op", op(f"aten.{name}", args, 1, [["view", None, 0]]), source, made)
    b.do("op", op("aten.add_.Scalar", [T(0), V(0)], 1, [["same", None, 0]], values=1), 8, 100.0)
    assert not b.sent
    assert all(arrays.owner(b[i]) is b[1] for i in range(2, 9))
    assert b[1].tolist() == [*range(10), 110, 11]  # t[1:3][:, 2][1] is element 10
    assert b[6].tolist() == [[5, 6], [9, 110]] and b[7][1].tolist() == b[6].tolist()
    assert ENGINE.spec(b[6]) == Spec((2, 2), (4, 1), 5, "float32")
    assert b.executor.stats()["live_bytes"] == 48


def test_memory_beyond_a_storage_is_not_reached() -> None:
    b = bench()
    b.put(_1=np.zeros(4, np.float32))
    for size, stride, start in (([5], [1], 0), ([2], [3], 1), ([1], [1], -1), ([2, 2], [2, 2], 0)):
        b.do("op", op("aten.as_strided.default", [T(0), size, stride, start], 1, [["view", None, 0]]), 1, 2)
    assert [m.kind for m, _ in b.sent] == ["op"] * 4


@pytest.mark.parametrize("accumulate", [False, True])
def test_rows_are_put_by_indices_that_are_there(accumulate: bool) -> None:
    put, values = TABLE["aten.index_put_.default"], np.ones((2, 2), np.float32)
    for row in (3, 5, -4):
        with pytest.raises(IndexError):
            put(np.zeros((3, 2), np.float32), [np.array([0, row])], values, accumulate)
    found = put(np.zeros((3, 2), np.float32), [np.array([2, -1])], values, accumulate)
    assert found.tolist() == [[0, 0], [0, 0], [1 + accumulate] * 2]


def test_a_missing_op_is_unsupported_by_name() -> None:
    b = bench()
    b.put(_1=np.ones((2, 3), np.float32))
    b.do("op", op("aten.convolution.default", [T(0)], 1, [new(torch.empty(2))]), 1, 2)
    b.do(
        "op",
        op("aten._to_copy.default", [T(0)], 1, [new(torch.empty(2, 3).bfloat16())], dtype=Const("dtype", "bfloat16")),
        1,
        3,
    )
    b.do("op", op("prims.add.default", [T(0)], 1, [new(torch.empty(2))]), 1, 4)
    b.do("op", op("aten.t_.default", [T(0)], 1, [["same", None, 0]]), 1)
    b.executor.uploads.receive(Data(9, 0, 4), b"\0" * 4)
    b.do("upload", {"shape": [2], "stride": [1], "dtype": "bfloat16"}, 5, 9)
    assert [m.kind for m, _ in b.sent] == ["unsupported"] * 5
    words = ("aten.convolution.default", "bfloat16", "prims.add.default", "aten.t_.default", "bfloat16")
    assert all(word in m.message for word, (m, _) in zip(words, b.sent, strict=True))
    assert ENGINE.spec(b[3]) == Spec((2, 3), (3, 1), 0, "bfloat16")  # a placeholder: collectives can take part


def test_a_failed_op_leaves_a_placeholder() -> None:
    b = bench()
    b.put(_1=np.ones((2, 3), np.float32), _2=np.ones((4, 5), np.float32))
    b.do("op", op("aten.mm.default", [T(0), T(1)], 2, [["new", [[2, 5], [1, 2], 0, "float32"], -1]]), 1, 2, 3)
    assert b.sent[0][0].kind == "op" and "mat1 and mat2 shapes" in b.sent[0][0].message
    assert ENGINE.spec(b[3]) == Spec((2, 5), (1, 2), 0, "float32") and not b[3].any()


def test_uploads_and_fetches() -> None:
    b, x = bench(), np.arange(12, dtype=np.float32)
    for n, (shape, stride) in enumerate((([3, 4], [4, 1]), ([3, 4], [1, 3]), ([], []), ([0, 4], [4, 1]))):
        size = 4 * int(np.prod(shape))
        b.executor.uploads.receive(Data(9, 0, size), x.tobytes()[:size])
        b.do("upload", {"shape": shape, "stride": stride, "dtype": "float32"}, n, 9)
        b.do("fetch", {}, n, 50)
        assert b"".join(bytes(f[0]) for _, f in b.sent if f) == x.tobytes()[:size]
        b.sent.clear()
    assert ENGINE.spec(b[1]).stride == (1, 3)


@pytest.mark.parametrize("shape", [(6, 4), (1, 3), ()])
def test_collectives_of_arrays(shape: tuple[int, ...]) -> None:
    def team(rank: int) -> dict:
        return {"id": 1, "workers": [0, 1], "rank": rank, "offset": 4096, "bytes": 4096}

    box = [[[0, n] for n in shape]]

    def part(b: Bench, rank: int) -> list:
        b.put(_1=np.full(shape, rank + 1.0, np.float32), _2=np.full(shape[::-1], rank + 3.0, np.float32).T)
        for tensor, reduction in ((1, "sum"), (2, "max")):
            b.do("all_reduce", {"team": team(rank), "op": reduction}, tensor)
        channel = {"peer": 1 - rank, "offset": 65536, "bytes": 1024, "slots": 2}
        if rank:
            b.do("recv", {"shape": list(shape), "dtype": "float32", "parts": [[channel, box]]}, 3)
        else:
            b.do("send", {"channel": channel, "boxes": box}, 2)
        b.do("shard", {"shape": list(shape), "dtype": "float32", "boxes": box}, 1, 4)
        assert not b.sent
        return [b[i] for i in ((1, 2, 3, 4) if rank else (1, 2, 4))]

    for found in world(2, part, ENGINE):
        assert all(x.shape == shape for x in found)
        assert [x.flat[0] for x in found] == [3.0, *[4.0] * (len(found) - 2), 3.0]


# ---- workers


@pytest.fixture(scope="module")
def numpy_server() -> Iterator[Any]:
    from gt.launch import local

    running = local.start(8, backend="numpy")
    yield running
    running.stop()


@pytest.fixture
def connect(numpy_server: Any) -> Iterator[Callable[[str], None]]:
    import gt

    yield lambda config: gt.connect(numpy_server.address, config, token=numpy_server.token)
    gc.collect()
    gt.shutdown()


@pytest.mark.slow
def test_the_demo_trains_as_torch_does_in_processes_without_torch(connect: Callable[[str], None]) -> None:
    import gt

    connect(str(CONFIGS.parent / "examples" / "tuning_demo" / "sharding_config.yaml"))
    losses, gradients, _ = train(lambda: mini(gt.signal.groups()), "remote", OPTIMIZERS["adamw foreach"], 2)
    wanted, first, _ = train(lambda: mini(()), "cpu", OPTIMIZERS["adamw foreach"], 2)
    assert losses == pytest.approx(wanted, rel=1e-5)
    for got, want in zip(gradients, first, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm().clamp(min=1e-6)
    workers = [Path(f"/proc/{pid}") for pid, line in started().items() if "gt.worker" in line]
    assert len(workers) >= 8
    plain = [w for w in workers if "libtorch" not in (w / "maps").read_text()]
    assert len(plain) == 8  # others are those of the torch server that tests share
    for worker in plain:
        resident = int((worker / "status").read_text().split("VmRSS:")[1].split()[0]) / 1024
        assert resident < 60, f"{worker} has {resident:.0f} MB"


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gpt_trains_as_torch_does(name: str, connect: Callable[[str], None]) -> None:
    connect("")
    losses, _, _ = train(GPT, "remote", OPTIMIZERS[name])
    assert losses == pytest.approx(train(GPT, "cpu", OPTIMIZERS[name])[0], rel=1e-5)


def test_an_unsupported_op_is_named_on_the_users_line(connect: Callable[[str], None]) -> None:
    connect("")
    x = torch.ones(1, 1, 4, 4, device="remote")
    y = F.conv2d(x, x)
    with pytest.raises(UnsupportedOp, match=r"aten\.convolution\.default"):
        y.cpu()
    assert (x + 1).sum().item() == 32.0
