"""Time of training steps beside an asynchronous gt.save, in pairs with steps without one, in the same run.

`python benchmarks/bench_checkpoint.py [--gpu] [--workers N] [--width N] [--rounds N] [--json FILE]`. Each round has steps
without a save, then steps from the call of gt.save(wait=False) until its checkpoint is on disk. The time of the call counts.
The figure is the time of a step beside a save over that without, the median of all rounds; the bar is 1.1. Where all cores are
busy, steps lose the CPU time of the save, whatever its priority. So that time is told too: of the program, the server and the
workers beyond that of their steps, over the CPU time of a plain copy and write of as many bytes in the same round.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

BAR = 1.1
LAYERS, ROWS = 4, 512
MIN_STEPS, PLAIN_STEPS, WARM_STEPS = 1, 6, 4


def training(width: int, rows: int) -> tuple[Callable[[], float], dict[str, Any], int]:
    """A step that waits for its loss, the state, and its bytes."""
    import torch
    from torch import nn

    import gt

    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers).to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(rows, width).to("remote")

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    nbytes = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    return lambda: float(step(x)), {"model": model, "optimizer": optimizer}, nbytes


def timed(step: Callable[[], float]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def cpu_seconds() -> float:
    """CPU time of all threads of this process and of its descendants: the server and the workers."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    tasks = [task for pid in ours for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def copied_and_written(nbytes: int, folder: Path) -> float:
    """CPU seconds of the least work that a save could be: a copy in memory, and a write of it to a file with room."""
    import numpy as np

    source, memory = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        start = time.thread_time()
        np.copyto(memory, source)
        for at in range(0, nbytes, 8 << 20):
            os.pwrite(file.fileno(), memory[at : at + (8 << 20)].data, at)
        os.fsync(file.fileno())
        return time.thread_time() - start


def round_of(step: Callable[[], float], state: dict[str, Any], path: Path, nbytes: int) -> dict[str, float]:
    """Seconds of a step without a save and beside one, of the call, and of the whole save; CPU seconds of it."""
    import gt

    least = copied_and_written(nbytes, path.parent)
    before = cpu_seconds()
    plain = [timed(step) for _ in range(PLAIN_STEPS)]
    cpu_of_step = (cpu_seconds() - before) / PLAIN_STEPS
    before = cpu_seconds()
    start = time.perf_counter()
    handle = gt.save(state, path, wait=False)
    called = time.perf_counter() - start
    beside = []
    while not handle.done or len(beside) < MIN_STEPS:
        beside.append(timed(step))
    whole = time.perf_counter() - start
    handle.wait()
    cpu = cpu_seconds() - before - len(beside) * cpu_of_step
    base = statistics.median(plain)
    return {
        "plain": base, "beside": statistics.median(beside), "call": called, "save": whole, "steps": len(beside),
        "slowest": max(beside), "ratio": statistics.median(beside) / base, "with_call": whole / len(beside) / base,
        "lost": whole - len(beside) * base, "cpu_of_save": cpu, "cpu_of_copy_and_write": least, "cpu_ratio": cpu / least,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_checkpoint", description=__doc__)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default=None, help="a folder on the disk to measure")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import machine
    import torch

    import gt

    torch.set_num_threads(1)
    config = f"gt: {{data_parallel: {[*range(args.workers)]}, zero: 3}}" if args.workers > 1 else ""
    gt.gpu_workers(args.workers, config=config) if args.gpu else gt.cpu_workers(args.workers, config=config)
    step, state, nbytes = training(args.width, args.rows)
    for _ in range(WARM_STEPS):
        step()
    folder = Path(tempfile.mkdtemp(prefix="gt-bench-", dir=args.folder))
    try:
        gt.save(state, folder / "c")
        rows = [round_of(step, state, folder / "c", nbytes) for _ in range(args.rounds)]
    finally:
        shutil.rmtree(folder)
        gt.shutdown()
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    print(f"state {nbytes / 1e6:.0f} MB, {args.workers} {'GPU' if args.gpu else 'CPU'} workers, {args.rounds} rounds, medians")
    for key, value in medians.items():
        unit = "" if key in ("ratio", "with_call", "steps", "cpu_ratio") else " s"
        print(f"  {key:22} {value:8.4f}{unit}{f'  (at most {BAR})' if key == 'ratio' else ''}")
    machine.tell("benchmarks/bench_checkpoint.py", {"bytes": nbytes, "medians": medians, "rounds": rows}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
