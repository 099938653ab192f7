"""The cost of GT on top of torch: issue, throughput, fetch and start, with plain torch beside it in the same run.

`python benchmarks/bench_dispatch.py [--json FILE] [--only one|eight|start|begin]`. Prints a table and one line of JSON. Each
section runs in a fresh process. Times are medians; a workload is repeated until it has run for a while.
"""

from __future__ import annotations

import argparse
import compileall
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from machine import about, tell  # noqa: E402

# figure -> (unit, limit, goal); limits are what must hold on two cores, "at least" where the unit is a rate
LIMITS = {
    "issue add": ("us", 15, 8),
    "issue add_": ("us", 15, 8),
    "issue add, with grad": ("us", 15, 8),
    "issue view": ("us", 15, 8),
    "issue slice": ("us", 15, 8),
    "issue add, in torch's own adds": ("", 6, 4),
    "issue add_, in torch's own adds": ("", 6, 4),
    "issue add, with grad, in torch's own adds": ("", 6, 4),
    "issue view, in torch's own adds": ("", 6, 4),
    "issue slice, in torch's own adds": ("", 6, 4),
    "issue of 1,000 ops in a row, in torch's own adds": ("", 6, 4),
    "  CPU time of the program's thread, in torch's own adds": ("", 6, 4),
    "GPT step, forward": ("us/op", 20, None),
    "GPT step, backward": ("us/op", 20, None),
    "GPT step, optimizer": ("us/op", None, None),
    "GPT step, all": ("us/op", 20, None),
    "GPT step, ops": ("ops", None, None),
    "GPT step, with its loss": ("ms", None, None),
    "chain of 10,000, one worker": ("ops/s", 25_000, 50_000),
    "chain of 10,000, eight workers in one group": ("ops/s", 3_000, None),
    "fetch a scalar": ("ms", 0.6, None),
    "empty message and back": ("ms", None, None),
    "awaited step of 8 ops": ("ms", None, None),
    "  over its compute, in empty messages": ("", 2, None),
    "awaited replay of these 8 ops": ("ms", None, None),
    "  its time over its compute": ("ms", None, None),
    "  the same, in empty messages": ("", 2, None),
    "start eight workers, first result": ("s", 4, None),
    "  of which import torch": ("s", None, None),
    "start one worker, first result, in imports of torch": ("", 1.5, None),
    "  CPU time of all processes, in imports of torch": ("", 2.3, None),
}


