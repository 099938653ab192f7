"""`activation_checkpoint` in a config: the numbers of torch.utils.checkpoint on the same modules, in less memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gt

LAYERS, WIDTH, ROWS = 6, 32, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return x + scale * nn.functional.dropout(self.down(torch.tanh(self.up(self.norm(x)))), 0.2)


class Model(nn.Module):
    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.blocks, self.head, self.by_hand = nn.ModuleList([Block() for _ in range(LAYERS)]), nn.Linear(WIDTH, 1), by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, scale=0.5, use_reentrant=False) if self.by_hand else block(x, scale=0.5)
        return self.head(x)


def trained(by_hand: bool = False, captured: bool = False, groups: bool = False):
    """Losses, gradients of the last step, and how often a block's forward ran."""
    torch.manual_seed(0)
    model = Model(by_hand).to("remote")
    if groups:
        gt.signal.apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    call = gt.compile(step) if captured else step
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to("remote")
    losses = [float(call(x)) for _ in range(4)]
    return losses, [p.grad.cpu() for p in model.parameters()], model.blocks[0].calls


BLOCKS = 'activation_checkpoint: {modules: "blocks.*"}'
CASES = [
    "data_parallel: [0]",
    "data_parallel: [0, 1]",
    "data_parallel: [0, 1], zero: 3",
    "data_parallel: [0, 1], zero: 2, precision: bf16",
]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("config", CASES)
def test_it_is_torchs_checkpoint_of_the_modules(session, config, captured):
    session(f"gt: {{{config}}}")
    plain, by_hand = trained(captured=captured), trained(True, captured)
    session(f"gt: {{{config}, {BLOCKS}}}")
    losses, gradients, calls = trained(captured=captured)
    assert losses == by_hand[0] == plain[0]  # dropout draws the same numbers again
    assert all(torch.equal(a, b) for a, b in zip(gradients, by_hand[1], strict=True))
    assert calls == by_hand[2] and (calls == 2 * plain[2] or captured)


def test_a_pattern_that_matches_no_module_is_an_error(session):
    session('gt: {data_parallel: [0], activation_checkpoint: {modules: [blocks.0, "layers.*"]}}')
    with pytest.raises(gt.ConfigError, match=r"pattern 'layers\.\*' matches no module that was called; .*'blocks'"):
        trained()
