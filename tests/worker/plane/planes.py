"""Worlds of planes for the tests: as threads of this process, and as forked processes that a parent tells what happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gt.wire.liveness import home
from gt.worker.plane.base import ALL
from gt.worker.plane.shm import ShmPlane

HEAP = 8 << 20


def row(index: int, info: dict[str, Any]) -> list:
    return [
        index,
        f"w{index}",
        os.getpid(),
        socket.gethostname(),
        info["heap_fd"],
        info["heap_bytes"],
        info["doorbell"],
        home(),
        0,
    ]


@contextlib.contextmanager
def world(count: int, heap_bytes: int = HEAP) -> Iterator[list[ShmPlane]]:
    """Open planes that know each other."""
    planes = [ShmPlane(heap_bytes) for _ in range(count)]
    rows = [row(index, plane.open()) for index, plane in enumerate(planes)]
    try:
        for plane in planes:
            plane.world(rows)
        yield planes
    finally:
        for plane in planes:
            plane.close()


def together(planes: list[ShmPlane], work: Callable[[int, ShmPlane], Any]) -> list:
    """work(index, plane) in a thread each; the first exception ends all of them and is raised."""
    results: list = [None] * len(planes)
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = work(index, planes[index])
        except BaseException as error:
            failures.append(error)
            for plane in planes:
                plane.abort(ALL, "the test failed")

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(planes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def channel(peer: int, offset: int = 0, bytes: int = 256, slots: int = 2) -> dict:
    return {"peer": peer, "offset": offset, "bytes": bytes, "slots": slots}


def team(workers: list[int], index: int, id: int = 0, offset: int = 1 << 20, bytes: int = 4096) -> dict:
    return {"id": id, "workers": workers, "rank": workers.index(index), "offset": offset, "bytes": bytes}


def adding(dtype: Any) -> Callable[[memoryview, memoryview], None]:
    def combine(dst: memoryview, src: memoryview) -> None:
        out = np.frombuffer(dst, dtype)
        out += np.frombuffer(src, dtype)

    return combine


class Worker:
    """A forked process that runs work(index, plane, say): say sends a line here; a thread of it hears World and Abort."""

    def __init__(self, index: int, work: Callable[..., Any]) -> None:
        self.index = index
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                ours.close()
                serve(index, theirs, work)
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        self._socket, self._file = ours, ours.makefile("r")
        self.row = self.hear()

    def tell(self, **what: Any) -> None:
        self._socket.sendall(json.dumps(what).encode() + b"\n")

    def hear(self) -> Any:
        """The next line it says; None once it is gone."""
        line = self._file.readline()
        return json.loads(line) if line else None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.end()

    def end(self) -> int:
        """Its exit code, once it has ended."""
        self._file.close()
        self._socket.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def serve(index: int, link: socket.socket, work: Callable[..., Any]) -> None:
    plane, lines, known = ShmPlane(HEAP), link.makefile("r"), threading.Event()

    def say(what: Any) -> None:
        link.sendall(json.dumps(what).encode() + b"\n")

    def listen() -> None:
        for line in lines:
            for kind, value in json.loads(line).items():
                if kind == "world":
                    plane.world(value)
                    known.set()
                else:
                    plane.abort(*value)
        plane.abort(ALL, "the test ended")
        known.set()

    say(row(index, plane.open()))
    threading.Thread(target=listen, daemon=True).start()
    known.wait()
    say(work(index, plane, say))
    plane.close()


@contextlib.contextmanager
def forked(count: int, work: Callable[..., Any]) -> Iterator[list[Worker]]:
    """Processes that know each other; each has to be ended by the test or is killed."""
    workers = [Worker(index, work) for index in range(count)]
    ended: set[int] = set()
    try:
        for worker in workers:
            worker.tell(world=[other.row for other in workers])
        yield workers
        for worker in workers:
            if not worker._file.closed:
                ended.add(worker.pid)
                assert worker.end() == 0, f"worker {worker.index} failed"
    finally:
        for worker in workers:
            if not worker._file.closed and worker.pid not in ended:
                worker.kill()
