"""torch.distributed.checkpoint with remote tensors: its own format is written and read, for interchange."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
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
    torch.nn.functional.embedding(torch.tensor([9], device="remote"), torch.ones(3, 2, device="remote"))  # there is no row 9
    with pytest.raises(gt.OpFailed):
        event.synchronize()
    with pytest.raises(gt.UnsupportedOp, match=r"time\.perf_counter"):
        event.elapsed_time(event)


# ---- odd states, and files of others


class Chunked(DefaultSavePlanner):
    """Saves each matrix as `ranks` ranks of a sharded program do: a chunk of rows from each."""

    def __init__(self, ranks: int) -> None:
        super().__init__(dedup_save_to_lowest_rank=False)
        self.ranks = ranks

    def create_local_plan(self):
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            data = item.tensor_data
            rows = data.size[0] if data is not None and data.size else 0
            step = max(1, -(-rows // self.ranks))
            for at in range(0, rows, step) if rows > 1 else ():
                offsets, sizes = (at, *[0] * (len(data.size) - 1)), (min(step, rows - at), *data.size[1:])
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                index = MetadataIndex(item.index.fqn, chunk.offsets, at // step)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=replace(data, chunk=chunk)))
            if rows <= 1:
                items.append(item)
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item):
        if write_item.type == WriteItemType.SHARD:
            chunk = write_item.tensor_data.chunk
            rows = slice(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
            return self.state_dict[write_item.index.fqn].detach()[rows].clone()
        return super().resolve_data(write_item)


def odd_state(value, device):
    """Tensors of many dtypes and shapes in nested dicts, and state that is no tensor."""
    whole = torch.arange(24.0).reshape(4, 6) + value
    fp8 = {str(dtype): whole.to(dtype).to(device) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
    return {
        "deep": {"er": {"w": whole.to(device), "b": whole[0].bfloat16().to(device)}, **fp8},
        "scalar": torch.tensor(value, device=device),
        "count": torch.tensor([int(value)], device=device),
        "flag": (whole > 3).to(device),
        "empty": torch.empty(0, 3, device=device),
        "list": [whole[1:].clone().to(device), 7 + value],
        "step": int(value),
        "name": f"run {value}",
        "nothing": None,
    }


def flat(state, prefix=""):
    rows = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, part in rows:
        yield from flat(part, f"{prefix}{key}.")
    if not isinstance(state, (dict, list)):
        yield (
            prefix,
            repr(state.cpu().view(torch.uint8).tolist() if state.dim() else state.item()) if torch.is_tensor(state) else state,
        )


@pytest.mark.parametrize("ranks", [0, 1, 3])
@pytest.mark.parametrize("here, there", [("cpu", "remote"), ("remote", "cpu"), ("remote", "remote")])
def test_odd_states_of_any_world_size_are_read(session, tmp_path, here, there, ranks):
    """ranks: of the program that saved, 0 for torch's own plan."""
    session("gt: {data_parallel: [0, 1, 2], zero: 3}")
    planner = Chunked(ranks) if ranks else None
    dcp.save(odd_state(2.0, here), checkpoint_id=tmp_path / "c", no_dist=True, planner=planner)
    (tmp_path / "c" / "notes.txt").write_text("not of the checkpoint")
    (tmp_path / "c" / "__9_0.distcp").write_bytes(b"of a larger world, and of no entry")
    read = odd_state(5.0, there)
    dcp.load(read, checkpoint_id=tmp_path / "c", no_dist=True)
    assert dict(flat(read)) == dict(flat(odd_state(2.0, "cpu")))
    assert read["deep"]["er"]["w"].device.type == there


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def foreign(path):
    path.write_bytes(os.urandom(path.stat().st_size))


DAMAGES = {
    "no metadata": (".metadata", lambda path: path.unlink(), "metadata"),
    "cut metadata": (".metadata", cut, "metadata"),
    "foreign metadata": (".metadata", foreign, "metadata"),
    "missing": ("__0_1.distcp", lambda path: path.unlink(), r"__0_1\.distcp"),
    "cut": ("__0_1.distcp", cut, r"__0_1\.distcp has \d+ bytes, .* ends at \d+: it was cut"),
    "foreign": ("__0_1.distcp", foreign, r"__0_1\.distcp has no tensor"),
    "swapped": ("__0_1.distcp", lambda path: path.write_bytes((path.parent / "__0_0.distcp").read_bytes()), r"__0_1\.distcp"),
    "folder": ("__0_1.distcp", lambda path: (path.unlink(), path.mkdir()), r"__0_1\.distcp"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_files_are_named_before_anything_is_changed(one, tmp_path, how):
    name, damage, said = DAMAGES[how]
    state = {f"w{n}": torch.full((20 + n, 30), 2.0) for n in range(4)}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "c", thread_count=2), no_dist=True)
    damage(tmp_path / "c" / name)
    read = {key: torch.full_like(value, 5.0, device="remote") for key, value in state.items()}
    with pytest.raises(CheckpointException, match=said) as caught:
        dcp.load(read, checkpoint_id=tmp_path / "c", no_dist=True)
    assert str(tmp_path / "c") in str(caught.value) or "metadata" in how
    assert all(value.unique().tolist() == [5.0] for value in read.values())


def test_another_shape_or_name_is_refused_before_anything_is_changed(one, tmp_path):
    dcp.save({"a": torch.ones(3), "b": torch.ones(4)}, checkpoint_id=tmp_path / "c", no_dist=True)
    for other, said in (
        ({"b": torch.zeros(5, device="remote")}, "ize mismatch"),
        ({"x": torch.zeros(4, device="remote")}, "x"),
    ):
        read = {"a": torch.zeros(3, device="remote"), **other}
        with pytest.raises(CheckpointException, match=said):
            dcp.load(read, checkpoint_id=tmp_path / "c", no_dist=True)
        assert read["a"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("how", ["missing", "cut", "foreign", "renamed"])
def test_damaged_safetensors_are_named_before_anything_is_changed(one, tmp_path, how):
    """The reader makes its metadata of the files that it finds, so a file may also change after that."""
    state = {f"w{n}": torch.full((20, 30), 2.0) for n in range(4)}
    index = {key: n // 2 + 1 for n, key in enumerate(state)}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "c"), index), no_dist=True)
    last = sorted((tmp_path / "c").glob("*.safetensors"))[-1]

    class Late(HuggingFaceStorageReader):
        def read_metadata(self):
            metadata = super().read_metadata()
            if how == "missing":
                last.unlink()
            elif how == "renamed":
                save_file({"x": torch.ones(2)}, last)
            else:
                (cut if how == "cut" else foreign)(last)
            return metadata

    read = {key: torch.full_like(value, 5.0, device="remote") for key, value in state.items()}
    with pytest.raises(CheckpointException, match=last.name):
        dcp.load(read, storage_reader=Late(str(tmp_path / "c")), no_dist=True)
    assert all(value.unique().tolist() == [5.0] for value in read.values())
