"""Pieces in files: any boxes of any tensor are written at their places, and read back by any other split."""

from __future__ import annotations

import errno
import os
import queue
import random
import tempfile
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from gt.errors import ProtocolError
from gt.ir.layout import Layout, Mesh, R, Shard, boxes, read_boxes
from gt.wire.arena import WORDS, PeerFile
from gt.wire.messages import Data, UseBlock
from gt.worker import files
from gt.worker.files import ALIGNED, FileBlock, PendingWrite, WorkerFiles
from gt.worker.process.file_threads import WRITER_NICENESS, FileThread, FileThreads
from gt.worker.process.memory_budget import Budget
from gt.worker.uploads import Cancelled, UploadBuffers
from tests.helpers.limits import limit
from tests.helpers.processes import no_thread, wait_until


def drawn_layout(rng: random.Random, shape: tuple[int, ...]) -> Layout:
    """A layout of up to nine workers; of one dim with parts at most."""
    sizes = [rng.choice([1, 2, 3]) for _ in range(2)]
    mesh = Mesh((("a", sizes[0]), ("b", sizes[1])), tuple(range(sizes[0] * sizes[1])))
    placements: list = []
    for _ in sizes:
        dim = rng.randrange(len(shape)) if shape and rng.random() < 0.7 else -1
        parts = rng.choice([1, 1, 2, 3])
        alone = not any(isinstance(p, Shard) for p in placements)
        fits = dim >= 0 and alone and shape[dim] % parts == 0
        placements.append(R if dim < 0 else Shard(dim, parts if fits else 1))
    return Layout(mesh, tuple(placements))


@pytest.mark.parametrize("seed", range(8))
def test_pieces_of_any_layout_make_the_tensor_and_any_other_reads_it(seed, monkeypatch):
    rng = random.Random(seed)
    for _ in range(60):
        monkeypatch.setattr(files, "SHORT_RUN_BYTES", rng.choice([1, 64, 4096]))
        monkeypatch.setattr(files, "MAX_IO_BYTES", rng.choice([16, 100, 8 << 20]))
        monkeypatch.setattr(files, "PART_BYTES", rng.choice([1, 24, 1000, 1 << 20]))
        shape = tuple(rng.randint(int(rng.random() < 0.9), 6) for _ in range(rng.randint(0, 4)))
        size = rng.choice([1, 2, 4, 8])
        whole = np.frombuffer(rng.randbytes(int(np.prod(shape)) * size), WORDS[size]).reshape(shape)
        offset = rng.randint(0, 9)
        with tempfile.TemporaryFile() as file:
            lent = SimpleNamespace(fd=file.fileno())
            file.truncate(offset + whole.nbytes)
            written, other = drawn_layout(rng, shape), drawn_layout(rng, shape)
            for rank in range(len(written.mesh.workers)):
                parts = boxes(written, shape, rank)
                piece = np.ascontiguousarray(read_boxes(whole, parts)).reshape(-1).view(np.uint8)
                block = FileBlock(0, 0, lent, offset, shape, size, parts, False)
                if rng.random() < 0.5:
                    block.write(piece.data)
                else:
                    assert PendingWrite(block, piece, 0).write()
            assert os.pread(file.fileno(), whole.nbytes, offset) == whole.tobytes()
            for rank in range(len(other.mesh.workers)):
                parts = boxes(other, shape, rank)
                got = FileBlock(0, 0, lent, offset, shape, size, parts, False).read()
                assert got.tobytes() == read_boxes(whole, parts).tobytes(), (shape, other)


def test_memory_of_a_piece_that_nobody_waits_for_is_read_no_more(monkeypatch):
    """It may be another session's tensor by then."""
    monkeypatch.setattr(files, "PART_BYTES", 10)
    with tempfile.TemporaryFile() as file:
        file.truncate(30)
        block = FileBlock(0, 0, SimpleNamespace(fd=file.fileno()), 0, (30,), 1, [((0, 30),)], False)
        pending = PendingWrite(block, np.ones(30, np.uint8), 0)
        monkeypatch.setattr(files, "_write", lambda fd, data, offset: (os.pwrite(fd, data, offset), pending.cancel()))
        assert not pending.write()
        assert os.pread(file.fileno(), 30, 0) == b"\1" * 10 + bytes(20)


def test_what_is_read_of_a_file_for_nobody_is_not_kept():
    uploads = UploadBuffers()
    for key in (1, 2, 3):
        uploads.expect(key)
    uploads.receive(Data(1, 0, -1), None)
    uploads.fail(2, OSError("the disk is broken"))
    uploads.deliver(1, np.ones(4, np.uint8))
    uploads.deliver(3, np.ones(4, np.uint8))
    for key, error in ((1, Cancelled), (2, OSError)):
        with pytest.raises(error):
            uploads.take(key, 0)
    uploads.deliver(2, np.ones(4, np.uint8))
    assert list(uploads.take(3, 0)) == [1] * 4 and not uploads._arriving and not uploads._expected


