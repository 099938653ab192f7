"""Options that a captured step sets in an optimizer are not those of its checkpoints, which plain torch reads on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gt

KINDS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "ASGD", "Adadelta", "RMSprop", "Rprop")
DATA = torch.randn(12, 8, 6, generator=torch.Generator().manual_seed(1))


class Training:
    """reads: whether the step's code may read a value, so that GT waits with the option until it knows."""

    def __init__(self, kind: str, device: str, seed: int, reads: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)).to(device)
        self.optimizer = getattr(torch.optim, kind)(self.model.parameters(), lr=1e-2)
        self.device, self.log = device, False
        self.call: Any = gt.compile(self.logged if reads else self.step) if device == "remote" else self.step

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = (self.model(batch) - batch).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def logged(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.step(batch)
        if self.log:
            print(loss.item())
        return loss

    def losses(self, batches: torch.Tensor) -> list[float]:
        return [float(self.call(batch)) for batch in batches]

    @property
    def state(self) -> dict:
        return {"model": self.model, "optimizer": self.optimizer}


@pytest.mark.parametrize("kind", KINDS)
def test_plain_torch_goes_on_from_the_checkpoint_of_a_captured_step(session: Callable, kind: str, tmp_path: Path) -> None:
    session()
    training = Training(kind, "remote", 0)
    training.losses(DATA[:4])
    assert training.optimizer.param_groups[0]["capturable"] or kind == "ASGD"
    torch.save({key: part.state_dict() for key, part in training.state.items()}, tmp_path / "c")
    want = training.losses(DATA[4:8])
    saved, plain = torch.load(tmp_path / "c", map_location="cpu"), Training(kind, "cpu", 1)
    for key, part in plain.state.items():
        part.load_state_dict(saved[key])
    assert plain.losses(DATA[4:8]) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("reads", [False, True])
def test_a_captured_step_goes_on_bit_for_bit(session: Callable, reads: bool, tmp_path: Path, plain_threads: None) -> None:
    session()
    training = Training("AdamW", "remote", 0, reads)
    training.losses(DATA[:4])
    gt.save(training.state, tmp_path / "c")
    want = training.losses(DATA[4:8])
    session()
    again = Training("AdamW", "remote", 1, reads)
    gt.load(tmp_path / "c", into=again.state)
    assert again.losses(DATA[4:8]) == want
