"""Programs whose segments are compiled: the numbers of the instruction list, as much shared memory, and why what is not is not.

Where Inductor itself is not the matter its place is taken by the traced graph, so that thousands of segments take seconds.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import gt
from gt.dispatcher.programs.passes import bucket_reductions
from gt.ir.template import T, V
from gt.wire.messages import OpError
from gt.worker.engine.numpy import NumpyEngine
from gt.worker.engine.torch import TorchEngine
from tests.helpers import CONFIGS, longer
from tests.helpers.compiled_parts import Script, inputs, program, replay, report, same
from tests.helpers.models import GPT, accumulating, mini
from tests.helpers.serving import serving, settled
from tests.helpers.worker_parts import op

HAVE = any(map(shutil.which, ("g++", "clang++")))
compiler = pytest.mark.skipif(not HAVE, reason="no C++ compiler is found")


# ---- segments by hand


@pytest.mark.usefixtures("graphs", "plain_threads")
def test_random_programs_have_the_values_and_the_memory_of_their_instructions() -> None:
    compiled = 0
    for seed in range(250):
        script = program(seed)
        got, want = script.bench("inductor", inputs(seed)), script.bench("eager", inputs(seed))
        for _ in range(3):
            replay(got)
            replay(want)
            same(got, want, rtol=0)
        found = report(got)
        compiled += found["compiled"]
        assert all("memory that several of its inputs share" in why for _, why in found["reasons"])
    assert compiled > 300


@compiler
@pytest.mark.usefixtures("plain_threads")
def test_random_programs_compiled() -> None:
    for seed in range(6):
        script = program(seed)
        got, want = script.bench("inductor", inputs(seed)), script.bench("eager", inputs(seed))
        for _ in range(4):
            replay(got)
            replay(want)
            same(got, want)
        assert report(got)["compiled"] >= 1 and not report(got)["reasons"], report(got)["reasons"]


@compiler
@pytest.mark.usefixtures("plain_threads")
@pytest.mark.parametrize("name, sizes", [("unsafe_split.Tensor", 2), ("unsafe_split_with_sizes.default", [1, 3])])
def test_writes_through_views_that_no_schema_declares_reach_their_base(name: str, sizes: Any) -> None:
    """As those of an LSTM cell, which splits its gates so and changes each in place."""
    held = inputs(0)
    script = Script(held)
    (x,) = script.op("aten.mul.Scalar", [T(0), 2.5], [1])
    first, second = script.op(f"aten.{name}", [T(0), sizes, 1], [x])
    script.op("aten.sigmoid_.default", [T(0)], [first])
    script.op("aten.tanh_.default", [T(0)], [second])
    script.op("aten.exp.default", [T(0)], [x])
    got, want = script.bench("inductor", held), script.bench("eager", held)
    for _ in range(3):
        replay(got)
        replay(want)
        same(got, want)
    assert report(got)["compiled"] == 1, report(got)["reasons"]


def layers(count: int, held: dict[int, torch.Tensor]) -> Script:
    """Two ops, and what cannot be compiled, so often."""
    script, x = Script(held), 1
    for _ in range(count):
        (y,) = script.op("aten.mm.default", [T(0), T(1)], [x, 3])
        (z,) = script.op("aten.tanh.default", [T(0)], [y])
        script.free(y)
        script.stop()
        x = z
    return script


def test_a_form_is_compiled_once_however_often_it_comes(graphs: list) -> None:
    held = inputs(0)
    got = layers(6, held).bench("inductor", held)
    replay(got, 3)
    found = report(got)
    assert (found["segments"], found["compiled"], found["distinct"]) == (6, 6, 1) and len(graphs) == 1
    generating, kernels, first_call = found["seconds"]  # of the one form, however often it comes
    assert generating > 0 and kernels >= 0 and first_call > 0


def test_segments_that_differ_in_the_order_of_views_alone_are_one_form(graphs: list) -> None:
    """A client may record them in another order when it meets an op for the first time."""
    held = inputs(0)
    script = Script(held)
    for late in (False, True):
        if late:
            (rows,) = script.op("aten.view.default", [T(0), [4, 4]], [1])
        (turned,) = script.op("aten.t.default", [T(0)], [3])
        if not late:
            (rows,) = script.op("aten.view.default", [T(0), [4, 4]], [1])
        (product,) = script.op("aten.mm.default", [T(0), T(1)], [rows, turned])
        script.op("aten.tanh.default", [T(0)], [product])
        script.free(rows, turned, product)
        script.stop()
    got, want = (script.bench(backend, dict(held)) for backend in ("inductor", "eager"))
    for bench in (got, want):
        replay(bench, 2)
    same(got, want, rtol=0)
    assert report(got)["distinct"] == 1 and len(graphs) == 1


def test_ops_on_complex_numbers_end_segments_and_the_rest_is_compiled(graphs: list) -> None:
    held = inputs(0)
    script = Script(held)
    (y,) = script.op("aten.tanh.default", [T(0)], [1])
    (z,) = script.op("aten.exp.default", [T(0)], [y])
    (waves,) = script.op("aten._fft_r2c.default", [T(0), [1], 0, True], [z])
    (sizes,) = script.op("aten.abs.default", [T(0)], [waves])
    (pairs,) = script.op("aten.view_as_real.default", [T(0)], [waves])
    (sums,) = script.op("aten.sum.dim_IntList", [T(0), [2]], [pairs])
    (last,) = script.op("aten.mul.Tensor", [T(0), T(1)], [sums, sizes])
    script.op("aten.relu.default", [T(0)], [last])
    script.free(waves, pairs)
    got, want = (script.bench(backend, dict(held)) for backend in ("inductor", "eager"))
    for bench in (got, want):
        replay(bench, 2)
    same(got, want)
    found = report(got)
    assert (found["segments"], found["compiled"], found["reasons"], len(graphs)) == (2, 2, [], 2)


def test_an_index_by_numbers_is_compiled_with_what_surrounds_it(graphs: list) -> None:
    """torch has one tag for it and for an index by masks, whose shape depends on values: that has no spec."""
    held = {1: torch.randn(5, 4), 2: torch.tensor([3, -1, 0])}
    script = Script(held)
    (doubled,) = script.op("aten.add.Tensor", [T(0), T(1)], [1, 1])
    (rows,) = script.op("aten.index.Tensor", [T(0), [T(1)]], [doubled, 2])
    script.op("aten.tanh.default", [T(0)], [rows])
    got, want = script.bench("inductor", held), script.bench("eager", held)
    for _ in range(3):
        replay(got)
        replay(want)
        same(got, want, rtol=0)
    assert (report(got)["segments"], report(got)["compiled"], report(got)["reasons"]) == (1, 1, [])
    engine = TorchEngine("cpu")
    payload = {**op("aten.index.Tensor", [T(0), [T(1)]], 2, [["new", None, -1]])}
    assert not engine.compiler("inductor")[0].fits(payload)  # type: ignore[union-attr]


def test_ops_on_lists_begin_a_segment_of_their_own(graphs: list) -> None:
    """So a backward pass is one graph, whether or not the optimizer counts a step after it."""
    held = inputs(0)
    script = Script(held)
    for steps in (0, 1, 2):
        (y,) = script.op("aten.tanh.default", [T(0)], [1])
        (z,) = script.op("aten.mul.Tensor", [T(0), T(1)], [y, 3])
        script.free(y, z)
        for _ in range(steps):
            script.op("aten._foreach_add_.Scalar", [[T(0), T(1)], 1.0], [1, 3])
        script.stop()
    got, want = (script.bench(backend, {i: t.clone() for i, t in held.items()}) for backend in ("inductor", "eager"))
    for bench in (got, want):
        replay(bench, 2)
    same(got, want, rtol=0)
    assert (report(got)["segments"], report(got)["distinct"], len(graphs)) == (4, 2, 2)


def test_a_program_that_is_carried_out_once_compiles_the_segments_that_set_the_peak_of_memory(graphs: list) -> None:
    """Others save nothing, and would be compiled for one call."""
    held = inputs(0)
    script, kept = Script(held), []
    for wide in (1, 1, 64, 1):
        (y,) = script.op("aten.tanh.default", [T(0)], [1])
        (large,) = script.op("aten.repeat.default", [T(0), [wide, 1]], [y])
        (large2,) = script.op("aten.exp.default", [T(0)], [large])
        (total,) = script.op("aten.sum.dim_IntList", [T(0), [0]], [large2])
        script.free(y, large, large2)
        kept.append(total)
        script.stop()
        if len(kept) < 3:  # alive to the end
            kept += script.op("aten.repeat.default", [T(0), [500, 1]], [1])
            script.stop()
    got, want = (script.bench(backend, dict(held), once=True) for backend in ("cudagraphs", "eager"))
    for bench in (got, want):
        replay(bench, 1)
    same(got, want)
    assert (report(got)["segments"], report(got)["compiled"], len(graphs)) == (4, 1, 1)
    assert all(i in got.executor.tensors for i in kept)


def test_parts_of_a_batch_are_one_form(graphs: list) -> None:
    """Views that say where in an input a part lies are made before the segment."""
    held = {1: torch.randn(8, 4), 3: torch.randn(4, 4)}
    script = Script(held)
    for n in range(4):
        (part,) = script.op("aten.slice.Tensor", [T(0), 0, 2 * n, 2 * n + 2], [1])
        (y,) = script.op("aten.mm.default", [T(0), T(1)], [part, 3])
        script.op("aten.relu.default", [T(0)], [y])
        script.free(part, y)
        script.stop()
    got, want = (script.bench(backend, dict(held)) for backend in ("inductor", "eager"))
    for bench in (got, want):
        replay(bench, 2)
    same(got, want)
    assert report(got)["distinct"] == 1 and len(graphs) == 1


def test_a_part_that_a_worker_keeps_is_taken_within_a_segment(graphs: list) -> None:
    """One of one box: losses are taken of a worker's rows, and their gradient comes whole."""
    held = inputs(0)
    script = Script(held)
    (y,) = script.op("aten.tanh.default", [T(0)], [3])
    (z,) = script.op("aten.exp.default", [T(0)], [script.shard(y, [[[1, 3], [0, 4]]])])
    script.op("aten.relu.default", [T(0)], [script.shard(z, [[[0, 1], [0, 4]], [[1, 2], [0, 4]]])])
    got, want = (script.bench(backend, dict(held)) for backend in ("inductor", "eager"))
    replay(got, 3)
    replay(want, 3)
    same(got, want)
    assert report(got)["compiled"] == 1 and [n.target for n in graphs[0].graph.nodes if "slice" in n.name]


