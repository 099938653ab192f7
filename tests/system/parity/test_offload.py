"""`offload` in a config: the numbers of training without it, and bytes that rest elsewhere, as workers count them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import gt

WIDTH, LAYERS, STEPS = 128, 3, 4


def trained(captured: bool = False, **options):
    """Losses, the weights, and what keeps them alive."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    call = gt.compile(step) if captured else step
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)).to("remote")
    losses = [float(call(x)) for _ in range(STEPS)]
    return losses, (model, optimizer)


def values(kept):
    model, optimizer = kept
    state = [v.cpu() for p in model.parameters() for v in optimizer.state[p].values()]
    return [*(p.detach().cpu() for p in model.parameters()), *state]


def counted():
    gc.collect()
    torch.remote.synchronize()
    gt.stats()
    rows = [row for row in gt.stats()["workers"] if row["live_bytes"]]
    return [(row["live_bytes"], row["offloaded"], row["restored_bytes"]) for row in rows]


PSI = 4 * LAYERS * WIDTH * (WIDTH + 1)
SPACES = ["{optimizer: cpu}", "{optimizer: nvme, path: PATH}", "{optimizer: nvme, params: cpu, path: PATH}"]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
@pytest.mark.parametrize("offload", SPACES)
def test_training_is_that_without_offload(session, tmp_path, offload, options, captured):
    base = "data_parallel: [0, 1], zero: 3"
    session(f"gt: {{{base}}}")
    want, kept = trained(captured, **options)
    wanted = values(kept)
    del kept
    session(f"gt: {{{base}, offload: {offload.replace('PATH', str(tmp_path / 'files'))}}}")
    losses, kept = trained(captured, **options)
    small = 4 * LAYERS * WIDTH  # biases, of which nothing is gained
    for live, away, restored in counted():
        state = sum(away.values())
        rests = PSI if "params: none" in offload or "params" not in offload else 1.5 * PSI
        assert state == pytest.approx(rests, abs=4 * small)
        assert restored >= (STEPS - 2) * PSI / 2
        assert live <= (2 if "params" not in offload else 1.5) * PSI / 2 + 8 * small + PSI  # weights, gradients and a copy
    assert losses == want
    assert all(torch.equal(a, b) for a, b in zip(values(kept), wanted, strict=True))
    if "nvme" in offload:
        assert list((tmp_path / "files").iterdir()) == []  # the file has no name


def test_a_list_op_on_much_state_is_done_in_parts(session, monkeypatch):
    from gt.dispatcher.planning import offload

    session("gt: {data_parallel: [0], offload: {optimizer: cpu}}")
    want, _ = trained(fused=True)
    monkeypatch.setattr(offload, "PART_BYTES", 4 * WIDTH * WIDTH)
    session("gt: {data_parallel: [0], offload: {optimizer: cpu}}")
    assert trained(fused=True)[0] == want


def test_state_is_freed_with_its_optimizer(session, tmp_path):
    session(f"gt: {{data_parallel: [0, 1], zero: 1, offload: {{optimizer: nvme, path: {tmp_path}}}}}")
    _, kept = trained(fused=True)
    assert any(away for _, away, _ in counted())
    del kept
    gc.collect()
    torch.ones(1).to("remote").add(1).cpu()
    assert not any(away for _, away, _ in counted())