def median_us(run: Callable[[], Any], inner: int, settle: Callable[[], Any], blocks: int = 60) -> float:
    """Median over blocks of the time of one call, in us; `settle` waits for the workers between blocks, untimed."""
    times = []
    for _ in range(blocks):
        start = time.perf_counter()
        for _ in range(inner):
            run()
        times.append((time.perf_counter() - start) / inner * 1e6)
        settle()
    return statistics.median(times[blocks // 10 :])


def issue_cases(device: str) -> tuple[dict[str, Callable[[], Any]], Callable[[], None]]:
    """Small ops by name of figure, and a wait for the workers."""
    import torch

    x, y = torch.ones(4, 4, device=device), torch.ones(4, 4, device=device)
    w = torch.ones(4, 4, device=device, requires_grad=True)

    def settle() -> None:
        (x[0, 0] + y[0, 0]).item()

    cases: dict[str, Callable[[], Any]] = {
        "issue add": lambda: x + y,
        "issue add_": lambda: y.add_(x, alpha=1e-6),
        "issue add, with grad": lambda: w + x,
        "issue view": lambda: x.view(16),
        "issue slice": lambda: x[1:3],
    }
    return cases, settle


def issue(device: str) -> dict[str, float]:
    """Time in the user's thread of one small op."""
    cases, settle = issue_cases(device)
    return {name: median_us(run, 100, settle) for name, run in cases.items()}


def issue_in_adds(device: str) -> dict[str, float]:
    """Time of small ops over that of torch's own add, which take turns: other work on the machine meets all of them.

    100 of a kind after a wait, and 1,000 of all kinds, which wait for whatever else runs on these cores. The latter also in CPU
    time of the program's thread.
    """
    import torch

    if device != "remote":
        return {}
    cases, settle = issue_cases(device)
    host = torch.ones(4, 4)
    mixed = "issue of 1,000 ops in a row"

    def spent(runs: list[Callable[[], Any]]) -> tuple[float, float]:
        """Wall and CPU time of one call."""
        wall, cpu = time.perf_counter(), time.thread_time()
        for run in runs:
            run()
        times = (time.perf_counter() - wall) / len(runs), (time.thread_time() - cpu) / len(runs)
        settle()
        return times

    blocks = {name: [run] * 100 for name, run in cases.items()} | {mixed: [*cases.values()] * 200}
    ratios: dict[str, list[float]] = {}
    for _ in range(60):
        add_wall, add_cpu = spent([lambda: host + host] * 1000)
        for name, runs in blocks.items():
            wall, cpu = spent(runs)
            ratios.setdefault(f"{name}, in torch's own adds", []).append(wall / add_wall)
            if name == mixed:
                ratios.setdefault("  CPU time of the program's thread, in torch's own adds", []).append(cpu / add_cpu)
    return {name: statistics.median(column[6:]) for name, column in ratios.items()}


def counter(device: str) -> Callable[[], int]:
    """Ops so far: what GT's client recorded, or what torch dispatched."""
    from torch.utils._python_dispatch import TorchDispatchMode

    import gt

    if device == "remote":
        return lambda: gt.stats()["client"]["ops"]

    class Count(TorchDispatchMode):
        ops = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops += 1
            return func(*args, **(kwargs or {}))

    mode = Count()
    mode.__enter__()
    return lambda: mode.ops


def gpt_step(device: str) -> dict[str, float]:
    """Time in the user's thread of the parts of a GPT's training step, over the number of their ops."""
    import torch

    sys.path.insert(0, str(ROOT / "examples" / "tuning_demo"))
    from model import PRESETS, MiniGPT

    torch.manual_seed(0)
    model = MiniGPT({**PRESETS["tiny"], "num_layers": 6}).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(256, (2, 32)).to(device)

    def step(mark: Callable[[], float]) -> list[float]:
        """Differences of `mark` over forward, backward, optimizer, and the wait for the loss."""
        marks = [mark()]
        loss = model(tokens, tokens)
        marks.append(mark())
        loss.backward()
        marks.append(mark())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(mark())
        loss.item()
        marks.append(mark())
        return [after - before for before, after in itertools.pairwise(marks)]

    for _ in range(4):
        step(time.perf_counter)
    rows = [step(time.perf_counter) for _ in range(20)]
    parts = [statistics.median(column) for column in zip(*rows, strict=True)]
    ops = step(counter(device))
    names = ("GPT step, forward", "GPT step, backward", "GPT step, optimizer")
    return {
        **{name: seconds / n * 1e6 for name, seconds, n in zip(names, parts, ops, strict=False)},
        "GPT step, all": sum(parts[:3]) / sum(ops[:3]) * 1e6,
        "GPT step, ops": sum(ops[:3]),
        "GPT step, with its loss": statistics.median(map(sum, rows)) * 1e3,
    }


def chain(device: str, name: str, n: int = 10_000) -> dict[str, float]:
    """Ops a second of a chain of n dependent small ops, until its value is here."""
    import torch

    def once() -> float:
        x = torch.ones(4, 4, device=device)
        start = time.perf_counter()
        for _ in range(n // 2):
            x = x + 1.0
            x = x * 0.5
        x.sum().item()
        return n / (time.perf_counter() - start)

    once()
    return {name: statistics.median([once() for _ in range(5)])}


def fetch(device: str) -> dict[str, float]:
    """Milliseconds until a ready scalar is a Python number."""
    import torch

    x = torch.ones((), device=device)
    x.item()
    return {"fetch a scalar": median_us(x.item, 10, lambda: None) / 1e3}


def awaited(device: str) -> dict[str, float]:
    """Milliseconds of a small step whose value is read, op by op and as a replay, beside a message that asks for nothing.

    The four take turns, so that other work on the machine meets all of them.
    """
    import torch

    import gt

    def step(x: Any) -> Any:
        y = (x * 0.5 + 1.0) * x - x
        return (y.relu() @ x).exp().sum()

    x, host = torch.ones(8, 8, device=device), torch.ones(8, 8)
    if device != "remote":
        return {"awaited step of 8 ops": median_us(lambda: step(x).item(), 10, lambda: None) / 1e3}
    captured = gt.compile(step)
    for _ in range(4):
        captured(x).item()
    runs = [torch.remote.synchronize, lambda: step(x).item(), lambda: captured(x).item(), lambda: step(host).item()]
    rows = [[median_us(run, 10, lambda: None, blocks=1) / 1e3 for run in runs] for _ in range(100)]
    empty, whole, replay, compute = (statistics.median(column[10:]) for column in zip(*rows, strict=True))
    return {
        "empty message and back": empty,
        "awaited step of 8 ops": whole,
        "  over its compute, in empty messages": (whole - compute) / empty,
        "awaited replay of these 8 ops": replay,
        "  its time over its compute": replay - compute,
        "  the same, in empty messages": (replay - compute) / empty,
    }


def one(device: str) -> dict[str, float]:
    import torch

    import gt

    torch.set_num_threads(1)  # a worker's idle second thread would spin on the core that the client needs
    if device == "remote":
        gt.cpu_workers(1)
    measured = {**issue(device), **issue_in_adds(device), **chain(device, "chain of 10,000, one worker")}
    measured.update(fetch(device) | awaited(device))
    measured.update(gpt_step(device))  # last: its counting slows what follows
    if device == "remote":
        gt.shutdown()
    return measured


def eight(device: str) -> dict[str, float]:
    name = "chain of 10,000, eight workers in one group"
    if device != "remote":
        return chain(device, name)
    os.environ["GT_CONFIG"] = str(ROOT / "configs" / "tp8.yaml")
    import gt

    gt.cpu_workers(8)
    with gt.signal.context("pp_stage0"):
        measured = chain(device, name)
    gt.shutdown()
    return measured


def start(device: str) -> dict[str, float]:
    begin = time.perf_counter()
    import torch

    imported = time.perf_counter()
    import gt

    if device == "remote":
        gt.cpu_workers(8)
    torch.ones((), device=device).add(1).item()
    end = time.perf_counter()
    gt.shutdown()
    return {"start eight workers, first result": end - begin, "  of which import torch": imported - begin}


def begin(device: str) -> dict[str, float]:
    """Wall and CPU time from the start of a program to its first value, over those of the import of torch in it."""
    if device != "remote":
        return {}
    start = time.perf_counter()
    import torch

    wall, cpu = time.perf_counter() - start, time.process_time()
    import gt

    gt.cpu_workers(1)
    torch.ones((), device=device).add(1).item()
    end = time.perf_counter() - start
    gt.shutdown()  # waits for the processes, whose CPU time counts from then on
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + children.ru_utime + children.ru_stime
    return {
        "start one worker, first result, in imports of torch": end / wall,
        "  CPU time of all processes, in imports of torch": total / cpu,
    }


SECTIONS = {"one": one, "eight": eight, "start": start, "begin": begin}


def measure(section: str, device: str) -> dict[str, float]:
    """One section in a process of its own."""
    command = [sys.executable, __file__, "--section", section, "--device", device]
    env = {key: value for key, value in os.environ.items() if not key.startswith("GT_")}
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


def machine() -> dict[str, Any]:
    """Commit, hardware and command, without which a figure means nothing."""
    return about("benchmarks/bench_dispatch.py")


def table(figures: dict[str, dict[str, float]]) -> str:
    lines = [f"{'':55s} {'GT':>10s} {'plain torch':>12s} {'limit':>8s} {'goal':>8s}"]
    for name, (unit, limit, goal) in LIMITS.items():
        if name not in figures["remote"]:
            continue
        got, plain = figures["remote"][name], figures["cpu"].get(name)
        digits = 0 if unit in ("ops/s", "ops") else 2
        over = limit is not None and (got < limit if unit == "ops/s" else got > limit)
        cells = [f"{got:.{digits}f}", "" if plain is None else f"{plain:.{digits}f}", str(limit or ""), str(goal or "")]
        times = f"{got / plain:7.1f}x" if plain and unit in ("us", "us/op") else ""
        row = "{:55s} {:>10s} {:>12s} {:>8s} {:>8s}".format(f"{name} ({unit})" if unit else name, *cells) + times
        lines.append(row + ("  OVER" if over else ""))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="remote", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.section:
        print(json.dumps(SECTIONS[args.section](args.device)))
        return 0
    compileall.compile_dir(ROOT / "gt", quiet=1)  # as in an installed package, such as torch's; an editable one may have none
    figures: dict[str, dict[str, float]] = {"remote": {}, "cpu": {}}
    for section in [args.only] if args.only else SECTIONS:
        for device in figures:
            figures[device].update(measure(section, device))
    print(table(figures))
    tell("benchmarks/bench_dispatch.py", {"figures": figures}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