@pytest.mark.usefixtures("graphs")
def test_a_tensor_that_ends_within_a_segment_is_never_made_and_a_freed_one_is_gone() -> None:
    held = inputs(0)
    script = Script(held)
    (y,) = script.op("aten.tanh.default", [T(0)], [3])
    (z,) = script.op("aten.mul.Tensor", [T(0), T(0)], [y])
    script.free(y, 4)
    got = script.bench("inductor", dict(held))
    replay(got)
    got.put(_4=torch.ones(1))
    replay(got)
    assert sorted(got.executor.tensors) == [1, 2, 3, z] and report(got)["compiled"] == 1


@pytest.mark.usefixtures("graphs")
def test_inputs_that_come_to_lie_otherwise_are_not_given_to_code_for_others() -> None:
    held = inputs(0)
    script = Script(held)
    script.op("aten.mul_.Scalar", [T(0), V(0)], [1], [0.5])
    script.op("aten.add_.Tensor", [T(0), T(1)], [3, 1])
    got, want = (script.bench(backend, {1: torch.ones(4, 4), 3: torch.ones(4, 4)}) for backend in ("inductor", "eager"))
    for bench in (got, want):
        replay(bench, 2)
    same(got, want)
    assert report(got)["compiled"] == 1
    for bench in (got, want):  # now the two share memory, then one lies transposed, then the other, which is once too often
        bench.executor.tensors[3] = bench.executor.tensors[1]
        replay(bench, 2)
    same(got, want)
    for turn in range(2):
        for bench in (got, want):
            square, plain = torch.ones(4, 4).t(), torch.ones(4, 4)
            bench.executor.tensors.update({1: plain, 3: square} if turn else {1: square, 3: plain})
            replay(bench, 2)
        same(got, want)
    assert not report(got)["compiled"] and "another layout" in str(report(got)["reasons"])


