"""`played_worker.py PORT aabb`: workers of two played hosts, whose device is the CPU and whose transfers are a GPU's."""

from __future__ import annotations

import os
import sys

from gt.wire import liveness
from gt.worker import loop
from gt.worker.engine.torch import COMBINE, TorchEngine
from gt.worker.engine.torch.gpu.direct import DirectEngine
from gt.worker.plane.registry import open_plane


class PlayedEngine(TorchEngine):
    def __init__(self, device: str = "") -> None:
        super().__init__("cpu")
        self.direct = DirectEngine(self, COMBINE)


def serve(port: str, rank: int, host: str) -> None:
    real = liveness.home()
    liveness.home = lambda: f"{real}-{host}"  # type: ignore[assignment]
    loop.open_engine = lambda backend, device: PlayedEngine()  # type: ignore[assignment]
    loop.open_plane = lambda transport, engine, wide: open_plane("net", engine, wide)  # type: ignore[assignment]
    loop.run(loop.WorkerOptions("127.0.0.1", int(port), name=f"w{rank}", rank=rank))


def main(port: str, hosts: str) -> None:
    """Processes of one import: torch's takes long."""
    pids = []
    for rank, host in enumerate(hosts):
        pid = os.fork()
        if not pid:
            try:
                serve(port, rank, host)
            finally:
                os._exit(0)
        pids.append(pid)
    print(*pids, flush=True)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
