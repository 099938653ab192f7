"""torch.distributed.checkpoint with remote tensors: its own format is written and read, for interchange."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def made(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to("remote")
    return model, torch.optim.AdamW(model.parameters())


def step(model, optimizer):
    loss = model(torch.ones(4, 16, device="remote")).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def test_a_model_and_its_optimizer_are_saved_and_resumed(one, tmp_path):
    parts = made()
    step(*parts)
    model, optimizer = get_state_dict(*parts)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c", no_dist=True)
    losses = [step(*parts) for _ in range(3)]
    fresh = made(1)
    model, optimizer = get_state_dict(*fresh)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c", no_dist=True)
    set_state_dict(*fresh, model_state_dict=model, optim_state_dict=optimizer)
    assert [step(*fresh) for _ in range(3)] == losses
    plain = {"model": nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).state_dict()}
    dcp.load(plain, checkpoint_id=tmp_path / "c", no_dist=True)  # without a remote tensor


def test_an_asynchronous_save_has_the_values_of_its_call(one, tmp_path):
    model, optimizer = made()
    want = {key: value.cpu() for key, value in model.state_dict().items()}
    future = dcp.async_save({"model": model.state_dict()}, checkpoint_id=tmp_path / "c", no_dist=True)
    step(model, optimizer)
    future.result()
    read = {"model": {key: torch.zeros_like(value) for key, value in want.items()}}
    dcp.load(read, checkpoint_id=tmp_path / "c", no_dist=True)
    assert all(torch.equal(read["model"][key], want[key]) for key in want)


def test_its_safetensors_are_read_by_gt_and_those_of_gt_by_it(one, tmp_path):
    model, _ = made()
    want = {key: value.cpu() for key, value in model.state_dict().items()}
    dcp.save(dict(model.state_dict()), storage_writer=HuggingFaceStorageWriter(str(tmp_path / "theirs")), no_dist=True)
    loaded = gt.load(tmp_path / "theirs")
    assert all(torch.equal(loaded[key].cpu(), want[key]) for key in want)
    gt.save(model, tmp_path / "ours")
    read = {key: torch.zeros_like(value) for key, value in want.items()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(tmp_path / "ours")), no_dist=True)
    assert all(torch.equal(read[key], want[key]) for key in want)


def test_streams_and_events_are_in_the_order_of_the_program(one):
    side = torch.remote.Stream()
    event = torch.remote.Event()
    side.wait_stream(torch.remote.current_stream())
    with torch.remote.stream(side):
        x = torch.ones(3, device="remote") * 2
        side.record_event(event)
    torch.remote.current_stream().wait_event(event)
    assert side == torch.remote.default_stream() and event.query() and side.query()
    side.synchronize()
    assert x.tolist() == [2, 2, 2]
    torch.linalg.cholesky(-torch.eye(3, device="remote"))
    with pytest.raises(gt.OpFailed):
        event.synchronize()
    with pytest.raises(gt.UnsupportedOp, match=r"time\.perf_counter"):
        event.elapsed_time(event)
