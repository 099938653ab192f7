"""gt.memory_summary and gt.memory_snapshot: memory by use and by line, in text and for torch's viewer."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.cuda import _memory_viz

import gt
from tests.helpers.serving import settled

pytestmark = pytest.mark.usefixtures("plain_threads")


def trained() -> tuple:
    model = torch.nn.Linear(256, 64).to("remote")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, 256, device="remote")
    model(x).sum().backward()
    optimizer.step()
    return model, optimizer, x


@pytest.mark.parametrize("captured", [False, True])
def test_uses_and_lines_add_up_to_the_workers_own_count(session: Callable, captured: bool) -> None:
    session({"gt": {"data_parallel": [0, 1]}} if captured else "")
    model, _optimizer, x = trained()
    kept = []
    if captured:
        step = gt.compile(lambda x: model(x).square())
        for _ in range(4):
            kept.append(step(x))
    counters = settled()
    summary = gt.memory_summary()
    number = str(gt.client.current_session.current().session.number)
    for worker, row in zip(summary.workers, counters["workers"], strict=True):
        assert sum(worker.by_use().values()) + worker.more == worker.session == row["session_bytes"].get(number, 0)
    first = summary.workers[0]
    parameters = 4 * (256 * 64 + 64)
    uses = first.by_use()
    assert uses["weights"] == parameters and uses["gradients"] == parameters and uses["optimizer"] >= 2 * parameters
    assert uses["activations"] >= 4 * 32 * 256 // (2 if captured else 1)
    weight = next(row for row in first.rows if row.name == "weight" and row.use == "weights")
    assert Path(weight.file).name == Path(__file__).name and weight.line
    assert f"{first.name} (cpu): " in summary and "test_memory.py:" in summary and "weights" in summary


def test_gradients_are_told_from_activations_without_an_optimizer(session: Callable) -> None:
    session("")
    model = torch.nn.Linear(256, 64).to("remote")
    model(torch.randn(32, 256, device="remote")).sum().backward()
    uses = gt.memory_summary().workers[0].by_use()
    assert uses["gradients"] == uses["weights"] == 4 * (256 * 64 + 64)


def test_the_snapshot_is_what_torchs_viewer_reads(session: Callable, tmp_path: Path) -> None:
    session("")
    held = trained()
    gc.collect()  # tensors in reference cycles end now, and not between the two looks
    gt.memory_snapshot(tmp_path / "memory.pickle")
    assert (tmp_path / "memory.pickle").stat().st_mode & 0o777 == 0o600
    snapshot = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    assert "cudaMalloc" in _memory_viz.trace(snapshot) and _memory_viz.segsum(snapshot)
    assert _memory_viz.segment_plot(snapshot) and _memory_viz.trace_plot(snapshot)
    frames = [block["frames"][0] for segment in snapshot["segments"] for block in segment["blocks"]]
    here = Path(__file__).name
    assert any(f["name"] == "weights, weight" and Path(f["filename"]).name == here and f["line"] for f in frames), frames
    total = sum(block["requested_size"] for segment in snapshot["segments"] for block in segment["blocks"])
    assert total == sum(worker.session for worker in gt.memory_summary().workers) and held
