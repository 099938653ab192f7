"""Counters of workers, and the doubts about a config, as a program sees them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

import gt
from gt import env
from gt.server import parser


@pytest.mark.usefixtures("one")
def test_worker_stats_are_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    (torch.ones(3, device="remote") + 1).sum().item()
    stats = gt.debug.get_worker_stats()
    assert len(stats) == 8 and sum(worker["instructions"] for worker in stats.values()) > 0
    gt.debug.print_worker_stats()
    out = capsys.readouterr().out
    assert all(f"{name}\n" in out for name in stats) and "  instructions" in out


def test_a_doubt_about_the_config_is_logged(session: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="gt"):
        session("s_colpr: {workers: [0, 1]}")
    assert any("did you mean *_colpar?" in message for message in caplog.messages)


def test_other_spellings_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parser().parse_args(["-H", "127.0.0.1"]).host == "127.0.0.1"
    assert env.backend("pytorch") == env.backend() == "torch" and env.backend("numpy") == "numpy"
    monkeypatch.setenv("GT_BACKEND", "pytorch")
    assert env.backend() == "torch"
