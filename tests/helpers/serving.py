"""A whole server in this process: the dispatcher and its workers are threads. Counters of any, when nothing is under way."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

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
