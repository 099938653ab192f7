"""File systems that do not answer: the session that lends such a file waits, and is told. Nobody else is, nothing is left."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gt.client.exchange.host_buffers import file_frames
from gt.errors import CheckpointError, WorkerStuck
from gt.wire.arena import place, upload_index
from gt.worker import files
from gt.worker.files import WorkerFiles
from gt.worker.process import file_threads
from tests.helpers.limits import limit
from tests.helpers.processes import wait_until
from tests.helpers.serving import serving
from tests.helpers.streams import NEG, UPLOAD, Stream

VALUES = np.arange(48, dtype=np.float32).reshape(8, 6)
BOTH = "a: {shard: {axis: 0, workers: [0, 1]}}\n"  # each session has a part on each worker


class HungFile:
    """A file whose system answers one kind of question, of workers alone, once the test lets it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        path.write_bytes(bytes(100) + VALUES.tobytes())
        self.path, self.asked, self.answers = path, threading.Event(), threading.Event()
        self.fd = os.open(path, os.O_RDWR)
        module: Any = file_threads if kind == "_close" else files
        monkeypatch.setattr(module, kind, self._waits(getattr(module, kind)))

    def _waits(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def asked(what: Any, *args: Any) -> Any:
            if not isinstance(what, int) or self.path.samefile(f"/proc/self/fd/{what}"):
                self.asked.set()
                self.answers.wait()
            return call(what, *args)

        return asked

    def opened(self) -> int:
        """Descriptors of it that are open in this process, whose threads the workers are."""
        count = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                count += self.path.samefile(f"/proc/self/fd/{name}")
            except OSError:  # the listing's own
                continue
        return count


class Source:
    """See kept_uploads.FileTensor."""

    def __init__(self, fd: int, number: int) -> None:
        self.fd, self.place = fd, place(number, 100)

    def region(self, boxes: Any) -> Any:
        return file_frames(self.fd, 100, VALUES.shape, 4, boxes)

    def release(self) -> None:
        """The test closes the file."""


@pytest.fixture
def hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], HungFile]]:
    made: list[HungFile] = []

    def make(kind: str) -> HungFile:
        made.append(HungFile(tmp_path / "weights.bin", monkeypatch, kind))
        return made[-1]

    yield make
    for file in made:
        file.answers.set()
        os.close(file.fd)
        assert wait_until(lambda file=file: not file.opened()), "workers have closed it"


def stream(address: str, **how: Any) -> Stream:
    return Stream(address, BOTH, ("a",), **how)


def steps(one: Stream) -> None:
    """Steps whose ops are on both workers."""
    for n in range(5):
        made = one.op(NEG, one.upload(VALUES + n), value=-(VALUES + n))
        np.testing.assert_array_equal(one.fetch(made), -(VALUES + n))


def use(one: Stream, file: HungFile, kind: str) -> Callable[[], object]:
    """Have workers read the file, or write into it; a question that is answered once they have."""
    writes = kind == "_write"
    if writes:
        made = one.op(NEG, one.upload(-VALUES), value=VALUES)
        one.flush()
    number = one.session.lend_file(file.fd, 100 + VALUES.nbytes, writes)
    if writes:
        return lambda: one.session.wait(one.session.begin_store([[made, place(number, 100)]], False))
    read = one.op(UPLOAD, upload_index(place(number, 100)), value=VALUES)
    one.session.keep_in_file(read, Source(file.fd, number))
    made = one.op(NEG, read, value=-VALUES)
    return lambda: one.fetch(made)


def stuck(question: Callable[[], object]) -> str:
    with pytest.raises(WorkerStuck) as told:
        question()
    return str(told.value)


@pytest.mark.parametrize("kind", ["PeerFile", "_read", "_write"])
def test_a_file_that_does_not_answer_stalls_its_own_session_alone_and_no_end(hung, kind):
    file = hung(kind)
    with serving(2) as server:
        own, other = stream(server.address, switches={"stall_timeout": 1.0}), stream(server.address)
        steps(other)
        question = use(own, file, kind)
        while "got no answer of the file system of 'weights.bin' for" not in stuck(question):
            pass  # on a loaded machine what precedes it may take as long
        assert file.asked.wait(limit(20))
        steps(other)
        own.session.close()
        steps(other)
        third = stream(server.address)
        steps(third)
        third.session.close()
        other.session.close()
    assert not file.answers.is_set(), "the server and its workers have ended, and nobody has waited"


@pytest.mark.parametrize("kind", ["PeerFile", "_read", "_write"])
def test_a_file_that_answers_late_loses_nothing(hung, kind):
    file = hung(kind)
    with serving(2) as server:
        own, other = stream(server.address), stream(server.address)
        question = use(own, file, kind)
        if kind == "_write":
            os.pwrite(file.fd, bytes(VALUES.nbytes), 100)
        answer = threading.Thread(target=lambda: (file.asked.wait(limit(20)), steps(other), file.answers.set()))
        answer.start()
        question()
        answer.join()
        assert os.pread(file.fd, VALUES.nbytes, 100) == VALUES.tobytes()
        steps(own)
        for one in (own, other):
            one.session.close()
        assert wait_until(lambda: file.opened() == 1), "workers keep no file of a session that has ended"


def test_a_file_that_is_never_closed_stalls_nobody(hung):
    file = hung("_close")
    with serving(2) as server:
        own, other = stream(server.address), stream(server.address)
        use(own, file, "_read")()
        own.session.close()
        assert file.asked.wait(limit(20))
        steps(other)
        other.session.close()
    assert not file.answers.is_set()


def test_a_piece_without_room_for_a_copy_is_given_up_after_a_while(hung, monkeypatch):
    """A save that training does not wait for is of copies; the thread that executes steps waits for no more than that."""
    monkeypatch.setattr(files, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(WorkerFiles, "_has_room", lambda self, nbytes: False)
    file = hung("_write")
    with serving(2) as server:
        own, other = stream(server.address), stream(server.address)
        made = own.op(NEG, own.upload(-VALUES), value=VALUES)
        own.fetch(made)
        number = own.session.lend_file(file.fd, 100 + VALUES.nbytes, True)
        with pytest.raises(CheckpointError, match=r"cannot write %\d+: its file system has not answered for 0\.05 s"):
            own.session.wait(own.session.begin_store([[made, place(number, 100)]], True))
        steps(other)
        steps(own)
        for one in (own, other):
            one.session.close()
