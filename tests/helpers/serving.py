"""A whole server in this process: the dispatcher and its workers are threads. Counters of any, when nothing is under way."""

from __future__ import annotations

import contextlib
import gc
import queue
import threading
from collections.abc import Iterator
from typing import Any

from gt.dispatcher.server import Server
from gt.worker.loop import WorkerOptions
from gt.worker.loop import run as work
from tests.helpers.limits import limit


@contextlib.contextmanager
def serving(workers: int = 2, backend: str = "numpy", heartbeat: float = 10.0) -> Iterator[Server]:
    """A server and workers in threads of this process. All workers have joined: a program could begin with the first."""
    server = Server(heartbeat=heartbeat)
    joined: queue.SimpleQueue[str] = queue.SimpleQueue()  # names, "" of a worker that has ended

    def be_worker(options: WorkerOptions) -> None:
        try:
            work(options, joined.put)
        finally:
            joined.put("")

    threads = [threading.Thread(target=server.run, name="gt-test-server")]
    address = (server.host, server.port)
    options = [WorkerOptions(*address, name=f"w{n}", backend=backend, device="cpu") for n in range(workers)]
    threads += [threading.Thread(target=be_worker, args=(each,), name="gt-test-worker") for each in options]
    for thread in threads:
        thread.start()
    try:
        for _ in options:
            joined.get(timeout=limit(60))
        yield server
    finally:
        server.stop("the test is over")
        for thread in threads:
            thread.join()


def settled() -> dict[str, Any]:
    """gt.stats() once workers have executed everything, and have freed what the program has let go.

    A value that is read says that one worker has come so far: others may still be at ops before it, and all at later ones.
    """
    import gt
    from gt.client import current_session
    from gt.client.device import torch_remote

    gc.collect()
    current_session.current().flush()  # ids that have ended too
    torch_remote.synchronize()
    return gt.stats()
