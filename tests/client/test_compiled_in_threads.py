"""Compiled functions in several threads, and within one another: each call has its own values, and a reason if not captured."""

import threading
from collections.abc import Callable

import pytest
import torch

import gt
from gt.client.capture.gradients import LeafGradients

pytestmark = pytest.mark.usefixtures("one")
OVERTAKEN_SECONDS = 0.3  # that a replay lets another thread overtake it, which must not happen


def in_thread(call: Callable[[], None]) -> list[BaseException]:
    """Run a call to its end in a thread of its own. Returns its error, if there is one."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


def test_threads_that_replay_one_function_have_their_own_values(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.arange(3.0).to("remote")
    step = gt.compile(lambda x: (w * x).sum())
    assert [step(torch.full((3,), float(n))).item() for n in range(4)] == [0.0, 3.0, 6.0, 9.0]
    results: dict[str, float] = {}
    filled, other = threading.Event(), threading.Thread(target=lambda: results.update(other=step(torch.ones(3)).item()))
    fill = LeafGradients.fill

    def overtaken(self: LeafGradients) -> None:
        fill(self)
        if threading.current_thread() is other:
            filled.set()
        else:
            other.start()
            filled.wait(OVERTAKEN_SECONDS)

    monkeypatch.setattr(LeafGradients, "fill", overtaken)
    results["own"] = step(torch.full((3,), 10.0)).item()
    other.join()
    assert results == {"own": 30.0, "other": 3.0}


def test_a_call_during_another_threads_recording_is_eager_and_says_so() -> None:
    w = torch.arange(3.0).to("remote")
    beside = gt.compile(lambda x: (w * x).sum())
    seen: list[float] = []
    errors: list[BaseException] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        errors.extend(in_thread(lambda: seen.append(beside(torch.ones(3)).item())))
        return x * 2

    run = gt.compile(step)
    assert [run(torch.ones(2)).sum().item() for _ in range(3)] == [4.0] * 3
    assert not errors and seen == [3.0] * 3
    assert "a call of another thread was recorded" in beside.explain()
    assert "another thread used remote tensors during the call" in run.explain()


def test_a_read_in_another_thread_does_not_end_a_fragment() -> None:
    w = torch.ones(3, device="remote")

    def step() -> float:
        value = w.sum().item()
        assert not in_thread(lambda: w.max().item())
        return value

    run = gt.compile(step)
    assert [run() for _ in range(6)] == [3.0] * 6
    assert run.explain().count("cut at") == 1, run.explain()


def test_a_compiled_function_within_another_takes_cpu_tensors() -> None:
    w = torch.arange(3.0).to("remote")
    inner = gt.compile(lambda x: (w * x).sum())
    outer = gt.compile(lambda x: inner(torch.ones(3)) + x.sum())
    assert [outer(torch.full((2,), float(n))).item() for n in range(5)] == [3.0, 5.0, 7.0, 9.0, 11.0]
    assert outer.explain().splitlines()[0].endswith(": 1 program"), outer.explain()