def test_a_file_that_was_cut_is_an_error_of_the_read():
    with tempfile.TemporaryFile() as file:
        file.truncate(100)
        block = FileBlock(0, 0, SimpleNamespace(fd=file.fileno()), 0, (64,), 4, [((0, 64),)], False)
        with pytest.raises(OSError, match=r"ends at byte 100, want 156 bytes more"):
            block.read()


@pytest.mark.parametrize(
    "offset, shape, itemsize, write",
    [
        (0, [25], 4, True),
        (4, [25], 4, False),
        (0, [26], 4, False),
        (-4, [1], 4, False),
        (0, [-1], 4, False),
        (0, [5], 3, False),
    ],
)
def test_a_block_outside_of_its_file_or_against_its_use_is_refused(offset, shape, itemsize, write):
    held = WorkerFiles(lambda *_: None, SimpleNamespace(), SimpleNamespace(), UploadBuffers())
    held.opened[7] = SimpleNamespace(nbytes=100, writes=False)
    with pytest.raises(ProtocolError, match="is not within a file of 100 bytes"):
        held.block(UseBlock(1, 7, offset, shape, itemsize, [[[0, 1]]], write))


class Pool(dict):
    """WorkerFiles._spare that tells when a copy's memory is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: queue.SimpleQueue = queue.SimpleQueue()

    def setdefault(self, nbytes, default):
        self.kept.put(nbytes)
        return super().setdefault(nbytes, default)


def test_memory_of_written_copies_is_used_again_until_an_op_needs_it(monkeypatch):
    """A copy into fresh memory takes page faults, which cost several times the copy, while the program's steps wait."""
    engine = SimpleNamespace(spec=lambda t: t, packed=lambda t: t, view=lambda t: t.view(np.uint8).data)
    budget, pool, nbytes = Budget(), Pool(), 1 << 20
    held = WorkerFiles(lambda *_: None, engine, budget, UploadBuffers())
    held._spare, thread = pool, held.threads.of(1, True)
    with tempfile.TemporaryFile() as file:
        file.truncate(nbytes)
        block = FileBlock(3, 0, SimpleNamespace(fd=file.fileno(), uncached=-1), 0, (nbytes,), 1, [((0, nbytes),)], True, thread)
        memory = set()
        for n in range(3):
            source = np.full(nbytes, n, np.uint8)
            held.write(block, source, n)
            source[:] = 9
            assert pool.kept.get(timeout=limit(20)) == nbytes
            wait_until(lambda: pool.get(nbytes))
            memory.add(pool[nbytes][0].ctypes.data)
            assert os.pread(file.fileno(), nbytes, 0) == bytes([n]) * nbytes
        assert len(memory) == 1 and len(pool[nbytes]) == 1
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == min(own + WRITER_NICENESS, 19)
        budget.reclaim = pool.clear
        monkeypatch.setattr(budget, "_room", lambda: 0 if pool else nbytes)
        budget._bound = budget.limit = 1
        budget.need(nbytes)
        assert not pool and not budget.fits(2 * nbytes)
        budget._bound = 0
        held.end()


class Refused(int):
    """A descriptor whose file system wants another alignment."""


def test_copies_are_written_past_the_page_cache_but_for_the_parts_of_blocks_at_their_ends(tmp_path, monkeypatch):
    """The page cache takes most of a save's CPU time. Bytes beside the piece stay, and unaligned memory is written as ever."""
    written: dict[int, int] = {}
    pwrite, rng = os.pwrite, random.Random(1)
    nbytes = files.UNCACHED_BYTES + 3 * ALIGNED

    def counted(fd, data, offset):
        if isinstance(fd, Refused):
            raise OSError(errno.EINVAL, "alignment")
        count = pwrite(fd, data, offset)
        written[fd] = written.get(fd, 0) + count
        return count

    monkeypatch.setattr(os, "pwrite", counted)
    monkeypatch.setattr(files, "MAX_IO_BYTES", 16 * ALIGNED)
    cached, second = (os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT) for _ in range(2))  # second: in place of direct I/O
    held = WorkerFiles(lambda *_: None, SimpleNamespace(), Budget(), UploadBuffers())
    try:
        for offset, uncached in [(0, second), (1, second), (ALIGNED - 1, second), (777, -1), (8, Refused(second))]:
            for size in (nbytes, nbytes - 1, files.UNCACHED_BYTES - 1):
                os.ftruncate(cached, 0)
                os.ftruncate(cached, offset + size + 7)
                written.clear()
                block = FileBlock(0, 0, SimpleNamespace(fd=cached, uncached=uncached), offset, (size,), 1, [((0, size),)], True)
                data = np.frombuffer(rng.randbytes(size), np.uint8)
                block.write_uncached(held._copy(data, block))
                assert os.pread(cached, offset + size + 9, 0) == bytes(offset) + data.tobytes() + bytes(7)
                past = uncached == second and size >= files.UNCACHED_BYTES and not isinstance(uncached, Refused)
                assert past == (written.get(second, 0) > size - 2 * ALIGNED) and past == (second in written)
                assert written.get(second, 0) % ALIGNED == 0 and sum(written.values()) == size
    finally:
        os.close(cached)
        os.close(second)


