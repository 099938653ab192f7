"""Arenas and files that sessions offer to one worker: none takes the room of the others."""

from __future__ import annotations

import gc
import os
import queue
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gt.wire.arena import PAGE_BYTES, OwnArena, owner_proof
from gt.wire.messages import ArenaOpened, CloseArenas, OfferArena, OfferFile, UseBlock
from gt.worker import arenas, files
from gt.worker.arenas import WorkerArenas
from gt.worker.process import file_threads
from tests.helpers.limits import limit
from tests.helpers.processes import no_thread, wait_until

SESSION = 3


class Worker:
    """A worker's part for arenas, and its answers."""

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        budget: Any = SimpleNamespace(reclaim=None)
        uploads: Any = SimpleNamespace(receive=lambda message, frame: None)
        self.part = WorkerArenas(self._answer, SimpleNamespace(copies=None), uploads, budget)  # type: ignore[arg-type]

    def _answer(self, message: Any) -> None:
        assert isinstance(message, ArenaOpened)
        self.answers.put(message.opened)

    def offer(self, message: OfferArena | OfferFile) -> bool:
        self.part.receive(message)
        return self.answers.get(timeout=limit(20))  # of a file by a thread of its session


@pytest.fixture
def worker():
    made = Worker()
    yield made
    made.part.end()


@pytest.fixture
def owned():
    made = [OwnArena(n, PAGE_BYTES - 4096, SESSION) for n in range(1, 5)]
    offers = [replace(own.offer(), nonce=owner_proof(own.offer().nonce, SESSION)) for own in made]
    yield offers
    for own in made:
        own.close()


@pytest.mark.parametrize("limit, value", [("MAX_MAPPED_ARENAS", 2), ("MAX_MAPPED_BYTES", 2 * PAGE_BYTES)])
def test_no_more_is_mapped_than_leaves_room_for_other_sessions(monkeypatch, worker, owned, limit, value):
    monkeypatch.setattr(arenas, limit, value)
    assert [worker.offer(offer) for offer in owned] == [True, True, False, False]
    worker.part.receive(UseBlock(9, 1, 4096, [4], 4, [[(0, 4)]], False))  # keeps the first one mapped
    worker.part.close(CloseArenas([1]))
    gc.collect()
    assert not worker.offer(replace(owned[2], arena=7))
    worker.part.forget_read(9)
    assert worker.offer(replace(owned[2], arena=8))


def test_arenas_and_files_leave_descriptors_for_all_else(monkeypatch, worker, owned, tmp_path):
    monkeypatch.setattr(arenas.resource, "getrlimit", lambda kind: (12, 12))
    path = tmp_path / "file"
    path.write_bytes(b"data")
    assert worker.offer(owned[0]) and worker.offer(owned[1])
    fd = os.open(path, os.O_RDONLY)
    opened = [worker.offer(OfferFile(10 + n, owned[0].arena, fd, 4, False)) for n in range(3)]
    assert opened == [True, True, False] and not worker.offer(owned[2])
    worker.part.close(CloseArenas([10]))
    wait_until(lambda: worker.part.files.threads.files == 1)
    assert worker.offer(OfferFile(20, owned[0].arena, fd, 4, False))
    os.close(fd)
    worker.part.close(CloseArenas([11, 20]))


def test_threads_that_do_not_come_back_are_counted_and_no_more_are_begun(monkeypatch, worker, owned, tmp_path):
    """A session of which no file is opened sends its bytes by itself, as one on another host does."""
    asked, answers, opened = threading.Event(), threading.Event(), files.PeerFile
    monkeypatch.setattr(file_threads, "MAX_ABANDONED", 1)
    monkeypatch.setattr(files, "PeerFile", lambda *args: (asked.set(), answers.wait()) and opened(*args))
    (tmp_path / "file").write_bytes(b"data")
    with open(tmp_path / "file", "rb") as file:
        assert worker.offer(owned[0]) and worker.offer(owned[1])
        worker.part.receive(OfferFile(10, owned[0].arena, file.fileno(), 4, False))
        assert asked.wait(limit(20))
        worker.part.close(CloseArenas([owned[0].arena]))
        assert not worker.offer(OfferFile(11, owned[1].arena, file.fileno(), 4, False))
        answers.set()
        assert wait_until(lambda: not worker.part.files.threads.abandoned)
        assert worker.answers.get(timeout=limit(20)), "of the first, which nobody waits for any more"
        assert worker.offer(OfferFile(12, owned[1].arena, file.fileno(), 4, False))


def test_a_file_that_no_thread_can_open_is_not_used_and_the_next_one_is(monkeypatch, worker, owned, tmp_path):
    """The error ended the worker's link, and with it all sessions' tensors."""
    (tmp_path / "file").write_bytes(b"data")
    with open(tmp_path / "file", "rb") as file:
        assert worker.offer(owned[0])
        with monkeypatch.context() as few:
            few.setattr(threading.Thread, "start", no_thread)
            assert not worker.offer(OfferFile(10, owned[0].arena, file.fileno(), 4, False))
        assert worker.offer(OfferFile(11, owned[0].arena, file.fileno(), 4, False))
    assert worker.part.files.threads.files == 1
