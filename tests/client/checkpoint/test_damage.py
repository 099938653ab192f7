"""Random damage to a good checkpoint: gt.load gives exactly the saved state, or an error that leaves its target as it was."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gt
from gt.client.checkpoint.folder import sealed

VALUES: list[Any] = [
    None, True, 0, -1, 5, 1 << 61, 1 << 80, 0.5, "", "x", "..", "../x", "/etc/passwd", "a\0b", "\ud800", "x" * 5000, [], {},
    {"dict": 1}, {"tuple": None}, {"tensor": "model/none"}, {"complex": ["1"]}, {"float": "x"}, {"bytes": "?"}, {"dtype": "os"},
    {"array": "model/b.weight"}, {"ordered": [[1]]}, {"x": 1, "y": 2}, [1 << 40, 1 << 40, 0],
]  # fmt: skip


def state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(3, 2)})
    model["b"].half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    sum(p.float().sum() for p in model.parameters()).backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2 + seed)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "ema": [torch.full((3,), seed + 0.5)]}


def flat(thing: Any) -> Any:
    """The state as one text, to the bit."""
    if isinstance(thing, torch.Tensor):
        return f"{thing.dtype}{list(thing.shape)}{thing.detach().reshape(-1).contiguous().view(torch.uint8).tolist()}"
    if hasattr(thing, "state_dict"):
        thing = thing.state_dict()
    if isinstance(thing, dict):
        return {key: flat(value) for key, value in thing.items()}
    return [flat(value) for value in thing] if isinstance(thing, (list, tuple)) else repr(thing)


# ---- damage


def places(node: Any) -> list[tuple[Any, Any]]:
    """All containers of a JSON value with each of their keys."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    return [(node, key) for key in keys] + [row for key in keys for row in places(node[key])]


def edit(text: bytes, draw: random.Random) -> bytes:
    """JSON with a value changed, removed, or put under another key."""
    made = json.loads(text)
    node, key = draw.choice(places(made))
    kind = draw.randrange(4)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        node[draw.choice(["x", "..", "", "a.weight", "__metadata__", "tensor"])] = node.pop(key)
    elif kind == 2:
        other, place = draw.choice(places(made))
        node[key] = json.loads(json.dumps(other[place]))
    else:
        node[key] = draw.choice(VALUES)
    return json.dumps(made).encode()


def damage(folder: Path, draw: random.Random) -> str:
    """Change one file of a checkpoint, and its size in the manifest if the damage is meant to pass for whole."""
    files = sorted(folder.iterdir())
    path = draw.choice(files)
    data = path.read_bytes()
    kind = draw.choice(
        ["cut", "flip", "remove", "swap", "link", "fifo", "folder", "empty", "edit", "edit", "edit", "edit", "edit"]
    )
    if kind in ("remove", "link", "fifo", "folder"):
        path.unlink()
        if kind == "link":
            path.symlink_to(draw.choice([path, Path("/etc/passwd"), Path("/dev/zero"), folder, "gt.json"]))
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
    elif kind == "swap":
        path.write_bytes(draw.choice(files).read_bytes())
    elif kind == "edit" and path.suffix == ".json":
        path.write_bytes(edit(data, draw))
    elif kind == "edit":
        (length,) = struct.unpack("<Q", data[:8])
        header = edit(data[8 : 8 + length], draw)
        path.write_bytes(struct.pack("<Q", draw.choice([len(header)] * 9 + [1 << 63])) + header + data[8 + length :])
    elif kind == "flip":
        at = draw.randrange(
            min(len(data), 8 + struct.unpack("<Q", data[:8])[0] if path.suffix == ".safetensors" else len(data))
        )
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :])
    else:
        path.write_bytes(data[: 0 if kind == "empty" else draw.randrange(len(data))])
    manifest = folder / "gt.json"
    if draw.random() < 0.8 and path.is_file() and (kind == "edit" or path != manifest):
        made = json.loads(manifest.read_text())
        if path != manifest and isinstance(made, dict):
            made["files"][path.name] = path.stat().st_size
            made["sums"][path.name] = checksum(path)
        manifest.write_bytes(sealed({key: value for key, value in made.items() if key != "crc32"}))
        return f"{kind} {path.name} with its checksum"
    return f"{kind} {path.name}"


