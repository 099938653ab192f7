"""Every call of the system that a save makes fails once: the error names cause and path, and no checkpoint is harmed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gt
from gt.client.checkpoint import folder
from gt.client.exchange import arenas
from tests.helpers.processes import started

WAYS = ["shared", "shared later", "streamed", "streamed later"]
NUMBERS = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES]


@pytest.fixture
def path(session: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint of ones. Whatever happens, it loads at the end, or one of twos, and nothing is beside it."""
    session()
    where = tmp_path / "checkpoint"
    gt.save(state(1), where)
    yield where
    monkeypatch.undo()
    loaded = gt.load(where, device="cpu")
    assert {float(n) for t in loaded["model"].values() for n in t.flatten().tolist()} in ({1.0}, {2.0})
    assert os.listdir(tmp_path) == ["checkpoint"]
    gt.save(state(3), where)
    assert gt.load(where)["model"]["wide"][0, 0].item() == 3 and os.listdir(tmp_path) == ["checkpoint"]


def state(value: float) -> dict[str, Any]:
    """Tensors of workers, one of several messages, and one of this process."""
    wide, here = torch.full((700, 1000), float(value), device="remote"), torch.full((9,), float(value))
    return {"model": {"wide": wide, "small": torch.full((5,), float(value), device="remote"), "here": here}}


def save(path: Path, way: str, monkeypatch: pytest.MonkeyPatch, value: float = 2) -> None:
    if way.startswith("streamed"):
        monkeypatch.setattr(arenas.ClientArenas, "take", lambda self, nbytes: None)
    gt.save(state(value), path, wait="later" not in way).wait()


# ---- each call of this process


CALLS = {
    os: ("open", "mkdir", "ftruncate", "posix_fallocate", "pwrite", "fsync", "chmod", "rename", "scandir", "link"),
    fcntl: ("flock",),
    folder: ("_exchange",),
}


class Fault:
    """Counts calls on the checkpoint's folder and what is beside it; fails the one with a number, if it has one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, parent: Path, number: int = errno.EIO, fails: int = -1) -> None:
        self.names: list[str] = []
        self._parent, self._number, self._fails = os.fspath(parent), number, fails
        for module, names in CALLS.items():
            for name in names:
                monkeypatch.setattr(module, name, self._wrapped(name, getattr(module, name)))

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._of_the_save(args[0]):
                self.names.append(name)
                if len(self.names) - 1 == self._fails:
                    raise OSError(self._number, os.strerror(self._number), *[str(args[0])] * (not isinstance(args[0], int)))
            return call(*args, **kwargs)

        return counted

    def _of_the_save(self, target: Any) -> bool:
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
            return name.startswith(self._parent)
        return False


@pytest.mark.parametrize("way", WAYS)
def test_a_save_of_which_any_one_call_fails_harms_no_checkpoint(path, way, monkeypatch):
    """Leftovers that could not be removed are removed by the next save, so each save is followed by a good one."""
    (path / "config.json").write_text("{}")  # a file that is kept
    with monkeypatch.context() as patch:
        fault = Fault(patch, path.parent)
        save(path, way, patch, 1)
    assert {"open", "mkdir", "ftruncate", "posix_fallocate", "fsync", "_exchange", "link"} <= set(fault.names)
    failed = []
    for at, name in enumerate(fault.names):
        number = NUMBERS[at % len(NUMBERS)]
        with monkeypatch.context() as patch:
            fault = Fault(patch, path.parent, number, at)
            try:
                save(path, way, patch, 2)
            except gt.CheckpointError as error:
                failed.append(name)
                assert str(path) in str(error) and os.strerror(number).lower() in str(error), f"{name}: {error}"
        assert gt.load(path, device="cpu")["model"]["here"][0].item() in (1.0, 2.0), f"{at}: {name} {os.strerror(number)}"
        assert (path / "config.json").exists(), f"{at}: {name} {os.strerror(number)}"
        save(path, "shared", monkeypatch, 1)
        assert os.listdir(path.parent) == ["checkpoint"], f"{at}: {name} {os.strerror(number)}"
    assert len(failed) > len(fault.names) // 2


# ---- faults of real disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 5 MiB, with room for one checkpoint and no second one."""
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=5m,huge=never", "none", where]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system is mounted by root alone")
    yield where
    subprocess.run(["umount", "-l", where], check=True)  # workers may have files of it open


