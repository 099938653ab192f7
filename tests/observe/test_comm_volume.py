"""Bytes sent between workers, by their own counters, are those of the plan; none pass through the dispatcher."""

from __future__ import annotations

import torch

import gt
from tests.dispatcher.planning.test_plan_counts import B, Block, C, Fused, T, stages
from tests.helpers.serving import settled


def counters() -> list[dict]:
    return settled()["workers"]


def test_a_step_of_two_stages_moves_what_the_plan_says(session):
    session(stages(2, 2))
    blocks = [Block(Fused(), f"pp_stage{i}").to("remote") for i in range(2)]
    optimizer = torch.optim.AdamW([p for block in blocks for p in block.parameters()])

    def step() -> None:
        x = torch.randn(B, T, C).to("remote").requires_grad_()
        loss = blocks[1](blocks[0](x)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    step()
    before = counters()
    step()
    after = counters()
    activation = B * T * C * 4
    for worker in range(4):
        made = {k: v - before[worker]["collectives"].get(k, 0) for k, v in after[worker]["collectives"].items()}
        assert {k: v for k, v in made.items() if v} == {"all_reduce": 4}, worker
        stage, rank = divmod(worker, 2)
        partner, opposite = f"w{2 * stage + 1 - rank}", f"w{2 * (1 - stage) + rank}"
        for way in ("bytes_sent", "bytes_received"):
            moved = {k: v - before[worker][way].get(k, 0) for k, v in after[worker][way].items()}
            assert {k: v for k, v in moved.items() if v} == {partner: 4 * activation, opposite: activation}, (worker, way)
    stats = gt.stats()["dispatcher"]
    assert stats["tensor_bytes_relayed"] == 0


def test_freed_tensors_are_gone_from_every_worker(session):
    session(stages(2, 2))
    before = [(w["live_tensors"], w["live_bytes"]) for w in counters()]
    blocks = [Block(Fused(), f"pp_stage{i}").to("remote") for i in range(2)]
    x = torch.randn(B, T, C).to("remote")
    for _ in range(3):
        y = blocks[1](blocks[0](x)).sum()
        y.backward()
        del y
    assert [(w["live_tensors"], w["live_bytes"]) for w in counters()] != before
    del blocks, x
    left = [(w["live_tensors"], w["live_bytes"]) for w in counters()]
    assert all(now[1] <= was[1] + 64 for now, was in zip(left, before, strict=True)), (before, left)
