"""The cost of an observer: the same program with and without one, in turns. CPU time is counted in the processes themselves.

`python benchmarks/bench_observe.py [--seconds 4] [--rounds 5] [--json FILE]`. Prints a table and one line of JSON. The observer
is a process of its own, as `gt top` is; its own CPU time is reported apart. Of the rounds the median counts. Between two busy
parts the program does nothing: what all processes then use more, by the number of looks, is the cost of a look without the
noise of a busy run. Looks of the busy parts are counted, after the first few, which follow each other at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from machine import tell  # noqa: E402

TENSORS = 500  # that are alive
OPS = 2000  # of a chain, between two waits
WATCH = """
import sys
from gt.observe.record_stream import RecordStream
with RecordStream(sys.argv[1], sys.argv[2]) as stream:
    for _ in range(8):
        stream.next()
    print("ready", flush=True)
    while True:
        stream.next()
        with open(sys.argv[3], "a") as file:  # a byte for each look
            file.write(".")
"""
LIMITS = {"cpu": 1.0}  # percent that an observer may add to the CPU time of an op


def cpu_seconds(pid: int) -> float:
    """CPU time of one process, exact to a nanosecond where the kernel counts so."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9 + sum(
            int((task / "schedstat").read_text().split()[0]) / 1e9
            for task in Path(f"/proc/{pid}/task").iterdir()
            if task.name != str(pid)
        )
    except OSError:
        return 0.0


def family(pid: int, without: int) -> list[int]:
    """A process and its descendants, but for one."""
    pids = [pid]
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            if child != without:
                pids += family(child, without)
    return pids


def spend(seconds: float, observer: int) -> tuple[float, float, float]:
    """Microseconds of CPU time of all processes for an op, microseconds of wall time, and seconds of the observer."""
    import torch

    x = torch.ones(8, device="remote")
    pids = family(os.getpid(), observer)
    began, watched = sum(map(cpu_seconds, pids)), cpu_seconds(observer) if observer else 0.0
    start, ops = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(OPS):
            x = x + 1
        x.sum().item()
        ops += OPS
    wall = time.perf_counter() - start
    used = sum(map(cpu_seconds, pids)) - began
    return used / ops * 1e6, wall / ops * 1e6, (cpu_seconds(observer) - watched if observer else 0.0)


def idle(seconds: float, observer: int) -> float:
    """CPU seconds of all processes in a second in which the program does nothing."""
    pids = family(os.getpid(), observer)
    began, start = sum(map(cpu_seconds, pids)), time.perf_counter()
    time.sleep(seconds)
    return (sum(map(cpu_seconds, pids)) - began) / (time.perf_counter() - start)


def looks(path: str) -> int:
    return Path(path).stat().st_size


def measure(seconds: float, rounds: int, file: str) -> dict[str, Any]:
    """file: an empty one, for the observer."""
    import torch

    import gt
    from gt.api import _Started

    gt.cpu_workers(2)
    local = _Started.local
    held = [torch.ones(8, device="remote") + n for n in range(TENSORS)]  # workers count them for an observer
    spend(seconds / 2, 0)  # until everything is loaded
    rows: dict[str, list] = {"alone": [], "observed": []}
    rates: dict[str, list[float]] = {"busy": [], "idle": []}  # looks a second
    still: dict[str, list[float]] = {"alone": [], "observed": []}
    for n in range(2 * rounds):
        watched = (n % 2 == 1) ^ (n // 2 % 2 == 1)  # A B B A
        observer = None
        if watched:
            observer = subprocess.Popen(
                [sys.executable, "-c", WATCH, local.address, local.token, file], stdout=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            assert observer.stdout is not None and observer.stdout.readline().strip() == "ready"
        try:
            kind, pid = "observed" if watched else "alone", observer.pid if observer else 0
            before = looks(file)
            rows[kind].append(spend(seconds, pid))
            between = looks(file)
            still[kind].append(idle(seconds, pid))
            if watched:
                rates["busy"].append((between - before) / seconds)
                rates["idle"].append((looks(file) - between) / seconds)
        finally:
            if observer is not None:
                observer.kill()
                observer.communicate()
    assert len(held) == TENSORS
    gt.shutdown()
    middle = {key: [statistics.median(column) for column in zip(*values, strict=True)] for key, values in rows.items()}
    pairs = [b[0] / a[0] - 1 for a, b in zip(rows["alone"], rows["observed"], strict=True)]
    resting = {key: statistics.median(values) for key, values in still.items()}
    busy = middle["alone"][0] / middle["alone"][1]  # cores that the run keeps busy
    rate = {key: statistics.mean(values) for key, values in rates.items()}
    a_look = (resting["observed"] - resting["alone"]) / max(rate["idle"], 1e-9)
    return {
        "cpu us/op alone": round(middle["alone"][0], 3),
        "cpu us/op observed": round(middle["observed"][0], 3),
        "wall us/op alone": round(middle["alone"][1], 3),
        "wall us/op observed": round(middle["observed"][1], 3),
        "busy: cpu more by round, percent": [round(100 * pair, 2) for pair in pairs],
        "idle: cpu alone, percent of a core": round(100 * resting["alone"], 3),
        "idle: cpu observed, percent of a core": round(100 * resting["observed"], 3),
        "looks a second: busy, idle": [round(rate["busy"], 3), round(rate["idle"], 3)],
        "cpu of a look, ms": round(1e3 * a_look, 3),
        "observing, percent of the run's cpu": round(100 * a_look * rate["busy"] / busy, 3),
        "observer, percent of one core": round(100 * middle["observed"][2] / seconds, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each part of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the result here too")
    given = parser.parse_args()
    with tempfile.NamedTemporaryFile() as file:
        figures = measure(given.seconds, given.rounds, file.name)
    for name, value in figures.items():
        print(f"{name:40} {value}")
    tell("bench_observe.py", {"figures": figures, "limits": LIMITS}, given.json)
    return int(figures["observing, percent of the run's cpu"] >= LIMITS["cpu"])


if __name__ == "__main__":
    sys.exit(main())
