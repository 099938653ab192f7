"""`python -m tests.stress.starve [--gib N]`: how long another client's eager steps take while one uploads, as JSON.

The uploader is a process of its own; both use the same worker.
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gt.client.session import Session
from gt.ir.spec import contiguous
from gt.ir.template import Out, T, Template
from gt.launch import local
from tests.helpers.streams import Stream

CLOCK_OF_PROCESS = 2  # CPUCLOCK_SCHED: the kernel's number of a process's CPU time, in nanoseconds
PART = 128 << 20  # bytes of one tensor
SPEC = contiguous((PART // 4,), "float32")
ONE = contiguous((), "float32")
TEMPLATES = [
    [16, Template("gt.upload.default", (), (), (), 1, (Out("new", SPEC),)).wire()],
    [17, Template("aten.select.int", (T(0), 0, 0), (), (SPEC,), 0, (Out("view", ONE, 0),)).wire()],
    [18, Template("aten.neg.default", (T(0),), (), (ONE,), 0, (Out("new", ONE),)).wire()],
]  # a use that takes no time of its own


def upload(address: str, parts: int) -> None:
    """Upload so many host copies and use each; prints when it begins and how long it took."""
    session = Session(address)  # its secret is in this user's folder
    arrays = [np.full(PART // 4, n + 1, np.float32) for n in range(parts)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    start = time.monotonic()
    for n, array in enumerate(arrays):
        first = 3 * n + 1
        session.keep(first, array)
        code = [16, 0, -1, first, 17, 0, first, first + 1, 18, 0, first + 1, first + 2, 0, 2, first, first + 1]
        session.submit(TEMPLATES if n == 0 else [], [], code)
    for n in range(parts):
        assert session.fetch(3 * n + 3)[2].view("f4")[0] == -(n + 1)
    sys.stdout.write(f"{time.monotonic() - start}\n")
    session.close()


def measure(address: str, token: str, parts: int, pids: Sequence[int] = ()) -> dict[str, Any]:
    """Round trips of a client that does ten ops and waits for a value, before and during the uploads of another.

    pids: processes of the server, whose CPU time is told: what they do in a round trip, whatever else the machine does.
    """
    eager = Stream(address, token=token)
    command = [sys.executable, "-m", "tests.stress.starve", "--upload", address, "--parts", str(parts)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline() == "ready\n"
        alone, _ = trips(eager, lambda: len(eager_times) < 300, eager_times := [])
        process.stdin.write("go\n")
        process.stdin.flush()
        done = process.stdout
        during, work = trips(eager, lambda: not select.select([done], [], [], 0)[0], [], pids)
        seconds = float(done.readline())
    finally:
        process.kill()
        process.communicate()
    eager.session.close()
    return {
        "uploaded_mib": parts * PART >> 20,
        "upload_mb_s": round(parts * PART / 1e6 / seconds),
        "round_trips": len(during),
        "alone_p50_ms": at(alone, 0.5),
        "alone_p99_ms": at(alone, 0.99),
        "during_p50_ms": at(during, 0.5),
        "during_p99_ms": at(during, 0.99),
        "during_max_ms": at(during, 1.0),
        "during_work_p99_ms": at(work, 0.99),
    }


def trips(
    eager: Stream, going: Callable[[], bool], times: list[float], pids: Sequence[int] = ()
) -> tuple[list[float], list[float]]:
    """Seconds of each round trip, and of the CPU time of these processes in each, sorted."""
    work: list[float] = []
    while going():
        start, before = time.perf_counter(), cpu_seconds(pids)
        eager.random_ops(10)
        eager.check()
        times.append(time.perf_counter() - start)
        work.append(cpu_seconds(pids) - before)
    return sorted(times), sorted(work)


def cpu_seconds(pids: Sequence[int]) -> float:
    return sum(time.clock_gettime((~pid << 3) | CLOCK_OF_PROCESS) for pid in pids)


def at(times: list[float], share: float) -> float:
    return round(times[min(int(len(times) * share), len(times) - 1)] * 1e3, 2) if times else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.stress.starve", description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--upload", default="")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--backend", default="torch")
    args = parser.parse_args()
    if args.upload:
        upload(args.upload, args.parts)
        return 0
    started = local.start(1, backend=args.backend)
    try:
        sys.stdout.write(json.dumps(measure(started.address, started.token, int(args.gib * (1 << 30)) // PART)) + "\n")
    finally:
        started.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
