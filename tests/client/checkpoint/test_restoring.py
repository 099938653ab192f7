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
        gt.load(tmp_path / "c", into={"model": new})  # without torch's warning of a copy to meta, too
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


def test_a_norm_on_the_meta_device_takes_a_state_without_versions(one: None, tmp_path: Path) -> None:
    """Without torch's warning of a copy to meta: a norm adds the count that its part of an older state lacks."""
    model = nn.BatchNorm1d(3)
    model(torch.randn(4, 3))
    gt.save({"model": dict(model.state_dict())}, tmp_path / "c")
    new = nn.BatchNorm1d(3).to("meta")
    gt.load(tmp_path / "c", into={"model": new}, device="remote")
    assert all(torch.equal(value.cpu(), model.state_dict()[name]) for name, value in new.state_dict().items())
    assert new.num_batches_tracked.item() == 1


class Hooked(nn.Module):
    """A weight and a buffer; `hook(module, state)` sees a state before it is loaded."""

    def __init__(self, hook: Callable[[Any, dict], object], count: int = 4) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.register_buffer("b", torch.zeros(count))
        self.calls = 0
        self._register_load_state_dict_pre_hook(lambda state, *_: hook(self, state))


def saved(path: Path, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    state = {"w": torch.arange(2.0), "b": torch.arange(6.0), **more}
    gt.save({"model": state}, path)
    return state


def register(module: nn.Module, state: dict) -> None:
    module.register_buffer("b", torch.zeros_like(state["b"]))
    module.calls += 1


def assign(module: Any, state: dict) -> None:
    module.b.data = torch.zeros_like(state["b"])
    module.calls += 1


def resize(module: Any, state: dict) -> None:
    module.b.resize_(state["b"].shape)
    module.calls += 1


@pytest.mark.parametrize("device", ["cpu", "remote"])
@pytest.mark.parametrize("hook", [register, assign, resize])
def test_a_hook_may_give_a_buffer_the_shape_of_the_checkpoint(one: None, tmp_path: Path, hook: Callable, device: str) -> None:
    state = saved(tmp_path / "c")
    plain, model = Hooked(hook), Hooked(hook).to(device)
    plain.load_state_dict(state)
    gt.load(tmp_path / "c", into={"model": model}, device=device)
    assert all(torch.equal(value, model.state_dict()[name].cpu()) for name, value in plain.state_dict().items())
    assert model.calls == plain.calls == 1
    assert model._load_state_dict_pre_hooks


@pytest.mark.parametrize("device", ["cpu", "remote"])
@pytest.mark.parametrize("hook", [register, assign, resize])
def test_a_refused_load_takes_back_what_a_hook_changed(one: None, tmp_path: Path, hook: Callable, device: str) -> None:
    saved(tmp_path / "c", more=torch.ones(1))
    model = Hooked(hook).to(device)
    buffer = model.b
    with pytest.raises(gt.CheckpointError, match=r"model\.more is in the checkpoint, and not in the module"):
        gt.load(tmp_path / "c", into={"model": model}, device=device)
    assert model.b is buffer
    assert buffer.shape == (4,)
    assert not buffer.any()
    assert model.calls == 0


def test_an_object_that_refuses_its_state_takes_back_what_a_hook_changed(tmp_path: Path) -> None:
    class Refuses:
        def state_dict(self) -> dict:
            return {"x": 0}

        def load_state_dict(self, state: dict) -> None:
            if state["x"]:
                raise RuntimeError("not this one")

    gt.save({"model": {"w": torch.arange(2.0), "b": torch.arange(6.0)}, "other": {"x": 1}}, tmp_path / "c")
    model = Hooked(register)
    with pytest.raises(gt.CheckpointError, match="other refuses its state"):
        gt.load(tmp_path / "c", into={"model": model, "other": Refuses()})
    assert model.b.shape == (4,)


def fails(module: Any, state: dict) -> None:
    module.register_buffer("b", torch.zeros(1))
    state["b"] = torch.cat([state["b"], torch.zeros(2, 2)])


@pytest.mark.parametrize("count", [4, 6])  # of other shapes, and of the checkpoint's
def test_a_hook_that_fails_is_a_checkpoint_error_before_anything_changes(tmp_path: Path, count: int) -> None:
    state = saved(tmp_path / "c")
    gt.save({"first": torch.ones(3), "model": state}, tmp_path / "c")
    first, model = torch.zeros(3), Hooked(fails, count)
    with pytest.raises(gt.CheckpointError, match="model is refused by a load hook: RuntimeError Tensors") as caught:
        gt.load(tmp_path / "c", into={"first": first, "model": model})
    assert type(caught.value.__cause__) is RuntimeError
    assert not first.any()
    assert model.b.shape == (count,)


def test_what_hooks_report_is_a_difference(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.zeros(2)))
    model.register_buffer("b", torch.zeros(6))
    model._register_load_state_dict_pre_hook(lambda *args: (args[4].append("scale"), args[6].append("too old")))
    with pytest.raises(gt.CheckpointError, match=r"by a load hook: too old; model\.scale is missing or unexpected"):
        gt.load(tmp_path / "c", into={"model": model})
    assert not model.w.any()


