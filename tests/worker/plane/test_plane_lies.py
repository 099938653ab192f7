"""A worker reports a false heap or bell: the other worker refuses it, and no file is changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gt.worker.plane.heap import PAGE_BYTES, OwnHeap, PeerHeap


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
        with path.open("r+b") as file, pytest.raises(OSError, match=r"is not a worker's heap|lacks the mark"):
            PeerHeap(os.getpid(), file.fileno(), PAGE_BYTES, f"{rope}-{mark:016x}")
        assert path.read_bytes() == bytes(2 * PAGE_BYTES)
    finally:
        heap.close()
