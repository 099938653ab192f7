"""The cost of the shared-memory plane between processes, with gloo beside it in the same run.

`python benchmarks/bench_plane.py [--json FILE] [--no-gloo] [--seconds 0.4]`. Prints a table and one line of JSON. Medians
over blocks of rank 0's steps, in microseconds; a pair is a round trip. Every case runs in fresh forked processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gt.ir.heap import BUFFER_BYTES, SLOT_BYTES, SLOTS
from gt.wire.liveness import home
from gt.worker.plane.shm import ShmPlane

Step = Callable[[], None]
KIB = 1 << 10
# what, members, bytes
CASES = (
    *(("pair", 2, n) for n in (8, 4 * KIB, 64 * KIB, KIB * KIB, 16 * KIB * KIB)),
    *(("all_reduce", 2, n) for n in (4 * KIB, 64 * KIB, KIB * KIB)),
    *(("all_reduce", 8, n) for n in (4 * KIB, 64 * KIB, KIB * KIB, 8 * KIB * KIB)),
    *(("all_gather", 8, n) for n in (4 * KIB, 64 * KIB)),
)


def add(dst: memoryview, src: memoryview) -> None:
    out = np.frombuffer(dst, np.float32)
    np.add(out, np.frombuffer(src, np.float32), out)


def fork(members: int, child: Callable[[int], Any]) -> Any:
    """The result of child(0); each child(rank) runs in a process of its own."""
    reader, writer = os.pipe()
    pids = []
    for rank in range(members):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                result = child(rank)
                if rank == 0:
                    os.write(writer, json.dumps(result).encode())
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    os.close(writer)
    with open(reader, "rb") as file:
        text = file.read()
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        raise RuntimeError(f"benchmark processes ended with {codes}")
    return json.loads(text)


def timed(step: Step, agree: Callable[[int], int], seconds: float) -> float:
    """Median over blocks of the us of a step. All members run as many: `agree` gives everyone rank 0's number."""
    for _ in range(5):
        step()
    start = time.perf_counter()
    for _ in range(5):
        step()
    blocks = []  # a member may run ahead by one step, so single steps say little
    for _ in range(agree(max(5, min(2_000, int(seconds / 2 / (time.perf_counter() - start)))))):
        start = time.perf_counter()
        for _ in range(10):
            step()
        blocks.append((time.perf_counter() - start) / 10)
    return statistics.median(blocks) * 1e6


def shm(what: str, members: int, nbytes: int, seconds: float) -> float:
    planes = [ShmPlane(64 << 20) for _ in range(members)]
    infos = [plane.open() for plane in planes]  # the heaps are the parent's, each child uses one
    rows = [[i, f"w{i}", os.getpid(), socket.gethostname(), *info.values(), home(), 0] for i, info in enumerate(infos)]

    def child(rank: int) -> float:
        plane = planes[rank]
        plane.world(rows)
        team = {"id": 0, "workers": list(range(members)), "rank": rank, "offset": 16 << 20, "bytes": BUFFER_BYTES}
        channel = {"peer": 1 - rank, "offset": 0, "bytes": SLOT_BYTES, "slots": SLOTS}
        data = np.ones(max(2, nbytes // 4), np.float32)
        outs = [np.empty_like(data) for _ in range(members)]

        def agree(count: int) -> int:
            numbers = [np.zeros(1, np.int64) for _ in range(members)]
            plane.all_gather(team, np.array([count]), numbers)
            return int(numbers[0][0])

        def pair() -> None:
            for side in (0, 1):
                (plane.send if side == rank else plane.recv)(channel, data)

        steps: dict[str, Step] = {
            "pair": pair,
            "all_reduce": lambda: plane.all_reduce(team, data, add),
            "all_gather": lambda: plane.all_gather(team, data, outs),
        }
        data[:] = 0
        return timed(steps[what], agree, seconds)

    try:
        return fork(members, child)
    finally:
        for plane in planes:
            plane.close()


def gloo(what: str, members: int, nbytes: int, seconds: float) -> float:
    import torch
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:

        def child(rank: int) -> float:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=members)
            data = torch.zeros(max(2, nbytes // 4))
            outs = [torch.empty_like(data) for _ in range(members)]

            def agree(count: int) -> int:
                number = torch.tensor([count])
                dist.broadcast(number, 0)
                return int(number)

            def pair() -> None:
                for side in (0, 1):
                    if side == rank:
                        dist.send(data, 1 - rank)
                    else:
                        dist.recv(data, 1 - rank)

            steps: dict[str, Step] = {
                "pair": pair,
                "all_reduce": lambda: dist.all_reduce(data),
                "all_gather": lambda: dist.all_gather(outs, data),
            }
            result = timed(steps[what], agree, seconds)
            agree(0)  # nobody leaves while another still receives
            return result

        return fork(members, child)


def size(nbytes: int) -> str:
    return f"{nbytes} B" if nbytes < KIB else f"{nbytes // KIB} KiB" if nbytes < KIB * KIB else f"{nbytes // KIB // KIB} MiB"


def commit() -> str:
    answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return answer.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="also write the JSON to this file")
    parser.add_argument("--no-gloo", action="store_true", help="leave the rival out")
    parser.add_argument("--seconds", type=float, default=0.4, help="about how long each case runs")
    args = parser.parse_args()
    rows = []
    print(f"{'what':<11}{'members':>8}{'size':>9}{'shm us':>11}{'gloo us':>11}")
    for what, members, nbytes in CASES:
        row: dict[str, Any] = {"what": what, "members": members, "bytes": nbytes, "shm": None, "gloo": None}
        row["shm"] = round(shm(what, members, nbytes, args.seconds), 1)
        if not args.no_gloo:
            row["gloo"] = round(gloo(what, members, nbytes, args.seconds), 1)
        rows.append(row)
        print(f"{what:<11}{members:>8}{size(nbytes):>9}{row['shm']:>11.1f}{row['gloo'] or float('nan'):>11.1f}", flush=True)
    about = {"commit": commit(), "cpus": os.cpu_count(), "machine": platform.processor() or platform.machine()}
    text = json.dumps({**about, "python": platform.python_version(), "rows": rows})
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
