"""A sample of torch's own tests of ops and modules, drawn by a fixed seed: on one worker, and split, they are torch.

`python -m tests.conformance` runs them all; docs/ops.md has what that came to.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch

import gt

pytest.importorskip("expecttest")  # torch's tests need it
PAIRS, SAMPLES, MODULES = 100, 2, 40


@pytest.mark.slow
@pytest.mark.usefixtures("plain_threads")
def test_torchs_own_operator_tests_pass_whole_and_split(server: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's testing modules
        from tests.conformance import report
        from tests.conformance.__main__ import pairs, run
        from tests.conformance.run import Plan

        chosen = random.Random(2026).sample(pairs([], ["all"]), PAIRS)
        rows = run(chosen, Plan(most=SAMPLES, gathers=False), server, quiet=True)
    assert not [row for row in rows if row["outcome"] == "wrong"], report.text(rows)
    found = report.counts(rows)
    assert found["1"]["share"] >= 0.97, report.text(rows)
    assert min(found["2"]["share"], found["4"]["share"]) >= 0.90, report.text(rows)
    assert {row["form"] for row in rows} >= {"function", "backward", "in place", "write"}


@pytest.mark.slow
@pytest.mark.usefixtures("plain_threads")
def test_torchs_own_modules_pass_whole_and_split(server: Any) -> None:
    """Called and differentiated in both modes: inputs and parameters split by hand, and in each kind of group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.conformance import modules, report
        from tests.conformance.__main__ import pairs, run
        from tests.conformance.run import Plan

        chosen = random.Random(2026).sample(pairs([], ["one"], modules.entries()), MODULES)
        rows = run(chosen, Plan(workers=(1, 2), most=1, gathers=False), server, quiet=True)
    assert not [row for row in rows if row["outcome"] != "equal"], report.text(rows)
    assert {row["form"] for row in rows} == {"train forward", "train backward", "eval forward", "eval backward", "weights"}
    assert {row["workers"] for row in rows} == {1, 2} and {row["op"] for row in rows} == {entry.name for entry, _ in chosen}


class Odd(torch.nn.Module):
    """Right on the CPU, and on the remote device where nothing is split along dim 0; its buffer is always right."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        remote = x.device.type == "remote"
        return x * self.weight + (1 if remote and gt.inspect(x)["layout"] == "[S(0)]" else 0)


def test_the_runner_tells_a_wrong_module(server: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import FunctionInput, ModuleInfo, ModuleInput

        from tests.conformance.__main__ import run
        from tests.conformance.run import Plan

    def inputs(info: Any, device: str, dtype: torch.dtype, requires_grad: bool, training: bool) -> list:
        called = FunctionInput(torch.ones(6, 4, dtype=dtype, requires_grad=requires_grad))
        return [ModuleInput(constructor_input=FunctionInput(), forward_input=called)]

    entry = ModuleInfo(Odd, module_inputs_func=inputs)
    rows = run([(entry, torch.float32)], Plan(workers=(1, 2)), server, quiet=True)
    found = {(row["form"], row["workers"]): (row["outcome"], row["unequal"]) for row in rows}
    wrong = {key for key, (outcome, _) in found.items() if outcome == "wrong"}
    assert wrong == {("train forward", 2), ("eval forward", 2)} and found["train forward", 2][1] == 1
    assert found["train backward", 2][0] == found["weights", 2][0] == "equal"


class Doubled(torch.autograd.Function):
    """x, whose gradient is right on the CPU only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2 if grad.device.type == "remote" else grad


def test_the_runner_tells_a_wrong_gradient(server: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.opinfo.core import OpInfo, SampleInput

        from tests.conformance.__main__ import run
        from tests.conformance.run import Plan

    def inputs(info: Any, device: str, dtype: torch.dtype, requires_grad: bool, **rest: Any) -> list:
        return [SampleInput(torch.ones(6, 4, dtype=dtype, requires_grad=requires_grad))]

    entry = OpInfo("odd", op=Doubled.apply, sample_inputs_func=inputs, dtypes=(torch.float32,))
    rows = run([(entry, torch.float32)], Plan(), server, quiet=True)
    found = {(row["form"], row["workers"]): row["outcome"] for row in rows if row["form"] in ("function", "backward")}
    assert found == {
        **{("function", n): "equal" for n in (1, 2, 4)}, **{("backward", n): "wrong" for n in (1, 2, 4)},
    }  # fmt: skip


def test_the_runner_tells_equal_from_wrong() -> None:
    """It must be able to fail: other values, shapes and dtypes, writes that are not seen, refusals that do not come."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from gt.errors import OpFailed, UnsupportedOp, WorkerLost
        from tests.conformance.compare import EQUAL, UNSUPPORTED, WRONG, difference, outcome

    one = torch.ones(3)
    assert difference([one], [one.clone()], True) == ""
    assert difference([one], [one + 1e-3], True).startswith("values")
    assert difference([one], [one + 1e-3], False) == ""
    assert difference([one], [torch.ones(3, 1)], False).startswith("shape")
    assert difference([one], [one.double()], False).startswith("dtype")
    assert difference([one.int()], [one.int() + 1], True).startswith("values")
    assert difference([one], [one, one], True) and difference([1], [2], True) and difference([one], [1], True)
    assert outcome(UnsupportedOp("aten.x is not supported on remote"), False)[0] == UNSUPPORTED
    assert outcome(OpFailed("aten.x failed"), False)[0] == WRONG
    assert outcome(RuntimeError("torch's"), False)[0] == WRONG
    assert outcome(OpFailed("aten.x failed"), True)[0] == EQUAL
    assert outcome(WorkerLost("gone"), True)[0] == WRONG
