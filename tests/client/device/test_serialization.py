"""torch.save and torch.load of remote tensors: they are remote again unless map_location says otherwise."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import gt  # noqa: F401 - names the device
from tests.helpers.limits import limit

pytestmark = pytest.mark.usefixtures("one")


def file_of(thing: Any, **how: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(thing, file, **how)
    file.seek(0)
    return file


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(5, 3, device="remote")).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("how", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_tensors_are_where_they_were(weights_only: bool, how: dict) -> None:
    model, optimizer = trained()
    thing = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    thing |= {"host": torch.ones(2), "row": (torch.arange(3), 7)}
    loaded = torch.load(file_of(thing, **how), weights_only=weights_only)
    assert {t.device.type for t in loaded["model"].values()} == {"remote"}
    assert loaded["host"].device.type == loaded["row"][0].device.type == "cpu"
    moments = [state for entry in loaded["optimizer"]["state"].values() for name, state in entry.items() if name != "step"]
    assert {t.device.type for t in moments} == {"remote"}
    for name, t in model.state_dict().items():
        assert torch.equal(loaded["model"][name], t)


def test_a_whole_model_is_remote_again() -> None:
    model, _ = trained()
    tied = nn.ModuleList([nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)]).to("remote")
    tied[1].weight = tied[0].weight
    again, pair = torch.load(file_of([model, tied]), weights_only=False)
    x = torch.ones(2, 3, device="remote")
    assert torch.equal(again.eval()(x), model.eval()(x)) and pair[0].weight is pair[1].weight
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in again.parameters())


def test_a_whole_optimizer_goes_on() -> None:
    pairs = [trained()]
    pairs.append(torch.load(file_of(pairs[0]), weights_only=False))
    for model, optimizer in pairs:
        optimizer.zero_grad()
        model(torch.ones(5, 3, device="remote")).square().sum().backward()
        optimizer.step()
    weights, again = (list(model.parameters()) for model, _ in pairs)
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
    assert {p.device.type for p in pairs[1][1].state} == {"remote"}


DEVICE = object()  # torch.device("remote", 0), which torch does not know before a session where there is CUDA


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(
    ("location", "want"),
    [
        (None, ("remote", "cpu")), ("cpu", ("cpu", "cpu")), (torch.device("cpu"), ("cpu", "cpu")),
        ("remote", ("remote", "remote")), (DEVICE, ("remote", "remote")),
        ({"remote:0": "cpu"}, ("cpu", "cpu")), ({"cpu": "remote"}, ("remote", "remote")),
        (lambda storage, place: storage if place == "cpu" else None, ("remote", "cpu")),
        (lambda storage, place: storage, ("cpu", "cpu")),
    ],
)  # fmt: skip
def test_map_location_decides(location: Any, want: tuple[str, str], weights_only: bool) -> None:
    file = file_of({"there": torch.ones(2, device="remote"), "here": torch.ones(2)})
    place = torch.device("remote", 0) if location is DEVICE else location
    loaded = torch.load(file, map_location=place, weights_only=weights_only)
    assert (loaded["there"].device.type, loaded["here"].device.type) == want
    assert loaded["there"].sum().item() == loaded["here"].sum().item() == 2


def test_another_index_is_refused() -> None:
    with pytest.raises(RuntimeError, match="there is no remote:1"):
        torch.load(file_of(torch.ones(2)), map_location="remote:1")


def test_pickles_and_copies_are_as_before() -> None:
    x = torch.ones(2, device="remote")
    assert pickle.loads(pickle.dumps(x)).device.type == "cpu" and copy.deepcopy(x).device.type == "remote"


def test_a_process_without_gt_reads_it_on_the_cpu(tmp_path: Any) -> None:
    torch.save({"x": torch.ones(2, device="remote")}, tmp_path / "x.pt")
    program = f"import torch; print(torch.load({str(tmp_path / 'x.pt')!r}, map_location='cpu')['x'].tolist())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=limit(100))
    assert done.stdout.strip() == "[1.0, 1.0]", done.stderr


@pytest.mark.parametrize("how", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"])
@pytest.mark.parametrize("device", ["cpu", "remote"])
def test_tensors_of_one_memory_are_of_one_memory_again(device: str, how: dict) -> None:
    x = torch.arange(12.0).view(4, 3).to(device)
    thing = {"x": x, "rows": x[1:], "columns": x.t(), "data": x.data, "other": x + 0, "column": x[:, 1]}
    loaded = torch.load(file_of(thing, **how))
    loaded["x"].add_(100)
    for name, t in thing.items():
        want = t.cpu() + (0 if name == "other" else 100)
        assert torch.equal(loaded[name].cpu(), want), name
        assert loaded[name].stride() == t.stride(), name


def test_tied_weights_stay_tied_where_a_state_is_assigned() -> None:
    def tied(device: str) -> nn.Module:
        pair = nn.ModuleList([nn.Embedding(300, 30), nn.Linear(30, 300, bias=False)]).to(device)
        pair[1].weight = pair[0].weight
        return pair

    file = file_of(tied("remote").state_dict())
    assert len(file.getvalue()) < 300 * 30 * 4 * 1.5  # stored once
    again = tied("remote")
    again.load_state_dict(torch.load(file), assign=True)
    with torch.no_grad():
        again[0].weight.add_(1)
    assert torch.equal(again[0].weight, again[1].weight)


def test_a_part_of_a_tensor_is_saved_without_the_rest() -> None:
    large = torch.zeros(1000, 100, device="remote")
    file = file_of(large[:2])
    assert len(file.getvalue()) < 10_000 and torch.load(file).shape == (2, 100)
