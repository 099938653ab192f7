"""Strategies together: stages of a pipeline, tensor parallelism, ZeRO, precision and activation checkpointing in one config."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gt
from tests.helpers import longer

WIDTH, ROWS, MICRO, STEPS = 16, 32, 4, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block() for _ in range(4)]), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(device: str, captured: bool = False, micro: int = MICRO, workers: int = 1, low: bool = False):
    """Losses of all steps, and the last one's explanation."""
    torch.manual_seed(0)
    model = Model().to(device)
    if device == "remote":
        gt.signal.apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def step(x, y):
        total = 0.0
        parts = gt.signal.microbatches((x, y), micro) if device == "remote" else [(x, y)]
        for rows, labels in parts:
            loss = nn.functional.cross_entropy(model(rows).float(), labels) / (micro if device == "remote" else 1)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    call = gt.compile(step) if captured else step
    x, y = torch.randn(ROWS, WIDTH), torch.randint(0, 3, (ROWS,))
    losses = [float(call(x.to(device), y.to(device))) for _ in range(STEPS)]
    return losses, call.explain() if captured else ""


PIPELINE = """
pp_stage0: {workers: [0, 1]}
pp_stage1: {workers: [2, 3]}
gt:
  modules: {"blocks.[01]": pp_stage0, "blocks.[23]": pp_stage1, head: pp_stage1}
"""
TENSOR = """
stage: {workers: [[0, 1], [2, 3]]}
stage_colpar: {workers: [[0, 1], [2, 3]]}
stage_rowpar: {workers: [[0, 1], [2, 3]]}
gt:
  modules: {"": stage, "*.up": stage_colpar, "*.down": stage_rowpar}
"""
CHECKPOINT = '  activation_checkpoint: {modules: "blocks.*"}\n'


def put(base, zero=0, precision="fp32", schedule=None, checkpoint=False):
    lines = [f"  zero: {zero}\n", f"  precision: {precision}\n"] + ([f"  schedule: {schedule}\n"] if schedule else [])
    return base + "".join(lines) + (CHECKPOINT if checkpoint else "")


CASES = {
    "zero3 pp": put(PIPELINE, 3, schedule="1f1b"),
    "zero3 pp checkpoint": put(PIPELINE, 3, schedule="1f1b", checkpoint=True),
    "pp bf16": put(PIPELINE, 0, "bf16", "1f1b"),
    "zero1 pp bf16 checkpoint": put(PIPELINE, 1, "bf16", "1f1b", True),
    "zero3 pp bf16": put(PIPELINE, 3, "bf16", "zb-h1"),
    "tp bf16": put(TENSOR, 0, "bf16"),
    "zero3 tp bf16 checkpoint": put(TENSOR, 3, "bf16", None, True),
    "zero2 tp checkpoint": put(TENSOR, 2, "fp32", None, True),
    "tp fp16": put(TENSOR, 1, "fp16"),
}


@pytest.mark.parametrize("captured", longer([False, True], [True]))
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_one_process(session, case, captured):
    session(CASES[case])
    losses, said = trained("remote", captured)
    want, _ = trained("cpu")
    assert losses == pytest.approx(want, abs=1e-5 if "16" not in case else 2e-2)
    if captured and "schedule" in CASES[case]:
        assert "is not used" not in said, said


@pytest.mark.parametrize("case", ["zero3 pp", "zero1 pp bf16 checkpoint", "zero3 pp bf16", "zero3 tp bf16 checkpoint"])
def test_optimizer_state_rests_and_is_counted(session, case):
    """A cast uses a weight of a stage outside of the stage: its state was a recipe until the first step."""
    session(CASES[case])
    model = Model().to("remote")
    gt.signal.apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for rows, labels in gt.signal.microbatches(
        (torch.randn(ROWS, WIDTH).to("remote"), torch.zeros(ROWS).long().to("remote")), MICRO
    ):
        nn.functional.cross_entropy(model(rows).float(), labels).backward()
    optimizer.step()
    for row in gt.stats()["sharding"]["workers"]:
        assert row["optimizer"] == pytest.approx(row["theory"]["optimizer"], rel=0.1)  # biases of 3 on two workers
        assert row["weights"] == pytest.approx(row["theory"]["weights"], rel=0.1)
