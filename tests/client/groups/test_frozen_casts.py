"""Frozen weights under `precision`: what is declared of them outlives the casts of one call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.planned import planned


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_frozen_weight_is_uploaded_once_and_splits_no_matmul(zero: int, precision: str) -> None:
    """As the base of a LoRA. Each call's cast was uploaded anew, and the matmul was split along the features of the batch."""
    with planned(f"gt: {{data_parallel: [0, 1], zero: {zero}, precision: {precision}}}", workers=2) as plan:
        model = nn.Sequential(nn.Linear(12, 16).requires_grad_(False), nn.Tanh(), nn.Linear(16, 5)).to("remote")
        for call in range(3):
            before = len(plan.text().splitlines())
            model(torch.randn(13, 12).to("remote")).sum()
            lines = plan.text().splitlines()[before:]
            matmuls = [line for line in lines if "addmm" in line]
            assert len(matmuls) == 2 and all("[S(0)] = aten.addmm" in line for line in matmuls), "\n".join(lines)
            assert call == 0 or sum("gt.upload" in line for line in lines) == 1, "\n".join(lines)  # the batch