def checksum(path: Path) -> int:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0] if path.suffix == ".safetensors" and len(data) >= 8 else len(data)
    return zlib.crc32(data[: 8 + length])


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("part", range(4))
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path, part):
    gt.save({**state(0), "note": ("x", 1.5, b"\0", torch.float16), "step": 3}, tmp_path / "good")
    whole = flat(gt.load(tmp_path / "good"))
    target = state(1)
    before, refused = flat(target), 0
    for seed in range(part * COUNT, (part + 1) * COUNT):
        folder = tmp_path / str(seed)
        shutil.copytree(tmp_path / "good", folder)
        what = damage(folder, random.Random(seed))
        try:
            loaded = gt.load(folder, into=target, device="cpu")
        except gt.CheckpointError as error:
            refused += 1
            assert flat(target) == before, f"{seed}: {what} changed the target: {error}"
        except BaseException as error:
            raise AssertionError(f"{seed}: {what}: {type(error).__name__} {error}") from error
        else:
            # Names and Python's values are text, of which any with its checksum is a state
            if "with its checksum" not in what or not what.startswith(("edit", "flip")):
                assert flat(loaded) == whole, f"{seed}: {what} was taken"
            target = state(1)
        shutil.rmtree(folder)
    assert refused > COUNT / 3


COUNT = int(os.environ.get("GT_TEST_DAMAGES", "150"))


# ---- files that were made to hold up whoever reads them


def _reseal(folder: Path, **changed: Any) -> None:
    """Change the manifest of a checkpoint, as somebody who means harm would."""
    manifest = json.loads((folder / "gt.json").read_text())
    manifest.pop("crc32")
    for key, value in changed.items():
        manifest[key] = {**manifest[key], **value} if isinstance(manifest.get(key), dict) and key != "state" else value
    (folder / "gt.json").write_bytes(sealed(manifest))


@pytest.mark.parametrize("text", ["{}", '{"files": {}', "[" * 200_000, '{"files": [["a"], 1]}', "3"])
def test_a_manifest_of_somebody_else_does_not_prevent_a_save(tmp_path, text):
    (tmp_path / "gt.json").write_text(text)
    gt.save({"x": torch.ones(2)}, tmp_path)
    assert gt.load(tmp_path, device="cpu")["x"].tolist() == [1.0, 1.0]


def test_an_index_is_no_larger_than_what_is_read(tmp_path):
    gt.save({"x": torch.ones(2)}, tmp_path / "a")
    size = 40 << 30
    with open(tmp_path / "a" / "b.safetensors.index.json", "wb") as file:
        file.truncate(size)
    _reseal(tmp_path / "a", files={"b.safetensors.index.json": size}, sums={"b.safetensors.index.json": 1})
    with pytest.raises(gt.CheckpointError, match="at most 268435456 are read"):
        gt.load(tmp_path / "a", device="cpu")


def test_an_error_names_some_of_many_files(tmp_path):
    index = {"weight_map": {f"t{n}": f"{n}.safetensors" for n in range(2000)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(gt.CheckpointError, match=r"and 1980 others of its files are wrong") as raised:
        gt.load(tmp_path, device="cpu")
    assert len(str(raised.value)) < 10_000


def test_each_file_of_an_index_costs_the_same(tmp_path):
    for n in range(800):
        header = json.dumps({f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
        (tmp_path / f"{n}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"t{n}": f"{n}.safetensors" for n in range(800)}}))
    compared = Counted.comparisons
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(index), "__eq__", Counted.equal)
        assert len(gt.load(tmp_path, device="cpu")) == 800
    assert Counted.comparisons - compared < 800 * 20


class Counted:
    """Counts comparisons of paths."""

    comparisons = 0

    @staticmethod
    def equal(path: Path, other: object) -> bool:
        Counted.comparisons += 1
        return isinstance(other, Path) and str(path) == str(other)


def test_keys_of_one_hash_are_refused(tmp_path):
    gt.save({"x": torch.ones(2)}, tmp_path / "a")
    prime = (1 << 61) - 1  # Python's hash of a whole number is the number modulo this
    for others in (0, 6000):  # more of other hashes hide no key
        keys = [*(n * prime for n in range(5000)), *(f"other {n}" for n in range(others))]
        _reseal(tmp_path / "a", state={"dict": [[key, None] for key in keys]})
        with pytest.raises(gt.CheckpointError, match="5000 keys of one hash, want 100 at most"):
            gt.load(tmp_path / "a", device="cpu")
    _reseal(tmp_path / "a", state={"dict": [[n, None] for n in range(5000)]})
    assert len(gt.load(tmp_path / "a", device="cpu")) == 5000