def test_a_result_of_compiled_code_that_shares_memory_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor may give one result as a part of another, or laid out otherwise; the ops would not."""
    import torch._inductor.compile_fx as module

    whole: list = []

    def compile_fx(graph: Any, fakes: list) -> Callable:
        def run(*args: torch.Tensor) -> list[torch.Tensor]:
            a, b = graph(*args)
            whole[:] = [torch.stack([a, b.t().contiguous().t()])]
            return [whole[0][0], b.t().contiguous().t()]

        return run

    monkeypatch.setattr(module, "compile_fx", compile_fx)
    held = inputs(0)
    script = Script(held)
    script.op("aten.tanh.default", [T(0)], [3])
    script.op("aten.relu.default", [T(0)], [3])
    script.stop()
    got, want = (script.bench(backend, dict(held)) for backend in ("inductor", "eager"))
    for _ in range(3):
        replay(got)
        replay(want)
        same(got, want)
    assert report(got)["compiled"] == 1


def test_a_result_without_its_dims_of_size_one_gets_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor drops them where it sums in its wrapper. Nothing fails for it, and the graph stays compiled."""
    import torch._inductor.compile_fx as module

    def compile_fx(graph: Any, fakes: list) -> Callable:
        return lambda *args: [r.reshape([n for n in r.shape if n != 1]) for r in graph(*args)]

    monkeypatch.setattr(module, "compile_fx", compile_fx)
    held = {1: torch.arange(24.0).view(2, 3, 4), 2: torch.ones(1, 1, 4)}
    script = Script(held)
    (total,) = script.op("aten.sum.dim_IntList", [T(0), [0, 1], True], [1])
    script.op("aten.add_.Tensor", [T(0), T(1)], [2, total])
    script.op("aten.mul.Tensor", [T(0), V(0)], [total], [2.0])
    script.stop()
    got, want = (script.bench(backend, {i: t.clone() for i, t in held.items()}) for backend in ("inductor", "eager"))
    for _ in range(3):
        replay(got)
        replay(want)
        same(got, want)
    assert not got.sent and report(got)["compiled"] == 1


