"""A captured step that gets remote tensors adds up in one order in each of its calls, recorded or replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import gt

pytestmark = pytest.mark.usefixtures("plain_threads")
WORDS, WIDTH = 17, 12
DATA = torch.randint(0, WORDS, (9, 20, 5), generator=torch.Generator().manual_seed(1))
CONFIGS = {
    "data": ("s: {workers: [0, 1]}\n", {"": "s"}),
    "mesh": ("".join(f"s{end}: {{workers: [[0, 1], [2, 3]]}}\n" for end in ("", "_colpar")), {"1": "s_colpar", "": "s"}),
    "stages": ("a: {workers: [0, 1]}\nb: {workers: [2, 3]}\n", {"0": "a", "1": "a", "3": "b"}),
}


class Training:
    def __init__(self, seed: int, groups: dict[str, str]) -> None:
        torch.manual_seed(seed)
        layers = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 21), nn.Tanh(), nn.Linear(21, WORDS)
        self.model = nn.Sequential(*layers).to("remote")
        gt.signal.apply(self.model, groups)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.call = gt.compile(self.step)

    def step(self, words: torch.Tensor) -> torch.Tensor:
        """Adds the batch up outside of groups, where they have used it before."""
        self.optimizer.zero_grad()
        loss = self.loss(words)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def loss(self, words: torch.Tensor) -> torch.Tensor:
        scores = self.model(words)
        entropy = nn.functional.cross_entropy(scores.flatten(0, -2), words.flatten())
        return entropy / (1 + words.float().std()) + (words * 1.7).mean() * scores.mean()

    def losses(self, batches: torch.Tensor) -> list[float]:
        return torch.stack([self.call(words.to("remote")) for words in batches]).tolist()

    @property
    def state(self) -> dict:
        return {"model": self.model, "optimizer": self.optimizer}


@pytest.mark.parametrize("kind", CONFIGS)
def test_training_in_groups_goes_on_bit_for_bit(session: Callable, tmp_path: Path, kind: str) -> None:
    config, groups = CONFIGS[kind]
    session(config)
    first = Training(0, groups)
    first.losses(DATA[:4])
    gt.save(first.state, tmp_path / "c")
    want = first.losses(DATA[4:])
    assert "1 program" in first.call.explain()
    session(config)
    again = Training(9, groups)
    gt.load(tmp_path / "c", into=again.state)
    assert again.losses(DATA[4:]) == want


def test_calls_with_other_dims_show_nothing_of_where_a_batch_lies(session: Callable) -> None:
    config, groups = CONFIGS["data"]
    session(config)

    def scores(first: torch.Tensor) -> list[float]:
        training = Training(0, groups)
        call = gt.compile(training.loss)
        return torch.stack([call(words) for words in (first, *DATA[:1].expand(4, -1, -1))]).tolist()[1:]

    assert scores(DATA[0].flatten()) == scores(DATA[0])
