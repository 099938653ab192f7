"""Loads into objects that hooks, extra states and tensors of odd kinds make special: as in plain torch, or nothing changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gt
from gt.client.checkpoint import restoring, saving


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


REFUSED = {
    "expanded": (lambda: torch.zeros(1).expand(3), "is expanded"),
    "inference": (inferred, "was made in inference mode"),
    "sparse": (lambda: torch.zeros(3).to_sparse(), ".* has layout torch.sparse_coo"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_that_cannot_be_written_is_named_before_anything_changes(tmp_path: Path, kind: str) -> None:
    make, said = REFUSED[kind]
    gt.save({"first": torch.ones(3), "second": torch.ones(3)}, tmp_path / "c")
    first = torch.zeros(3)
    with pytest.raises(gt.CheckpointError, match=f"second {said}"):
        gt.load(tmp_path / "c", into={"first": first, "second": make()})
    assert not first.any()


def test_an_expanded_parameter_is_named_before_anything_changes(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    gt.save({"model": model}, tmp_path / "c")
    model.bias = nn.Parameter(torch.zeros(1).expand(3))
    weight = model.weight.detach().zero_()
    with pytest.raises(gt.CheckpointError, match=r"model\.bias is expanded"):
        gt.load(tmp_path / "c", into={"model": model})
    assert not weight.any()


def test_a_lazy_module_is_named(tmp_path: Path) -> None:
    gt.save({"model": nn.Linear(3, 4)}, tmp_path / "c")
    with pytest.raises(gt.CheckpointError, match=r"model\.weight is a lazy module's"):
        gt.load(tmp_path / "c", into={"model": nn.LazyLinear(4)})


class History(nn.Module):
    """Its extra state is a tensor that grows."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.seen = torch.arange(count)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_an_extra_state_may_be_a_tensor_of_another_shape(tmp_path: Path) -> None:
    gt.save({"model": History(5)}, tmp_path / "c")
    model = History(0)
    gt.load(tmp_path / "c", into={"model": model})
    assert model.seen.tolist() == [0, 1, 2, 3, 4]


def test_names_of_older_states_are_those_of_the_hook(session: Callable, tmp_path: Path) -> None:
    """As of weights that have been normalised by torch's older weight_norm, which transformers' files have."""
    model = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    state = model.state_dict()
    old = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1", "bias": "bias"}
    session("gt: {data_parallel: [0, 1], zero: 3}")
    gt.save({"model": {"net." + name: state[own].to("remote") for name, own in old.items()}}, tmp_path / "c")
    for device in ("remote", "meta"):
        new = nn.Sequential()
        new.net = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)).to(device)
        if device == "meta":
            with pytest.warns(UserWarning, match="no-op"):
                gt.load(tmp_path / "c", into={"model": new})
        else:
            gt.load(tmp_path / "c", into={"model": new})
        assert all(torch.equal(value.cpu(), state[name[4:]]) for name, value in new.state_dict().items())


class Defaults(nn.Module):
    """A hook gives a tensor that older states lack its default."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(self.fill)

    @staticmethod
    def fill(module: nn.Module, state: dict, prefix: str, *_: Any) -> None:
        state.setdefault(prefix + "a.bias", torch.zeros(2))


@pytest.mark.parametrize("lacks", [False, True])
def test_a_hook_sees_the_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: bool) -> None:
    monkeypatch.setattr(restoring, "PART_BYTES", 1)
    monkeypatch.setattr(restoring, "MAX_PARTS", 1000)
    want = {name: value + 1 for name, value in Defaults().state_dict().items()}
    gt.save({"model": {name: value for name, value in want.items() if not lacks or name != "a.bias"}}, tmp_path / "c")
    model = Defaults()
    gt.load(tmp_path / "c", into={"model": model})
    if lacks:
        want["a.bias"] = torch.zeros(2)
    assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())


def test_a_save_at_the_end_of_the_program_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an atexit handler: once the main thread has ended, no other thread is waited for."""
    monkeypatch.setattr(saving.Save, "_begin", lambda self, writer: pytest.fail("a thread was started"))
    monkeypatch.setattr(saving.threading, "main_thread", threading.Thread)  # one that does not run
    assert gt.save({"x": torch.ones(3)}, tmp_path / "c", wait=False).done
    assert gt.load(tmp_path / "c")["x"].tolist() == [1.0] * 3