@pytest.mark.parametrize("fault", ["raises", "another dtype", "another size"])
def test_code_that_does_not_work_at_first_changes_nothing_and_the_step_goes_on(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Also where it had written to what it was given: instructions do the step, and the reason is told."""
    import torch._inductor.compile_fx as module

    def compile_fx(graph: Any, fakes: list) -> Callable:
        def run(*args: torch.Tensor) -> list[torch.Tensor]:
            results = graph(*args)
            if fault == "raises":
                raise RuntimeError("a kernel does not load")
            return [r.double() if fault == "another dtype" else r.reshape(-1)[:1] for r in results]

        return run

    monkeypatch.setattr(module, "compile_fx", compile_fx)
    held = {1: torch.arange(8.0).view(4, 2), 2: torch.tensor([1, 2]), 3: torch.zeros(2, 2)}
    script = lookup(writes=True)
    got, want = (script.bench(backend, {i: t.clone() for i, t in held.items()}) for backend in ("inductor", "eager"))
    for _ in range(4):
        replay(got)
        replay(want)
        same(got, want)
    assert not got.sent and not report(got)["compiled"]
    assert "compiled code failed" in str(report(got)["reasons"])


def lookup(writes: bool) -> Script:
    """A table's rows by number, added to something."""
    held = {1: torch.arange(8.0).view(4, 2), 2: torch.tensor([1, 2]), 3: torch.zeros(2, 2)}
    script = Script(held)
    (rows,) = script.op("aten.embedding.default", [T(0), T(1)], [1, 2])
    if writes:
        script.op("aten.add_.Tensor", [T(0), T(1)], [3, rows])
    (y,) = script.op("aten.mul.Tensor", [T(0), V(0)], [rows], [2.0])
    script.op("aten.t.default", [T(0)], [y])
    script.stop()
    return script


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.usefixtures("graphs")
def test_an_op_that_fails_in_compiled_code_is_reported_and_leaves_placeholders(writes: bool) -> None:
    held = {1: torch.arange(8.0).view(4, 2), 2: torch.tensor([1, 2]), 3: torch.zeros(2, 2)}
    script = lookup(writes)
    got = script.bench("inductor", held)
    replay(got, 2)
    assert not got.sent and report(got)["compiled"] == 1
    held[2].fill_(99)
    replay(got)
    ((trouble, _),) = got.sent[:1]
    assert isinstance(trouble, OpError) and trouble.kind == "op" and "index out of range" in trouble.message
    made = [i for i in got.executor.tensors if i > 1000]
    assert made == sorted(i for i in script.held if i > 1000)
    got.sent.clear()
    held[2].fill_(3)
    replay(got)
    assert not got.sent and report(got)["compiled"] == 1
    assert torch.equal(got[made[-1]], 2 * held[1][3].repeat(2, 1).t())


@pytest.mark.usefixtures("plain_threads")
def test_without_a_compiler_programs_run_as_instructions_and_say_why() -> None:
    import torch._inductor.config as settings
    import torch._inductor.cpp_builder as builder

    for name in ("get_cpp_compiler", "_get_cpp_compiler"):
        cached = getattr(builder, name, None)
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    held = {1: torch.randn(5, 7), 3: torch.randn(5, 7)}
    script = Script(held)
    (y,) = script.op("aten.mul.Tensor", [T(0), T(1)], [1, 3])
    script.op("aten.cos.default", [T(0)], [y])
    with settings.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        got, want = (script.bench(backend, dict(held)) for backend in ("inductor", "eager"))
        for bench in (got, want):
            replay(bench, 3)
    same(got, want)
    found = report(got)
    assert found["compiled"] == 0 and [n for n, _ in found["reasons"]] == [1], found


def test_while_it_compiles_a_worker_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx as module

    said: list = []
    monkeypatch.setattr(module, "compile_fx", lambda graph, fakes: (said.append(got.executor.where()), graph)[1])
    held = inputs(0)
    got = layers(2, held).bench("inductor", held)
    replay(got)
    assert said == [(0, 0, "compile", 0)]
    replay(got)
    assert got.executor.where() == (0, 0, "program", 0)


def test_an_engine_without_a_compiler_says_so() -> None:
    script = layers(2, inputs(0))
    got = script.bench("inductor", {i: t.numpy() for i, t in inputs(0).items()}, NumpyEngine())
    replay(got, 2)
    assert not got.sent and report(got)["why"] == "the numpy engine has no compiler" and report(got)["backend"] == "eager"


# ---- steps


def small(layers: int) -> nn.Module:
    return mini(gt.signal.groups(), num_layers=layers, hidden_size=32, num_heads=4, intermediate_size=64)


def trained(model: nn.Module, optimizer: Callable, compile: Callable, parts: int, steps: int) -> tuple[Any, list[torch.Tensor]]:
    """The step, then losses and weights."""
    torch.manual_seed(0)
    data = torch.randint(64, (steps, 2 * parts, 17))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    step = accumulating(model.to("remote"), optimizer(model.parameters()), parts)
    run = compile(step)
    remote = [(x[:, :-1].contiguous().to("remote"), x[:, 1:].contiguous().to("remote")) for x in data]
    losses = [run(x, y) for x, y in remote]  # kept: those of each step, whatever the next does
    return run, [t.detach().cpu() for t in (*losses, *model.parameters())]


ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, fused=True)  # rounding alone moves a weight whose gradient is none
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm().clamp(min=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "schedule", "optimizer"), longer([("tp2", None, ADAMW), ("pp2", "1f1b", MOMENTUM)], [("tp2", None, ADAMW)])
)
@pytest.mark.usefixtures("graphs", "plain_threads")
def test_steps_on_two_workers(config: str, schedule: str | None, optimizer: Callable) -> None:
    """The same bits, since the graphs are; and no more forms where there are more micro-batches or layers."""
    with serving(2, backend="torch") as server:
        gt.connect(server.address, config=str(CONFIGS / f"{config}.yaml"))
        try:
            forms = {}
            for count, parts in ((4, 3), (4, 5), (6, 3)):
                _, want = trained(small(count), optimizer, lambda step: step, parts, 5)
                compile = partial(gt.compile, backend="inductor", schedule=schedule)
                run, got = trained(small(count), optimizer, compile, parts, 5)
                for a, b in zip(got, want, strict=True):
                    assert torch.equal(a, b)
                assert run._programs[0].replays >= 2, run.explain()
                plans = [worker["plans"][0] for worker in settled()["workers"]]
                assert all(plan["compiled"] == plan["segments"] > 10 for plan in plans), plans
                forms[count, parts] = [plan["distinct"] for plan in plans]
            assert forms[4, 3] == forms[4, 5] == forms[6, 3] and max(forms[4, 3]) <= 20, forms
        finally:
            gt.shutdown()