@pytest.mark.parametrize("offset", [0, 8, 5000])
def test_a_disk_takes_what_is_written_past_the_page_cache(tmp_path, offset):
    nbytes = files.UNCACHED_BYTES + 100
    (tmp_path / "f").write_bytes(bytes(offset + nbytes + 3))
    held = WorkerFiles(lambda *_: None, SimpleNamespace(), Budget(), UploadBuffers())
    with open(tmp_path / "f", "r+b") as file:
        lent = PeerFile.__new__(PeerFile)  # as opened: offers need a process of their own
        lent.fd, lent._uncached, lent._close = os.dup(file.fileno()), None, lambda fds: [os.close(fd) for fd in fds]
        block = FileBlock(0, 0, lent, offset, (nbytes,), 1, [((0, nbytes),)], True)
        data = np.frombuffer(random.Random(offset).randbytes(nbytes), np.uint8)
        block.write_uncached(held._copy(data, block))
        lent.close()
    assert (tmp_path / "f").read_bytes() == bytes(offset) + data.tobytes() + bytes(3)


def test_the_end_waits_for_a_file_that_is_about_to_close(monkeypatch, caplog):
    """Only a file system that does not answer is warned of."""
    threads, begun, answers = FileThreads(lambda: None), threading.Event(), threading.Event()
    join = FileThread.join

    def joined(self, timeout):
        answers.set()
        join(self, timeout)

    monkeypatch.setattr(FileThread, "join", joined)
    thread = threads.of(1, True)
    thread.put(lambda: begun.set() or answers.wait())
    assert begun.wait(limit(10))
    threads.end()
    answers.set()
    join(thread, limit(10))
    assert not thread.is_alive() and "do not answer" not in caplog.text


class Site:
    """A worker's part for files, with one writable file of a session, and its answers."""

    def __init__(self, file) -> None:
        self.answers: queue.SimpleQueue = queue.SimpleQueue()
        engine = SimpleNamespace(spec=lambda t: t, packed=lambda t: t, view=lambda t: t.view(np.uint8).data)
        self.uploads = UploadBuffers()
        self.held = WorkerFiles(lambda message, *_: self.answers.put(message), engine, Budget(), self.uploads)
        self._file = file

    def block(self, key: int, later: bool) -> FileBlock:
        lent = SimpleNamespace(fd=self._file.fileno(), uncached=-1)
        return FileBlock(key, 0, lent, 0, (64,), 1, [((0, 64),)], later, self.held.threads.of(1, True))

    def answer(self):
        return self.answers.get(timeout=limit(20))


@pytest.fixture
def site():
    with tempfile.TemporaryFile() as file:
        file.truncate(64)
        made = Site(file)
        yield made
        made.held.end()


def failing(error: Exception):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("error, kind", [(MemoryError("no room"), "memory"), (AssertionError("no room"), "op")])
def test_any_error_of_a_write_is_told_to_its_session(site, monkeypatch, later, error, kind):
    """Else a save waits for ever."""
    monkeypatch.setattr(FileBlock, "write_uncached", failing(error))
    monkeypatch.setattr(PendingWrite, "write", failing(error))
    site.held.write(site.block(3, later), np.zeros(64, np.uint8), 7)
    said = site.answer()
    assert (said.seq, said.kind, said.message) == (7, kind, "no room")
    assert not site.held._pending and not site.held._waiting_bytes
    monkeypatch.undo()
    site.held.write(site.block(4, later), np.zeros(64, np.uint8), 8)  # its thread goes on
    assert site.answer().key == 4


def test_any_error_of_a_read_is_told_to_its_session(site, monkeypatch):
    monkeypatch.setattr(FileBlock, "read", failing(AssertionError("odd")))
    site.held.begin_read(site.block(5, False))
    assert site.answer().key == 5
    with pytest.raises(AssertionError, match="odd"):
        site.uploads.take(5, 0)


def test_a_copy_that_has_no_room_does_not_count_as_one_that_waits(site, monkeypatch):
    block = site.block(3, True)
    monkeypatch.setattr(files.np, "empty", failing(MemoryError("no room")))
    with pytest.raises(MemoryError):
        site.held.write(block, np.zeros(64, np.uint8), 7)
    assert not site.held._waiting_bytes


def test_a_file_is_refused_if_its_thread_cannot_begin(site, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    offer = SimpleNamespace(arena=9, owner=1, write=False)
    with pytest.raises(OSError, match="can't start new thread"):
        site.held.open(SimpleNamespace(), offer)
    assert not site.held.threads.files and not site.held._of
