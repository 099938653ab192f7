"""Attention without dropout in a compiled step: it draws no random numbers, whatever the seed and whatever else draws."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import gt


@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["nothing draws", "another op draws"])
@pytest.mark.usefixtures("plain_threads", "one")
def test_attention_that_draws_nothing_is_replayed(dropout: float) -> None:
    def train(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        gt.manual_seed(7)
        weight = torch.nn.Parameter(torch.randn(8, 8).to("remote"))

        def step(x: torch.Tensor) -> torch.Tensor:
            q = F.dropout(x @ weight, dropout).view(2, 4, 2, 4).transpose(1, 2)
            loss = F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()
            weight.grad = None
            loss.backward()
            return loss.detach()

        run = gt.compile(step) if compiled else step
        losses = [run(x if compiled else x.to("remote")) for x in torch.randn(6, 8, 8)]
        assert not compiled or sum(p.replays for p in run._programs) >= 3, run.explain()
        return [t.cpu() for t in (*losses, weight.grad)]

    for got, want in zip(train(True), train(False), strict=True):
        assert torch.equal(got, want)