@pytest.mark.usefixtures("graphs", "plain_threads")
def test_a_data_parallel_step_is_the_same_with_its_optimizer_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """On parameters whose gradients are summed, and on those whose are not yet."""
    moved = bucket_reductions._moved
    monkeypatch.setattr(bucket_reductions, "_moved", lambda rows, context: moved(rows, replace(context, bucket=1 << 14)))
    counts: list[int] = []
    two = bucket_reductions._split_list_op
    monkeypatch.setattr(
        bucket_reductions, "_split_list_op", lambda *args: (rows := list(two(*args)), counts.append(len(rows)))[0]
    )
    with serving(2, backend="torch") as server:
        gt.connect(server.address, config=str(CONFIGS / "dp2.yaml"))
        try:
            _, want = trained(small(2), ADAMW, lambda step: step, 1, 5)
            run, got = trained(small(2), ADAMW, partial(gt.compile, backend="inductor"), 1, 5)
            assert all(map(torch.equal, got, want)) and run._programs[0].replays >= 2, run.explain()
        finally:
            gt.shutdown()
    assert counts == [2, 2]


@compiler
@pytest.mark.slow
@pytest.mark.usefixtures("plain_threads", "one")
def test_a_transformer_compiled_is_the_same_within_rounding() -> None:
    _, want = trained(GPT(), ADAMW, lambda step: step, 1, 20)
    run, got = trained(GPT(), ADAMW, partial(gt.compile, backend="inductor"), 1, 20)
    close(got, want)
    said = run.explain()
    assert run._programs[0].replays >= 16 and "backend inductor on w0: " in said and "not as asked for" not in said, said


