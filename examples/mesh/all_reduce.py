"""Connectivity and all-reduce over all workers of a job: `srun gt run examples/mesh/all_reduce.py`, or under any launcher.

Every pair sends a tensor both ways. Then all workers add up tensors of 1 KiB to --most bytes, and each sum is checked.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import gt

KIB, GIB = 1 << 10, 1 << 30
REPEATS = 3


def connect() -> int:
    """Join the job, with a group of all workers and one of each; the number of workers."""
    gt.connect("env")
    names = [worker["name"] for worker in gt.stats()["workers"]]
    groups = {f"one{n}": {"workers": [n]} for n in range(len(names))}
    gt.connect("env", config={"all": {"workers": list(range(len(names)))}, **groups})
    return len(names)


def pair(source: int, target: int, count: int = 256 * KIB) -> tuple[float, bool]:
    """Seconds for a tensor of `count` floats from one worker to another, and True if its sum is right."""
    with gt.signal.context(f"one{source}"):
        sent = torch.full((count,), 2.0, device=gt.device) * 1
        sent[:1].sum().item()
    begin = time.perf_counter()
    with gt.signal.context(f"one{target}"):
        total = sent.sum()
    value = total.item()
    return time.perf_counter() - begin, value == 2.0 * count


def all_reduce(workers: int, nbytes: int) -> tuple[float, bool]:
    """Seconds of a sum of one row a worker, nearly all of it the all-reduce, and True if its elements are right."""
    count = max(nbytes // 4, 1)
    with gt.signal.context("all"):
        ranks = torch.arange(1, workers + 1, device=gt.device).view(-1, 1)
        rows = torch.ones(workers, count, device=gt.device) * ranks
    wanted, best, times = workers * (workers + 1) / 2, float("inf"), max(1, min(32, (256 << 20) // nbytes))
    for _ in range(REPEATS):
        torch.remote.synchronize()
        begin = time.perf_counter()
        with gt.signal.context("all"):
            for _ in range(times):
                total = torch.relu(rows.sum(0))  # relu wants the whole sum, so it is reduced here
        torch.remote.synchronize()
        best = min(best, (time.perf_counter() - begin) / times)
        if [total.amax().item(), total.amin().item()] != [wanted, wanted]:
            return best, False
    return best, True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--most", type=int, default=GIB, metavar="BYTES", help=f"of the largest all-reduce; default: {GIB}, 1 GiB"
    )
    args = parser.parse_args()
    workers, good = connect(), True
    for index, worker in enumerate(gt.stats()["workers"]):
        print(f"worker {index} is {worker['name']}, transport {worker['transport']}")
    for a in range(workers):
        for b in range(workers):
            if a != b:
                seconds, right = pair(a, b)
                good &= right
                print(f"{a} -> {b}: 1 MiB in {seconds * 1e3:.2f} ms, {'right' if right else 'WRONG'}", flush=True)
    print(f"{'bytes':>12}{'ms':>12}{'algbw GB/s':>12}{'busbw GB/s':>12}  sum")
    nbytes = KIB
    while nbytes <= args.most and workers > 1:
        seconds, right = all_reduce(workers, nbytes)
        good &= right
        rate = nbytes / seconds / 1e9
        bus = rate * 2 * (workers - 1) / workers
        print(f"{nbytes:12}{seconds * 1e3:12.3f}{rate:12.3f}{bus:12.3f}  {'right' if right else 'WRONG'}", flush=True)
        nbytes *= 4
    print("ok" if good else "fails: a sum is wrong")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
