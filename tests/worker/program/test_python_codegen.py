"""Runs of a program's ops as straight code: all that the instructions one by one leave behind, also where some of them fail."""

from __future__ import annotations

import copy
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gt
from gt.ir.instr import FREE, Define
from gt.ir.template import T, V
from gt.worker.program import python_codegen
from tests.helpers.compiled_parts import Script, inputs, memory, program, replay
from tests.helpers.worker_parts import Bench, new, op


def one_by_one(script: Script, held: dict[int, torch.Tensor]) -> tuple[Bench, Callable[[], None]]:
    """An executor without a program, and what has it carry the same stream out."""
    bench = Bench()
    bench.executor.tensors.update(held)
    bench.executor.define([Define(100 + n, kind, payload).wire() for n, (kind, payload) in enumerate(script.defines)])
    lasting = sorted(i for i in script.held if i > 1000)
    code: list = [FREE, 0, len(lasting), *lasting] if lasting else []
    for n, (place, operands) in enumerate(script.rows):
        code += [FREE if place < 0 else 100 + place, n, *operands]
    return bench, lambda: bench.executor.run(code, 0)


def alike(got: Bench, want: Bench) -> None:
    a, b = got.executor.tensors, want.executor.tensors
    assert sorted(a) == sorted(b) and memory(a) == memory(b)
    for i in b:
        assert a[i].stride() == b[i].stride() and a[i].storage_offset() == b[i].storage_offset(), i
        assert torch.equal(a[i], b[i]), i
    assert [(m.seq, m.kind, m.message) for m, _ in got.sent] == [(m.seq, m.kind, m.message) for m, _ in want.sent]


def damaged(rng: random.Random, script: Script) -> Script:
    """Some of its ops cannot be done: a tensor that is not there, a definition that has no op, an output of another shape."""
    script = copy.copy(script)
    script.defines, script.rows = copy.deepcopy(script.defines), copy.deepcopy(script.rows)
    for _ in range(rng.randint(1, 3)):
        place, operands = rng.choice([row for row in script.rows if row[0] >= 0 and script.defines[row[0]][0] == "op"])
        payload, kind = script.defines[place][1], rng.random()
        if kind < 0.5:
            operands[0] = 777
        elif kind < 0.7:
            payload["op"] = "prims.add.default"
        elif any(out[0] == "new" for out in payload["outs"]):
            out = next(out for out in payload["outs"] if out[0] == "new")
            out[1] = [[7, 7], [7, 1], 0, "float32"]
    return script


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_codegen, "MIN_ROWS", 1)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("most", [5, 256])
def test_random_programs_leave_what_their_instructions_leave(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_codegen, "MAX_ROWS", most)
    troubles = 0
    for seed in range(150):
        script = program(seed, 25)
        for each in (script, damaged(random.Random(seed), script)):
            got, (want, run) = each.bench("eager", inputs(seed)), one_by_one(each, inputs(seed))
            for n in range(3):
                replay(got)
                run()
                alike(got, want)
                free = sum(place < 0 for place, _ in each.rows) + any(i > 1000 for i in each.held)  # rows of a program too
                assert got.executor.instructions == want.executor.instructions + (n + 1) * (free + 1)
            troubles += len(got.sent)
    assert troubles > 300