@compiler
@pytest.mark.slow
@pytest.mark.usefixtures("plain_threads", "session")
def test_a_pipeline_compiled_is_the_same_within_rounding(session: Callable) -> None:
    session("pp_stage0: {shard: {axis: 0, workers: [0]}}\npp_stage1: {shard: {axis: 0, workers: [1]}}\n")
    torch.manual_seed(0)
    weights, data = [torch.randn(16, 16) / 4 for _ in range(4)], torch.randn(20, 8, 16)

    def train(compile: Callable) -> tuple[Any, list[torch.Tensor]]:
        held = [nn.Parameter(w.to("remote")) for w in weights]
        optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), device="remote")
            for part in gt.microbatches(x, 4):
                with gt.signal.context("pp_stage0"):
                    y = torch.tanh(torch.tanh(part @ held[0]) @ held[1])
                with gt.signal.context("pp_stage1"):
                    loss = (torch.tanh(y @ held[2]) @ held[3]).square().mean()
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            return total

        run = compile(step)
        return run, [t.detach().cpu() for t in (*[run(x.to("remote")) for x in data], *held)]

    _, want = train(lambda step: step)
    run, got = train(partial(gt.compile, backend="inductor", schedule="1f1b"))
    close(got, want)
    said = run.explain()
    assert run._programs[0].replays >= 16 and "backend inductor on w0" in said, said
    assert "compiled code took " in said and " s to generate, " in said


