"""The file of evicted tensors: bytes come back, nothing is left behind, and a failure loses nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest
import torch

from gt.worker.engine.torch import TorchEngine
from gt.worker.offload import files
from gt.worker.offload.files import ALIGNED_BYTES, DiskFull, InFile, OffloadFile
from gt.worker.offload.spaces import Spaces
from gt.worker.offload.tensors import Kept, OffloadedTensors


@pytest.fixture
def file(tmp_path):
    made = OffloadFile(str(tmp_path))
    yield made
    made.close()


class Ends(list):
    def __call__(self):
        self.append(True)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("nbytes", [1, ALIGNED_BYTES, 3 * ALIGNED_BYTES + 17])
def test_bytes_come_back(file, nbytes, prefetch):
    data = os.urandom(nbytes)
    other = InFile(file, memoryview(b"held"), bytes, Ends())
    away = InFile(file, memoryview(data), lambda buffer: bytes(buffer[:nbytes]), Ends())
    away._writing.result()
    assert not away._unwritten, "the bytes are in the file alone"
    if prefetch:
        away.prefetch()
    assert away.tensor() == data == away.tensor()
    away.close()
    other.close()


def test_slots_are_used_again_and_the_last_ends_the_file(file):
    ends = Ends()
    first = InFile(file, memoryview(bytes(ALIGNED_BYTES)), bytes, ends)
    second = InFile(file, memoryview(bytes(10)), bytes, ends)
    first.close()
    third = InFile(file, memoryview(bytes(20)), bytes, ends)
    assert third._start == first._start and not ends
    second.close()
    third.close()
    assert ends == [True] and file._file == -1


@pytest.mark.parametrize("folder", ["taken", "taken/below"])
def test_a_folder_that_cannot_be_used_is_named_with_its_cure(tmp_path, folder):
    (tmp_path / "taken").write_text("")
    with pytest.raises(
        OSError, match=rf"no file for offloaded tensors in {tmp_path}/{folder}: .*; want a folder .*; try another"
    ):
        OffloadFile(str(tmp_path / folder))


def test_the_file_has_no_name(file, tmp_path):
    file.take(100)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_nothing(tmp_path):
    program = (
        "import sys; from gt.worker.offload.files import *\n"
        "file = OffloadFile(sys.argv[1])\n"
        "away = InFile(file, memoryview(bytes(1 << 20)), bytes, None)\n"
        "away._writing.result(); print('written', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "written\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert list(tmp_path.iterdir()) == []


def full(*args):
    raise OSError(errno.ENOSPC, "no space left on device")


def test_a_full_disk_is_an_error_and_the_tensor_stays(file, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", full)
    tensors = OffloadedTensors(lambda tensor, space, folder: InFile(file, memoryview(tensor), bytes, Ends()))
    tensors[1] = b"data"
    with pytest.raises(DiskFull, match=r"no room for offloaded tensors in .*: want 4.0 KiB, have "):
        tensors.evict(1, "nvme", "")
    assert tensors[1] == b"data"


@pytest.mark.parametrize("folder", ["taken", "full"])
def test_a_fault_of_a_folder_is_raised_once(tmp_path, monkeypatch, folder):
    """Each tensor tries again in each step, since the folder may be mended."""
    (tmp_path / "taken").write_text("")
    spaces, path = Spaces(TorchEngine("cpu")), str(tmp_path / folder)
    tensors = [torch.ones(2000) for _ in range(4)]
    with monkeypatch.context() as broken:
        if folder == "full":
            broken.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="offloaded tensors in "):
            spaces.evict(tensors[0], "nvme", path)
        assert [spaces.evict(tensor, "nvme", path) for tensor in tensors] == [None] * 4
    (tmp_path / "taken").unlink()
    away = [spaces.evict(tensor, "nvme", path) for tensor in tensors]
    assert all(torch.equal(resting.tensor(), tensor) for resting, tensor in zip(away, tensors, strict=True))
    for resting in away:
        resting.close()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull):  # the earlier tensors have left it: what is wrong now is news
        spaces.evict(tensors[0], "nvme", path)


def test_a_failed_write_loses_nothing(file, monkeypatch, caplog):
    def broken(*args):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "pwrite", broken)
    away = InFile(file, memoryview(b"data"), lambda buffer: bytes(buffer[:4]), Ends())
    assert away._writing.exception() is not None
    away.prefetch()
    assert away.tensor() == b"data" and "offloaded tensors stay in memory" in caplog.text
    away.close()


def test_a_failed_read_is_an_error_and_may_be_tried_again(file, monkeypatch):
    tensors = OffloadedTensors(
        lambda tensor, space, folder: InFile(file, memoryview(tensor), lambda buffer: bytes(buffer[:4]), Ends())
    )
    tensors[1] = b"data"
    tensors.evict(1, "nvme", "")
    tensors.away[1][0]._writing.result()
    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", lambda *args: 0)
        with pytest.raises(OSError, match="the file of offloaded tensors ends at 0"):
            _ = tensors[1]
    crossed = {"restored_bytes": 4, "bytes_to_host": 4, "bytes_to_device": 4}
    assert tensors[1] == b"data" and tensors.stats() == {"offloaded": {}, **crossed}


def test_writes_wait_once_many_bytes_are_under_way(file, monkeypatch):
    monkeypatch.setattr(files, "MAX_WAITING_BYTES", ALIGNED_BYTES)
    away = [InFile(file, memoryview(bytes([n]) * 100), lambda buffer: buffer[0], Ends()) for n in range(20)]
    assert len(file._writes) <= 3
    assert [one.tensor() for one in away] == list(range(20))
    for one in away:
        one.close()


def test_a_folder_without_direct_io_is_used_all_the_same(tmp_path, monkeypatch, caplog):
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    file = OffloadFile(str(tmp_path))
    away = InFile(file, memoryview(b"data"), lambda buffer: bytes(buffer[:4]), Ends())
    away._writing.result()
    assert not file.direct and away.tensor() == b"data" and list(tmp_path.iterdir()) == []
    assert "no direct I/O" in caplog.text
    away.close()


def test_ids_that_are_freed_while_away_are_closed():
    closed = []

    class Away(Kept):
        def close(self):
            closed.append(self.nbytes)

    tensors = OffloadedTensors(lambda tensor, space, folder: Away(tensor, tensor))
    for i in (1, 2, 3):
        tensors[i] = i
        tensors.evict(i, "cpu", "")
    tensors.evict(9, "cpu", "")  # no such tensor here
    assert tensors.host_bytes(0) == 6 and dict(tensors) == {}
    tensors.drop([1, 7])
    tensors.drop_range(3, 10)
    assert closed == [1, 3] and tensors[2] == 2
    with pytest.raises(KeyError):
        _ = tensors[1]


def test_a_worker_writes_in_its_owners_folders_alone(tmp_path, monkeypatch):
    inner, other = tmp_path / "allowed" / "inner", tmp_path / "allowed-not"
    monkeypatch.setenv("GT_OFFLOAD", f"/nowhere:{tmp_path / 'allowed'}")
    OffloadFile(str(inner)).close()
    (tmp_path / "allowed" / "way").symlink_to(tmp_path)
    for folder in (other, inner / ".." / ".." / "x", tmp_path / "allowed" / "way" / "x", tmp_path):
        with pytest.raises(PermissionError, match="GT_OFFLOAD of this worker allows"):
            OffloadFile(str(folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["allowed"]


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_a_folder_in_memory_is_refused_unless_its_owner_allows_it(monkeypatch):
    monkeypatch.delenv("GT_OFFLOAD", raising=False)
    for folder in ("/dev/shm", "/dev/shm/gt-nowhere/deep"):
        with pytest.raises(PermissionError, match=f"offload.path is {folder}, which is memory .tmpfs. that no limit counts"):
            OffloadFile(folder)
    assert not os.path.exists("/dev/shm/gt-nowhere")
    monkeypatch.setenv("GT_OFFLOAD", "/dev/shm")
    OffloadFile("/dev/shm").close()


def test_memory_of_tensors_that_come_back_counts_for_a_limit(file):
    """RLIMIT_DATA and the budget count private memory. A tensor without room stays in the file, and may come back later."""
    before = _data_bytes()
    buffer = files.buffer_of(64 << 20)
    assert _data_bytes() - before >= 64 << 20
    del buffer
    room = [3 * ALIGNED_BYTES]

    def need(nbytes: int) -> None:
        if nbytes > room[0]:
            raise MemoryError(f"out of memory: it needs {nbytes}")

    away = InFile(file, memoryview(b"data"), lambda buffer: bytes(buffer[:4]), Ends(), None, need)
    away._writing.result()
    room[0] = 0
    away.prefetch()
    with pytest.raises(MemoryError, match="it needs 4"):
        away.tensor()
    room[0] = 4
    assert away.tensor() == b"data"
    away.close()


def test_a_tensor_without_memory_for_its_copy_stays(tmp_path):
    def need(nbytes: int) -> None:
        raise MemoryError

    assert Spaces(TorchEngine("cpu"), need).evict(torch.ones(2000), "nvme", str(tmp_path)) is None


def test_files_that_took_no_tensor_keep_no_place_for_folders(tmp_path, monkeypatch):
    spaces, tensor = Spaces(TorchEngine("cpu")), torch.ones(2000)
    with monkeypatch.context() as broken:
        broken.setattr(os, "posix_fallocate", full)
        for n in range(8):
            with pytest.raises(DiskFull):
                spaces.evict(tensor, "nvme", str(tmp_path / str(n)))
    away = spaces.evict(tensor, "nvme", str(tmp_path / "good"))
    assert torch.equal(away.tensor(), tensor)
    away.close()


def _data_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[5]) * ALIGNED_BYTES
