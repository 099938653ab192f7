"""A whole server in this process: the dispatcher and its workers are threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from gt.dispatcher.server import Server
from gt.worker.loop import WorkerOptions
from gt.worker.loop import run as work


@contextlib.contextmanager
def serving(workers: int = 2, backend: str = "numpy", heartbeat: float = 10.0) -> Iterator[Server]:
    """A server and workers in threads of this process."""
    server = Server(heartbeat=heartbeat)
    threads = [threading.Thread(target=server.run, name="gt-test-server")]
    address = (server.host, server.port)
    options = [WorkerOptions(*address, name=f"w{n}", backend=backend, device="cpu") for n in range(workers)]
    threads += [threading.Thread(target=work, args=(each,), name="gt-test-worker") for each in options]
    for thread in threads:
        thread.start()
    try:
        yield server
    finally:
        server.stop("the test is over")
        for thread in threads:
            thread.join()
