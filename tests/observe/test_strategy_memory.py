"""Peak memory of a captured step in each strategy, as workers count it after each instruction, beside `gt plan` and theory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gt
from tests.dispatcher.programs.test_compile_memory import peaks  # noqa: F401 - a fixture
from tests.helpers.serving import serving

WIDE, LAYERS, ROWS = 64, 4, 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def training(steps: int, before: Any = lambda: None) -> Any:
    """Train; `before` is called before each step. Returns what keeps the tensors alive."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(LAYERS)]).to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x = torch.randn(ROWS, WIDE).to("remote")
    for _ in range(steps):
        gc.collect()
        before()
        assert float(step(x)) >= 0
    return model, optimizer


def measured(config: str, path: Path, peaks: dict) -> int:  # noqa: F811
    """Most bytes that a worker holds in the last of some steps."""
    path.write_text(config)
    with serving(2, "torch") as server:
        gt.connect(server.address, config=str(path))
        try:
            kept = training(5, peaks.clear)
            most = max(peaks.values())
            del kept
        finally:
            gt.shutdown()
    return most


STRATEGIES = {
    "dp": "zero: 0", "zero1": "zero: 1", "zero2": "zero: 2", "zero3": "zero: 3",
    "zero3 checkpoint": 'zero: 3, activation_checkpoint: {modules: "*"}',
    "zero2 bf16": "zero: 2, precision: bf16", "zero3 bf16": "zero: 3, precision: bf16",
}  # fmt: skip


def config_of(strategy: str) -> str:
    return f"gt: {{data_parallel: [0, 1], {STRATEGIES[strategy]}}}"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_planned_peak_is_that_of_a_step(strategy: str, peaks: dict, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "strategy.yaml"
    most = measured(config_of(strategy), path, peaks)
    body = gt.plan(lambda: training(5), config=str(path)).body
    planned = max(row["peak"] for row in body["memory"])
    assert most == pytest.approx(planned, rel=0.1)
    if "theory" in body:
        for row in body["memory"]:
            theory = body["theory"][row["workers"][0]]
            assert row["weights"] == pytest.approx(theory["weights"], rel=0.05)
            assert row["optimizer"] == pytest.approx(theory["optimizer"], rel=0.05)


def test_activations_that_are_computed_again_are_not_held(peaks: dict, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "strategy.yaml"
    without = measured(config_of("zero3"), path, peaks)
    again = measured(config_of("zero3 checkpoint"), path, peaks)
    inner = ROWS // 2 * 4 * WIDE * 4  # what tanh and the second matmul of a layer keep on a worker
    assert again <= without - (LAYERS - 2) * inner


def test_offloaded_state_is_not_held(peaks: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    from gt.dispatcher.planning import offload

    state = 2 * 4 * LAYERS * (2 * 4 * WIDE * WIDE) // 2  # two moments, on one of two workers
    monkeypatch.setattr(offload, "PART_BYTES", state // (2 * LAYERS))
    path, peak = tmp_path / "strategy.yaml", {}
    for name, more in (("held", ""), ("away", ", offload: {optimizer: cpu}")):
        peak[name] = measured(f"gt: {{data_parallel: [0, 1], zero: 2{more}}}", path, peaks)
    assert peak["away"] <= peak["held"] - 0.5 * state