def doubled(module: Any, state: dict) -> None:
    state["w"].mul_(2)
    state["b"] = state.pop("old") * 2 if "old" in state else state["b"] * 2


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("device", ["cpu", "remote", "meta"])
def test_a_hook_that_computes_is_applied_once(one: None, tmp_path: Path, device: str, old: bool) -> None:
    state = {"w": torch.arange(2.0), "old" if old else "b": torch.arange(4.0)}
    gt.save({"model": state}, tmp_path / "c")
    model = Hooked(doubled).to(device)
    loaded = gt.load(tmp_path / "c", into={"model": model}, device="cpu" if device == "cpu" else "remote")
    assert model.w.tolist() == [0.0, 2.0]
    assert model.b.tolist() == [0.0, 2.0, 4.0, 6.0]
    if device != "cpu":
        assert loaded["model"]["w"].tolist() == [0.0, 1.0]


def test_a_hook_that_works_once_is_not_lost(tmp_path: Path) -> None:
    def rename(module: Any, state: dict) -> None:
        if not module.calls:
            state["b"] = state.pop("old")
        module.calls += 1

    gt.save({"model": {"w": torch.arange(2.0), "old": torch.arange(4.0)}}, tmp_path / "c")
    model = Hooked(rename)
    gt.load(tmp_path / "c", into={"model": model})
    assert model.b.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_hook_sees_the_names_of_its_module_only(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    model = nn.Sequential(Hooked(lambda module, state: seen.append(sorted(state))), nn.Linear(2, 2))
    gt.save({"model": model}, tmp_path / "c")
    gt.load(tmp_path / "c", into={"model": model})
    assert seen == [["0.b", "0.w"]]


def test_a_default_of_a_hook_on_the_meta_device_is_named(tmp_path: Path) -> None:
    gt.save({"model": {"w": torch.arange(2.0)}}, tmp_path / "c")
    model = Hooked(lambda module, state: state.setdefault("b", torch.zeros_like(module.b))).to("meta")
    with pytest.raises(gt.CheckpointError, match=r"model\.b is on the meta device after the load hooks"):
        gt.load(tmp_path / "c", into={"model": model})
    assert model.w.is_meta


class Frozen(nn.Module):
    """A norm whose load code fills what a state lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(3))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}mean" not in state:
            state[f"{prefix}mean"] = torch.zeros(3)
        super()._load_from_state_dict(state, prefix, *rest)


def test_load_code_of_a_user_sees_tensors_of_the_meta_device_too(one: None, tmp_path: Path) -> None:
    gt.save({"model": {"mean": torch.full((3,), 5.0)}}, tmp_path / "c")
    with torch.device("meta"):
        model = Frozen()
    gt.load(tmp_path / "c", into={"model": model}, device="cpu")
    assert model.mean.tolist() == [5.0] * 3


def test_a_hook_sees_the_versions_as_torch_shows_them(tmp_path: Path) -> None:
    model, seen = nn.BatchNorm1d(3), []
    gt.save({"model": model.state_dict()}, tmp_path / "c")
    model.register_load_state_dict_pre_hook(lambda module, state, *rest: seen.append(state._metadata[""]["version"]))
    gt.load(tmp_path / "c", into={"model": model})
    assert seen == [2]


def test_a_save_at_the_end_of_the_program_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an atexit handler: once the main thread has ended, no other thread is waited for."""
    monkeypatch.setattr(saving.Save, "_begin", lambda self, writer: pytest.fail("a thread was started"))
    monkeypatch.setattr(saving.threading, "main_thread", threading.Thread)  # one that does not run
    assert gt.save({"x": torch.ones(3)}, tmp_path / "c", wait=False).done
    assert gt.load(tmp_path / "c")["x"].tolist() == [1.0] * 3
