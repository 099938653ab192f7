"""`precision` in groups of tensor or pipeline parallelism: a weight goes where the first use of its cast is, as in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import gt
from tests.helpers.planned import planned

TENSOR = "".join(f"s{end}: {{workers: [[0, 1], [2, 3]]}}\n" for end in ("", "_colpar", "_rowpar"))
PIPELINE = "pp_stage0: {workers: [0, 1]}\npp_stage1: {workers: [2, 3]}\n"
BY_TENSOR = {"": "s", "up": "s_colpar", "down": "s_rowpar"}
BY_STAGE = {"up": "pp_stage0", "down": "pp_stage0", "norm": "pp_stage1", "head": "pp_stage1"}
LAYOUTS = {
    "tensor": (TENSOR, BY_TENSOR, "zero: 0"),
    "tensor, with all ops in a group": (TENSOR, BY_TENSOR, "data_parallel: [0, 1, 2, 3]"),
    "tensor and zero 3": (TENSOR, BY_TENSOR, "zero: 3"),
    "pipeline": (PIPELINE, BY_STAGE, "zero: 0"),
    "pipeline and zero 1": (PIPELINE, BY_STAGE, "zero: 1"),
}
DATA = torch.randn(8, 16, 12, generator=torch.Generator().manual_seed(7))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x + self.down(torch.tanh(self.up(x)))))


def parts(rules: dict[str, str], seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Block().to("remote")
    gt.signal.apply(model, rules)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def autocast(model: nn.Module) -> nn.Module:
    return torch.autocast("remote", torch.bfloat16)(model)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Tensor) -> list[torch.Tensor]:
    result = []
    for batch in batches:
        x = batch.to("remote")
        optimizer.zero_grad()
        loss = (model(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        result.append(loss.detach())
    return result


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("how", ["precision", "autocast"])
def test_weights_are_where_they_are_in_fp32(case: str, outer: bool, how: str) -> None:
    """They were whole on the first worker, and a tensor-parallel group did the matmuls of later steps whole on each worker."""
    groups, rules, keys = LAYOUTS[case]
    group = next(iter(rules.values()))
    told = {}
    for precision in ("fp32", "bf16"):
        with planned(f"{groups}gt: {{{keys}, precision: {precision if how == 'precision' else 'fp32'}}}", workers=4) as plan:
            model, optimizer = parts(rules)
            for batch in DATA[:2].unsqueeze(1):
                called = autocast(model) if how == "autocast" and precision == "bf16" else model
                losses(gt.signal.context(group)(called) if outer else called, optimizer, batch)
            told[precision] = {
                name: [plan.layout(t) for t in (p, p.grad, optimizer.state[p]["exp_avg"])]
                for name, p in model.named_parameters()
            }
            if precision == "bf16":
                uploads = [line for line in plan.text().splitlines() if "gt.upload" in line]
                batches = 2 if outer or how == "autocast" else 4  # and their casts, outside of groups
                assert len(uploads) == len(told["bf16"]) + batches, "\n".join(uploads)  # each weight once
    assert told["bf16"] == told["fp32"]


@pytest.mark.parametrize("case", [name for name in LAYOUTS if "all ops" not in name])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_goes_on_bit_for_bit(session: Callable, tmp_path: Path, plain_threads, case: str, precision: str) -> None:
    groups, rules, keys = LAYOUTS[case]
    text = f"{groups}gt: {{{keys}, precision: {precision}}}"
    session(text)
    first = dict(zip(("model", "optimizer"), parts(rules), strict=True))
    losses(*first.values(), DATA[:5])
    gt.save(first, tmp_path / "c")
    want = [loss.item() for loss in losses(*first.values(), DATA[5:])]
    session(text)
    again = dict(zip(("model", "optimizer"), parts(rules, 9), strict=True))
    gt.load(tmp_path / "c", into=again)
    assert [loss.item() for loss in losses(*again.values(), DATA[5:])] == want
