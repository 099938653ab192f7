"""The cost of a step that reads its loss: each op by itself, and in fragments (`gt.compile`), in alternating calls of one run.

`python benchmarks/bench_fragments.py [--workers 1,2] [--rounds N]`. Prints a table and one line of JSON. Times are of one
awaited step, the least of all rounds; CPU time is of dispatcher and workers, of all rounds. Each has one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

WARM_CALLS, CALLS = 8, 10  # before the first round, and in a round
TICKS = os.sysconf("SC_CLK_TCK")


def chain(width: int) -> Callable[[Any], float]:
    """400 pointwise ops on few numbers, and one read."""
    import torch

    weight = torch.ones(width, width, device="remote")

    def step(x: Any) -> float:
        for _ in range(200):
            x = (x + weight) * 0.5
        return x.sum().item()

    return step


def training(width: int) -> Callable[[Any], float]:
    """A step of a narrow, deep network with SGD: forward, backward, update, and the loss."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(12)]
    model = torch.nn.Sequential(*layers).to("remote")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)

    def step(x: Any) -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


STEPS: dict[str, Callable[[int], Callable[[Any], float]]] = {"chain of 400 ops": chain, "12 layers, SGD": training}


def others_cpu() -> float:
    """CPU seconds of the dispatcher and the workers, which are below this process."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(entry)], spent[int(entry)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS

    def below(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return sum(seconds for pid, seconds in spent.items() if pid != os.getpid() and below(pid))


def measure(make: Callable[[int], Callable[[Any], float]], rounds: int) -> dict[str, Any]:
    """Milliseconds and CPU milliseconds of a step, op by op and in fragments, and the share that programs carry."""
    import torch

    import gt

    x = torch.ones(16, 16).to("remote")
    runs = {"op by op": make(16), "fragments": gt.compile(make(16))}
    least, cpu = dict.fromkeys(runs, float("inf")), dict.fromkeys(runs, 0.0)
    for run in runs.values():
        for _ in range(WARM_CALLS):
            run(x)
    for _ in range(rounds):
        for name, run in runs.items():
            before = others_cpu()
            for _ in range(CALLS):
                start = time.perf_counter()
                run(x)
                least[name] = min(least[name], time.perf_counter() - start)
            cpu[name] += others_cpu() - before
    share = re.search(r"programs carry (\d+)%", runs["fragments"].explain())  # type: ignore[attr-defined]
    return {
        "ms": {name: round(1e3 * seconds, 3) for name, seconds in least.items()},
        "cpu_ms": {name: round(1e3 * seconds / rounds / CALLS, 3) for name, seconds in cpu.items()},
        "carried_percent": int(share[1]) if share else 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1", help="numbers of workers, such as 1,2; several get data-parallel steps")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    import torch

    import gt

    torch.set_num_threads(1)  # of the workers too
    results: dict[str, Any] = {}
    for workers in map(int, options.workers.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "config.yaml"
            config.write_text(f"data: {{shard: {{axis: 0, workers: {list(range(workers))}}}}}")
            gt.cpu_workers(workers, config=str(config) if workers > 1 else None)
        for name, make in STEPS.items():
            with gt.signal.context("data") if workers > 1 else nullcontext():
                row = results[f"{name}, {workers} workers"] = measure(make, options.rounds)
            ms, cpu = row["ms"], row["cpu_ms"]
            times = f"{ms['op by op']:7.2f} ms op by op, {ms['fragments']:7.2f} ms in fragments"
            gain = f"{ms['op by op'] / ms['fragments']:.2f}x"
            others = f"CPU of the others {cpu['op by op']:.2f} and {cpu['fragments']:.2f} ms"
            print(f"{name:20} {workers} workers: {times} ({gain}); {others}; {row['carried_percent']}% carried")
        gt.shutdown()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
