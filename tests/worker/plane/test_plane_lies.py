"""A worker reports a false heap or bell: the other worker refuses it, and no file is changed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from gt.worker.plane.heap import NAME, PAGE_BYTES, OwnHeap, PeerHeap


def test_a_bell_that_is_a_file_is_neither_emptied_nor_written_to(tmp_path: Path) -> None:
    heap, path = OwnHeap(PAGE_BYTES), tmp_path / "log"
    path.write_text("all that was logged")
    try:
        with path.open("r+b") as file:
            with pytest.raises(OSError, match="is not a worker's doorbell"):
                PeerHeap(os.getpid(), heap.fd, PAGE_BYTES, f"{file.fileno()}-{heap.mark:016x}")
        assert path.read_text() == "all that was logged"
        peer = PeerHeap(os.getpid(), heap.fd, PAGE_BYTES, heap.doorbell)
        peer.ring()
        heap.listen()
        peer.close()
    finally:
        heap.close()


@pytest.mark.parametrize("mark", [0, 1])
def test_a_heap_that_is_a_file_is_not_mapped(tmp_path: Path, mark: int) -> None:
    heap, path = OwnHeap(PAGE_BYTES), tmp_path / "data"
    path.write_bytes(bytes(2 * PAGE_BYTES))
    rope = heap.doorbell.partition("-")[0]
    try:
        with path.open("r+b") as file, pytest.raises(OSError, match=r"is not gt-heap|lacks the mark"):
            PeerHeap(os.getpid(), file.fileno(), PAGE_BYTES, f"{rope}-{mark:016x}")
        assert path.read_bytes() == bytes(2 * PAGE_BYTES)
    finally:
        heap.close()


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK])
def test_a_heap_that_can_shrink_is_not_mapped(seals: int) -> None:
    """Its owner could end the other worker by SIGBUS, at the next flag that it reads."""
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, 2 * PAGE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="the size of gt-heap is not sealed"):
        PeerHeap(os.getpid(), fd, PAGE_BYTES, f"{fd}-{1:016x}")
    assert os.listdir("/proc/self/fd") == before
    os.close(fd)


def test_a_heap_keeps_its_size() -> None:
    heap = OwnHeap(PAGE_BYTES)
    try:
        for size in (PAGE_BYTES, 3 * PAGE_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(heap.fd, size)
    finally:
        heap.close()


def test_a_false_heap_and_a_false_bell_are_not_even_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A device acts on an open, and a file system may never answer one."""
    heap, opened = OwnHeap(PAGE_BYTES), []
    true_open = os.open

    def noted(path: str, flags: int, *args: int, **more: int) -> int:
        opened.extend([path] if not flags & os.O_PATH else [])
        return true_open(path, flags, *args, **more)

    device = os.open("/dev/null", os.O_RDWR)
    try:
        monkeypatch.setattr(os, "open", noted)
        with pytest.raises(OSError, match="is not gt-heap"):
            PeerHeap(os.getpid(), device, PAGE_BYTES, heap.doorbell)
        assert not opened
        with pytest.raises(OSError, match="is not a worker's doorbell"):
            PeerHeap(os.getpid(), heap.fd, PAGE_BYTES, f"{device}-{heap.mark:016x}")
        assert len(opened) == 1, "the heap, which is true"
    finally:
        os.close(device)
        heap.close()
