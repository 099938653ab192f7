"""Folders of checkpoints: the old one is whole until the new one is, and a killed writer's folder is removed by the next."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gt
from gt.client.checkpoint import folder
from gt.client.checkpoint.folder import NewFolder, find
from gt.errors import CheckpointError


def write(path, text: bytes, name="a.safetensors"):
    made = NewFolder(path)
    made.put(name, text)
    made.commit(json.dumps({"files": {name: len(text)}}).encode())


def names(path):
    return sorted(os.listdir(path))


@pytest.mark.parametrize("exchange", [True, False])
def test_a_new_checkpoint_replaces_the_old_one_and_keeps_other_files(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(folder, "_exchange", lambda *_: False)
    target = tmp_path / "deep" / "c"
    write(target, b"one")
    (target / "config.json").write_text("{}")
    write(target, b"two", "b.safetensors")
    assert names(target) == ["b.safetensors", "config.json", "gt.json"] and names(tmp_path / "deep") == ["c"]
    assert (target / "b.safetensors").read_bytes() == b"two"


def test_a_save_that_is_discarded_leaves_the_old_one(tmp_path):
    write(tmp_path / "c", b"one")
    made = NewFolder(tmp_path / "c")
    made.put("a.safetensors", b"two")
    made.remove_incomplete()
    made.remove_incomplete()
    assert (tmp_path / "c" / "a.safetensors").read_bytes() == b"one" and names(tmp_path) == ["c"]


def test_folders_of_dead_writers_are_removed_and_those_of_living_ones_stay(tmp_path):
    living = NewFolder(tmp_path / "c")
    living.put("x", b"1")
    dead = NewFolder(tmp_path / "c")
    dead.put("x", b"1")
    os.close(dead._lock)  # as the kernel does for a process that was killed
    write(tmp_path / "c", b"one")
    left = [name for name in names(tmp_path) if name != "c"]
    assert left == [living.path.name]
    living.commit(b'{"files": {"x": 1}}')
    assert names(tmp_path) == ["c"] and names(tmp_path / "c") == ["gt.json", "x"]
    for fd in dead.files.values():
        os.close(fd)


def test_killed_between_two_renames_the_old_one_is_found(tmp_path, monkeypatch):
    write(tmp_path / "c", b"one")
    monkeypatch.setattr(folder, "_exchange", lambda *_: False)
    made = NewFolder(tmp_path / "c")
    made.put("a.safetensors", b"two")
    rename = os.rename

    def killed(source, target):
        rename(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        made.commit(b'{"files": {}}')
    monkeypatch.undo()
    assert not (tmp_path / "c").exists() and (find(tmp_path / "c") / "a.safetensors").read_bytes() == b"one"
    made.remove_incomplete()
    write(tmp_path / "c", b"three")
    assert names(tmp_path) == ["c"]


def test_what_is_no_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(CheckpointError, match="is a file, want a folder"):
        NewFolder(tmp_path / "file")
    (tmp_path / "home" / "letters").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="'letters', which is not a plain file, and a save would replace it"):
        NewFolder(tmp_path / "home")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "x").symlink_to("/etc")
    with pytest.raises(CheckpointError, match="not a plain file"):
        NewFolder(tmp_path / "links")
    with pytest.raises(CheckpointError, match="does not exist"):
        find(tmp_path / "none")


def test_a_folder_that_no_rename_replaces_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is the program's working folder, which a save cannot replace: save to a folder"):
        NewFolder(".")
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path).endswith("volume"))
    with pytest.raises(CheckpointError, match="volume is a mount point, which a save cannot replace"):
        NewFolder("volume")
    assert names(tmp_path) == ["volume"]


def test_weights_that_others_would_read_in_place_of_the_new_ones_are_refused(tmp_path):
    """from_pretrained reads model.safetensors before any index."""
    write(tmp_path / "c", b"one")
    (tmp_path / "c" / "model.safetensors").write_bytes(b"theirs")
    with pytest.raises(CheckpointError, match=r"has model\.safetensors, which transformers and others read in place of this"):
        gt.save({"model": {"w": torch.ones(2)}}, tmp_path / "c")
    assert names(tmp_path) == ["c"] and (tmp_path / "c" / "a.safetensors").read_bytes() == b"one"
    gt.save({"other": {"w": torch.ones(2)}}, tmp_path / "c")
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == b"theirs"


def test_where_files_cannot_be_linked_they_are_copied_and_the_mode_stays(tmp_path, monkeypatch):
    write(tmp_path / "c", b"one")
    (tmp_path / "c" / "config.json").write_text("{}")
    (tmp_path / "c").chmod(0o750)

    def link(*args, **kwargs):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    write(tmp_path / "c", b"two")
    assert (tmp_path / "c" / "config.json").read_text() == "{}" and (tmp_path / "c").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("number", [11, 38])
def test_a_folder_that_cannot_be_locked_ends_no_save_in_a_loop(tmp_path, monkeypatch, number):
    """Without locks a save works, and leaves what killed ones left; a folder that others take all the time is an error."""
    write(tmp_path / "c", b"one")
    left = tmp_path / ".c.gt-saving-0"
    left.mkdir()

    def flock(fd, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(folder.fcntl, "flock", flock)
    if number == 38:  # ENOSYS
        write(tmp_path / "c", b"two")
        assert (tmp_path / "c" / "a.safetensors").read_bytes() == b"two" and left.exists()
    else:
        with pytest.raises(CheckpointError, match="replaced by others all the time"):
            write(tmp_path / "c", b"two")
        assert (tmp_path / "c" / "a.safetensors").read_bytes() == b"one"


def test_a_relative_path_is_that_of_the_call_and_a_removed_working_folder_is_named(tmp_path, monkeypatch):
    for name in ("one", "two", "gone"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    saving = gt.save({"a": torch.ones(2)}, "c", wait=False)
    monkeypatch.chdir(tmp_path / "two")
    saving.wait()
    assert (tmp_path / "one" / "c" / folder.MANIFEST).is_file() and not list((tmp_path / "two").iterdir())
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(gt.CheckpointError, match="c cannot be read: the program's working folder has been removed"):
        gt.load("c", device="cpu")
    with pytest.raises(gt.CheckpointError, match="c cannot be written: no such file"):
        gt.save({"a": torch.ones(2)}, "c")


def test_a_link_to_a_checkpoint_stays_a_link(tmp_path):
    write(tmp_path / "c1", b"one")
    (tmp_path / "last").symlink_to("c1")
    write(tmp_path / "last", b"two")
    assert (tmp_path / "last").is_symlink() and (tmp_path / "c1" / "a.safetensors").read_bytes() == b"two"


def save_numbers(path, first, count):
    """One of several programs: checkpoints of which all values are one number, without workers."""
    for number in range(first, first + count):
        gt.save({"model": {"w": torch.full((50,), number)}, "rest": [torch.full((3,), number)], "number": number}, path)


def test_programs_that_save_and_load_one_path_at_once_see_whole_checkpoints(tmp_path):
    """Two names of one folder, in the same moment: neither a torn read, nor a failed save, nor a leftover."""
    path = tmp_path / "a[b]*?"  # no pattern
    save_numbers(path, 39, 1)
    with ThreadPoolExecutor(2) as pool:
        saves = [pool.submit(save_numbers, path, first, 40) for first in (0, 1000)]
        while not all(save.done() for save in saves):
            state = gt.load(path)
            values = {*state["model"]["w"].tolist(), *state["rest"][0].tolist(), state["number"]}
            assert len(values) == 1, values
        for save in saves:
            save.result()
    assert gt.load(path)["number"] in (39, 1039)
    save_numbers(path, 5000, 1)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