def reserves_nothing(fd: int, offset: int, nbytes: int) -> None:
    """In place of os.posix_fallocate: a file system that cannot, as those that compress, so that writes fail."""
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


@pytest.mark.parametrize("reserves", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_full_disk(session, disk, way, reserves, monkeypatch):
    session()
    gt.save(state(1), disk / "c")
    if not reserves:
        monkeypatch.setattr(os, "posix_fallocate", reserves_nothing)
    with pytest.raises(gt.CheckpointError, match=r"disk/c cannot be saved: .*no space left on device"):
        save(disk / "c", way, monkeypatch)
    monkeypatch.undo()
    assert os.listdir(disk) == ["c"] and gt.load(disk / "c", device="cpu")["model"]["wide"].sum().item() == 700_000
    assert torch.ones(3, device="remote").sum().item() == 3


@pytest.fixture
def small_files() -> Iterator[None]:
    """This process and all workers write no byte of a file beyond the first MiB."""
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in (os.getpid(), *started())}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    for pid, limits in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("way", WAYS)
def test_files_are_limited(path, way, monkeypatch, small_files):
    monkeypatch.setattr(os, "posix_fallocate", reserves_nothing)
    monkeypatch.setattr(os, "ftruncate", lambda fd, nbytes: extend(fd, nbytes))
    with pytest.raises(gt.CheckpointError, match=r"checkpoint cannot be saved: .*file too large"):
        save(path, way, monkeypatch)


def extend(fd: int, nbytes: int) -> None:
    """As os.ftruncate, without this process's limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:
        os.truncate(f"/proc/self/fd/{fd}", nbytes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- the folder in the middle of a save


@pytest.fixture
def in_the_middle(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], Any]], None]:
    """`in_the_middle(act)`: act has the new folder once all of its tensors are written, before it takes its place."""

    def prepare(act: Callable[[Path], Any]) -> None:
        commit = folder.NewFolder.commit

        def late(self: folder.NewFolder, manifest: bytes) -> None:
            act(self.path)
            commit(self, manifest)

        monkeypatch.setattr(folder.NewFolder, "commit", late)

    return prepare


@pytest.mark.parametrize("way", WAYS)
def test_the_new_folder_is_removed_by_others(path, way, monkeypatch, in_the_middle):
    in_the_middle(shutil.rmtree)
    with pytest.raises(gt.CheckpointError, match=r"checkpoint cannot be saved: .*no such file or directory"):
        save(path, way, monkeypatch)


def test_a_read_only_disk(disk):
    gt.save({"model": {"here": torch.ones(9)}}, disk / "c")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(gt.CheckpointError, match="disk/c cannot be written: read-only file system"):
        gt.save({"model": {"here": torch.zeros(9)}}, disk / "c")
    assert os.listdir(disk) == ["c"] and gt.load(disk / "c")["model"]["here"].tolist() == [1] * 9


@pytest.mark.parametrize("way", WAYS)
def test_the_name_is_taken_in_the_middle(path, way, monkeypatch, in_the_middle, tmp_path):
    def take(new: Path) -> None:
        shutil.move(path, tmp_path / "moved")
        path.write_text("a file of somebody else")

    in_the_middle(take)
    with pytest.raises(gt.CheckpointError, match="checkpoint is a file, want a folder"):
        save(path, way, monkeypatch)
    assert path.read_text() == "a file of somebody else"
    path.unlink()
    shutil.move(tmp_path / "moved", path)


@pytest.mark.parametrize("way", WAYS)
def test_a_link_to_another_file_system(session, disk, tmp_path, way, monkeypatch):
    """The new folder is made beside the one that the link leads to, where a rename can put it in its place."""
    session()
    (disk / "real").mkdir()
    (tmp_path / "link").symlink_to(disk / "real")
    save(tmp_path / "link", way, monkeypatch)
    assert (tmp_path / "link").is_symlink() and os.listdir(disk) == ["real"]
    assert gt.load(tmp_path / "link", device="cpu")["model"]["here"][0].item() == 2
