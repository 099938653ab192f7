"""Host tensors to and from one GPU: a batch by `.to("remote")` and a value by `.cpu()`, beside native torch, in milliseconds.

`python benchmarks/gpu/bench_host.py [--mb 77] [--rounds 20]`. Prints a table and one line of JSON. "step, new batch" uploads a
batch at each step and computes with it; "step, same batch" computes with one that is on the device: where they are equal, the
copy is hidden. Native torch copies from pinned and from pageable memory, with non_blocking=True. A whole model:
`bench_models.py --models resnet50 --host`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

MATMULS = 12


def median(call: Callable[[], Any], rounds: int) -> float:
    """Milliseconds of a call, after three that do not count."""
    times = []
    for _ in range(rounds + 3):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[3:])


def figures(host: torch.Tensor, device: str, rounds: int) -> dict[str, float]:
    weight = torch.eye(host.shape[1], device=device)
    held = host.to(device)
    held[:1].mul_(1)

    def compute(x: torch.Tensor) -> torch.Tensor:
        for _ in range(MATMULS):
            x = x @ weight
        return x[0, 0]

    def upload() -> None:
        x = host.to(device, non_blocking=True)
        x[:1].mul_(1)
        x[-1, -1].item()

    def steps(fresh: bool) -> float:
        start = time.perf_counter()
        last = [compute(host.to(device, non_blocking=True) if fresh else held) for _ in range(rounds)][-1]
        last.item()
        return (time.perf_counter() - start) * 1e3 / rounds

    seconds = {"upload": median(upload, rounds), "fetch": median(lambda: held.cpu(), rounds)}
    for name, fresh in (("step, new batch", True), ("step, same batch", False)):
        steps(fresh)
        seconds[name] = statistics.median(steps(fresh) for _ in range(5))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=77.0)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    columns = 2048
    rows = int(args.mb * 1e6 / 4 / columns)
    host = torch.randn(rows, columns)
    copy = torch.empty_like(host)
    report: dict[str, dict[str, float]] = {"memcpy": {"copy": median(lambda: copy.copy_(host), args.rounds)}}
    if torch.cuda.is_available():
        report["native, pinned"] = figures(host.pin_memory(), "cuda", args.rounds)
        report["native, pageable"] = figures(host, "cuda", args.rounds)
        torch.cuda.empty_cache()
    import gt

    gt.gpu_workers(1, name=False)
    report["GT"] = figures(host, str(gt.device), args.rounds)
    report["GT"]["bytes shared"] = gt.stats()["dispatcher"]["tensor_bytes_shared"]
    gt.shutdown()
    for name, row in report.items():
        print(f"{name:18s}" + "".join(f"  {key} {value:.2f}" for key, value in row.items()))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(json.dumps({"MB": host.nbytes / 1e6, "device": device, **report}))


if __name__ == "__main__":
    main()
