"""Traces on a GPU: slices are when the device did the work, on each stream, not when a worker issued it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gt
from tests.helpers.processes import started, wait_until
from tests.observe import trace_rules

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SLACK = 300.0  # microseconds between both clocks


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    gt.gpu_workers(1)
    yield
    gt.shutdown()
    # Processes of Inductor that are still starting see the end of the worker only then.
    assert wait_until(lambda: not any("compile_worker" in line for line in started().values()), 60)


def threads(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Slices of the worker's threads, in order, by name."""
    (pid,) = [e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"].startswith("worker ")]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid}
    slices = sorted((e for e in events if e["pid"] == pid and e["ph"] == "X"), key=lambda e: e["ts"])
    return {name: [e for e in slices if e["tid"] == tid] for tid, name in names.items()}


def end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(16):
        x = x @ x
    return x.sum()


@pytest.mark.parametrize("captured", [False, True])
def test_slices_are_when_the_device_worked(tmp_path: Path, captured: bool) -> None:
    run = gt.compile(chain) if captured else chain
    x = torch.full((4096, 4096), 1 / 4096, device="remote")
    for _ in range(5):
        run(x).item()
    with gt.trace(tmp_path / "out.json") as report:
        run(x).item()
    found = threads(trace_rules.check(tmp_path / "out.json"))
    assert report["dropped"] == 0
    issued, compute = found["instructions"], found["GPU stream: compute"]
    fetch = next(e for e in issued if e["cat"] == "fetch")
    worked = [e for e in compute if e["cat"] == "op"]
    assert worked and all(end(e) <= end(fetch) + SLACK for e in worked), "a value is there after the work for it"
    assert sum(e["dur"] for e in worked) > 1000, "16 products of 4096 take more than a millisecond"
    if not captured:
        products = [e for e in compute if e["name"] == "aten.mm"]
        calls = {e["args"]["seq"]: e for e in issued if e["name"] == "aten.mm"}
        assert len(products) == len(calls) == 16
        assert all(e["ts"] >= calls[e["args"]["seq"]]["ts"] - SLACK for e in products), "none is done before it is issued"
        assert sum(e["dur"] for e in products) > 2 * sum(e["dur"] for e in calls.values()), "issuing takes less than the work"
        assert end(products[-1]) > max(map(end, calls.values())), "the device comes behind"


def test_work_on_other_streams_has_a_row_of_its_own(tmp_path: Path) -> None:
    batch = torch.randn(1 << 22)
    with gt.trace(tmp_path / "out.json"):
        for _ in range(4):
            chain(torch.eye(2048, device="remote"))
            batch.to("remote").sum().item()
    found = threads(trace_rules.check(tmp_path / "out.json"))
    uploads = found["GPU stream: uploads"]
    assert len(uploads) >= 4 and all(e["cat"] == "upload" and e["dur"] > 0 for e in uploads)