def chain(length: int) -> tuple[Bench, Callable[[], None]]:
    """x * (1 + 1/1000) + y so often, what is over freed at once."""
    x = torch.ones(2)
    bench = Bench()
    bench.put(_1=x, _2=torch.full((2,), 0.5))
    defines = [op("aten.mul.Tensor", [T(0), V(0)], 1, [new(x)], values=1), op("aten.add.Tensor", [T(0), T(1)], 2, [new(x)])]
    code: list = []
    for n in range(length // 2):
        last = 1 if n == 0 else 2 * n + 100
        code += [100, 2 * n, last, 1.001, 2 * n + 101, 101, 2 * n + 1, 2 * n + 101, 2, 2 * n + 102]
        code += [FREE, 2 * n + 1, 2, 2 * n + 101, last] if n else [FREE, 1, 1, 101]
    payload = {"code": code, "randoms": [], "actions": [], "backend": "eager", "channels": [], "once": False}
    rows = [Define(100 + n, "op", payload).wire() for n, payload in enumerate(defines)]
    bench.executor.define([*rows, Define(99, "program", payload).wire()])
    return bench, lambda: replay(bench)


def test_a_long_program_is_bound_in_time_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    cls, init = python_codegen.GeneratedFunction, python_codegen.GeneratedFunction.__init__
    monkeypatch.setattr(cls, "__init__", lambda self, *args: (sizes.append(len(args[1])), init(self, *args))[1])

    def bound(length: int) -> float:
        start = time.process_time()
        chain(length)
        return time.process_time() - start

    bound(100)
    short, long = min(bound(1_000) for _ in range(3)), bound(10_000)
    assert max(sizes) <= python_codegen.MAX_ROWS and sum(sizes) == 3 * 1_500 + 150 + 15_000
    assert long < 30 * short and long < 5  # measured: 9 times, 0.4 s


def test_ten_thousand_ops_have_the_value_that_torch_gives() -> None:
    bench, run = chain(10_000)
    run()
    want = torch.ones(2)
    for _ in range(5_000):
        want = want * 1.001 + 0.5
    (last,) = (i for i in bench.executor.tensors if i > 2)
    assert torch.equal(bench[last], want) and not bench.sent


class Probe(torch.Tensor):
    """Tells of each op that is given it."""

    told: Any = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.told is not None:
            cls.told(func)
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def probed(names: list[str], ended: int, monkeypatch: pytest.MonkeyPatch, told: Callable[[Any], None]) -> Bench:
    """Ops of one tensor in a row, the last of them given a Probe; the output of the second freed before it where asked."""
    bench, x = Bench(), torch.ones(3)
    bench.put(_1=x, _2=torch.ones(3).as_subclass(Probe))
    monkeypatch.setattr(Probe, "told", staticmethod(told))
    rows, code = [], []
    for n, name in enumerate(names):
        rows.append(Define(100 + n, "op", op(name, [T(0)], 1, [new(x)])).wire())
        code += [100 + n, n, 2 if n == len(names) - 1 else 1 if n == 0 else 9 + n, 10 + n]
        code += [FREE, n, 1, ended] if n == len(names) - 2 and ended else []
    payload = {"code": code, "randoms": [], "actions": [], "backend": "eager", "channels": [], "once": False}
    bench.executor.define([*rows, Define(99, "program", payload).wire()])
    return bench


OPS = ["aten.tanh.default", "aten.relu.default", "aten.exp.default", "aten.neg.default"]


def test_what_it_is_at_is_known_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list = []
    bench = probed(OPS, 0, monkeypatch, lambda func: seen.append((str(func), bench.executor.where())))
    replay(bench)
    assert seen == [("aten.neg.default", (12, 3, "op", 0))] and not bench.sent


def test_a_worker_that_makes_code_of_a_program_is_not_taken_for_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, seen = Bench(), []
    x = torch.ones(2)
    bench.put(_1=x)
    bench.do("op", op("aten.tanh.default", [T(0)], 1, [new(x)]), 1, 2)
    assert bench.executor.where() == (0, 100, "op", 0)
    cls, function = python_codegen.CodeGenerator, python_codegen.CodeGenerator.function
    monkeypatch.setattr(cls, "function", lambda *args: (seen.append(bench.executor.where()), function(*args))[1])
    code = [part for n in range(4) for part in (bench.number, n, 1 + n, 2 + n)]
    payload = {"code": code, "randoms": [], "actions": [], "backend": "eager", "channels": [], "once": False}
    bench.do("program", payload, 0, 0)
    assert seen == [(0, 100, "compile", 0)]
    assert bench.executor.where() == (0, 100, "program", 0) and torch.equal(bench[5], x.tanh().tanh().tanh().tanh())


def test_a_thread_that_defines_generated_functions_is_at_no_place_of_theirs():
    seen: list = []
    text = compile("ask()", python_codegen.FILE, "exec")
    exec(text, {"ask": lambda: seen.append(python_codegen.current_instruction(threading.get_ident())), "places": {}})
    assert seen == [None]
    ask = lambda: seen.append(python_codegen.current_instruction(threading.get_ident()))  # noqa: E731
    scope: dict = {"ask": ask, "places": {"run": [7, 8]}}
    exec(compile("def run():\n    (lambda: ask())()\nrun()", python_codegen.FILE, "exec"), scope)
    assert seen == [None, 8]


def test_an_op_that_a_gpu_has_not_done_before_is_told_from_one_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, seen = Bench(), []
    bench.executor._engine.clock = None  # as where an op goes on after its call has returned
    exp = torch.ops.aten.exp.default._op
    watched = lambda x: (seen.append(bench.executor.where()), exp(x))[1]  # noqa: E731
    monkeypatch.setattr(bench.executor._engine, "bind", lambda payload: watched)
    for number, dtype in ((1, torch.float32), (2, torch.bfloat16)):
        x = torch.ones(2, dtype=dtype)
        bench.put(**{f"_{number}": x})
        bench.do("op", op("aten.exp.default", [T(0)], 1, [new(x)]), number, 10 + number)
        bench.executor.run([bench.number, 0, number, 10 + number], 100)
    assert [where[2] for where in seen] == ["load", "op", "load", "op"]
    assert torch.equal(bench[11], torch.ones(2).exp())


def test_a_freed_tensor_is_gone_before_the_next_op(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list = []
    kept: list = []
    exp = torch.ops.aten.exp.default._op
    monkeypatch.setattr(torch.ops.aten.exp.default, "_op", lambda x: kept.append(weakref.ref(x)) or exp(x))
    for ended in (0, 11):  # the output of relu, which exp is given
        bench = probed(OPS, ended, monkeypatch, lambda func: seen.append(kept[-1]() is None))
        for _ in range(2):
            replay(bench)
    assert seen == [False, False, True, True]


@pytest.mark.usefixtures("plain_threads", "one")
def test_the_line_of_an_op_that_fails_amid_others_is_told_and_the_next_replay_is_right() -> None:
    index, table = torch.zeros(2, dtype=torch.int64, device="remote"), torch.arange(4.0, device="remote")

    @gt.compile
    def step(shift: torch.Tensor) -> tuple:
        a = table.sin().cos() + 1
        b = table[index + shift]  # out of bounds if shifted by 9
        c = (b * 2).exp().neg()
        return a * 3, c + 1

    line = step.fn.__code__.co_firstlineno + 3
    want = ((torch.arange(4.0).sin().cos() + 1) * 3, (torch.arange(4.0)[[2, 2]] * 2).exp().neg() + 1)
    for n in range(7):
        results = step(torch.tensor(9 if n in (3, 4) else 2))
        for got, wanted in zip(results, want, strict=True):
            if n in (3, 4):  # nothing that this replay writes is trusted
                with pytest.raises(gt.OpFailed, match=rf"test_python_codegen\.py:{line}: aten\.index\.Tensor"):
                    got.cpu()
            else:
                assert torch.equal(got.cpu(), wanted)
    assert step._programs[0].replays == 5, step.explain()


@pytest.mark.usefixtures("plain_threads", "one")
def test_random_ops_differ_from_replay_to_replay_and_are_those_of_eager_calls() -> None:
    x = torch.linspace(-1, 1, 64).reshape(8, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.dropout(x.sin() + 1, 0.3)
        return y * torch.rand_like(y) + torch.randn(8, 8, device="remote").mul(0.1)

    gt.manual_seed(3)
    want = [step(x.to("remote")).cpu() for _ in range(6)]
    run = gt.compile(step)
    gt.manual_seed(3)
    got = [run(x).cpu() for _ in range(6)]
    assert run._programs[0].replays == 4, run.explain()
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), n
        assert not any(torch.equal(a, other) for other in got[:n])
