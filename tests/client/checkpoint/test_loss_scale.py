"""The loss scale of `precision: fp16` is in an optimizer's state_dict, so each way of saving that state saves the scale."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state

import gt
from gt.client.current_session import Current
from gt.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONFIG = "gt: {data_parallel: [0, 1], zero: 2, precision: fp16}"
DATA = torch.randn(12, 16, 12, generator=torch.Generator().manual_seed(1))
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


def parts(seed: int, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 13), nn.Tanh(), nn.Linear(13, 12)).to("remote")
    return model, OPTIMIZERS[kind](model.parameters())


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Tensor) -> list[float]:
    """Of some steps, the first of which are left out until the scale is small enough."""
    result = []
    for batch in batches.to("remote"):
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean() * 1000
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


def save_torch(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def load_torch(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, device: str | None = None) -> None:
    saved = torch.load(path, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


def with_options(**options: bool) -> tuple[Callable, Callable]:
    """save and load by torch.distributed.checkpoint with these StateDictOptions."""

    def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        chosen = dcp_state.StateDictOptions(**options)
        return dict(zip(("model", "optimizer"), dcp_state.get_state_dict(model, optimizer, options=chosen)))

    def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
        dcp.save(states(model, optimizer), checkpoint_id=path, no_dist=True)

    def load(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
        read = states(model, optimizer)
        dcp.load(read, checkpoint_id=path, no_dist=True)
        chosen = dcp_state.StateDictOptions(**options)
        dcp_state.set_state_dict(
            model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"], options=chosen
        )

    return save, load


def save_gt(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    gt.save({"model": model, "optimizer": optimizer}, path)


def load_gt(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    gt.load(path, into={"model": model, "optimizer": optimizer})


WAYS: dict[str, tuple[Callable, Callable]] = {
    "torch.save": (save_torch, load_torch),
    "torch.save, loaded on the CPU": (save_torch, lambda *args: load_torch(*args, device="cpu")),
    "torch.distributed.checkpoint": with_options(),
    "its copies on the CPU": with_options(full_state_dict=True, cpu_offload=True),
    "its flat state": with_options(flatten_optimizer_state_dict=True),
    "its flat state on the CPU": with_options(flatten_optimizer_state_dict=True, cpu_offload=True),
    "gt.save": (save_gt, load_gt),
}


@pytest.mark.parametrize("kind", ["fused", "adagrad"])
@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_with_the_scale(session: Callable, tmp_path: Path, way: str, kind: str) -> None:
    save, load = WAYS[way]
    session(CONFIG)
    first = parts(0, kind)
    losses(*first, DATA[:8])
    save(*first, tmp_path / "c")
    scale = float(Current.loss_scale["scale"])
    want = losses(*first, DATA[8:])
    assert scale < 2.0**16 and len(set(want)) == 4
    session(CONFIG)
    again = parts(9, kind)
    load(*again, tmp_path / "c")
    assert float(Current.loss_scale["scale"]) == scale == 1 / float(Current.loss_scale["inverse"])
    assert losses(*again, DATA[8:]) == want


def test_a_state_without_scale_is_told_of(session: Callable, caplog: pytest.LogCaptureFixture) -> None:
    """As of a checkpoint in fp32. One with a scale loads into a session without, and into plain torch."""
    session(CONFIG)
    model, optimizer = parts(0, "sgd")
    losses(model, optimizer, DATA[:8])
    scaled, file = optimizer.state_dict(), io.BytesIO()
    torch.save(scaled, file)
    file.seek(0)
    plain = torch.optim.SGD(nn.Sequential(nn.Linear(12, 13), nn.Linear(13, 12)).parameters(), lr=0.1, momentum=0.9)
    plain.load_state_dict(torch.load(file, map_location="cpu"))
    plain.step()
    with caplog.at_level(logging.WARNING, "gt.client"):
        optimizer.load_state_dict(scaled)
        assert not caplog.records
        bare = [{key: value for key, value in group.items() if "scale" not in key} for group in scaled["param_groups"]]
        optimizer.load_state_dict({**scaled, "param_groups": bare})
    assert "no loss scale" in caplog.text
    session("")
    model, optimizer = parts(9, "sgd")
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))
    assert len(losses(model, optimizer, DATA[:2])) == 2 and not Current.loss_scale


def test_a_refused_load_gives_the_scale_back(session: Callable, tmp_path: Path) -> None:
    class Refusing:
        n = 1

        def state_dict(self) -> dict:
            return {"n": self.n}

        def load_state_dict(self, state: dict) -> None:
            if state["n"] != self.n:
                raise ValueError("not this one")

    session(CONFIG)
    model, optimizer = parts(0, "sgd")
    losses(model, optimizer, DATA[:1])
    gt.save({"optimizer": optimizer, "other": (other := Refusing())}, tmp_path / "c")
    losses(model, optimizer, DATA[1:8])
    scale = float(Current.loss_scale["scale"])
    other.n = 2
    with pytest.raises(CheckpointError, match="not this one"):
        gt.load(tmp_path / "c", into={"optimizer": optimizer, "other": other})
    assert float(Current.loss_scale["scale"]) == scale
