"""A session that has as many programs as it may have: the next function stays eager, with the reason, until one ends."""

from __future__ import annotations

import pytest
import torch

import gt
from gt.client import current_session
from tests.corpus.session import PlannedSession
from tests.corpus.transcript import Transcript


def test_a_function_beyond_the_limit_runs_and_says_why_it_is_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gt.dispatcher.programs.programs.MAX_PROGRAMS_PER_SESSION", 3)
    before = current_session.set_aside()
    try:
        current_session.connect(PlannedSession("", "", 1, Transcript()), "", "")
        functions = [gt.compile(lambda x, n=n: x * n) for n in range(4)]
        x = torch.ones(2, device="remote")
        for function in functions:
            for _ in range(4):
                assert function(x).shape == (2,)
        heads = [function.explain().splitlines()[0].rpartition(" ")[0][-1] for function in functions]
        assert heads == ["1", "1", "1", "0"]
        why = "the session has 3 programs, and may have 3: let functions end that are no longer called"
        assert why in functions[3].explain()

        del functions[0], function  # whose program ends with it
        again = gt.compile(lambda x: x + 1)
        for _ in range(4):
            again(x)
        assert again.explain().splitlines()[0].endswith("1 program"), again.explain()
    finally:
        current_session.disconnect()
        current_session.restore(before)
