"""A sample of torch's own operator tests, drawn by a fixed seed: on one worker, and split over two and four, they are torch.

`python -m tests.conformance` runs them all; docs/ops.md has what that came to.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest

pytest.importorskip("expecttest")  # torch's tests need it
PAIRS, SAMPLES = 100, 2


@pytest.mark.slow
@pytest.mark.usefixtures("plain_threads")
def test_torchs_own_operator_tests_pass_whole_and_split(server: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's testing modules
        from conformance import report
        from conformance.__main__ import pairs, run
        from conformance.run import Plan

        chosen = random.Random(2026).sample(pairs([], ["all"]), PAIRS)
        rows = run(chosen, Plan(most=SAMPLES, gathers=False), server, quiet=True)
    assert not [row for row in rows if row["outcome"] == "wrong"], report.text(rows)
    found = report.counts(rows)
    assert found["1"]["share"] >= 0.97, report.text(rows)
    assert min(found["2"]["share"], found["4"]["share"]) >= 0.90, report.text(rows)
    assert {row["form"] for row in rows} >= {"function", "backward", "in place", "write"}


def test_the_runner_tells_equal_from_wrong() -> None:
    """It must be able to fail: other values, shapes and dtypes, writes that are not seen, refusals that do not come."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from conformance.compare import EQUAL, UNSUPPORTED, WRONG, difference, outcome

        from gt.errors import OpFailed, UnsupportedOp, WorkerLost

    one = torch.ones(3)
    assert difference([one], [one.clone()], True) == ""
    assert difference([one], [one + 1e-3], True).startswith("values")
    assert difference([one], [one + 1e-3], False) == ""
    assert difference([one], [torch.ones(3, 1)], False).startswith("shape")
    assert difference([one], [one.double()], False).startswith("dtype")
    assert difference([one.int()], [one.int() + 1], True).startswith("values")
    assert difference([one], [one, one], True) and difference([1], [2], True) and difference([one], [1], True)
    assert outcome(UnsupportedOp("aten.x has no remote form"), False)[0] == UNSUPPORTED
    assert outcome(OpFailed("aten.x failed"), False)[0] == WRONG
    assert outcome(RuntimeError("torch's"), False)[0] == WRONG
    assert outcome(OpFailed("aten.x failed"), True)[0] == EQUAL
    assert outcome(WorkerLost("gone"), True)[0] == WRONG