@pytest.mark.usefixtures("plain_threads", "one")
def test_what_workers_say_is_of_all_calls_until_now() -> None:
    slow = torch.ones(2048, 2048, device="remote")
    step = gt.compile(lambda x: x + 1, backend="inductor")
    for _ in range(8):
        slow = slow @ slow  # what workers are at when they are asked
    last = [step(torch.full((2,), float(n), device="remote")) for n in range(4)][-1]  # nothing is waited for
    assert "backend inductor on w0: " in step.explain()
    assert last.tolist() == [4.0] * 2


@pytest.mark.usefixtures("plain_threads", "one")
def test_an_error_is_still_raised_after_workers_were_asked_about_a_program() -> None:
    step = gt.compile(lambda x: x + 1, backend="inductor")
    for n in range(3):
        step(torch.full((2,), float(n), device="remote"))
    torch.index_select(torch.ones(3, device="remote"), 0, torch.tensor([7], device="remote"))
    assert "backend inductor on w0: " in step.explain()
    with pytest.raises(gt.OpFailed, match="index_select"):
        torch.remote.synchronize()
    torch.remote.synchronize()


@pytest.mark.usefixtures("plain_threads", "one")
def test_graphs_that_need_a_gpu_are_not_used_without_one_and_that_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")

    @partial(gt.compile, backend="cudagraphs")
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    for n in range(4):
        assert step(torch.full((2,), float(n))).tolist() == [n + 1.0] * 2
    assert "backend inductor on w0: no CUDA device, so inductor; 0 segments" in step.explain()


def test_a_backend_that_is_none_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match=r"'tvm' is not known: want one of eager, inductor, cudagraphs"):
        gt.compile(lambda: None, backend="tvm")


# ---- convolutions


class Residual(nn.Module):
    """Blocks as ResNets have them, with what changes the layout: a view before the head, and a norm over groups."""

    def __init__(self, wide: int = 72) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, wide, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(wide)
        self.depthwise = nn.Conv2d(wide, wide, 3, 1, 1, groups=wide)
        self.grouped = nn.GroupNorm(8, wide)
        self.point = nn.Conv2d(wide, wide, 1)
        self.head = nn.Linear(wide * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = x + self.point(torch.relu(self.grouped(self.depthwise(x))))
        x = nn.functional.max_pool2d(x, 2)
        tokens = x.flatten(2).transpose(1, 2)  # views, as attention over positions makes them
        tokens.mul_(0.5)
        return self.head(x.flatten(1)) + tokens.mean()


@pytest.mark.usefixtures("plain_threads")
def test_convolutions_are_given_channels_last_and_the_numbers_stay(graphs: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """All operands of convolutions are so in the traced graph; losses, weights and strides of results are torch's."""
    from gt.worker.engine.torch.compiler.inductor import Inductor

    made = Inductor.__init__

    def init(self: Inductor, *given: Any) -> None:
        made(self, *given)
        self.channels_last = True

    monkeypatch.setattr(Inductor, "__init__", init)
    data = torch.randn(6, 4, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def train(device: str, compile: Callable) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Residual().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        def step(x: torch.Tensor) -> torch.Tensor:
            out = model(x)
            loss = out.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = compile(step)
        losses = [run(x.to(device)) for x in data]
        grads = [p.grad for p in model.parameters()]
        assert [g.stride() for g in grads] == [p.stride() for p in model.parameters()]
        return [t.detach().cpu() for t in (*losses, *model.parameters(), *model.buffers(), *grads)]

    want = train("cpu", lambda step: step)
    with serving(1, backend="torch") as server:
        gt.connect(server.address)
        try:
            got = train("remote", partial(gt.compile, backend="inductor"))
        finally:
            gt.shutdown()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    calls = [(node, 2 if node.target is torch.ops.aten.convolution.default else 3) for node in nodes if "conv" in node.name]
    assert len(calls) >= 6
    for node, count in calls:
        for operand in node.args[:count]:
            if isinstance(operand, torch.fx.Node):
                assert operand.meta["val"].is_contiguous(memory_format=torch.channels_last), (node, operand)
