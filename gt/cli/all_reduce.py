"""`python -m gt.cli.all_reduce BYTES` in a job: sends between hosts and all-reduces of 1 KiB to BYTES, with their sums checked.

Each result is a line of JSON: name, success, text.
"""

from __future__ import annotations

import json
import sys
import time

import torch

import gt

KIB = 1 << 10
MAX_TIMES, TOGETHER_BYTES = 32, 256 << 20  # all-reduces, and their bytes, that are timed as one
REPEATS, ABOUT_SECONDS = 3, 20.0  # a size that would take longer than so many seconds is the last


def times_of(nbytes: int, expected: float) -> int:
    """All-reduces that are timed as one, if each takes so many seconds: all repeats together ABOUT_SECONDS at most."""
    most = min(MAX_TIMES, TOGETHER_BYTES // nbytes)
    return max(1, most if expected * REPEATS * most <= ABOUT_SECONDS else int(ABOUT_SECONDS / (expected * REPEATS)))


def measure(workers: int, nbytes: int, expected: float) -> tuple[float, bool]:
    """Seconds of a sum of one row a worker, nearly all of it the all-reduce, and True if its elements are right.

    expected: about so many, from a smaller size.
    """
    count = max(nbytes // 4, 1)
    with gt.signal.context("all"):
        ranks = torch.arange(1, workers + 1, device=gt.device).view(-1, 1)
        rows = torch.ones(workers, count, device=gt.device) * ranks
    wanted, best = workers * (workers + 1) / 2, float("inf")
    times = times_of(nbytes, expected)
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


def main(most: int) -> int:
    gt.connect("env")
    workers = len(gt.stats()["workers"])
    gt.connect("env", config={"all": {"workers": list(range(workers))}})
    planes = sorted({str(worker["transport"]) for worker in gt.stats()["workers"]})
    print(json.dumps(["workers", True, f"{workers} connected, transport {', '.join(planes)}"]), flush=True)
    nbytes, good, seconds = KIB, True, 0.0
    while workers > 1 and nbytes <= most and good:
        seconds, good = measure(workers, nbytes, seconds * 4)
        rate = nbytes / seconds / 1e9
        size = f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
        text = f"{size:>8} in {seconds * 1e3:9.3f} ms, algbw {rate:7.3f}, busbw {rate * 2 * (workers - 1) / workers:7.3f} GB/s"
        print(json.dumps(["all-reduce", good, text if good else f"{text}: WRONG SUM"]), flush=True)
        nbytes *= 4
        if seconds * 4 * REPEATS > ABOUT_SECONDS:
            break
    return int(not good)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
